"""Heat maps in the terminal: a box of shaded blocks per head, as many side by side as fit.

The shade goes by the square root of the weight, as in pictures. Letters: H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import ArgumentError
from ..heads.collection import Heads
from ..heads.layer import MIXED, Head, LayerHeads
from ..heads.record import Record
from .colour_maps import NOTHING, WEIGHTS
from .heads_tables import Chosen
from .heatmaps import call_of, counted_queries, names_of, queries_pooled, summed
from .tables import table_class
from .texts import plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

FINEST = 256  # positions a side: beyond, no dense weights are made
FROM = (0.01, 0.1, 0.25, 0.5)  # the weights at which the next shade begins: even steps of the square root
SHADES, PLAIN_SHADES = "·░▒▓█", ".:+*#"
FRAME, PLAIN_FRAME = "┌─┐└┘│", "+-+++|"  # corners and what is between them, above and below; the sides
RIGHT_TO_LEFT = {"R", "AL", "AN"}
MARK = "\N{LEFT-TO-RIGHT MARK}"  # around a name from right to left, or the row would turn round with it
NAMED = 40  # positions a side that are still drawn one by one where there are several heads
COARSE = 12  # cells a side: rather one box less in a row than coarser ones
LONGEST = 12  # cells of a token's name
LEAST = 20  # columns
TITLE = 15  # cells: the longest word of a title
ENOUGH = 3  # boxes in a row, for a title to take more room than its box
GAP = 2  # between boxes
LARGEST, HIGHEST = 3, 40  # lines of a cell and, nearly, of a box, of one head alone
MOST_AT = "attends to"


class TerminalHeatmaps:
    """Heat maps that show themselves: printed as they are, in a terminal with its colours."""

    def __init__(self, lines: list[Text], colour: bool) -> None:
        self.lines, self.colour = lines, colour

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        fine = self.colour and not console.no_color and console.color_system in ("256", "truecolor")
        for line in self.lines:
            shown = line.copy() if fine else Text(line.plain)
            shown.no_wrap, shown.overflow = True, "ignore"
            yield shown

    def __str__(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self.lines)

    __repr__ = __str__


def terminal_heatmaps(
    heads: Heads,
    *,
    chosen: Chosen | None = None,
    batch: int = 0,
    width: int,
    encoding: str = "utf-8",
    colour: bool = True,
) -> TerminalHeatmaps:
    """Return a box for each head: queries in rows, keys in columns, darker for larger weights.

    One head alone is drawn as large as fits, each query with its key of the largest weight. Where positions
    do not fit they share cells: then a cell shows how much of a query's weight falls into it, in the mean.

    Args:
        width: of the terminal, in columns: 20 or more.
        encoding: of the terminal; what it lacks is drawn with other characters.
        colour: with the colours of pictures, where the terminal has at least 256 of them.

    Example:
        >>> from headwise import AttentionMap, Heads
        >>> from headwise.heads.record import reduce
        >>> before = AttentionMap.from_weights(torch.tensor([[[[1., 0, 0], [0.9, 0.1, 0], [0, 0.9, 0.1]]]]))
        >>> heads = Heads()
        >>> heads.add("attention", reduce(before, names=["previous"], keep=True))
        >>> print(terminal_heatmaps(heads, width=28))
        0.0 previous-token 0.90
           0   1   2
          ┌────────────┐  attends to
        0 │████        │  0 1.00
          │████        │
        1 │████▒▒▒▒    │  0 0.90
          │████▒▒▒▒    │
        2 │    ████▒▒▒▒│  1 0.90
          │    ████▒▒▒▒│
          └────────────┘
        least weight:  · 0  ░ 0.01
        ▒ 0.1  ▓ 0.25  █ 0.5
        blank: none
    """
    table_class()  # before anything is computed, to report errors at once
    if width < LEAST:
        raise ArgumentError(f"width must be at least {LEAST} columns: got {width}; use a wider terminal")
    some = heads.chosen(chosen)
    pen = Pen.of(encoding)
    groups = groupby(some, key=lambda head: head.path)
    layers = [Drawn.of(heads, path, list(members), batch, pen) for path, members in groups]
    lines: list[Text] = []
    alone = len(some) == 1
    for _, members in groupby(layers, _alike):
        together = list(members)
        if lines:
            lines.append(pen.text())
        lines += _large_head(together[0], width, pen) if alone else _several(together, width, pen)
    lines += _scale(width, pen)
    return TerminalHeatmaps(lines, colour)


def _alike(drawn: Drawn) -> object:
    """Return a key that layers share whose boxes may stand side by side."""
    return drawn.lengths, drawn.queries, id(drawn) if drawn.by_path else None


def _several(layers: list[Drawn], width: int, pen: Pen) -> list[Text]:
    (T, S), named = layers[0].lengths, layers[0].queries
    heads = [(head, number, drawn) for drawn in layers for number, head in enumerate(drawn.heads)]
    margin = _margin(named, T, width)
    if S + 2 > width - margin - 1 or max(T, S) > NAMED:
        named, margin = None, _margin(None, T, width)
    room = width - margin - 1
    if max(T, S) <= NAMED and S + 2 <= room:
        rows, columns = T, S
        wide = 2 if _fit(2 * S + 2, room) >= min(2, len(heads)) else 1
    else:
        half, whole = (((room + GAP) // boxes - GAP - 2) // 2 for boxes in (2, 1))
        most = min(half if half >= COARSE else whole, NAMED)
        rows, columns, wide = min(T, most), min(S, most), 2
    rows, columns = _no_finer(layers, rows, columns)
    if rows < T:
        named, margin = None, _margin(None, T, width)
    box = columns * wide + 2
    slot = max(box, min(TITLE, room))
    lone = max(slot, *(_title(head, drawn, width, pen)[0].cell_len for head, _, drawn in heads))
    if _fit(lone, room) >= min(ENOUGH, len(heads)):
        slot = lone  # every title in one line
    side_by_side = max(1, _fit(slot, room))
    lines = _headline(layers[0], width, pen)
    pictures = {id(drawn): drawn.cells(rows, columns).tolist() for drawn in layers}
    beside = _names(named, T, rows, margin, pen)
    for start in range(0, len(heads), side_by_side):
        some = heads[start : start + side_by_side]
        if start:
            lines.append(pen.text())
        titles = [_title(head, drawn, slot, pen) for head, _, drawn in some]
        most = max(map(len, titles))
        titles = [[pen.text()] * (most - len(title)) + title for title in titles]
        boxes = [_box(pictures[id(drawn)][number], wide, pen) for _, number, drawn in some]
        names = [pen.text(" " * (margin + 1))] * most + beside
        for name, *parts in zip(names, *map(add, titles, boxes), strict=True):
            padded = [part.copy() for part in parts]
            for part in padded:
                part.pad_right(max(0, slot - part.cell_len) + GAP)
            lines.append(_joined([name, *padded], pen))
    return lines + _pooled(layers[0], rows, columns, width, pen)


def _no_finer(layers: list[Drawn], rows: int, columns: int) -> tuple[int, int]:
    """Limit the cells to those of a kept picture, which may have fewer."""
    made = [drawn.mass.shape[-2:] for drawn in layers]
    return min(rows, *(down for down, _ in made)), min(columns, *(across for _, across in made))


def _fit(box: int, room: int) -> int:
    return (room + GAP) // (box + GAP)


def _margin(names: list[str] | None, length: int, width: int) -> int:
    """Return the width in cells for names, or for the first and last position, beside a row of boxes."""
    from rich.cells import cell_len

    longest = len(str(length - 1)) if names is None else max(map(cell_len, names), default=0)
    return min(longest, LONGEST, width // 3)


def _names(names: list[str] | None, length: int, rows: int, margin: int, pen: Pen) -> list[Text]:
    """Return the text beside each line of a box, edges included: names, or the first and last position."""
    if names is not None:
        shown = [pen.name(name, margin, right=True) for name in names]
    else:
        shown = _ends(length, rows, margin, pen)
    beside = [pen.text(" " * (margin + 1))]
    return [*beside, *(name.append(" ") for name in shown), *beside]


def _ends(length: int, rows: int, margin: int, pen: Pen) -> list[Text]:
    """Return the labels beside rows that positions share: the first and the last position."""
    ends = {0: "0", rows - 1: str(length - 1)}
    return [pen.text(f"{ends.get(row, ''):>{margin}}", "dim") for row in range(rows)]


def _box(rows: list[list[float]], wide: int, pen: Pen, high: int = 1) -> list[Text]:
    columns = len(rows[0]) * wide
    inside = [_joined([pen.side, pen.cells(row, wide), pen.side], pen) for row in rows for _ in range(high)]
    return [pen.edge(columns, top=True), *inside, pen.edge(columns, top=False)]


def _title(head: Head, drawn: Drawn, width: int, pen: Pen) -> list[Text]:
    where = f"head {head.head}" if drawn.by_path else f"{head.layer}.{head.head}"
    labelled = head.label.name != MIXED
    label = f"{head.label.name} {head.label.score:.2f}" if labelled else MIXED
    return pen.lines(f"{where} {label}", width, "bold" if labelled else "dim")


def _headline(drawn: Drawn, width: int, pen: Pen) -> list[Text]:
    return pen.lines(drawn.heads[0].path, width) if drawn.by_path else []


def _pooled(drawn: Drawn, rows: int, columns: int, width: int, pen: Pen) -> list[Text]:
    T, S = drawn.lengths
    if (rows, columns) == (T, S):
        return []
    sentence = (
        f"{T} queries and {S} keys are pooled into {rows} x {columns} cells. A cell shows the weight on its "
        "keys, averaged over its queries."
    )
    return pen.lines(sentence, width)


def _joined(parts: Sequence[Text], pen: Pen) -> Text:
    joined = pen.text().join(parts)
    joined.rstrip()
    return joined


def _large_head(drawn: Drawn, width: int, pen: Pen) -> list[Text]:
    from rich.cells import cell_len

    (T, S), names = drawn.lengths, drawn.queries
    digits = len(str(T - 1))
    name = 0 if names is None else _margin(names, T, width)
    if S + digits + 1 + name + 1 + 2 > width:
        name = 0  # cells rather than names
    margin = digits + (name and name + 1)
    room = width - margin - 1 - 2
    columns = S if S <= room else room // 2
    rows = min(T, columns if S > room else max(room // 2, NAMED))
    rows, columns = _no_finer([drawn], rows, columns)
    picture = drawn.cells(rows, columns)[0].tolist()
    most_at = _heaviest(picture, drawn, pen) if (rows, columns) == (T, S) else []
    beyond = GAP + max(map(cell_len, most_at)) if most_at else 0

    def size(room: int) -> int:
        return max(1, min(LARGEST, room // columns // 2, HIGHEST // rows))

    if room - beyond < columns or size(room - beyond) < min(2, size(room)):
        most_at, beyond = [], 0  # words make room for cells that can be seen
    room -= beyond
    high = size(room)
    wide = min(room // columns, 2 * high)
    if rows == T:
        beside = [pen.text(f"{at:>{digits}}", "dim") for at in range(T)]
        for line_text, token in zip(beside, (names or []) if name else [], strict=False):
            line_text.append(" ").append_text(pen.name(token, name))
    else:
        beside = _ends(T, rows, margin, pen)
    lines = _headline(drawn, width, pen) + _title(drawn.heads[0], drawn, width, pen)
    lines.append(pen.text(" " * (margin + 2) + _positions(S, columns, wide), "dim"))
    blank, middle = pen.text(" " * (margin + 1)), (high - 1) // 2
    box = _box(picture, wide, pen, high)
    for line, line_text in enumerate(box):
        row, inside = divmod(line - 1, high)
        if line in (0, len(box) - 1) or inside != middle:
            lines.append(_joined([blank, line_text], pen))
            continue
        at = [pen.text(" " * GAP + most_at[row], "dim")] if most_at else []
        lines.append(_joined([beside[row], pen.text(" "), line_text, *at], pen))
    top = lines[-len(box)]
    if most_at and top.cell_len + GAP + len(MOST_AT) <= width:
        top.append(" " * GAP + MOST_AT, "dim")
    return lines + _pooled(drawn, rows, columns, width, pen)


def _positions(length: int, columns: int, wide: int) -> str:
    """Return a line of positions above the columns, as many as fit."""
    line = ""
    for column in range(columns):
        number, at = str(column * length // columns), column * wide
        if not line or at > len(line):
            line = line.ljust(at) + number
    return line


def _heaviest(picture: list[list[float]], drawn: Drawn, pen: Pen) -> list[str]:
    """Return, per query, the key with the largest weight, and that weight."""

    def of(row: list[float]) -> str:
        at = row.index(weight := max(row))
        key = str(at) if drawn.keys is None else pen.name(drawn.keys[at], LONGEST).plain.rstrip(" ")
        return f"{key} {weight:.2f}" if weight > 0 else ""

    return [of(row) for row in picture]


def _scale(width: int, pen: Pen) -> list[Text]:
    from .fitted_tables import joined

    parts = [pen.text("least weight:")]
    for shade, start in zip(pen.shades, (0.0, *FROM), strict=True):
        parts.append(pen.text().append(shade, colours_of(start or FROM[0] / 4)).append(f" {start:g}"))
    parts.append(pen.text("blank: none"))
    return joined(parts, "  ", width)


@dataclass(frozen=True)
class Drawn:
    """The chosen heads of one layer."""

    heads: list[Head]
    mass: Tensor  # [H, rows, columns]: weights, or summed where positions share a cell
    counts: Tensor  # [rows]: how many queries each row is the sum of; of weights, which queries count
    lengths: tuple[int, int]
    queries: list[str] | None  # their names
    keys: list[str] | None
    by_path: bool

    @classmethod
    def of(cls, heads: Heads, path: str, members: list[Head], batch: int, pen: Pen) -> Drawn:
        layer = heads[path]
        mass, counts, call = _mass(layer, batch)
        _, _, T, S = call.shape
        queries, keys = (
            None if names is None else [pen.encodable(plain(name)) for name in names]
            for names in names_of(heads, batch, call)
        )
        which = [head.head for head in members]
        return cls(members, mass[which], counts, (T, S), queries, keys, not isinstance(layer.layer, int))

    def cells(self, rows: int, columns: int) -> Tensor:
        """Return [H, rows, columns]: the mean over the queries of a row of the weight in a cell."""
        mass = summed(self.mass, -1, columns)
        if self.mass.shape[-2] == self.lengths[0]:  # of weights; padded queries have theirs, until they share
            if rows == self.lengths[0]:
                return mass
            mass = mass * self.counts[:, None]
        counts = summed(self.counts, -1, rows)
        return summed(mass, -2, rows) / counts.clamp(min=1)[:, None]


def _mass(layer: LayerHeads, batch: int) -> tuple[Tensor, Tensor, Record]:
    """Return the weights of the last call that has them, pooled beyond 256 positions; queries of each row."""
    call = call_of(layer)
    _, _, T, S = call.shape
    if call.map is None:
        assert call.pooled is not None
        return call.pooled[batch].cpu().float(), queries_pooled(call, batch), call
    weights = call.map.select(batch=batch)
    mass = weights.dense() if max(T, S) <= FINEST else weights.pooled(FINEST)
    mass = mass.detach()[0].cpu().float()
    return mass, summed(counted_queries(weights), 0, mass.shape[1]), call


@dataclass(frozen=True)
class Pen:
    """The characters that an encoding has."""

    encoding: str
    shades: str
    frame: str
    cut: str

    @classmethod
    def of(cls, encoding: str) -> Pen:
        try:
            "".encode(encoding)
        except LookupError:
            encoding = "ascii"
        blocks = SHADES + FRAME
        fine = blocks.encode(encoding, "replace").decode(encoding) == blocks
        cut = "…" if "…".encode(encoding, "replace").decode(encoding) == "…" else "~"
        return cls(encoding, SHADES if fine else PLAIN_SHADES, FRAME if fine else PLAIN_FRAME, cut)

    def encodable(self, text: str) -> str:
        return text.encode(self.encoding, "replace").decode(self.encoding)

    def text(self, words: str = "", style: str = "") -> Text:
        from rich.text import Text

        return Text(self.encodable(words), style)

    def lines(self, words: str, width: int, style: str = "") -> list[Text]:
        """Wrap words into lines of at most `width` cells."""
        from .fitted_tables import wrapped

        return wrapped(self.text(plain(words), style), width)

    def name(self, token: str, cells: int, *, right: bool = False) -> Text:
        """Return a token padded or cut to exactly so many cells."""
        from rich.cells import cell_len

        shown = token
        while cell_len(shown) > cells:
            shown = shown[: -1 - (shown != token)] + self.cut if len(shown) > 1 else ""
        space = " " * (cells - cell_len(shown))
        if any(unicodedata.bidirectional(char) in RIGHT_TO_LEFT for char in shown):
            shown = f"{MARK}{shown}{MARK}"
        return self.text(space + shown if right else shown + space)

    def cells(self, row: Sequence[float], wide: int) -> Text:
        shown = self.text()
        for weight in row:
            shown.append(self.shade(weight) * wide, colours_of(weight))
        return shown

    def shade(self, weight: float) -> str:
        """Return the character for a weight; a space for 0 and NaN."""
        if not weight > 0:
            return " "
        return self.shades[sum(weight >= start for start in FROM)]

    def edge(self, columns: int, top: bool) -> Text:
        left, right = (0, 2) if top else (3, 4)
        return self.text(self.frame[left] + self.frame[1] * columns + self.frame[right], "dim")

    @property
    def side(self) -> Text:
        return self.text(self.frame[5], "dim")


def colours_of(weight: float) -> str:
    """Return the style of a weight: text and background in one colour of the map of pictures."""
    if not weight > 0:
        return f"on {NOTHING}"
    at = min(math.sqrt(weight), 1.0) * (len(WEIGHTS) - 1)
    low = min(int(at), len(WEIGHTS) - 2)
    lower, upper = (bytes.fromhex(WEIGHTS[low + step][1:]) for step in (0, 1))
    mixed = (round(a + (b - a) * (at - low)) for a, b in zip(lower, upper, strict=True))
    ground = "#" + "".join(f"{part:02x}" for part in mixed)
    return f"{ground} on {ground}"
