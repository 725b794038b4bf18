"""Tables that fit any width: a number is shown whole or its column is left out, and words are wrapped.

Needs rich; `tables.py` imports it where a table is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

LEAST = 8  # cells of words that may be broken anywhere
NARROW = 60  # columns: below, the blank edges of a table are room for numbers
WORDS = re.compile(r"(?:\d+ )?\S+\s*")  # a count stays with what it counts
PIECES = re.compile(r"[^./_\-]*[./_\-]*")  # of a word that is too long for a line: module paths


@dataclass(frozen=True)
class Terms:
    """On which terms a column is there.

    name: what it is called where it is left out.
    rank: 0 is always there; of the others, the smaller stays longer.
    least, easy: cells without which words are not shown, and with which they read well; None: numbers.
    """

    name: str
    rank: int
    least: int | None = None
    easy: int | None = None


class FittedTable(Table):
    """A rich table that decides what it shows when it is told how wide it may be.

    Columns that do not fit are left out, those of the highest rank first, and a line below says which. Where
    not even the columns of rank 0 fit, each row is a sentence of them. Columns of `add_column` are numbers
    where they do not wrap; the first is always there, the others are left out from the right.

    elsewhere: where all numbers are to be had, for that line.
    remark: a line below the table, in any width.
    """

    elsewhere: str | None = None
    remark: str | None = None

    def __init__(self, *headers: str, **options: Any) -> None:
        self._terms: dict[int, Terms] = {}  # by column
        super().__init__(*headers, **options)

    def add(
        self,
        header: str,
        name: str | None = None,
        *,
        rank: int = 0,
        least: int | None = None,
        easy: int | None = None,
        style: str = "",
    ) -> None:
        """Add a column: of numbers, or of words if `least` or `easy` is given, the cells that words need.

        Words of a cell are never broken where `least` is 0: then it is the longest of them.
        """
        number = least is None and easy is None
        self.add_column(header, justify="right" if number else "left", no_wrap=number, style=style)
        called = header.replace("-\n", "").replace("\n", " ") if name is None else name
        self._terms[len(self.columns) - 1] = Terms(called, rank, None if number else least or 0, easy)

    def _of(self, index: int) -> Terms:
        column = self.columns[index]
        name = _text(column.header).plain.replace("-\n", "").replace("\n", " ").strip()
        usual = Terms(name, index, None if column.no_wrap else LEAST)
        return self._terms.get(index, usual)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.columns or self.width is not None:
            yield from super().__rich_console__(console, options)
            return
        encoding = options.encoding
        texts = [[in_letters(_text(cell), encoding) for cell in column.cells] for column in self.columns]
        headers = [in_letters(_text(column.header), encoding) for column in self.columns]
        edges = 2 if self.box and options.max_width >= NARROW else 0
        widths = self._fit(texts, headers, options.max_width - edges)
        if self.title:
            yield in_letters(_text(self.title), encoding)
        shown = {index for index in range(len(self.columns)) if self._of(index).rank == 0}
        if widths is None:
            yield from self._sentences(texts, options.max_width)
        else:
            blank = [Text()] if self.box and not edges else []  # as wide ones have above and below
            yield from blank
            yield self._table(texts, headers, widths, edges)
            yield from blank
            shown = set(widths)
        out = [self._of(index).name for index in range(len(self.columns)) if index not in shown]
        if out:
            yield Text("\n").join(wrapped(Text(self._note(out, texts, headers), "dim"), options.max_width))
        if self.remark is not None:
            yield Text("\n").join(wrapped(in_letters(Text(self.remark), encoding), options.max_width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)

    def _table(
        self, texts: list[list[Text]], headers: list[Text], widths: dict[int, int], edges: int
    ) -> Table:
        padding = 0 if self.box else (0, 1, 0, 0)
        options: dict[str, Any] = {"box": self.box, "show_header": self.show_header, "show_edge": edges > 0}
        table = Table(pad_edge=False, padding=padding, **options)

        def folded(text: Text, index: int) -> Text:
            if self._of(index).least is None:
                return text
            return Text("\n").join(wrapped(text, widths[index]))

        for index, width in widths.items():
            column: Column = self.columns[index]  # what is too long has been wrapped
            layout: dict[str, Any] = {"justify": column.justify, "style": column.style, "no_wrap": True}
            table.add_column(folded(headers[index], index), width=width, **layout)
        for number, row in enumerate(self.rows):
            table.add_row(*(folded(texts[index][number], index) for index in widths), style=row.style)
        return table

    def _sentences(self, texts: list[list[Text]], width: int) -> Iterator[Text]:
        shown = [index for index in range(len(self.columns)) if self._of(index).rank == 0]
        between = ", " if self.show_header else " "
        for row in range(len(self.rows)):
            parts = []
            for index in shown:
                number = self.show_header and self._of(index).least is None
                cell = texts[index][row]
                parts.append(Text(f"{self._of(index).name} ").append_text(cell) if number else cell)
            yield Text("\n  ").join(joined([part for part in parts if part.plain], between, width - 2))

    def _note(self, out: Sequence[str], texts: list[list[Text]], headers: list[Text]) -> str:
        every = range(len(self.columns))
        needed = sum(self._widths(index, texts[index], headers[index])[1] + 1 for index in every) - 1
        needed += 2 if self.box and needed + 2 >= NARROW else 0
        note = f"Columns not shown: {', '.join(out)}. Make the terminal {needed} columns wide"
        return note + (f", or use {self.elsewhere}." if self.elsewhere else ".")

    def _widths(self, index: int, cells: list[Text], header: Text) -> tuple[int, int, int]:
        """Return the least width of a column, the width to read it well, and its full width."""
        terms = self._of(index)
        natural = max(map(_wide, [header, *cells] if self.show_header else cells), default=0)
        if terms.least is None:
            return natural, natural, natural
        words = (word for text in [header, *cells] for word in WORDS.findall(text.plain))
        longest = max((cell_len(word.rstrip()) for word in words), default=0)
        least = min(natural, terms.least or longest)
        return least, max(least, natural if terms.easy is None else min(natural, terms.easy)), natural

    def _fit(self, texts: list[list[Text]], headers: list[Text], width: int) -> dict[int, int] | None:
        """Return {column: width}, or None if the columns of rank 0 do not fit."""
        every = range(len(self.columns))
        sizes = [self._widths(index, texts[index], headers[index]) for index in every]
        rank = {index: self._of(index).rank for index in every}
        chosen = {index: sizes[index][0] for index in every if rank[index] == 0}

        def left() -> int:
            return width + 1 - sum(size + 1 for size in chosen.values())

        def grow(step: int) -> None:
            for _ in range(left()):
                index = max(chosen, key=lambda at: sizes[at][step] - chosen[at])
                chosen[index] += sizes[index][step] > chosen[index]

        if left() < 0:
            return None
        grow(1)
        for index in sorted(every, key=lambda at: (rank[at], at)):
            if index not in chosen and sizes[index][1] + 1 <= left():
                chosen[index] = sizes[index][1]
        grow(2)
        return {index: chosen[index] for index in every if index in chosen}


def _text(cell: object) -> Text:
    """Return a cell as Text; strings are not markup."""
    return cell if isinstance(cell, Text) else Text(str(cell))


def _wide(text: Text) -> int:
    return max(map(cell_len, text.plain.split("\n")))


def in_letters(text: Text, encoding: str) -> Text:
    """Replace each character that the encoding lacks by a question mark."""
    try:
        shown = text.plain.encode(encoding, "replace").decode(encoding)
    except LookupError:
        return in_letters(text, "ascii")
    other = text.copy()
    other.plain = shown
    return other


def joined(parts: Sequence[Text], between: str, width: int) -> list[Text]:
    """Join the parts into lines of at most `width` cells; parts that are longer are wrapped."""
    lines = [Text()]
    for number, part in enumerate(parts):
        piece = part.copy().append(between.rstrip()) if number < len(parts) - 1 else part
        gap = between[len(between.rstrip()) :] if lines[-1].plain else ""
        if cell_len(lines[-1].plain + gap + piece.plain) > width:
            first, *more = wrapped(piece, max(width, 1))
            lines[-1:] = [lines[-1], first] if gap else [first]
            lines += more
        else:
            lines[-1] = lines[-1].append(gap).append_text(piece)
    return lines


def wrapped(text: Text, width: int) -> list[Text]:
    """Wrap text into lines of at most `width` cells: at spaces, else at punctuation in words, else anywhere.

    Example:
        >>> [line.plain for line in wrapped(Text("in encoder.layers.12.attention"), 12)]
        ['in', 'encoder.', 'layers.12.', 'attention']
    """
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        starts = _starts(line.plain, width)
        for part in line.divide(starts[1:]):
            part.rstrip()
            lines.append(part)
    return lines


def _starts(line: str, width: int) -> list[int]:
    starts, room = [0], width
    for at, part, on_its_own in _parts(line, width):
        if at != starts[-1] and (on_its_own or cell_len(part.rstrip()) > room):
            starts.append(at)
            room = width
        room -= cell_len(part)
    return starts


def _parts(line: str, width: int) -> Iterator[tuple[int, str, bool]]:
    """Yield (start, text, whether it begins a line) of each word; of a word longer than a line its
    parts, of a part too long its characters."""
    for match in WORDS.finditer(line):
        word, at = match.group(), match.start()
        if cell_len(word.rstrip()) <= width:
            yield at, word, False
            continue
        for piece in PIECES.findall(word):
            for part in piece if cell_len(piece.rstrip()) > width else [piece]:
                yield at, part, at == match.start()
                at += len(part)
