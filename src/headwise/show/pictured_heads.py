"""What of watched heads is drawn: cells of every head, names of its tokens, its label in words and colour.

Letters: H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError
from ..heads.collection import Heads
from ..heads.labels import MIXED
from ..heads.layer import Head, LayerHeads
from ..heads.record import Record
from .heatmaps import Names, cells, check_tokens, hidden, shares
from .texts import readable

if TYPE_CHECKING:
    from .heatmaps import Cells

__all__ = [
    "OF_LABEL",
    "WRITTEN",
    "call_of",
    "cells_of",
    "label_of",
    "layer_name",
    "meaning_of",
    "names_in",
    "names_of",
    "queries_in",
    "queries_inside",
    "tint",
    "title_of",
]


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
WRITTEN = "weight × norm of what is written (1: the layer's largest)"


# Cells


def cells_of(
    layer: LayerHeads, batch: int, most: int, *, written: bool = False
) -> tuple[Cells, tuple[int, int], Record]:
    """Cells of every head, [H, rows, columns], how many queries and keys they stand for, and of which call.

    written: weights times the norm of what is written, as shares of the largest norm of the layer.

    Raises:
        ArgumentError: neither a map nor a picture was kept; nothing was measured of what is written.
    """
    call = call_of(layer)
    _, _, T, S = call.shape
    made = call.pooled
    if written:
        return _written(layer, call, batch, most), (T, S), call
    if call.map is not None and (made is None or max(T, S) <= most or max(made.shape[-2:]) != most):
        return cells(call.map.select(batch=batch), most), (T, S), call
    assert made is not None
    mass, inside = _coarser(made[batch], queries_inside(T, made.shape[2], call.pooled_queries, batch), most)
    return shares(mass, len(inside), inside), (T, S), call


def call_of(layer: LayerHeads) -> Record:
    """The call that is drawn: the last of which a map or a picture was kept.

    Raises:
        ArgumentError: there is none.
    """
    for call in reversed(layer.calls):
        if call.map is not None or call.pooled is not None:
            return call
    raise ArgumentError(
        f"heads must have maps or pictures: {layer.path} was called with {list(layer.calls[-1].shape)} and "
        "kept neither; use watch(model, pooled=128), for steps of generation keep=True"
    )


def queries_inside(query_len: int, rows: int, counted: Tensor | None, batch: int) -> Tensor:
    """How many queries each row of a pooled picture is the mass of, [rows]."""
    if counted is not None:
        return counted[batch].cpu().float()
    return torch.bincount(torch.arange(query_len) * rows // query_len, minlength=rows).float()


def _coarser(mass: Tensor, inside: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Pooled mass in at most so many rows and columns; rows that are two halves of one are added."""
    for axis in (1, 2):
        count = mass.shape[axis]
        fewer = min(count, most)
        place = torch.arange(count, device=mass.device) * fewer // count
        shape = [*mass.shape]
        shape[axis] = fewer
        mass = mass.new_zeros(shape).index_add_(axis, place, mass)
        if axis == 1:
            inside = torch.zeros(fewer).index_add_(0, place.cpu(), inside)
    return mass, inside


def _written(layer: LayerHeads, call: Record, batch: int, most: int) -> Cells:
    norms = getattr(call, "written_norms", None)
    if norms is None or call.map is None:
        raise ArgumentError(
            f"written=True must have norms and maps: {layer.path} was called with {list(call.shape)} and "
            f"kept {'no norms' if norms is None else 'no map'}; use watch(model, written=True, keep=True)"
        )
    real = call.map.real_keys[batch].cpu()  # padding writes nothing, whatever stands there
    largest = float(norms[batch].masked_fill(~real, 0).max())
    values: Tensor = call.written(batch, most)
    return hidden(values / largest if largest > 0 else values)


def queries_in(call: Record, batch: int, rows: int) -> Tensor:
    """How many queries each of so many rows of cells stands for, [rows]; padded ones are none."""
    T = call.shape[2]
    counted = None if call.map is None else call.map.select(batch=batch).mask.counted(T)
    if counted is not None:
        places = torch.arange(T) * rows // T
        return torch.zeros(rows).index_add_(0, places, counted[0].cpu().float())
    if call.map is None and call.pooled_queries is not None:
        kept = call.pooled_queries[batch].cpu().float()
        return torch.zeros(rows).index_add_(0, torch.arange(len(kept)) * rows // len(kept), kept)
    return queries_inside(T, rows, None, batch)


def meaning_of(pooled: bool, written: bool) -> str:
    """What a colour stands for."""
    if written:
        return WRITTEN + (", mean of a cell's queries" if pooled else "")
    return "mean weight of a query in a cell" if pooled else "weight"


# Names


def names_of(
    heads: Heads,
    batch: int,
    call: Record,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    texts: dict[int, list[str]] | None = None,
) -> Names:
    """The names of a call's queries and keys: as given, else of the text that it read, where it is known.

    texts: by `id`, the lists of tokens that were made readable already: layers share theirs.

    Raises:
        ShapeError: names that do not fit.
    """
    _, _, T, S = call.shape
    queries, keys = check_tokens((T, S), None, query_tokens, key_tokens)
    read = heads.words(call, batch)
    known = None
    if read is not None and T == S:
        texts = {} if texts is None else texts
        if id(read) not in texts:
            texts[id(read)] = readable(read)
        known = texts[id(read)]
    return known if queries is None else queries, known if keys is None else keys


def names_in(
    heads: Heads,
    batch: int,
    calls: Sequence[Record],
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
) -> list[Names]:
    """The same for several layers: names that are given stand wherever they fit, and must fit somewhere.

    In self-attention queries and keys are one text: that of the queries or that of the keys, by its length.

    Raises:
        ShapeError: names that fit no layer.
    """
    every: list[Names] = []
    texts: dict[int, list[str]] = {}
    used: set[str] = set()
    for call in calls:
        _, _, T, S = call.shape
        mine: list[Sequence[str] | None] = [None, None]
        given = {"query_tokens": query_tokens, "key_tokens": key_tokens}
        fitting = {
            name: each
            for name, each in given.items()
            if each is not None and len(each) == (T if name == "query_tokens" else S)
        }
        if call.kind == "self" and T == S:
            one = list({tuple(each): None for each in fitting.values()})
            mine = [one[0], one[0]] if len(one) == 1 else mine
        else:
            mine = [fitting.get("query_tokens"), fitting.get("key_tokens")]
        used.update(fitting)
        every.append(names_of(heads, batch, call, mine[0], mine[1], texts))
    for name, each in (("query_tokens", query_tokens), ("key_tokens", key_tokens)):
        if each is not None and name not in used:
            lengths = sorted({call.shape[2 if name == "query_tokens" else 3] for call in calls})
            raise ShapeError(
                f"{name} must match a layer: {len(each)} tokens for lengths {lengths}; give one a position"
            )
    return every


def layer_name(layer: LayerHeads) -> str:
    """What a layer is called in a picture."""
    return f"layer {layer.layer}" if isinstance(layer.layer, int) else layer.path


def label_of(head: Head) -> str:
    """A head's label and score; "" where it has none."""
    return "" if head.label.name == MIXED else f"{head.label.name} {head.label.score:.2f}"


def title_of(head: Head) -> str:
    """What stands above a head."""
    return f"head {head.head}: {label_of(head)}" if label_of(head) else f"head {head.head}"


def tint(head: Head) -> str | None:
    """The colour of a head's label."""
    return OF_LABEL.get(head.label.name)
