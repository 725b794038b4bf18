"""Self-attention of a module without options: projections, attention and out_proj in one step.

`mha(x)` and `mha(x, mask=padding)` come here first (`plain_self_attention`): between two matrix products
every line of Python starts in a cold cache. With gradients, and on a CPU, the three are one step
(`one_step.py`), which is one node of autograd where gradients are wanted. Without gradients on a GPU they are
a product, torch's own attention function (with padding headwise's) and a product (`served`); torch's function
gives no lse, so a map computes it when it is looked at, from what was projected. A call with more to it is
answered by `MultiHeadAttention._attend`.

Letters: B batch, T query_len, E d_model, H num_heads, Hk num_kv_heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from ..arguments import device_type
from ..engines import first_pass
from ..engines.kernels import HALF, MOST_CHANNELS, Kernel
from ..engines.scores import Scores
from ..map import AttentionMap, later
from ..masks import CAUSAL, NOTHING_HIDDEN, BoundMask, Mask
from ..scoring import Scoring
from .one_step import LSE_OF_EMPTY_ROW, CustomKernel, Parameters, Step, kernel_for, run
from .packed_weights import is_plain_call, is_untouched, parameters_of

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

SERVES = ("cuda",)  # devices on which Python takes longer than the kernels: `served` is for these
MOST_WITHOUT_LSE = 2**27  # weights for which lse may wait; it takes some 30 microseconds


def plain_self_attention(
    module: MultiHeadAttention, x: Tensor, mask: Mask | Tensor | None, need_weights: bool
) -> tuple[Tensor, AttentionMap | None] | None:
    """Return (output [B, T, E], map) of a module attending to x; None if the call has options.

    It runs `one_step`, or, on a GPU without gradients, `served` where that takes the call.
    """
    layers = packed_layers(module, x)
    if layers is None:
        return None
    fields: dict[str, Any] = module.__dict__
    padding, keys, causal = None, None, fields["causal"]
    if mask is not None:
        read = real_keys_of(mask, x)
        if read is None:
            return None
        keys, further = read
        causal = causal or further
    if device_type(x) in SERVES and not torch.is_grad_enabled():
        result = served(module, x, keys, causal, need_weights)
        if result is not None:
            return result
    if keys is not None and keys.ndim == 2:
        padding, keys = ~keys, None
    elif keys is not None:
        keys = keys.clone()  # a copy, since the caller may write to the mask later
        padding = torch.arange(x.shape[1], device=x.device) >= keys[:, None]
    kernel = kernel_for(
        x, None, fields["num_heads"], 0, causal, padding, fields["num_kv_heads"], fields["head_dim"]
    )
    outputs = None if kernel is None else run_packed_layers(module, layers, x, padding, causal, kernel)
    if outputs is None:
        return None
    output, projected, lse, step = outputs
    return output, _map(projected, lse, padding, keys, step) if need_weights else None


def scores_are_plain(fields: Mapping[str, Any]) -> bool:
    """Return True if a module of this __dict__ neither changes its scores nor drops weights."""
    return (
        fields["softcap"] is None
        and fields.get("sinks", fields) is None  # learned ones are not in the __dict__
        and not fields["alibi"]
        and fields.get("relative_bias", fields) is None
        and fields["qk_norm"] is None
        and fields["head_dim"] == fields["value_dim"]
        and not (fields["training"] and fields["dropout"])
    )


def packed_layers(module: MultiHeadAttention, x: Tensor) -> tuple[nn.Module, ...] | None:
    """Return q_proj, k_proj and v_proj of a module that attends to x in one step; None if it has options."""
    fields: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    packed = fields["_packed"]
    if packed is None or type(x) is not Tensor or not scores_are_plain(fields):
        return None
    if fields["window"] is not None or fields["rope"] is not None or fields["gate"] is not None:
        return None
    shape = x.shape
    if len(shape) != 3 or 0 in shape or (shape[2], x.dtype, x.device) != packed.takes:
        return None
    modules = fields["_modules"]
    layers = (modules["q_proj"], modules["k_proj"], modules["v_proj"])
    return layers if is_plain_call(x) and packed.holds(layers) else None


def run_packed_layers(
    module: MultiHeadAttention,
    layers: tuple[nn.Module, ...],
    x: Tensor,
    padding: Tensor | None,
    causal: bool,
    kernel: Kernel | CustomKernel,
) -> tuple[Tensor, Tensor, Tensor, Step] | None:
    """Return (output [B, T, E], projected, lse, step) for these layers; None if out_proj does not fit."""
    fields: dict[str, Any] = module.__dict__
    H, Hk, D, scale = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"], fields["scale"]
    packed, out_proj = fields["_packed"], fields["_modules"]["out_proj"]
    scale = D**-0.5 if scale is None else scale
    if type(scale) is not float or not scale > 0:
        return None
    last = parameters_of(out_proj, "weight", "bias") if is_untouched(out_proj) else None
    out_weight, out_bias = last or (None, None)  # otherwise out_proj is called
    if out_weight is not None and not fits_out_proj(out_weight, out_bias, x, H * D):
        return None
    parts = packed.parts(layers) if torch.is_grad_enabled() else ()
    step = Step(H, Hk, D, 0, causal, 0.0, kernel, scale)
    parameters = Parameters(packed.weight, packed.bias, out_weight, out_bias, parts)
    output, projected, lse, _ = run(x, None, parameters, padding, step)
    return output if out_weight is not None else out_proj(output), projected[0], lse, step


def _map(
    projected: Tensor, lse: Tensor, padding: Tensor | None, keys: Tensor | None, step: Step
) -> AttentionMap:
    """Return the map of a step, computed when it is used; no one else can write to its inputs."""
    grad = torch.is_grad_enabled()

    def build() -> tuple[Scores, Tensor]:
        with torch.inference_mode(projected.is_inference()), torch.set_grad_enabled(grad):
            q, k, _ = step.heads((projected,))
            scoring = Scoring(step.scale)
            if padding is None:
                return Scores(q, k, CAUSAL if step.causal else NOTHING_HIDDEN, scoring), lse
            real = ~padding
            right = 0 if step.causal else None
            rules = BoundMask(right=right, keys=real if keys is None else keys, queries=real)
            row_lse = lse.masked_fill(lse > LSE_OF_EMPTY_ROW / 2, -torch.inf)
            return Scores(q, k, rules, scoring), row_lse

    return later(build)


def real_keys_of(mask: Mask | Tensor, x: Tensor) -> tuple[Tensor | None, bool] | None:
    """Return (real keys, bool [B, T], or lengths [B], as in the mask; causal); None for any other mask."""
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


def fits_out_proj(weight: Tensor, bias: Tensor | None, x: Tensor, width: int) -> bool:
    """Return True if out_proj takes the heads' outputs unconverted, with its bias in the same product."""
    if weight.dtype is not x.dtype or weight.device != x.device or weight.shape[-1] != width:
        return False
    return bias is None or (bias.dtype is x.dtype and bias.device == weight.device)


# Without gradients on a GPU


def served(
    module: MultiHeadAttention, x: Tensor, keys: Tensor | None, causal: bool, need_weights: bool
) -> tuple[Tensor, AttentionMap | None] | None:
    """Return (output [B, T, E], map) of a module with plain packed layers; None if the call does not fit.

    keys: the real keys, as `real_keys_of` reads them; None: all are real.
    """
    fields: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    H, Hk, D, scale = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"], fields["scale"]
    dtype, (B, T, _) = x.dtype, x.shape
    if D > MOST_CHANNELS or D % 8 or (dtype not in HALF and (H != Hk or dtype is not torch.float32)):
        return None
    if scale is not None and (type(scale) is not float or not scale > 0):
        return None
    if keys is None and need_weights and B * H * T * T > MOST_WITHOUT_LSE:
        return None
    if keys is not None and dtype not in HALF:
        return None
    out_proj, packed = fields["_modules"]["out_proj"], fields["_packed"]
    last = parameters_of(out_proj, "weight", "bias") if is_untouched(out_proj) else None
    if last is None:
        return None
    weight, bias = last
    if weight is None or not fits_out_proj(weight, bias, x, H * D):
        return None
    projected = linear(x, packed.weight, packed.bias)  # [B, T, (H + 2 Hk) D]
    q, k, v = _heads(projected, H, Hk, D)
    rules, lse = CAUSAL if causal else NOTHING_HIDDEN, None
    scoring = Scoring(D**-0.5 if scale is None else scale)
    if keys is None:
        heads = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=H != Hk)
    else:
        keys = keys.clone()
        queries = keys if keys.ndim == 2 else torch.arange(T, device=x.device) < keys[:, None]
        rules = BoundMask(right=0 if causal else None, keys=keys, queries=queries)
        heads, lse, _ = first_pass.compute(Scores(q, k, rules, scoring), v)
    output = linear(heads.transpose(1, 2).flatten(2), weight, bias)
    if not need_weights:
        return output, None

    def build() -> tuple[Scores, Tensor | None]:
        with torch.inference_mode(projected.is_inference()):
            q, k, _ = _heads(projected, H, Hk, D)
            return Scores(q, k, rules, scoring), lse

    return output, later(build)


def _heads(projected: Tensor, H: int, Hk: int, D: int) -> tuple[Tensor, ...]:
    """Return q [B, H, T, D], k and v [B, Hk, T, D]."""
    B, T, _ = projected.shape
    return projected.view(B, T, H + 2 * Hk, D).transpose(1, 2).split_with_sizes((H, Hk, Hk), 1)
