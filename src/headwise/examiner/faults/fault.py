"""The class Fault: a named mistake, what it computes, and the texts for the learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..recipe import RIGHT, Step

Way = Mapping[str, Step]  # step of the recipe -> the function that replaces it


@dataclass(frozen=True, eq=False)
class Fault:
    """One entry of the library of faults.

    Args:
        key: the name in reports and tests, e.g. "scale by d_model".
        title: what is wrong, in one clause.
        formula: what the learner's code computes.
        right: what it should compute.
        hints: three, each more specific than the one before: where to look, what can be observed, what to do.
        why: why it matters, in one or two sentences.
        repair: the repaired line or lines.
        step: the step of the recipe that is wrong; "" for faults that are found in another way.
        ways: the wrong steps, one entry for each way to make this mistake.
        lines: regular expressions for the source line that usually has the fault, the most likely first.
        needs_mask: whether it shows only if a key is hidden.
        common: whether it is among the ten most frequent mistakes.
        fit: for a mistake with a number in it (a constant scale): the wrong steps for a number.
        mixes_samples: whether the output of a sample depends on the others in the batch.
        remark: whether it is reported, but does not make the verdict wrong.
        follows: whether it can result from other faults; it is not reported beside one of those.
        alone: whether it is reported without the verdict on the numbers.
        said_by: keys of faults of which this is another symptom; it is not reported beside one of those.
        names_parts: whether its detail names parameters; only those that affect the output count.
        design: the name of a design that many modules contain on purpose; then it is not a fault.
        crash: words of the exception that it raises.
        crash_probe: the beginning of the names of the probes in which it raises.
    """

    key: str
    title: str
    formula: str
    right: str
    hints: tuple[str, str, str]
    why: str
    repair: str
    step: str = ""
    ways: tuple[Way, ...] = ()
    lines: tuple[str, ...] = ()
    needs_mask: bool = False
    common: bool = False
    fit: Callable[[float], Way] | None = None
    mixes_samples: bool = False
    remark: bool = False
    follows: bool = False
    alone: bool = False
    said_by: tuple[str, ...] = ()
    names_parts: bool = False
    design: str = ""
    crash: tuple[str, ...] = ()
    crash_probe: str = ""

    def __post_init__(self) -> None:
        assert not self.step or self.step in RIGHT, f"{self.key}: no step {self.step!r}"
        assert bool(self.step) == (bool(self.ways) or self.fit is not None), self.key
