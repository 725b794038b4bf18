"""Feedback for a class: a Markdown file for each submission, and one for the teacher."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...errors import ArgumentError
from ...show.texts import plain
from ...whole_files import whole_file
from ..report import Report
from ..report_formats.sentences import MARKS, Heading, Listed, Note, Part, Quote, Rows, report_parts
from .rubric import Mark
from .submissions import (
    facts_in_words,
    in_numbers,
    judged_in,
    line_of,
    missing_in_words,
    names_of,
    rewritten,
    what_of,
    without_folder,
)

CLASS = "class.md"
LONGEST_NAME = 200  # most file systems allow 255 bytes
SPECIAL = re.compile(r"([\\`*_{}\[\]#|~$!^])")
START = re.compile(r"^(\d{0,9})(?=[-+=.)])")  # of a list, a heading, a rule


def markdown(text: str) -> str:
    """Escape a text so that Markdown shows it unchanged on one line: no markup, no HTML, no links.

    Example:
        >>> markdown("<b>*x*</b>")
        '&lt;b&gt;\\\\*x\\\\*&lt;/b&gt;'
    """
    text = SPECIAL.sub(r"\\\1", plain(" ".join(text.split())))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"(?i)\b(www)\.", r"\1&#46;", text).replace("://", "&#58;//").replace("@", "&#64;")
    return START.sub(r"\1\\", text)


def code(text: str, language: str = "") -> str:
    """Return a block of code whose fence is longer than any row of backticks in it."""
    lines = "\n".join(plain(line) for line in text.split("\n"))
    fence = "`" * max(3, 1 + max((len(each) for each in re.findall("`+", lines)), default=0))
    return f"{fence}{language}\n{lines}\n{fence}"


def for_student(report: Report, name: str, mark: Mark | None = None, hint: int | None = None) -> str:
    """Return the feedback for the author of a file: the points, and the report or its hints.

    Args:
        report: of the file.
        name: of the file, as its author knows it.
        mark: the points, if there is a rubric.
        hint: 1, 2 or 3 for the hints up to that one only; None for the whole report.
    """
    blocks = [f"# {markdown(name)}: {report.verdict}"]
    if mark is not None:
        blocks.append(_points(mark, hint))
    report = rewritten(report, partial(without_folder, report))
    blocks += [_block(part) for part in report_parts(report, hint)]
    return "\n\n".join(blocks) + "\n"


def _points(mark: Mark, hint: int | None) -> str:
    if mark.points is None:
        return f"**Points:** open, of {mark.full:g}. The file could not be judged: a person will mark it."
    line = f"**Points:** {mark}"
    if hint is None:
        line += "".join(f"\n- lost {points:g}: {markdown(loss)}" for loss, points in mark.lost)
    return line


def _block(part: Part) -> str:
    match part:
        case Heading(sign, text):
            return f"## {MARKS[sign]} {markdown(text)}"
        case Quote(place, line, text):
            where = markdown(place) if place else f"line {line}"
            return f"{where}:\n\n{code(text, 'python')}" if text else where
        case Rows(rows):
            return "\n\n".join(
                f"**{markdown(row.label)}**\n\n{code(row.text)}" if row.code
                else f"**{markdown(row.label)}** {'; '.join(map(markdown, row.text.splitlines()))}"
                for row in rows
            )  # fmt: skip
        case Listed(title, items):
            return f"**{markdown(title)}**\n\n{_bullets([text for _, text in items])}"
        case Note(text):
            return markdown(text)


def _bullets(texts: Sequence[str]) -> str:
    return "\n".join(f"- {markdown(text)}" for text in texts)


def for_class(reports: Sequence[Report], marks: Sequence[Mark] | None = None) -> str:
    """Return the summary for the teacher: a row for each file, the class in numbers, and similar files."""
    names = names_of(reports)
    head = ["file", "judged", "verdict", *(["points"] if marks else []), "finding", "line"]
    rows = []
    for number, (name, report) in enumerate(zip(names, reports, strict=True)):
        line = line_of(report)
        points = [str(marks[number])] if marks else []
        cells = [name, judged_in(report), report.verdict, *points, plain(what_of(report), 160)]
        rows.append([*map(markdown, cells), "" if line is None else str(line)])
    blocks = ["# The class", _bullets(in_numbers(reports))]
    decided = [mark.points for mark in marks or () if mark.points is not None]
    if decided and marks:
        mean = sum(decided) / len(decided)
        blocks.append(
            f"Points: {mean:.3g} of {marks[0].full:g} on average; {len(decided)} files were judged."
        )
    blocks.append("\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]))
    if facts := facts_in_words(reports):
        blocks += ["## Similar files", "These are facts and not verdicts: a person decides what they mean."]
        blocks.append(_bullets(facts))
    if missing := missing_in_words(reports):
        blocks += [
            "## Protections that are missing on this system",
            _bullets(missing),
        ]
    return "\n\n".join(blocks) + "\n"


def write_feedback(
    folder: str | os.PathLike[str],
    reports: Sequence[Report],
    marks: Sequence[Mark] | None = None,
    hint: int | None = None,
) -> list[Path]:
    """Write a file for each report, at the submission's path below `folder`, and `class.md`.

    Each file gets its name only after it is complete.

    Raises:
        ArgumentError: the folder cannot be written to.
    """
    top = Path(folder)
    names = names_of(reports)
    written: list[Path] = []
    for number, (name, report) in enumerate(zip(names, reports, strict=True)):
        place = _place(top, name, written)
        text = for_student(report, name, None if marks is None else marks[number], hint)
        _write(place, text)
        written.append(place)
    _write(top / CLASS, for_class(reports, marks))
    return [*written, top / CLASS]


def _place(top: Path, name: str, used: Sequence[Path]) -> Path:
    parts = [part for part in Path(name).parts if part not in ("..", os.sep)]
    short = parts[-1].encode()[:LONGEST_NAME].decode("utf-8", "ignore")
    place = top.joinpath(*parts[:-1], f"{short}.md")
    number = 2
    while place in used or place == top / CLASS:
        place = place.with_name(f"{short}-{number}.md")
        number += 1
    return place


def _write(place: Path, text: str) -> None:
    make_folder(place.parent)
    with whole_file(place, "feedback") as half:
        half.write_text(text, "utf-8", errors="replace")


def make_folder(folder: str | os.PathLike[str]) -> None:
    """Create a folder for feedback.

    Raises:
        ArgumentError: the folder cannot be created.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"feedback must be a writable folder: {folder}: {error.strerror}; choose another"
        ) from error
