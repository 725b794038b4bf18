"""The faults of a whole attention, the simplest explanation first."""

from __future__ import annotations

import functools
from itertools import combinations

from . import finishing, inputs, masking, merging, projecting, scaling, seen, softmax, splitting
from .fault import Fault

__all__ = ["FAULTS", "Fault", "computed", "pairs"]

ROOMS = (scaling, splitting, merging, softmax, masking, finishing, inputs, projecting, seen)
FAULTS: dict[str, Fault] = {fault.key: fault for room in ROOMS for fault in room.FAULTS}
assert len(FAULTS) == sum(len(room.FAULTS) for room in ROOMS), "two faults of one name"


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
