"""`Case`: sizes, arms to time, and their true results; and the list that `cases` fills.

A case's `setup` makes random inputs once and returns its arms, each a callable without arguments, and a
function for the float64 truth about what they return. One arm is ours, one is the peer it is compared with;
others may stand beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Sizes = Mapping[str, int]
Arm = Callable[[], Any]
Values = dict[str, Tensor]  # what is compared, by name

OURS = "headwise"


@dataclass(frozen=True)
class Apart:
    """The check of an arm that computes something else than ours: its truth and its compared part."""

    truth: Callable[[], Values]
    part: Callable[[Any], Values]


@dataclass(frozen=True)
class Prepared:
    """A case with its inputs.

    arms: by name; each may be called any number of times.
    truth: the values in float64.
    part: from what an arm returned to the values that are compared with the truth.
    yardstick: the values in the case's dtype by plain torch, where no peer computes them; beside a peer,
        those that torch has two ways to compute: the larger error of the two is the measure.
    apart: arms that are compared in time alone, because they compute something else.
    """

    arms: dict[str, Arm]
    truth: Callable[[], Values]
    part: Callable[[Any], Values]
    yardstick: Callable[[], Values] | None = None
    apart: Mapping[str, Apart] = field(default_factory=dict)

    def part_of(self, arm: str, result: Any) -> Values:
        """Return the compared part of an arm's result."""
        judged = self.apart.get(arm)
        return self.part(result) if judged is None else judged.part(result)


Setup = Callable[[Sizes, torch.device, torch.dtype], Prepared]


@dataclass(frozen=True)
class Case:
    """One comparison.

    sizes: by letter (B batch, H num_heads, Hk num_kv_heads, L length, T, S where they differ, D head_dim).
    tiny: sizes that make it instant; the rest stays.
    on_cuda: sizes that differ on a GPU.
    peer: the arm ours is compared with; None: ours alone.
    target: ours / peer should not be above this.
    factor: how many times the peer's error ours may have (2; for gradients 3).
    memory: whether the extra memory of ours and the peer is measured, too.
    most_repeats: fewer turns than asked for, where one call takes very long.
    headline: whether it is among the first that docs/benchmarks.md shows.
    """

    name: str
    description: str
    setup: Setup
    sizes: Sizes
    tiny: Sizes
    peer: str | None
    ours: str = OURS
    on_cuda: Sizes = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    target: float | None = None
    factor: float = 2.0
    memory: bool = False
    most_repeats: int | None = None
    headline: bool = False
    notes: tuple[str, ...] = ()

    def sizes_on(self, device: str, tiny: bool = False) -> dict[str, int]:
        """Return the sizes for a device."""
        chosen = {**self.sizes, **(self.on_cuda if device == "cuda" else {})}
        return {**chosen, **self.tiny} if tiny else chosen

    def dtype_on(self, device: str) -> torch.dtype:
        """Return the usual dtype: float32 on a CPU, bfloat16 on a GPU."""
        return torch.bfloat16 if device == "cuda" else torch.float32

    def prepare(self, device: str, tiny: bool = False) -> Prepared:
        """Create the inputs."""
        torch.manual_seed(0)
        prepared = self.setup(self.sizes_on(device, tiny), torch.device(device), self.dtype_on(device))
        wanted = {self.ours} if self.peer is None else {self.ours, self.peer}
        assert wanted <= set(prepared.arms), f"{self.name} has no arm {wanted - set(prepared.arms)}"
        return prepared


@dataclass(frozen=True)
class Pinned:
    """An arm that must run inside a context; the timer enters it once for many calls."""

    call: Arm
    context: Callable[[], AbstractContextManager[Any]]

    def __call__(self) -> Any:
        return self.call()


def around(arm: Arm) -> AbstractContextManager[Any]:
    """Return the context of an arm."""
    return arm.context() if isinstance(arm, Pinned) else nullcontext()


CASES: dict[str, Case] = {}


def register(case: Case) -> Case:
    """Put a case on the list; its name must be new."""
    if case.name in CASES:
        raise ValueError(f"case name must be new: {case.name} exists already; choose another")
    CASES[case.name] = case
    return case
