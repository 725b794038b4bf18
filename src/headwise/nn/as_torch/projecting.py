"""From torch's inputs to heads and back, without copies.

Batch or length may come first: a product over the last dimension does not mind, and heads are views of it.

Letters: N batch, L query_len, S key_len, E embed_dim, H num_heads, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from .contract import check_widths

if TYPE_CHECKING:
    from .module import MultiheadAttention

__all__ = ["heads_of", "linear", "thirds", "with_more_keys"]

Heads = tuple[Tensor, Tensor, Tensor]


def heads_of(module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, first: int) -> Heads:
    """q [N, H, L, D], k and v [N, H, S, D] from 3-D inputs; `first`: which dimension is the batch."""
    E, weight, bias = module.embed_dim, module.in_proj_weight, module.in_proj_bias
    if not module._qkv_same_embed_dim:
        weights: Any = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        check_widths((query, key, value), weights, bias)
        q, k, v = _three(query, key, value, weights, bias)
    elif weight is None:
        raise AssertionError("use_separate_proj_weight is False but in_proj_weight is None")
    elif key is not value:
        q, k, v = _three(query, key, value, weight.chunk(3), bias)
    elif query is key:
        return thirds(linear(query, weight, bias), module.num_heads, first)
    else:
        weights, biases = weight.split([E, 2 * E]), (None, None) if bias is None else bias.split([E, 2 * E])
        q = linear(query, weights[0], biases[0])
        k, v = _split(linear(key, weights[1], biases[1]), 2, E)
    H = module.num_heads
    return _by_head(q, H, first), _by_head(k, H, first), _by_head(v, H, first)


def thirds(joint: Tensor, H: int, first: int) -> Heads:
    """q, k and v from one product, [.., .., 3 E]."""
    q, k, v = _by_head(joint, 3 * H, first).chunk(3, 1)
    return q, k, v


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's, which takes a bias of another dtype only where it does not fuse it."""
    if bias is not None and bias.dtype != weight.dtype:
        return functional.linear(x, weight) + bias
    return functional.linear(x, weight, bias)


def _three(query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None) -> Heads:
    biases: Any = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (linear(*each) for each in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def _split(joint: Tensor, count: int, E: int) -> Any:
    """[.., count * E] -> count times [.., E], as views."""
    return joint.unflatten(-1, (count, E)).unbind(-2)


def _by_head(x: Tensor, H: int, first: int) -> Tensor:
    """[N, L, E] or [L, N, E] -> [N, H, L, D]"""
    x = x.unflatten(-1, (H, -1))
    return x.transpose(1, 2) if first == 0 else x.permute(1, 2, 0, 3)


def with_more_keys(module: MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v followed by the keys a module brings along: bias_k and bias_v, then zeros."""
    N, H, _, D = k.shape
    if module.bias_k is not None and module.bias_v is not None:
        k, v = (
            torch.cat([x, bias.view(1, H, 1, D).expand(N, -1, -1, -1)], 2)
            for x, bias in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        nothing = k.new_zeros(N, H, 1, D)
        k, v = torch.cat([k, nothing], 2), torch.cat([v, nothing], 2)
    return k, v
