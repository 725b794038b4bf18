"""What can be said of a head without storing its matrix: the statistics, one entry each.

p_ij is the weight of key j for query i, s_ij the score, l_i the row's log-sum-exp, p_i (the position) where
the query stands among the keys: i + S - T. Every statistic has a value a query; a head's value is the mean
over its queries, leaving out padded queries and those that see nothing (`max_logit`: the largest).

An entry is a function from a block of queries and its sums to a value a query; the sums are collected tile by
tile by accumulators. To add a statistic, add its function here, and an accumulator if it needs a new sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, nearest
from ..mask_rules import can_read
from ..scoring import HIDDEN
from .given_weights import GivenWeights
from .gpu.cannot import cannot, prepared
from .operator_arguments import flatten, wants_gradient
from .scores import Scores, Tiled, own_precision
from .second_pass import pooled
from .walk import FAR, ROUGH, Block, Tile, check_mass, check_some, walk

__all__ = [
    "PICTURE",
    "RECEIVED",
    "ROW_STATISTICS",
    "STATISTICS",
    "Statistics",
    "counted",
    "measured",
    "of_head",
    "statistics",
    "without_kernel",
]

NEAR_ROWS = 64  # queries a block when only keys near the diagonal matter

Sums = Mapping[str, Tensor]  # accumulator -> [B, H, t]


@dataclass(frozen=True)
class Accumulator:
    """A sum (or maximum) over the keys of each query, collected from tiles.

    where: which keys it needs: "all", "near" the query, or the "first" one.
    of: a tile's share, [B, H, t].
    """

    where: str
    of: Callable[[Tile, int], Tensor]
    largest: bool = False


def _near(tile: Tile, offset: int) -> Tensor:
    """The weight of the key `offset` ahead of each query, 0 where there is none."""
    key = tile.block.at + offset - tile.columns.start  # [t]
    inside = (key >= 0) & (key < tile.p.shape[-1])
    index = key.clamp(0, tile.p.shape[-1] - 1)
    picked = tile.p.gather(-1, index[:, None].expand(*tile.p.shape[:3], 1)).squeeze(-1)
    return picked * inside


def _distance(tile: Tile, reach: int) -> Tensor:
    at, columns = tile.block.at, tile.columns
    keys = torch.arange(columns.start, columns.stop, device=at.device)
    first, _ = tile.block.scores.ends(tile.block.rows)
    if columns.stop - 1 <= first:  # all keys behind all queries: two small products instead of a t x s one
        behind = tile.p @ (first - keys).to(tile.p.dtype)
        return behind + tile.p.sum(-1) * (at - first)
    away = (at[:, None] - keys).abs().to(tile.p.dtype)
    return torch.einsum("bhts,ts->bht", tile.p, away)


def _local(tile: Tile, reach: int) -> Tensor:
    at, columns = tile.block.at, tile.columns
    keys = torch.arange(columns.start, columns.stop, device=at.device)
    close = ((at[:, None] - keys).abs() <= reach).to(tile.p.dtype)
    return torch.einsum("bhts,ts->bht", tile.p, close)


ACCUMULATORS = {
    "mass": Accumulator("all", lambda tile, reach: tile.p.sum(-1)),
    "surprise": Accumulator("all", lambda tile, reach: -torch.einsum("bhts,bhts->bht", tile.p, tile.log_p)),
    "peak": Accumulator("all", lambda tile, reach: tile.log_p.amax(-1), largest=True),
    "distance": Accumulator("all", _distance),
    "first": Accumulator("first", lambda tile, reach: tile.p.sum(-1)),
    "previous": Accumulator("near", lambda tile, reach: _near(tile, -1)),
    "itself": Accumulator("near", lambda tile, reach: _near(tile, 0)),
    "next": Accumulator("near", lambda tile, reach: _near(tile, 1)),
    "local": Accumulator("near", _local),
}


# The statistics. Each function is its own documentation; `needs` names its accumulators.


@dataclass(frozen=True)
class Statistic:
    """One entry: a function from a block of queries and its sums to a value a query."""

    of: Callable[[Block, Sums], Tensor]
    needs: tuple[str, ...]
    offset: int | None = None  # only queries that have a key this far ahead count in the mean
    largest: bool = False  # a head's value is the largest, not the mean


def _mass(block: Block, sums: Sums) -> Tensor:
    """What a row's weights sum to, its sink included: 1 but for the rounding of lse, which this takes out."""
    mass = sums.get("mass")
    if mass is None or isinstance(block.scores, GivenWeights):
        return torch.ones_like(block.lse)  # not measured; or given, and then they are what they are
    return torch.where(torch.isneginf(block.lse), 1.0, block.with_sink(mass))


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


def effective_keys(block: Block, sums: Sums) -> Tensor:
    """exp(H_i): how many keys, equally weighted, would have this entropy (perplexity of the row)."""
    return entropy(block, sums).exp().masked_fill(torch.isneginf(block.lse), 0)


def confidence(block: Block, sums: Sums) -> Tensor:
    """max_j p_ij: the weight of the heaviest key. Voita 2019, section 4 (there without the last token)."""
    return sums["peak"].exp() / _mass(block, sums)


def distance(block: Block, sums: Sums) -> Tensor:
    """sum_j p_ij |p_i - j|: how far away, in positions, the weight lies; not renormalised for a sink.

    Mean attention distance: Dosovitskiy 2021, appendix D.7; Raghu 2021.
    """
    return sums["distance"] / _mass(block, sums)


def first(block: Block, sums: Sums) -> Tensor:
    """p_i0: the weight of the first real key, where attention sinks sit. Xiao 2024; Gu 2024."""
    return sums["first"] / _mass(block, sums)


def previous(block: Block, sums: Sums) -> Tensor:
    """p_(i, i-1): the weight of the key before the query. Clark 2019, section 3.1."""
    return sums["previous"] / _mass(block, sums)


def itself(block: Block, sums: Sums) -> Tensor:
    """p_ii: the weight of the query's own position. Clark 2019, section 3.1."""
    return sums["itself"] / _mass(block, sums)


def next(block: Block, sums: Sums) -> Tensor:
    """p_(i, i+1): the weight of the key after the query; 0 under a causal mask. Clark 2019, section 3.1."""
    return sums["next"] / _mass(block, sums)


def local(block: Block, sums: Sums) -> Tensor:
    """sum of p_ij over |p_i - j| <= reach: the weight near the query (reach: 8 unless told)."""
    return sums["local"] / _mass(block, sums)


def max_logit(block: Block, sums: Sums) -> Tensor:
    """max_j s_ij: the largest score that reaches the softmax; a head's value is its largest.

    What training runs watch for blow-ups: Dehghani 2023 (ViT-22B); Wortsman 2023, section 3.1.
    """
    return sums["peak"] + block.lse


ROW_STATISTICS: dict[str, Statistic] = {
    "entropy": Statistic(entropy, ("surprise", "mass")),
    "effective_keys": Statistic(effective_keys, ("surprise", "mass")),
    "confidence": Statistic(confidence, ("peak", "mass")),
    "distance": Statistic(distance, ("distance", "mass")),
    "first": Statistic(first, ("first",)),
    "previous": Statistic(previous, ("previous",), offset=-1),
    "itself": Statistic(itself, ("itself",), offset=0),
    "next": Statistic(next, ("next",), offset=1),
    "local": Statistic(local, ("local",)),
    "max_logit": Statistic(max_logit, ("peak",), largest=True),
}
RECEIVED, PICTURE = "received", "pooled"
WITH_GRADIENT = ("entropy", "effective_keys")
STATISTICS = (*ROW_STATISTICS, RECEIVED)


class Statistics(Mapping[str, Tensor]):
    """Measured statistics by name, as attributes and as a mapping.

    Row statistics are [B, H] (or [B, H, T] when asked a query); `received` is [B, H, S]; a picture made in
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

    def __getattr__(self, name: str) -> Tensor:
        if not name.startswith("_") and name in self._values:
            return self._values[name]
        if name in STATISTICS:
            raise AttributeError(f"{name} was not measured; ask for it: statistics({name!r})")
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
        """What a statistic is and where it comes from.

        Example:
            >>> print(Statistics.formula("itself"))
            p_ii: the weight of the query's own position. Clark 2019, section 3.1.
        """
        if name == RECEIVED:
            return "sum_i p_ij: the attention key j receives. H2O, Zhang 2023; SnapKV, Li 2024."
        _check_names((name,))
        return str(ROW_STATISTICS[name].of.__doc__)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in STATISTICS:
            raise ArgumentError(f"statistics must be known names: got {name!r}; {nearest(name, STATISTICS)}")


def statistics(
    scores: Tiled,
    lse: Tensor,
    names: Iterable[str] = (),
    per_query: bool = False,
    reach: int = 8,
    cells: tuple[int, int] | None = None,
) -> Statistics:
    """Measure what is asked for in one walk over the weights; no names: everything.

    Gradients flow through `entropy` and `effective_keys` alone. cells: rows and columns of a picture to be
    made in the same walk, called "pooled".

    Raises:
        ArgumentError: an unknown name; reach below 0; `max_logit` of weights without scores.
    """
    given = isinstance(scores, GivenWeights)
    names = tuple(names) or tuple(n for n in STATISTICS if not (given and n == "max_logit"))
    _check_names(names)
    if given and "max_logit" in names:
        raise ArgumentError(
            "max_logit must come from scores: this map was made from weights; build it from q and k"
        )
    if reach < 0:
        raise ArgumentError(f"reach must not be negative: got {reach}; 0 is the query's own position")
    names = tuple(dict.fromkeys(names))
    if not isinstance(scores, Scores) or not wants_gradient(scores) or _without_gradient(names):
        return Statistics(_measure(scores, lse, names, per_query, reach, cells))
    return Statistics(_with_gradient(scores, lse, names, per_query, reach, cells))


def _without_gradient(names: Iterable[str]) -> bool:
    return not any(name in WITH_GRADIENT for name in names)


def _with_gradient(
    scores: Scores, lse: Tensor, names: tuple[str, ...], per_query: bool, reach: int, cells: Any
) -> dict[str, Tensor]:
    """The same, a query at a time first: the mean over queries is left to autograd."""
    from .second_pass import with_gradient

    wanted = names if "entropy" in names else ("entropy", *names)
    if torch.compiler.is_compiling():  # entropy is an operator of its own there: it need not be known before
        wanted = tuple(name for name in names if name not in WITH_GRADIENT)
    found = _measure(scores, lse, wanted, True, reach, cells)
    value = with_gradient(scores, lse, found.get("entropy"))
    found["entropy"] = value
    if "effective_keys" in names:
        found["effective_keys"] = value.exp().masked_fill(torch.isneginf(lse), 0)
    if not per_query:
        for name in ROW_STATISTICS:
            if name in found:
                found[name] = of_head(name, found[name], scores, lse)
    return {name: found[name] for name in (*names, *([] if cells is None else [PICTURE]))}


def _measure(
    scores: Tiled, lse: Tensor, names: tuple[str, ...], per_query: bool, reach: int, cells: Any
) -> dict[str, Tensor]:
    if torch.compiler.is_compiling() and isinstance(scores, Scores):
        kept = None if cells is None else list(cells)
        values = torch.ops.headwise.measure.default(
            *flatten(scores.detach()), lse, list(names), per_query, reach, kept
        )
        return dict(zip((*names, PICTURE), values, strict=False))
    return measured(scores, lse, names, per_query, reach, cells)


@torch.no_grad()
def measured(
    scores: Tiled,
    lse: Tensor,
    names: tuple[str, ...],
    per_query: bool,
    reach: int,
    cells: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """The values by name, in the order of the names, the picture last: on a GPU by kernels, else in tiles."""
    with own_precision(scores.device):
        if cannot(scores) is None:
            assert isinstance(scores, Scores)
            found = _by_kernels(scores, lse, names, per_query, reach, cells)
        else:
            found = _in_tiles(scores, lse, names, per_query, reach)
            if cells is not None:
                found[PICTURE] = pooled(scores, lse, *cells)
    return {name: found[name] for name in (*names, PICTURE) if name in found}


def _by_kernels(
    scores: Scores, lse: Tensor, names: tuple[str, ...], per_query: bool, reach: int, cells: Any
) -> dict[str, Tensor]:
    from .gpu.pictures import NAMES, measure

    kinds = {
        name: (ROW_STATISTICS[name].offset, ROW_STATISTICS[name].largest) for name in names if name in NAMES
    }
    done = measure(prepared(scores, lse), kinds, per_query, reach, RECEIVED in names, cells)
    found = dict(done.rows)
    if done.received is not None:
        found[RECEIVED] = done.received
    if done.picture is not None:
        found[PICTURE] = done.picture
    others = tuple(name for name in names if name not in found)  # an entry without a kernel
    return found | _in_tiles(scores, lse, others, per_query, reach) if others else found


def without_kernel() -> tuple[str, ...]:
    """The statistics that have no kernel and run on tiles wherever they are asked for."""
    from .gpu.pictures import NAMES

    return tuple(name for name in ROW_STATISTICS if name not in NAMES)


def _in_tiles(
    scores: Tiled, lse: Tensor, names: tuple[str, ...], per_query: bool, reach: int
) -> dict[str, Tensor]:
    B, H, T, S = scores.shape
    rows = {
        name: torch.zeros(B, H, T, dtype=scores.dtype, device=scores.device)
        for name in names
        if name != RECEIVED
    }
    received = None
    if RECEIVED in names:
        received = torch.zeros(B, H, S, dtype=scores.dtype, device=scores.device)
    needed = {part for name in rows for part in ROW_STATISTICS[name].needs}
    everywhere = received is not None or any(ACCUMULATORS[part].where == "all" for part in needed)
    if everywhere:
        needed.add("mass")  # always measured where whole rows are walked: a row's mass tells whose it is
    elif names:
        check_some(scores, lse)
    # what is divided by a row's mass need not be exact before; sums over queries must be
    rough = FAR if everywhere and received is None else ROUGH
    ragged = "first" in needed and scores.mask.keys is not None and scores.mask.keys.ndim == 2
    if names:
        for block in walk(scores, lse, ragged, None if everywhere else NEAR_ROWS, rough):
            room = None if received is None else received[block.piece.batch, block.piece.heads]
            sums = _collect(block, needed, reach, everywhere, room)
            if everywhere:
                check_mass(block.scores, block.rows, block.lse, block.with_sink(sums["mass"]))
            for name, values in rows.items():
                values[block.where] = ROW_STATISTICS[name].of(block, sums)
    if not per_query:
        rows = {name: of_head(name, values, scores, lse) for name, values in rows.items()}
    return rows if received is None else {**rows, RECEIVED: received}


def _collect(
    block: Block, needed: set[str], reach: int, everywhere: bool, received: Tensor | None
) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for name in needed:
        start = HIDDEN if ACCUMULATORS[name].largest else 0.0
        sums[name] = torch.full_like(block.lse, start, dtype=block.scores.dtype)

    def gather(tile: Tile, where: str) -> None:
        for name in needed:
            accumulator = ACCUMULATORS[name]
            if accumulator.where == where:
                share = accumulator.of(tile, reach)
                combine = torch.maximum if accumulator.largest else torch.add
                sums[name] = combine(sums[name], share)

    wanted = {ACCUMULATORS[name].where for name in needed}
    near = _around(block, reach if "local" in needed else 1)
    first = _first_key(block.scores)
    # Of rough rows, everything is taken from one and the same product: the tiles of the walk.
    apart = not block.is_rough
    if everywhere:
        counted = block.counted()
        for tile in block.tiles():
            gather(tile, "all")
            if received is not None:
                p = tile.p if counted is None else tile.p * counted[..., None]
                received[..., tile.columns] += p.sum(-2)
            if not apart:
                _gather_inside(tile, near, first, wanted, gather)
    elif not apart:
        for tile in block.tiles():
            _gather_inside(tile, near, first, wanted, gather)
    if "near" in wanted and apart and near.start < near.stop:
        gather(block.tile(near), "near")
    if "first" in wanted and apart:
        gather(block.tile(first), "first")
    return sums


def _gather_inside(
    tile: Tile, near: slice, first: Any, wanted: set[str], gather: Callable[[Tile, str], None]
) -> None:
    """What a tile of the walk holds of the keys near the queries, and of the first one."""
    columns = tile.columns
    if "near" in wanted and columns.start < near.stop and near.start < columns.stop:
        gather(tile, "near")
    key = first.start if isinstance(first, slice) else int(first)
    if "first" in wanted and columns.start <= key < columns.stop:
        gather(tile.part(key - columns.start), "first")


def _around(block: Block, reach: int) -> slice:
    """The keys at most `reach`, and at least one, away from any of the queries."""
    first_at, last_at = block.scores.ends(block.rows)
    around = max(1, reach)
    return slice(max(0, first_at - around), min(block.scores.shape[3], last_at + around + 1))


def _first_key(scores: Tiled) -> Any:
    """The first real key of a piece: key 0, unless padding says otherwise."""
    keys = scores.mask.keys
    if keys is None or keys.ndim == 1 or (can_read(keys) and bool(keys[0, 0])):
        return slice(0, 1)
    return keys[0].int().argmax(keepdim=True)


def of_head(name: str, values: Tensor, scores: Tiled, lse: Tensor) -> Tensor:
    """[B, H] from [B, H, T]."""
    counts = counted(name, scores, lse)
    if ROW_STATISTICS[name].largest:
        return values.masked_fill(~counts, -torch.inf).amax(-1)
    return values.masked_fill(~counts, 0).sum(-1) / counts.sum(-1)


def counted(name: str, scores: Tiled, lse: Tensor) -> Tensor:
    """Which queries count in a head's value of a row statistic, bool [B, H, T].

    Not those that are padding or see nothing, nor those without a key where the statistic looks for one.
    """
    T, S = scores.shape[2:]
    counts = ~torch.isneginf(lse)
    real = scores.mask.counted(T)
    if real is not None:
        counts = counts & real[:, None]
    offset = ROW_STATISTICS[name].offset
    if offset is not None:
        key = scores.at(slice(0, T)) + offset
        counts = counts & ((key >= 0) & (key < S))
    return counts
