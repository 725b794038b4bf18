"""One layer on one sequence as a page holds it: maps, exact or pooled, and all that was measured beside them.

Never are more weights in memory than a block of queries has, but for maps of so few cells as a page shows.

Letters: H num_heads, h heads shown, T query_len, S key_len.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines.scores import Scores
from ..errors import ArgumentError, ShapeError
from ..heads.collection import Heads
from ..heads.head_distances import attention_between, similarity
from ..heads.layer import Head, LayerHeads
from ..heads.layer_names import Layer
from ..heads.measures import weights_in_blocks
from ..map import AttentionMap
from ..scoring import HIDDEN, hidden_is_endless
from .heatmaps import queries_pooled, summed
from .offline_pages import Blob, Blobs, as_bytes, levels
from .page_readings import Reading, View, rounded

__all__ = ["Finer", "Texts", "call_data", "check_finer", "strongest_of_labels", "with_maps"]

FINER, PAIRS, FINER_HEADS = 512, 64, 8
LEAST = 1e-30  # a weight that is 0 and not hidden, as the page's smallest level
BLOCK = 4096  # queries whose heaviest keys are looked for at a time

Finer = list[tuple[str, int]]  # by path and head
Texts = dict[tuple[str, ...], int]  # lists of tokens, each once, and its number


def call_data(
    view: View,
    layer: LayerHeads,
    side: int,
    blobs: Blobs,
    texts: Texts,
    *,
    finer: Sequence[int] = (),
    outputs: Tensor | None = None,
) -> dict[str, Any]:
    """As `CallData` of page_data.ts says.

    Args:
        finer: heads to zoom into, where the map is not exact.
        outputs: of the heads before W_O, [1, H, T, D] of the call.
    """
    T, S = view.lengths
    rows, columns = view.size(side)
    exact = (rows, columns) == (T, S)
    H = view.calls[-1].shape[1]
    maps = _packed(view, _cells(view, view.heads, rows, columns), blobs)
    norms, written, most = _written(view, rows, columns, exact, blobs)
    zoomed = {} if exact else {head: _finer(view, layer, head, blobs) for head in finer if head in view.heads}
    said = None if outputs is None or not exact else _outputs(view, layer, outputs)  # [H, T, D]
    return {
        "queries": T,
        "keys": S,
        "rows": rows,
        "columns": columns,
        "query_tokens": _number(view.names[0], texts),
        "key_tokens": _number(view.names[1], texts),
        "left_out": view.left_out,
        "steps": view.steps,
        "maps": maps,
        "norms": norms,
        "written": written,
        "written_most": most,
        "finer": {str(head): cells for head, cells in zoomed.items()},
        "pairs": {str(head): _pairs(view, head) for head in zoomed},
        "outputs": None
        if said is None
        else {"width": said.shape[2], "data": blobs.pack(as_bytes(said.half()))},
        "distances": _matrix(attention_between(layer)) if H > 1 else None,
        "cosines": _cosines(view, said) if H > 1 else None,
    }


def _packed(view: View, cells: Tensor, blobs: Blobs) -> list[Blob | None]:
    """Cells of the heads that are shown, [h, rows, columns], by head; None: not shown."""
    shown = {head: blobs.pack(levels(mine)) for head, mine in zip(view.heads, cells, strict=True)}
    return [shown.get(head) for head in range(view.calls[-1].shape[1])]


def _number(names: list[str] | None, texts: Texts) -> int | None:
    return None if names is None else texts.setdefault(tuple(names), len(texts))


# Cells


def _cells(view: View, heads: list[int], rows: int, columns: int) -> Tensor:
    """[h, rows, columns]: weights, or the share of a query's weight that falls into a cell."""
    T, S = view.lengths
    call, made = view.calls[-1], view.calls[-1].pooled
    if view.whole and (rows, columns) != (T, S):
        if made is None or (call.map is not None and made.shape[2:] != (rows, columns)):
            return _from_map(view, heads, rows, columns)
        mass = summed(summed(made[0][heads].float().cpu(), 1, rows), 2, columns)
        return mass / summed(queries_pooled(call, 0), 0, rows).clamp(min=1)[:, None]
    if call.map is None:
        return view.picture[heads].float().cpu()
    return _in_blocks(view, heads, rows, columns)


def _from_map(view: View, heads: list[int], rows: int, columns: int) -> Tensor:
    """The same from a map, in fewer cells than it has weights."""
    if not view.whole:
        return _in_blocks(view, heads, rows, columns)
    map = view.calls[0].map
    assert map is not None
    mass = map.select(heads=heads).pooled((rows, columns))[0].float().cpu()
    return mass / summed(torch.ones(view.lengths[0]), 0, rows)[:, None]


def _in_blocks(
    view: View, heads: list[int], rows: int, columns: int, factors: Tensor | None = None
) -> Tensor:
    """The same from weights, a block of queries at a time; factors: what they are multiplied by, [h, S]."""
    T = view.lengths[0]
    row = torch.arange(T) * rows // T
    cells = torch.zeros(len(heads), rows, columns)
    for some, p in _blocks(view, heads):
        shares = p if factors is None else p * factors[:, None]
        cells.index_add_(1, row[some], summed(shares, 2, columns))
    return cells / torch.bincount(row, minlength=rows)[:, None]


def _blocks(view: View, heads: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """(which queries, counted without padding, int [t]; their weights [h, t, S])."""
    end = int(view.keys[-1]) + 1 if len(view.keys) else 0
    for map, queries, done in _steps(view):
        S = map.shape[3]
        for some, p in weights_in_blocks(map.select(heads=heads), queries):
            weights = p[0].float().cpu()
            nothing = weights == 0
            if bool(nothing.any()):  # too little for a number, which is not hidden
                weights = weights.masked_fill(nothing & _seen(map.select(heads=heads, queries=some)), LEAST)
            if end > S:  # what was not there yet
                weights = torch.nn.functional.pad(weights, (0, end - S))
            yield torch.arange(done, done + len(some)), weights[..., view.keys]
            done += len(some)


def _steps(view: View) -> Iterator[tuple[AttentionMap, Tensor, int]]:
    """Each call's map, which of its queries are no padding, int [t], and how many there were before it."""
    start = done = 0
    for call in view.calls:
        assert call.map is not None, "of a call without a map there is the picture"
        end = start + call.shape[2]
        queries = view.queries[(view.queries >= start) & (view.queries < end)] - start
        yield call.map, queries, done
        start, done = end, done + len(queries)


def _seen(map: AttentionMap) -> Tensor:
    """Where the rules hide nothing, bool [h, T, S]; of given weights no zero is known to be seen."""
    scores = map.parts()[0]
    (_, H, T, S), everyone = map.shape, slice(0, map.shape[2])
    if not isinstance(scores, Scores):
        return torch.zeros(H, T, S, dtype=torch.bool)
    seen = torch.ones(1, H, T, S, dtype=torch.bool, device=map.device)
    allowed = scores.mask.tile(scores.at(everyone), everyone, slice(0, S), S)
    if allowed is not None:
        seen = seen & allowed
    if map.bias is not None:  # masks that are added
        seen = seen & (hidden_is_endless(map.bias.detach()) > HIDDEN / 2)
    return seen[0].cpu()


def _written(
    view: View, rows: int, columns: int, exact: bool, blobs: Blobs
) -> tuple[Blob | None, list[Blob | None] | None, float | None]:
    """Norms of what is written; maps of weight times norm, where positions share cells; the largest norm."""
    call = view.calls[-1]
    if call.written_norms is None or call.map is None:
        return None, None, None
    norms = call.written_norms[0].float()[:, view.keys]  # [H, S]
    most = float(norms.max())
    if not math.isfinite(most):
        return None, None, None
    if exact:
        return blobs.pack(as_bytes(norms)), None, rounded(most)
    factors = norms[view.heads] / (most or 1.0)
    cells = _in_blocks(view, view.heads, rows, columns, factors)
    return None, _packed(view, cells, blobs), rounded(most)


# More of some heads


def check_finer(heads: Heads, finer: Sequence[tuple[Layer, int]] | None) -> Finer | None:
    """Heads to zoom into, by path and number; raises `ArgumentError` where there is no such head."""
    if finer is None:
        return None
    if isinstance(finer, Sequence) and not isinstance(finer, str) and not finer:
        return []
    try:
        return [(head.path, head.head) for head in heads.chosen(finer)]
    except ArgumentError as error:
        raise ArgumentError(str(error).replace("chosen", "finer", 1)) from None


def with_maps(reading: Reading, finer: Finer) -> Finer:
    """Those of them that another model, or the same on another text, has a map of."""
    kept = _maps(reading)
    return [each for each in finer if each[0] in kept]


def _maps(reading: Reading) -> dict[str, View]:
    """By place, the layers whose maps were kept."""
    return {
        layer.place: view
        for layer, view in zip(reading.heads.values(), reading.layers, strict=True)
        if view is not None and view.calls[-1].map is not None
    }


def strongest_of_labels(reading: Reading, side: int) -> Finer:
    """Where maps were kept that are not exact: the strongest head of each label, 8 at most."""
    maps = [place for place, view in _maps(reading).items() if not view.is_exact(side)]
    by_label: dict[str, Head] = {}
    for head in sorted(reading.shown, key=lambda head: head.label.strength, reverse=True):
        if head.path in maps:
            by_label.setdefault(head.label.name, head)
    places = [(head.path, head.head) for head in by_label.values()][:FINER_HEADS]
    return sorted(places, key=lambda each: (maps.index(each[0]), each[1]))


def _finer(view: View, layer: LayerHeads, head: int, blobs: Blobs) -> dict[str, Any]:
    if view.calls[-1].map is None:
        raise ArgumentError(
            f"finer must be of heads whose maps were kept: {layer.path} was called with "
            f"{list(view.calls[-1].shape)} and kept none; use watch(model, keep=True)"
        )
    rows, columns = (min(FINER, length) for length in view.lengths)
    cells = _from_map(view, [head], rows, columns)
    return {"rows": rows, "columns": columns, "map": blobs.pack(levels(cells))}


def _pairs(view: View, head: int) -> list[tuple[int, int, float | None]]:
    """The strongest of all: query, key, weight."""
    place = torch.full((int(view.keys[-1]) + 1,), -1).index_put((view.keys,), torch.arange(len(view.keys)))
    best = torch.empty(0), torch.empty(0, 2, dtype=torch.long)
    for map, mine, done in _steps(view):
        for some in mine.split(BLOCK):
            top = map.select(heads=[head], queries=some).top(min(PAIRS, map.shape[3]))
            values, keys = top[0][0, 0].float().cpu(), top[1][0, 0].cpu()  # [t, n]
            queries = torch.arange(done, done + len(some))[:, None].expand_as(keys)
            here = (values > 0) & (keys < len(place))
            places = torch.stack([queries[here], place[keys[here]]], -1)
            both = torch.cat([best[0], values[here]]), torch.cat([best[1], places])
            order = both[0].sort(descending=True, stable=True).indices[:PAIRS]
            best = both[0][order], both[1][order]
            done += len(some)
    rows = zip(best[1].tolist(), best[0].tolist(), strict=True)
    return [(query, key, rounded(weight)) for (query, key), weight in rows if key >= 0]


# Between heads, and what they say


def _outputs(view: View, layer: LayerHeads, outputs: Tensor) -> Tensor:
    H, T = view.calls[-1].shape[1:3]
    if len(view.calls) > 1 or tuple(outputs.shape[1:3]) != (H, T):
        steps = f" in {len(view.calls)} steps" * (len(view.calls) > 1)
        raise ShapeError(
            f"outputs must be of the run that was watched: [1, H, T, D] = {list(outputs.shape)} in "
            f"{layer.path}, where {H} heads read {sum(call.shape[2] for call in view.calls)} queries{steps}; "
            "collect them in the same block"
        )
    return outputs[0].float().cpu()[:, view.queries]


def _cosines(view: View, said: Tensor | None) -> list[list[float | None]] | None:
    measured = view.calls[-1].pairs.get("outputs")
    if measured is None and said is not None:
        measured = similarity(said[None])
    return None if measured is None else _matrix(measured[0])


def _matrix(numbers: Tensor | None) -> list[list[float | None]] | None:
    if numbers is None:
        return None
    return [[None if math.isnan(x) else round(x, 4) for x in row] for row in numbers.tolist()]
