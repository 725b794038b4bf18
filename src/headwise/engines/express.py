"""The express lane: the plainest calls there are, with nothing in their way.

After a long kernel every line of Python starts in a cold cache: what takes 30 microseconds in a tight loop
took 250 between two calls of 4 ms; and a GPU that is faster than that waits. A call without mask, options or
gradients therefore goes straight to the kernel after the few checks below, and so do the weights of such a
call where they are few. Whatever they do not let through, right or wrong, takes the ordinary way and is
answered, or refused, there: this lane decides nothing else. Which kernel a GPU uses is the table's decision
here as anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import budget, masks
from ..masks import NOTHING_HIDDEN
from ..scoring import Scoring
from . import kernels, table
from .scores import Scores, settle_exponentials

__all__ = ["few_weights_on_cpu", "plainest", "straight"]

WHOLE = (torch.float32, torch.float64)  # dtypes that weights are computed in
FEW = 2**16  # more, and what stands around them does not matter

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def plainest(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Scores] | None:
    """(output, lse, scores) of self-attention or of a full one, or None: not as plain as that."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    shape, keys = q.shape, k.shape
    if len(shape) != 4 or len(keys) != 4 or v.shape != keys:
        return None
    if not (q.is_cpu and k.is_cpu and v.is_cpu) and not (q.is_cuda and q.device == k.device == v.device):
        return None
    B, H, T, D = shape
    if keys[0] != B or keys[3] != D or not q.numel() or not k.numel() or H % keys[1]:
        return None
    dtype = q.dtype
    if dtype is not k.dtype or dtype is not v.dtype or not dtype.is_floating_point:
        return None
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(q.device.type):
        return None
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    if scale is None:
        scale = D**-0.5
    elif type(scale) is not float:
        return None
    return straight(q, k, v, causal, scale)


def straight(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Scores] | None:
    """(output, lse, scores) of tensors that have been found plain; None where a kernel would need help."""
    _, H, T, D = q.shape
    _, Hk, S, _ = k.shape
    if (causal and S != T) or (T == 1 and H != Hk):
        return None
    scores = Scores(q, k, masks.CAUSAL if causal else NOTHING_HIDDEN, Scoring(scale))
    if q.is_cpu:
        out, lse = flash(q, k, v, 0.0, causal, scale=scale)
        return out, lse, scores
    call = table.Call(scores, v)
    kernel = table.choose(call).kernels.get("cuda")
    if kernel is None or D % kernel.channels or (H != Hk and not kernel.takes_groups):
        return None
    table.cudnn_churn.note(call.shape_key)
    out, lse = kernel.forward(q, k, v, None, kernels.CAUSAL if causal else kernels.FULL, scale)
    return out, lse, scores


def few_weights_on_cpu(scores: Scores) -> Tensor | None:
    """All weights of a call in which nothing is hidden, [B, H, T, S]; None: not as plain or not as few."""
    q, k, scoring = scores.q, scores.k, scores.scoring
    if scores.mask is not NOTHING_HIDDEN or torch.is_grad_enabled() or type(q) is not Tensor or not q.is_cpu:
        return None
    if scoring.bias is not None or scoring.slopes is not None or scoring.sinks is not None:
        return None
    if scoring.softcap is not None or scores.positions is not None or q.dtype not in WHOLE:
        return None
    (B, H, T, D), (_, Hk, S, _) = q.shape, k.shape
    count = B * H * T * S
    if not 0 < count <= FEW or not budget.surely_fits(count * 8):  # never while compiling
        return None
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    settle_exponentials()
    rows = q.reshape(B * Hk, -1, D)  # [B * Hk, G * T, D]
    columns = k.reshape(B * Hk, S, D).transpose(1, 2)
    s = q.new_empty(B * Hk, rows.shape[1], S).baddbmm_(rows, columns, beta=0, alpha=scoring.scale)
    return torch.softmax(s, -1, out=s).view(B, H, T, S)
