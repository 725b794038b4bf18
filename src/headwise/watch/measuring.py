"""What one training step does to its heads: sums over all its calls, kept where the model is, read once.

Letters: B batch, T query_len, H num_heads, Dv value_dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..engines.statistics import ROW_STATISTICS, counted
from ..heads.fetching import fetched
from ..map import AttentionMap
from .calls import Call, in_backward

__all__ = ["OUTPUT", "Measuring", "Values"]

OUTPUT = "output"  # the mean norm of a head's output

Values = dict[str, float]  # of one head, by statistic


class Measuring:
    """A listener for one step.

    Args:
        names: row statistics.
        outputs: whether to measure the norm of what heads say, too.

    Attributes:
        layers: path -> statistic -> [2, H]: the sum over queries, or their largest, and how many they are.
    """

    def __init__(self, names: Sequence[str], outputs: bool) -> None:
        self.names, self.outputs = tuple(names), outputs
        self.layers: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def hear(self, call: Call) -> None:
        """Add one call to what was heard before."""
        if in_backward():
            return
        layer = self.layers.setdefault(call.path, {})
        weights = call.weights.detach()
        scored = call.value is not None  # else only weights are to be had, without the scores behind them
        names = tuple(name for name in self.names if scored or name != "max_logit")
        found = dict(weights.statistics(*names)) if names else {}  # [B, H] each
        counts = _counts(weights, names)
        for name, values in found.items():
            count = counts[ROW_STATISTICS[name].offset].sum(-1).to(values.dtype)  # [B, H]
            largest = ROW_STATISTICS[name].largest
            value = values.amax(0) if largest else torch.where(count > 0, values * count, 0).sum(0)
            layer[name] = _joined(layer.get(name), torch.stack([value, count.sum(0)]), largest)
        if self.outputs and call.output is not None:
            precise = torch.promote_types(call.output.dtype, torch.float32)
            norms = torch.linalg.vector_norm(call.output.detach(), dim=-1, dtype=precise)  # [B, H, T]
            counting = counts[None]
            both = torch.stack(
                [norms.masked_fill(~counting, 0).sum((0, 2)), counting.sum((0, 2)).to(precise)]
            )
            layer[OUTPUT] = _joined(layer.get(OUTPUT), both)

    def read(self) -> dict[str, list[Values]]:
        """path -> head -> statistic -> value; what had no query to be measured at is left out."""
        sums = [(path, name, two) for path, layer in self.layers.items() for name, two in layer.items()]
        found: dict[str, list[Values]] = {path: [] for path in self.layers}
        for (path, name, _), (values, counts) in zip(sums, fetched([two for _, _, two in sums]), strict=True):
            heads = found[path]
            heads += [{} for _ in range(len(values) - len(heads))]
            for head, value, count in zip(heads, values.tolist(), counts.tolist(), strict=True):
                if count:
                    largest = name != OUTPUT and ROW_STATISTICS[name].largest
                    head[name] = value if largest else value / count
        return found


def _counts(weights: AttentionMap, names: Iterable[str]) -> dict[int | None, Tensor]:
    """Which queries count, by where a statistic looks for a key: bool [B, H, T] each."""
    like = {None: "entropy"} | {ROW_STATISTICS[name].offset: name for name in names}
    return {offset: counted(name, weights._scores, weights.lse) for offset, name in like.items()}


def _joined(known: Tensor | None, new: Tensor, largest: bool = False) -> Tensor:
    """Two calls as one, [2, H]."""
    if known is None:
        return new
    return torch.stack([torch.maximum(known[0], new[0]), known[1] + new[1]]) if largest else known + new
