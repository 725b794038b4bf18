"""A step over a `KVCache` inside `torch.compile`: one graph for every step, whatever the cache holds.

Where the step stands is a tensor on the device: new columns are written there, all of the cache's columns are
attended to, and a mask made of that tensor hides those that are not there yet. A ring keeps column c in slot
c % max_length; where a slot's column stands follows from the last one.

Letters: B batch, T query_len, M max_length, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..arguments import told
from ..errors import ArgumentError, ShapeError
from ..functional import attention
from ..map import AttentionMap
from ..masks import Mask

if TYPE_CHECKING:
    from .cache import KVCache
    from .multihead import MultiHeadAttention

__all__ = ["attend_in_graph", "check_in_graph"]

# without a number: one that changes from cache to cache cannot be made words of in a graph
FULL = "max_length must hold all tokens: one more than that came; make the cache larger, or crop it"


def check_in_graph(cache: KVCache, need_weights: bool = False, **given: object) -> None:
    """Raise for what a step inside a graph cannot do."""
    if cache._at is None:
        raise ArgumentError(
            f"cache must be reserved inside torch.compile, where shapes stay: got max_length="
            f"{cache.max_length} without a batch; make it with mha.cache(batch, max_length)"
        )
    if need_weights:
        raise ArgumentError(
            "need_weights must be False in a step over a cache inside torch.compile: got True, and a map of "
            "columns that are not there yet would tell wrong distances; pass need_weights=False, or look "
            "outside torch.compile"
        )
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"{name} must not be given in a step over a cache inside torch.compile: got {told(value)}; "
                "make such a step outside of it"
            )


def attend_in_graph(
    module: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, cache: KVCache
) -> tuple[Tensor, AttentionMap, Tensor]:
    """(heads [B, H, T, Dv], a map of all columns, values): the cache extended and attended to."""
    at, keys, values, M = cache._at, cache._k, cache._v, cache.max_length
    assert at is not None and keys is not None and values is not None and M is not None
    cache.check(k, v, module)
    (B, _, T, _), device = q.shape, q.device
    spots = at + torch.arange(T, device=device)  # columns of the queries
    slots = torch.arange(M, device=device)
    if not cache.ring:
        if T > M:
            raise ShapeError(f"max_length must hold all tokens: {T} > {M}; make the cache larger")
        torch._assert_async(at + T <= M, FULL)
        keys.index_copy_(2, spots, k)
        values.index_copy_(2, spots, v)
        columns = slots
    elif T == 1:
        keys.index_copy_(2, spots % M, k)
        values.index_copy_(2, spots % M, v)
        columns = spots - (spots - slots) % M
    else:  # what the last tokens overwrite, the first ones still see
        columns = torch.cat((at - 1 - (at - 1 - slots) % M, spots))
        block, held = (keys, values), (k, v)
        keys, values = torch.cat((keys, k), 2), torch.cat((values, v), 2)
        kept = min(T, M)
        for kind, new in zip(block, held, strict=True):
            kind.index_copy_(2, spots[T - kept :] % M, new[:, :, T - kept :])

    ahead = columns - spots[:, None]  # [T, S]
    seen = (ahead <= 0) & (columns >= 0)
    window = module.window
    if window is not None:
        seen = seen & (ahead > -window if isinstance(window, int) else ahead >= -window[0])
    if cache._first_there is not None:
        seen = seen & (columns >= cache._first_there[:, None])[:, None]  # [B, T, S]
    if T == 1:
        mask = Mask(keys=seen.reshape(-1, seen.shape[-1]).expand(B, -1))
    else:
        mask = Mask(allowed=seen[:, None] if seen.ndim == 3 else seen[None, None])
    at.add_(T)
    cache._seen = None  # which only the device knows now
    heads, weights = attention(
        q, keys, values, mask, False, None, module.scale, module.softcap, _bias_by_distance(module, q, ahead),
        module.sinks, module.dropout if module.training else 0.0,
    )  # fmt: skip
    return heads, weights, values


def _bias_by_distance(module: MultiHeadAttention, q: Tensor, ahead: Tensor) -> Tensor | None:
    """The layer's bias of keys so far ahead of their queries, [1, H, T, S]."""
    total: Tensor | None = None
    if module._slopes is not None:
        slopes = module._slopes.bias(q.device).slopes
        slopes = slopes.double() if q.dtype == torch.float64 else slopes
        total = -(slopes[:, None, None] * ahead.abs())[None]
    if module.relative_bias is not None:
        values = module.relative_bias().values  # [H, R]
        reach = values.shape[1] // 2
        own = values[:, ahead.clamp(-reach, reach) + reach][None]
        total = own if total is None else total + own
    return total
