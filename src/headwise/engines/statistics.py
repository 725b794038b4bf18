"""The statistics of a head that need no stored matrix, one entry each.

p_ij is the weight of key j for query i, s_ij the score, l_i the row's log-sum-exp, p_i (the position) where
the query stands among the keys: i + S - T. Every statistic has a value per query; a head's value is the mean
over its queries, leaving out padded queries and those that see nothing (`max_logit`: the largest). A query
counts for `previous`, `itself` and `next` only if the key at that position exists and is not padding; a key
that another rule hides (causal, a window, a document) counts with weight 0.

An entry is a function from a block of queries and its sums to a value per query. The sums are collected by
accumulators: a walk passes every tile of a block of queries once to each accumulator. Accumulators that need
only the keys near a query, or the first one, read those alone unless another needs the full row.

To add a statistic, add its function here under `@statistic`, with an accumulator if it needs a new sum.
Unless engines/gpu/measurements.py names it (`NAMES`) it runs on tiles everywhere, and `why` says so.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, nearest
from ..scoring import HIDDEN
from .scores import Tiled
from .walk import Block, GivenWeights, Tile

NEAR_ROWS = 64  # queries a block when only keys near the diagonal matter

Sums = Mapping[str, Tensor]  # accumulator -> [B, H, t]


@dataclass(frozen=True)
class Accumulator:
    """A sum (or maximum) over the keys of each query, collected from tiles.

    where: which keys it needs: "all", "near" the query, or the "first" one.
    of: a tile's share, [B, H, t], from the tile and the `reach` of the request (for `local`).
    largest: the largest share instead of their sum.
    away: for "near", the largest distance from the query to a key that it reads; None: `reach`.
    """

    where: str
    of: Callable[[Tile, int], Tensor]
    largest: bool = False
    away: int | None = 1


def _near(tile: Tile, low: int, high: int) -> Tensor:
    """Return the weight of the keys that are `low` to `high` ahead of each query; 0 where there is none."""
    p, at, count = tile.p, tile.block.at - tile.columns.start, tile.p.shape[-1]
    if 2 * (high + 1 - low) > count:  # most of the tile
        offset = torch.arange(count, device=at.device) - at[:, None]  # [t, s]
        return torch.linalg.vecdot(p, ((offset >= low) & (offset <= high)).to(p.dtype))
    spots = at[:, None] + torch.arange(low, high + 1, device=at.device)
    index = spots.clamp(0, count - 1)  # [t, high + 1 - low]
    picked = p.gather(-1, index.expand(*p.shape[:2], *index.shape))
    return torch.linalg.vecdot(picked, (index == spots).to(p.dtype))


def _distance(tile: Tile, reach: int) -> Tensor:
    """Return the weighted distance; keys behind or ahead of all queries take two small products each."""
    p, at, start, stop = tile.p, tile.block.at, tile.columns.start, tile.columns.stop
    first, last = tile.block.scores.ends(tile.block.rows)
    keys = torch.arange(start, stop, device=at.device)
    behind = min(max(first + 1, start), stop) - start
    ahead = max(min(last, stop) - start, behind)  # the key of a single query is behind: either way 0
    total = torch.zeros_like(p[..., 0])
    if behind:
        part = p[..., :behind]
        total += part @ (first - keys[:behind]).to(p.dtype) + part.sum(-1) * (at - first)
    if behind < ahead:
        away = (at[:, None] - keys[behind:ahead]).abs().to(p.dtype)
        total += torch.linalg.vecdot(p[..., behind:ahead], away)
    if ahead < stop - start:
        part = p[..., ahead:]
        total += part @ (keys[ahead:] - last).to(p.dtype) + part.sum(-1) * (last - at)
    return total


ACCUMULATORS: dict[str, Accumulator] = {
    "mass": Accumulator("all", lambda tile, reach: tile.p.sum(-1)),
    "surprise": Accumulator("all", lambda tile, reach: -torch.linalg.vecdot(tile.p, tile.log_p)),
    "peak": Accumulator("all", lambda tile, reach: tile.log_p.amax(-1), largest=True),
    "distance": Accumulator("all", _distance),
    "first": Accumulator("first", lambda tile, reach: tile.p.sum(-1)),
    "previous": Accumulator("near", lambda tile, reach: _near(tile, -1, -1)),
    "itself": Accumulator("near", lambda tile, reach: _near(tile, 0, 0)),
    "next": Accumulator("near", lambda tile, reach: _near(tile, 1, 1)),
    "local": Accumulator("near", lambda tile, reach: _near(tile, -reach, reach), away=None),
}


def sums_of(
    block: Block,
    needed: set[str],
    reach: int,
    everywhere: bool,
    received: Tensor | None,
    draw: Callable[[Tile], None] | None = None,
    first: slice | None = None,
) -> dict[str, Tensor]:
    """Return the sums of a block of queries by accumulator, [B, H, t] each.

    Args:
        everywhere: all keys are walked; otherwise only those near the queries and the first.
        received: adds up what each key receives, [B, H, S], if not None.
        draw: is called with every tile, where all keys are walked.
        first: the first real key, if the mask does not determine it because these may not be all keys.
    """
    sums: dict[str, Tensor] = {}
    dtype = block.scores.dtype
    for name in needed:
        start = HIDDEN if ACCUMULATORS[name].largest else 0.0
        sums[name] = torch.full_like(block.lse, start, dtype=dtype)

    def gather(tile: Tile, where: str) -> None:
        for name in needed:
            accumulator = ACCUMULATORS[name]
            if accumulator.where == where:
                share = accumulator.of(tile, reach)
                combine = torch.maximum if accumulator.largest else torch.add
                sums[name] = combine(sums[name], share)

    wanted = {ACCUMULATORS[name].where for name in needed}
    chosen: dict[str, slice] = {}
    if "near" in wanted:
        chosen["near"] = _around(block, needed, reach)
    if "first" in wanted:
        chosen["first"] = _first_key(block.scores) if first is None else first
    if everywhere or block.is_rough:
        # For rough rows everything is computed from the same product, the tiles of the walk; where those are
        # computed anyway, nothing is computed twice.
        counted = block.counted()
        for tile in block.tiles():
            gather(tile, "all")
            if draw is not None:
                draw(tile)
            if received is not None:
                p = tile.p if counted is None else tile.p * counted[..., None]
                received[..., tile.columns] += p.sum(-2)
            for where, keys in chosen.items():
                if tile.columns.start < keys.stop and keys.start < tile.columns.stop:
                    gather(tile.part(keys), where)
    else:
        for where, keys in chosen.items():
            if keys.start < keys.stop:
                gather(block.tile(keys), where)
    return sums


def _around(block: Block, needed: set[str], reach: int) -> slice:
    """Return the keys near the queries that accumulators may read; empty if all queries are outside."""
    first_at, last_at = block.scores.ends(block.rows)
    around = 1
    for name in needed:
        away = ACCUMULATORS[name].away
        around = max(around, reach if away is None else away)
    start = max(0, first_at - around)
    return slice(start, max(start, min(block.scores.shape[3], last_at + around + 1)))


def _first_key(scores: Tiled) -> slice:
    """Return the first real key of a piece: key 0, unless there is padding on the left."""
    keys = scores.mask.keys
    if keys is None or keys.ndim == 1:
        return slice(0, 1)
    first = int(keys[0].int().argmax())
    return slice(first, first + 1)


# Entries


Formula = Callable[[Block, Sums], Tensor]


@dataclass(frozen=True)
class Statistic:
    """One entry: a function from a block of queries and its sums to a value per query."""

    of: Formula
    needs: tuple[str, ...]
    offset: int | None = None  # only queries that have a real key this far ahead count in the mean
    largest: bool = False  # a head's value is the largest, not the mean


ROW_STATISTICS: dict[str, Statistic] = {}


def statistic(
    *needs: str, offset: int | None = None, largest: bool = False, **sums: Accumulator
) -> Callable[[Formula], Formula]:
    """Return a decorator that makes a formula an entry, under its own name; users read its docstring.

    Args:
        needs: the accumulators whose sums it uses.
        offset, largest: see `Statistic`.
        sums: its own accumulators, by name.
    """

    def enter(of: Formula) -> Formula:
        assert not ACCUMULATORS.keys() & sums.keys(), "there is one of that name"
        ACCUMULATORS.update(sums)
        ROW_STATISTICS[of.__name__] = Statistic(of, (*needs, *sums), offset, largest)
        return of

    return enter


# The statistics, in the order of every table of them.


def _mass(block: Block, sums: Sums) -> Tensor:
    """Return the sum of a row's weights, its sink included: 1 but for the rounding of lse, to divide by."""
    if block.divisor is not None:
        return block.divisor
    mass = sums.get("mass")
    if mass is None or isinstance(block.scores, GivenWeights):
        block.divisor = torch.ones_like(block.lse)  # not measured; or weights computed elsewhere
    else:
        block.divisor = torch.where(torch.isneginf(block.lse), 1.0, block.with_sink(mass))
    return block.divisor


@statistic("surprise", "mass")
def entropy(block: Block, sums: Sums) -> Tensor:
    """H_i = -sum_j p_ij log p_ij = l_i - E_p[s_ij], in nats; a sink counts as one more key.

    Clark 2019, section 3.3.
    """
    surprise, mass = sums["surprise"], _mass(block, sums)
    log_sunk = block.log_of_sinks()
    if log_sunk is not None:
        p = log_sunk.exp()
        surprise = surprise - torch.xlogy(p, p)
    return (surprise / mass + mass.log()).masked_fill(torch.isneginf(block.lse), 0)


@statistic("surprise", "mass")
def effective_keys(block: Block, sums: Sums) -> Tensor:
    """exp(H_i): how many keys, equally weighted, would have this entropy (perplexity of the row)."""
    return entropy(block, sums).exp().masked_fill(torch.isneginf(block.lse), 0)


@statistic("peak", "mass")
def confidence(block: Block, sums: Sums) -> Tensor:
    """max_j p_ij: the weight of the heaviest key. Voita 2019, section 4 (there without the last token)."""
    return sums["peak"].exp() / _mass(block, sums)


@statistic("distance", "mass")
def distance(block: Block, sums: Sums) -> Tensor:
    """sum_j p_ij |p_i - j|: how far away, in positions, the weight lies; not renormalised for a sink.

    Mean attention distance: Dosovitskiy 2021, appendix D.7; Raghu 2021.
    """
    return sums["distance"] / _mass(block, sums)


@statistic("first")
def first(block: Block, sums: Sums) -> Tensor:
    """p_i0: the weight of the first real key, where attention sinks sit. Xiao 2024; Gu 2024."""
    return sums["first"] / _mass(block, sums)


@statistic("previous", offset=-1)
def previous(block: Block, sums: Sums) -> Tensor:
    """p_(i, i-1): the weight of the key before the query. Clark 2019, section 3.1."""
    return sums["previous"] / _mass(block, sums)


@statistic("itself", offset=0)
def itself(block: Block, sums: Sums) -> Tensor:
    """p_ii: the weight of the query's own position. Clark 2019, section 3.1."""
    return sums["itself"] / _mass(block, sums)


@statistic("next", offset=1)
def next(block: Block, sums: Sums) -> Tensor:
    """p_(i, i+1): the weight of the key after the query; 0 under a causal mask. Clark 2019, section 3.1."""
    return sums["next"] / _mass(block, sums)


@statistic("local")
def local(block: Block, sums: Sums) -> Tensor:
    """sum of p_ij over |p_i - j| <= reach: the weight near the query (reach: 8 unless told)."""
    return sums["local"] / _mass(block, sums)


@statistic("peak", largest=True)
def max_logit(block: Block, sums: Sums) -> Tensor:
    """max_j s_ij: the largest score that reaches the softmax; a head's value is its largest.

    What training runs watch for blow-ups: Dehghani 2023 (ViT-22B); Wortsman 2023, section 3.1.
    """
    return sums["peak"] + block.lse


RECEIVED, PICTURE = "received", "pooled"
WITH_GRADIENT = ("entropy", "effective_keys")
STATISTICS = (*ROW_STATISTICS, RECEIVED)


class Statistics(Mapping[str, Tensor]):
    """Measured statistics by name, as attributes and as a mapping.

    Row statistics are [B, H] (or [B, H, T] when asked per query); `received` is [B, H, S]; a picture made in
    the same walk is `pooled`, [B, H, rows, columns].
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Tensor:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> ItemsView[str, Tensor]:
        return self._values.items()

    def __getattr__(self, name: str) -> Tensor:
        if not name.startswith("_") and name in self._values:
            return self._values[name]
        if name in STATISTICS:
            raise AttributeError(f"{name} was not measured; call statistics({name!r})")
        raise AttributeError(f"no statistic {name!r}; {nearest(name, STATISTICS)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def __repr__(self) -> str:
        inside = ", ".join(f"{name} {list(value.shape)}" for name, value in self.items())
        return f"Statistics({inside})"

    def __reduce__(self) -> tuple[type[Statistics], tuple[dict[str, Tensor]]]:
        return Statistics, (self._values,)

    @staticmethod
    def formula(name: str) -> str:
        """Return what a statistic is and where it comes from.

        Example:
            >>> print(Statistics.formula("itself"))
            p_ii: the weight of the query's own position. Clark 2019, section 3.1.
        """
        if name == RECEIVED:
            return "sum_i p_ij: the attention key j receives. H2O, Zhang 2023; SnapKV, Li 2024."
        check_names((name,))
        return str(ROW_STATISTICS[name].of.__doc__)


torch.serialization.add_safe_globals([Statistics])
pytree.register_pytree_node(
    Statistics,
    lambda measured: (list(measured.values()), tuple(measured)),
    lambda values, names: Statistics(dict(zip(names, values, strict=True))),
    serialized_type_name="headwise.Statistics",
)


def check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in STATISTICS:
            hint = nearest(str(name), STATISTICS)
            raise ArgumentError(f"statistics must be known names: got {name!r}; {hint}")


def of_heads(rows: Mapping[str, Tensor], scores: Tiled, lse: Tensor) -> dict[str, Tensor]:
    """Return [B, H] from values per query, [B, H, T]: the mean over counted queries, or the largest."""
    heads, counts = {}, {}
    for name, values in rows.items():
        entry = ROW_STATISTICS[name]
        if entry.offset not in counts:
            counts[entry.offset] = counted(name, scores, lse)
        counted_queries = counts[entry.offset]
        if entry.largest:
            heads[name] = values.masked_fill(~counted_queries, -torch.inf).amax(-1)
        else:
            heads[name] = values.masked_fill(~counted_queries, 0).sum(-1) / counted_queries.sum(-1)
    return heads


def counted(name: str, scores: Tiled, lse: Tensor) -> Tensor:
    """Return which queries count in a head's value of a row statistic, bool [B, H, T].

    Padded queries and those that see nothing do not count; nor do those for which the key that the statistic
    looks at (`next`, say) does not exist or is padding.
    """
    T, S = scores.shape[2:]
    counts = ~torch.isneginf(lse)
    real = scores.mask.counted(T)
    if real is not None:
        counts = counts & real[:, None]
    offset = None if name == RECEIVED else ROW_STATISTICS[name].offset
    if offset is not None:
        key = scores.at(slice(0, T)) + offset
        counts = counts & ((key >= 0) & (key < S))
        if scores.mask.keys is not None:
            counts = counts & ~scores.mask.is_padding_at(key)[:, None]
    return counts
