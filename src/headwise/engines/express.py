"""The express lane: the plainest call there is, with nothing in its way.

After a long kernel every line of Python starts in a cold cache: what takes 30 microseconds in a tight loop
took 250 between two calls of 4 ms. A call without mask, options or gradients on a CPU therefore goes straight
to the kernel after the few checks below. Whatever they do not let through, right or wrong, takes the ordinary
way and is answered, or refused, there: this lane decides nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..masks import CAUSAL, NOTHING_HIDDEN
from ..scoring import Scoring
from .scores import Scores

__all__ = ["plainest_on_cpu"]

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def plainest_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Scores] | None:
    """(output, lse, scores) of self-attention or of a full one, or None: not as plain as that."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    shape, keys = q.shape, k.shape
    if len(shape) != 4 or len(keys) != 4 or v.shape != keys or not q.is_cpu or not k.is_cpu or not v.is_cpu:
        return None
    B, H, T, D = shape
    if keys[0] != B or keys[3] != D or not q.numel() or not k.numel() or H % keys[1]:
        return None
    dtype = q.dtype
    if dtype is not k.dtype or dtype is not v.dtype or not dtype.is_floating_point:
        return None
    if (causal and keys[2] != T) or (T == 1 and H != keys[1]):
        return None
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return None
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    if scale is None:
        scale = D**-0.5
    elif type(scale) is not float:
        return None
    out, lse = flash(q, k, v, 0.0, causal, scale=scale)
    return out, lse, Scores(q, k, CAUSAL if causal else NOTHING_HIDDEN, Scoring(scale))
