"""The first pass in plain torch, tile by tile: takes every option on every device, in linear memory.

Forward: the online softmax (Milakov 2018; Rabe and Staats 2021). Backward: tiles are computed again,
    dP = dO V^T,  delta_i = sum_d dO_id O_id,  dS = P (dP - delta)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..scoring import HIDDEN
from .fused import sinks_gradient
from .gradients import ScoreGradients
from .scores import Scores, blocks

__all__ = ["backward", "forward", "lse_of"]


def forward(scores: Scores, v: Tensor) -> tuple[Tensor, Tensor]:
    """(output [B, H, T, Dv], lse [B, H, T])."""
    B, H, T, _ = scores.shape
    out = torch.zeros(B, H, T, v.shape[-1], dtype=v.dtype, device=v.device)
    return out, _walk(scores, v, out)


def lse_of(scores: Scores) -> Tensor:
    """The log-sum-exp of every row, [B, H, T]."""
    return _walk(scores, None, None)


def _walk(scores: Scores, v: Tensor | None, out: Tensor | None) -> Tensor:
    B, H, T, _ = scores.shape
    lse = torch.empty(B, H, T, dtype=scores.dtype, device=scores.device)
    for piece in scores.pieces():
        mine = scores.piece(piece)
        values = None if v is None else v[piece.batch, piece.kv_heads]
        for rows in blocks(0, T, piece.rows):
            here = (piece.batch, piece.heads, rows)
            lse[here], mixed = _online(mine, values, rows, piece.columns)
            if out is not None and mixed is not None:
                out[here] = mixed.to(out.dtype)
    return lse


def _online(scores: Scores, v: Tensor | None, rows: slice, columns: int) -> tuple[Tensor, Tensor | None]:
    """(lse [B, H, t], mix of values [B, H, t, Dv]) of a block of queries."""
    B, H, _, _ = scores.shape
    t = rows.stop - rows.start
    top = torch.full((B, H, t), HIDDEN, dtype=scores.dtype, device=scores.device)
    total = torch.zeros_like(top)
    mixed = None if v is None else v.new_zeros(B, H, t, v.shape[-1], dtype=scores.dtype)
    start, stop = scores.span(rows)
    for here in blocks(start, stop, columns):
        s = scores.tile(rows, here)  # [B, H, t, s]
        new_top = torch.maximum(top, s.amax(-1))
        p = s.sub_(new_top[..., None]).exp_()
        shrink = (top - new_top).exp()
        total = total * shrink + p.sum(-1)
        if v is not None and mixed is not None:
            block = v[:, :, here].to(scores.dtype)  # [B, Hk, s, Dv]
            added = (p.view(B, v.shape[1], -1, p.shape[-1]) @ block).view(mixed.shape)
            mixed = mixed * shrink[..., None] + added
        top = new_top
    empty = top <= HIDDEN / 2
    if scores.scoring.sinks is not None:
        sink = scores.scoring.sinks.to(scores.dtype)[:, None]
        new_top = torch.maximum(top, sink)
        shrink = (top - new_top).exp()
        total = total * shrink + (sink - new_top).exp()
        mixed = None if mixed is None else mixed * shrink[..., None]
        top = new_top
    if mixed is not None:
        mixed = (mixed / total[..., None]).masked_fill(empty[..., None], 0)
    return torch.where(empty, -torch.inf, top + total.log()), mixed


def backward(
    scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor, bias: bool
) -> tuple[ScoreGradients, Tensor, Tensor | None]:
    """(gradients of q, k and, if asked for, bias and slopes; of v; of sinks)."""
    T = scores.shape[2]
    found = ScoreGradients.zeros(scores, bias)
    dv = torch.zeros(v.shape, dtype=scores.dtype, device=v.device)
    delta = (grad.to(scores.dtype) * out.to(scores.dtype)).sum(-1, keepdim=True)  # [B, H, T, 1]
    for piece in scores.pieces():
        mine, room = scores.piece(piece), found.piece(piece)
        values, grad_v = (x[piece.batch, piece.kv_heads] for x in (v, dv))
        for rows in blocks(0, T, piece.rows):
            here = (piece.batch, piece.heads, rows)
            d_out = grad[here].to(scores.dtype)  # [B, H, t, Dv]
            stacked = d_out.reshape(d_out.shape[0], values.shape[1], -1, d_out.shape[-1])
            start, stop = mine.span(rows)
            for columns in blocks(start, stop, piece.columns):
                p, bend = weights_tile(mine, lse[here], rows, columns)
                weights = p.view(*stacked.shape[:3], -1)  # [B, Hk, G * t, s]
                grad_v[:, :, columns] += weights.transpose(-2, -1) @ stacked
                dp = stacked @ values[:, :, columns].to(scores.dtype).transpose(-2, -1)
                room.add(mine, rows, columns, p * (dp.view(p.shape) - delta[here]), bend)
    return found, dv, sinks_gradient(scores, out, lse, grad)


def weights_tile(scores: Scores, lse: Tensor, rows: slice, columns: slice) -> tuple[Tensor, Tensor | None]:
    """exp(s - lse) of a tile and the derivative of its cap; empty rows give 0."""
    s, bend = scores.tile_and_bend(rows, columns)
    return s.sub_(torch.where(torch.isneginf(lse), 0.0, lse)[..., None]).exp_(), bend
