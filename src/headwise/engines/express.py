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
from torch.nn.functional import scaled_dot_product_attention

from .. import budget, masks
from ..masks import NOTHING_HIDDEN
from ..scoring import Scoring
from . import backends, plain, planned
from .backend import Call
from .scores import Scores
from .walk import check_rows
from .weights import softmax

__all__ = ["MOST_CHANNELS", "few_weights_on_cpu", "is_plain", "output_alone", "plainest", "straight"]

WHOLE = (torch.float32, torch.float64)  # dtypes that weights are computed in
FEW = 2**16  # more, and what stands around them does not matter
MOST_CHANNELS = 256  # of a head: with more, torch's function makes the whole matrix


def plainest(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Scores] | None:
    """(output, lse, scores) of self-attention or of a full one, or None: not as plain as that."""
    return straight(q, k, v, causal, scale) if is_plain(q, k, v, causal, scale) else None


def output_alone(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Scores] | None:
    """(output, scores) of tensors that have been found plain, by torch's own function; None: they learn, or
    it would make the whole matrix.

    Nothing is quicker to ask, as it gives no lse: for whoever has copies of q and k to make that of later.
    """
    T, S = q.shape[2], k.shape[2]
    if (causal and S != T and T != 1) or q.shape[3] > MOST_CHANNELS or q.dtype is torch.float64:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if scale is None:
        scale = q.shape[3] ** -0.5
    output = scaled_dot_product_attention(
        q, k, v, is_causal=causal and T > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output, Scores(q, k, masks.CAUSAL if causal else NOTHING_HIDDEN, Scoring(scale))


def is_plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> bool:
    """Whether these are ordinary tensors of one dtype and place, that go together, with nothing around."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return False
    try:
        shape, keys, values = q.shape, k.shape, v.shape
    except RuntimeError:  # nested ones have none
        return False
    if len(shape) != 4 or len(keys) != 4 or values != keys or (causal is not True and causal is not False):
        return False
    if not (q.is_cpu and k.is_cpu and v.is_cpu) and not (q.is_cuda and q.device == k.device == v.device):
        return False
    B, H, _, D = shape
    if keys[0] != B or keys[3] != D or not q.numel() or not k.numel() or H % keys[1]:
        return False
    dtype = q.dtype
    if dtype is not k.dtype or dtype is not v.dtype or not dtype.is_floating_point:
        return False
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(q.device.type):
        return False
    if plain.transforms_are_active():
        return False
    return scale is None or (type(scale) is float and scale > 0)


def straight(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Scores] | None:
    """(output, lse, scores) of tensors that have been found plain; None where a kernel would need help."""
    T, S = q.shape[2], k.shape[2]
    if scale is None:
        scale = q.shape[3] ** -0.5
    if (causal and S != T and T != 1) or not scale > 0:  # one query stands beside the last key
        return None
    kind = planned.kind_of(q, k, v, None, 0 if causal else None, scale, None)
    plan = None if kind is None else planned.known(kind)
    if plan is not None:
        scores = Scores(q, k, plan.mask, plan.scoring)
        out, lse, _ = planned.run(plan.ways, scores, v)
        return out, lse, scores
    scores = Scores(q, k, masks.CAUSAL if causal else NOTHING_HIDDEN, Scoring(scale))
    call = Call(scores, v)
    ways = backends.choose(call).ways(call)
    if ways is None:
        return None
    backends.note(call)
    out, lse, _ = planned.run(ways, scores, v)
    if kind is not None:
        planned.met(kind, scores, v)
    return out, lse, scores


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
