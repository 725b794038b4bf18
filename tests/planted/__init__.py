"""Learners' modules with planted faults, written by hand and apart from the examiner that must name them.

`PLANTED` holds every fault in every style that can have it; `right.RIGHT` modules without a fault,
`pairs.PAIRS` two faults at once, `steps` single steps and blocks, `broken.SOURCES` scripts that do not run.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from . import einsum, fused, separate

STYLES = {"separate": separate, "fused": fused, "einsum": einsum}


class Planted(NamedTuple):
    """A fault, in words, in a module of a style; `make(24, 4)` builds it: E first, then H."""

    fault: str
    style: str
    make: Callable[..., nn.Module]
    note: str


PLANTED = [
    Planted(fault, style, make, note) for style, room in STYLES.items() for fault, make, note in room.FAULTS
]

NOT_POSSIBLE = {
    (fault, style): reason for style, room in STYLES.items() for fault, reason in room.NOT_POSSIBLE.items()
}
"""Faults that a style cannot have, and why. No style can show "mask on the wrong device" on one device."""

NO_FAULT = {
    "no key bias": "softmax does not see what is added to a whole row",
    "causal bottom-right": "the same for T = S; a convention for T ≠ S",
    "empty row nan": "one of three answers for a query that may see nothing; torch's class gives it",
    "empty row uniform": "one of three answers for a query that may see nothing",
    "empty row zero": "one of three answers for a query that may see nothing; torch's function gives it",
}
"""Planted to be recognised, not to be called wrong."""

RIGHT_NUMBERS = {
    "fill too small": "shows where scores are beyond 1e4",
    "overflow in half": "raises in float16",
    "heads in a list": "parameters() lacks them; .double() and .to() do not reach them",
    "input modified": "compare the input before and after",
    "mask modified": "compare the mask before and after; a second call with it is wrong",
}
"""Faults whose output on an ordinary probe is right, and where they show."""

CRASHES = {
    "view after transpose": "always",
    "padding mask broadcast": "with its [B, S] mask, unless B is 1 or T",
}

SAME_NUMBERS = [
    {"scale by d_k", "scaled twice"},
    {"fill with zero", "fill with almost zero", "scores times mask"},
    {"softmax over heads", "softmax without a dim"},
]
"""Faults that no output can tell apart; the source can."""

ONLY_WITH_CARRIED_WEIGHTS = {
    "fused order k q v",
    "fused order v k q",
    "heads interleaved",
    "heads reversed",
    "merge interleaved",
    "weight not transposed",
}
"""Only the order or the orientation of weights differs: trained from the start, the module would be right."""
