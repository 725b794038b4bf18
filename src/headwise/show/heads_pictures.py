"""Pictures of watched heads: all layers as a grid of small heat maps, one layer, or one head large.

Letters: H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..heads.collection import Heads
from ..heads.layer import Head
from ..heads.layer_names import Layer
from .heads_tables import census
from .heatmaps import (
    CELLS,
    OF_LABEL,
    cells_of,
    draw,
    label_of,
    layer_name,
    meaning_of,
    names_in,
    names_of,
    queries_in,
    tint,
)
from .sheet import (
    FAINT,
    INK,
    LONGEST,
    PALE,
    Page,
    fine_enough,
    heat,
    in_letters,
    named,
    need_matplotlib,
    open_frame,
    room,
    sharpness,
    whole,
    words,
    write,
)
from .texts import MISSING, fitted, inches, label, quoted, wrapped

if TYPE_CHECKING:
    import numpy
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .sheet import Cells

SMALL_CELLS = 128  # a side, in the grid
MOST_NAMED = 20  # tokens that can be read beside a small heat map
TITLED = 0.7  # inches: the smallest heat map with words above it
PITCH = 0.09  # inches from one name to the next
GAP, OVER, LINE = 0.14, 0.24, 0.17  # inches: between heat maps, above one for its label, of a line of text
GUIDE = (
    "Each square is one head. Rows are tokens that attend (queries), columns the tokens they attend to "
    "(keys). Darker means a larger weight. A label is followed by its score, from 0 to 1."
)
GUIDE_WRITTEN = (
    "Each square is one head. Rows are tokens that attend (queries), columns the tokens they attend to "
    "(keys). Darker means a larger weight × ‖v W_O‖, which is the norm of what the key adds to the output. "
    "1 is the largest ‖v W_O‖ of the layer. The labels were computed from the weights alone."
)
NO_FONT = f" {MISSING}: a character that is in no installed font."

WEIGHTS, WRITES = "Weights", "Weights × ‖v W_O‖"
STRIP, BETWEEN = 0.55, 0.5  # inches: of what keys receive, and between two maps of one head
LARGE, LEAST, LARGE_PITCH = 5.0, 3.2, 0.15  # inches: without names, the least with names, from name to name


Segment = tuple[tuple[float, float], tuple[float, float]]  # from here to there, in inches


def model_picture(
    heads: Heads,
    *,
    batch: int = 0,
    text: str | None = None,
    chosen: Sequence[tuple[Layer, int]] | None = None,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    written: bool = False,
) -> Figure:
    """Draw `headwise.Heads.plot` of all heads: layers downwards, heads to the right.

    In each, queries run down and keys to the right, on one scale from 0 to 1. Above a head that earned one
    stands its label with the score, in the colour of its frame; below all, what the labels mean. A cell is a
    whole number of dots, two at least: beyond 128 positions, or as many as have room, positions share cells.
    Layers and columns without a chosen head are left out. Names of queries and of keys stand in the layers
    that they fit: those of cross-attention, and each in the self-attention of its text.
    """
    everyone = heads.chosen(chosen)
    need_matplotlib()
    sheet = Sheet.of(heads, everyone, batch, query_tokens, key_tokens, written)
    legend = _legend(everyone, sheet)
    lines = _headline(heads, len(everyone), text, written, sheet)
    top = (0.22 + 0.24 * len(lines) + LINE * len(sheet.guide)) * sheet.grown
    under = (0.17 + LINE * sum(len(text_shown) for _, _, text_shown in legend[0])) * sheet.grown
    page = Page(sheet.width, top + sheet.tall + under, sheet.dpi, sheet.grown)
    ax = page.axes(0, 0, page.width, page.height)  # one unit is one inch, y grows downwards
    ax.set_axis_off()
    _say(ax, sheet, lines)
    y = top + 0.2 * sheet.grown
    first = y + sheet.over
    _name_columns(ax, sheet, y)
    grid: list[Segment] = []
    for row in sheet.rows:
        y = page.even(y + sheet.over)
        ax.text(0.12, y + row.tall / 2, row.name, size=row.size, va="center", **words(INK))
        _name_queries(ax, sheet, row, y)
        for head in row.heads:
            x = page.even(sheet.x(head.head))
            heat(ax, row.picture[head.head], (x, x + row.wide, y + row.tall, y), page.scale)
            _frame(ax, row, head, x, y)
            if sheet.side >= TITLED and label_of(head):
                text_shown, size = fitted(
                    label_of(head), sheet.side + GAP / 2, 6.8 * sheet.grown, 5, bold=True
                )
                ax.text(x - 0.03, y - 0.065, text_shown, size=size, **words(tint(head) or FAINT, text_shown))
            if head.head in row.ends:
                _name_keys(ax, sheet, row, x, y + row.tall)
            grid += _lines(sheet, row, x, y)
        y += row.tall + row.below
    _explain(ax, sheet, legend, y + 0.22 * sheet.grown)
    if grid:
        from matplotlib.collections import LineCollection

        ax.add_collection(LineCollection(grid, colors="white", linewidths=0.4))
    ax.set_xlim(0, page.width)
    ax.set_ylim(page.height, 0)
    pooled = any(row.pooled for row in sheet.rows)
    some = next((row.picture for row in sheet.rows if row.picture.mask.any()), sheet.rows[0].picture)
    long = max(1.2, min(y - sheet.rows[-1].below - first, 4.0 * sheet.grown))
    page.scale_bar(sheet.x_end, first, long, meaning_of(pooled, written), some)
    return in_letters(page.figure)


def _lines(sheet: Sheet, row: Row, x: float, y: float) -> list[Segment]:
    """Return thin lines between the cells of a heat map, if cells are large enough."""
    T, S = row.lengths
    if max(T, S) > MOST_NAMED or sheet.side < TITLED:
        return []
    down = [(x + row.wide * s / S) for s in range(1, S)]
    across = [(y + row.tall * t / T) for t in range(1, T)]
    return [((at, y), (at, y + row.tall)) for at in down] + [((x, at), (x + row.wide, at)) for at in across]


@dataclass
class Row:
    """One layer of the grid."""

    name: str
    size: float  # of its name, in points
    heads: list[Head]  # those to draw
    picture: Cells
    lengths: tuple[int, int]
    names: tuple[list[str], list[str]]  # of queries, of keys, as written; []: there is no room
    wide: float  # inches of one heat map
    tall: float
    ends: set[int] = field(default_factory=set)  # the heads with names of keys below: the next row has others
    below: float = 0.0  # inches for these

    @property
    def pooled(self) -> bool:
        """Return True if positions share cells."""
        return self.picture.shape[1:] != self.lengths


@dataclass
class Sheet:
    """The measures of a grid, in inches."""

    rows: list[Row]
    columns: list[int]  # the heads that have one
    side: float  # of the largest heat map
    left: float  # where the first begins
    width: float
    dpi: int
    grown: float  # how much larger than usual letters are
    guide: list[str] = field(default_factory=list)  # to read it, in lines

    @classmethod
    def of(
        cls,
        heads: Heads,
        everyone: Sequence[Head],
        batch: int,
        query_tokens: Sequence[str] | None,
        key_tokens: Sequence[str] | None,
        written: bool,
    ) -> Sheet:
        layers: dict[str, list[Head]] = {}
        for head in everyone:
            layers.setdefault(head.path, []).append(head)
        columns = sorted({head.head for head in everyone})
        count, across = len(layers), len(columns)
        roughly = max(0.3, min(max(1.0, min(2.4, 6.2 / across, 8 / count)), 30 / across, 34 / count))
        dpi = sharpness(across * (roughly + GAP) + 2, count * (roughly + OVER) + 2)
        most = fine_enough(roughly, dpi, SMALL_CELLS)
        drawings = [cells_of(heads[path], batch, most, written=written) for path in layers]
        names = names_in(heads, batch, [call for _, _, call in drawings], query_tokens, key_tokens)
        longest = max((max(lengths) for _, lengths, _ in drawings if max(lengths) <= MOST_NAMED), default=1)
        side = max(roughly, min(PITCH * longest, 30 / across, 34 / count))
        grown = min(1.6, max(1.0, across * (side + GAP) / 13))
        rows = []
        for (path, mine), (picture, lengths, _), layer_names in zip(
            layers.items(), drawings, names, strict=True
        ):
            layer = heads[path]
            number = isinstance(layer.layer, int)
            shown = (
                _written_out(layer_names[0], lengths[0], side),
                _written_out(layer_names[1], lengths[1], side),
            )
            tall, wide = (whole(side, count, dpi) for count in picture.shape[1:])
            size = (9 if number else 6.5) * grown
            rows.append(Row(label(layer_name(layer), 34), size, mine, picture, lengths, shown, wide, tall))
        side = max(max(row.wide, row.tall) for row in rows)
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            row.ends = {head.head for head in row.heads}
            if after is None or (row.lengths[1], row.names[1]) != (after.lengths[1], after.names[1]):
                row.below = _below(row, grown)
            else:
                row.ends -= {head.head for head in after.heads}
        left = 0.34 + max(inches(row.name, row.size) for row in rows)
        left += max(_beside(row, grown) for row in rows)
        width = max(left + across * (side + GAP) + 0.8 * grown, 8.5)
        sheet = cls(rows, columns, side, left, width, dpi, grown)
        sheet.guide = wrapped(_guide(rows, written), width - 0.3, 8.5 * grown)
        return sheet

    def x(self, head: int) -> float:
        """Return the left edge of a head's column."""
        return self.left + self.columns.index(head) * (self.side + GAP)

    @property
    def x_end(self) -> float:
        return self.left + len(self.columns) * (self.side + GAP)

    @property
    def tall(self) -> float:
        """Return the height of the grid, with names above and below."""
        return 0.2 * self.grown + sum(self.over + row.tall + row.below for row in self.rows)

    @property
    def over(self) -> float:
        """Inches above a heat map, for its label."""
        return OVER * self.grown if self.side >= TITLED else GAP


def _written_out(names: list[str] | None, length: int, side: float) -> list[str]:
    if names is None or length > MOST_NAMED or side / length < 0.8 * PITCH:
        return []
    return [label(token, LONGEST) for token in names]


def points(side: float, length: int) -> float:
    """Return the size of names along a heat map."""
    return min(7.0, 0.88 * 72 * side / length)


def _beside(row: Row, grown: float) -> float:
    if row.names[0]:
        return max(inches(name, points(row.tall, row.lengths[0])) for name in row.names[0])
    return inches(str(row.lengths[0] - 1), 6 * grown)


def _below(row: Row, grown: float) -> float:
    if row.names[1]:
        return 0.1 + max(inches(name, points(row.wide, row.lengths[1])) for name in row.names[1])
    return 0.2 * grown


def _guide(rows: Sequence[Row], written: bool) -> str:
    guide = GUIDE_WRITTEN if written else GUIDE
    shared = sorted({max(row.picture.shape[1:]) for row in rows if row.pooled})
    if shared:
        guide += f" Long texts are pooled into {shared[-1]} rows and columns."
    if any(MISSING in name for row in rows for side in row.names for name in side):
        guide += NO_FONT
    return guide


def _frame(ax: Axes, row: Row, head: Head, x: float, y: float) -> None:
    """Draw a frame one point away from the cells, so that it covers none."""
    from matplotlib.patches import Rectangle

    colour = tint(head)
    thick = 1.6 if colour else 0.5
    away = (1.5 + thick / 2) / 72
    wide, tall = row.wide + 2 * away, row.tall + 2 * away
    corner = x - away, y - away
    ax.add_patch(Rectangle(corner, wide, tall, fill=False, edgecolor=colour or PALE, linewidth=thick))


def _name_queries(ax: Axes, sheet: Sheet, row: Row, y: float) -> None:
    x, T, size = sheet.x(row.heads[0].head) - 0.07, row.lengths[0], 6 * sheet.grown
    if row.names[0]:
        size = points(row.tall, T)
        for at, name in enumerate(row.names[0]):
            place = y + row.tall * (at + 0.5) / T
            ax.text(x, place, name, size=size, ha="right", va="center_baseline", **words(FAINT))
        return
    ax.text(x, y, "0", size=size, ha="right", va="top", **words(FAINT))
    if T > 1 and row.tall > 0.25 * sheet.grown:
        ax.text(x, y + row.tall, str(T - 1), size=size, ha="right", va="bottom", **words(FAINT))


def _name_keys(ax: Axes, sheet: Sheet, row: Row, x: float, y: float) -> None:
    """Write the names of keys below one heat map, or its first and last position where they fit."""
    S = row.lengths[1]
    if row.names[1]:
        size = points(row.wide, S)
        for at, name in enumerate(row.names[1]):
            place = x + row.wide * (at + 0.5) / S
            ax.text(place, y + 0.07, name, size=size, rotation=90, ha="center", va="top", **words(FAINT))
        return
    last, size = str(S - 1), 6 * sheet.grown
    if inches(last, size) > row.wide:
        return
    if S > 1:
        ax.text(x + row.wide, y + 0.06, last, size=size, ha="right", va="top", **words(FAINT))
    if S == 1 or inches(f"0  {last}", size) <= row.wide:
        ax.text(x, y + 0.06, "0", size=size, ha="left", va="top", **words(FAINT))


def _name_columns(ax: Axes, sheet: Sheet, y: float) -> None:
    every = 1
    size = 8 * sheet.grown
    while inches(f"head {sheet.columns[-1]}  ", size) > every * (sheet.side + GAP):
        every += 1
    for number, head in enumerate(sheet.columns):
        if number % every == 0:
            x = sheet.x(head) + sheet.side / 2
            if sheet.side < TITLED:
                x = max(x, sheet.left)
            ax.text(x, y, f"head {head}", size=size, ha="center", va="center", **words(INK))


Line = tuple[str, float, bool]  # text, points, in bold
Legend = tuple[list[tuple[str, str, list[str]]], float]  # (label, how many have it, its meaning in lines)


def _headline(heads: Heads, count: int, text: str | None, written: bool, sheet: Sheet) -> list[Line]:
    subject = "what each key contributes to the output, in" if written else "what"
    verbs = ("", "") if written else (" attend to", " attends to")
    everyone = sum(map(len, heads.values()))
    which = f"its {count} heads" if count == everyone else f"{count} of its {everyone} heads"
    if count == 1:
        which = "its one head" if everyone == 1 else f"one of its {everyone} heads"
    title, room = f"{heads.title or 'Model'}: {subject} {which}{verbs[count == 1]}", sheet.width - 0.3
    grown = sheet.grown
    if text is not None:
        whole_text = label(f"{title} in “{' '.join(text[:1000].split())}”", 1200)
        if inches(whole_text, 11 * grown, bold=True) <= room:
            return [(*fitted(whole_text, room, 12.5 * grown, 11 * grown, bold=True), True)]
    lines = [(*fitted(label(title, 120), room, 12.5 * grown, 8, bold=True), True)]
    return lines if text is None else [*lines, (quoted(text, room, 10 * grown), 10 * grown, False)]


def _say(ax: Axes, sheet: Sheet, lines: Sequence[Line]) -> None:
    y = 0.27 * sheet.grown
    for line, size, bold in lines:
        ax.text(0.12, y, line, size=size, va="center", **words(INK, line if bold else ""))
        y += 0.24 * sheet.grown
    for line in sheet.guide:
        ax.text(0.12, y, line, size=8.5 * sheet.grown, va="center", **words(FAINT))
        y += LINE * sheet.grown


def _legend(everyone: Sequence[Head], sheet: Sheet) -> Legend:
    """Return the lines of the legend, and the width of their first column in inches."""
    counted, size = census(everyone), 7.5 * sheet.grown
    beside = 0.2 + max(inches(f"{count} {name}", size, bold=True) for name, count, _ in counted)
    room = max(2.5, sheet.width - sheet.left - beside - 0.15)
    lines = [(name, f"{count} {name}", wrapped(meaning, room, size)) for name, count, meaning in counted]
    return lines, beside


def _explain(ax: Axes, sheet: Sheet, legend: Legend, y: float) -> None:
    lines, beside = legend
    size = 7.5 * sheet.grown
    for name, heading, meaning in lines:
        ax.text(sheet.left, y, heading, size=size, va="center", **words(OF_LABEL.get(name, FAINT), heading))
        for line in meaning:
            ax.text(sheet.left + beside, y, line, size=size, va="center", **words(FAINT))
            y += LINE * sheet.grown


def layer_picture(
    heads: Heads,
    layer: Layer,
    *,
    batch: int = 0,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    written: bool = False,
    text: str | None = None,
) -> Figure:
    """Draw `headwise.Heads.plot` of one layer: a heat map of every head with its label, of the map if it
    was kept, else pooled."""
    shown = heads[layer]
    need_matplotlib()
    picture, lengths, call = cells_of(shown, batch, CELLS)
    names = names_of(heads, batch, call, query_tokens, key_tokens)
    titles = [f"head {head.head}: {label_of(head)}".removesuffix(": ") for head in shown]
    tints = [tint(head) for head in shown]
    title = layer_name(shown) if heads.title is None else f"{heads.title}, {layer_name(shown)}"
    if text is not None:
        title += f" in {quoted(text, 6, 11)}"
    if not written:
        return draw(picture, lengths, names, titles=titles, title=title, tints=tints)
    import numpy

    beside, _, _ = cells_of(shown, batch, CELLS, written=True)
    pairs = numpy.ma.stack([each for two in zip(picture, beside, strict=True) for each in two])
    return draw(
        pairs,
        lengths,
        names,
        titles=[each for title in titles for each in (title, "… × ‖v W_O‖")],
        title=f"{title}: attention weights, and weights × ‖v W_O‖",
        tints=[each for colour in tints for each in (colour, None)],
        columns=2 * max(1, round(len(shown) ** 0.5 * 0.8)),
        meaning="weight; weight × ‖v W_O‖, where 1 is the layer's largest ‖v W_O‖",
    )


def head_picture(
    heads: Heads,
    layer: Layer,
    head: int,
    *,
    batch: int = 0,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    written: bool = False,
    text: str | None = None,
) -> Figure:
    """Draw `headwise.Heads.plot` of one head: tokens on both sides, and the weight that keys receive above.

    Words are written for up to 60 tokens, else positions; beyond 256 of them positions share cells. Above a
    key stands its share of all the weight: the mean over queries.
    """
    (head_shown,) = heads.chosen([(layer, head)])
    need_matplotlib()
    every, lengths, call = cells_of(heads[layer], batch, CELLS)
    pictures = [every[head_shown.head]]
    if written:
        pictures.append(cells_of(heads[layer], batch, CELLS, written=True)[0][head_shown.head])
    names = names_of(heads, batch, call, query_tokens, key_tokens)
    queries = queries_in(call, batch, every.shape[1]).numpy()
    return _drawn(heads, head_shown, pictures, queries, lengths, names, text)


def _drawn(
    heads: Heads,
    head: Head,
    pictures: list[Cells],
    queries: numpy.ndarray,
    lengths: tuple[int, int],
    names: tuple[list[str] | None, list[str] | None],
    text: str | None,
) -> Figure:
    (T, S), (rows, columns) = lengths, pictures[0].shape
    down, across = named(names[0], T, 1), named(names[1], S, 1)
    count = len(pictures)
    tall, wide = (
        max(LEAST, LARGE_PITCH * length) if named_axis else LARGE if length > 24 else LEAST
        for length, named_axis in ((T, down), (S, across))
    )
    if T == S:
        tall = wide = max(tall, wide)
    dpi = sharpness(count * (wide + BETWEEN) + 2, tall + 2)
    wide, tall = whole(wide, columns, dpi), whole(tall, rows, dpi)
    left = 0.35 + room(down, tall / T, T)
    below = 0.4 + room(across, wide / S, None)
    width = left + count * (wide + BETWEEN) + 0.45
    title, sentence = _title_and_sentence(heads, head)
    heading, size = fitted(title, max(width, 6.0) - 0.3, 13, 9, bold=True)
    width = max(width, inches(heading, size, bold=True) + 0.3)
    lines = wrapped(sentence, width - 0.3, 9)
    if text is not None:
        lines.append(quoted(text, width - 0.3, 9))
    lines += wrapped(_how_large(count > 1, (*down, *across)), width - 0.3, 9)
    top = 0.4 + 0.17 * len(lines)
    under = 0.26 + STRIP + 0.1  # a line that says what a map shows, what keys receive
    page = Page(width, top + under + tall + below, dpi)
    page.head(heading, size, tint(head) or INK)
    for number, line in enumerate(lines):
        write(page.figure, 0.15, 0.46 + 0.17 * number, line, size=9, **words(FAINT))
    pooled = (rows, columns) != (T, S)
    for number, picture in enumerate(pictures):
        x = left + number * (wide + BETWEEN)
        _strip(page, picture, queries, x, top + 0.26, wide, WRITES if number else WEIGHTS)
        corner, names_shown, outer = (x, top + under), (down, across), {"left": number == 0, "bottom": True}
        page.heat(picture, lengths, corner, (wide, tall), names_shown, tint(head), **outer)
    end = left + count * (wide + BETWEEN) - BETWEEN
    some = next((picture for picture in pictures if picture.mask.any()), pictures[0])
    meaning = meaning_of(pooled, False) + ("; right: × ‖v W_O‖" if count > 1 else "")
    page.scale_bar(end + 0.08, top + under, min(tall, 5.0), meaning, some)
    page.explain_axes(lengths, (rows, columns), (left, end), (top + under, top + under + tall))
    return in_letters(page.figure)


def _how_large(written: bool, names: Sequence[str]) -> str:
    guide = "Bars above the map: the weight each key receives, averaged over queries."
    if written:
        guide += " In weight × ‖v W_O‖, 1 is the largest ‖v W_O‖ of the layer."
    return guide + NO_FONT if any(MISSING in name for name in names) else guide


def _title_and_sentence(heads: Heads, head: Head) -> tuple[str, str]:
    where = f"{layer_name(heads[head.path])}, head {head.head}"
    title = f"{heads.title}, {where}" if heads.title else where[0].upper() + where[1:]
    ((_, _, sentence),) = census([head])
    return label(f"{title}: {label_of(head) or head.label.name}", 120), sentence[0].upper() + sentence[
        1:
    ] + "."


def _strip(
    page: Page, picture: Cells, queries: numpy.ndarray, x: float, y: float, wide: float, title: str
) -> None:
    """Draw bars above the map: what each key receives, the mean over queries that see any key."""
    filled = picture.filled(0)
    queries = queries * (filled.sum(-1) > 0)
    received = queries @ filled / max(queries.sum(), 1)
    ax = page.axes(x, y, wide, STRIP)
    ax.stairs(received, [key - 0.5 for key in range(len(received) + 1)], fill=True, color=FAINT, linewidth=0)
    highest = float(received.max()) or 1.0
    ax.set_xlim(-0.5, len(received) - 0.5)
    ax.set_ylim(0, highest)
    ax.set_xticks([])
    ax.set_yticks([highest], [f"{highest:.2g}"], **words(FAINT))
    ax.tick_params(length=0, labelsize=7, labelcolor=FAINT, pad=3)
    open_frame(ax, hidden=("top", "left", "right"))
    heading, size = fitted(title, wide, 9, 5)
    ax.set_title(heading, loc="left", size=size, pad=4, **words(INK))
