"""The express lane of a module: plain self-attention without gradients, with nothing in its way.

As in `engines/express.py`, and for the same reason: between two matrix products every line of Python starts
in a cold cache. At 2 x 10 tokens of width 512 the ordinary way took a quarter more than the products
themselves. Whatever is not let through here, right or wrong, is answered there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engines.express import straight
from ..functional import attention
from ..map import AttentionMap, make
from .packing import ordinary

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["plain_self_attention"]


def plain_self_attention(
    module: MultiHeadAttention, x: Tensor, need_weights: bool
) -> tuple[Tensor, AttentionMap | None] | None:
    """(heads [B, H, T, D], their map) of a module attending to x; None: not as plain as that."""
    held: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    packed, D = held["_packed"], held["head_dim"]
    if packed is None or torch.is_grad_enabled() or type(x) is not Tensor:
        return None
    if (
        held["window"] is not None
        or held["softcap"] is not None
        or held.get("sinks", held) is not None  # learned, they are in no module's own __dict__
    ):
        return None
    if held["training"] and held["dropout"]:
        return None
    shape = x.shape
    if len(shape) != 3 or D != held["value_dim"]:
        return None
    B, T, E = shape
    weight = packed.weight
    if E != weight.shape[1] or x.dtype is not weight.dtype or not x.numel() or not x.is_floating_point():
        return None
    if x.is_cpu is not weight.is_cpu or x.get_device() != weight.get_device():
        return None
    H, Hk, causal, scale = held["num_heads"], held["num_kv_heads"], held["causal"], held["scale"]
    modules = held["_modules"]
    layers = (modules["q_proj"], modules["k_proj"], modules["v_proj"])
    if not ordinary(x) or not packed.holds(layers):
        return None
    joined = torch.nn.functional.linear(x, packed.weight, packed.bias)
    heads = joined.view(B, T, H + 2 * Hk, D).transpose(1, 2)  # [B, H + 2 Hk, T, D]
    q, k, v = heads.split_with_sizes((H, Hk, Hk), 1)
    found = straight(q, k, v, causal, D**-0.5 if scale is None else scale)
    if found is None:  # a kernel that needs help with these sizes
        return attention(q, k, v, causal=causal, scale=scale)
    out, lse, scores = found
    return out, make(scores, lse) if need_weights else None
