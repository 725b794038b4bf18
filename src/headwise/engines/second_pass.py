"""The second pass: what is asked of the weights, from q, k, mask and lse, in tiles of plain torch.

Everything here reads weights and keeps something smaller. Gradients flow through `weights.py` alone.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..scoring import HIDDEN
from .flat import flatten
from .gpu.cannot import cannot, prepared
from .rounding import check_mass
from .scores import Scores, Tiled, own_precision
from .walk import Block, walk

__all__ = ["Top", "pooled", "top"]

MOST = 64  # keys a query that the kernel keeps a list of; more are better sorted


class Top(NamedTuple):
    """The heaviest keys of each query, heaviest first."""

    values: Tensor  # [B, H, T, K] weights
    indices: Tensor  # [B, H, T, K] keys; -1 where fewer than K keys are seen


@torch.no_grad()
def pooled(scores: Tiled, lse: Tensor, row_cells: int, column_cells: int) -> Tensor:
    """A picture of true mass: [B, H, row_cells, column_cells], the weights summed over each cell.

    Cell of query i: floor(i * row_cells / T); of key j: floor(j * column_cells / S). Queries that do not
    count (padding) are left out, so the whole picture sums to the queries that do.
    """
    if torch.compiler.is_compiling() and isinstance(scores, Scores):
        cells = [row_cells, column_cells]
        return torch.ops.headwise.measure.default(*flatten(scores.detach()), lse, [], False, 0, cells)[0]
    if cannot(scores) is None:
        from .gpu.measure import pooled as on_gpu

        return on_gpu(prepared(scores, lse), (row_cells, column_cells))
    B, H, _, _ = scores.shape
    picture = torch.zeros(B, H, row_cells, column_cells, dtype=scores.dtype, device=scores.device)
    with own_precision(scores.device):
        _pool(scores, lse, picture)
    return picture


def _pool(scores: Tiled, lse: Tensor, picture: Tensor) -> None:
    T, S = scores.shape[2:]
    row_cells, column_cells = picture.shape[2:]
    for block in walk(scores, lse):
        by_row = _indicator(block.rows, T, row_cells, picture)  # [t, cells]
        cells = _cells(block.rows, T, row_cells)
        counted = block.counted()
        room = picture[block.piece.batch, block.piece.heads, cells]
        mass = torch.zeros_like(block.lse)
        for tile in block.tiles():
            p = tile.p if counted is None else tile.p * counted[..., None]
            by_column = _indicator(tile.columns, S, column_cells, picture)  # [s, cells]
            here = _cells(tile.columns, S, column_cells)
            room[..., here] += by_row.transpose(0, 1) @ (p @ by_column)
            mass += tile.p.sum(-1)
        check_mass(block.scores, block.rows, block.lse, block.with_sink(mass))


def _cells(index: slice, length: int, cells: int) -> slice:
    """The cells a run of positions falls into."""
    return slice(index.start * cells // length, (index.stop - 1) * cells // length + 1)


def _indicator(index: slice, length: int, cells: int, like: Tensor) -> Tensor:
    """[positions, cells touched]: 1 where a position falls into a cell."""
    spots = torch.arange(index.start, index.stop, device=like.device) * cells // length
    touched = _cells(index, length, cells)
    wanted = torch.arange(touched.start, touched.stop, device=like.device)
    return (spots[:, None] == wanted).to(like.dtype)


@torch.no_grad()
def top(scores: Tiled, lse: Tensor, count: int) -> Top:
    """The `count` heaviest keys of every query; of equal weights on a GPU the first key."""
    if torch.compiler.is_compiling() and isinstance(scores, Scores):
        return Top(*torch.ops.headwise.top.default(*flatten(scores.detach()), lse, count))
    if cannot(scores) is None and count <= MOST:
        from .gpu.top import top as on_gpu

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
        found, at = tile.log_p.topk(min(count, tile.log_p.shape[-1]), dim=-1)
        best, order = torch.cat([best, found], -1).topk(count, dim=-1)
        keys = torch.cat([keys, at + tile.columns.start], -1).gather(-1, order)
        mass += tile.p.sum(-1)
    check_mass(block.scores, block.rows, block.lse, block.with_sink(mass))
    return best.exp(), keys.masked_fill(best <= HIDDEN / 2, -1)
