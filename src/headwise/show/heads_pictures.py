"""Pictures of watched heads: one head large, one layer, or all layers as a grid of small heat maps.

Letters: H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..heads.collection import Heads
from ..heads.layer import Head, LayerHeads
from ..heads.layer_names import Layer
from .head_picture import head_picture
from .heads_tables import census
from .heatmaps import CELLS, draw
from .pictured_heads import (
    OF_LABEL,
    cells_of,
    label_of,
    layer_name,
    meaning_of,
    names_in,
    names_of,
    tint,
    title_of,
)
from .sheet import (
    FAINT,
    INK,
    LONGEST,
    PALE,
    Page,
    colours,
    drawing,
    fine_enough,
    scale_bar,
    sharpness,
    whole,
    words,
)
from .texts import MISSING, fitted, inches, label, quoted, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .heatmaps import Cells

__all__ = ["OF_LABEL", "PALE", "head_picture", "layer_picture", "model_picture"]

SMALL_CELLS = 128  # a side, in the grid
MOST_NAMED = 20  # tokens that can be read beside a small heat map
TITLED = 0.7  # inches: the smallest heat map with words above it
PITCH = 0.09  # inches from one name to the next
GAP, OVER, LINE = 0.14, 0.24, 0.17  # inches: between heat maps, above one for its label, of a line of text
HOW = (
    "Each square is one head. A row is a token that attends (query), a column one that is attended to (key); "
    "the darker, the more weight. Labels are measured: the number is the score that earned them."
)
HOW_WRITTEN = (
    "Each square is one head. A row is a token that attends (query), a column one that is attended to (key); "
    "the darker, the more is written: weight times the norm of what the head writes of that key, relative to "
    "the largest norm of its layer. Labels are of the weights alone."
)


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
    """A heat map of every head of one layer, with its label: of the map where one was kept, else pooled.

    Args:
        batch: which sequence.
        query_tokens: names of the queries, instead of `heads.tokens`; and key_tokens, of the keys.
        written: beside each the weights times the norm of what is written, as of `head_picture`.
        text: what the model read, for the title.

    Raises:
        ArgumentError: no such layer; neither a map nor a picture was kept; nothing measured of what is
            written.
        ShapeError: names that do not fit.
        IndexError: no such sequence.
        PackageMissing: matplotlib is not installed.
    """
    shown: LayerHeads = heads[layer]
    drawing()
    picture, lengths, _ = cells_of(shown, batch, CELLS)
    names = names_of(heads, batch, lengths, query_tokens, key_tokens)
    everyone = list(shown)
    titles, tints = [title_of(head) for head in everyone], [tint(head) for head in everyone]
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
        titles=[each for title in titles for each in (title, "… as written")],
        title=f"{title}: weights, and beside them weights times the norm of what is written there",
        tints=[each for one in tints for each in (one, None)],
        columns=2 * max(1, round(len(shown) ** 0.5 * 0.8)),
        meaning="weight; as written: times norm, relative to the layer's largest",
    )


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
    """Every head of every layer as a small heat map: layers downwards, heads to the right.

    In each, queries run down and keys to the right, on one scale from 0 to 1. Above a head that earned one
    stands its label with the score, in the colour of its frame; below all, what the labels mean. A cell is a
    whole number of dots, two at least: beyond 128 positions, or as many as have room, positions share cells.

    Args:
        heads: of `headwise.watch`; `heads.title` goes into the title.
        batch: which sequence.
        text: what the model read, for the title.
        chosen: (layer, head) of those to draw; None: all. Layers and columns without one are left out.
        query_tokens: names of the queries, and key_tokens of the keys, in the layers that they fit: those of
            cross-attention, and each in the self-attention of its text.
        written: weights times the norm of what is written there; needs `watch(model, written=True)`.

    Raises:
        ArgumentError: nothing was watched; a layer with neither a map nor a picture; no such head; nothing
            measured of what is written.
        ShapeError: names that fit no layer.
        IndexError: no such sequence.
        PackageMissing: matplotlib is not installed.

    Example:
        >>> import headwise as hw
        >>> mha = hw.MultiHeadAttention(64, 4, causal=True)
        >>> with hw.watch(mha) as heads:
        ...     output, _ = mha(torch.randn(2, 7, 64))
        >>> len(model_picture(heads).axes[0].images)
        4
    """
    everyone = heads.chosen(chosen)
    drawing()
    sheet = Sheet.of(heads, everyone, batch, query_tokens, key_tokens, written)
    legend = _legend(everyone, sheet)
    lines = _headline(heads, len(everyone), text, sheet.width)
    top = 0.22 + 0.24 * len(lines) + LINE * len(sheet.how)
    under = 0.15 + LINE * sum(len(said) for _, _, said in legend)
    page = Page(sheet.width, top + sheet.tall + under, sheet.dpi)
    ax = page.axes(0, 0, page.width, page.height)  # one unit is one inch, y grows downwards
    ax.set_axis_off()
    y = top + 0.2
    _name_columns(ax, sheet, y)
    grid: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for row in sheet.rows:
        y = page.even(y + OVER if sheet.side >= TITLED else y + GAP)
        ax.text(0.12, y + row.tall / 2, row.name, size=row.size, va="center", **words(INK))
        _name_queries(ax, sheet, row, y)
        for head in row.heads:
            x = page.even(sheet.x(head.head))
            ax.imshow(
                row.picture[head.head],
                cmap=colours(),
                norm=page.scale,
                extent=(x, x + row.wide, y + row.tall, y),
                aspect="auto",
                interpolation="nearest",
            )
            _frame(ax, row, head, x, y)
            if sheet.side >= TITLED and label_of(head):
                said, size = fitted(label_of(head), sheet.side + GAP / 2, 6.8, 5, bold=True)
                ax.text(x - 0.03, y - 0.065, said, size=size, weight="bold", **words(tint(head) or FAINT))
            if head.head in row.ends:
                _name_keys(ax, row, x, y + row.tall)
            grid += _lines(sheet, row, x, y)
        y += row.tall + row.below
    for number, (line, size, weight, colour) in enumerate(lines):
        ax.text(0.12, 0.27 + 0.24 * number, line, size=size, weight=weight, va="center", **words(colour))
    for number, line in enumerate(sheet.how):
        at = 0.27 + 0.24 * len(lines) + LINE * number
        ax.text(0.12, at, line, size=8.5, va="center", **words(FAINT))
    _explain(ax, sheet, legend, y + 0.22)
    if grid:
        from matplotlib.collections import LineCollection

        ax.add_collection(LineCollection(grid, colors="white", linewidths=0.4))
    ax.set_xlim(0, page.width)
    ax.set_ylim(page.height, 0)
    first = top + 0.2 + (OVER if sheet.side >= TITLED else GAP)
    pooled = any(row.pooled for row in sheet.rows)
    some = next((row.picture for row in sheet.rows if row.picture.mask.any()), sheet.rows[0].picture)
    long = max(1.2, min(y - sheet.rows[-1].below - first, 4.0))
    scale_bar(page, sheet.x_end, first, long, meaning_of(pooled, written), some)
    return page.figure


# Where it is drawn


@dataclass
class Row:
    """One layer of the grid."""

    name: str
    size: float  # of its name, in points
    heads: list[Head]  # those to draw
    picture: Cells
    lengths: tuple[int, int]
    names: tuple[list[str], list[str]]  # of queries, of keys, as written; []: there is no room
    wide: float = 0.0  # inches of one heat map
    tall: float = 0.0
    ends: set[int] = field(default_factory=set)  # the heads with names of keys below: the next row has others
    below: float = 0.0  # inches for these

    @property
    def pooled(self) -> bool:
        """Whether positions share cells."""
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
    how: list[str] = field(default_factory=list)  # to read it, in lines

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
        roughly = max(0.3, min(1.0, 30 / across, 34 / count))
        dpi = sharpness(across * (roughly + GAP) + 2, count * (roughly + OVER) + 2)
        most = fine_enough(roughly, dpi, SMALL_CELLS)
        found = [cells_of(heads[path], batch, most, written=written) for path in layers]
        names = names_in(heads, batch, [call for _, _, call in found], query_tokens, key_tokens)
        longest = max((max(lengths) for _, lengths, _ in found if max(lengths) <= MOST_NAMED), default=1)
        side = max(roughly, min(PITCH * longest, 30 / across, 34 / count))
        rows = []
        for (path, mine), (picture, lengths, _), known in zip(layers.items(), found, names, strict=True):
            layer = heads[path]
            number = isinstance(layer.layer, int)
            rows.append(
                Row(
                    label(layer_name(layer), 34),
                    9 if number else 6.5,
                    mine,
                    picture,
                    lengths,
                    (_written_out(known[0], lengths[0], side), _written_out(known[1], lengths[1], side)),
                    whole(side, picture.shape[2], dpi),
                    whole(side, picture.shape[1], dpi),
                )
            )
        side = max(max(row.wide, row.tall) for row in rows)
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            same = after is not None and (row.lengths[1], row.names[1]) == (after.lengths[1], after.names[1])
            row.ends = {head.head for head in row.heads}
            if same and after is not None:
                row.ends -= {head.head for head in after.heads}
            row.below = 0.0 if same else _below(row)
        left = 0.12 + max(inches(row.name, row.size) for row in rows) + 0.12 + max(map(_beside, rows)) + 0.1
        width = max(left + across * (side + GAP) + 0.8, 8.5)
        sheet = cls(rows, columns, side, left, width, dpi)
        sheet.how = wrapped(_how(rows, written), width - 0.3, 8.5)
        return sheet

    def x(self, head: int) -> float:
        """Where the heat maps of a head's column begin."""
        return self.left + self.columns.index(head) * (self.side + GAP)

    @property
    def x_end(self) -> float:
        """Where the last column ends."""
        return self.left + len(self.columns) * (self.side + GAP)

    @property
    def tall(self) -> float:
        """From the names of the columns to what stands below the last row."""
        over = OVER if self.side >= TITLED else GAP
        return 0.2 + sum(over + row.tall + row.below for row in self.rows)


def _written_out(names: list[str] | None, length: int, side: float) -> list[str]:
    if names is None or length > MOST_NAMED or side / length < 0.8 * PITCH:
        return []
    return [label(token, LONGEST) for token in names]


def _points(side: float, length: int) -> float:
    """The size of names along a heat map."""
    return min(7.0, 0.88 * 72 * side / length)


def _beside(row: Row) -> float:
    """Inches that names of queries take."""
    if row.names[0]:
        return max(inches(name, _points(row.tall, row.lengths[0])) for name in row.names[0])
    return inches(str(row.lengths[0] - 1), 6)


def _below(row: Row) -> float:
    """Inches that names of keys take."""
    if row.names[1]:
        return 0.1 + max(inches(name, _points(row.wide, row.lengths[1])) for name in row.names[1])
    return 0.2


def _how(rows: Sequence[Row], written: bool) -> str:
    how = HOW_WRITTEN if written else HOW
    shared = sorted({max(row.picture.shape[1:]) for row in rows if row.pooled})
    if shared:
        how += f" Positions share {shared[-1]} rows and columns."
    if any(MISSING in name for row in rows for side in row.names for name in side):
        how += f" {MISSING}: a character that no font of this machine has."
    return how


def _lines(
    sheet: Sheet, row: Row, x: float, y: float
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Thin lines between the cells of a heat map, where these are large enough."""
    T, S = row.lengths
    if max(T, S) > MOST_NAMED or sheet.side < TITLED:
        return []
    down = [(x + row.wide * s / S) for s in range(1, S)]
    across = [(y + row.tall * t / T) for t in range(1, T)]
    return [((at, y), (at, y + row.tall)) for at in down] + [((x, at), (x + row.wide, at)) for at in across]


# Words


def _frame(ax: Axes, row: Row, head: Head, x: float, y: float) -> None:
    """A point away from the cells: the first column is where sinks are."""
    from matplotlib.patches import Rectangle

    colour = tint(head)
    thick = 1.6 if colour else 0.5
    away = (1.5 + thick / 2) / 72
    ax.add_patch(
        Rectangle(
            (x - away, y - away),
            row.wide + 2 * away,
            row.tall + 2 * away,
            fill=False,
            edgecolor=colour or PALE,
            linewidth=thick,
        )
    )


def _name_queries(ax: Axes, sheet: Sheet, row: Row, y: float) -> None:
    x, T = sheet.left - 0.07, row.lengths[0]
    if row.names[0]:
        size = _points(row.tall, T)
        for at, name in enumerate(row.names[0]):
            place = y + row.tall * (at + 0.5) / T
            ax.text(x, place, name, size=size, ha="right", va="center_baseline", **words(FAINT))
        return
    ax.text(x, y, "0", size=6, ha="right", va="top", **words(FAINT))
    if T > 1 and row.tall > 0.25:
        ax.text(x, y + row.tall, str(T - 1), size=6, ha="right", va="bottom", **words(FAINT))


def _name_keys(ax: Axes, row: Row, x: float, y: float) -> None:
    """Below one heat map; what does not fit there would run into its neighbour's."""
    S = row.lengths[1]
    if row.names[1]:
        size = _points(row.wide, S)
        for at, name in enumerate(row.names[1]):
            place = x + row.wide * (at + 0.5) / S
            ax.text(place, y + 0.07, name, size=size, rotation=90, ha="center", va="top", **words(FAINT))
        return
    last = str(S - 1)
    if inches(last, 6) > row.wide:
        return
    if S > 1:
        ax.text(x + row.wide, y + 0.06, last, size=6, ha="right", va="top", **words(FAINT))
    if S == 1 or inches(f"0  {last}", 6) <= row.wide:
        ax.text(x, y + 0.06, "0", size=6, ha="left", va="top", **words(FAINT))


def _name_columns(ax: Axes, sheet: Sheet, y: float) -> None:
    every = 1
    while inches(f"head {sheet.columns[-1]}  ", 8) > every * (sheet.side + GAP):
        every += 1
    for number, head in enumerate(sheet.columns):
        if number % every == 0:
            x = sheet.x(head) + sheet.side / 2
            if sheet.side < TITLED:
                x = max(x, sheet.left)
            ax.text(x, y, f"head {head}", size=8, ha="center", va="center", **words(INK))


def _headline(heads: Heads, count: int, text: str | None, width: float) -> list[tuple[str, float, str, str]]:
    """Lines of the title: (text, points, weight, colour)."""
    everyone = sum(map(len, heads.values()))
    which = f"its {count}" if count == everyone else f"{count} of its {everyone}"
    title = f"{heads.title or 'Model'}: what {which} heads look at"
    room = width - 0.3
    if text is not None:
        whole_text = label(f"{title} in “{' '.join(text[:1000].split())}”", 1200)
        if inches(whole_text, 11, bold=True) <= room:
            return [(*fitted(whole_text, room, 12.5, 11, bold=True), "bold", INK)]
    lines = [(*fitted(label(title, 120), room, 12.5, 8, bold=True), "bold", INK)]
    return lines if text is None else [*lines, (quoted(text, room, 10), 10.0, "normal", INK)]


def _legend(everyone: Sequence[Head], sheet: Sheet) -> list[tuple[str, str, list[str]]]:
    """(label, how many and which, what it means in lines)."""
    found = census(everyone)
    beside = _legend_column([f"{count} {name}" for name, count, _ in found])
    room = max(2.5, sheet.width - sheet.left - beside - 0.15)
    return [(name, f"{count} {name}", wrapped(meaning, room, 7.5)) for name, count, meaning in found]


def _legend_column(names: Sequence[str]) -> float:
    return max(inches(name, 7.5, bold=True) for name in names) + 0.2


def _explain(ax: Axes, sheet: Sheet, legend: Sequence[tuple[str, str, list[str]]], y: float) -> None:
    beside = _legend_column([said for _, said, _ in legend])
    for name, said, meaning in legend:
        colour = OF_LABEL.get(name, FAINT)
        ax.text(sheet.left, y, said, size=7.5, weight="bold", va="center", **words(colour))
        for line in meaning:
            ax.text(sheet.left + beside, y, line, size=7.5, va="center", **words(FAINT))
            y += LINE
