"""Read off the tiles of the second pass: pictures, the heaviest keys, and the way back from entropy.

Everything here reads weights, made from q, k, mask and lse in tiles of plain torch (on a GPU by kernels), and
keeps something smaller. Gradients flow through the weights themselves (`weights.py`) and through entropy: a
training loss may use it. With H_i = -sum_j p_ij log p_ij (a sink counts as one more key) and g_i what is
wanted of it,

    d loss / d s_ij = -g_i p_ij (log p_ij + H_i)

which is the gradient of weights for the cotangent -g_i log p_ij: the normalisation brings H_i. Memory is
linear in length; the weights are made again, tile by tile.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..scoring import HIDDEN
from . import plain
from .gpu.cannot import cannot, prepared
from .gradients import Context, needs_added
from .scores import Scores, Tiled, own_precision
from .walk import Block, Tile, check_mass, walk
from .weights import Rest, score_gradients

__all__ = ["Frame", "Top", "drawing", "gradients", "pooled", "top", "with_gradient"]


MOST = 64  # keys a query that the kernel keeps a list of; more are better sorted


class Top(NamedTuple):
    """The heaviest keys of each query, heaviest first."""

    values: Tensor  # [B, H, T, K] weights
    indices: Tensor  # [B, H, T, K] keys; -1 where fewer than K keys are seen


torch.serialization.add_safe_globals([Top])


class Frame(NamedTuple):
    """Where a part lies in the whole: its first query and key, and how many there are of each."""

    first_query: int
    first_key: int
    query_len: int
    key_len: int


@torch.no_grad()
def pooled(scores: Tiled, lse: Tensor, row_cells: int, column_cells: int) -> Tensor:
    """A picture of true mass: [B, H, row_cells, column_cells], the weights summed over each cell.

    Cell of query i: floor(i * row_cells / T); of key j: floor(j * column_cells / S). Queries that do not
    count (padding) are left out, so the whole picture sums to the queries that do.
    """
    if torch.compiler.is_compiling() and isinstance(scores, Scores):
        cells = [row_cells, column_cells]
        return torch.ops.headwise.measure.default(*scores.detach().flatten(), lse, [], False, 0, cells)[0]
    if cannot(scores) is None:
        from .gpu.pictures import pooled as on_gpu

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
    """What adds each tile of a block of queries to a picture [B, H, rows, columns] of the whole request.

    frame: the request that is pictured, where the block's own scores are a part of it.
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
        return Top(*torch.ops.headwise.top.default(*scores.detach().flatten(), lse, count))
    if cannot(scores) is None and count <= MOST:
        from .gpu.heaviest import top as on_gpu

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


# The way back from entropy


def with_gradient(scores: Scores, lse: Tensor, value: Tensor | None) -> Tensor:
    """The entropy of each query, [B, H, T], as a function of q, k, bias, slopes, sinks and relative.

    value: the same number, known already; None only while compiling.
    """
    if plain.transforms_are_active():
        return _plainly(scores)
    if torch.compiler.is_compiling():
        return torch.ops.headwise.entropy.default(*scores.flatten(), lse)
    entropy: Tensor = _Entropy.apply(*scores.leaves, Rest(scores), lse, value)
    return entropy


def gradients(scores: Scores, lse: Tensor, grad: Tensor, bias: bool) -> tuple[Tensor | None, ...]:
    """d loss / d DIFFERENTIABLE from d loss / d entropy; `bias`: of bias, slopes and relative, too."""
    with own_precision(grad.device):
        if not bias and cannot(scores) is None:
            from .gpu import backward

            q, k, sinks = backward.of_entropy(prepared(scores, lse), grad)
            return q, k, None, None, sinks, None
        grad = grad.to(scores.dtype)

        def cotangent(tile: Tile) -> Tensor:
            # a weight below e^-1000 is 0: its logarithm need not be as low as a hidden key's
            return -grad[tile.block.where][..., None] * tile.log_p.clamp(min=-1000)

        def of_sink(block: Block, log_sunk: Tensor) -> Tensor:
            return -grad[block.where] * log_sunk.clamp(min=-1000)

        return score_gradients(scores, lse, cotangent, bias, of_sink)


def _plainly(scores: Scores) -> Tensor:
    """The same from one matrix, for derivatives of derivatives."""
    weights, lse = plain.weights_of(scores)
    entropy = -(weights * torch.where(weights > 0, weights, 1.0).log()).sum(-1)
    if scores.sinks is not None:
        log_sunk = scores.sinks.to(lse.dtype)[:, None] - lse
        empty = torch.isneginf(lse)
        log_sunk = log_sunk.masked_fill(empty, 0.0)
        entropy = entropy - (log_sunk.exp() * log_sunk).masked_fill(empty, 0.0)
    return entropy


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        q: Tensor,
        k: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        relative: Tensor | None,
        rest: Rest,
        lse: Tensor,
        value: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(q, k, bias, slopes, sinks, relative, lse)
        ctx.rest = rest
        return value.clone()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        *inputs, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if plain.is_needed_for(grad):
            d_inputs = plain.gradients(lambda *given: _plainly(ctx.rest(*given)), inputs, needed, grad)
        else:
            d_inputs = gradients(ctx.rest(*inputs), lse, grad, needs_added(needed))
        typed = [None if g is None else g.to(x.dtype) for g, x in zip(d_inputs, inputs, strict=True)]
        return (*typed, None, None, None)
