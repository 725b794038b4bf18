"""Evenness: a head against one that weighs all it sees alike.

Each function takes an `AttentionMap` and gives a number a head, [B, H]; no matrix is made. Padded queries and
queries that see nothing are left out, as in `AttentionMap.statistics`. No gradient flows.

Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..engines.mass import visible
from ..errors import ArgumentError
from ..map import AttentionMap
from ..masks import Mask
from .queries import counted_queries, mean_over

__all__ = ["locality", "spread"]


def spread(map: AttentionMap, entropy: Tensor | None = None) -> Tensor:
    """How evenly the head looks at all it may see: mean_i H_i / mean_i log n_i, n_i the keys query i may see.

    1: all alike. Entropy itself grows with the length (Clark 2019, section 3.3, calls 3.8 nats of 128 tokens
    broad), this does not. A learned sink counts as one more key, as in entropy.

    Args:
        map: [B, H, T, S].
        entropy: [B, H], where `map.statistics("entropy")` was measured already.

    Returns:
        [B, H]; NaN where no query has a choice.

    Example:
        >>> w = AttentionMap(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), causal=True)
        >>> spread(w)
        tensor([[1.]])
    """
    found = map.detach().statistics("entropy").entropy if entropy is None else entropy
    choices = visible(map._scores) + (map._scores.sinks is not None)
    most = mean_over(choices.clamp(min=1).to(found.dtype).log(), counted_queries(map))
    return torch.where(most > 0, found / most, torch.nan)  # an entropy of rounding over 0 would be infinite


def locality(map: AttentionMap, reach: int = 8, local: Tensor | None = None) -> Tensor:
    """How much more the head looks near by than evenly: (m - u) / (1 - u).

    m is the mean weight on keys at most `reach` away, u what m would be if each query weighed all it sees
    alike. 1: never farther; 0: no nearer than evenly. In a short text all is near, and m alone says nothing.

    Args:
        map: [B, H, T, S].
        reach: how near counts.
        local: [B, H], where `map.statistics("local", reach=reach)` was measured already.

    Returns:
        [B, H]; NaN where there is nothing farther away to see.

    Raises:
        ArgumentError: reach below 0; a map of chosen keys.

    Example:
        >>> itself = AttentionMap.from_weights(torch.eye(4)[None, None], Mask.causal())
        >>> locality(itself, reach=1)
        tensor([[1.]])
    """
    if reach < 0:
        raise ArgumentError(f"reach must not be negative: got {reach}; 0 is the query's own position")
    near = Mask.window(left_right=(reach, reach))
    found = map.mass(near) if local is None else local
    seen = visible(map._scores)  # [B, 1 or H, T]
    beyond = (seen - visible(map._scores, map.mask & near)).to(found.dtype) / seen.clamp(min=1)
    evenly = mean_over(beyond, counted_queries(map))
    return torch.where(evenly > 0, 1 - (1 - found) / evenly, torch.nan)
