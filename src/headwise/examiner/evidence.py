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

from .recipe import Design, ProbeInputs, State, Weights, run, steps_of
from .report import Conventions, Finding, Problem, Role

__all__ = [
    "SWITCHED", "Asked", "Conventions", "Evidence", "Finding", "ProbeCall", "Problem", "Role", "packed",
    "unpacked",
]  # fmt: skip

SWITCHED = "causal switch"  # the probe of a causal mask that is off by default, beside one handed over
FACTS, NUMBERS = "evidence.json", "evidence.bin"  # all that is written of it; the second holds bare numbers
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@dataclass
class ProbeCall:
    """One probe: what went in, batch first and in float64, and what came out."""

    probe: str  # "plain", "self", "causal", "padding", "random mask", "longer memory", "batch of one", ...
    given: ProbeInputs
    output: Tensor | None = None  # [B, T, E]
    weights: Tensor | None = None  # [B, H, T, S] where the code returns them, per head
    problem: Problem | None = None


@dataclass
class Asked:
    """One question to a single step: split_heads, softmax, a mask; what went in by name, what came out."""

    probe: str
    given: dict[str, Tensor | int | float | bool]
    output: Tensor | None = None
    problem: Problem | None = None


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
    calls: list[ProbeCall] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    built: str = ""  # how it was built, as Python: "MultiHeadAttention(d_model=24, num_heads=4)"
    tried: list[str] = field(default_factory=list)  # what was tried in vain, a sentence each
    beside: list[str] = field(default_factory=list)  # parameters that no projection is made of
    doubts: list[str] = field(default_factory=list)  # those of `conventions.words` that a verdict answers
    designs: list[Design] = field(default_factory=list)
    step: str | None = None  # a single step in place of a whole: "split heads", "softmax", "mask", "block"
    asked: list[Asked] = field(default_factory=list)
    # Where the numbers of the projections come from, by the names of `Weights`: factors, the first applied
    # first, each of indices into all parameters in order, flat; -1: zero, -2: one.
    origin: dict[str, list[Tensor]] = field(default_factory=dict)
    again: object = field(default=None, repr=False, compare=False)  # asks a step again; stays in its process
    _truths: list[tuple[ProbeCall, Weights, int, State | None]] = field(
        default_factory=list, repr=False, compare=False
    )

    def truth(self, call: ProbeCall) -> State | None:
        """What the recipe computes for this call, worked out once; None where it cannot."""
        assert self.weights is not None
        for asked, weights, heads, state in self._truths:
            if asked is call and weights is self.weights and heads == self.num_heads:
                return state

        try:
            found: State | None = run(call.given, self.weights, self.num_heads, steps_of(self.designs))
        except (RuntimeError, TypeError, ValueError, IndexError):  # projections of another shape
            found = None
        self._truths.append((call, self.weights, self.num_heads, found))
        return found

    def call(self, probe: str) -> ProbeCall | None:
        """The probe of this name, if it was run."""
        return next((one for one in self.calls if one.probe == probe), None)

    def save(self, folder: Path) -> None:
        """As `FACTS` and `NUMBERS`, without a library: files are checked where there is torch alone."""
        facts, numbers = self.written()
        (folder / NUMBERS).write_bytes(numbers)
        (folder / FACTS).write_text(facts)

    def written(self) -> tuple[str, bytes]:
        """All of it: JSON, and the bare numbers of its tensors."""
        numbers = bytearray()

        def out(value: object) -> object:
            return packed(value, numbers)

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
        plain["designs"] = [
            {"key": one.key, "words": one.words, "numbers": one.numbers, "tensors": out(one.tensors)}
            for one in self.designs
        ]
        plain["asked"] = [
            {
                "probe": one.probe, "given": out(one.given), "output": out(one.output),
                "problem": None if one.problem is None else asdict(one.problem),
            }
            for one in self.asked
        ]  # fmt: skip
        plain |= {"built": self.built, "tried": self.tried, "beside": self.beside, "step": self.step}
        plain["doubts"] = self.doubts
        plain["findings"] = [asdict(one) for one in self.findings]
        plain["problems"] = [asdict(one) for one in self.problems]
        plain["origin"] = out(self.origin)
        return json.dumps(plain), bytes(numbers)

    @classmethod
    def load(cls, folder: Path) -> Evidence:
        """From what `save` wrote, wherever it came from: nothing in it is executed.

        Raises:
            ValueError, KeyError, TypeError: it was not written by `save`.
        """
        return cls.read((folder / FACTS).read_text(), (folder / NUMBERS).read_bytes())

    @classmethod
    def read(cls, facts: str, numbers: bytes) -> Evidence:
        """From what `written` gave, wherever it came from: nothing in it is executed.

        Raises:
            ValueError, KeyError, TypeError: `written` did not give it.
        """
        plain, held_numbers = json.loads(facts), bytearray(numbers)

        def back(value: Any) -> Any:
            return unpacked(value, held_numbers)

        conventions = Conventions(**plain.pop("conventions"))
        conventions.arguments = tuple(conventions.arguments)
        roles = {name: Role(**role) for name, role in plain.pop("roles").items()}
        held = plain.pop("weights")
        calls = [
            ProbeCall(
                one["probe"], ProbeInputs(*back(one["given"])), back(one["output"]), back(one["weights"]),
                None if one["problem"] is None else Problem(**one["problem"]),
            )
            for one in plain.pop("calls")
        ]  # fmt: skip
        designs = [Design(**back(one)) for one in plain.pop("designs")]
        asked = [
            Asked(
                one["probe"], back(one["given"]), back(one["output"]),
                None if one["problem"] is None else Problem(**one["problem"]),
            )
            for one in plain.pop("asked")
        ]  # fmt: skip
        findings = [Finding(**one) for one in plain.pop("findings")]
        problems = [Problem(**one) for one in plain.pop("problems")]
        weights = None if held is None else Weights(*back(held))
        origin = {name: list(one) for name, one in back(plain.pop("origin")).items()}
        return cls(
            **plain, conventions=conventions, roles=roles, weights=weights, calls=calls, findings=findings,
            problems=problems, designs=designs, asked=asked, origin=origin,
        )  # fmt: skip


def packed(value: object, numbers: bytearray) -> object:
    """For JSON: each tensor's bytes go to the end of `numbers`, and its dtype, shape and place stay."""
    if isinstance(value, Tensor):
        held = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        told = [str(held.dtype).removeprefix("torch."), list(held.shape), len(numbers)]
        numbers.extend(ctypes.string_at(held.data_ptr(), held.nbytes))
        return {"tensor": told}
    if isinstance(value, dict):
        return {key: packed(one, numbers) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(one, numbers) for one in value]
    return value


def unpacked(value: Any, numbers: bytearray) -> Any:
    """What `packed` made JSON of.

    Raises:
        ValueError, KeyError, TypeError: it did not.
    """
    if isinstance(value, dict) and set(value) == {"tensor"}:
        return _tensor(numbers, *value["tensor"])
    if isinstance(value, dict):
        return {key: unpacked(one, numbers) for key, one in value.items()}
    return [unpacked(one, numbers) for one in value] if isinstance(value, list) else value


def _tensor(numbers: bytearray, dtype: str, shape: list[int], at: int) -> Tensor:
    """One tensor out of all numbers, with memory of its own.

    Raises:
        ValueError, KeyError, TypeError: there is none there.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(numbers, dtype=DTYPES[dtype], count=count, offset=at).reshape(shape).clone()
