"""What can be said of a head without storing its matrix: the statistics, one entry each.

p_ij is the weight of key j for query i, s_ij the score, l_i the row's log-sum-exp, p_i (the position) where
the query stands among the keys: i + S - T. Every statistic has a value per query; a head's value is the mean
over its queries, leaving out padded queries and those that see nothing (`max_logit`: the largest). A query
counts for `previous`, `itself` and `next` only if the key at that position exists and is not padding; a key
that another rule hides (causal, a window, a document) counts with weight 0.

An entry is a function from a block of queries and its sums to a value per query; the sums are collected tile
by tile by accumulators. To add a statistic, add its function here under `@statistic`, with an accumulator if
it needs a new sum. Without a kernel in engines/gpu/rows.py it runs on tiles everywhere, and `why` says so.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, nearest
from .accumulators import ACCUMULATORS, NEAR_ROWS, Accumulator, Sums, sums_of
from .given_weights import GivenWeights
from .gpu.cannot import cannot, prepared
from .scores import Scores, Tiled, own_precision, without_graph
from .second_pass import drawing, pooled
from .walk import FAR, ROUGH, Block, check_mass, check_some, walk
from .wanted import Collected

__all__ = [
    "PICTURE",
    "RECEIVED",
    "ROW_STATISTICS",
    "STATISTICS",
    "WITH_GRADIENT",
    "Statistic",
    "Statistics",
    "check_names",
    "counted",
    "measured",
    "of_head",
    "statistic",
    "statistics",
    "without_kernel",
]

Formula = Callable[[Block, Sums], Tensor]
Cells = tuple[int, int] | None  # rows and columns of a picture


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
    """Make a formula an entry, under its own name; its docstring is what users read.

    Args:
        needs: the accumulators whose sums it is made of.
        offset, largest: see `Statistic`.
        sums: accumulators that are its own, by name.
    """

    def enter(of: Formula) -> Formula:
        assert not ACCUMULATORS.keys() & sums.keys(), "there is one of that name"
        ACCUMULATORS.update(sums)
        ROW_STATISTICS[of.__name__] = Statistic(of, (*needs, *sums), offset, largest)
        return of

    return enter


# The statistics, in the order of every table of them.


def _mass(block: Block, sums: Sums) -> Tensor:
    """What a row's weights sum to, its sink included: 1 but for the rounding of lse, which this takes out."""
    if block.divisor is not None:
        return block.divisor
    mass = sums.get("mass")
    if mass is None or isinstance(block.scores, GivenWeights):
        block.divisor = torch.ones_like(block.lse)  # not measured; or given, and then they are what they are
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


def statistics(
    scores: Tiled,
    lse: Tensor,
    names: Iterable[str] = (),
    per_query: bool = False,
    reach: int = 8,
    cells: Cells = None,
    known: Collected | None = None,
) -> Statistics:
    """Measure what is asked for in one walk over the weights; no names: everything.

    Gradients flow through `entropy` and `effective_keys` alone. cells: rows and columns of a picture to be
    made in the same walk, called "pooled". known: what need not be measured.

    Raises:
        ArgumentError: an unknown name; reach below 0; `max_logit` of weights without scores.
    """
    given = isinstance(scores, GivenWeights)
    names = tuple(names) or tuple(n for n in STATISTICS if not (given and n == "max_logit"))
    check_names(names)
    if given and "max_logit" in names:
        raise ArgumentError(
            "max_logit must come from scores: this map was made from weights; build it from q and k"
        )
    if reach < 0:
        raise ArgumentError(f"reach must not be negative: got {reach}; 0 is the query's own position")
    names = tuple(dict.fromkeys(names))
    if not isinstance(scores, Scores) or not scores.wants_gradient or _without_gradient(names):
        return Statistics(_measure(scores, lse, names, per_query, reach, cells, known))
    return Statistics(_with_gradient(scores, lse, names, per_query, reach, cells, known))


def _without_gradient(names: Iterable[str]) -> bool:
    return not any(name in WITH_GRADIENT for name in names)


def _with_gradient(
    scores: Scores,
    lse: Tensor,
    names: tuple[str, ...],
    per_query: bool,
    reach: int,
    cells: Cells,
    known: Collected | None,
) -> dict[str, Tensor]:
    """The same, a query at a time first: the mean over queries is left to autograd."""
    from .second_pass import with_gradient

    wanted = names if "entropy" in names else ("entropy", *names)
    if torch.compiler.is_compiling():  # entropy is an operator of its own there: it need not be known before
        wanted = tuple(name for name in names if name not in WITH_GRADIENT)
    values = _measure(scores, lse, wanted, True, reach, cells, known)
    value = with_gradient(scores, lse, values.get("entropy"))
    values["entropy"] = value
    if "effective_keys" in names:
        values["effective_keys"] = value.exp().masked_fill(torch.isneginf(lse), 0)
    if not per_query:
        for name in ROW_STATISTICS:
            if name in values:
                values[name] = of_head(name, values[name], scores, lse)
    return {name: values[name] for name in (*names, *([] if cells is None else [PICTURE]))}


def _measure(
    scores: Tiled,
    lse: Tensor,
    names: tuple[str, ...],
    per_query: bool,
    reach: int,
    cells: Cells,
    known: Collected | None = None,
) -> dict[str, Tensor]:
    if torch.compiler.is_compiling() and isinstance(scores, Scores):
        kept = None if cells is None else list(cells)
        values = torch.ops.headwise.measure.default(
            *scores.detach().flatten(), lse, list(names), per_query, reach, kept
        )
        return dict(zip((*names, PICTURE), values, strict=False))
    return measured(scores, lse, names, per_query, reach, cells, known)


def measured(
    scores: Tiled,
    lse: Tensor,
    names: tuple[str, ...],
    per_query: bool,
    reach: int,
    cells: Cells = None,
    known: Collected | None = None,
) -> dict[str, Tensor]:
    """The values by name, in the order of the names, the picture last: on a GPU by kernels, else in tiles.

    known: values per query that were collected on the way; the others are measured.
    """
    given = () if known is None else tuple(name for name in names if name in known.names)
    fresh = tuple(name for name in names if name not in given) if given else names
    values: dict[str, Tensor] = {}
    with without_graph(), own_precision(scores.device):
        if cannot(scores) is None:
            assert isinstance(scores, Scores)
            if fresh or cells is not None:
                values = _by_kernels(scores, lse, fresh, per_query, reach, cells)
        elif fresh or cells is None:
            values = _in_tiles(scores, lse, fresh, per_query, reach, cells)
        else:
            values[PICTURE] = pooled(scores, lse, *cells)
        if known is not None and given:
            values |= _from_rows(scores, lse, known, given, per_query)
    return {name: values[name] for name in (*names, PICTURE) if name in values}


def _from_rows(
    scores: Tiled, lse: Tensor, known: Collected, names: tuple[str, ...], per_query: bool
) -> dict[str, Tensor]:
    """What was collected, per query or per head."""
    if per_query:
        return {name: known.row(name).clone() for name in names}
    if cannot(scores) is not None:
        return {name: of_head(name, known.row(name), scores, lse) for name in names}
    from .gpu.neighbours import of_heads

    kinds = [(ROW_STATISTICS[name].offset, ROW_STATISTICS[name].largest) for name in known.names]
    heads = of_heads(prepared(scores, lse), known.rows.contiguous(), kinds)  # [n, B, H]
    return {name: heads[known.names.index(name)] for name in names}


def _by_kernels(
    scores: Scores,
    lse: Tensor,
    names: tuple[str, ...],
    per_query: bool,
    reach: int,
    cells: Cells,
) -> dict[str, Tensor]:
    from .gpu.pictures import NAMES, measure

    kinds = {
        name: (ROW_STATISTICS[name].offset, ROW_STATISTICS[name].largest) for name in names if name in NAMES
    }
    done = measure(prepared(scores, lse), kinds, per_query, reach, RECEIVED in names, cells)
    values = done.rows
    if done.received is not None:
        values[RECEIVED] = done.received
    if done.picture is not None:
        values[PICTURE] = done.picture
    others = tuple(name for name in names if name not in values)  # an entry without a kernel
    return values | _in_tiles(scores, lse, others, per_query, reach) if others else values


def without_kernel() -> tuple[str, ...]:
    """The statistics that have no kernel and run on tiles wherever they are asked for."""
    from .gpu.pictures import NAMES

    return tuple(name for name in ROW_STATISTICS if name not in NAMES)


def _in_tiles(
    scores: Tiled, lse: Tensor, names: tuple[str, ...], per_query: bool, reach: int, cells: Cells = None
) -> dict[str, Tensor]:
    B, H, T, S = scores.shape
    dtype, device = scores.dtype, scores.device
    rows = {name: torch.zeros(B, H, T, dtype=dtype, device=device) for name in names if name != RECEIVED}
    received = torch.zeros(B, H, S, dtype=dtype, device=device) if RECEIVED in names else None
    picture = None if cells is None else torch.zeros(B, H, *cells, dtype=dtype, device=device)
    needed = {part for name in rows for part in ROW_STATISTICS[name].needs}
    everywhere = received is not None or picture is not None
    everywhere = everywhere or any(ACCUMULATORS[part].where == "all" for part in needed)
    if everywhere:
        needed.add("mass")  # always measured where whole rows are walked: a row's mass tells whose it is
    elif names:
        check_some(scores, lse)
    # what is divided by a row's mass need not be exact before; sums over queries must be
    rough = FAR if everywhere and received is None and picture is None else ROUGH
    ragged = "first" in needed and scores.mask.keys is not None and scores.mask.keys.ndim == 2
    if names:
        for block in walk(scores, lse, ragged, None if everywhere else NEAR_ROWS, rough):
            room = None if received is None else received[block.piece.batch, block.piece.heads]
            draw = None if picture is None else drawing(block, picture)
            sums = sums_of(block, needed, reach, everywhere, room, draw)
            if everywhere:
                check_mass(block.scores, block.rows, block.lse, block.with_sink(sums["mass"]))
            where = block.where
            for name, values in rows.items():
                values[where] = ROW_STATISTICS[name].of(block, sums)
    if not per_query:
        rows = _of_heads(rows, scores, lse)
    large = {RECEIVED: received, PICTURE: picture}
    return rows | {name: value for name, value in large.items() if value is not None}


def _of_heads(rows: dict[str, Tensor], scores: Tiled, lse: Tensor) -> dict[str, Tensor]:
    """`of_head` of each; which queries count is asked once for all that look in one place."""
    counts = {entry.offset: name for name, entry in ROW_STATISTICS.items() if name in rows}
    by_offset = {offset: counted(name, scores, lse) for offset, name in counts.items()}
    return {n: _over_queries(n, values, by_offset[ROW_STATISTICS[n].offset]) for n, values in rows.items()}


def of_head(name: str, values: Tensor, scores: Tiled, lse: Tensor) -> Tensor:
    """[B, H] from [B, H, T]."""
    return _over_queries(name, values, counted(name, scores, lse))


def _over_queries(name: str, values: Tensor, counts: Tensor) -> Tensor:
    if ROW_STATISTICS[name].largest:
        return values.masked_fill(~counts, -torch.inf).amax(-1)
    return values.masked_fill(~counts, 0).sum(-1) / counts.sum(-1)


def counted(name: str, scores: Tiled, lse: Tensor) -> Tensor:
    """Which queries count in a head's value of a row statistic, bool [B, H, T].

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
