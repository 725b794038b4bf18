"""What a fault is: one named mistake, what it computes, and what to tell whoever made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..recipe import RIGHT, Step

Way = Mapping[str, Step]  # step of the recipe -> what is computed instead


@dataclass(frozen=True, eq=False)
class Fault:
    """One entry of the library.

    Args:
        key: its name in reports and tests, e.g. "scale by d_model".
        title: what is wrong, one clause.
        formula: what the learner computes.
        right: what it should be.
        hints: three, each telling more than the one before; the last all but gives the line.
        why: why it matters, one or two sentences.
        repair: the repaired line or lines.
        step: the step of the recipe where it happens; "" for faults that are seen, not computed.
        ways: what is computed instead, one entry for each way to make this mistake.
        lines: regular expressions for the line of source where it usually sits, the likeliest first.
        needs_mask: shows only where something is hidden.
        common: among the ten mistakes made most often.
        fit: the way with a number in it, for a mistake that has one (a constant scale).
        mixes_samples: what one sample gets depends on the others in the batch.
        remark: told, and no reason to fail what is right otherwise.
        follows: what other faults bring along: beside one of those it is not told.
        alone: whoever makes it has nothing else judged: told in place of whatever the numbers look like.
        said_by: other faults that are this one seen from elsewhere: beside one of those it is not told.
        names_parts: its detail names parameters; only those that make up the output count.
        design: what many modules have inside on purpose, in words: then it is no fault.
        crash: words of the exception it ends in; `crash_probe`: only in probes whose name begins so.
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
