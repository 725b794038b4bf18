"""Walking the weights: every tile of exp(s - lse), block of queries by block, nothing quadratic kept.

Where lse is too large for its rounding not to be seen in the weights, a block is walked twice: first for each
row's largest score and the sum of what is left, as softmax does it; exp(s - largest - log sum) is as exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..mask_rules import can_read
from ..scoring import HIDDEN
from .rounding import ROUGH, check_rows, evenly, is_rough
from .scores import Piece, Scores, Tiled, blocks

__all__ = ["Block", "Tile", "check_some", "online", "walk"]


class Tile:
    """Some weights of a block of queries: p [B, H, t, s] and their logarithms."""

    def __init__(self, block: Block, columns: Any, scores: Tensor | None = None) -> None:
        self.block, self.columns = block, columns
        s = block.scores.tile(block.rows, columns) if scores is None else scores
        self.log_p = block.log_of(s)  # [B, H, t, s]
        self._p: Tensor | None = None

    def part(self, key: int) -> Tile:
        """One of its keys."""
        new = Tile.__new__(Tile)
        at = self.columns.start + key
        new.block, new.columns = self.block, slice(at, at + 1)
        new.log_p, new._p = self.log_p[..., key : key + 1], None
        return new

    @property
    def p(self) -> Tensor:
        """The weights; made when first asked for."""
        if self._p is None:
            self._p = self.log_p.exp()
        return self._p


class Block:
    """A block of queries of one piece, with its row of tiles."""

    def __init__(self, scores: Tiled, piece: Piece, rows: slice, lse: Tensor, rough: float = ROUGH) -> None:
        self.scores, self.piece, self.rows = scores, piece, rows  # the scores are the piece's
        self.lse = lse  # [B, H, t]
        # 0 for rows that see nothing: their scores are HIDDEN, so their weights are 0
        self._high = torch.where(torch.isneginf(lse), 0.0, lse)
        self._low: Tensor | None = None  # what is left of lse, where it is kept in two parts
        self.at = scores.at(rows)  # the positions of the queries, int [t]
        # Then scores of one product may not be set against an lse of another: a rounding apart is too far.
        self.is_rough = isinstance(scores, Scores) and is_rough(lse)
        if self.is_rough and (rough == ROUGH or is_rough(lse, rough)):
            self._anchor()

    def _anchor(self) -> None:
        """lse as the largest score and the logarithm of the rest."""
        top, total, _ = online(self.scores, None, self.rows, self.piece.columns)
        empty = top <= HIDDEN
        check_rows(self.scores, self.rows, self.lse, torch.where(empty, -torch.inf, top + total.log()))
        self._high = torch.where(empty, 0.0, top)
        self._low = torch.where(empty, 0.0, total.log())

    def log_of(self, s: Tensor) -> Tensor:
        """The logarithm of the weights that scores have, [B, H, t, ..], in their place."""
        for part in (self._high, self._low):
            if part is not None:
                s = s.sub_(part[(...,) + (None,) * (s.ndim - part.ndim)])
        return s

    def with_sink(self, mass: Tensor) -> Tensor:
        """What the weights of each row sum to, [B, H, t], with the sink's."""
        log_sunk = self.log_of_sinks()
        if log_sunk is None:
            return mass
        return mass + torch.where(torch.isneginf(self.lse), 0.0, log_sunk.exp())

    def log_of_sinks(self) -> Tensor | None:
        """The logarithm of the sink's weight, [B, H, t]; None: there is no sink."""
        sinks = self.scores.sinks
        if sinks is None:
            return None
        return self.log_of(sinks.to(self._high.dtype)[:, None].expand_as(self._high).clone())

    @property
    def where(self) -> tuple[slice, slice, slice]:
        """This block in a result [B, H, T, ...] of the whole request."""
        return self.piece.batch, self.piece.heads, self.rows

    def tile(self, columns: Any) -> Tile:
        return Tile(self, columns)

    def tiles(self) -> Iterator[Tile]:
        """Every tile this block of queries can see anything in."""
        for columns in blocks(*self.scores.span(self.rows), self.piece.columns):
            yield Tile(self, columns)

    def counted(self) -> Tensor | None:
        """Which of these queries count in means, bool [B, 1, t]; None: all."""
        real = self.scores.mask.counted(self.scores.shape[2])
        return None if real is None else real[:, None, self.rows]


def walk(
    scores: Tiled, lse: Tensor, one_by_one: bool = False, rows: int | None = None, rough: float = ROUGH
) -> Iterator[Block]:
    """Every block of queries of every piece.

    Args:
        one_by_one: never two sequences in one piece.
        rows: queries a block; by default what suits the device.
        rough: how large an lse may be; FAR where what is made of the weights is divided by their sum anyway.
    """
    for piece in scores.pieces(one_by_one):
        mine, their_lse = scores.piece(piece), lse[piece.batch, piece.heads]
        for block in blocks(0, scores.shape[2], rows or piece.rows):
            yield Block(mine, piece, block, their_lse[:, :, block], rough)


def online(
    scores: Tiled, v: Tensor | None, rows: slice, columns: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(largest score, sum of the exponentials below it, mix of values by them) of a block of queries.

    [B, H, t], [B, H, t], [B, H, t, Dv]. A sink is among them; a row that sees nothing has HIDDEN as its
    largest, whatever its sink.
    """
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
    if scores.sinks is not None:
        sink = scores.sinks.to(scores.dtype)[:, None]
        new_top = torch.where(top <= HIDDEN, HIDDEN, torch.maximum(top, sink))
        shrink = (top - new_top).exp()
        total = total * shrink + (sink - new_top).exp()
        mixed = None if mixed is None else mixed * shrink[..., None]
        top = new_top
    return top, total, mixed


def check_some(scores: Tiled, lse: Tensor) -> None:
    """Raise where q, k or the mask of a map were overwritten: a few queries, looked at whole, tell for all.

    For those who look at a few keys of each query, and so never see what a row sums to.

    Raises:
        ArgumentError: a row's lse is not the one that is kept.
    """
    if isinstance(scores, Scores) and can_read(lse):
        chosen = evenly(scores.shape[2])
        some = scores.detach().select(slice(None), slice(None), chosen)
        whole = slice(0, len(chosen))
        for piece in some.pieces():
            mine, kept = some.piece(piece), lse[piece.batch, piece.heads][:, :, chosen]
            check_rows(mine, whole, kept, lse_of_block(mine, whole, piece.columns))


def lse_of_block(scores: Tiled, rows: slice, columns: int) -> Tensor:
    """The log-sum-exp of a block of queries, [B, H, t]."""
    top, total, _ = online(scores, None, rows, columns)
    return torch.where(top <= HIDDEN, -torch.inf, top + total.log())
