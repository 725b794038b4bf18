"""All faults that have a name: those of a whole attention, then those of single steps."""

from __future__ import annotations

from . import faults
from .faults.fault import Fault
from .steps import arrangements, blocks, mask_functions, own_softmax

STEPS = (own_softmax, arrangements, mask_functions, blocks)
FAULTS: dict[str, Fault] = {**faults.FAULTS, **{fault.key: fault for room in STEPS for fault in room.FAULTS}}
assert len(FAULTS) == len(faults.FAULTS) + sum(len(room.FAULTS) for room in STEPS), "two faults of one name"
