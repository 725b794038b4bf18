"""The way back: from the gradient of a tile of scores to q, k, bias and slopes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..indexing import take
from .scores import Piece, Scores

__all__ = ["ScoreGradients"]


@dataclass(frozen=True, eq=False)
class ScoreGradients:
    """Gradients of everything the scores depend on, filled tile by tile."""

    q: Tensor
    k: Tensor
    bias: Tensor | None
    slopes: Tensor | None

    @classmethod
    def zeros(cls, scores: Scores, bias: bool) -> ScoreGradients:
        """Room for them, in the tiles' dtype; `bias`: those of bias and slopes, too."""

        def room(like: Tensor | None) -> Tensor | None:
            if like is None:
                return None
            return torch.zeros(like.shape, dtype=scores.dtype, device=like.device)

        q, k = room(scores.q), room(scores.k)
        assert q is not None and k is not None
        if not bias:
            return cls(q, k, None, None)
        return cls(q, k, room(scores.scoring.bias), room(scores.scoring.slopes))

    def piece(self, piece: Piece) -> ScoreGradients:
        """The part of it that belongs to one piece: views, so writing there writes here."""
        bias = self.bias
        return ScoreGradients(
            self.q[piece.batch, piece.heads],
            self.k[piece.batch, piece.kv_heads],
            None if bias is None else take(bias, (piece.batch, piece.heads, None, None)),
            None if self.slopes is None else self.slopes[piece.heads],
        )

    def add(self, scores: Scores, rows: slice, columns: slice, grad: Tensor, bend: Tensor | None) -> None:
        """Carry a tile's gradient d loss / d s [B, H, t, s] back to q, k, bias and slopes."""
        if self.bias is not None:
            room = take(self.bias, (None, None, rows, columns))
            room += grad.sum_to_size(room.shape)
        if self.slopes is not None:
            self.slopes.sub_((grad * scores.distance(rows, columns)).sum((0, 2, 3)))
        if bend is not None:
            grad = grad * bend
        q = scores.q[:, :, rows].to(grad.dtype)
        k = scores.k[:, :, columns].to(grad.dtype)
        B, H, t, D = q.shape
        stacked = grad.reshape(B, k.shape[1], -1, k.shape[2])  # [B, Hk, G * t, s]
        scale = scores.scoring.scale
        self.q[:, :, rows].add_((stacked @ k).view(B, H, t, D), alpha=scale)
        turned = stacked.transpose(-2, -1) @ q.reshape(B, k.shape[1], -1, D)  # [B, Hk, s, D]
        self.k[:, :, columns].add_(turned, alpha=scale)
