"""The second pass except weights themselves: statistics, pooled maps, heaviest keys, mass on chosen keys.

Everything here reads weights, computed from q, k, mask and lse in tiles of plain torch (on a GPU by kernels),
and returns something smaller. Weights themselves, and all that has a gradient, are in weights.py.

The mass that a query puts on the keys a mask allows needs no weights at all, only one more light pass:

    m_i = sum of p_ij over the keys j that `on` allows = exp(lse of the scores under both masks - lse)

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..mask_rules import can_read
from ..masks import Mask
from ..scoring import HIDDEN
from .backend import Collected
from .first_pass import lse_of
from .gpu.launches import cannot
from .scores import Scores, Tiled, blocks, own_precision, without_graph
from .statistics import (
    ACCUMULATORS,
    NEAR_ROWS,
    PICTURE,
    RECEIVED,
    ROW_STATISTICS,
    STATISTICS,
    WITH_GRADIENT,
    Statistics,
    check_names,
    of_heads,
    sums_of,
)
from .walk import FAR, ROUGH, Block, GivenWeights, Tile, check_mass, check_some, is_rough, walk
from .weights import entropy, prepared

MOST = 64  # keys a query for which the kernel keeps a list; for more, sorting is faster
COUNTED_ROWS = 64  # queries at a time where the keys of a dense mask are counted
Cells = tuple[int, int] | None  # rows and columns of a pooled map


# Statistics


class Measurement(NamedTuple):
    """A request for statistics by name, and for a pooled map if `cells` is set."""

    names: tuple[str, ...]
    per_query: bool = False  # row statistics [B, H, T] instead of [B, H]
    reach: int = 8  # how near counts as `local`
    cells: Cells = None


def measure(
    scores: Tiled,
    lse: Tensor,
    names: Iterable[str] = (),
    per_query: bool = False,
    reach: int = 8,
    cells: Cells = None,
    collected: Collected | None = None,
) -> Statistics:
    """Measure the statistics named, in one walk over the weights; no names: all of them.

    Gradients flow through `entropy` and `effective_keys` alone. cells: rows and columns of a pooled map
    computed in the same walk, named "pooled". collected: statistics that need not be measured.

    Raises:
        ArgumentError: an unknown name; reach below 0; `max_logit` of weights without scores.
    """
    from_weights = isinstance(scores, GivenWeights)
    names = tuple(names) or tuple(n for n in STATISTICS if not (from_weights and n == "max_logit"))
    check_names(names)
    if from_weights and "max_logit" in names:
        raise ArgumentError(
            "max_logit must be measured on scores: this map was made from weights; use AttentionMap(q, k)"
        )
    if reach < 0:
        raise ArgumentError(f"reach must not be negative: got {reach}; 0 is the query's own position")
    request = Measurement(tuple(dict.fromkeys(names)), per_query, reach, cells)
    differentiable = isinstance(scores, Scores) and scores.wants_gradient
    if not differentiable or not any(name in WITH_GRADIENT for name in names):
        return Statistics(_measure(scores, lse, request, collected))
    assert isinstance(scores, Scores)
    return Statistics(_measure_with_gradient(scores, lse, request, collected))


def _measure_with_gradient(
    scores: Scores, lse: Tensor, request: Measurement, collected: Collected | None
) -> dict[str, Tensor]:
    """Measure per query first, so that autograd differentiates the mean over queries."""
    names = request.names
    wanted = names if "entropy" in names else ("entropy", *names)
    if torch.compiler.is_compiling():  # entropy is an operator then, and needs no value
        wanted = tuple(name for name in names if name not in WITH_GRADIENT)
    values = _measure(scores, lse, request._replace(names=wanted, per_query=True), collected)
    value = entropy(scores, lse, values.get("entropy"))
    values["entropy"] = value
    if "effective_keys" in names:
        values["effective_keys"] = value.exp().masked_fill(torch.isneginf(lse), 0)
    if not request.per_query:
        rows = {name: value for name, value in values.items() if name in ROW_STATISTICS}
        values |= of_heads(rows, scores, lse)
    return {name: values[name] for name in (*names, *([] if request.cells is None else [PICTURE]))}


def _measure(
    scores: Tiled, lse: Tensor, request: Measurement, collected: Collected | None = None
) -> dict[str, Tensor]:
    if torch.compiler.is_compiling() and isinstance(scores, Scores):
        names, per_query, reach, cells = request
        values = torch.ops.headwise.measure.default(
            *scores.detach().flatten(),
            lse,
            list(names),
            per_query,
            reach,
            None if cells is None else list(cells),
        )
        return dict(zip((*names, PICTURE), values, strict=False))
    return measured(scores, lse, request, collected)


def measured(
    scores: Tiled, lse: Tensor, request: Measurement, collected: Collected | None = None
) -> dict[str, Tensor]:
    """Return values by name, in the order of names, the pooled map last: by kernels on a GPU, else in tiles.

    collected: values per query that came with the output; only the others are measured.
    """
    names = request.names
    cached = () if collected is None else tuple(name for name in names if name in collected.names)
    fresh = request._replace(names=tuple(name for name in names if name not in cached)) if cached else request
    values: dict[str, Tensor] = {}
    with without_graph(), own_precision(scores.device):
        if cannot(scores) is None:
            assert isinstance(scores, Scores)
            if fresh.names or request.cells is not None:
                values = _by_kernels(scores, lse, fresh)
        elif fresh.names or request.cells is None:
            values = _in_tiles(scores, lse, fresh)
        else:
            values[PICTURE] = pooled(scores, lse, *request.cells)
        if collected is not None and cached:
            values |= _from_collected(scores, lse, collected, cached, request.per_query)
    return {name: values[name] for name in (*names, PICTURE) if name in values}


def _from_collected(
    scores: Tiled, lse: Tensor, collected: Collected, names: tuple[str, ...], per_query: bool
) -> dict[str, Tensor]:
    """Return collected statistics, per query or per head."""
    if per_query:
        return {name: collected.row(name).clone() for name in names}
    if cannot(scores) is not None:
        return of_heads({name: collected.row(name) for name in names}, scores, lse)
    from .gpu.measurements import of_heads as on_gpu

    kinds = [(ROW_STATISTICS[name].offset, ROW_STATISTICS[name].largest) for name in collected.names]
    heads = on_gpu(prepared(scores, lse), collected.rows.contiguous(), kinds)  # [n, B, H]
    return {name: heads[collected.names.index(name)] for name in names}


def _by_kernels(scores: Scores, lse: Tensor, request: Measurement) -> dict[str, Tensor]:
    from .gpu.measurements import NAMES, measure

    names, per_query, reach, cells = request
    kinds = {
        name: (ROW_STATISTICS[name].offset, ROW_STATISTICS[name].largest) for name in names if name in NAMES
    }
    done = measure(prepared(scores, lse), kinds, per_query, reach, RECEIVED in names, cells)
    values = done.rows
    if done.received is not None:
        values[RECEIVED] = done.received
    if done.picture is not None:
        values[PICTURE] = done.picture
    others = tuple(name for name in names if name not in values)  # statistics without a kernel
    if not others:
        return values
    return values | _in_tiles(scores, lse, request._replace(names=others, cells=None))


def without_kernel() -> tuple[str, ...]:
    """Return the statistics that have no kernel and always run on tiles."""
    from .gpu.measurements import NAMES

    return tuple(name for name in ROW_STATISTICS if name not in NAMES)


def _in_tiles(scores: Tiled, lse: Tensor, request: Measurement) -> dict[str, Tensor]:
    names, per_query, reach, cells = request
    B, H, T, S = scores.shape
    dtype, device = scores.dtype, scores.device
    rows = {name: torch.zeros(B, H, T, dtype=dtype, device=device) for name in names if name != RECEIVED}
    received = torch.zeros(B, H, S, dtype=dtype, device=device) if RECEIVED in names else None
    picture = None if cells is None else torch.zeros(B, H, *cells, dtype=dtype, device=device)
    needed = {part for name in rows for part in ROW_STATISTICS[name].needs}
    everywhere = received is not None or picture is not None
    everywhere = everywhere or any(ACCUMULATORS[part].where == "all" for part in needed)
    if everywhere:
        needed.add("mass")  # measured where full rows are walked: it shows whether lse is the row's
    elif names:
        check_some(scores, lse)
    # values divided by a row's mass need not be exact before; sums over queries must be
    rough = FAR if everywhere and received is None and picture is None else ROUGH
    ragged = "first" in needed and scores.mask.keys is not None and scores.mask.keys.ndim == 2
    if names:
        for block in walk(scores, lse, ragged, None if everywhere else NEAR_ROWS, rough):
            room = None if received is None else received[block.piece.batch, block.piece.heads]
            draw = None if picture is None else drawing(block, picture)
            sums = sums_of(block, needed, reach, everywhere, room, draw)
            if everywhere:
                check_mass(block.scores, block.rows, block.lse, block.with_sink(sums["mass"]))
            where = block.where
            for name, values in rows.items():
                values[where] = ROW_STATISTICS[name].of(block, sums)
    if not per_query:
        rows = of_heads(rows, scores, lse)
    large = {RECEIVED: received, PICTURE: picture}
    return rows | {name: value for name, value in large.items() if value is not None}


# Pooled maps


class Frame(NamedTuple):
    """The position of a part in all scores: its first query and key, and the full lengths."""

    first_query: int
    first_key: int
    query_len: int
    key_len: int


@torch.no_grad()
def pooled(scores: Tiled, lse: Tensor, row_cells: int, column_cells: int) -> Tensor:
    """Return a pooled map, [B, H, row_cells, column_cells]: the weights summed over each cell.

    Cell of query i: floor(i * row_cells / T); of key j: floor(j * column_cells / S). Queries that do not
    count (padding) are left out, so the whole picture sums to the queries that do.
    """
    if torch.compiler.is_compiling() and isinstance(scores, Scores):
        return _measure(scores, lse, Measurement((), cells=(row_cells, column_cells)))[PICTURE]
    if cannot(scores) is None:
        from .gpu.measurements import pooled as on_gpu

        return on_gpu(prepared(scores, lse), (row_cells, column_cells))
    B, H, _, _ = scores.shape
    picture = torch.zeros(B, H, row_cells, column_cells, dtype=scores.dtype, device=scores.device)
    with own_precision(scores.device):
        _pool(scores, lse, picture)
    return picture


def _pool(scores: Tiled, lse: Tensor, picture: Tensor) -> None:
    for block in walk(scores, lse):
        draw = drawing(block, picture)
        mass = torch.zeros_like(block.lse)
        for tile in block.tiles():
            draw(tile)
            mass += tile.p.sum(-1)
        check_mass(block.scores, block.rows, block.lse, block.with_sink(mass))


def drawing(block: Block, picture: Tensor, frame: Frame | None = None) -> Callable[[Tile], None]:
    """Return a function that adds a tile of a block of queries to a pooled map [B, H, rows, columns].

    frame: the position of the block's scores in the request that is pooled, if they are a part of it.
    """
    first_row, first_column, T, S = frame or Frame(0, 0, *block.scores.shape[2:])
    row_cells, column_cells = picture.shape[2:]
    rows = slice(block.rows.start + first_row, block.rows.stop + first_row)
    by_row = _indicator(rows, T, row_cells, picture).transpose(0, 1)  # [cells, t]
    room = picture[block.piece.batch, block.piece.heads, _cells(rows, T, row_cells)]
    counted = block.counted()

    def draw(tile: Tile) -> None:
        p = tile.p if counted is None else tile.p * counted[..., None]
        columns = slice(tile.columns.start + first_column, tile.columns.stop + first_column)
        by_column = _indicator(columns, S, column_cells, picture)  # [s, cells]
        room[..., _cells(columns, S, column_cells)] += by_row @ (p @ by_column)

    return draw


def _cells(index: slice, length: int, cells: int) -> slice:
    """Return the slice of cells that a run of positions falls into."""
    return slice(index.start * cells // length, (index.stop - 1) * cells // length + 1)


def _indicator(index: slice, length: int, cells: int, like: Tensor) -> Tensor:
    """Return [positions, cells touched]: 1 where a position falls into a cell."""
    spots = torch.arange(index.start, index.stop, device=like.device) * cells // length
    touched = _cells(index, length, cells)
    wanted = torch.arange(touched.start, touched.stop, device=like.device)
    return (spots[:, None] == wanted).to(like.dtype)


# The heaviest keys


class Top(NamedTuple):
    """The heaviest keys of each query, heaviest first."""

    values: Tensor  # [B, H, T, K] weights
    indices: Tensor  # [B, H, T, K] keys; -1 where fewer than K keys are seen


torch.serialization.add_safe_globals([Top])


@torch.no_grad()
def top(scores: Tiled, lse: Tensor, count: int) -> Top:
    """Return the `count` heaviest keys of every query; of equal weights on a GPU the first key."""
    if torch.compiler.is_compiling() and isinstance(scores, Scores):
        return Top(*torch.ops.headwise.top.default(*scores.detach().flatten(), lse, count))
    if cannot(scores) is None and count <= MOST:
        from .gpu.dense import top as on_gpu

        return Top(*on_gpu(prepared(scores, lse), count))
    B, H, T, _ = scores.shape
    values = torch.zeros(B, H, T, count, dtype=scores.dtype, device=scores.device)
    indices = torch.full((B, H, T, count), -1, dtype=torch.int64, device=scores.device)
    with own_precision(scores.device):
        for block in walk(scores, lse):
            values[block.where], indices[block.where] = _top_of(block, count)
    return Top(values, indices)


def _top_of(block: Block, count: int) -> tuple[Tensor, Tensor]:
    B, H, t = block.lse.shape
    best = torch.full((B, H, t, count), HIDDEN, dtype=block.scores.dtype, device=block.lse.device)
    keys = torch.full((B, H, t, count), -1, dtype=torch.int64, device=block.lse.device)
    mass = torch.zeros_like(block.lse)
    for tile in block.tiles():
        heaviest, at = tile.log_p.topk(min(count, tile.log_p.shape[-1]), dim=-1)
        best, order = torch.cat([best, heaviest], -1).topk(count, dim=-1)
        keys = torch.cat([keys, at + tile.columns.start], -1).gather(-1, order)
        mass += tile.p.sum(-1)
    check_mass(block.scores, block.rows, block.lse, block.with_sink(mass))
    return best.exp(), keys.masked_fill(best <= HIDDEN / 2, -1)


# Mass


@torch.no_grad()
def mass(scores: Scores | GivenWeights, lse: Tensor, on: Mask, per_query: bool = False) -> Tensor:
    """Return the weight on the keys that `on` allows: [B, H], the mean over counted queries, or [B, H, T].

    A learned sink is no key: it is in lse, never in the mass. No gradient flows.

    Raises:
        MaskError: `on` does not fit [B, H, T, S].
    """
    on = bound_to(on, scores)
    joined = scores.mask & on
    with own_precision(scores.device):
        if isinstance(scores, GivenWeights):
            values = _of_weights(scores, on)
        elif can_read(lse) and is_rough(lse):
            values = _walked(scores, lse, on)
        else:
            values = _of_scores(scores, lse, on, joined)
    if per_query:
        return values
    # counted as for `local`: every real query that sees a key
    return of_heads({"local": values}, replace(scores, mask=joined), lse)["local"]


def bound_to(on: Mask, scores: Tiled) -> Mask:
    """Return `on` bound to these queries; for chosen queries by their positions."""
    on = on.to(scores.device)
    if scores.positions is not None:
        on = on.placed(scores.positions)
    return on.bind(*scores.shape)


def _of_scores(scores: Scores, lse: Tensor, on: Mask, joined: Mask) -> Tensor:
    sees_nothing = torch.isneginf(lse)
    if on.hides_nothing and scores.sinks is None:
        return torch.ones_like(lse).masked_fill(sees_nothing, 0)  # a row sums to 1: no pass needed
    check_some(scores, lse)
    bare = replace(scores.scoring, sinks=None)
    joined_lse = lse_of(replace(scores.detach(), mask=joined, scoring=bare))
    # a row that sees nothing has -inf on both sides; rounding may give a full row more than 1
    return (joined_lse - lse).exp().masked_fill(sees_nothing, 0).clamp(max=1)


def _walked(scores: Scores, lse: Tensor, on: Mask) -> Tensor:
    """Return the mass by the weights themselves, where a difference of two lse would be too inexact."""
    values = torch.zeros_like(lse)
    for block in walk(scores, lse):
        mine = on.select(block.piece.batch, block.piece.heads, slice(None))
        mass = torch.zeros_like(block.lse)
        for tile in block.tiles():
            allowed = mine.tile(block.at, block.rows, tile.columns, scores.shape[3])
            values[block.where] += (tile.p if allowed is None else tile.p * allowed).sum(-1)
            mass += tile.p.sum(-1)
        check_mass(block.scores, block.rows, block.lse, block.with_sink(mass))
    return values


def _of_weights(scores: GivenWeights, on: Mask) -> Tensor:
    """Return the mass of weights without scores; their own mask is not applied."""
    B, H, T, S = scores.shape
    values = torch.empty(B, H, T, dtype=scores.dtype, device=scores.device)
    chosen = replace(scores.detach(), mask=on)
    for piece in scores.pieces():
        mine = chosen.piece(piece)
        for rows in blocks(0, T, max(1, piece.rows * piece.columns // S)):
            p = mine.weights[:, :, rows].to(scores.dtype)  # [B, H, t, S]
            allowed = mine.mask.tile(mine.at(rows), rows, slice(0, S), S)
            selected = p if allowed is None else p.masked_fill(~allowed, 0)
            values[piece.batch, piece.heads, rows] = selected.sum(-1)
    return values


def visible(scores: Tiled, mask: Mask | None = None) -> Tensor:
    """Return how many keys a mask shows each query, int [B, 1 or H, T]; by default the scores' own mask.

    Scores are not used, so a key hidden by an infinite bias counts. Linear in T and S except for dense masks.
    """
    mask = scores.mask if mask is None else bound_to(mask, scores)
    (B, _, T, S), device = scores.shape, scores.device
    at = scores.at(slice(0, T))
    if not mask.is_countable:
        counts = [_counted(mask, at, rows, S) for rows in blocks(0, T, COUNTED_ROWS)]
        return torch.cat(counts, dim=-1).expand(B, -1, T)
    keys, queries = (torch.zeros(B, n, dtype=torch.int64, device=device) for n in (S, T))
    if mask.key_ids is not None and mask.query_ids is not None:
        batch = max(mask.key_ids.shape[0], mask.query_ids.shape[0])  # either may be shared by all sequences
        both = (ids.expand(batch, -1, -1) for ids in (mask.key_ids, mask.query_ids))
        labels = torch.cat(tuple(both), dim=1)  # [B or 1, S + T, N]
        ranks = torch.unique(labels.flatten(0, 1), dim=0, return_inverse=True)[1].view(labels.shape[:2])
        keys, queries = (rank.expand(B, -1) for rank in (ranks[:, :S], ranks[:, S:]))
    # sorted by label, then by position: a query's keys are contiguous, in order
    spots = torch.arange(S, device=device)
    order = keys * S + spots
    if mask.keys is not None:
        real = mask.keys if mask.keys.ndim == 2 else spots < mask.keys[:, None]
        order = order.masked_fill(~real, -1)
    order = order.sort(-1).values  # [B, S]
    first = torch.zeros_like(at) if mask.left is None else (at - mask.left).clamp(0, S)
    beyond = torch.full_like(at, S) if mask.right is None else (at + mask.right + 1).clamp(0, S)
    start, stop = (torch.searchsorted(order, queries * S + end) for end in (first, beyond))  # [B, T]
    return (stop - start).clamp(min=0)[:, None]


def _counted(mask: Mask, at: Tensor, rows: slice, S: int) -> Tensor:
    """Return the counts of a block of queries, [B or 1, H or 1, t], by reading every key of the mask."""
    tile = mask.tile(at[rows], rows, slice(0, S), S)
    assert tile is not None, "a mask without rules is countable"
    tile = tile[(None,) * (4 - tile.ndim)]
    return tile.expand(*tile.shape[:2], rows.stop - rows.start, S).sum(-1)
