"""What an examination brings back: tensors and plain facts, no code of the learner's.

The examination runs the learner's code, possibly in another process; the diagnosis only reads this.
"""

from __future__ import annotations

import ctypes
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .recipe import Given, Weights

__all__ = ["Call", "Conventions", "Evidence", "Finding", "Problem", "Role"]

FACTS, NUMBERS = "evidence.json", "evidence.bin"  # all that is written of it; the second holds bare numbers
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@dataclass
class Problem:
    """Something the learner's code raised, or that kept it from being run."""

    stage: str  # "import", "build", "call", "backward", "limits"
    kind: str  # the exception's class, or a word such as "timeout"
    message: str
    line: int | None = None  # in the learner's file, the last of their lines on the way
    probe: str | None = None


@dataclass
class Role:
    """Where one projection was found."""

    parameter: str  # "W_q.weight", "heads.0.key.weight and 3 more", "qkv.weight[0:24]"
    how: str  # "names", "calls", "gradients", "given"
    transposed: bool = False  # kept as [in, out]


@dataclass
class Conventions:
    """How the learner's code wants to be called."""

    arguments: tuple[
        str, ...
    ] = ()  # forward's parameters in order, by what they take: query, key, value, x, mask
    self_only: bool = False  # one input for queries, keys and values
    batch_first: bool = True
    mask_argument: str | None = None
    mask_kind: str | None = None  # "bool", "0 and 1", "added"
    mask_true_attends: bool | None = None
    mask_shape: str | None = None  # "[B, 1, T, S]", "[B, T, S]", "[T, S]", "[B, S]", "[B, 1, 1, S]"
    always_causal: bool = False
    returns_weights: bool = False
    words: list[str] = field(default_factory=list)  # all of it in sentences, for the report


@dataclass
class Call:
    """One probe: what went in, batch first and in float64, and what came out."""

    probe: str  # "plain", "self", "causal", "padding", "random mask", "longer memory", "batch of one", ...
    given: Given
    output: Tensor | None = None  # [B, T, E]
    weights: Tensor | None = None  # [B, H, T, S] where the code returns them, per head
    problem: Problem | None = None


@dataclass
class Finding:
    """One thing that was looked at beside the numbers: "input left unmodified", "state dict complete"."""

    name: str
    verdict: str  # "right", "wrong", "unknown"; once judged also "remark"
    detail: str  # a sentence
    fault: str | None = None  # the key of the fault this is, where it has one
    line: int | None = None


@dataclass
class Evidence:
    """All of it."""

    name: str
    kind: str  # "class" or "function"
    path: str | None = None
    source: str | None = None  # the file's text
    first_line: int | None = None  # of the class or function in it
    embed_dim: int = 0
    num_heads: int = 0
    conventions: Conventions = field(default_factory=Conventions)
    roles: dict[str, Role] = field(default_factory=dict)  # q, k, v, o, q_bias, ...
    weights: Weights | None = None
    calls: list[Call] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def call(self, probe: str) -> Call | None:
        """The probe of this name, if it was run."""
        return next((one for one in self.calls if one.probe == probe), None)

    def save(self, folder: Path) -> None:
        """As `FACTS` and `NUMBERS`, without a library: files are checked where there is torch alone."""
        numbers = bytearray()

        def out(value: object) -> object:
            if isinstance(value, Tensor):
                held = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
                told = [str(held.dtype).removeprefix("torch."), list(held.shape), len(numbers)]
                numbers.extend(ctypes.string_at(held.data_ptr(), held.nbytes))
                return {"tensor": told}
            if isinstance(value, dict):
                return {key: out(one) for key, one in value.items()}
            if isinstance(value, (list, tuple)):
                return [out(one) for one in value]
            return value

        plain = {name: getattr(self, name) for name in ("name", "kind", "path", "source", "first_line")}
        plain |= {"embed_dim": self.embed_dim, "num_heads": self.num_heads}
        plain["conventions"] = asdict(self.conventions)
        plain["roles"] = {name: asdict(role) for name, role in self.roles.items()}
        plain["weights"] = None if self.weights is None else out(tuple(self.weights))
        plain["calls"] = [
            {
                "probe": call.probe, "given": out(tuple(call.given)), "output": out(call.output),
                "weights": out(call.weights),
                "problem": None if call.problem is None else asdict(call.problem),
            }
            for call in self.calls
        ]  # fmt: skip
        plain["findings"] = [asdict(one) for one in self.findings]
        plain["problems"] = [asdict(one) for one in self.problems]
        (folder / NUMBERS).write_bytes(numbers)
        (folder / FACTS).write_text(json.dumps(plain))

    @classmethod
    def load(cls, folder: Path) -> Evidence:
        """From what `save` wrote, wherever it came from: nothing in it is executed.

        Raises:
            ValueError, KeyError, TypeError: it was not written by `save`.
        """
        numbers = bytearray((folder / NUMBERS).read_bytes())
        plain = json.loads((folder / FACTS).read_text())

        def back(value: Any) -> Any:
            if isinstance(value, dict) and set(value) == {"tensor"}:
                return _tensor(numbers, *value["tensor"])
            return [back(one) for one in value] if isinstance(value, list) else value

        conventions = Conventions(**plain.pop("conventions"))
        conventions.arguments = tuple(conventions.arguments)
        roles = {name: Role(**role) for name, role in plain.pop("roles").items()}
        held = plain.pop("weights")
        calls = [
            Call(
                one["probe"], Given(*back(one["given"])), back(one["output"]), back(one["weights"]),
                None if one["problem"] is None else Problem(**one["problem"]),
            )
            for one in plain.pop("calls")
        ]  # fmt: skip
        findings = [Finding(**one) for one in plain.pop("findings")]
        problems = [Problem(**one) for one in plain.pop("problems")]
        weights = None if held is None else Weights(*back(held))
        return cls(
            **plain, conventions=conventions, roles=roles, weights=weights, calls=calls, findings=findings,
            problems=problems,
        )  # fmt: skip


def _tensor(numbers: bytearray, dtype: str, shape: list[int], at: int) -> Tensor:
    """One tensor out of all numbers, with memory of its own.

    Raises:
        ValueError, KeyError, TypeError: there is none there.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(numbers, dtype=DTYPES[dtype], count=count, offset=at).reshape(shape).clone()
