"""The faults of a whole attention, the simplest explanation first."""

from __future__ import annotations

import functools
from itertools import combinations

from . import behaviour, masking, output, rotating
from .fault import Fault
from .projecting import INPUTS, PROJECTING
from .scaling_and_softmax import SCORING, WEIGHING
from .splitting_and_merging import MERGING, SPLITTING

__all__ = ["FAULTS", "Fault", "computed", "pairs"]

SECTIONS = {  # titles of the page docs/faults.md
    "The product of q and k, and its scale": SCORING,
    "Splitting [B, T, E] into heads": SPLITTING,
    "Merging heads into [B, T, E]": MERGING,
    "The softmax": WEIGHING,
    "Masks": masking.FAULTS,
    "From weights to the output: the product with the values, and the output projection": output.FAULTS,
    "The inputs: query, key and value": INPUTS,
    "The projections of q, k and v": PROJECTING,
    "Positions: rotations (RoPE) and distance biases (ALiBi)": rotating.FAULTS,
    "Behaviour of the code, found by calling it or reading it": behaviour.FAULTS,
}
FAULTS: dict[str, Fault] = {fault.key: fault for section in SECTIONS.values() for fault in section}
assert len(FAULTS) == sum(map(len, SECTIONS.values())), "two faults of one name"


@functools.cache
def computed() -> tuple[Fault, ...]:
    """Return the faults that change a step of the recipe, whose outputs can be computed and compared."""
    return tuple(fault for fault in FAULTS.values() if fault.step)


@functools.cache
def pairs() -> tuple[tuple[Fault, Fault], ...]:
    """Return the pairs of faults that can occur together; pairs with the most common faults come first."""
    compatible = [(a, b) for a, b in combinations(computed(), 2) if not _exclude_each_other(a, b)]
    return tuple(sorted(compatible, key=lambda pair: -(pair[0].common + pair[1].common)))


def _exclude_each_other(a: Fault, b: Fault) -> bool:
    """Return True if each way of one fault changes a step that each way of the other changes too."""
    return all(set(x) & set(y) for x in a.ways for y in b.ways) or not (a.ways and b.ways)
