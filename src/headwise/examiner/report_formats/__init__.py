"""A `Report` as plain text, on a terminal, in a notebook and as JSON.

`sentences.report_parts` decides the content once, so a hint reveals the same in every format, and text from
the learner's code is made safe to print in one place.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from html import escape
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ..report import Report
from .sentences import MARKS, Heading, Listed, Note, Part, Quote, Row, Rows, fitting, report_parts

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


SCHEMA = 1  # increased if a field is removed or changes its meaning, not if one is added


def as_json(
    report: Report, indent: int | None = 2, hint: int | None = None, beside: dict[str, Any] | None = None
) -> str:
    """Return the report as JSON: "schema", "verdict" (right, wrong or not judged), "exit_code", its fields.

    With a hint, a wrong report has only the name, the path, the "hints" of each fault, and the "text" that a
    terminal shows. JSON has no NaN and no infinities: they are the strings "NaN", "Infinity" and "-Infinity".
    The text is ascii.

    Args:
        report: the verdict.
        indent: spaces per level; None for one line.
        hint: None for everything; 1, 2 or 3 for hints up to this one.
        beside: fields to add.
    """
    facts: dict[str, Any] = {"schema": SCHEMA, "verdict": report.verdict, "exit_code": report.exit_code}
    if hint is not None and report.verdict == "wrong":
        facts |= {"name": report.name, "path": report.path, "ok": report.ok, "hint": hint}
        facts |= {"hints": [list(fault.hints[:hint]) for fault in report.faults]}
        facts |= {"text": as_text(report, hint, encoding="utf-8")}
    else:
        facts |= _plain(asdict(report))
    return json.dumps(facts | _plain(beside or {}), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


WIDTH = 88
IN = "  "


def as_text(report: Report, hint: int | None = None, *, encoding: str | None = None) -> str:
    """Return the report, or the hints up to `hint`, as lines without colour.

    Args:
        report: the verdict.
        hint: None for everything; 1, 2 or 3 for hints up to this one.
        encoding: the characters that may be used; None for the encoding of standard output.

    Raises:
        ArgumentError: hint is not None, 1, 2 or 3.
    """
    if encoding is None:
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    blocks = ["\n".join(_lines(part)) for part in report_parts(report, hint)]
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


COLOURS = {"right": "bold green", "wrong": "bold red", "unknown": "bold yellow", "item": "cyan", "": ""}


def print_to(console: Console, report: Report, hint: int | None = None) -> None:
    """Print the report, or the hints up to `hint`, on a rich console.

    Texts are passed as `Text`, so rich interprets no markup, emoji codes or escape codes in them.

    Raises:
        ArgumentError: a hint other than None, 1, 2, 3.
    """
    for at, part in enumerate(report_parts(report, hint)):
        if at:
            console.print()
        console.print(_printed(part, console.encoding))


def _printed(part: Part, encoding: str) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:
        return Text(fitting(words, encoding), style=style, overflow="fold")

    def indented(content: RenderableType, by: int = 2) -> Padding:
        return Padding(content, (0, 0, 0, by))

    match part:
        case Heading(mark, words):
            return Text.assemble(text(f"{MARKS[mark]} ", COLOURS[mark]), text(words, "bold"), overflow="fold")
        case Quote(place, line, words):
            quoted = Table.grid(padding=(0, 1))
            number = "│" if line is None else f"{line} │"
            quoted.add_row(text("→", COLOURS["wrong"]), text(number, "dim"), text(words, "bold"))
            above = [text(place or f"line {line}", "dim")] if place or not words else []
            return indented(Group(*above, *([quoted] if words else [])))
        case Rows(rows):
            grid = Table.grid(padding=(0, 2))
            grid.add_column(no_wrap=True)
            for row in rows:
                grid.add_row(text(row.label, "dim"), text(row.text, "cyan" if row.code else ""))
            return indented(grid)
        case Listed(title, items):
            grid = Table.grid(padding=(0, 1))
            for mark, words in items:
                grid.add_row(text(MARKS[mark], COLOURS[mark]), text(words))
            return Group(indented(text(title, "bold")), indented(grid, 4))
        case Note(words):
            return indented(text(words, "dim"))


# Text has the colour of the page. The theme of a notebook may differ from the system's, so for the colours of
# the marks the rules for JupyterLab, VS Code and Colab come last.
LIGHT = "--good:#116329;--bad:#b3261e;--doubt:#7d4e00"
DARK = "--good:#56d364;--bad:#ff8a80;--doubt:#e3b341"
STYLE = f"""
.headwise-report{{{LIGHT};font:14px/1.5 system-ui,sans-serif;max-width:60em;padding:.2em 0}}
@media (prefers-color-scheme:dark){{.headwise-report{{{DARK}}}}}
[data-jp-theme-light="true"] .headwise-report,.vscode-light .headwise-report{{{LIGHT}}}
[data-jp-theme-light="false"] .headwise-report,.vscode-dark .headwise-report,
[theme=dark] .headwise-report{{{DARK}}}
.headwise-report p{{margin:.5em 0}}
.headwise-report .head{{font-weight:600;font-size:1.1em}}
.headwise-report .right{{color:var(--good)}}
.headwise-report .wrong{{color:var(--bad)}}
.headwise-report .unknown{{color:var(--doubt)}}
.headwise-report .soft,.headwise-report dt{{opacity:.7}}
.headwise-report pre,.headwise-report code{{font:13px/1.45 ui-monospace,Menlo,Consolas,monospace;
background:none;color:inherit;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}}
.headwise-report .quote{{border-left:3px solid var(--bad);padding:.2em .8em;margin:.6em 0}}
.headwise-report dl{{display:grid;grid-template-columns:max-content 1fr;gap:.2em 1.2em;margin:.6em 0}}
.headwise-report dt{{font-weight:400}}
.headwise-report dd{{margin:0;white-space:pre-line;overflow-wrap:anywhere}}
.headwise-report ul{{list-style:none;margin:.2em 0 .6em;padding-left:1em}}
.headwise-report .note{{opacity:.7;border-top:1px solid rgba(128,128,128,.4);padding-top:.4em}}
"""


def as_html(report: Report, hint: int | None = None) -> str:
    """Return the report as one `<div>` with its own style, without scripts and with every text escaped.

    Raises:
        ArgumentError: a hint other than None, 1, 2, 3.
    """
    parts = "\n".join(map(_drawn, report_parts(report, hint)))
    # Notebooks read $...$ in HTML as formulas; these classes prevent it.
    return (
        f'<div class="headwise-report tex2jax_ignore mathjax_ignore"><style>{STYLE}</style>\n{parts}\n</div>'
    )


def _drawn(part: Part) -> str:
    match part:
        case Heading(mark, text):
            return f'<p class="head">{_mark(mark)} {escape(text)}</p>'
        case Quote(place, line, text):
            number = "" if line is None else f'<span class="soft">{line}</span> '
            above = f'<div class="soft">{escape(place)}</div>' if place else ""
            quoted = f'<pre><span class="wrong">→</span> {number}{escape(text)}</pre>'
            return f'<div class="quote">{above}{quoted}</div>'
        case Rows(rows):
            each = (
                f"<dt>{escape(row.label)}</dt>"
                f"<dd>{f'<pre>{escape(row.text)}</pre>' if row.code else escape(row.text)}</dd>"
                for row in rows
            )
            return f"<dl>{''.join(each)}</dl>"
        case Listed(title, items):
            lines = "".join(f"<li>{_mark(mark)} {escape(text)}</li>" for mark, text in items)
            return f"<p>{escape(title)}</p><ul>{lines}</ul>"
        case Note(text):
            return f'<p class="note">{escape(text)}</p>'


def _mark(mark: str) -> str:
    return f'<span class="{escape(mark)}">{MARKS[mark]}</span>'
