"""The record of one call of one attention layer: numbers per head, a pooled map, and perhaps the map.

Numbers stay on the device of the model until they are read, and are then copied to main memory at once.

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
    mean_where_visible,
    spread,
    streaming,
    weights_in_blocks,
)

PATTERNS = ("induction", "duplicate_token", "special", "punctuation", "spread", "locality", "streaming")
WRITTEN = {
    "written_first": "first",
    "written_special": "special",
}  # each with the statistic of the weight on the same keys
NORMS = "written_norms"
SINK, RECENT = (
    128,
    256,
)  # keys whose mass is `streaming`, as in DuoAttention; a shorter text has no other keys
ALL_QUERIES = "entropy"  # a statistic whose mean is over all queries that count
POOLED_QUERIES = "pooled_queries"
OFFSETS: dict[int | None, str] = {None: ALL_QUERIES} | {  # a statistic for each way of counting queries
    entry.offset: name for name, entry in ROW_STATISTICS.items() if entry.offset is not None
}


@dataclass(frozen=True, eq=False)
class Marks:
    """The tokens of a call, and which are special, punctuation and unknown."""

    ids: Tensor  # int [B, S]
    special: Tensor | None = None  # bool [B, S]: [CLS], <s>, padding ...
    punctuation: Tensor | None = None  # bool [B, S]
    unknown: Tensor | None = None  # bool [B, S]: [UNK], which stands for any word

    def to(self, device: torch.device) -> Marks:
        """Return a copy on another device."""
        tensors = (self.ids, self.special, self.punctuation, self.unknown)
        moved = (None if x is None else x.to(device) for x in tensors)
        return Marks(*moved)  # type: ignore[arg-type]

    @property
    def words(self) -> Tensor:
        """The ids, int64 [B, S]; every unknown token has another id, for two may be different words."""
        ids = self.ids.long()
        if self.unknown is None:
            return ids
        return torch.where(self.unknown, -1 - torch.arange(ids.shape[1], device=ids.device), ids)


@dataclass(eq=False)
class Record:
    """The record of one call of one layer, which does not grow with T x S."""

    shape: tuple[int, int, int, int]  # [B, H, T, S]
    kind: str = "self"  # or "cross"
    forward: int = 0  # which run of the model it belongs to, from 1
    rows: dict[str, Tensor] = field(default_factory=dict)  # row statistics and patterns: [B, H]
    counts: dict[str, Tensor] = field(default_factory=dict)  # how many queries each is the mean of: [B, H]
    large: dict[str, Tensor] = field(default_factory=dict)  # `received`, `pooled`: on the device of the model
    pairs: dict[str, Tensor] = field(default_factory=dict)  # between heads: [B, H, H], "values" [B, Hk, Hk]
    map: AttentionMap | None = None
    marks: Marks | None = None
    reach: int = 8  # how near counted as `local`
    _has_patterns: bool = False
    _is_in_main_memory: bool = False  # True if all small numbers are in main memory

    @property
    def queries(self) -> Tensor:
        """How many queries count, [B, H]."""
        return self.counts[ALL_QUERIES]

    @property
    def received(self) -> Tensor | None:
        """The weight that each key receives, [B, H, S]; None: neither measured nor in a map."""
        if RECEIVED not in self.large and self.map is not None:
            self.large[RECEIVED] = self.map.statistics(RECEIVED).received
        return self._in_main_memory(RECEIVED)

    @property
    def pooled(self) -> Tensor | None:
        """The pooled map, [B, H, rows, columns], whose cells are sums of weights; None: not measured."""
        return self._in_main_memory(PICTURE)

    @property
    def pooled_queries(self) -> Tensor | None:
        """The number of queries in each row of the pooled map, [B, rows]; None: all queries count."""
        return self._in_main_memory(POOLED_QUERIES)

    @property
    def written_norms(self) -> Tensor | None:
        """What each head writes per key, ||v_j W_O||, [B, H, S]; None: not measured."""
        return self._in_main_memory(NORMS)

    def written(self, batch: int = 0, most: int = 256) -> Tensor:
        """Return weights times norms, p_ij ||v_j W_O||, as cells [H, rows, columns].

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
                f"written norms were not measured in the call {list(self.shape)}; use watch(model, "
                "written=True)"
            )
        if self.map is None:
            raise ArgumentError(
                f"the map of the call {list(self.shape)} was not kept; use watch(model, written=True, "
                "keep=True)"
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
        """Return a large tensor, which is moved to main memory when it is first read."""
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
        """Add measured patterns, [B, H] each; counts: as `measure_patterns` returns them."""
        if not self._has_patterns:
            self._has_patterns = True
            self._add(values, counts)

    def _add(self, values: dict[str, Tensor], counts: dict[str, Tensor]) -> None:
        """Add numbers and counts; the default count is that of all queries."""
        self._is_in_main_memory = False
        self.rows |= values
        self.counts |= dict.fromkeys(values, self.counts[ALL_QUERIES]) | counts


def settle(records: Iterable[Record]) -> None:
    """Move the small tensors of all records to main memory in one transfer."""
    unsettled = [record for record in records if not record._is_in_main_memory]
    small = [numbers for record in unsettled for numbers in (record.rows, record.counts, record.pairs)]
    entries = [(numbers, name) for numbers in small for name, value in numbers.items() if not value.is_cpu]
    values = fetched([numbers[name] for numbers, name in entries])
    for (numbers, name), value in zip(entries, values, strict=True):
        numbers[name] = value
    for record in unsettled:
        record._is_in_main_memory = True


def fetched(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors in main memory, each in its shape, with one transfer per device and dtype.

    Example:
        >>> fetched([torch.ones(2), torch.zeros(1, 2)])
        [tensor([1., 1.]), tensor([[0., 0.]])]
    """
    results = list(tensors)
    kinds = dict.fromkeys((x.device, x.dtype) for x in tensors if not x.is_cpu)
    for kind in kinds:
        indices = [at for at, x in enumerate(tensors) if (x.device, x.dtype) == kind]
        joined = torch.cat([tensors[at].flatten() for at in indices]).cpu()
        for at, part in zip(indices, joined.split([tensors[at].numel() for at in indices]), strict=True):
            results[at] = part.view(tensors[at].shape)
    return results


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

    names: statistics, as of `AttentionMap.statistics`; () for none.
    with_patterns: measure patterns now; else they are measured later, if the map is stored.
    between: what to compare heads by: "attention", "outputs", "values".
    norms: of what is written per key, [B, H, S].
    """
    weights = weights.detach()
    record = Record(tuple(weights.shape), kind, forward, marks=marks, reach=reach)  # type: ignore[arg-type]
    numbers = numbers_of(weights, names, pooled, reach)
    record.rows, record.large = dict(numbers.rows), numbers.large | numbers.shared
    record.counts = {name: numbers.counts[ROW_STATISTICS[name].offset] for name in record.rows}
    record.counts.setdefault(ALL_QUERIES, numbers.counts[None])
    if with_patterns:
        record.take_patterns(*measure_patterns(weights, kind, marks, record.rows, reach))
    for name in between:
        pairs = _pairs(name, weights, outputs, values)
        if pairs is not None:
            record.pairs[name] = pairs
            if name == "values":  # a mean over keys, not queries
                record.counts[name] = weights.real_keys.sum(-1)[:, None].expand(pairs.shape[:2])
    if norms is not None:
        record.large[NORMS] = norms
        record._add(*measure_written(weights, norms, None if kind != "self" else marks))
    if keep:
        record.map = weights.to_keep()
    return record


class Numbers(NamedTuple):
    """The numbers of a map, or of several calls joined along heads."""

    rows: dict[str, Tensor]  # row statistics, [B, H]
    large: dict[str, Tensor]  # `received`, a pooled map: [B, H, ..]
    shared: dict[str, Tensor]  # the same for all heads
    counts: dict[int | None, Tensor]  # number of queries that count, by key offset of statistics: [B, H]
    counts_all: bool  # True if every query counts by shape; `counts` are then [B, H of one call]


def numbers_of(
    weights: AttentionMap, names: Iterable[str], pooled: int | None, reach: int, calls: int = 1
) -> Numbers:
    """Measure row statistics, and `received` and a pooled map if requested.

    calls: number of calls whose heads are joined in the map.
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
        shared[POOLED_QUERIES] = _queries_in_rows(padding, large[PICTURE].shape[2])
    return Numbers(rows, large, shared, _counts(weights, calls), weights.counts_every_query)


def _counts(weights: AttentionMap, calls: int = 1) -> dict[int | None, Tensor]:
    """Count queries by the key offset of statistics: [B, H] each; see `Numbers`."""
    B, H, T, S = weights.shape
    if weights.counts_every_query:
        numbers = {offset: len(range(T)[_queries_with_key(T, S, offset)]) for offset in OFFSETS}
        return {offset: torch.full((B, H // calls), number) for offset, number in numbers.items()}
    scores = weights.as_made[0]
    is_aligned = isinstance(scores, Scores) and scores.positions is None and weights.ranks is None
    if is_aligned and scores.mask.keys is None:
        counted = weights.counted_queries(ALL_QUERIES)  # [B, H, T]
        return {offset: counted[..., _queries_with_key(T, S, offset)].sum(-1) for offset in OFFSETS}
    return {offset: weights.counted_queries(name).sum(-1) for offset, name in OFFSETS.items()}


def _queries_with_key(query_len: int, key_len: int, offset: int | None) -> slice:
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
    """Return how many counted queries each row of a pooled map has, [B, rows], without synchronizing."""
    B, T = counted.shape
    row = torch.arange(T, device=counted.device) * rows // T
    counts = torch.zeros(B, rows, device=counted.device)
    return counts.index_add_(1, row, counted.to(counts.dtype))


def measure_patterns(
    weights: AttentionMap, kind: str, marks: Marks | None, measured: Mapping[str, Tensor], reach: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Measure patterns, [B, H] each, and the number of queries of those that are not means over all.

    measured: row statistics that were measured before; `local` must be that of `reach`.
    """
    entropy, local = (
        None if x is None else x.to(weights.device) for x in (measured.get("entropy"), measured.get("local"))
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
        scores[name], counts[name] = mean_where_visible(weights, mask)
    return scores, counts


def measure_written(
    weights: AttentionMap, norms: Tensor, marks: Marks | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the share of what a head writes that comes from some keys, and the number of queries.

        mean_i of (sum of p_ij n_j over chosen j) / (sum_j p_ij n_j),   n_j = ||v_j W_O||

    Both sums are attention with numbers as values, so that no matrix is made. A learned sink writes nothing.
    The mean is over the queries that count for the weight on these keys and at which anything is written. [B,
    H] each.
    """
    chosen = {"written_first": first_keys(weights.real_keys, 1)}
    counted = {"written_first": weights.counted_queries()}
    if marks is not None and marks.special is not None:
        special = marks.special.to(weights.device)
        chosen["written_special"] = special
        on = weights.mask & Mask.padding(special)
        counted["written_special"] = weights.counted_queries() & (weights.visible(on) > 0)
    parts = [norms, *(norms * which[:, None] for which in chosen.values())]
    total, *sums = _weighted_sums(weights, torch.stack(parts, -1)).unbind(-1)  # [B, H, T] each
    values, counts = {}, {}
    for (name, queries), part in zip(counted.items(), sums, strict=True):
        counts[name] = (queries & (total > 0)).sum(-1)
        values[name] = mean_over(part / total, queries & (total > 0))
    return values, counts


def _weighted_sums(weights: AttentionMap, columns: Tensor) -> Tensor:
    """Return sum_j p_ij x_j of numbers per head and key, [B, H, S, C] -> [B, H, T, C], in float32 at least.

    Heads that share a key head have different numbers, so that one head of each group is computed at a time.
    """
    scores = weights.parts()[0]
    assert isinstance(scores, Scores), "a call with values has scores"
    exact = replace(scores.detach(), q=scores.q.detach().to(columns), k=scores.k.detach().to(columns))
    if scores.group == 1:
        return attend(exact, columns)[0]
    sums = columns.new_empty(*weights.shape[:3], columns.shape[-1])
    everything = slice(None)
    for member in range(scores.group):
        heads = torch.arange(member, columns.shape[1], scores.group, device=columns.device)
        sums[:, heads] = attend(exact.select(everything, heads, everything), columns[:, heads])[0]
    return sums


def _pairs(name: str, weights: AttentionMap, outputs: Tensor | None, values: Tensor | None) -> Tensor | None:
    """Return the comparison of heads by attention, outputs or values, [B, H, H], or None."""
    if name == "attention":
        return jensen_shannon(weights, queries=QUERIES)
    if name == "outputs" and outputs is not None:
        return similarity(outputs.detach(), weights.mask.counted(weights.shape[2]))
    if name == "values" and values is not None:
        return similarity(values.detach(), weights.real_keys)
    return None
