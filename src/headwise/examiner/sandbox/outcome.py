"""What running a file brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..evidence import Evidence, Problem

__all__ = ["Outcome"]


@dataclass
class Outcome:
    """Evidence, or the problem that kept it from being gathered; one of the two is there."""

    evidence: Evidence | None
    problem: Problem | None
    protections: list[str]  # in force while the file ran, in words
    missing: list[str]  # those this system does not offer, each with the reason
    output: str  # what the file printed: all of it, or the beginning and the end
    others: list[str] = field(
        default_factory=list
    )  # classes and functions that might have been meant instead
    notes: list[str] = field(default_factory=list)  # what was noticed and is no problem
    seconds: float = 0.0  # the learner's own, without importing torch
