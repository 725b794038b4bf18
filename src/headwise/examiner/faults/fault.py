"""What a fault is: one named mistake, what it computes, and what to tell whoever made it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..recipe import RIGHT, Step

__all__ = ["Fault", "Way"]

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

    def __post_init__(self) -> None:
        assert not self.step or self.step in RIGHT, f"{self.key}: no step {self.step!r}"
        assert bool(self.step) == (bool(self.ways) or self.fit is not None), self.key
