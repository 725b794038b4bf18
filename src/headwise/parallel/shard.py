"""One rank's share of a call: its queries and keys, the rules of the whole, and the rectangles to compute.

A rank has runs of queries; whoever's keys are here has runs of keys. A run of each is a rectangle of the
score matrix, and its scores are those of an ordinary call, but for where the queries stand: query i of the
whole stands at i + S - T, so in a rectangle whose first key is j, at that less j. Rectangles of which the
rules hide all are left out.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim; t, s this rank's of T, S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engines.scores import Scores, Tiled
from ..engines.second_pass import Frame
from ..indexing import take
from ..masks import BoundMask, Dense, Mask
from ..scoring import Scoring
from ..sequence_rules import Documents, Padding
from .ring import Ring
from .sequence import Layout, Run

__all__ = ["Part", "Rows", "Shard"]

ANYWHERE = (Padding, Documents, Dense)  # rules that need not know where queries stand


@dataclass(frozen=True, eq=False)
class Part:
    """A rectangle of the scores, as a call of its own without sinks: those are a whole row's."""

    rows: slice  # among this rank's queries
    columns: slice  # among the keys that are here
    frame: Frame  # where it lies in the whole
    scores: Scores


class Rows(Tiled):
    """The outline of some queries against all keys: sizes, rules and places, no numbers.

    Args:
        shape: [B, H, t, S].
        mask: bound, for these queries.
        like: a tensor on their device, of their dtype.
        positions: where the queries stand; None: aligned with the last key.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        mask: Mask,
        like: Tensor,
        sinks: Tensor | None,
        positions: Tensor | None = None,
    ) -> None:
        self._shape, self._like, self._sinks = shape, like.new_empty(0), sinks
        self.mask, self.positions = mask, positions

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def given_dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def sinks(self) -> Tensor | None:
        return self._sinks


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's share of a call."""

    ring: Ring
    q: Tensor  # [B, H, t, D]
    k: Tensor  # [B, Hk, s, D]
    mask: Mask  # bound, of the whole
    scoring: Scoring  # of the whole
    queries: Layout
    keys: Layout

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, H, T, S], of the whole."""
        return self.q.shape[0], self.q.shape[1], self.queries.length, self.keys.length

    @property
    def key_sizes(self) -> list[int]:
        """How many keys each rank has."""
        return [self.keys.size(rank) for rank in range(self.ring.size)]

    @property
    def whole(self) -> Rows:
        """The outline of the whole."""
        return Rows(self.shape, self.mask, self.q, self.scoring.sinks)

    @property
    def mine(self) -> Rows:
        """The outline of this rank's queries, with the rules that decide which of them count."""
        B, H, T, S = self.shape
        at = self.queries.positions(self.ring.rank)
        counted = self.mask.counted(T)
        queries = None if counted is None else counted[:, at.to(counted.device)]
        mask = BoundMask(keys=self.mask.keys, queries=queries)
        return Rows((B, H, len(at), S), mask, self.q, self.scoring.sinks, at + S - T)

    def detach(self) -> Shard:
        """The same, cut from the graph."""
        loose = {name: value.detach() for name, value in self.scoring.tensors.items()}
        scoring = replace(self.scoring, **loose)  # type: ignore[arg-type]
        return replace(self, q=self.q.detach(), k=self.k.detach(), scoring=scoring)

    def parts(self, owner: int, k: Tensor, placed: bool = False) -> Iterator[Part]:
        """The rectangles of this rank's queries and the keys of `owner`, of which something may be seen.

        placed: queries must know where they stand, whether or not a rule asks for it.
        """
        for queries in self.queries.runs(self.ring.rank):
            for keys in self.keys.runs(owner):
                part = self._part(queries, keys, k, placed)
                if part is not None:
                    yield part

    def _part(self, queries: Run, keys: Run, k: Tensor, placed: bool) -> Part | None:
        _, _, T, S = self.shape
        first = queries.there.start + S - T - keys.there.start  # where the first query stands
        last = first + queries.size - 1
        mask = self.mask.rectangle(queries.there, keys.there)
        start, stop = mask.span(first, last, slice(0, queries.size), keys.size)
        if start == stop:
            return None
        if mask.left is not None and last <= mask.left:
            mask = replace(mask, left=None)
        if mask.right is not None and keys.size - 1 - first <= mask.right:
            mask = replace(mask, right=None)
        scoring = replace(self.scoring, sinks=None)
        if scoring.bias is not None:
            scoring = replace(scoring, bias=take(scoring.bias, (None, None, queries.there, keys.there)))
        placed = placed or scoring.slopes is not None or scoring.relative is not None
        placed = placed or any(not isinstance(rule, ANYWHERE) for rule in mask.hiding)
        positions: Tensor | None = None
        if placed and first != keys.size - queries.size:  # else they are aligned as in any call
            positions = torch.arange(first, last + 1, device="cpu")
        scores = Scores(self.q[:, :, queries.here], k[:, :, keys.here], mask, scoring, positions)
        return Part(queries.here, keys.here, Frame(queries.there.start, keys.there.start, T, S), scores)
