"""The express lane: the plainest calls there are, with nothing in their way.

After a long kernel every line of Python starts in a cold cache: what takes 30 microseconds in a tight loop
took 250 between two calls of 4 ms; and a GPU that is faster than that waits. A call without mask or options
therefore goes straight to the kernel after the few checks below, and so do the weights of such a call where
they are few. Whatever they do not let through, right or wrong, takes the ordinary way and is answered, or
refused, there: this lane decides nothing else. Which kernel a GPU uses is the table's decision here as
anywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import budget, masks
from ..masks import NOTHING_HIDDEN, Mask
from ..scoring import Scoring
from . import backends, kernels, plain
from .backend import Call
from .gradients import Context
from .kernels import Band, Kernel, Three
from .scores import Scores
from .tiles import TILES
from .walk import REACH, check_rows
from .weights import softmax

__all__ = ["few_weights_on_cpu", "plainest", "straight"]

WHOLE = (torch.float32, torch.float64)  # dtypes that weights are computed in
FEW = 2**16  # more, and what stands around them does not matter


def plainest(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Scores] | None:
    """(output, lse, scores) of self-attention or of a full one, or None: not as plain as that."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return None
    try:
        shape, keys, values = q.shape, k.shape, v.shape
    except RuntimeError:  # nested ones have none
        return None
    if len(shape) != 4 or len(keys) != 4 or values != keys or (causal is not True and causal is not False):
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
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(q.device.type):
        return None
    if plain.transforms_are_active():
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
    B, H, T, D = q.shape
    _, Hk, S, _ = k.shape
    if (causal and S != T and T != 1) or not scale > 0:  # one query stands beside the last key
        return None
    scores = Scores(q, k, masks.CAUSAL if causal else NOTHING_HIDDEN, Scoring(scale))
    kernel, device = None, "cpu" if q.is_cpu else q.device.type
    for backend in backends.BACKENDS:
        if not backend.devices or device in backend.devices:  # the first to be asked
            kernel = backend.undisputed.get(device)
            break
    if kernel is None:
        call = Call(scores, v)
        chosen = backends.choose(call)
        if chosen.goes_straight and not torch.is_grad_enabled():
            return *chosen.forward(call), scores
        kernel = chosen.bare(q, v)
        if kernel is None:
            return None
        backends.note(call)
    band = kernels.CAUSAL if causal and T != 1 else kernels.FULL
    one = T == 1 and H != Hk and kernel.folds
    if one:  # query: the heads of a group become the rows of one product, and keys are read once
        q = q.reshape(B, Hk, H // Hk, D)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = _Straight.apply(q, k, v, kernel, band, scale)
    else:
        out, lse = kernel.forward((q, k, v, None, band, scale))
    return (out.reshape(B, H, 1, D), lse.reshape(B, H, 1), scores) if one else (out, lse, scores)


class _Straight(torch.autograd.Function):
    """One kernel, forward and backward, with nothing around it."""

    @staticmethod
    def forward(
        ctx: Context, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, band: Band, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = kernel.forward((q, k, v, None, band, scale))
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = kernel, band, scale
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad, _ = grads
        if grad is None:
            return (None,) * 6
        q, k, v, out, lse = ctx.saved_tensors
        kernel, band, scale = ctx.call
        if plain.is_needed_for(grad):

            def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return plain.forward(Scores(q, k, Mask(*band), Scoring(scale)), v)[0]

            return *plain.gradients(forward, (q, k, v), ctx.needs_input_grad[:3], grad), None, None, None
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        if lse.is_cpu and float(lse.abs().max()) > REACH:
            grads = _in_tiles(Scores(q, k, Mask(*band), Scoring(scale)), v, out, lse, grad)
        else:
            grads = kernel.backward((q, k, v, None, band, scale), out, lse, grad)
        return *grads, None, None, None


def _in_tiles(scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Three:
    """The same gradients where the kernel's would be too rough."""
    back, dv, _ = TILES.backward(Call(scores, v), out, lse, grad)
    return back.q.to(v.dtype), back.k.to(v.dtype), dv.to(v.dtype)


def few_weights_on_cpu(scores: Scores, lse: Tensor | None) -> Tensor | None:
    """All weights of a call in which nothing is hidden, [B, H, T, S]; None: not as plain or not as few.

    Raises:
        ArgumentError: a row is not the one whose lse is given.
    """
    q, scoring = scores.q, scores.scoring
    if scores.mask is not NOTHING_HIDDEN or torch.is_grad_enabled() or type(q) is not Tensor or not q.is_cpu:
        return None
    if scoring.bias is not None or scoring.slopes is not None or scoring.sinks is not None:
        return None
    if scoring.relative is not None:
        return None
    if scoring.softcap is not None or scores.positions is not None or q.dtype not in WHOLE:
        return None
    B, H, T, S = scores.shape
    count = B * H * T * S
    if not 0 < count <= FEW or not budget.surely_fits(count * 8):  # never while compiling
        return None
    if plain.transforms_are_active():
        return None
    weights, now = softmax(scores.whole(), None, False, lse is not None)
    if lse is not None and now is not None:
        check_rows(scores, slice(0, T), lse, now)
    return weights
