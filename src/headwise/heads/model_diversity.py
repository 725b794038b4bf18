"""`diversity`: how much the heads of a model, or of one map, differ.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .. import budget
from ..engines.scores import tile_dtype
from ..errors import ArgumentError, ShapeError
from ..map import AttentionMap
from ..masks import Mask
from .head_distances import QUERIES, clusters, jensen_shannon, layout, one_number
from .layer import LayerHeads
from .layer_names import Layer
from .record import EVERYONE, Record

__all__ = ["Diversity", "attention_between", "diversity"]

ACROSS = 64  # queries at most that heads of different layers are compared by


@dataclass(frozen=True, eq=False)
class Diversity:
    """How the heads differ; print it.

    Attributes:
        attention: by layer, [H, H]: Jensen-Shannon divergence, in nats, from 0, the same, to log 2 = 0.69.
        outputs: by layer, [H, H]: cosine of what the heads say, where `watch(model, diversity=True)` measured
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
        """Every head as a point, [N, 2], about as far apart as they differ (`headwise.heads.layout`)."""
        return layout(self._distances())

    def clusters(self, count: int | None = None, threshold: float | None = None) -> list[int]:
        """A group's number per head, in the order of `heads` (`headwise.heads.clusters`)."""
        return clusters(self._distances(), count, threshold)

    def _distances(self) -> Tensor:
        if self.distances is None:
            raise ArgumentError(
                f"heads must be compared across layers for this: there are {len(self.attention)} layers; use "
                "diversity(heads, across=True)"
            )
        return self.distances

    def __str__(self) -> str:
        lines = ["mean Jensen-Shannon divergence between heads (nats; 0: the same, 0.69: nothing in common)"]
        for layer, number in self.by_layer.items():
            cosine = self.outputs.get(layer)
            said = "" if cosine is None else f", outputs' cosine {float(one_number(cosine[None])):.3f}"
            lines.append(f"  layer {layer}: {number:.3f}{said}")
        return "\n".join([*lines, f"  all: {self.number:.3f}"])


def diversity(
    what: Mapping[Layer, LayerHeads] | LayerHeads | AttentionMap | Tensor,
    *,
    across: bool = False,
    smooth: float = 0.0,
    queries: int | None = QUERIES,
) -> Diversity:
    """How much heads differ: by what they look at and, where it was measured, by what they say.

    Means are over queries: a longer sequence counts for more.

    Args:
        what: heads that were watched, of a model or of a layer; or a map, or dense weights [B, H, T, S].
        across: compare heads of different layers too, on at most 64 queries: for `layout` and `clusters`.
        smooth: the share of every row spread evenly before comparing; Clark 2019 uses 0.001.
        queries: at most this many of each sequence, evenly spaced; None: all.

    Raises:
        ArgumentError: nothing was watched; no map was kept nor diversity=True used (which measures with
            smooth and queries as they are here by default); layers of different lengths cannot be compared
            across.
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
    if isinstance(what, Tensor):
        if what.ndim != 4:
            raise ShapeError(
                f"weights must be [B, H, T, S]: got {list(what.shape)}; one sequence is weights[None]"
            )
        what = AttentionMap.from_weights(what)
    if isinstance(what, AttentionMap):
        counts = what.counted_queries().sum(-1)
        matrix = _over_sequences([(jensen_shannon(what, smooth=smooth, queries=queries), counts)])
        return _one({0: matrix}, {}, {})
    if isinstance(what, LayerHeads):
        layers = [what]
    elif isinstance(what, Mapping) and all(isinstance(layer, LayerHeads) for layer in what.values()):
        layers = list(what.values())
    else:
        raise ArgumentError(
            f"what must be heads, a map or weights: got {type(what).__name__}; watch a model first"
        )
    if not layers:
        raise ArgumentError("heads must not be empty: 0 layers; run the model inside the watch block")
    attention = {layer.layer: _attention(layer, smooth, queries) for layer in layers}
    outputs, values = (
        {layer.layer: pairs for layer in layers if (pairs := _measured(layer, name)) is not None}
        for name in ("outputs", "values")
    )
    if len(layers) == 1:
        return _one(attention, outputs, values)
    heads = tuple((layer.name, head) for layer in layers for head in range(layer.num_heads))
    distances = _across(layers, smooth) if across else None
    return Diversity(attention, outputs, values, heads, distances)


def _one(
    attention: dict[Layer, Tensor], outputs: dict[Layer, Tensor], values: dict[Layer, Tensor]
) -> Diversity:
    ((layer, matrix),) = attention.items()
    heads = tuple((layer, head) for head in range(len(matrix)))
    return Diversity(attention, outputs, values, heads, matrix.clamp(min=0).sqrt())


def _over_sequences(measured: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[H, H], the mean over queries, from the means of sequences [B, H, H] and their counts [B, H].

    A pair counts the queries of the head that has fewer; sequences in which it was not measured, none.
    """
    matrix = torch.cat([pairs.cpu().double() for pairs, _ in measured])
    counts = torch.cat([number.cpu().double() for _, number in measured])
    both = torch.minimum(counts[:, :, None], counts[:, None, :]).masked_fill(matrix.isnan(), 0)
    return ((matrix.nan_to_num() * both).sum(0) / both.sum(0)).to(measured[0][0].dtype)


def attention_between(
    layer: LayerHeads, *, smooth: float = 0.0, queries: int | None = QUERIES
) -> Tensor | None:
    """How differently the heads of a layer look, [H, H] in nats, over all calls; None: it cannot be told.

    As measured while watching where that is what is asked for, else from maps. Calls of which neither was
    kept, as steps of generation, are left out.
    """
    measured = []
    for call in layer.calls:
        if "attention" in call.pairs and not smooth and _same(queries, call):
            measured.append((call.pairs["attention"], call.counts[EVERYONE]))
        elif call.map is not None:
            pairs = jensen_shannon(call.map, smooth=smooth, queries=queries)
            measured.append((pairs, call.counts[EVERYONE]))
        elif "attention" in call.pairs:
            return None  # measured, but not so
    return _over_sequences(measured) if measured else None


def _same(queries: int | None, call: Record) -> bool:
    """Whether so many queries are those that were compared while watching."""
    T = call.shape[2]
    return min(T, T if queries is None else queries) == min(T, QUERIES)


def _attention(layer: LayerHeads, smooth: float, queries: int | None) -> Tensor:
    between = attention_between(layer, smooth=smooth, queries=queries)
    if between is not None:
        return between
    if any("attention" in call.pairs for call in layer.calls):
        raise ArgumentError(
            f"maps must have been kept for smooth={smooth}, queries={queries}: {layer.path} was measured "
            f"with smooth=0.0, queries={QUERIES}; use watch(model, keep=True), or leave these out"
        )
    raise ArgumentError(
        f"maps must have been kept, or diversity measured: {layer.path} was called with "
        f"{list(layer.calls[-1].shape)}; use watch(model, diversity=True) or keep=True"
    )


def _measured(layer: LayerHeads, name: str) -> Tensor | None:
    measured = [
        (call.pairs[name], call.counts.get(name, call.counts[EVERYONE]))
        for call in layer.calls
        if name in call.pairs
    ]
    return _over_sequences(measured) if measured else None


def _across(layers: list[LayerHeads], smooth: float) -> Tensor:
    maps = [layer.map for layer in layers]
    sizes = {(map.shape[0], *map.shape[2:]) for map in maps}
    if len(sizes) > 1:
        raise ArgumentError(
            f"layers must have one length to be compared across: got [B, T, S] of {sorted(sizes)}; "
            "compare the layers of one stack"
        )
    B, _, T, S = maps[0].shape
    chosen = torch.linspace(0, T - 1, min(T, ACROSS)).long().unique()
    dtype = tile_dtype(maps[0].dtype)
    shape = [B, sum(map.shape[1] for map in maps), len(chosen), S + 1]
    budget.check(
        2 * torch.Size(shape).numel() * dtype.itemsize,  # each layer's, and all of them joined
        torch.device("cpu"),
        f"weights of all heads {shape}",
        "compare the heads of one layer: diversity(heads[layer])",
    )
    together = torch.cat([_with_sinks(map.select(queries=chosen)).to("cpu", dtype) for map in maps], dim=1)
    counted = maps[0].mask.counted(T)
    # a sink is no key that something could be spread over
    keys = torch.cat([maps[0].real_keys.cpu(), torch.zeros(B, 1, dtype=torch.bool)], dim=1)
    mask = Mask(keys=keys, queries=None if counted is None else counted[:, chosen].cpu())
    joined = AttentionMap.from_weights(together, mask)
    measured = jensen_shannon(joined, smooth=smooth), joined.counted_queries().sum(-1)
    return _over_sequences([measured]).clamp(min=0).sqrt()


def _with_sinks(map: AttentionMap) -> Tensor:
    """Weights [B, H, T, S + 1]: the last key is the learned sink, without weight where there is none."""
    map = map.detach()
    p, sinks, lse = map.dense(), map.sinks, map.lse[..., None]
    if sinks is None:
        return torch.nn.functional.pad(p, (0, 1))
    left = (sinks.to(lse.dtype)[:, None, None] - lse).exp().masked_fill(torch.isneginf(lse), 0)
    return torch.cat([p.to(lse.dtype), left], dim=-1)
