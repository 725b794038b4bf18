"""A report in the terminal, in colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..report import Report
from .in_words import tell
from .letters import MARKS, fitting
from .parts import Heading, Listed, Note, Part, Quote, Rows

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

COLOURS = {"right": "bold green", "wrong": "bold red", "unknown": "bold yellow", "item": "cyan", "": ""}


def print_to(console: Console, report: Report, hint: int | None = None) -> None:
    """Print the report, or the hints up to `hint`, on a rich console.

    Every text goes in as text: rich reads no markup, no emoji codes and no escape codes in it.

    Raises:
        ArgumentError: a hint other than None, 1, 2, 3.
    """
    for at, part in enumerate(tell(report, hint)):
        if at:
            console.print()
        console.print(_drawn(part, console.encoding))


def _drawn(part: Part, encoding: str) -> RenderableType:
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def text(words: str, style: str = "") -> Text:
        return Text(fitting(words, encoding), style=style, overflow="fold")

    def indented(what: RenderableType, by: int = 2) -> Padding:
        return Padding(what, (0, 0, 0, by))

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
