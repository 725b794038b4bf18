"""What the task says beyond attention itself: which masks, which arguments, what is returned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import ArgumentError, nearest
from ..report import Named, Report
from ..source import source_of
from .conditions import Conditions, conditions_of

KEY = "not as the task says"
WORDS: dict[str, tuple[str, ...]] = {
    "mask": ("true-attends", "true-hides", "added", "lengths"),
    "causal": ("always", "argument"),
    "weights": ("returned",),
    "heads": ("argument",),
    "d_model": ("argument",),
    "batch": ("first",),
    "designs": ("none",),
}


@dataclass(frozen=True)
class Requirement:
    """One of `WORDS`."""

    what: str
    how: str

    def __str__(self) -> str:
        return f"{self.what}={self.how}"


def requirements_of(words: Iterable[str]) -> list[Requirement]:
    """From "mask=true-attends" and the like.

    Raises:
        ArgumentError: a word that is none of `WORDS`; one thing required twice.
    """
    found: dict[str, Requirement] = {}
    for word in words:
        what, _, how = word.strip().partition("=")
        if what not in WORDS:
            raise ArgumentError(
                f"require must name something of a task: got {word!r}; {nearest(what, WORDS)}"
            )
        if how not in WORDS[what]:
            raise ArgumentError(
                f"require must say how {what} is to be: got {word!r}; choose from "
                f"{', '.join(f'{what}={each}' for each in WORDS[what])}"
            )
        if what in found and found[what].how != how:
            raise ArgumentError(f"require must say one thing of {what}: got {found[what]} and {word}; choose")
        found[what] = Requirement(what, how)
    return list(found.values())


def hold_to(report: Report, required: Sequence[Requirement], path: Path) -> None:
    """What was judged and is not as the task says is wrong, and says so."""
    if not report.judged or not required or not report.errors:  # no numbers: it was not called at all
        return
    conditions = conditions_of(source_of(path)[0], report.name)
    missed = [(one, _instead(one, report, conditions)) for one in required]
    for one, instead in missed:
        if instead is None:
            continue
        hints = (
            f"read what the task says about {one.what}",
            f"the task says {one}",
            f"the task says {one}; {instead}",
        )
        why = "it computes attention, and code that calls it as the task says gets something else"
        title, repair = f"the task says {one}; {instead}", f"change it so that {one}"
        report.faults.append(Named(KEY, title, instead, str(one), hints, why, repair, instead))
        if report.ok:
            report.ok, report.summary = False, f"{KEY}: {one}; {instead}"


def _instead(one: Requirement, report: Report, source: Conditions) -> str | None:
    """How it is instead; None where it is as required."""
    call = report.conventions
    if one.what == "mask":
        return _mask(one.how, report)
    if one.what == "causal":
        if one.how == "always":
            return None if call.always_causal else "it sees the future unless it is told not to"
        return "it hides the future whether it is told to or not" if call.always_causal else None
    if one.what == "weights":
        return None if call.returns_weights else "it returns no weights per head"
    if one.what == "heads":
        return None if source.takes_heads else "no argument says how many heads"
    if one.what == "d_model":
        return None if source.takes_width else "no argument says how wide it is"
    if one.what == "designs":
        return None if not report.designs else f"it has something inside: {report.designs[0]}"
    return None if call.batch_first else "it takes the sequence first"


def _mask(how: str, report: Report) -> str | None:
    call = report.conventions
    if call.mask_argument is None:
        return "it takes no mask"
    kind = call.mask_kind
    if kind in ("bool", "0 and 1"):
        found = "true-attends" if call.mask_true_attends else "true-hides"
        told = f"where {call.mask_argument} is True or 1, a key " + (
            "may be seen" if call.mask_true_attends else "is hidden"
        )
    else:
        found = str(kind)
        told = {
            "added": f"{call.mask_argument} is added to the scores",
            "lengths": f"{call.mask_argument} is a number of keys",
            "switch": f"{call.mask_argument} only switches a mask on",
        }.get(found, f"{call.mask_argument} is {found}")
    return None if found == how else told
