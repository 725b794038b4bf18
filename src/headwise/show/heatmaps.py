"""Heat maps: one picture per head, all on one scale, as a matplotlib figure that touches no global state.

Written, a picture is a whole file or none at all.

Letters: H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ShapeError, needed
from ..map import AttentionMap
from ..whole_files import place_for, whole_file
from .tables import families, label

if TYPE_CHECKING:
    import numpy
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import Colormap, PowerNorm
    from matplotlib.figure import Figure

    Cells = numpy.ma.MaskedArray[Any, Any]

__all__ = [
    "CELLS",
    "FAINT",
    "INK",
    "LONGEST",
    "STEPS",
    "cells",
    "check_path",
    "colours",
    "draw",
    "drawing",
    "heatmaps",
    "save",
    "shares",
    "words",
]


CELLS = 256  # the finest picture: beyond it positions share a cell
NAMED = 24  # tokens that can still be read along an axis
LONGEST = 12  # characters of a token

INK, FAINT, NOTHING = "#1f2430", "#5b6270", "#e9ecf1"
LIGHT_TO_DARK = ("#fffdfa", "#fecf92", "#fd9467", "#e95561", "#ab337c", "#6b1d81", "#2a115c")
STEPS = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 1)


def heatmaps(
    weights: AttentionMap,
    tokens: Sequence[str] | None = None,
    *,
    batch: int = 0,
    titles: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """A heat map of every head of one sequence: queries downwards, keys to the right.

    Colours share one scale from 0 to 1, by square root so that small weights can be told apart; where no
    weight is, as under a mask, the cell is grey. Beyond 256 positions the picture is pooled: a cell shows how
    much of a query's weight, in the mean over the queries of the cell, falls into it.

    Args:
        weights: [B, H, T, S]
        tokens: one a position; written out where there are at most 24. Needs T = S.
        batch: which sequence.
        titles: one per head, instead of "head 0", "head 1", ...
        title: of the whole figure.

    Raises:
        PackageMissing: matplotlib is not installed.
        ShapeError: tokens or titles that do not fit the map.
        IndexError: no such sequence.

    Example:
        >>> q, k = torch.randn(2, 1, 8, 5, 64)
        >>> figure = heatmaps(AttentionMap(q, k, causal=True), "a b c d e".split())
        >>> figure.savefig("heads.png")    # doctest: +SKIP
    """
    _check(weights, tokens, titles)
    drawing()  # before the map is computed: what is missing is said at once
    _, _, T, S = weights.shape
    return draw(cells(weights.select(batch=batch)), (T, S), tokens, titles=titles, title=title)


def drawing() -> tuple[type[Figure], type[FigureCanvasAgg], PowerNorm]:
    """What pictures are drawn with: Figure, its canvas, the scale of colours.

    Raises:
        PackageMissing: matplotlib is not installed.
    """
    with needed("matplotlib", "headwise pictures need matplotlib"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    return Figure, FigureCanvasAgg, PowerNorm(0.5, vmin=0, vmax=1)


def draw(
    picture: Cells,
    lengths: tuple[int, int],
    tokens: Sequence[str] | None = None,
    *,
    titles: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """`heatmaps` of cells that are there already, [H, rows, columns], for this many queries and keys."""
    Figure, Canvas, scale = drawing()
    H, (T, S) = len(picture), lengths
    pooled = picture.shape[1:] != (T, S)
    title = None if title is None else label(title, 120)
    rows, columns = _grid(H)
    names = [label(token, LONGEST) for token in tokens or ()] if max(T, S) <= NAMED else []
    margin = 0.055 * max(map(len, names), default=4)  # inches, for the longest name
    width = columns * (_inches(S) + 0.09) + margin + 1.05
    height = rows * (_inches(T) + 0.28) + margin + (0.2 if title is None else 0.5)
    figure = Figure(figsize=(max(width, 0.09 * len(title or "")), height), dpi=150, layout="compressed")
    Canvas(figure)
    axes = [figure.add_subplot(rows, columns, head + 1) for head in range(H)]
    heading = [label(f"head {head}" if titles is None else titles[head], 40) for head in range(H)]
    size = min(9.0, max(5.5, 125 * _inches(S) / max(map(len, heading))))  # points, to fit above a heat map
    for head, ax in enumerate(axes):
        ax.imshow(
            picture[head],
            cmap=colours(),
            norm=scale,
            extent=(-0.5, S - 0.5, T - 0.5, -0.5),
            aspect="equal" if T == S else "auto",
            interpolation="antialiased" if pooled and min(picture.shape[1:]) > NAMED else "nearest",
        )
        ax.set_title(heading[head], loc="left", fontsize=size, pad=4, **words(INK))
        _dress(ax, T, S, names, left=head % columns == 0, bottom=head + columns >= H)
    _frame(figure, axes, (T, S), picture, title)
    return figure


def _check(weights: AttentionMap, tokens: Sequence[str] | None, titles: Sequence[str] | None) -> None:
    _, H, T, S = weights.shape
    if tokens is not None and not len(tokens) == T == S:
        raise ShapeError(
            f"tokens must match query_len and key_len: {len(tokens)} tokens for {T} and {S}; "
            "give one a position, or none where the two differ"
        )
    if titles is not None and len(titles) != H:
        raise ShapeError(f"titles must match num_heads: {len(titles)} titles for {H}; give one per head")


def cells(weights: AttentionMap, most: int = CELLS) -> Cells:
    """[H, rows, columns], hidden where there is no weight: weights, or shares of a query's weight."""
    _, _, T, S = weights.shape
    if max(T, S) <= most:
        return _hidden(weights.dense().detach()[0])
    counted = weights.mask.counted(T)
    return shares(weights.pooled(most)[0], T, None if counted is None else counted[0])


def shares(mass: Tensor, query_len: int, counted: Tensor | None = None) -> Cells:
    """The same from pooled mass [H, rows, columns]; counted: bool [T], which queries it is the mass of."""
    rows = mass.shape[1]
    queries = torch.ones(query_len) if counted is None else counted.cpu().float()
    inside = torch.zeros(rows).index_add_(0, torch.arange(query_len) * rows // query_len, queries)
    return _hidden(mass / inside.clamp(min=1).to(mass)[:, None])


def _hidden(values: Tensor) -> Cells:
    import numpy

    array = values.cpu().float().numpy()
    return numpy.ma.masked_where(~(array > 0), array)


def _grid(heads: int) -> tuple[int, int]:
    """Rows and columns: few holes, a little wider than high."""

    def cost(columns: int) -> float:
        rows = math.ceil(heads / columns)
        return 0.5 * (rows * columns - heads) + abs(columns / rows - 1.6)

    columns = min(range(math.ceil(math.sqrt(heads)), heads + 1), key=cost)
    return math.ceil(heads / columns), columns


def _inches(length: int) -> float:
    """The side of one heat map: room for every token's name, or for a good look."""
    return max(1.5, 0.145 * length) if length <= NAMED else 2.6


def colours() -> Colormap:
    """Magma from white instead of yellow: lightness falls evenly, nothing is told by hue alone."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("headwise", LIGHT_TO_DARK).with_extremes(bad=NOTHING)


def words(colour: str) -> dict[str, Any]:
    """How text is set: as written, dollars and all."""
    return {"color": colour, "parse_math": False, "usetex": False, "family": families()}


def _dress(ax: Axes, query_len: int, key_len: int, names: list[str], *, left: bool, bottom: bool) -> None:
    """Names or numbers along the outer axes, thin lines between cells that are large enough."""
    from matplotlib.ticker import MaxNLocator

    ax.set_frame_on(False)
    ax.grid(False)
    ax.tick_params(which="both", length=0, labelsize=7, labelcolor=FAINT, pad=2)
    ax.tick_params(labelleft=left, labelbottom=bottom)
    if names:
        upright: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
        ax.set_xticks(range(key_len), names, **upright, **words(FAINT))
        ax.set_yticks(range(query_len), names, **words(FAINT))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    if max(query_len, key_len) <= NAMED:
        ax.set_xticks([x + 0.5 for x in range(key_len - 1)], minor=True)
        ax.set_yticks([y + 0.5 for y in range(query_len - 1)], minor=True)
        ax.grid(which="minor", color="white", linewidth=0.8)


def _frame(
    figure: Figure, axes: list[Axes], lengths: tuple[int, int], picture: Cells, title: str | None
) -> None:
    """What the heads share: the scale, the names of the axes, the title."""
    T, S = lengths
    image = axes[0].images[0]
    _, rows, columns = picture.shape
    pooled = (rows, columns) != (T, S)
    meaning = "mean weight of a query in a cell" if pooled else "weight"
    long = figure.get_figheight() / 0.16  # as many times as it is wide
    bar = figure.colorbar(image, ax=axes, ticks=STEPS, format="%g", aspect=long, pad=0.015, fraction=0.05)
    bar.set_label(meaning + (" (grey: none)" if picture.mask.any() else ""), size=8, **words(FAINT))
    bar.ax.tick_params(length=2, labelsize=7, labelcolor=FAINT, color=FAINT)
    bar.outline.set_visible(False)
    keys, queries = "key (is attended to)", "query (attends)"
    if pooled:
        keys += f", {S} in {columns} cells"
        queries += f", {T} in {rows} cells"
    figure.supxlabel(keys, size=8, **words(FAINT))
    figure.supylabel(queries, size=8, **words(FAINT))
    if title is not None:
        figure.suptitle(title, size=11, **words(INK))


# Pictures as files


FORMATS = (".png", ".svg", ".pdf")


def save(figure: Figure, out: str | os.PathLike[str]) -> Path:
    """Write a figure: all of it or, where anything goes wrong, nothing. Returns where.

    Raises:
        ArgumentError: not a .png, .svg or .pdf; no such folder; a folder that cannot be written to.
    """
    place = check_path(out)
    with whole_file(place) as half, half.open("wb") as file:
        figure.savefig(file, format=place.suffix[1:].lower())
    return place


def check_path(out: str | os.PathLike[str]) -> Path:
    """Where a picture may be written, links followed; raises `ArgumentError` as `save` does."""
    return place_for(out, FORMATS, ", ".join(FORMATS), "heads.png")
