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

from ..errors import ShapeError
from ..map import AttentionMap
from ..whole_files import place_for, whole_file
from .sheet import (
    INK,
    Page,
    drawing,
    dress,
    frame,
    in_letters,
    named,
    room,
    scale_bar,
    sharpness,
    side_of,
    whole,
    words,
)
from .texts import fitted, inches, label, readable, wrapped

if TYPE_CHECKING:
    import numpy
    from matplotlib.figure import Figure

    Cells = numpy.ma.MaskedArray[Any, Any]

__all__ = [
    "CELLS",
    "Names",
    "cells",
    "check_path",
    "check_tokens",
    "draw",
    "heatmaps",
    "hidden",
    "save",
    "shares",
]


CELLS = 256  # the finest picture: beyond it positions share a cell

Names = tuple[list[str] | None, list[str] | None]  # of queries, of keys


def heatmaps(
    weights: AttentionMap,
    tokens: Sequence[str] | None = None,
    *,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    batch: int = 0,
    titles: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """A heat map of every head of one sequence: queries downwards, keys to the right.

    Colours share one scale from 0 to 1, by square root so that small weights can be told apart; where no
    weight is, as under a mask, the cell is grey. Beyond 256 positions the picture is pooled: a cell shows how
    much of a query's weight, in the mean over the queries of the cell, falls into it. A cell is a whole
    number of dots, two at least, so that the thinnest column is seen.

    Args:
        weights: [B, H, T, S]
        tokens: one a position; written out where there are at most 60 and room for them. Needs T = S.
        query_tokens: one a query, as for cross-attention.
        key_tokens: one a key.
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
    _, H, T, S = weights.shape
    names = check_tokens((T, S), tokens, query_tokens, key_tokens)
    if titles is not None and len(titles) != H:
        raise ShapeError(f"titles must match num_heads: {len(titles)} titles for {H}; give one per head")
    drawing()  # before the map is computed: what is missing is said at once
    return draw(cells(weights.select(batch=batch)), (T, S), names, titles=titles, title=title)


def check_tokens(
    lengths: tuple[int, int],
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> Names:
    """The names of queries and keys as readers know them.

    Raises:
        ShapeError: more or fewer than there are positions.
    """
    T, S = lengths
    if tokens is not None and not len(tokens) == T == S:
        raise ShapeError(
            f"tokens must match query_len and key_len: {len(tokens)} tokens for {T} and {S}; "
            "give one a position, or query_tokens= and key_tokens= where the two differ"
        )
    if query_tokens is not None and len(query_tokens) != T:
        raise ShapeError(
            f"query_tokens must match query_len: {len(query_tokens)} tokens for {T}; give one a query"
        )
    if key_tokens is not None and len(key_tokens) != S:
        raise ShapeError(f"key_tokens must match key_len: {len(key_tokens)} tokens for {S}; give one a key")
    queries = tokens if query_tokens is None else query_tokens
    keys = tokens if key_tokens is None else key_tokens
    return None if queries is None else readable(queries), None if keys is None else readable(keys)


# Cells


def cells(weights: AttentionMap, most: int = CELLS) -> Cells:
    """[H, rows, columns], hidden where there is no weight: weights, or shares of a query's weight."""
    _, _, T, S = weights.shape
    if max(T, S) <= most:
        return hidden(weights.dense().detach()[0])
    counted = weights.mask.counted(T)
    return shares(weights.pooled(most)[0], T, None if counted is None else counted[0])


def shares(mass: Tensor, query_len: int, counted: Tensor | None = None) -> Cells:
    """The same from pooled mass [H, rows, columns]; counted: [T], how many queries each is the mass of."""
    rows = mass.shape[1]
    queries = torch.ones(query_len) if counted is None else counted.cpu().float()
    inside = torch.zeros(rows).index_add_(0, torch.arange(query_len) * rows // query_len, queries)
    return hidden(mass / inside.clamp(min=1).to(mass)[:, None])


def hidden(values: Tensor) -> Cells:
    """Numbers as cells, hidden where there is nothing."""
    import numpy

    array = values.cpu().float().numpy()
    return numpy.ma.masked_where(~(array > 0), array)


# One figure, a heat map per head


def draw(
    picture: Cells,
    lengths: tuple[int, int],
    names: Names = (None, None),
    *,
    titles: Sequence[str] | None = None,
    title: str | None = None,
    tints: Sequence[str | None] | None = None,
    columns: int | None = None,
    meaning: str | None = None,
) -> Figure:
    """`heatmaps` of cells that are there already, [H, rows, columns], for this many queries and keys.

    Args:
        tints: per head, the colour of its title and of the frame around it, or None.
        columns: heat maps side by side.
        meaning: what a colour stands for, where it is not the weight.
    """
    H, (T, S) = len(picture), lengths
    rows, columns = _grid(H) if columns is None else (math.ceil(H / columns), columns)
    down, across = named(names[0], T, rows), named(names[1], S, columns)
    tall, wide = side_of(T, rows, bool(down)), side_of(S, columns, bool(across))
    if T == S:  # cells are squares
        tall = wide = min(tall, wide) if down and across else max(tall, wide)
    grown = min(1.6, max(1.0, columns * wide / 13))  # what a large figure is looked at from
    gap, over = 0.16 * grown, 0.3 * grown  # inches beside a heat map, and above it for its title
    dpi = sharpness(columns * (wide + gap) + 1.5, rows * (tall + over) + 1)
    wide, tall = (whole(*each, dpi) for each in ((wide, picture.shape[2]), (tall, picture.shape[1])))
    left = 0.3 * grown + room(down, tall / T, T)
    below = 0.35 * grown + room(across, wide / S, None)
    width = left + columns * (wide + gap) + 0.75 * grown
    size = 12 * grown
    lines = [] if title is None else wrapped(label(title, 240), max(width, 5.0) - 0.3, size, bold=True)
    width = max([width, *(inches(line, size, bold=True) + 0.3 for line in lines)])
    top = 0.1 + 0.22 * grown * len(lines)
    page = Page(width, top + rows * (tall + over) + below, dpi, grown)
    if lines:
        page.head("\n".join(lines), size)
    heading = [label(f"head {head}" if titles is None else titles[head], 60) for head in range(H)]
    shades = [None] * H if tints is None else tints
    fit = [
        fitted(text, wide, 9 * grown, 5.5, bold=shade is not None)
        for text, shade in zip(heading, shades, strict=True)
    ]
    size = min(points for _, points in fit)
    for head, shade in enumerate(shades):
        x, y = left + head % columns * (wide + gap), top + over + head // columns * (tall + over)
        ax = page.heat(picture[head], lengths, x, y, wide, tall)
        frame(ax, lengths, (wide, tall), shade)
        strong = "" if shade is None else fit[head][0]
        ax.set_title(fit[head][0], loc="left", size=size, pad=5, **words(shade or INK, strong))
        outer = {"left": head % columns == 0, "bottom": head + columns >= H}
        dress(ax, lengths, (wide, tall), (down, across), **outer)
    pooled = picture.shape[1:] != (T, S)
    meaning = meaning or ("mean weight of a query in a cell" if pooled else "weight")
    x = left + columns * (wide + gap)
    scale_bar(page, x, top + over, min(rows * (tall + over) - over, 5.0 * grown), meaning, picture)
    page.explain_axes(lengths, picture.shape[1:], (left, x - gap), (top + over, page.height - below))
    return in_letters(page.figure)


def _grid(heads: int) -> tuple[int, int]:
    """Rows and columns: few holes, a little wider than high."""

    def cost(columns: int) -> float:
        rows = math.ceil(heads / columns)
        return 0.5 * (rows * columns - heads) + abs(columns / rows - 1.6)

    columns = min(range(math.ceil(math.sqrt(heads)), heads + 1), key=cost)
    return math.ceil(heads / columns), columns


# Pictures as files


FORMATS = (".png", ".svg", ".pdf")


def save(figure: Figure, out: str | os.PathLike[str]) -> Path:
    """Write a figure: all of it or, where anything goes wrong, nothing. Returns where.

    Raises:
        ArgumentError: not a .png, .svg or .pdf; no such folder; a folder that cannot be written to.
    """
    place = check_path(out)
    with whole_file(place) as half, half.open("wb") as file:
        kind = place.suffix[1:].lower()
        options: dict[str, Any] = {}
        if kind == "png":
            options["pil_kwargs"] = {"compress_level": 3}  # half the time, a tenth larger
        in_letters(figure).savefig(file, format=kind, **options)
    return place


def check_path(out: str | os.PathLike[str]) -> Path:
    """Where a picture may be written, links followed; raises `ArgumentError` as `save` does."""
    return place_for(out, FORMATS, ", ".join(FORMATS), "heads.png")
