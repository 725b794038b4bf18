"""The backends in plain torch: tile by tile, and as one matrix.

`tiles` takes every option on every device, in linear memory. Forward: the online softmax (Milakov 2018; Rabe
and Staats 2021). Backward: tiles are computed again,
    dP = dO V^T,  delta_i = sum_d dO_id O_id,  dS = P (dP - delta)

`plain` computes the full matrix, in operations torch can differentiate any number of times and in any mode.
It has quadratic memory, so it is chosen only where nothing else works: dropout on the weights, forward-mode
derivatives, derivatives of derivatives, function transforms (vmap, jvp), tracers (torch.jit.trace, make_fx).
Its size is checked against the memory budget first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import budget
from ..mask_rules import is_traced
from ..scoring import HIDDEN
from .backend import Backend, Call, Gradients
from .gradients import ScoreGradients
from .scores import Scores, blocks, own_precision
from .walk import Tile, online, walk

# Tile by tile


class Tiles(Backend):
    """Every call that needs no full matrix; also the backward of backends without one."""

    name = "tiles"
    gives_bias_gradient = True

    def description(self, call: Call) -> str:
        return "tile by tile in plain torch"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        scores, v = call.scores, call.v
        B, H, T, _ = scores.shape
        out = torch.zeros(B, H, T, v.shape[-1], dtype=v.dtype, device=v.device)
        return out, _walk(scores, v, out)

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """Return gradients of q, k and, if requested, bias, slopes and relative; of v; of sinks."""
        scores, v = call.scores, call.v
        gradients = ScoreGradients.zeros(scores, call.bias_gradient)
        dv = torch.zeros(v.shape, dtype=scores.dtype, device=v.device)
        delta = (grad.to(scores.dtype) * out.to(scores.dtype)).sum(-1, keepdim=True)  # [B, H, T, 1]
        for block in walk(scores, lse, anchor=call.anchor):
            piece, rows, mine = block.piece, block.rows, block.scores
            assert isinstance(mine, Scores)
            room = gradients.piece(piece)
            values, grad_v = (x[piece.batch, piece.kv_heads] for x in (v, dv))
            d_out = grad[block.where].to(scores.dtype)  # [B, H, t, Dv]
            stacked = d_out.reshape(d_out.shape[0], values.shape[1], -1, d_out.shape[-1])
            for columns in blocks(*mine.span(rows), piece.columns):
                s, bend = mine.tile_and_bend(rows, columns)
                p = Tile(block, columns, s).p
                weights = p.view(*stacked.shape[:3], -1)  # [B, Hk, G * t, s]
                grad_v[:, :, columns] += weights.transpose(-2, -1) @ stacked
                dp = stacked @ values[:, :, columns].to(scores.dtype).transpose(-2, -1)
                room.add(mine, rows, columns, p * (dp.view(p.shape) - delta[block.where]), bend)
        return gradients, dv, sinks_gradient(scores, out, lse, grad)


TILES = Tiles()


def lse_of(scores: Scores) -> Tensor:
    """Return the log-sum-exp of every row, [B, H, T]."""
    return _walk(scores, None, None)


def _walk(scores: Scores, v: Tensor | None, out: Tensor | None) -> Tensor:
    lse = torch.empty(scores.shape[:3], dtype=scores.dtype, device=scores.device)
    for block, top, total, mixed in _blocks_of_rows(scores, v):
        empty = top <= HIDDEN
        lse[block] = torch.where(empty, -torch.inf, top + total.log())
        if out is not None and mixed is not None:
            mixed = (mixed / total[..., None]).masked_fill(empty[..., None], 0)
            out[block] = mixed.to(out.dtype)
    return lse


def _blocks_of_rows(
    scores: Scores, v: Tensor | None
) -> Iterator[tuple[tuple[slice, slice, slice], Tensor, Tensor, Tensor | None]]:
    """Yield (indices into [B, H, T], and the values of `online`) for each block of queries."""
    for piece in scores.pieces():
        mine = scores.piece(piece)
        values = None if v is None else v[piece.batch, piece.kv_heads]
        for rows in blocks(0, scores.shape[2], piece.rows):
            yield (piece.batch, piece.heads, rows), *online(mine, values, rows, piece.columns)


def unfinished(scores: Scores, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (largest score, sum of exponentials, mix of values) of every row; see `online`.

    Parts of a row can be merged from these; a row that sees nothing has HIDDEN, 0 and 0.
    """
    top = torch.empty(scores.shape[:3], dtype=scores.dtype, device=scores.device)
    total = torch.empty_like(top)
    mixed = None if v is None else top.new_empty(*top.shape, v.shape[-1])
    for block, highest, sums, mix in _blocks_of_rows(scores, v):
        empty = highest <= HIDDEN
        top[block], total[block] = highest, sums.masked_fill(empty, 0)
        if mixed is not None and mix is not None:
            mixed[block] = mix.masked_fill(empty[..., None], 0)
    return top, total, mixed


def with_sinks(sinks: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and lse with the sinks' share; rows that see nothing are unchanged."""
    sinks = sinks.to(lse.dtype)[:, None]
    total = torch.where(torch.isneginf(lse), lse, torch.logaddexp(lse, sinks))
    # exp(lse - total) would lose digits of a large total, their difference does not
    share = torch.where(torch.isneginf(lse), 0.0, (lse - sinks).sigmoid())
    return (out * share[..., None]).to(out.dtype), total


def sinks_gradient(scores: Scores, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor | None:
    """Return the gradient of the sinks, [H]."""
    sinks = scores.scoring.sinks
    if sinks is None:
        return None
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [B, H, T]
    mass = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -torch.where(torch.isneginf(lse), 0.0, mass * delta).sum((0, 2))


# As one matrix


class Plain(Backend):
    """Every call, in any mode."""

    name = "plain"
    is_differentiable = gives_bias_gradient = True

    def description(self, call: Call) -> str:
        return "as one T x S matrix in plain torch"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        return forward(call.scores, call.v, call.dropout)

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """Compute gradients where torch does not: inside an operator."""
        return TILES.backward(call, out, lse, grad)


PLAIN = Plain()


def forward(scores: Scores, v: Tensor, dropout: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return (output [B, H, T, Dv], lse [B, H, T]); dropout falls on the weights, not on lse."""
    weights, lse = weights_of(scores)
    if dropout:
        weights = torch.dropout(weights, dropout, train=True)
    B, H, T, S = weights.shape
    grouped = weights.reshape(B, v.shape[1], -1, S)  # [B, Hk, G * T, S]
    with own_precision(v.device):
        out = grouped @ v.to(weights.dtype)
    return out.reshape(B, H, T, v.shape[-1]).to(v.dtype), lse


def weights_of(scores: Scores) -> tuple[Tensor, Tensor]:
    """Return (weights [B, H, T, S], lse [B, H, T])."""
    B, H, T, S = scores.shape
    budget.check(
        3 * B * H * T * S * scores.dtype.itemsize,  # scores, weights, and one for backward
        scores.device,
        f"plain attention over [B, H, T, S] = {[B, H, T, S]}",
        "leave out what needs the full matrix (dropout, forward-mode or second derivatives)",
    )
    scoring, Hk = scores.scoring, scores.k.shape[1]
    q = scores.q.to(scores.dtype).reshape(B, Hk, -1, scores.q.shape[-1])  # [B, Hk, G * T, D]
    with own_precision(scores.device):
        s = (q @ scores.k.to(scores.dtype).transpose(-2, -1)).reshape(B, H, T, S) * scoring.scale
    if scoring.softcap is not None:
        s = scoring.softcap * torch.tanh(s / scoring.softcap)
    added = scores.additive(slice(0, T), slice(0, S), scores.dtype)
    if added is not None:
        s = s + added
    hidden = s <= HIDDEN
    s = s.masked_fill(hidden, -torch.inf)
    empty = hidden.all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)  # a finite row, so that its (unused) derivative is not NaN
    if scoring.sinks is not None:
        sink = scoring.sinks.to(s.dtype)[:, None, None].expand(B, H, T, 1)
        weights = torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1]
        lse = torch.logaddexp(s.logsumexp(-1), sink.squeeze(-1))
    else:
        weights, lse = torch.softmax(s, -1), s.logsumexp(-1)
    return weights.masked_fill(empty, 0.0), lse.masked_fill(empty.squeeze(-1), -torch.inf)


def transforms_are_active() -> bool:
    """Return True if torch.func, forward mode or a tracer is active: only plain operations support them."""
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active() or is_traced()


def needs_differentiable_backward(grad: Tensor) -> bool:
    """Return True if the backward must be differentiable (create_graph) or batched (is_grads_batched)."""
    if torch.is_grad_enabled():
        return True
    if torch.compiler.is_compiling():  # compiled autograd, which has no batches of gradients
        return False
    return torch._C._functorch.is_legacy_batchedtensor(grad)  # is_grads_batched


def gradients(
    forward: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[object],
    needed: Sequence[bool],
    grad: Tensor | Sequence[Tensor],
) -> tuple[Tensor | None, ...]:
    """Return differentiable gradients of forward(*inputs); None where not needed.

    Each input is passed as an alias. Without that, an input that is another one, or was computed from it,
    would collect the other's share here and once more in the graph outside. Where `forward` returns several
    tensors, `grad` is a list of theirs.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        aliases = [x.view_as(x) if isinstance(x, Tensor) else x for x in inputs]
        wanted = {i: x for i, x in enumerate(aliases) if needed[i] and isinstance(x, Tensor)}
        grads = torch.autograd.grad(forward(*aliases), list(wanted.values()), grad, create_graph=again)
    by_place = dict(zip(wanted, grads, strict=True))
    return tuple(by_place.get(i) for i in range(len(aliases)))
