"""Pictures of watched heads: one layer large, or all layers as a grid of small heat maps.

Letters: H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..heads.collection import Heads
from ..heads.labels import MIXED
from ..heads.layer import Head, LayerHeads
from ..heads.layer_names import Layer
from .heads_tables import census
from .heatmaps import CELLS, FAINT, INK, LONGEST, STEPS, cells, colours, draw, drawing, shares, words
from .tables import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .heatmaps import Cells

__all__ = ["layer_picture", "model_picture"]

SMALL_CELLS = 128  # a side, in the grid
MOST_NAMED = 18  # tokens that can be read beside a small heat map
TITLED = 0.7  # inches: the smallest heat map with words above it
HOW = (
    "Each square is one head. A row is a token that attends (query), a column one that is attended to (key); "
    "the darker, the more weight. Labels are measured: the number is the score that earned them."
)
PALE = "#c9ced6"
OF_LABEL = {  # blue: by position; green: by what was said before; brown and grey: resting; teal: by reach
    "induction": "#117733",
    "duplicate-token": "#4a9c3b",
    "previous-token": "#1f4fb0",
    "next-token": "#2f86d6",
    "self": "#5b4fc4",
    "sink": "#8a5a2b",
    "special-token": "#50606f",
    "punctuation": "#857a1c",
    "broad": "#0b7d83",
    "local": "#1b9e8f",
}


def layer_picture(heads: Heads, layer: Layer, *, batch: int = 0) -> Figure:
    """A heat map of every head of one layer, with its label: of the map where one was kept, else pooled.

    Raises:
        ArgumentError: no such layer; neither a map nor a picture was kept.
        IndexError: no such sequence.
        PackageMissing: matplotlib is not installed.
    """
    chosen: LayerHeads = heads[layer]
    drawing()
    picture, lengths = _cells(chosen, batch, CELLS)
    titles = [_title(head) for head in chosen]
    name = f"layer {chosen.layer}" if isinstance(chosen.layer, int) else chosen.path
    title = name if heads.title is None else f"{heads.title}, {name}"
    return draw(picture, lengths, _tokens(heads, batch, lengths), titles=titles, title=title)


def model_picture(heads: Heads, *, batch: int = 0, text: str | None = None) -> Figure:
    """Every head of every layer as a small heat map: layers downwards, heads to the right.

    In each, queries run down and keys to the right, on one scale from 0 to 1. Above a head that earned one
    stands its label with the score, in the colour of its frame; below all, what the labels mean.

    Args:
        heads: of `headwise.watch`; `heads.title` goes into the title.
        batch: which sequence.
        text: what the model read, for the title.

    Raises:
        ArgumentError: nothing was watched; a layer with neither a map nor a picture.
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
    everyone = heads.all()
    Figure, Canvas, scale = drawing()
    pictures = [_cells(layer, batch, SMALL_CELLS) for layer in heads.values()]
    names = [_tokens(heads, batch, lengths) for _, lengths in pictures]
    legend = census(everyone)
    sheet = Sheet.of(heads, [lengths for _, lengths in pictures], names, len(legend))
    figure = Figure(figsize=(sheet.width, sheet.height), dpi=150)
    Canvas(figure)
    ax = figure.add_axes((0, 0, 1, 1))  # one unit is one inch, y grows downwards
    ax.set_axis_off()
    grid: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for row, (layer, (picture, lengths), known) in enumerate(
        zip(heads.values(), pictures, names, strict=True)
    ):
        for head in layer:
            x, y = sheet.at(row, head.head)
            ax.imshow(
                picture[head.head],
                cmap=colours(),
                norm=scale,
                extent=(x, x + sheet.side, y + sheet.side, y),
                aspect="auto",
                interpolation="antialiased" if max(lengths) > SMALL_CELLS else "nearest",
            )
            _frame(ax, sheet, head, x, y)
            grid += _lines(sheet, lengths, x, y)
        _name_rows(ax, sheet, layer, row, lengths, known)
    _name_columns(ax, sheet, pictures[-1][1], names[-1], max(map(len, heads.values())))
    _headline(ax, sheet, heads, text)
    _explain(ax, sheet, legend)
    if grid:
        from matplotlib.collections import LineCollection

        ax.add_collection(LineCollection(grid, colors="white", linewidths=0.4))
    ax.set_xlim(0, sheet.width)
    ax.set_ylim(sheet.height, 0)
    meaning = "weight"
    if any(picture.shape[1:] != lengths for picture, lengths in pictures):
        meaning = "mean weight of a query in a cell"
    if any(picture.mask.any() for picture, _ in pictures):
        meaning += " (grey: none)"
    _bar(figure, ax, sheet, meaning)
    return figure


# What is drawn


def _cells(layer: LayerHeads, batch: int, most: int) -> tuple[Cells, tuple[int, int]]:
    """Cells of every head, [H, rows, columns], and how many queries and keys they stand for."""
    for call in reversed(layer.calls):
        _, _, T, S = call.shape
        made = call.pooled
        if call.map is not None and (made is None or max(T, S) <= most or max(made.shape[-2:]) != most):
            return cells(call.map.select(batch=batch), most), (T, S)
        if made is not None:
            queries, rows = call.pooled_queries, made.shape[2]
            if queries is None:
                return shares(made[batch], T), (T, S)
            return shares(made[batch], rows, queries[batch]), (T, S)  # counted a row already
    raise ArgumentError(
        f"heads must have maps or pictures: {layer.path} was called with {list(layer.calls[-1].shape)} and "
        "kept neither; use watch(model, pooled=128)"
    )


def _tokens(heads: Heads, batch: int, lengths: tuple[int, int]) -> list[str] | None:
    """The names of the tokens, where queries and keys are the text that they are of."""
    if heads.tokens is None or not -len(heads.tokens) <= batch < len(heads.tokens):
        return None
    words_of = heads.tokens[batch]
    return words_of if lengths == (len(words_of), len(words_of)) else None


def _label(head: Head) -> str:
    return f"{head.label.name} {head.label.score:.2f}"


def _title(head: Head) -> str:
    return f"head {head.head}" if head.label.name == MIXED else f"head {head.head}: {_label(head)}"


# Where it is drawn


@dataclass(frozen=True)
class Sheet:
    """The measures of a grid, in inches."""

    rows: int
    columns: int
    side: float  # of one heat map
    left: float  # where the first begins
    top: float
    gap: float
    over: float  # for the title above each
    width: float
    height: float
    bottom: float  # where the last row ends
    how: list[str]  # to read it, in lines

    @classmethod
    def of(
        cls,
        heads: Heads,
        lengths: Sequence[tuple[int, int]],
        names: Sequence[list[str] | None],
        legend: int,
    ) -> Sheet:
        rows, columns = len(heads), max(map(len, heads.values()))
        longest = max(max(sizes) for sizes in lengths)
        fine = max(1.0, 0.085 * longest) if longest <= MOST_NAMED else 1.0
        side = max(0.3, min(fine, 30 / columns, 34 / rows))
        written = [min(len(token), LONGEST) for known in names for token in known or ()]
        margin = 0.055 * max(written, default=4) if longest <= MOST_NAMED else 0.25
        left = 0.8 + margin if all(isinstance(layer, int) for layer in heads) else 2.0 + margin
        gap, over = 0.09, 0.19 if side >= TITLED else 0.09
        width = max(left + columns * (side + gap) + 0.75, 8.5)
        how = HOW + (f" Positions share {SMALL_CELLS} rows and columns." if longest > SMALL_CELLS else "")
        lines = textwrap.wrap(how, int(width / 0.069))
        top = 0.78 + 0.17 * len(lines)
        bottom = top + rows * (side + over)
        height = bottom + margin + 0.35 + 0.17 * legend
        return cls(rows, columns, side, left, top, gap, over, width, height, bottom, lines)

    def at(self, row: int, column: int) -> tuple[float, float]:
        """The upper left corner of a heat map."""
        return self.left + column * (self.side + self.gap), self.top + self.over + row * (
            self.side + self.over
        )


def _lines(
    sheet: Sheet, lengths: tuple[int, int], x: float, y: float
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Thin lines between the cells of a heat map, where these are large enough."""
    T, S = lengths
    if max(T, S) > MOST_NAMED or sheet.side < TITLED:
        return []
    down = [(x + sheet.side * s / S) for s in range(1, S)]
    across = [(y + sheet.side * t / T) for t in range(1, T)]
    return [((at, y), (at, y + sheet.side)) for at in down] + [
        ((x, at), (x + sheet.side, at)) for at in across
    ]


# Words


def _frame(ax: Axes, sheet: Sheet, head: Head, x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    known = head.label.name != MIXED
    colour = OF_LABEL.get(head.label.name, FAINT) if known else PALE
    ax.add_patch(
        Rectangle(
            (x, y),
            sheet.side,
            sheet.side,
            fill=False,
            edgecolor=colour,
            linewidth=1.6 if known else 0.6,
            zorder=3,  # over the lines between cells
        )
    )
    if known and sheet.side >= TITLED:
        ax.text(
            x, y - 0.035, label(_label(head), 40), size=6.4, weight="bold", va="baseline", **words(colour)
        )


def _name_rows(
    ax: Axes, sheet: Sheet, layer: LayerHeads, row: int, lengths: tuple[int, int], known: list[str] | None
) -> None:
    x, y = sheet.at(row, 0)
    T = lengths[0]
    name = f"layer {layer.layer}" if isinstance(layer.layer, int) else label(str(layer.layer), 34)
    ax.text(
        0.12,
        y + sheet.side / 2,
        name,
        size=9 if isinstance(layer.layer, int) else 6.5,
        va="center",
        **words(INK),
    )
    for at, token in _marks(T, known):
        ax.text(
            x - 0.05,
            y + sheet.side * (at + 0.5) / T,
            token,
            size=5.6,
            ha="right",
            va="center",
            **words(FAINT),
        )


def _name_columns(
    ax: Axes, sheet: Sheet, lengths: tuple[int, int], known: list[str] | None, columns: int
) -> None:
    S = lengths[1]
    for column in range(columns):
        x, y = sheet.at(0, column)
        if sheet.side >= TITLED or column % 4 == 0:
            ax.text(
                x + sheet.side / 2, y - sheet.over - 0.02, f"head {column}", size=8, ha="center", **words(INK)
            )
        for at, token in _marks(S, known):
            ax.text(
                x + sheet.side * (at + 0.5) / S,
                sheet.bottom + 0.05,
                token,
                size=5.6,
                rotation=90 if len(token) > 1 and S <= MOST_NAMED else 0,
                ha="center",
                va="top",
                **words(FAINT),
            )


def _marks(length: int, known: list[str] | None) -> list[tuple[int, str]]:
    """What stands along an axis: every token, or else the first and the last position."""
    if known is not None and length <= MOST_NAMED:
        return [(at, label(token, LONGEST)) for at, token in enumerate(known)]
    return sorted({(0, "0"), (length - 1, str(length - 1))})


def _headline(ax: Axes, sheet: Sheet, heads: Heads, text: str | None) -> None:
    count = sum(map(len, heads.values()))
    title = f"{heads.title or 'Model'}: what its {count} heads look at"
    if text is not None:
        title += f" in “{' '.join(text.split())}”"
    size = min(12.5, max(9.0, 106 * sheet.width / len(title)))  # points: small rather than cut
    shown = label(title, int(106 * sheet.width / size))
    ax.text(0.12, 0.27, shown, size=size, weight="bold", va="center", **words(INK))
    for number, line in enumerate(sheet.how):
        ax.text(0.12, 0.5 + 0.17 * number, line, size=8.5, va="center", **words(FAINT))


def _explain(ax: Axes, sheet: Sheet, legend: Sequence[tuple[str, int, str]]) -> None:
    y = sheet.height - 0.17 * len(legend) - 0.05
    for name, count, meaning in legend:
        colour = OF_LABEL.get(name, FAINT)
        ax.text(sheet.left, y, f"{count} {name}", size=7.5, weight="bold", va="center", **words(colour))
        ax.text(sheet.left + 1.35, y, meaning, size=7.5, va="center", **words(FAINT))
        y += 0.17


def _bar(figure: Figure, ax: Axes, sheet: Sheet, meaning: str) -> None:
    x, y = sheet.at(0, sheet.columns)
    long = min(sheet.bottom - y, 4.0)
    place = (x + 0.08) / sheet.width, 1 - (y + long) / sheet.height, 0.13 / sheet.width, long / sheet.height
    bar = figure.colorbar(ax.images[0], cax=figure.add_axes(place), ticks=STEPS, format="%g")
    bar.set_label(meaning, size=8, **words(FAINT))
    bar.ax.tick_params(length=2, labelsize=7, labelcolor=FAINT, color=FAINT)
    bar.outline.set_visible(False)
