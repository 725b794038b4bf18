"""A report as plain text, for `print(report)`, logs and pytest."""

from __future__ import annotations

import sys
from textwrap import wrap

from ..report import Report
from .in_words import tell
from .letters import MARKS, fitting
from .parts import Heading, Listed, Note, Part, Quote, Row, Rows

WIDTH = 88
IN = "  "


def as_text(report: Report, hint: int | None = None, *, encoding: str | None = None) -> str:
    """The report, or the hints up to `hint`, as lines without colour.

    Args:
        report: the verdict.
        hint: None for everything; 1, 2 or 3 for hints up to that one and no more.
        encoding: letters that may be used; None for those of standard output.

    Raises:
        ArgumentError: another hint.
    """
    if encoding is None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    blocks = ["\n".join(_lines(part)) for part in tell(report, hint)]
    return fitting("\n\n".join(blocks), encoding)


def _lines(part: Part) -> list[str]:
    match part:
        case Heading(mark, text):
            return [f"{MARKS[mark]} {text}"]
        case Quote(place, line, text):
            number = "" if line is None else f"{line} "
            quoted = [f"{IN}→ {number}│ {text}"] if text else []
            return [*([f"{IN}{place}"] if place else []), *quoted] or [f"{IN}line {line}"]
        case Rows(rows):
            widest = max(len(row.label) for row in rows)
            return [line for row in rows for line in _row(row, widest)]
        case Listed(title, items):
            return [f"{IN}{title}", *(line for mark, text in items for line in _item(mark, text))]
        case Note(text):
            return _wrapped(text, IN, IN)


def _row(row: Row, widest: int) -> list[str]:
    first, later = f"{IN}{row.label:<{widest}}  ", " " * (len(IN) + widest + 2)
    lines = []
    for at, line in enumerate(row.text.split("\n")):
        start = later if at else first
        lines += [start + line] if row.code else _wrapped(line, start, later)
    return lines


def _item(mark: str, text: str) -> list[str]:
    return _wrapped(text, f"{IN}{IN}{MARKS[mark]} ", IN + IN + "  ")


def _wrapped(text: str, first: str, later: str) -> list[str]:
    return wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
