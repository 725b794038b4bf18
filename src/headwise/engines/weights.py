"""Weights as numbers, of chosen queries and keys or their mean over heads, and all that has a gradient.

The lse is saved and never differentiated; the row's normalisation comes back through delta instead:

    delta_i = sum_j P_ij dP_ij        dS_ij = P_ij (dP_ij - delta_i)

with dP zero at keys that were not selected: their scores still shaped the row. Differentiating exp(s - lse)
with a constant lse would drop delta, and be wrong without an error.

Entropy, which a training loss may use, has its gradient here, too. With H_i = -sum_j p_ij log p_ij (a sink
counts as one more key) and g_i what is wanted of it,

    d loss / d s_ij = -g_i p_ij (log p_ij + H_i)

which is the gradient of weights for the cotangent -g_i log p_ij: the normalisation brings H_i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..indexing import Index, positions_of
from ..scoring import HIDDEN
from . import plain
from .first_pass import lse_of
from .gpu.launches import cannot
from .gradients import Context, ScoreGradients, ScoresTemplate, needs_added
from .scores import CPU_TILE, Scores, Tiled, blocks, huge_empty, own_precision, settle_exponentials
from .walk import Block, Tile, check_mass, check_rows, check_some, is_rough, walk

if TYPE_CHECKING:
    from .gpu.request import Prepared

FEW = 2**22  # weights that a GPU computes in one product


def prepared(scores: Tiled, lse: Tensor) -> Prepared:
    """Return the arguments of kernels; only where `cannot` returns None."""
    from .gpu.request import Prepared

    assert isinstance(scores, Scores)
    return Prepared(scores, lse)


def weights(scores: Scores, lse: Tensor | None, columns: Index | None = None, mean: bool = False) -> Tensor:
    """Return [B, H, T, n] weights of the keys in `columns` (slice, index tensor, or None: all).

    With `mean`, [B, T, n]: averaged over heads, the weights of each head never kept. Whole rows are
    normalised by their own sum, as torch's softmax does, and need no lse; without one, all rows are whole.
    """
    if plain.transforms_are_active():
        return _plainly(scores, columns, mean)
    if torch.compiler.is_compiling():
        return torch.ops.headwise.weights.default(*scores.flatten(), lse, *_chosen(columns, scores), mean)
    with own_precision(scores.device):
        if not scores.wants_gradient:
            return dense(scores, lse, columns, mean)
        p: Tensor = _Weights.apply(ScoresTemplate(scores), lse, columns, mean, *scores.leaves)
    return p


def _chosen(columns: Index | None, scores: Scores) -> tuple[Tensor | None, list[int] | None]:
    """Return chosen keys as an operator's arguments: (indices, a slice's three numbers); None twice: all."""
    if isinstance(columns, slice):
        return None, list(columns.indices(scores.shape[3]))
    return columns, None


def _plainly(scores: Scores, columns: Index | None, mean: bool) -> Tensor:
    p, _ = plain.weights_of(scores)
    p = p if columns is None else p[..., columns]
    return (p.mean(1) if mean else p).to(scores.input_dtype)


def dense(scores: Scores, lse: Tensor | None, columns: Index | None, mean: bool) -> Tensor:
    """Return the weights, without gradients."""
    if isinstance(columns, slice) and columns.indices(scores.shape[3]) == (0, scores.shape[3], 1):
        columns = None
    if lse is None and _few_on_gpu(scores):
        p, _ = softmax(scores.tile(slice(0, scores.shape[2]), slice(0, scores.shape[3])), scores.sinks, True)
        p = p if columns is None else p[..., columns]
        return (p.mean(1) if mean else p).to(scores.input_dtype)
    if cannot(scores) is None:
        from .gpu import dense as on_gpu

        ready = prepared(scores, lse_of(scores) if lse is None else lse)
        return on_gpu.mean(ready, columns) if mean else on_gpu.dense(ready, columns)
    B, H, T, S = scores.shape
    if columns is None and not mean and _at_once(scores):
        p, now = softmax(scores.full(), scores.sinks, scores.may_see_nothing, lse is not None)
        if lse is not None and now is not None:
            check_rows(scores, slice(0, T), lse, now)
        return p
    keys: Sequence[int] = range(S)
    if columns is not None:
        keys = keys[columns] if isinstance(columns, slice) else columns.tolist()
    shape = (B, T, len(keys)) if mean else (B, H, T, len(keys))
    dtype = scores.dtype if mean else scores.input_dtype
    out = huge_empty(shape, dtype, scores.device).zero_()
    if lse is None or (columns is None and not mean) or (columns is not None and is_rough(lse)):
        parts = _full_rows(scores, lse, columns)
    else:
        if columns is not None:
            check_some(scores, lse)
        parts = _tiles(scores, lse, keys)
    for where, keys_slice, p in parts:
        if mean:
            out[where[0], where[2], keys_slice] += p.sum(1)
        else:
            out[(*where, keys_slice)] = p
    return out.div_(H).to(scores.input_dtype) if mean else out


Places = tuple[slice, slice, slice]


def _full_rows(
    scores: Scores, lse: Tensor | None, columns: Index | None
) -> Iterator[tuple[Places, slice, Tensor]]:
    """Yield softmax of full rows for each block of queries: (where, which of the chosen keys, weights)."""
    S = scores.shape[3]
    everything = slice(None)
    for piece in scores.pieces():
        mine = scores.piece(piece)
        rows = max(1, piece.rows * piece.columns // S)  # the same number of scores as in a tile
        for block in blocks(0, scores.shape[2], rows):
            start, stop = mine.span(block)
            if start == stop:
                continue  # these queries see nothing
            s = mine.tile(block, slice(start, stop))
            p, now = softmax(s, mine.sinks, mine.may_see_nothing, lse is not None)
            if lse is not None and now is not None:
                check_rows(mine, block, lse[piece.batch, piece.heads, block], now)
            keys_slice = slice(start, stop)
            if columns is not None:
                p = torch.nn.functional.pad(p, (start, S - stop))[..., columns]
                keys_slice = everything
            yield (piece.batch, piece.heads, block), keys_slice, p


def _few_on_gpu(scores: Scores) -> bool:
    """Return True if a few rows are best computed in one product, without a walk for their lse."""
    B, H, T, S = scores.shape
    return scores.q.is_cuda and T <= 16 and B * H * T * S <= FEW


def _at_once(scores: Scores) -> bool:
    """Return True if the scores are best computed in the memory of the weights, in one product.

    On a CPU, unless the weights have another dtype than scores, or a mask as large as a head's weights would
    have to be made for it.
    """
    q, mask = scores.q, scores.mask
    if not q.is_cpu or scores.dtype is not q.dtype or torch.compiler.is_compiling():
        return False
    if scores.positions is not None and not mask.hides_nothing:
        return False  # chosen queries, which may see far fewer keys than there are
    if not mask.allocates_tile:
        return True
    return q.shape[2] * scores.k.shape[2] <= CPU_TILE


def softmax(
    s: Tensor, sinks: Tensor | None, may_see_nothing: bool, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return (weights of full rows of scores, in place; their lse, if wanted). Empty rows: 0 and -inf."""
    if sinks is None and s.is_cpu and not torch.compiler.is_compiling():
        settle_exponentials()
        top = s.amax(-1, keepdim=True) if may_see_nothing or with_lse else None
        p = torch.softmax(s, -1, out=s)
        # the heaviest weight is exp(largest score - lse), and never too small to measure
        now = top - p.amax(-1, keepdim=True).log() if top is not None and with_lse else None
        if may_see_nothing and top is not None:
            empty = top <= HIDDEN
            if bool(empty.any()):
                p = p.masked_fill_(empty, 0.0)
                now = None if now is None else now.masked_fill(empty, -torch.inf)
        return p, None if now is None else now.squeeze(-1)
    top = s.amax(-1, keepdim=True)
    hidden = top <= HIDDEN
    if sinks is not None:
        top = torch.maximum(top, sinks.to(s.dtype)[:, None, None])
    p = s.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.to(s.dtype)[:, None, None] - top).exp()
    now = (top + total.log()).masked_fill(hidden, -torch.inf).squeeze(-1) if with_lse else None
    return p.mul_(torch.where(hidden, 0.0, 1 / total)), now


def _tiles(scores: Scores, lse: Tensor, keys: Sequence[int]) -> Iterator[tuple[Places, slice, Tensor]]:
    """Yield exp(s - lse) of the selected keys alone, a tile at a time."""
    everything = isinstance(keys, range) and keys == range(scores.shape[3])
    for block in walk(scores, lse):
        size = block.piece.columns
        if isinstance(keys, range) and keys.step == 1:
            start, stop = block.scores.span(block.rows)
            mass = torch.zeros_like(block.lse)
            for run in blocks(max(start, keys.start), min(stop, keys.stop), size):
                keys_slice = slice(run.start - keys.start, run.stop - keys.start)
                p = block.tile(run).p
                mass += p.sum(-1)
                yield block.where, keys_slice, p
            if everything:
                check_mass(block.scores, block.rows, block.lse, block.with_sink(mass))
        else:
            numbers = torch.as_tensor(keys, device=scores.device)
            for keys_slice in blocks(0, len(numbers), size):
                yield block.where, keys_slice, block.tile(numbers[keys_slice]).p


# Gradients


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        template: ScoresTemplate,
        lse: Tensor | None,
        columns: Index | None,
        mean: bool,
        *leaves: Tensor | None,
    ) -> Tensor:
        scores = template.fill(*leaves)
        if any(ctx.needs_input_grad) and lse is None:
            lse = lse_of(scores)
        ctx.save_for_backward(*leaves, lse)
        ctx.template, ctx.columns, ctx.mean = template, columns, mean
        return dense(scores, lse, columns, mean)

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        *leaves, lse = ctx.saved_tensors
        needed, columns, mean = ctx.needs_input_grad[4:], ctx.columns, ctx.mean
        if plain.needs_differentiable_backward(grad):

            def forward(*leaves: Tensor) -> Tensor:
                return _plainly(ctx.template.fill(*leaves), columns, mean)

            d_leaves = plain.gradients(forward, leaves, needed, grad)
        else:
            d_leaves = gradients(ctx.template.fill(*leaves), lse, columns, mean, grad, needs_added(needed))
        return (None,) * 4 + _typed(d_leaves, leaves)


def _typed(grads: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return gradients in the dtypes of their tensors."""
    return tuple([None if g is None else g.to(x.dtype) for g, x in zip(grads, leaves, strict=True)])


def gradients(
    scores: Scores, lse: Tensor, columns: Index | None, mean: bool, grad: Tensor, bias: bool
) -> tuple[Tensor | None, ...]:
    """Return d loss / d DIFFERENTIABLE from d loss / d weights; `bias`: also of bias, slopes and relative."""
    if mean:
        grad = grad[:, None] / scores.shape[1]  # [B, 1, T, n]
    run = slice(None) if columns is None else columns
    start, stop, step = run.indices(scores.shape[3]) if isinstance(run, slice) else (0, 0, 0)
    with own_precision(grad.device):
        if step == 1 and not bias and cannot(scores) is None:
            from .gpu import backward

            q, k, sinks = backward.of_weights(prepared(scores, lse), start, stop - start, grad)
            return q, k, None, None, sinks, None

        def cotangent(tile: Tile) -> Tensor:
            return _cotangent(grad, tile.block, tile.columns, columns)

        return score_gradients(scores, lse, cotangent, bias)


Cotangent = Callable[[Tile], Tensor]  # d loss / d weights of a tile


def score_gradients(
    scores: Scores,
    lse: Tensor,
    cotangent: Cotangent,
    bias: bool,
    of_sink: Callable[[Block, Tensor], Tensor] | None = None,
) -> tuple[Tensor | None, ...]:
    """Return d loss / d DIFFERENTIABLE, tile by tile, from the cotangent of each tile's weights.

    of_sink: the cotangent of the sink's weight, from a block and the logarithm of that weight,
    [B, H, t]; None: zero.
    """
    totals = ScoreGradients.zeros(scores, bias)
    sinks = scores.sinks
    d_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=scores.dtype)
    for block in walk(scores, lse):
        mine, room = block.scores, totals.piece(block.piece)
        assert isinstance(mine, Scores)
        delta: Tensor | float = 0.0
        mass: Tensor | float = 0.0
        for tile in block.tiles():
            dp = cotangent(tile)
            delta = delta + torch.linalg.vecdot(tile.p, dp)
            mass = mass + tile.p.sum(-1)
        if isinstance(delta, float) or isinstance(mass, float):
            continue  # these queries see nothing
        d_sink: Tensor | float = 0.0
        log_sunk = block.log_of_sinks()
        if log_sunk is not None:
            sunk = torch.where(torch.isneginf(block.lse), 0.0, log_sunk.exp())
            mass = mass + sunk
            if of_sink is not None:
                d_sink = of_sink(block, log_sunk)
                delta = delta + sunk * d_sink
        check_mass(mine, block.rows, block.lse, mass)
        # exp(s - lse) sums to 1 only up to the rounding of lse, and P (dP - delta) is a difference
        right = torch.where(mass == 0, 0.0, 1 / mass)
        delta = delta * right
        for columns in blocks(*mine.span(block.rows), block.piece.columns):
            s, bend = mine.tile_and_bend(block.rows, columns)
            tile = Tile(block, columns, s)
            p = tile.p * right[..., None]
            room.add(mine, block.rows, columns, p * (cotangent(tile) - delta[..., None]), bend)
        if d_sinks is not None:
            d_sinks[block.piece.heads] += (sunk * right * (d_sink - delta)).sum((0, 2))
    return totals.q, totals.k, totals.bias, totals.slopes, d_sinks, totals.relative


def _cotangent(grad: Tensor, block: Block, tile_keys: slice, columns: Index | None) -> Tensor:
    """Return d loss / d weights of one tile, from [B, H or 1, T, n]: zero at keys that were not selected."""
    batch, heads, rows = block.where
    mine = grad[batch, slice(None) if grad.shape[1] == 1 else heads, rows]  # [B, H or 1, t, n]
    if columns is None:
        return mine[..., tile_keys].to(block.scores.dtype)
    spots = positions_of(columns, block.scores.shape[3], grad.device)
    inside = ((spots >= tile_keys.start) & (spots < tile_keys.stop)).nonzero().squeeze(-1)
    tile = mine.new_zeros(*mine.shape[:-1], tile_keys.stop - tile_keys.start, dtype=block.scores.dtype)
    return tile.index_add_(-1, spots[inside] - tile_keys.start, mine[..., inside].to(tile.dtype))


# Entropy


def entropy(scores: Scores, lse: Tensor, value: Tensor | None) -> Tensor:
    """Return the entropy of each query, [B, H, T], as a function of q, k, bias, slopes, sinks and relative.

    value: the same number, computed before; None only while compiling.
    """
    if plain.transforms_are_active():
        return _entropy_plainly(scores)
    if torch.compiler.is_compiling():
        return torch.ops.headwise.entropy.default(*scores.flatten(), lse)
    result: Tensor = _Entropy.apply(ScoresTemplate(scores), lse, value, *scores.leaves)
    return result


def entropy_gradients(scores: Scores, lse: Tensor, grad: Tensor, bias: bool) -> tuple[Tensor | None, ...]:
    """Return d loss / d DIFFERENTIABLE from d loss / d entropy; `bias`: also of bias, slopes and relative."""
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


def _entropy_plainly(scores: Scores) -> Tensor:
    """Return the entropy from the full matrix, for derivatives of derivatives."""
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
        ctx: Context, template: ScoresTemplate, lse: Tensor, value: Tensor, *leaves: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(*leaves, lse)
        ctx.template = template
        return value.clone()

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        *leaves, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad[3:]
        if plain.needs_differentiable_backward(grad):
            d_leaves = plain.gradients(
                lambda *inputs: _entropy_plainly(ctx.template.fill(*inputs)), leaves, needed, grad
            )
        else:
            d_leaves = entropy_gradients(ctx.template.fill(*leaves), lse, grad, needs_added(needed))
        return (None,) * 3 + _typed(d_leaves, leaves)
