"""Checks of this installation: versions, devices, backends, and a small test of each device, as plain data.

Nothing is downloaded, and the state of the random number generators does not change.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import __version__, budget
from .engines.backend import Backend
from .engines.backends import BACKENDS
from .errors import REMEDIES
from .functional import attention, why
from .nn.multihead import MultiHeadAttention

EXTRAS = {  # library -> what it is for
    "typer": "the headwise command",
    "rich": "tables in the terminal",
    "matplotlib": "pictures",
    "transformers": "models of the Hugging Face hub",
    "safetensors": "files of models and of measured heads",
    "tokenizers": "the tokenizer of the built-in model",
    "numpy": "maps as arrays",
    "pandas": "results as data frames",
    "triton": "kernels on NVIDIA GPUs",
}
WITH_TORCH = "installed with torch for CUDA on Linux"
USUAL = {"cpu": torch.float32, "cuda": torch.bfloat16}  # the usual dtypes of computation
HALF_THE_DIGITS = torch.finfo(torch.float64).eps ** 0.5  # a wrong output differs in the first digits


@dataclass(frozen=True)
class Line:
    """A line of the report about this machine; `problem` describes what is wrong."""

    name: str
    value: str
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.problem is None


def examine() -> list[Line]:
    """Return all lines, in the order in which they are printed."""
    return list(_lines())


def _lines() -> Iterator[Line]:
    yield Line("headwise", __version__)
    yield Line("Python", f"{platform.python_version()} on {platform.system()}")
    yield Line("torch", f"{torch.__version__}, built for {_built_for()}")
    yield _line("CPU", _processor)
    devices = [torch.device("cpu")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    if len(devices) == 1:
        yield Line("GPU", "none available to torch", _first_line(caught[0].message) if caught else None)
    for device in devices[1:]:
        yield _line(f"GPU {device.index}", _graphics, device)
    for device in devices:
        yield _line(f"budget on {device}", _budget, device)
    for backend in BACKENDS:
        yield _line(f"backend {backend.name}", _where, backend, devices)
    for library in EXTRAS:
        yield _line(library, _installed, library)
    for device in devices:
        yield _line(f"check module on {device}", check_module, device)
        yield _line(f"check attention on {device}", check_attention, device)


def _line(name: str, find: Callable[..., str], *about: object) -> Line:
    """Return a line with the value of `find`, or with any error that it or torch raised."""
    try:
        return Line(name, find(*about))
    except Exception as error:
        return Line(name, "failed", f"{type(error).__name__}: {_first_line(error)}")


def _first_line(message: object) -> str:
    return (str(message).strip() or "no reason given").splitlines()[0]


def _built_for() -> str:
    for name, version in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)):
        if version:
            return f"{name} {version}"
    return "CPUs"


def _processor() -> str:
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    threads = torch.get_num_threads()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {threads} thread{'s' * (threads != 1)}"


def _graphics(device: torch.device) -> str:
    card = torch.cuda.get_device_properties(device)
    return f"{card.name}, {budget.readable(card.total_memory)}, compute {card.major}.{card.minor}"


def _budget(device: torch.device) -> str:
    allowed, free = budget.bytes_allowed(device), budget.free_bytes(device)
    return f"dense results of at most {budget.readable(allowed)}; {budget.readable(free)} free"


def _where(backend: Backend, devices: list[torch.device]) -> str:
    """Return the devices that a backend runs on, and why not on the others."""
    runs, idle = [], []
    for device in devices:
        if backend.devices and device.type not in backend.devices:
            reason: str | None = f"it supports {' and '.join(backend.devices)} only"
        else:
            reason = why(*_example(device), causal=True).reasons[backend.name]
        if reason is None:
            runs.append(str(device))
        else:
            idle.append(f"not on {device}: {reason}")
    return "; ".join([f"on {', '.join(runs)}"] * bool(runs) + idle)


def _installed(library: str) -> str:
    if importlib.util.find_spec(library) is None:
        return f"not installed (for {EXTRAS[library]}): {REMEDIES.get(library, WITH_TORCH)}"
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(library)
    return "installed, version unknown"


def check_module(device: torch.device) -> str:
    """Check that our module with torch's weights gives torch's results, in float64.

    Raises:
        ArithmeticError: results that differ.
    """
    random = torch.Generator().manual_seed(0)
    with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        theirs = torch.nn.MultiheadAttention(24, 3, batch_first=True, dtype=torch.float64).eval()
        for parameter in theirs.parameters():  # its biases start at 0, which would hide a mistake in them
            parameter.normal_(std=0.5, generator=random)
        x = torch.randn(2, 7, 24, dtype=torch.float64, generator=random).to(device)
        theirs = theirs.to(device)
        expected = theirs(x, x, x, average_attn_weights=False)
        output, weights = MultiHeadAttention.from_torch(theirs)(x)
    errors = {"output": _error(output, expected[0]), "weights": _error(weights.dense(), expected[1])}
    for name, error in errors.items():
        if error > HALF_THE_DIGITS:
            raise ArithmeticError(
                f"{name} of the module and of torch.nn.MultiheadAttention differ by {error:.2g}"
            )
    return f"ok: the module is within {max(errors.values()):.0e} of torch.nn.MultiheadAttention"


def check_attention(device: torch.device) -> str:
    """Check that every backend here is as exact as a plain softmax, in outputs and weights.

    Raises:
        ArithmeticError: results that differ by more.
    """
    q, k, v = _example(device)
    truth = _plain_softmax(q.double(), k.double(), v.double())
    plain = _plain_softmax(q, k, v)
    roundings = [torch.finfo(q.dtype).eps * size for size in (v.abs().max().item(), 1.0)]
    able = [name for name, reason in why(q, k, v, causal=True).reasons.items() if reason is None]
    names = ["auto", *able]
    for name in names:
        output, weights = attention(q, k, v, causal=True, backend=name)
        for at, ours in enumerate((output, weights.dense())):
            error = _error(ours, truth[at])
            if error > 2 * (_error(plain[at], truth[at]) + roundings[at]):
                result = ("output", "weights")[at]
                raise ArithmeticError(
                    f"{result} of backend {name} and of a plain softmax differ by {error:.2g}"
                )
    dtype = str(q.dtype).removeprefix("torch.")
    return f"ok: {', '.join(names)} are as exact as a plain softmax in {dtype}"


def _example(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v of 3 heads, 37 tokens, 16 channels, always the same ones."""
    random = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 37, 16, generator=random).to(device, USUAL[device.type])
    return q, k, v


def _plain_softmax(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    weights = torch.softmax(scores.masked_fill(later, -torch.inf), dim=-1)
    return weights @ v, weights


def _error(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference; infinity if a value is NaN."""
    return (ours.double() - expected.double()).abs().nan_to_num(nan=torch.inf).max().item()
