"""Sequences of different lengths without their padding: the real tokens, one after another.

Whatever looks at one token at a time (projections, norms, feed-forward) runs over real tokens only; attention
gets them back in rows, with lengths.

Letters: N batch, L the longest length, E width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Ragged"]


@dataclass(frozen=True)
class Ragged:
    """Where the real tokens of padded sequences are."""

    places: Tensor  # int64 [tokens], among N * L
    lengths: Tensor  # int64 [N]
    shape: tuple[int, int]  # N, L

    @classmethod
    def of(cls, real: Tensor) -> Ragged:
        """From bool [N, L], the real ones first."""
        N, L = real.shape
        return cls(real.flatten().nonzero().squeeze(1), real.sum(1), (N, L))

    def real(self, x: Tensor) -> Tensor:
        """[N, L, E] -> [tokens, E]"""
        return x.flatten(0, 1).index_select(0, self.places)

    def padded(self, x: Tensor) -> Tensor:
        """[tokens, E] -> [N, L, E], 0 where there is none."""
        N, L = self.shape
        return x.new_zeros(N * L, x.shape[-1]).index_copy_(0, self.places, x).unflatten(0, (N, L))
