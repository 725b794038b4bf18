"""Pictures of watched heads: one head large, one layer, or all layers as a grid of small heat maps.

Letters: H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..heads.collection import Heads
from ..heads.layer import Head, LayerHeads
from ..heads.layer_names import Layer
from .heads_grid import GAP, LINE, MOST_NAMED, TITLED, Row, Sheet, points
from .heads_tables import census
from .heatmaps import CELLS, draw
from .pictured_heads import (
    OF_LABEL,
    cells_of,
    label_of,
    layer_name,
    meaning_of,
    names_of,
    tint,
    title_of,
)
from .sheet import (
    FAINT,
    INK,
    PALE,
    Page,
    colours,
    drawing,
    in_letters,
    scale_bar,
    words,
)
from .texts import fitted, inches, label, quoted, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


__all__ = ["layer_picture", "model_picture"]


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
    picture, lengths, call = cells_of(shown, batch, CELLS)
    names = names_of(heads, batch, call, query_tokens, key_tokens)
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
    lines = _headline(heads, len(everyone), text, written, sheet)
    top = (0.22 + 0.24 * len(lines) + LINE * len(sheet.how)) * sheet.grown
    under = (0.17 + LINE * sum(len(said) for _, _, said in legend)) * sheet.grown
    page = Page(sheet.width, top + sheet.tall + under, sheet.dpi, sheet.grown)
    ax = page.axes(0, 0, page.width, page.height)  # one unit is one inch, y grows downwards
    ax.set_axis_off()
    _say(ax, sheet, lines)
    y = top + 0.2 * sheet.grown
    first = y + sheet.over
    _name_columns(ax, sheet, y)
    grid: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for row in sheet.rows:
        y = page.even(y + sheet.over)
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
                said, size = fitted(label_of(head), sheet.side + GAP / 2, 6.8 * sheet.grown, 5, bold=True)
                ax.text(x - 0.03, y - 0.065, said, size=size, **words(tint(head) or FAINT, said))
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
    scale_bar(page, sheet.x_end, first, long, meaning_of(pooled, written), some)
    return in_letters(page.figure)


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
    """Below one heat map; what does not fit there would run into its neighbour's."""
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


def _headline(heads: Heads, count: int, text: str | None, written: bool, sheet: Sheet) -> list[Line]:
    """The lines of the title."""
    looks = ("write of each key", "writes of each key") if written else ("look at", "looks at")
    everyone = sum(map(len, heads.values()))
    which = f"its {count} heads" if count == everyone else f"{count} of its {everyone} heads"
    if count == 1:
        which = "its one head" if everyone == 1 else f"one of its {everyone} heads"
    title, room = f"{heads.title or 'Model'}: what {which} {looks[count == 1]}", sheet.width - 0.3
    grown = sheet.grown
    if text is not None:
        whole_text = label(f"{title} in “{' '.join(text[:1000].split())}”", 1200)
        if inches(whole_text, 11 * grown, bold=True) <= room:
            return [(*fitted(whole_text, room, 12.5 * grown, 11 * grown, bold=True), True)]
    lines = [(*fitted(label(title, 120), room, 12.5 * grown, 8, bold=True), True)]
    return lines if text is None else [*lines, (quoted(text, room, 10 * grown), 10 * grown, False)]


def _say(ax: Axes, sheet: Sheet, lines: Sequence[Line]) -> None:
    """The title, and how to read the picture."""
    y = 0.27 * sheet.grown
    for line, size, bold in lines:
        ax.text(0.12, y, line, size=size, va="center", **words(INK, line if bold else ""))
        y += 0.24 * sheet.grown
    for line in sheet.how:
        ax.text(0.12, y, line, size=8.5 * sheet.grown, va="center", **words(FAINT))
        y += LINE * sheet.grown


def _legend(everyone: Sequence[Head], sheet: Sheet) -> list[tuple[str, str, list[str]]]:
    """(label, how many and which, what it means in lines)."""
    counted = census(everyone)
    beside = _legend_column([f"{count} {name}" for name, count, _ in counted], sheet)
    room = max(2.5, sheet.width - sheet.left - beside - 0.15)
    return [
        (name, f"{count} {name}", wrapped(meaning, room, 7.5 * sheet.grown))
        for name, count, meaning in counted
    ]


def _legend_column(names: Sequence[str], sheet: Sheet) -> float:
    return max(inches(name, 7.5 * sheet.grown, bold=True) for name in names) + 0.2


def _explain(ax: Axes, sheet: Sheet, legend: Sequence[tuple[str, str, list[str]]], y: float) -> None:
    """What the labels mean."""
    beside, size = _legend_column([said for _, said, _ in legend], sheet), 7.5 * sheet.grown
    for name, said, meaning in legend:
        colour = OF_LABEL.get(name, FAINT)
        ax.text(sheet.left, y, said, size=size, va="center", **words(colour, said))
        for line in meaning:
            ax.text(sheet.left + beside, y, line, size=size, va="center", **words(FAINT))
            y += LINE * sheet.grown
