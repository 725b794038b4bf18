"""An attention layer as pruning sees it: how many heads it has, and how to keep some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ...errors import ArgumentError

__all__ = ["Family", "Prunable", "kept_kv_heads"]


@dataclass(frozen=True)
class Prunable:
    """A layer whose heads can be taken out.

    Letters: H num_heads, Hk num_kv_heads.
    """

    path: str
    num_heads: int
    num_kv_heads: int
    keep: Callable[[Sequence[int], Sequence[int]], None]  # (heads, key/value heads) that stay


# A family looks at the layer at a path of a model; None: not one of its own.
Family = Callable[[nn.Module, str], Prunable | None]


def kept_kv_heads(layer: Prunable, kept: Sequence[int]) -> list[int]:
    """The key/value heads that some query heads need.

    Query heads come in groups of H / Hk that share a key/value head. Groups may go as a whole; those that
    stay must keep the same number of query heads each.

    Raises:
        ArgumentError: no head stays; groups of different sizes would be left.
    """
    path, H, Hk = layer.path, layer.num_heads, layer.num_kv_heads
    if not kept:
        raise ArgumentError(
            f"heads must leave one in every layer: all {H} of {path} would go; keep one, or take the whole "
            "layer out of the model"
        )
    group = H // Hk
    left = [sum(head // group == kv_head for head in kept) for kv_head in range(Hk)]
    if len({count for count in left if count}) > 1:
        most = max(left)
        short = [kv_head for kv_head, count in enumerate(left) if 0 < count < most]
        raise ArgumentError(
            f"heads must leave groups of one size: in {path} the {Hk} key/value heads would serve "
            f"{', '.join(map(str, left))} of {group} query heads each; prune as many in every group, or all "
            f"of group {' and '.join(_span(kv_head, group) for kv_head in short)}"
        )
    return [kv_head for kv_head, count in enumerate(left) if count]


def _span(kv_head: int, group: int) -> str:
    return f"{kv_head} (heads {kv_head * group} to {(kv_head + 1) * group - 1})"
