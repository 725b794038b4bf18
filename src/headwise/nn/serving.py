"""Self-attention of a module on a GPU without gradients: what a served model does, with the least in between.

`padding_of` and `goes_with` are asked on every device.

At everyday sizes a GPU waits for Python. Plain calls are a product, torch's own attention function and a
product, as one would write them by hand; torch's function gives no lse, so a map that is looked at makes it
then, of what was projected, which nobody else holds. With padding in between are our kernels, which know of
rows that see nothing and skip keys that nobody sees.

Letters: B batch, T query_len, E d_model, H num_heads, Hk num_kv_heads, D head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from ..engines import planned
from ..engines.kernels import HALF, MOST_CHANNELS
from ..engines.scores import Scores
from ..map import AttentionMap, later
from ..masks import CAUSAL, NOTHING_HIDDEN, BoundMask, Mask
from ..scoring import Scoring
from .packed_weights import is_untouched, parameters_of

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["MOST_WITHOUT_LSE", "goes_with", "padding_of", "served"]

MOST_WITHOUT_LSE = 2**27  # weights of which lse may be left for later: making it takes some 30 microseconds


def served(
    module: MultiHeadAttention, x: Tensor, mask: Mask | Tensor | None, need_weights: bool
) -> tuple[Tensor, AttentionMap | None] | None:
    """(output [B, T, E], the map) of a module whose layers are bare and packed; None: not a call for this."""
    held: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    H, Hk, D, scale = held["num_heads"], held["num_kv_heads"], held["head_dim"], held["scale"]
    dtype, (B, T, _) = x.dtype, x.shape
    if D > MOST_CHANNELS or D % 8 or (dtype not in HALF and (H != Hk or dtype is not torch.float32)):
        return None
    if scale is not None and (type(scale) is not float or not scale > 0):
        return None
    causal, rules = held["causal"], None
    if mask is not None:
        rules = _rules_of(mask, causal, x) if dtype in HALF else None
        if rules is None:
            return None
    elif need_weights and B * H * T * T > MOST_WITHOUT_LSE:
        return None
    out_proj, packed = held["_modules"]["out_proj"], held["_packed"]
    last = parameters_of(out_proj, "weight", "bias") if is_untouched(out_proj) else None
    if last is None:
        return None
    weight, bias = last
    if weight is None or not goes_with(weight, bias, x, H * D):
        return None
    projected = linear(x, packed.weight, packed.bias)  # [B, T, (H + 2 Hk) D]
    q, k, v = _heads(projected, H, Hk, D)
    scoring, lse = Scoring(D**-0.5 if scale is None else scale), None
    if rules is None:
        heads = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=H != Hk)
    else:
        heads, lse, _ = planned.answer(Scores(q, k, rules, scoring), v)
    output = linear(heads.transpose(1, 2).flatten(2), weight, bias)
    if not need_weights:
        return output, None

    def build() -> tuple[Scores, Tensor | None]:
        with torch.inference_mode(projected.is_inference()):
            q, k, _ = _heads(projected, H, Hk, D)
            seen = (CAUSAL if causal else NOTHING_HIDDEN) if rules is None else rules
            return Scores(q, k, seen, scoring), lse

    return output, later(build)


def _heads(projected: Tensor, H: int, Hk: int, D: int) -> tuple[Tensor, ...]:
    """q [B, H, T, D], k and v [B, Hk, T, D]"""
    B, T, _ = projected.shape
    return projected.view(B, T, H + 2 * Hk, D).transpose(1, 2).split_with_sizes((H, Hk, Hk), 1)


def _rules_of(mask: Mask | Tensor, causal: bool, x: Tensor) -> Mask | None:
    """Padding of keys, and of queries in the same places, as rules; None: there is more to it."""
    read = padding_of(mask, x)
    if read is None:
        return None
    keys, further = read
    right = 0 if causal or further else None
    if keys is None:
        return CAUSAL if right == 0 else NOTHING_HIDDEN
    keys = keys.clone()
    queries = keys if keys.ndim == 2 else torch.arange(x.shape[1], device=x.device) < keys[:, None]
    return BoundMask(right=right, keys=keys, queries=queries)


# What one step asks as well


def padding_of(mask: Mask | Tensor, x: Tensor) -> tuple[Tensor | None, bool] | None:
    """(real keys, bool [B, T], or lengths [B], as they were given; causal); None: there is more to a mask."""
    B, T, _ = x.shape
    if type(mask) is Tensor:
        if mask.dtype is not torch.bool or mask.shape != (B, 1, 1, T) or mask.device != x.device:
            return None
        return mask[:, 0, 0], False
    if type(mask) is not Mask or not mask.is_padded_band or mask.queries is not None or mask.left is not None:
        return None
    if mask.right is not None and mask.right != 0:
        return None
    causal, keys = mask.right == 0, mask.keys
    if keys is None:
        return None, causal
    if type(keys) is not Tensor or keys.device != x.device:
        return None
    fits = keys.shape == (B, T) or (keys.shape == (B,) and not (keys.is_cpu and int(keys.max()) > T))
    return (keys, causal) if fits else None


def goes_with(weight: Tensor, bias: Tensor | None, x: Tensor, width: int) -> bool:
    """Whether the last projection takes what the heads say, and adds a bias in the same product."""
    if weight.dtype is not x.dtype or weight.device != x.device or weight.shape[-1] != width:
        return False
    return bias is None or (bias.dtype is x.dtype and bias.device == weight.device)
