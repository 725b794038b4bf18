"""Distances between heads by attention and by output; heads as points and in groups; and `diversity`.

The distances: each function gives a matrix of every head of a layer against every head, [B, H, H];
`one_number` makes it a number per layer. Weights are read a block of queries at a time, so memory is that of
a few rows of every head.

Points and groups are made of distances [N, N] between N heads, of one layer or of many: e.g. the square root
of `jensen_shannon`, or one minus a cosine.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .. import budget
from ..engines.scores import own_precision, tile_dtype
from ..errors import ArgumentError, ShapeError
from ..map import AttentionMap
from ..masks import Mask
from .layer_names import path_in_words
from .measures import weights_in_blocks

if TYPE_CHECKING:
    from .layer import LayerHeads
    from .layer_names import Layer

QUERIES = 256  # default number of queries of a sequence to compare heads by; more hardly change the mean
ACROSS = 64  # maximal number of queries to compare heads of different layers by


@torch.no_grad()
def jensen_shannon(map: AttentionMap, *, smooth: float = 0.0, queries: int | None = None) -> Tensor:
    """Return the Jensen-Shannon divergence of heads: the mean over queries of JS(p_i^a || p_i^b), in nats.

        JS(p || q) = H((p + q) / 2) - (H(p) + H(q)) / 2,    0: the same weights; log 2: no key in common

    Clark 2019, section 6, takes the sum over queries instead of the mean, and mixes weights with a uniform
    part, 0.999 p + 0.001 / S: with `smooth=0.001` the result is that sum divided by the number of queries.
    The square root of the divergence is a distance, for `layout` and `clusters`. A learned sink is one more
    key, as in entropy. Queries that count for only one head of a pair are left out.

    Args:
        map: [B, H, T, S]; the cost is H / 2 times that of all its weights.
        smooth: the share of each row that is spread evenly over the real keys before comparing.
        queries: at most this many, evenly spaced among those that count; None: all.

    Returns:
        [B, H, H], symmetric with a diagonal of 0; NaN for a pair without a query to compare.

    Raises:
        ArgumentError: smooth below 0 or not below 1; queries below 1; a map of selected keys.

    Example:
        >>> weights = torch.tensor([[[[1.0, 0.0]], [[1.0, 0.0]], [[0.0, 1.0]]]])         # three heads
        >>> jensen_shannon(AttentionMap.from_weights(weights))
        tensor([[[0.0000, 0.0000, 0.6931],
                 [0.0000, 0.0000, 0.6931],
                 [0.6931, 0.6931, 0.0000]]])
    """
    if not 0 <= smooth < 1:
        raise ArgumentError(f"smooth must be at least 0 and below 1: got {smooth}; Clark 2019 uses 0.001")
    B, H, _, S = map.shape
    total, number = _sums_over_pairs(map, "jensen_shannon")
    real = map.real_keys.to(total.dtype)
    evenly = real / real.sum(-1, keepdim=True)  # [B, S]
    for b, rows, p, counts in _blocks(map, queries):
        p = p * (1 - smooth) + smooth * evenly[b] if smooth else p
        if map.sinks is not None:
            left = (map.sinks.detach()[:, None] - map.lse[b][:, rows]).exp()  # [H, t]
            p = torch.cat([p, left[..., None] * (1 - smooth)], dim=-1)
        entropy = torch.special.entr(p).sum(-1)  # [H, t]
        for head in range(H - 1):
            rest = slice(head + 1, H)
            between = torch.special.entr((p[head] + p[rest]) / 2).sum(-1)
            divergence = between - (entropy[head] + entropy[rest]) / 2
            total[b, head, rest] += torch.where(counts[head] & counts[rest], divergence, 0).sum(-1)
        number[b] += _pairs(counts, total.dtype)
    return (total + total.transpose(1, 2)).clamp(min=0) / number


@torch.no_grad()
def attention_overlap(map: AttentionMap, *, queries: int | None = None) -> Tensor:
    """Return the overlap of heads' weights: the mean over queries of sum_j p_ij^a p_ij^b.

    It is the element-wise product in Li 2018; their disagreement on attended positions is minus its mean over
    pairs of heads. 1 means that both heads attend to one key per query, and to the same one. So the diagonal
    is 1 only for a head that attends to a single key per query.

    Args:
        map: [B, H, T, S].
        queries: at most this many, evenly spaced among those that count; None: all.

    Returns:
        [B, H, H], symmetric; NaN for a pair without a query to compare.

    Raises:
        ArgumentError: queries below 1; a map of selected keys.

    Example:
        >>> weights = torch.tensor([[[[1.0, 0.0]], [[0.5, 0.5]]]])         # two heads
        >>> attention_overlap(AttentionMap.from_weights(weights))
        tensor([[[1.0000, 0.5000],
                 [0.5000, 0.5000]]])
    """
    total, number = _sums_over_pairs(map, "attention_overlap")
    with own_precision(map.device):
        for b, _, p, counts in _blocks(map, queries):
            flat = torch.where(counts[..., None], p, 0).flatten(1)  # [H, t * S]
            total[b] += flat @ flat.T
            number[b] += _pairs(counts, total.dtype)
    return total / number


def similarity(x: Tensor, counted: Tensor | None = None) -> Tensor:
    """Return the cosine similarity of heads' outputs or values: the mean over positions of cos(x_t^a, x_t^b).

    1: the same direction at all positions; 0: orthogonal. In Li 2018 the disagreement of a layer is minus the
    mean of this over pairs, `-one_number(...)`, but the paper also counts each head paired with itself. A
    vector of zeros has cosine 0. Gradients flow: a training loss may use it.

    Args:
        x: [B, H, T, D], outputs of heads before concatenation; or values, [B, Hk, S, D]: query heads of a
            group share them, so a group counts as one head.
        counted: bool [B, T], the positions that are no padding; None: all.

    Returns:
        [B, H, H], or [B, Hk, Hk] for values; NaN for a sequence that is all padding.

    Raises:
        ShapeError: x without four dimensions; counted that does not fit.
        ArgumentError: x that is not floating point; counted that is not bool.

    Example:
        >>> similarity(torch.tensor([[[[1.0, 0.0]], [[0.0, 2.0]], [[3.0, 3.0]]]]))         # three heads
        tensor([[[1.0000, 0.0000, 0.7071],
                 [0.0000, 1.0000, 0.7071],
                 [0.7071, 0.7071, 1.0000]]])
    """
    if x.ndim != 4:
        raise ShapeError(
            f"x must have 4 dimensions [B, H, T, D]: got {x.ndim}, {list(x.shape)}; split channels by head"
        )
    if not x.is_floating_point():
        raise ArgumentError(f"x must be floating point: got {x.dtype}; use x.float()")
    B, H, T, D = x.shape
    with own_precision(x.device):
        x = torch.nn.functional.normalize(x.to(tile_dtype(x.dtype)), dim=-1)
        number: Tensor | int = T
        if counted is not None:
            if counted.dtype != torch.bool:
                raise ArgumentError(f"counted must be bool: got {counted.dtype}; True is a real position")
            if list(counted.shape) != [B, T]:
                raise ShapeError(
                    f"counted must have one bool per position: {list(counted.shape)} for [B, T] = "
                    f"{[B, T]}; padding is False"
                )
            x = x * counted[:, None, :, None]
            number = counted.sum(-1)[:, None, None]
        flat = x.flatten(2)  # [B, H, T * D]
        return flat @ flat.transpose(1, 2) / number


def one_number(matrix: Tensor) -> Tensor:
    """Return a number per layer: the mean over pairs of different heads, NaN left out.

    Args:
        matrix: [B, H, H], or any [..., H, H].

    Returns:
        [B]; NaN for a single head.

    Raises:
        ShapeError: not square.

    Example:
        >>> one_number(torch.tensor([[1.0, 0.25], [0.75, 1.0]]))
        tensor(0.5000)
    """
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        raise ShapeError(
            f"matrix must be square [B, H, H]: got {list(matrix.shape)}; give the distance between every "
            "two heads"
        )
    same = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    return matrix.masked_fill(same, torch.nan).flatten(-2).nanmean(-1)


def _sums_over_pairs(map: AttentionMap, measure: str) -> tuple[Tensor, Tensor]:
    """Return two tensors of zeros [B, H, H] to sum over pairs of heads; the map must have full rows."""
    map.check_whole_rows(measure)
    B, H, _, _ = map.shape
    total = torch.zeros(B, H, H, dtype=tile_dtype(map.dtype), device=map.device)
    return total, total.clone()


def _blocks(map: AttentionMap, queries: int | None) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """Yield (sequence, queries [t], their weights [H, t, S], whether each counts [H, t]) in blocks."""
    if queries is not None and queries < 1:
        raise ArgumentError(f"queries must be at least 1: got {queries}; None takes all")
    counts = map.counted_queries()
    for b in range(len(map)):
        chosen = counts[b].any(0).nonzero().squeeze(-1).cpu()  # queries that count for any head
        if queries is not None and queries < len(chosen):
            steps = torch.arange(queries)  # the middles of equal intervals
            chosen = chosen[(2 * steps + 1) * len(chosen) // (2 * queries)]
        for rows, p in weights_in_blocks(map.select(batch=b), chosen):
            yield b, rows, p[0], counts[b][:, rows]


def _pairs(counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how many of these queries count for both heads of a pair, [H, H]."""
    numbers = counts.to(dtype)
    return numbers @ numbers.T


# Points and groups


ASYMMETRY = 1e-4  # tolerated difference of d[i, j] and d[j, i], as a share of the largest distance


def layout(distances: Tensor) -> Tensor:
    """Return 2-D points that approximate the distances of heads, by classical multidimensional scaling.

        the two largest eigenvectors of -1/2 J D^2 J, J = 1 - 1/N, each times the root of its eigenvalue

    The first axis is the one along which the heads differ most. Signs are fixed: on each axis the point
    farthest from 0 is positive. Torgerson 1952; of attention heads: Clark 2019, section 6.

    Args:
        distances: [N, N], symmetric, not negative.

    Returns:
        [N, 2], with mean 0.

    Raises:
        ShapeError: not square.
        ArgumentError: not finite, negative or not symmetric.

    Example:
        >>> layout(torch.tensor([[0.0, 3.0], [3.0, 0.0]]))
        tensor([[ 1.5000,  0.0000],
                [-1.5000,  0.0000]])
    """
    squares = _checked(distances).square()
    N = len(squares)
    points = torch.zeros(N, 2, dtype=squares.dtype, device=squares.device)
    centred = squares - squares.mean(0) - squares.mean(1, keepdim=True) + squares.mean()
    values, vectors = torch.linalg.eigh(-centred / 2)  # in ascending order
    used = min(2, N)
    axes = vectors[:, -used:].flip(-1) * values[-used:].flip(-1).clamp(min=0).sqrt()  # [N, used]
    # of points equally far out the first decides, with a tolerance for rounding
    far = axes.abs() >= axes.abs().amax(0) * (1 - 1e-9)
    sign = axes.gather(0, far.int().argmax(0, keepdim=True)).sign()
    points[:, :used] = axes * sign + 0.0  # no -0.0
    return points.to(distances.dtype if distances.is_floating_point() else torch.float32)


def clusters(distances: Tensor, count: int | None = None, threshold: float | None = None) -> list[int]:
    """Return groups of similar heads: the two nearest groups are joined, again and again.

    The distance of two groups is the mean distance of their heads (average linkage, UPGMA; Sokal and Michener
    1958). If several pairs of groups are equally near, the first pair is joined.

    Args:
        distances: [N, N], symmetric, not negative.
        count: stop when this number of groups is left;
        threshold: or stop when no two groups have this distance or less.

    Returns:
        The group of each head; groups are numbered 0, 1, ... in order of their first head.

    Raises:
        ShapeError: not square.
        ArgumentError: not finite, negative or not symmetric; both or neither of count and threshold; a count
            that is not 1 .. N; a threshold below 0.

    Example:
        >>> away = (torch.tensor([0.0, 5.0, 0.1, 5.2])[:, None] - torch.tensor([0.0, 5.0, 0.1, 5.2])).abs()
        >>> clusters(away, count=2)
        [0, 1, 0, 1]
        >>> clusters(away, threshold=0.15)
        [0, 1, 0, 2]
    """
    away = _checked(distances)
    N = len(away)
    if (count is None) == (threshold is None):
        raise ArgumentError(
            f"clusters must get one of count and threshold: got count={count}, threshold={threshold}; pass "
            "count= (the number of groups) or threshold= (the largest distance in a group)"
        )
    if count is not None and not 1 <= count <= N:
        raise ArgumentError(f"count must be between 1 and the number of heads: got {count} of {N}; use fewer")
    if threshold is not None and not threshold >= 0:
        raise ArgumentError(f"threshold must not be negative: got {threshold}; 0 groups only identical heads")
    away = away.fill_diagonal_(torch.inf)
    group, sizes = list(range(N)), [1] * N  # each group is named by its first head
    for _ in range(N - (count or 1)):
        near, far = divmod(int(away.argmin()), N)  # near < far: the first of equals, in a symmetric matrix
        if threshold is not None and float(away[near, far]) > threshold:
            break
        joined = (away[near] * sizes[near] + away[far] * sizes[far]) / (sizes[near] + sizes[far])
        away[near], away[:, near] = joined, joined
        away[far], away[:, far] = torch.inf, torch.inf
        away[near, near] = torch.inf
        sizes[near] += sizes[far]
        group = [near if mine == far else mine for mine in group]
    names = {first: number for number, first in enumerate(dict.fromkeys(group))}
    return [names[mine] for mine in group]


def _checked(distances: Tensor) -> Tensor:
    """Check distances; return a copy in float64, made exactly symmetric."""
    if distances.ndim != 2 or distances.shape[0] != distances.shape[1] or not len(distances):
        raise ShapeError(
            f"distances must be square [N, N]: got {list(distances.shape)}; for one sequence pass matrix[b]"
        )
    d = distances.detach().double()
    if not bool(torch.isfinite(d).all()):
        value = d[~torch.isfinite(d)][0].item()
        raise ArgumentError(
            f"distances must be finite: found {value}; leave out heads that were not measured"
        )
    if bool((d < 0).any()):
        raise ArgumentError(
            f"distances must not be negative: found {d.min().item():g}; pass a cosine similarity c as 1 - c"
        )
    difference = (d - d.T).abs().max().item()
    if difference > ASYMMETRY * d.max().item():
        raise ArgumentError(
            f"distances must be symmetric: [i, j] and [j, i] differ by {difference:g}; use (d + d.T) / 2"
        )
    return (d + d.T) / 2


# The heads of a model


@dataclass(frozen=True, eq=False)
class Diversity:
    """How the heads differ; print it.

    Attributes:
        attention: by layer, [H, H]: Jensen-Shannon divergence, in nats, from 0, the same, to log 2 = 0.69.
        outputs: by layer, [H, H]: cosine of the heads' outputs, where `watch(model, diversity=True)` measured
            it. The disagreement of Li 2018 is minus its mean.
        values: by layer, [Hk, Hk]: cosine of the values they read, likewise; grouped heads read the same.
        heads: all (layer, head), in the order of `distances`.
        distances: [N, N] between all of them, the square root of the divergence; None unless across=True
            (heads of one layer alone: that layer's).
    """

    attention: Mapping[Layer, Tensor]
    outputs: Mapping[Layer, Tensor] = field(default_factory=dict)
    values: Mapping[Layer, Tensor] = field(default_factory=dict)
    heads: tuple[tuple[Layer, int], ...] = ()
    distances: Tensor | None = None

    @property
    def by_layer(self) -> dict[Layer, float]:
        """One number per layer: the mean divergence of two different heads."""
        return {layer: float(one_number(matrix[None])) for layer, matrix in self.attention.items()}

    @property
    def number(self) -> float:
        """One number: the mean over layers."""
        numbers = list(self.by_layer.values())
        return sum(numbers) / len(numbers)

    def layout(self) -> Tensor:
        """Return a point per head, [N, 2], with about the distances of heads (`headwise.heads.layout`)."""
        return layout(self._distances())

    def clusters(self, count: int | None = None, threshold: float | None = None) -> list[int]:
        """Return a group's number per head, in the order of `heads` (`headwise.heads.clusters`)."""
        return clusters(self._distances(), count, threshold)

    def _distances(self) -> Tensor:
        if self.distances is None:
            raise ArgumentError(
                f"diversity must be measured across layers: it was within each of {len(self.attention)} "
                "layers; use diversity(heads, across=True)"
            )
        return self.distances

    def __str__(self) -> str:
        lines = [
            "mean Jensen-Shannon divergence between heads (nats; 0 = the same weights, 0.69 = no key in "
            "common)"
        ]
        for layer, number in self.by_layer.items():
            cosine = self.outputs.get(layer)
            text = "" if cosine is None else f", outputs' cosine {float(one_number(cosine[None])):.3f}"
            lines.append(f"  layer {layer}: {number:.3f}{text}")
        return "\n".join([*lines, f"  all: {self.number:.3f}"])


def diversity(
    heads: Mapping[Layer, LayerHeads] | LayerHeads | AttentionMap | Tensor,
    *,
    across: bool = False,
    smooth: float = 0.0,
    queries: int | None = QUERIES,
) -> Diversity:
    """Return how much heads differ in their weights and, if measured, in their outputs and values.

    Means are over queries: a longer sequence counts for more.

    Args:
        heads: watched heads of a model or of one layer; or a map, or dense weights [B, H, T, S].
        across: compare heads of different layers too, on at most 64 queries: for `layout` and `clusters`.
        smooth: the share of every row spread evenly before comparing; Clark 2019 uses 0.001.
        queries: compare at most this many queries of each sequence, evenly spaced; None: all.

    Raises:
        ArgumentError: nothing was watched; neither was a map kept nor diversity=True used (which measures
            with the default smooth and queries); layers of different lengths with `across`.
        BudgetExceeded: the rows of all heads to be compared across would not fit.
        ShapeError: weights that are not [B, H, T, S].

    Example:
        >>> import torch, headwise as hw
        >>> mha = hw.MultiHeadAttention(64, 4, causal=True)
        >>> _, weights = mha(torch.randn(2, 7, 64))
        >>> hw.diversity(weights).layout().shape
        torch.Size([4, 2])

    Clark 2019, section 6; Li 2018.
    """
    if isinstance(heads, Tensor):
        if heads.ndim != 4:
            raise ShapeError(
                f"weights must be [B, H, T, S]: got {list(heads.shape)}; pass one sequence as weights[None]"
            )
        heads = AttentionMap.from_weights(heads)
    if isinstance(heads, AttentionMap):
        counts = heads.counted_queries().sum(-1)
        matrix = _over_sequences([(jensen_shannon(heads, smooth=smooth, queries=queries), counts)])
        return _layer_diversity({0: matrix}, {}, {})
    layers = list(heads.values()) if isinstance(heads, Mapping) else [heads]
    if not all(hasattr(layer, "calls") for layer in layers):
        raise ArgumentError(
            f"heads must be watched heads, a map or weights: got {type(heads).__name__}; watch a model first"
        )
    if not layers:
        raise ArgumentError("heads must not be empty: 0 layers; run the model inside the watch block")
    attention = {layer.layer: _attention(layer, smooth, queries) for layer in layers}
    outputs, values = (
        {layer.layer: pairs for layer in layers if (pairs := _measured(layer, name)) is not None}
        for name in ("outputs", "values")
    )
    if len(layers) == 1:
        return _layer_diversity(attention, outputs, values)
    places = tuple((layer.name, head) for layer in layers for head in range(layer.num_heads))
    distances = _across(layers, smooth) if across else None
    return Diversity(attention, outputs, values, places, distances)


def _layer_diversity(
    attention: dict[Layer, Tensor], outputs: dict[Layer, Tensor], values: dict[Layer, Tensor]
) -> Diversity:
    """Return the diversity of a single layer."""
    ((layer, matrix),) = attention.items()
    heads = tuple((layer, head) for head in range(len(matrix)))
    return Diversity(attention, outputs, values, heads, matrix.clamp(min=0).sqrt())


def _over_sequences(measured: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean over queries, [H, H], from means of sequences [B, H, H] and their counts [B, H].

    A pair counts the queries of the head that has fewer, and none of a sequence in which it was not measured.
    """
    matrix = torch.cat([pairs.cpu().double() for pairs, _ in measured])
    counts = torch.cat([number.cpu().double() for _, number in measured])
    both = torch.minimum(counts[:, :, None], counts[:, None, :]).masked_fill(matrix.isnan(), 0)
    return ((matrix.nan_to_num() * both).sum(0) / both.sum(0)).to(measured[0][0].dtype)


def attention_between(
    layer: LayerHeads, *, smooth: float = 0.0, queries: int | None = QUERIES
) -> Tensor | None:
    """Return the divergence between the heads of a layer over all calls, [H, H] in nats, or None.

    It was measured while watching, with the default arguments, or is computed from maps. Calls with neither,
    such as steps of generation, are left out.
    """
    measured = []
    for call in layer.calls:
        T = call.shape[2]
        is_default = not smooth and min(T, T if queries is None else queries) == min(T, QUERIES)
        if "attention" in call.pairs and is_default:
            measured.append((call.pairs["attention"], call.queries))
        elif call.map is not None:
            pairs = jensen_shannon(call.map, smooth=smooth, queries=queries)
            measured.append((pairs, call.queries))
        elif "attention" in call.pairs:
            return None  # measured with other arguments
    return _over_sequences(measured) if measured else None


def _attention(layer: LayerHeads, smooth: float, queries: int | None) -> Tensor:
    """Return `attention_between`; raise `ArgumentError` if it is None."""
    between = attention_between(layer, smooth=smooth, queries=queries)
    if between is not None:
        return between
    if any("attention" in call.pairs for call in layer.calls):
        raise ArgumentError(
            f"maps must have been kept for smooth={smooth}, queries={queries}: {path_in_words(layer.path)} "
            f"was measured with smooth=0.0, queries={QUERIES}; use watch(model, keep=True), or leave these "
            "out"
        )
    raise ArgumentError(
        f"maps must have been kept, or diversity measured: {path_in_words(layer.path)} was called with "
        f"{list(layer.calls[-1].shape)}; use watch(model, diversity=True) or keep=True"
    )


def _measured(layer: LayerHeads, name: str) -> Tensor | None:
    """Return the mean over calls of a number of pairs of heads, or None if it was not measured."""
    calls = [call for call in layer.calls if name in call.pairs]
    measured = [(call.pairs[name], call.counts.get(name, call.queries)) for call in calls]
    return _over_sequences(measured) if measured else None


def _across(layers: list[LayerHeads], smooth: float) -> Tensor:
    """Return the distances between the heads of all layers, [N, N]."""
    maps = [layer.map for layer in layers]
    sizes = {(map.shape[0], *map.shape[2:]) for map in maps}
    if len(sizes) > 1:
        raise ArgumentError(
            f"layers must have the same lengths to be compared: got [B, T, S] of {sorted(sizes)}; compare "
            "the layers of one stack"
        )
    B, _, T, S = maps[0].shape
    chosen = torch.linspace(0, T - 1, min(T, ACROSS)).long().unique()
    dtype = tile_dtype(maps[0].dtype)
    shape = [B, sum(map.shape[1] for map in maps), len(chosen), S + 1]
    budget.check(
        2 * torch.Size(shape).numel() * dtype.itemsize,  # of each layer, and of all joined
        torch.device("cpu"),
        f"weights of all heads {shape}",
        "compare the heads of one layer: diversity(heads[layer])",
    )
    together = torch.cat([_with_sinks(map.select(queries=chosen)).to("cpu", dtype) for map in maps], dim=1)
    counted = maps[0].mask.counted(T)
    # the sink is not a real key, so that smoothing spreads nothing over it
    keys = torch.cat([maps[0].real_keys.cpu(), torch.zeros(B, 1, dtype=torch.bool)], dim=1)
    mask = Mask(keys=keys, queries=None if counted is None else counted[:, chosen].cpu())
    joined = AttentionMap.from_weights(together, mask)
    measured = jensen_shannon(joined, smooth=smooth), joined.counted_queries().sum(-1)
    return _over_sequences([measured]).clamp(min=0).sqrt()


def _with_sinks(map: AttentionMap) -> Tensor:
    """Return weights [B, H, T, S + 1]; the last key is the learned sink, with weight 0 if there is none."""
    map = map.detach()
    p, sinks, lse = map.dense(), map.sinks, map.lse[..., None]
    if sinks is None:
        return torch.nn.functional.pad(p, (0, 1))
    left = (sinks.to(lse.dtype)[:, None, None] - lse).exp().masked_fill(torch.isneginf(lse), 0)
    return torch.cat([p.to(lse.dtype), left], dim=-1)
