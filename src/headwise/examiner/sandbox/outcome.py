"""What running a file brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..evidence import Evidence, Problem

Answer = tuple[Tensor, int] | Problem  # the output, and which of the masks offered it was for


@dataclass
class Outcome:
    """Evidence, or the problem that kept it from being gathered; one of the two is there.

    Both, where it was the answers to what was asked then that did not come.
    """

    evidence: Evidence | None
    problem: Problem | None
    protections: list[str]  # in force while the file ran, in words
    missing: list[str]  # those this system does not offer, each with the reason
    output: str  # what the file printed: all of it, or the beginning and the end
    notes: list[str] = field(default_factory=list)  # what was noticed and is no problem
    asked: bool = False  # whether anything was asked once the evidence was here
    answers: list[Answer] | None = None  # to what was asked then
    seconds: float = 0.0  # the learner's own, without importing torch
