"""Walking the weights: every tile of exp(s - lse), block of queries by block, nothing quadratic kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .scores import Piece, Tiled, blocks

__all__ = ["Block", "Tile", "walk"]


class Tile:
    """Some weights of a block of queries: p [B, H, t, s] and their logarithms."""

    def __init__(self, block: Block, columns: Any, scores: Tensor | None = None) -> None:
        self.block, self.columns = block, columns
        s = block.scores.tile(block.rows, columns) if scores is None else scores
        self.log_p = s.sub_(block.finite_lse[..., None])  # [B, H, t, s]
        self._p: Tensor | None = None

    @property
    def p(self) -> Tensor:
        """The weights; made when first asked for."""
        if self._p is None:
            self._p = self.log_p.exp()
        return self._p


class Block:
    """A block of queries of one piece, with its row of tiles."""

    def __init__(self, scores: Tiled, piece: Piece, rows: slice, lse: Tensor) -> None:
        self.scores, self.piece, self.rows = scores, piece, rows  # the scores are the piece's
        self.lse = lse  # [B, H, t]
        # 0 for rows that see nothing: their scores are HIDDEN, so their weights are 0
        self.finite_lse = torch.where(torch.isneginf(lse), 0.0, lse)
        self.at = scores.at(rows)  # the positions of the queries, int [t]

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


def walk(scores: Tiled, lse: Tensor, one_by_one: bool = False, rows: int | None = None) -> Iterator[Block]:
    """Every block of queries of every piece.

    Args:
        one_by_one: never two sequences in one piece.
        rows: queries a block; by default what suits the device.
    """
    for piece in scores.pieces(one_by_one):
        mine, their_lse = scores.piece(piece), lse[piece.batch, piece.heads]
        for block in blocks(0, scores.shape[2], rows or piece.rows):
            yield Block(mine, piece, block, their_lse[:, :, block])
