"""A cell of `benchmarks.rules`: a rule at one size, checked and timed, and times of first calls.

A smaller twin is compared with float64, and at full size every peer with ours. Nothing wrong is ever timed.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import headwise as hw

from . import flex, machine, replays, runner, truths
from . import problem as problems
from .registry import OURS, Arm, Pinned, Sizes, around

STATISTICS = (
    "entropy", "distance", "confidence", "max_logit", "effective_keys",
    "first", "previous", "itself", "next", "local",
)  # fmt: skip
FIRST_SIZES = {"H": 16, "D": 128, "L": 4096}
TWIN, TWIN_OF_WINDOWS, TWIN_HEADS = 512, 2048, 8
ALLOWED, ALLOWED_BACK = 2.0, 3.0  # times the error of plain torch
FLOOR = 1e-6  # of errors: where plain torch happens to be exact
AGREE = 0.03  # how far ours and a peer may be apart at full size
TURNS, FELT, CHARGED = 10, 20, 5

Record = dict[str, Any]
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """A rule at one size in one mode: forward, backward (with forward), decode, statistics or first."""

    way: str
    rule: str
    sizes: Sizes

    @property
    def name(self) -> str:
        """The name for `--only`."""
        letters = "".join(f"_{letter}{n}" for letter, n in self.sizes.items() if (letter, n) != ("H", 16))
        return f"{self.way}_{self.rule}" + ("" if self.way == "first" else letters)

    @property
    def tier(self) -> int:
        """The rank in the order of cells; 0 is first."""
        D, L = self.sizes.get("D", 0), self.sizes.get("L", 0)
        usual = L in (4096, 8192)
        if self.way == "forward":
            return 5 if not usual else 0 if D == 128 else 2
        if self.way == "backward":
            return 6 if not usual else 1 if (D, L) == (128, 4096) else 3
        return 4 if self.way == "first" else 1


@dataclass(frozen=True)
class Made:
    """The tensors and the rule of a cell."""

    way: str
    q: Tensor
    k: Tensor
    v: Tensor
    rule: flex.SizedRule
    grad: Tensor | None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that get gradients."""
        bias = self.rule.options.get("bias")
        learned = [bias] if isinstance(bias, Tensor) and bias.requires_grad else []
        return (self.q, self.k, self.v, *learned)

    def ours(self, options: flex.Options | None = None) -> Arm:
        """Call the public function."""
        call_options = self.rule.options if options is None else options
        if self.way != "statistics":
            return self.arm(lambda q, k, v: hw.attention(q, k, v, **call_options)[0])

        def both() -> tuple[Tensor, ...]:
            out, weights = hw.attention(self.q, self.k, self.v, statistics=True, **call_options)
            statistics = weights.statistics(*STATISTICS)
            return out, *(getattr(statistics, name) for name in STATISTICS)

        return both

    def arm(self, call: Callable[..., Tensor], context: Any = None) -> Arm:
        """Return a call with these tensors, with the backward if the cell needs it."""

        def there_and_back() -> tuple[Tensor, ...]:
            out = call(self.q, self.k, self.v)
            return out.detach(), *torch.autograd.grad(out, self.inputs, self.grad)

        arm: Arm = there_and_back if self.grad is not None else lambda: (call(self.q, self.k, self.v),)
        return arm if context is None else Pinned(arm, context)


def make(cell: Cell, device: str, sizes: Sizes) -> Made:
    """Return the tensors and the rule of a cell, or of its small twin."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    whole = {"B": flex.sequences(cell.rule), **sizes}
    q, k, v = problems.make(whole, torch.device(device), dtype).qkv
    rule = flex.RULES[cell.rule](q)
    back = cell.way in ("backward", "first")
    for x in (q, k, v):
        x.requires_grad_(back)
    return Made(cell.way, q, k, v, rule, torch.randn_like(q) if back else None)


def errors(cell: Cell, device: str) -> dict[str, tuple[float, float]]:
    """Return the relative errors of ours and of plain torch, on a twin small enough for float64."""
    usual = TWIN_OF_WINDOWS if cell.rule in ("window", "band") else TWIN
    smaller = {"L": usual, "S": 4096, "H": TWIN_HEADS} if cell.way != "decode" else {"S": 4096}
    made = make(cell, device, {x: min(n, smaller.get(x, n)) for x, n in cell.sizes.items()})
    with torch.set_grad_enabled(made.grad is not None):
        results = made.ours()()
    truth, rough = (_plainly(made, dtype) for dtype in (torch.float64, made.q.dtype))
    return {
        name: (apart(ours, true), apart(other, true))
        for (name, true), ours, other in zip(truth.items(), results, rough.values(), strict=True)
    }


def _plainly(made: Made, dtype: torch.dtype) -> Values:
    """Return the results in plain torch: output, then gradients or statistics."""
    inputs = [x.detach().to(dtype).requires_grad_(made.grad is not None) for x in made.inputs]
    learned = {"bias": inputs[3]} if len(inputs) > 3 else {}
    q, k, v = inputs[:3]
    out = flex.plain(q, k, v, {**made.rule.options, **learned})
    values = {"output": out.detach()}
    if made.grad is not None:
        names = ("dq", "dk", "dv", "dbias")
        grads = torch.autograd.grad(out, inputs, made.grad.to(dtype))
        values |= dict(zip(names, grads, strict=False))
    if made.way == "statistics":
        true = truths.statistics(problems.Problem(q, k, v, problems.causal), dtype=dtype)
        values |= {name: true[name] for name in STATISTICS}
    return values


def apart(actual: Tensor, true: Tensor) -> float:
    """Return the norm of the difference, divided by that of the truth unless it is 0."""
    size = true.norm(dtype=torch.float64).item()
    if actual.shape != true.shape:
        return float("inf")
    return (actual.detach().to(true.dtype) - true).norm(dtype=torch.float64).item() / (size or 1.0)


def measure(cell: Cell, device: str, turns: int = TURNS, timed: bool = True) -> Record:
    """Check and time a cell; a cell that fails gets its error."""
    record: Record = {
        "name": cell.name, "way": cell.way, "rule": cell.rule, "group": f"{cell.way}_{cell.rule}",
        "sizes": {"B": flex.sequences(cell.rule), **cell.sizes}, "device": device,
    }  # fmt: skip
    try:
        record |= {"dtype": "bfloat16" if device == "cuda" else "float32", "status": "ok"}
        if cell.way == "first":
            return record | (first_calls_in_a_child(cell.rule, device) if timed else {})
        return record | _measured(cell, device, turns, timed)
    except Exception as problem:  # a cell that breaks is a result, too; the others go on
        return record | {"status": "failed", "reason": runner._first_line(problem)}
    finally:
        if device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _measured(cell: Cell, device: str, turns: int, timed: bool) -> Record:
    torch._dynamo.reset()  # after eight recompilations it would give up
    distances = errors(cell, device)
    most = ALLOWED_BACK if cell.way == "backward" else ALLOWED
    record: Record = {"check": {name: {"ours": a, "plain": b} for name, (a, b) in distances.items()}}
    wrong = [f"{name} off by {a:.2g}, plain torch {b:.2g}" for name, (a, b) in distances.items()
             if not a <= max(most * b, FLOOR)]  # fmt: skip
    if wrong:
        return record | {"status": "failed", "reason": "; ".join(wrong)}
    made = make(cell, device, cell.sizes)
    record["backend"] = hw.why(made.q, made.k, made.v, **made.rule.options).backend
    mine = made.ours()
    expected = mine()
    arms, calls, record["unavailable"] = _beside(made, expected)
    if not arms:
        return record | {"status": "failed", "reason": f"no peer runs: {record['unavailable']}"}
    if not timed:
        return record
    samples, method = replays.samples_of({OURS: mine, **arms}, device, made.grad is None)
    record |= {"timed_by": method, "turns": turns, "median_us": replays.medians(samples, turns)}
    peer = min(arms, key=lambda name: record["median_us"][name])
    record |= {"peer": peer, "peer_against_itself": _against_itself(samples[peer], turns)}
    del samples  # graphs hold memory
    record["felt_us"] = replays.felt({OURS: mine, **arms}, device, min(2 * turns, FELT))
    record |= _charged(made, calls, device)
    return record | _compared(record, list(arms))


def _against_itself(sample: replays.Sample, turns: int) -> Record:
    """Time the peer as two arms in turn: smaller differences between other arms are noise."""
    samples = replays.in_turn({"once": sample, "again": sample}, turns)
    return asdict(runner.compare(samples["again"], samples["once"]))


def _beside(made: Made, expected: tuple[Tensor, ...]) -> tuple[dict[str, Arm], list[Any], dict[str, str]]:
    """Return (peers that run, their calls, errors of others); raise if the result of a peer differs."""
    arms: dict[str, Arm] = {}
    calls: list[Any] = []
    unavailable: dict[str, str] = {}
    for alternatives in flex.peers(made.rule, made.q, made.k):
        for name, build in alternatives.items():
            try:
                peer = build()
                arm = made.arm(peer.call, peer.context)
                with around(arm):
                    results = arm()
            except Exception as problem:  # why a peer cannot run is part of the result
                unavailable[name] = runner._first_line(problem)
                continue
            differ = [apart(theirs, ours) for theirs, ours in zip(results, expected, strict=False)]
            if not all(distance <= AGREE for distance in differ):  # NaN is not
                raise ValueError(f"{peer.name} and ours differ by {max(differ):.2g} at full size")
            arms[peer.name] = arm
            calls.append(peer.call)
            break
    return arms, calls, unavailable


def _charged(made: Made, calls: Sequence[Any], device: str) -> Record:
    """Return the seconds of a block mask, and times with a new mask for ours and for FlexAttention."""
    blocks = [call for call in calls if isinstance(call, flex.Flex) and call.block is not None]
    if not blocks:
        return {}
    record: Record = {"block_mask_seconds": blocks[0].seconds}
    if made.rule.changing is None or made.grad is not None:
        return record
    tensor = made.rule.changing
    fresh = iter([tensor.clone() for _ in range(CHARGED + 1)])

    def anew() -> object:
        return made.ours(made.rule.again(next(fresh)))()

    anew()
    arms: dict[str, Arm] = {OURS: anew, flex.FLEX: lambda: blocks[0].remade(made.q, made.k, made.v)}
    return {**record, "charged_us": replays.felt(arms, device, CHARGED)}


def _compared(record: Record, names: Sequence[str]) -> Record:
    gpu, felt, charged = (record.get(f"{kind}_us") for kind in ("median", "felt", "charged"))
    assert gpu is not None and felt is not None
    return {
        "ratio": gpu[OURS] / gpu[record["peer"]],
        "ratios": {name: gpu[OURS] / gpu[name] for name in names},
        "felt_ratio": felt[OURS] / min(felt[name] for name in names),
        "charged_ratio": charged and charged[OURS] / charged[flex.FLEX],
    }


# First calls


def first_calls(rule: str, device: str, sizes: Sizes = FIRST_SIZES) -> dict[str, float]:
    """Return the seconds of the first forward and backward in this process."""
    runner.wake(device)
    made = make(Cell("first", rule, sizes), device, sizes)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    out = hw.attention(made.q, made.k, made.v, **made.rule.options)[0]
    wait()
    middle = time.perf_counter()
    torch.autograd.grad(out, made.inputs, made.grad)
    wait()
    return {"forward_seconds": middle - start, "backward_seconds": time.perf_counter() - middle}


def first_calls_in_a_child(rule: str, device: str) -> dict[str, float]:
    """Return the times of the first calls in a new process without compiled kernels."""
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [*again(device), "--first", rule], env={**os.environ, "TRITON_CACHE_DIR": empty},
            cwd=machine.ROOT, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the child failed"])[-1])
    seconds: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return seconds


def again(device: str) -> list[str]:
    """Return the command of a child process."""
    return [sys.executable, "-m", "benchmarks.rules", "--device", device]
