"""What is kept of one call of one attention layer: numbers per head, a picture, and perhaps the map.

Numbers stay where they were made until they are asked for, and then come to main memory all at once.

Letters: B batch, T query_len, S key_len, H num_heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..engines.first_pass import attend
from ..engines.scores import Scores
from ..engines.statistics import PICTURE, RECEIVED, ROW_STATISTICS, Statistics
from ..errors import ArgumentError
from ..map import AttentionMap
from ..masks import Mask
from .head_distances import QUERIES, jensen_shannon, similarity
from .measures import (
    copies,
    first_keys,
    locality,
    mean_over,
    mean_where_seen,
    spread,
    streaming,
    weights_in_blocks,
)

PATTERNS = ("induction", "duplicate_token", "special", "punctuation", "spread", "locality", "streaming")
WRITTEN = {"written_first": "first", "written_special": "special"}  # beside the weight that falls there
NORMS = "written_norms"
SINK, RECENT = 128, 256  # keys whose mass is `streaming`: DuoAttention's; a shorter text has no others
EVERYONE = "entropy"  # its mean is over all queries that count
IN_ROWS = "pooled_queries"
OFFSETS: dict[int | None, str] = {None: EVERYONE} | {  # a statistic for each way of counting queries
    entry.offset: name for name, entry in ROW_STATISTICS.items() if entry.offset is not None
}


@dataclass(frozen=True, eq=False)
class Marks:
    """What is known of the tokens of a call."""

    ids: Tensor  # int [B, S]
    special: Tensor | None = None  # bool [B, S]: [CLS], <s>, padding ...
    punctuation: Tensor | None = None  # bool [B, S]
    unknown: Tensor | None = None  # bool [B, S]: [UNK], which stands for any word

    def to(self, device: torch.device) -> Marks:
        """The same, on another device."""
        known = (self.ids, self.special, self.punctuation, self.unknown)
        moved = (None if x is None else x.to(device) for x in known)
        return Marks(*moved)  # type: ignore[arg-type]

    @property
    def words(self) -> Tensor:
        """The ids, int64 [B, S]. Each unknown token has an id of its own: two of them need not be copies."""
        ids = self.ids.long()
        if self.unknown is None:
            return ids
        return torch.where(self.unknown, -1 - torch.arange(ids.shape[1], device=ids.device), ids)


@dataclass(eq=False)
class Record:
    """One call of one layer, reduced to what does not grow with T x S."""

    shape: tuple[int, int, int, int]  # [B, H, T, S]
    kind: str = "self"  # or "cross"
    forward: int = 0  # which run of the model it belongs to, from 1
    rows: dict[str, Tensor] = field(default_factory=dict)  # row statistics and patterns: [B, H]
    counts: dict[str, Tensor] = field(default_factory=dict)  # how many queries each is the mean of: [B, H]
    large: dict[str, Tensor] = field(default_factory=dict)  # `received`, `pooled`: where they were made
    pairs: dict[str, Tensor] = field(default_factory=dict)  # between heads: [B, H, H], "values" [B, Hk, Hk]
    map: AttentionMap | None = None
    marks: Marks | None = None
    reach: int = 8  # how near counted as `local`
    _has_patterns: bool = False
    _is_here: bool = False  # whether small numbers are all known to be in main memory

    @property
    def queries(self) -> Tensor:
        """How many queries count, [B, H]."""
        return self.counts[EVERYONE]

    @property
    def received(self) -> Tensor | None:
        """What each key receives, [B, H, S]; None: neither measured nor to be had from a map."""
        if RECEIVED not in self.large and self.map is not None:
            self.large[RECEIVED] = self.map.statistics(RECEIVED).received
        return self._in_main_memory(RECEIVED)

    @property
    def pooled(self) -> Tensor | None:
        """The picture, [B, H, rows, columns]: true mass; None: none was made."""
        return self._in_main_memory(PICTURE)

    @property
    def pooled_queries(self) -> Tensor | None:
        """How many queries each row of the picture is the mass of, [B, rows]; None: all that fall into it."""
        return self._in_main_memory(IN_ROWS)

    @property
    def written_norms(self) -> Tensor | None:
        """What each head writes per key, ||v_j W_O||, [B, H, S]; None: not measured."""
        return self._in_main_memory(NORMS)

    def written(self, batch: int = 0, most: int = 256) -> Tensor:
        """Weight times the norm of what is written there, p_ij ||v_j W_O||, as cells [H, rows, columns].

        A cell a query and key; where there are more than `most` of either, positions share a cell, which
        shows the mean over its queries of what falls into it, padded queries left out. A block of queries is
        made at a time. Kobayashi 2020.

        Raises:
            ArgumentError: not measured; no map was kept.
            IndexError: no such sequence.
        """
        norms = self.written_norms
        if norms is None:
            raise ArgumentError(
                f"written must have been measured: it was not in a call {list(self.shape)}; use watch(model, "
                "written=True)"
            )
        if self.map is None:
            raise ArgumentError(
                f"map must have been kept: that of a call {list(self.shape)} was not; use watch(model, "
                "written=True, keep=True)"
            )
        weights = self.map.detach().select(batch=batch)
        _, H, T, S = weights.shape
        mine = norms[batch].to(weights.device)[:, None]  # [H, 1, S]
        if max(T, S) <= most:
            return (weights.dense()[0] * mine).cpu()
        rows, columns = min(most, T), min(most, S)
        row = torch.arange(T, device=weights.device) * rows // T
        column = torch.arange(S, device=weights.device) * columns // S
        real = weights.mask.counted(T)
        counted = torch.ones(T, device=weights.device) if real is None else real[0].to(mine.dtype)
        cells = mine.new_zeros(H, rows, columns)
        for queries, p in weights_in_blocks(weights, torch.arange(T)):
            shares = p[0] * mine * counted[queries, None]  # [H, t, S]
            narrow = mine.new_zeros(*shares.shape[:2], columns).index_add_(2, column, shares.to(mine.dtype))
            cells.index_add_(1, row[queries], narrow)
        inside = mine.new_zeros(rows).index_add_(0, row, counted.to(mine.dtype))
        return (cells / inside.clamp(min=1)[:, None]).cpu()

    def _in_main_memory(self, name: str) -> Tensor | None:
        """Return a large tensor; it is moved to main memory when it is first asked for."""
        if name in self.large:
            self.large[name] = self.large[name].cpu()
        return self.large.get(name)

    @property
    def statistics(self) -> Statistics:
        """All that was measured, per sequence: [B, H] each, `received` [B, H, S], `pooled` a picture."""
        extra = {RECEIVED: self.received, PICTURE: self.pooled}
        return Statistics(self.rows | {name: value for name, value in extra.items() if value is not None})

    def measure_patterns(self) -> None:
        """Measure the patterns from the map, once; do nothing if no map was kept."""
        if self.map is not None and not self._has_patterns:
            self.take_patterns(*measure_patterns(self.map, self.kind, self.marks, self.rows, self.reach))

    def take_patterns(self, values: dict[str, Tensor], counts: dict[str, Tensor]) -> None:
        """Add patterns that were measured, [B, H] each; counts: as `measure_patterns` returns them."""
        if not self._has_patterns:
            self._has_patterns = True
            self._add(values, counts)

    def _add(self, values: dict[str, Tensor], counts: dict[str, Tensor]) -> None:
        self._is_here = False
        self.rows |= values
        self.counts |= dict.fromkeys(values, self.counts[EVERYONE]) | counts


def settle(records: Iterable[Record]) -> None:
    """Move the small tensors of all records to main memory in one transfer."""
    elsewhere = [record for record in records if not record._is_here]
    small = [numbers for record in elsewhere for numbers in (record.rows, record.counts, record.pairs)]
    slots = [(numbers, name) for numbers in small for name, value in numbers.items() if not value.is_cpu]
    values = fetched([numbers[name] for numbers, name in slots])
    for (numbers, name), value in zip(slots, values, strict=True):
        numbers[name] = value
    for record in elsewhere:
        record._is_here = True


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors in main memory, each in its shape; a GPU is waited for once, not once a tensor.

    Example:
        >>> fetched([torch.ones(2), torch.zeros(1, 2)])
        [tensor([1., 1.]), tensor([[0., 0.]])]
    """
    here_now = list(tensors)
    kinds = dict.fromkeys((x.device, x.dtype) for x in tensors if not x.is_cpu)
    for kind in kinds:
        here = [at for at, x in enumerate(tensors) if (x.device, x.dtype) == kind]
        together = torch.cat([tensors[at].flatten() for at in here]).cpu()
        for at, part in zip(here, together.split([tensors[at].numel() for at in here]), strict=True):
            here_now[at] = part.view(tensors[at].shape)
    return here_now


@torch.no_grad()
def reduce(
    weights: AttentionMap,
    *,
    kind: str = "self",
    forward: int = 0,
    names: Iterable[str] = (),
    pooled: int | None = None,
    reach: int = 8,
    marks: Marks | None = None,
    with_patterns: bool = False,
    between: Iterable[str] = (),
    outputs: Tensor | None = None,
    values: Tensor | None = None,
    norms: Tensor | None = None,
    keep: bool = False,
) -> Record:
    """Measure a call and return its record.

    names: statistics, as of `AttentionMap.statistics`; none of them: none.
    with_patterns: measure what the tokens tell at once; else it is done later, if the map is kept.
    between: what to compare heads by: "attention", "outputs", "values".
    norms: of what is written per key, [B, H, S].
    """
    weights = weights.detach()
    record = Record(tuple(weights.shape), kind, forward, marks=marks, reach=reach)  # type: ignore[arg-type]
    numbers = numbers_of(weights, names, pooled, reach)
    record.rows, record.large = dict(numbers.rows), numbers.large | numbers.shared
    record.counts = {name: numbers.counts[ROW_STATISTICS[name].offset] for name in record.rows}
    record.counts.setdefault(EVERYONE, numbers.counts[None])
    if with_patterns:
        record.take_patterns(*measure_patterns(weights, kind, marks, record.rows, reach))
    for name in between:
        pairs = _pairs(name, weights, outputs, values)
        if pairs is not None:
            record.pairs[name] = pairs
            if name == "values":  # a mean over keys
                record.counts[name] = weights.real_keys.sum(-1)[:, None].expand(pairs.shape[:2])
    if norms is not None:
        record.large[NORMS] = norms
        record._add(*measure_written(weights, norms, None if kind != "self" else marks))
    if keep:
        record.map = weights.to_keep()
    return record


class Numbers(NamedTuple):
    """What was measured of a map, or of several calls side by side as the heads of one."""

    rows: dict[str, Tensor]  # row statistics, [B, H]
    large: dict[str, Tensor]  # `received`, a picture: [B, H, ..]
    shared: dict[str, Tensor]  # what is the same for all heads
    counts: dict[int | None, Tensor]  # how many queries count, by where a statistic looks for a key: [B, H]
    every: bool  # whether that is all of them, without looking; then [B, H of one call]


def numbers_of(
    weights: AttentionMap, names: Iterable[str], pooled: int | None, reach: int, calls: int = 1
) -> Numbers:
    """Measure row statistics, and `received` and a picture where they are asked for.

    calls: how many calls the heads of the map are of.
    """
    rows: dict[str, Tensor] = {}
    large: dict[str, Tensor] = {}
    names = tuple(names)
    if names:
        for name, value in weights.statistics(*names, reach=reach, pooled=pooled).items():
            (rows if name in ROW_STATISTICS else large)[name] = value
    elif pooled is not None:
        large[PICTURE] = weights.pooled(pooled)
    shared = {}
    padding = weights.parts()[0].mask.counted(weights.shape[2]) if PICTURE in large else None
    if padding is not None:
        shared[IN_ROWS] = _queries_in_rows(padding, large[PICTURE].shape[2])
    return Numbers(rows, large, shared, _counts(weights, calls), weights.counts_every_query)


def _counts(weights: AttentionMap, calls: int = 1) -> dict[int | None, Tensor]:
    """Count queries, by where a statistic looks for a key: [B, H] each; see `Numbers`."""
    B, H, T, S = weights.shape
    if weights.counts_every_query:
        numbers = {offset: len(range(T)[_having_a_key(T, S, offset)]) for offset in OFFSETS}
        return {offset: torch.full((B, H // calls), number) for offset, number in numbers.items()}
    scores = weights.as_made[0]
    is_aligned = isinstance(scores, Scores) and scores.positions is None and weights.ranks is None
    if is_aligned and scores.mask.keys is None:
        seen = weights.counted_queries(EVERYONE)  # [B, H, T]
        return {offset: seen[..., _having_a_key(T, S, offset)].sum(-1) for offset in OFFSETS}
    return {offset: weights.counted_queries(name).sum(-1) for offset, name in OFFSETS.items()}


def _having_a_key(query_len: int, key_len: int, offset: int | None) -> slice:
    """Return the queries that have a key `offset` ahead; None: all of them.

    Query i stands at p = i + S - T, so p runs from S - T to S - 1; a key is there where 0 <= p + offset < S.
    """
    if offset is None:
        return slice(0, query_len)
    first = max(key_len - query_len, -offset)
    last = min(key_len - 1, key_len - 1 - offset)
    start = min(first - (key_len - query_len), query_len)
    return slice(start, max(start, last - (key_len - query_len) + 1))


def _queries_in_rows(counted: Tensor, rows: int) -> Tensor:
    """Return how many counted queries each row of a picture has, [B, rows], without waiting for a GPU."""
    B, T = counted.shape
    row = torch.arange(T, device=counted.device) * rows // T
    counts = torch.zeros(B, rows, device=counted.device)
    return counts.index_add_(1, row, counted.to(counts.dtype))


def measure_patterns(
    weights: AttentionMap, kind: str, marks: Marks | None, known: Mapping[str, Tensor], reach: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Measure every pattern that can be told, [B, H], and of how many queries it is the mean if not of all.

    known: what was measured already; its `local` is that of `reach`.
    """
    entropy, local = (
        None if x is None else x.to(weights.device) for x in (known.get("entropy"), known.get("local"))
    )
    scores = {"spread": spread(weights, entropy)}
    counts: dict[str, Tensor] = {}
    if kind != "self":
        return scores, counts
    scores["locality"] = locality(weights, reach, local)
    if weights.shape[3] > SINK + RECENT:
        scores["streaming"], counts["streaming"] = streaming(weights, SINK, RECENT)
    if marks is None:
        return scores, counts
    marks = marks.to(weights.device)
    words = marks.words
    on = {"induction": copies(weights, words, after=1), "duplicate_token": copies(weights, words, after=0)}
    for name, which in (("special", marks.special), ("punctuation", marks.punctuation)):
        if which is not None:
            on[name] = Mask.padding(which)
    for name, mask in on.items():
        scores[name], counts[name] = mean_where_seen(weights, mask)
    return scores, counts


def measure_written(
    weights: AttentionMap, norms: Tensor, marks: Marks | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The share of what a head writes that comes from some keys, [B, H] each, and over how many queries.

        mean_i of (sum of p_ij n_j over chosen j) / (sum_j p_ij n_j),   n_j = ||v_j W_O||

    Both sums are attention once more, with numbers for values: no matrix is made. A learned sink writes
    nothing. The mean is over the queries that count for the weight on these keys, where anything is written.
    """
    chosen = {"written_first": first_keys(weights.real_keys, 1)}
    seen = {"written_first": weights.counted_queries()}
    if marks is not None and marks.special is not None:
        special = marks.special.to(weights.device)
        chosen["written_special"] = special
        on = weights.mask & Mask.padding(special)
        seen["written_special"] = weights.counted_queries() & (weights.visible(on) > 0)
    parts = [norms, *(norms * which[:, None] for which in chosen.values())]
    total, *sums = _mixed(weights, torch.stack(parts, -1)).unbind(-1)  # [B, H, T] each
    values, counts = {}, {}
    for (name, queries), some in zip(seen.items(), sums, strict=True):
        counts[name] = (queries & (total > 0)).sum(-1)
        values[name] = mean_over(some / total, queries & (total > 0))
    return values, counts


def _mixed(weights: AttentionMap, columns: Tensor) -> Tensor:
    """sum_j p_ij x_j of numbers per head and key, [B, H, S, C] -> [B, H, T, C], in float32 at least.

    Heads that share a key head have numbers of their own: one of each group at a time.
    """
    scores = weights.parts()[0]
    assert isinstance(scores, Scores), "values came with them"
    exact = replace(scores.detach(), q=scores.q.detach().to(columns), k=scores.k.detach().to(columns))
    if scores.group == 1:
        return attend(exact, columns)[0]
    mixed = columns.new_empty(*weights.shape[:3], columns.shape[-1])
    everything = slice(None)
    for member in range(scores.group):
        heads = torch.arange(member, columns.shape[1], scores.group, device=columns.device)
        mixed[:, heads] = attend(exact.select(everything, heads, everything), columns[:, heads])[0]
    return mixed


def _pairs(name: str, weights: AttentionMap, outputs: Tensor | None, values: Tensor | None) -> Tensor | None:
    if name == "attention":
        return jensen_shannon(weights, queries=QUERIES)
    if name == "outputs" and outputs is not None:
        return similarity(outputs.detach(), weights.mask.counted(weights.shape[2]))
    if name == "values" and values is not None:
        return similarity(values.detach(), weights.real_keys)
    return None
