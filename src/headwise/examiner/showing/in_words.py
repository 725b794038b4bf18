"""What a report says, and how much of it a hint lets through."""

from __future__ import annotations

from ...errors import ArgumentError
from ..evidence import line_in_words
from ..report import Named, Report
from .letters import one_line
from .parts import Heading, Listed, Note, Part, Row, Rows
from .sentences import (
    compared,
    fault_in_full,
    finding_in_words,
    first_sentence,
    how_it_is_called,
    how_it_ran,
    how_it_was_built,
    its_weights,
    listed,
    not_told_apart,
    other_findings,
    problem_in_words,
    remarks,
    sentence,
    stops,
    what_it_is,
    what_to_do,
    what_was_judged,
)

LOOKED_AT = "Looked at beside the numbers"
RIGHT_ALREADY = "Where it is right already"
PARTS_AT = "Goes wrong first at"
WATCH_OUT = "Right here, and yet to be watched"


def tell(report: Report, hint: int | None = None) -> list[Part]:
    """The report in parts, harmless to print.

    Args:
        report: the verdict.
        hint: None for all of it, as where it is right or was not judged. 1, 2 or 3: that it is not right yet,
            and the hints up to that one; never the fault's name, formula, line or repair. From the second
            on, where the output is right; with the third, the first tensor that parts from the truth.

    Raises:
        ArgumentError: another hint.
    """
    if hint not in (None, 1, 2, 3):
        raise ArgumentError(f"hint must be 1, 2, 3 or None: got {hint!r}; start with 1")
    if report.ok:
        parts = _right(report)
    elif not report.judged:
        parts = _not_judged(report)
    elif hint is None:
        parts = _wrong(report)
    else:
        parts = _hinted(report, hint)
    parts = [*what_was_judged(report), *parts]
    return [part for part in parts if part or not isinstance(part, Rows | Listed)]


def _right(report: Report) -> list[Part]:
    name, summary = one_line(report.name), one_line(report.summary)
    if not summary:
        summary = f"{name} computes what {report.beside} computes"
    elif name not in summary:
        summary = f"{name}: {summary}"
    fine = ", ".join(one_line(each.name) for each in report.findings if each.verdict == "right")
    also = [Row("Also right", fine)] if fine else []
    return [
        Heading("right", f"{summary.rstrip('.')}. Well done!"),
        Rows(
            (*what_it_is(report), *compared(report), *how_it_is_called(report), *its_weights(report), *also)
        ),
        listed(LOOKED_AT, "wrong", map(finding_in_words, other_findings(report))),
        listed(WATCH_OUT, "item", map(_remark, report.remarks)),
        *remarks(report),
        Note(how_it_ran(report)),
    ]


def _not_judged(report: Report) -> list[Part]:
    name, summary = one_line(report.name), one_line(report.summary)
    why = first_sentence(summary) or "it gave no numbers"
    return [
        Heading("unknown", f"{name} was not judged: neither right nor wrong"),
        Rows(
            (
                Row("Why", sentence(why)),
                *what_it_is(report),
                *how_it_was_built(report),
                *compared(report),
                *how_it_is_called(report),
            )
        ),
        stops(report, headline=f"{summary} {why}", exceptions=True),
        listed("What you can do", "item", what_to_do(report)),
        *remarks(report),
        Note(how_it_ran(report)),
    ]


def _wrong(report: Report) -> list[Part]:
    headline = _headline(report)
    parts: list[Part] = [Heading("wrong", headline)]
    for fault in report.faults:
        if len(report.faults) > 1:
            parts.append(Heading("wrong", _named(fault)))
        parts += fault_in_full(report, fault)
    if report.alike:
        parts.append(Note(not_told_apart(report)))
    first = [] if report.first_wrong is None else [Row(PARTS_AT, one_line(report.first_wrong))]
    weights = [] if report.faults else its_weights(report)  # without a name for it, they may be the reason
    return [
        *parts,
        stops(report, headline=headline),
        listed(LOOKED_AT, "wrong", map(finding_in_words, other_findings(report))),
        listed(RIGHT_ALREADY, "right", report.where_right),
        Rows((*first, *what_it_is(report), *compared(report), *how_it_is_called(report), *weights)),
        *remarks(report),
        Note(how_it_ran(report)),
    ]


def _headline(report: Report) -> str:
    """What a learner reads first, and perhaps alone."""
    name, summary = one_line(report.name), one_line(report.summary)
    if len(report.faults) == 1:
        return _named(report.faults[0])
    if report.faults:
        keys = [one_line(each.key) for each in report.faults]
        if len(set(keys)) < len(keys):
            keys = [one_line(each.title) for each in report.faults]
        return f"{len(keys)} faults: {', and '.join(keys)}"
    if report.explained:  # begins with the line
        return first_sentence(report.explained[0])
    if report.problems:
        said = problem_in_words(report.problems[0])
    elif wrong := other_findings(report):
        said = finding_in_words(wrong[0])
    else:
        said = summary or f"this is not what {report.beside} computes"
    return said if name in said else f"{name}: {said}"


def _remark(named: Named) -> str:
    line = f" ({line_in_words(named.line, named.cell)})" if named.line is not None else ""
    return f"{_named(named)}{line}. Repair: {one_line(named.repair)}"


def _named(fault: Named) -> str:
    return f"{one_line(fault.key)}: {one_line(fault.title)}"


def _hinted(report: Report, hint: int) -> list[Part]:
    stopped, findings = stops(report, hint), other_findings(report)
    if not (report.faults or stopped or findings):
        seen = Note(
            "No mistake with a name fits these numbers, so there is no hint: this is all that was seen."
        )
        return [*_wrong(report), seen]
    verdict = "is not right yet" if "(" in report.beside else f"is not yet the same as {report.beside}"
    if report.problems and not report.errors:
        verdict = "stops before it can be compared"
    elif stopped and not report.faults:
        verdict = "stops in some of the probes"
    parts: list[Part] = [Heading("wrong", f"{one_line(report.name)} {verdict}")]
    several = len(report.faults) > 1
    if several:
        parts.append(Note(f"There are {len(report.faults)} things to find."))
    for number, fault in enumerate(report.faults, 1):
        label = f"{number} of {len(report.faults)}, hint" if several else "Hint"
        rows = [Row(f"{label} {at}", one_line(text)) for at, text in enumerate(fault.hints[:hint], 1)]
        parts.append(Rows(tuple(rows)))
    parts.append(stopped)
    if hint == 1 and findings:
        parts.append(listed(LOOKED_AT, "wrong", ["something there is not right: hint 2 says what"]))
    elif findings:
        words = [finding_in_words(each) if hint == 3 else one_line(each.name) for each in findings]
        parts.append(listed(LOOKED_AT, "wrong", words))
    if hint >= 2:
        parts.append(listed(RIGHT_ALREADY, "right", report.where_right))
    if hint >= 3 and report.first_wrong is not None:
        parts.append(Rows((Row(PARTS_AT, one_line(report.first_wrong)),)))
    return parts
