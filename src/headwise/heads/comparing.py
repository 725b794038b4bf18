"""`diversity`: how much the heads of a model, or of one map, differ.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engines.scores import tile_dtype
from ..errors import ArgumentError, ShapeError
from ..map import AttentionMap
from ..masks import Mask
from .collection import Heads
from .diversity import jensen_shannon, one_number
from .layer import LayerHeads
from .layout import clusters, layout
from .naming import Layer

__all__ = ["Diversity", "diversity"]

ACROSS = 64  # queries at most that heads of different layers are compared by


@dataclass(frozen=True, eq=False)
class Diversity:
    """How the heads differ; print it.

    Attributes:
        attention: by layer, [H, H]: Jensen-Shannon divergence, in nats, from 0, the same, to log 2 = 0.69.
        outputs, values: by layer, [H, H]: cosine of what the heads say, and of the values they read, where
            `watch(model, diversity=True)` measured them. The disagreement of Li 2018 is minus their mean.
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
        """One number a layer: the mean divergence of two different heads."""
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
        """A group's number a head, in the order of `heads` (`headwise.heads.clusters`)."""
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
    what: Heads | LayerHeads | AttentionMap | Tensor,
    *,
    across: bool = False,
    smooth: float = 0.0,
    queries: int | None = 256,
) -> Diversity:
    """How much heads differ: by what they look at and, where it was measured, by what they say.

    Args:
        what: heads that were watched, of a model or of a layer; or a map, or dense weights [B, H, T, S].
        across: compare heads of different layers too, on at most 64 queries: for `layout` and `clusters`.
        smooth: the share of every row spread evenly before comparing; Clark 2019 uses 0.001.
        queries: at most this many of each sequence, evenly spaced; None: all.

    Raises:
        ArgumentError: nothing was watched; no map was kept nor diversity=True used; layers of different
            lengths cannot be compared across.
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
        found = _over_sequences(jensen_shannon(what, smooth=smooth, queries=queries))
        return _one({0: found}, {}, {})
    if isinstance(what, LayerHeads):
        layers = [what]
    elif isinstance(what, Heads):
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
    heads = tuple((layer.layer, head) for layer in layers for head in range(layer.num_heads))
    distances = _across(layers, smooth) if across else None
    return Diversity(attention, outputs, values, heads, distances)


def _one(
    attention: dict[Layer, Tensor], outputs: dict[Layer, Tensor], values: dict[Layer, Tensor]
) -> Diversity:
    ((layer, matrix),) = attention.items()
    heads = tuple((layer, head) for head in range(len(matrix)))
    return Diversity(attention, outputs, values, heads, matrix.clamp(min=0).sqrt())


def _over_sequences(matrix: Tensor) -> Tensor:
    """[H, H], the mean of [B, H, H] over the sequences that have any."""
    return matrix.nanmean(0).cpu()


def _attention(layer: LayerHeads, smooth: float, queries: int | None) -> Tensor:
    if not smooth:
        measured = _measured(layer, "attention")
        if measured is not None:
            return measured
    kept = [call.map for call in layer.calls if call.map is not None]
    found = [jensen_shannon(map, smooth=smooth, queries=queries) for map in kept]
    if not found:
        raise ArgumentError(
            f"maps must have been kept, or diversity measured: {layer.path} was called with "
            f"{list(layer.calls[-1].shape)}; use watch(model, diversity=True) or keep=True"
        )
    return _over_sequences(torch.cat(found))


def _measured(layer: LayerHeads, name: str) -> Tensor | None:
    found = [call.pairs[name] for call in layer.calls if name in call.pairs]
    return _over_sequences(torch.cat(found)) if found else None


def _across(layers: list[LayerHeads], smooth: float) -> Tensor:
    maps = [layer.map for layer in layers]
    sizes = {(map.shape[0], *map.shape[2:]) for map in maps}
    if len(sizes) > 1:
        raise ArgumentError(
            f"layers must have one length to be compared across: got [B, T, S] of {sorted(sizes)}; "
            "compare the layers of one stack"
        )
    T = maps[0].shape[2]
    chosen = torch.linspace(0, T - 1, min(T, ACROSS)).long().unique()
    parts = [map.select(queries=chosen) for map in maps]
    dtype = tile_dtype(maps[0].dtype)
    together = torch.cat([part.dense().to("cpu", dtype) for part in parts], dim=1)  # [B, all heads, t, S]
    counted = maps[0].mask.counted(T)
    mask = None if counted is None else Mask(queries=counted[:, chosen].cpu())
    divergence = jensen_shannon(AttentionMap.from_weights(together, mask), smooth=smooth)
    return _over_sequences(divergence).clamp(min=0).sqrt()
