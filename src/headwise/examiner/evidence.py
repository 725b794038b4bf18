"""`Evidence`: what an examination records, as tensors and plain values, without any code of the learner.

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
    "SWITCHED", "Conventions", "Evidence", "Finding", "ProbeCall", "Problem", "Role", "StepAnswer", "packed",
    "unpacked",
]  # fmt: skip

SWITCHED = "causal switch"  # the probe with a causal switch on that is off by default
FACTS, NUMBERS = "evidence.json", "evidence.bin"  # the files `save` writes; the second holds raw tensor bytes
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


@dataclass
class ProbeCall:
    """One call of the code: inputs, batch first and in float64, and what it returned."""

    probe: str  # "plain", "self", "causal", "padding", "random mask", "longer memory", "batch of one", ...
    inputs: ProbeInputs
    output: Tensor | None = None  # [B, T, E]
    weights: Tensor | None = None  # [B, H, T, S] where the code returns them, per head
    problem: Problem | None = None


@dataclass
class StepAnswer:
    """One call of a single step (split_heads, softmax, a mask): inputs by name, and what it returned."""

    probe: str
    inputs: dict[str, Tensor | int | float | bool]
    output: Tensor | None = None
    problem: Problem | None = None


@dataclass
class Evidence:
    """Everything that an examination of one class or function recorded."""

    name: str
    kind: str  # "class" or "function"
    path: str | None = None
    source: str | None = None  # the text of the file
    first_line: int | None = None  # of the class or function in the file
    embed_dim: int = 0
    num_heads: int = 0
    conventions: Conventions = field(default_factory=Conventions)
    roles: dict[str, Role] = field(default_factory=dict)  # q, k, v, o, q_bias, ...
    weights: Weights | None = None
    calls: list[ProbeCall] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    built: str = ""  # how it was built, as Python: "MultiHeadAttention(d_model=24, num_heads=4)"
    tried: list[str] = field(default_factory=list)  # attempts that failed, a sentence each
    beside: list[str] = field(default_factory=list)  # parameters that belong to no projection
    doubts: list[str] = field(default_factory=list)  # entries of `conventions.words` that a verdict settles
    designs: list[Design] = field(default_factory=list)
    step: str | None = None  # for a single step: "split heads", "softmax", "mask", "block"; None for a whole
    answers: list[StepAnswer] = field(default_factory=list)  # of a single step
    # Where the numbers of the projections come from, by the names of `Weights`: factors, the first applied
    # first, each of indices into all parameters in order, flat; -1: zero, -2: one.
    origin: dict[str, list[Tensor]] = field(default_factory=dict)
    again: object = field(default=None, repr=False, compare=False)  # calls a step again; never saved
    _truths: list[tuple[ProbeCall, Weights, int, State | None]] = field(
        default_factory=list, repr=False, compare=False
    )

    def truth(self, call: ProbeCall) -> State | None:
        """Return what the recipe computes for this call (cached), or None if it cannot be run."""
        assert self.weights is not None
        for cached_call, weights, num_heads, state in self._truths:
            if cached_call is call and weights is self.weights and num_heads == self.num_heads:
                return state

        try:
            state = run(call.inputs, self.weights, self.num_heads, steps_of(self.designs))
        except (RuntimeError, TypeError, ValueError, IndexError):  # projections of another shape
            state = None
        self._truths.append((call, self.weights, self.num_heads, state))
        return state

    def call(self, probe: str) -> ProbeCall | None:
        """Return the call of this probe, or None if it was not made."""
        return next((call for call in self.calls if call.probe == probe), None)

    def save(self, folder: Path) -> None:
        """Write `FACTS` and `NUMBERS` into a folder; nothing but torch is needed to read them."""
        facts, numbers = self.written()
        (folder / NUMBERS).write_bytes(numbers)
        (folder / FACTS).write_text(facts)

    def written(self) -> tuple[str, bytes]:
        """Return the evidence as JSON, and the raw bytes of its tensors."""
        numbers = bytearray()

        def out(value: object) -> object:
            return packed(value, numbers)

        def problem_out(problem: Problem | None) -> object:
            return None if problem is None else asdict(problem)

        names = (
            "name", "kind", "path", "source", "first_line", "embed_dim", "num_heads", "built", "tried",
            "beside", "step", "doubts",
        )  # fmt: skip
        plain = {name: getattr(self, name) for name in names}
        plain["conventions"] = asdict(self.conventions)
        plain["roles"] = {name: asdict(role) for name, role in self.roles.items()}
        plain["weights"] = None if self.weights is None else out(tuple(self.weights))
        plain["calls"] = [
            {
                "probe": call.probe, "inputs": out(tuple(call.inputs)), "output": out(call.output),
                "weights": out(call.weights), "problem": problem_out(call.problem),
            }
            for call in self.calls
        ]  # fmt: skip
        plain["designs"] = [out(vars(design)) for design in self.designs]
        plain["answers"] = [
            {
                "probe": answer.probe, "inputs": out(answer.inputs), "output": out(answer.output),
                "problem": problem_out(answer.problem),
            }
            for answer in self.answers
        ]  # fmt: skip
        plain["findings"] = [asdict(finding) for finding in self.findings]
        plain["problems"] = [asdict(problem) for problem in self.problems]
        plain["origin"] = out(self.origin)
        return json.dumps(plain), bytes(numbers)

    @classmethod
    def load(cls, folder: Path) -> Evidence:
        """Read what `save` wrote, from any source: nothing in it is executed.

        Raises:
            ValueError, KeyError, TypeError: it was not written by `save`.
        """
        return cls.read((folder / FACTS).read_text(), (folder / NUMBERS).read_bytes())

    @classmethod
    def read(cls, facts: str, numbers: bytes) -> Evidence:
        """Read what `written` returned, from any source: nothing in it is executed.

        Raises:
            ValueError, KeyError, TypeError: `written` did not return it.
        """
        plain, all_numbers = json.loads(facts), bytearray(numbers)

        def back(value: Any) -> Any:
            return unpacked(value, all_numbers)

        def problem_back(value: Any) -> Problem | None:
            return None if value is None else Problem(**value)

        conventions = Conventions(**plain.pop("conventions"))
        conventions.arguments = tuple(conventions.arguments)
        roles = {name: Role(**role) for name, role in plain.pop("roles").items()}
        weights = plain.pop("weights")
        calls = [
            ProbeCall(
                call["probe"], ProbeInputs(*back(call["inputs"])), back(call["output"]),
                back(call["weights"]), problem_back(call["problem"]),
            )
            for call in plain.pop("calls")
        ]  # fmt: skip
        answers = [
            StepAnswer(
                answer["probe"], back(answer["inputs"]), back(answer["output"]),
                problem_back(answer["problem"]),
            )
            for answer in plain.pop("answers")
        ]  # fmt: skip
        designs = [Design(**back(design)) for design in plain.pop("designs")]
        findings = [Finding(**finding) for finding in plain.pop("findings")]
        problems = [Problem(**problem) for problem in plain.pop("problems")]
        origin = {name: list(factors) for name, factors in back(plain.pop("origin")).items()}
        return cls(
            **plain, conventions=conventions, roles=roles, calls=calls, findings=findings, answers=answers,
            weights=None if weights is None else Weights(*back(weights)), problems=problems,
            designs=designs, origin=origin,
        )  # fmt: skip


def packed(value: object, numbers: bytearray) -> object:
    """Return a value for JSON: a tensor's bytes are appended to `numbers`; dtype, shape and offset remain."""
    if isinstance(value, Tensor):
        held = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        place = [str(held.dtype).removeprefix("torch."), list(held.shape), len(numbers)]
        numbers.extend(ctypes.string_at(held.data_ptr(), held.nbytes))
        return {"tensor": place}
    if isinstance(value, dict):
        return {key: packed(item, numbers) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(item, numbers) for item in value]
    return value


def unpacked(value: Any, numbers: bytearray) -> Any:
    """Return the value that `packed` made JSON of.

    Raises:
        ValueError, KeyError, TypeError: `packed` did not make it.
    """
    if isinstance(value, dict) and set(value) == {"tensor"}:
        return _tensor(numbers, *value["tensor"])
    if isinstance(value, dict):
        return {key: unpacked(item, numbers) for key, item in value.items()}
    return [unpacked(item, numbers) for item in value] if isinstance(value, list) else value


def _tensor(numbers: bytearray, dtype: str, shape: list[int], offset: int) -> Tensor:
    """Return one tensor read from all numbers, with memory of its own.

    Raises:
        ValueError, KeyError, TypeError: there is no such tensor at this offset.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(numbers, dtype=DTYPES[dtype], count=count, offset=offset).reshape(shape).clone()
