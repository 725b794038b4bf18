"""Gradients of tiles with respect to q, k and what is added; and what autograd saves of a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..indexing import take
from ..scoring import Scoring, sums_by_offset
from .scores import ADDED, DIFFERENTIABLE, Piece, Scores


@dataclass(frozen=True, eq=False)
class ScoreGradients:
    """Gradients of everything the scores depend on, filled tile by tile."""

    q: Tensor
    k: Tensor
    bias: Tensor | None = None
    slopes: Tensor | None = None
    relative: Tensor | None = None

    @classmethod
    def zeros(cls, scores: Scores, bias: bool) -> ScoreGradients:
        """Return zeros for them, in the tiles' dtype; `bias`: also for bias, slopes and relative."""

        def room(like: Tensor | None) -> Tensor | None:
            if like is None:
                return None
            return torch.zeros(like.shape, dtype=scores.dtype, device=like.device)

        q, k = room(scores.q), room(scores.k)
        assert q is not None and k is not None
        if not bias:
            return cls(q, k)
        scoring = scores.scoring
        return cls(q, k, room(scoring.bias), room(scoring.slopes), room(scoring.relative))

    def piece(self, piece: Piece) -> ScoreGradients:
        """Return the part of it that belongs to one piece, as views: writing there writes here."""
        bias = self.bias
        return ScoreGradients(
            self.q[piece.batch, piece.heads],
            self.k[piece.batch, piece.kv_heads],
            None if bias is None else take(bias, (piece.batch, piece.heads, None, None)),
            None if self.slopes is None else self.slopes[piece.heads],
            None if self.relative is None else self.relative[piece.heads],
        )

    def add(self, scores: Scores, rows: slice, columns: slice, grad: Tensor, bend: Tensor | None) -> None:
        """Carry a tile's gradient d loss / d s [B, H, t, s] back to q, k, bias, slopes and relative."""
        if self.bias is not None:
            room = take(self.bias, (None, None, rows, columns))
            room += grad.sum_to_size(room.shape)
        if self.slopes is not None:
            self.slopes.sub_((grad * scores.distance(rows, columns)).sum((0, 2, 3)))
        if self.relative is not None:
            over_batch = grad.sum(0)
            for run in scores.runs(rows):
                first = columns.start - scores.ends(run)[1]
                local_rows = slice(run.start - rows.start, run.stop - rows.start)
                sums_by_offset(over_batch[:, local_rows], first, self.relative)
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


# What is saved of a call


class Context(FunctionCtx):
    """The context autograd passes to a function in forward and backward; it saves attributes."""

    if TYPE_CHECKING:
        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


class ScoresTemplate:
    """Scores without the tensors that gradients flow to: those belong to autograd, which frees them."""

    __slots__ = ("mask", "positions", "scale", "softcap")

    def __init__(self, scores: Scores) -> None:
        self.mask, self.positions = scores.mask, scores.positions
        self.scale, self.softcap = scores.scoring.scale, scores.scoring.softcap

    def fill(self, *leaves: Tensor | None) -> Scores:
        """Return the scores with these tensors, in the order of `DIFFERENTIABLE`."""
        q, k, *learned = leaves
        assert q is not None and k is not None
        return Scores(q, k, self.mask, Scoring(self.scale, self.softcap, *learned), self.positions)


def needs_added(needed: Sequence[bool]) -> bool:
    """Return True if bias, slopes or relative need a gradient; `needed` begins with DIFFERENTIABLE."""
    return any(needed[DIFFERENTIABLE.index(name)] for name in ADDED)
