"""The faults of a whole attention, the simplest explanation first."""

from __future__ import annotations

import functools
from itertools import combinations

from . import finishing, masking, rotating, seen
from .fault import Fault
from .projecting import INPUTS, PROJECTING
from .scaling_and_softmax import SCORING, WEIGHING
from .splitting_and_merging import MERGING, SPLITTING

__all__ = ["FAULTS", "Fault", "computed", "pairs"]

ROOMS = {
    "The product of q and k, and its scale": SCORING,
    "From [B, T, E] to heads": SPLITTING,
    "From heads back to [B, T, E]": MERGING,
    "From scores to weights": WEIGHING,
    "What a mask does to scores": masking.FAULTS,
    "From weights to the output: mixing values, the last projection, and what some add after it": (
        finishing.FAULTS
    ),
    "Which input goes where, before anything is computed": INPUTS,
    "The projections of q, k and v": PROJECTING,
    "Rotations by position (RoPE)": rotating.FAULTS,
    "Faults that are seen rather than computed: what code does beside its numbers": seen.FAULTS,
}
FAULTS: dict[str, Fault] = {fault.key: fault for room in ROOMS.values() for fault in room}
assert len(FAULTS) == sum(map(len, ROOMS.values())), "two faults of one name"


@functools.cache
def computed() -> tuple[Fault, ...]:
    """Those that can be computed and compared with."""
    return tuple(fault for fault in FAULTS.values() if fault.step)


@functools.cache
def pairs() -> tuple[tuple[Fault, Fault], ...]:
    """Two at a time, in different steps; pairs of common ones first, then with one common one."""
    found = [(a, b) for a, b in combinations(computed(), 2) if not _same_place(a, b)]
    return tuple(sorted(found, key=lambda pair: -(pair[0].common + pair[1].common)))


def _same_place(a: Fault, b: Fault) -> bool:
    """Whether no way of one goes with a way of the other."""
    return all(set(mine) & set(theirs) for mine in a.ways for theirs in b.ways) or not (a.ways and b.ways)
