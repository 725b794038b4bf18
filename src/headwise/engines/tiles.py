"""The first pass in plain torch, tile by tile: takes every option on every device, in linear memory.

Forward: the online softmax (Milakov 2018; Rabe and Staats 2021). Backward: tiles are computed again,
    dP = dO V^T,  delta_i = sum_d dO_id O_id,  dS = P (dP - delta)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..scoring import HIDDEN
from .backend import Backend, Call, Gradients
from .gradients import ScoreGradients
from .scores import Scores, blocks
from .walk import Tile, online, walk

__all__ = ["TILES", "Tiles", "lse_of", "sinks_gradient", "unfinished", "with_sinks"]


class Tiles(Backend):
    """Anything but what needs the whole matrix; the way back of those who have none of their own."""

    name = "tiles"
    gives_bias_gradient = True

    def how(self, call: Call) -> str:
        """In a phrase."""
        return "tile by tile in plain torch"

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        """(output [B, H, T, Dv], lse [B, H, T])."""
        scores, v = call.scores, call.v
        B, H, T, _ = scores.shape
        out = torch.zeros(B, H, T, v.shape[-1], dtype=v.dtype, device=v.device)
        return out, _walk(scores, v, out)

    def backward(self, call: Call, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        """Of q, k and, if asked for, bias, slopes and relative; of v; of sinks."""
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
            top, total, mixed = online(mine, values, rows, piece.columns)
            empty = top <= HIDDEN
            lse[here] = torch.where(empty, -torch.inf, top + total.log())
            if out is not None and mixed is not None:
                mixed = (mixed / total[..., None]).masked_fill(empty[..., None], 0)
                out[here] = mixed.to(out.dtype)
    return lse


def unfinished(scores: Scores, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(largest score, sum of the exponentials below it, mix of values by them) of every row: see `online`.

    What parts of a row are put together from; a row that sees nothing has HIDDEN, 0 and 0.
    """
    B, H, T, _ = scores.shape
    top = torch.empty(B, H, T, dtype=scores.dtype, device=scores.device)
    total = torch.empty_like(top)
    mixed = None if v is None else top.new_empty(B, H, T, v.shape[-1])
    for piece in scores.pieces():
        mine = scores.piece(piece)
        values = None if v is None else v[piece.batch, piece.kv_heads]
        for rows in blocks(0, T, piece.rows):
            here = (piece.batch, piece.heads, rows)
            top[here], sums, mix = online(mine, values, rows, piece.columns)
            empty = top[here] <= HIDDEN
            total[here] = sums.masked_fill(empty, 0)
            if mixed is not None and mix is not None:
                mixed[here] = mix.masked_fill(empty[..., None], 0)
    return top, total, mixed


def with_sinks(sinks: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Let the sink take its share; rows that see nothing stay as they are."""
    sinks = sinks.to(lse.dtype)[:, None]
    total = torch.where(torch.isneginf(lse), lse, torch.logaddexp(lse, sinks))
    # not exp(lse - total): of a large total the last place is much, of what is between the two it is not
    share = torch.where(torch.isneginf(lse), 0.0, (lse - sinks).sigmoid())
    return (out * share[..., None]).to(out.dtype), total


def sinks_gradient(scores: Scores, out: Tensor, lse: Tensor, grad: Tensor) -> Tensor | None:
    """The gradient of the sinks, [H]."""
    sinks = scores.scoring.sinks
    if sinks is None:
        return None
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [B, H, T]
    mass = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -torch.where(torch.isneginf(lse), 0.0, mass * delta).sum((0, 2))
