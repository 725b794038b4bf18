"""What the measures of heads ask of a map: which queries count, which keys are real, rows a block at a time.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import budget
from ..engines.mass import visible
from ..engines.scores import tile_dtype
from ..engines.statistics import counted
from ..map import AttentionMap
from ..masks import Mask

__all__ = [
    "counted_queries",
    "first_keys",
    "mean_over",
    "mean_where_seen",
    "positions",
    "real_keys",
    "weights_in_blocks",
]

BLOCK = 32 * 2**20  # bytes of weights in memory at a time, where whole rows are needed


def counted_queries(map: AttentionMap) -> Tensor:
    """Which queries count in means, bool [B, H, T]: real ones that see something."""
    return counted("local", map._scores, map.lse)  # as `local` does: wherever they stand


def weights_in_blocks(map: AttentionMap, queries: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole rows of chosen queries, a block at a time: (queries int [t], weights [B, H, t, S]).

    Weights are in float32 at least; a block stays within `BLOCK` bytes and the memory budget, or is one row.
    """
    B, H, _, S = map.shape
    map, dtype = map.detach(), tile_dtype(map.dtype)
    room = min(BLOCK, budget.bytes_allowed(map.device))
    for some in queries.split(max(1, room // (B * H * S * dtype.itemsize))):
        yield some.to(map.device), map.select(queries=some).dense().to(dtype)


def mean_over(values: Tensor, counts: Tensor) -> Tensor:
    """[B, H], the mean of [B, 1 or H, T] over the queries that count."""
    return torch.where(counts, values, 0).sum(-1) / counts.sum(-1)


def mean_where_seen(map: AttentionMap, on: Mask) -> tuple[Tensor, Tensor]:
    """The mean weight on the keys that `on` allows, [B, H], and over how many queries it is, [B, H].

    It is over the queries that may see at least one of those keys; NaN where there is none.
    """
    counts = counted_queries(map) & (visible(map._scores, map.mask & on) > 0)
    return mean_over(map.mass(on, per="query"), counts), counts.sum(-1)


def positions(map: AttentionMap) -> Tensor:
    """Where the queries stand among the keys, int [T]."""
    return map._scores.at(slice(0, map.shape[2]))


def real_keys(map: AttentionMap) -> Tensor:
    """Which keys are no padding, bool [B, S]."""
    B, _, _, S = map.shape
    keys = map.mask.keys
    if keys is None:
        return torch.ones(B, S, dtype=torch.bool, device=map.device)
    return keys if keys.ndim == 2 else torch.arange(S, device=keys.device) < keys[:, None]


def first_keys(real: Tensor, count: int) -> Tensor:
    """The first `count` real keys of each sequence, bool [B, S]."""
    return real & (real.cumsum(-1) <= count)
