"""The express lane of a module: plain self-attention without gradients on a CPU, with nothing in its way.

As in `engines/express.py`, and for the same reason: between two matrix products every line of Python starts
in a cold cache. At 2 x 10 tokens of width 512 the ordinary way took a quarter more than the products
themselves. Whatever is not let through here, right or wrong, is answered there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..engines.express import flash
from ..engines.scores import Scores
from ..map import AttentionMap, make
from ..masks import CAUSAL, NOTHING_HIDDEN
from ..scoring import Scoring
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
    if packed is None or torch.is_grad_enabled() or type(x) is not Tensor or not x.is_cpu:
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
    if E != packed.weight.shape[1] or x.dtype is not packed.weight.dtype or not x.numel():
        return None
    H, Hk, causal, scale = held["num_heads"], held["num_kv_heads"], held["causal"], held["scale"]
    modules = held["_modules"]
    layers = (modules["q_proj"], modules["k_proj"], modules["v_proj"])
    if (T == 1 and H != Hk) or not ordinary(x) or not packed.holds(layers):
        return None
    joined = torch.nn.functional.linear(x, packed.weight, packed.bias)
    heads = joined.view(B, T, H + 2 * Hk, D).transpose(1, 2)  # [B, H + 2 Hk, T, D]
    q, k, v = heads.split_with_sizes((H, Hk, Hk), 1)
    if scale is None:
        scale = D**-0.5
    out, lse = flash(q, k, v, 0.0, causal, scale=scale)
    if not need_weights:
        return out, None
    return out, make(Scores(q, k, CAUSAL if causal else NOTHING_HIDDEN, Scoring(scale)), lse)
