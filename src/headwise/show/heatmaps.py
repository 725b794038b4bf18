"""Heat maps: cells of a map or of watched heads, names of their tokens, and a picture of one layer's heads.

A picture is a matplotlib figure that touches no global state. Written, it is a whole file or none at all.

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

from ..errors import ArgumentError, ShapeError
from ..heads.layer import MIXED, Head, LayerHeads
from ..heads.layer_names import path_in_words
from ..heads.record import Record
from ..map import AttentionMap
from ..whole_files import place_for, whole_file
from .sheet import INK, Page, in_letters, named, need_matplotlib, room, sharpness, side_of, whole, words
from .texts import fitted, inches, label, readable, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..heads.collection import Heads
    from .sheet import Cells

CELLS = 256  # the finest picture: beyond it positions share a cell
OF_LABEL = {  # told apart by every kind of colour vision, and dark enough for small letters on white
    "induction": "#0a883d",
    "duplicate-token": "#507c59",
    "previous-token": "#19289e",
    "next-token": "#126fe7",
    "self": "#5231ea",
    "sink": "#9b6e00",
    "special-token": "#56606b",
    "punctuation": "#4f4500",
    "broad": "#005aa0",
    "local": "#003b2f",
}
WRITTEN = "weight × ‖v W_O‖ (1 = the layer's largest ‖v W_O‖)"

Names = tuple[list[str] | None, list[str] | None]  # of queries, of keys


def heatmaps(
    weights: AttentionMap,
    tokens: Sequence[str] | None = None,
    *,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    batch: int = 0,
) -> Figure:
    """Draw `headwise.AttentionMap.plot`: a heat map of every head of one sequence.

    Colours share one scale from 0 to 1, by square root so that small weights can be told apart; where no
    weight is, as under a mask, the cell is grey. Beyond 256 positions the picture is pooled: a cell shows how
    much of a query's weight, in the mean over the queries of the cell, falls into it. A cell is a whole
    number of dots, two at least, so that the thinnest column is seen.
    """
    _, _, T, S = weights.shape
    names = check_tokens((T, S), tokens, query_tokens, key_tokens)
    need_matplotlib()  # before the map is computed, to report a missing package at once
    return draw(cells(weights.select(batch=batch)), (T, S), names)


def summed(values: Tensor, dim: int, cells: int) -> Tensor:
    """Sum neighbours along a dimension, so that at most `cells` numbers remain."""
    size = values.shape[dim]
    if cells >= size:
        return values
    shape = list(values.shape)
    shape[dim] = cells
    place = torch.arange(size, device=values.device) * cells // size
    return values.new_zeros(shape).index_add_(dim, place, values)


def cells(weights: AttentionMap, most: int = CELLS) -> Cells:
    """Return the cells of a map, [H, rows, columns], pooled if it is large; weights of 0 are masked."""
    if max(weights.shape[2:]) <= most:
        return _hidden(weights.dense().detach()[0])
    return _shares(weights.pooled(most)[0], counted_queries(weights))


def _shares(mass: Tensor, queries: Tensor) -> Cells:
    """Return cells from pooled mass [H, rows, columns] and the numbers of queries, [rows] or finer."""
    inside = summed(queries, 0, mass.shape[1])
    return _hidden(mass / inside.clamp(min=1).to(mass)[:, None])


def _hidden(values: Tensor) -> Cells:
    """Return a masked array that hides every number that is not above 0."""
    import numpy

    array = values.cpu().float().numpy()
    return numpy.ma.masked_where(~(array > 0), array)


def counted_queries(weights: AttentionMap) -> Tensor:
    """Return 1 for each query of one sequence and 0 for padding: float [T]."""
    T = weights.shape[2]
    counted = weights.mask.counted(T)
    return torch.ones(T) if counted is None else counted[0].cpu().float()


def cells_of(
    layer: LayerHeads, batch: int, most: int, *, written: bool = False
) -> tuple[Cells, tuple[int, int], Record]:
    """Return the cells of every head, [H, rows, columns], the numbers of queries and keys, and the call.

    written: weights times the norm of what is written, as shares of the largest norm of the layer.
    """
    call = call_of(layer)
    _, _, T, S = call.shape
    made = call.pooled
    if written:
        return _written(layer, call, batch, most), (T, S), call
    if call.map is not None and (made is None or max(T, S) <= most or max(made.shape[-2:]) != most):
        return cells(call.map.select(batch=batch), most), (T, S), call
    assert made is not None
    mass = summed(summed(made[batch], 1, most), 2, most)
    return _shares(mass, queries_pooled(call, batch)), (T, S), call


def call_of(layer: LayerHeads) -> Record:
    """Return the call to draw: the last one that kept a map or a picture."""
    for call in reversed(layer.calls):
        if call.map is not None or call.pooled is not None:
            return call
    raise ArgumentError(
        f"heads must have maps or pooled maps: {path_in_words(layer.path)} was called with "
        f"{list(layer.calls[-1].shape)} and kept neither; use watch(model, pooled=128), or keep=True for "
        "steps of generation"
    )


def queries_pooled(call: Record, batch: int) -> Tensor:
    """Return the number of queries in each row of a call's pooled map, [rows]."""
    if call.pooled_queries is not None:
        return call.pooled_queries[batch].cpu().float()
    assert call.pooled is not None
    return summed(torch.ones(call.shape[2]), 0, call.pooled.shape[2])


def queries_in(call: Record, batch: int, rows: int) -> Tensor:
    """Return the number of queries in each of `rows` rows of cells, without padding."""
    if call.map is not None:
        return summed(counted_queries(call.map.select(batch=batch)), 0, rows)
    return summed(queries_pooled(call, batch), 0, rows)


def _written(layer: LayerHeads, call: Record, batch: int, most: int) -> Cells:
    norms = call.written_norms
    if norms is None or call.map is None:
        raise ArgumentError(
            f"written=True must have norms and maps: {path_in_words(layer.path)} was called with "
            f"{list(call.shape)} and kept {'no norms' if norms is None else 'no map'}; use watch(model, "
            "written=True, keep=True)"
        )
    real = call.map.real_keys[batch].cpu()  # padding writes nothing, whatever its norm
    largest = float(norms[batch].masked_fill(~real, 0).max())
    values: Tensor = call.written(batch, most)
    return _hidden(values / largest if largest > 0 else values)


def check_tokens(
    lengths: tuple[int, int],
    tokens: Sequence[str] | None = None,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> Names:
    """Return readable names of queries and keys, or raise `ShapeError` if their numbers do not fit."""
    T, S = lengths
    if tokens is not None and not len(tokens) == T == S:
        raise ShapeError(
            f"tokens must match query_len and key_len: {len(tokens)} tokens for {T} and {S}; give one per "
            "position, or query_tokens= and key_tokens= if the lengths differ"
        )
    for kind, names, length in (("query", query_tokens, T), ("key", key_tokens, S)):
        if names is not None and len(names) != length:
            raise ShapeError(
                f"{kind}_tokens must match {kind}_len: {len(names)} tokens for {length}; give one per {kind}"
            )
    queries = tokens if query_tokens is None else query_tokens
    keys = tokens if key_tokens is None else key_tokens
    return None if queries is None else readable(queries), None if keys is None else readable(keys)


def names_of(
    heads: Heads,
    batch: int,
    call: Record,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    texts: dict[int, list[str]] | None = None,
) -> Names:
    """Return the names of a call's queries and keys: those passed, else the tokens of its text, if known.

    texts: by `id`, the lists of tokens that were made readable already: layers share theirs.
    """
    _, _, T, S = call.shape
    queries, keys = check_tokens((T, S), None, query_tokens, key_tokens)
    read = heads.words(call, batch)
    read_names = None
    if read is not None and T == S:
        texts = {} if texts is None else texts
        if id(read) not in texts:
            texts[id(read)] = readable(read)
        read_names = texts[id(read)]
    return read_names if queries is None else queries, read_names if keys is None else keys


def names_in(
    heads: Heads,
    batch: int,
    calls: Sequence[Record],
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> list[Names]:
    """Return the names of queries and keys of several layers; names passed must fit at least one layer.

    In self-attention queries and keys are one text: that of the queries or that of the keys, by its length.
    """
    arguments = {
        "query_tokens": (2, query_tokens),
        "key_tokens": (3, key_tokens),
    }  # which dim of a call, names
    every: list[Names] = []
    texts: dict[int, list[str]] = {}
    used: set[str] = set()
    for call in calls:
        fitting = {
            name: tokens
            for name, (dim, tokens) in arguments.items()
            if tokens is not None and len(tokens) == call.shape[dim]
        }
        used.update(fitting)
        if call.kind == "self" and call.shape[2] == call.shape[3]:
            texts_given = {tuple(tokens) for tokens in fitting.values()}
            fitting = dict.fromkeys(arguments, *texts_given) if len(texts_given) == 1 else {}
        every.append(
            names_of(heads, batch, call, fitting.get("query_tokens"), fitting.get("key_tokens"), texts)
        )
    for name, (dim, tokens) in arguments.items():
        if tokens is not None and name not in used:
            lengths = sorted({call.shape[dim] for call in calls})
            raise ShapeError(
                f"{name} must match a layer: {len(tokens)} tokens for lengths {lengths}; give one token per "
                "position"
            )
    return every


def layer_name(layer: LayerHeads) -> str:
    """Return the name of a layer in a picture."""
    return f"layer {layer.layer}" if isinstance(layer.layer, int) else layer.path


def label_of(head: Head) -> str:
    """Return a head's label and score, or ""."""
    return "" if head.label.name == MIXED else f"{head.label.name} {head.label.score:.2f}"


def tint(head: Head) -> str | None:
    return OF_LABEL.get(head.label.name)


def meaning_of(pooled: bool, written: bool) -> str:
    if written:
        return WRITTEN + (", averaged over a cell's queries" if pooled else "")
    return "weight in a cell, averaged over its queries" if pooled else "weight"


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
    """Draw `heatmaps` of computed cells, [H, rows, columns], of these numbers of queries and keys.

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
        outer = {"left": head % columns == 0, "bottom": head + columns >= H}
        ax = page.heat(picture[head], lengths, (x, y), (wide, tall), (down, across), shade, **outer)
        strong = "" if shade is None else fit[head][0]
        ax.set_title(fit[head][0], loc="left", size=size, pad=5, **words(shade or INK, strong))
    meaning = meaning or meaning_of(picture.shape[1:] != (T, S), False)
    x = left + columns * (wide + gap)
    page.scale_bar(x, top + over, min(rows * (tall + over) - over, 5.0 * grown), meaning, picture)
    page.explain_axes(lengths, picture.shape[1:], (left, x - gap), (top + over, page.height - below))
    return in_letters(page.figure)


def _grid(heads: int) -> tuple[int, int]:
    """Return rows and columns of a grid with few holes, a little wider than high."""

    def cost(columns: int) -> float:
        rows = math.ceil(heads / columns)
        return 0.5 * (rows * columns - heads) + abs(columns / rows - 1.6)

    columns = min(range(math.ceil(math.sqrt(heads)), heads + 1), key=cost)
    return math.ceil(heads / columns), columns


FORMATS = (".png", ".svg", ".pdf")


def save(figure: Figure, out: str | os.PathLike[str]) -> Path:
    """Write a figure, whole or not at all, and return where; raises `ArgumentError` where that cannot be."""
    place = place_for(out, FORMATS, ", ".join(FORMATS), "heads.png")
    with whole_file(place) as half, half.open("wb") as file:
        kind = place.suffix[1:].lower()
        options: dict[str, Any] = {}
        if kind == "png":
            options["pil_kwargs"] = {"compress_level": 3}  # half the time, a tenth larger
        in_letters(figure).savefig(file, format=kind, **options)
    return place
