"""What all adapters do with the q, k, v and rules they found: attend, and tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ... import budget
from ...arguments import AttentionOptions, scores_from, under_autocast
from ...engines.backend import wanted
from ...engines.kernels import MOST_CHANNELS
from ...engines.plain import transforms_are_active
from ...engines.scores import Scores
from ...functional import attention
from ...map import AttentionMap, make
from ...mask_meaning import fact
from ...mask_rules import can_read
from ...masks import CAUSAL, NOTHING_HIDDEN, Mask
from ...scoring import Scoring
from ..active import announce, quietly, statistics_asked_for

LSE_LATER = ("cuda",)  # devices where lse of all layers together takes less time than asking for each one's


def attended(
    module: nn.Module | None,
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, AttentionMap]:
    """(the heads' output [B, H, T, Dv] as the listeners leave it, the map) of one call."""
    asked, waited = statistics_asked_for((*q.shape[:3], k.shape[2]), q.is_cpu)
    with quietly():
        alone = None
        plain = not (asked or dropout) and bias is None and softcap is None and sinks is None
        if plain and waited and q.device.type in LSE_LATER and mask.left is None and mask.is_positional:
            alone = _output_alone(q, k, v, mask, scale)
        if alone is not None:
            output, scores = alone
            weights = make(scores, None)
        else:
            if any(x.device != q.device for x in mask.tensors.values()):
                mask = mask.to(q.device)
            rules = {"mask": mask, "scale": scale, "softcap": softcap, "bias": bias, "sinks": sinks}
            with wanted(asked):
                output, weights = _attention(q, k, v, dropout, rules)
    heard = announce(module, kind, weights, v, output)
    assert heard is not None
    return heard, weights


def _output_alone(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None
) -> tuple[Tensor, Scores] | None:
    """(output, scores) by torch's own function, which gives no lse; None: it would make the whole matrix, or
    a gradient is wanted.

    It takes the least time in Python. lse can be computed later from copies of q and k.
    """
    causal, T, S = mask.right == 0, q.shape[2], k.shape[2]
    if mask.right not in (None, 0) or (causal and S != T and T != 1) or not _are_plain(q, k, v, scale):
        return None
    if q.shape[3] > MOST_CHANNELS or q.dtype is torch.float64:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    scale = q.shape[3] ** -0.5 if scale is None else scale
    output = scaled_dot_product_attention(
        q, k, v, is_causal=causal and T > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return output, Scores(q, k, CAUSAL if causal else NOTHING_HIDDEN, Scoring(scale))


def _are_plain(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
    """Return True for plain tensors of one dtype and device, with no tracer, transform or autocast."""
    if type(q) is not Tensor or type(k) is not Tensor or type(v) is not Tensor:
        return False
    try:
        shape, keys, values = q.shape, k.shape, v.shape
    except RuntimeError:  # nested ones have none
        return False
    if len(shape) != 4 or len(keys) != 4 or values != keys:
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
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(q.device.type) or transforms_are_active():
        return False
    return scale is None or (type(scale) is float and scale > 0)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, rules: dict[str, Any]
) -> tuple[Tensor, AttentionMap]:
    if not dropout or rules["softcap"] is not None or rules["sinks"] is not None:
        return attention(q, k, v, dropout=dropout, **rules)
    # torch drops weights without keeping them; ours would keep the matrix for its gradient
    output = _dropped(q, k, v, rules["mask"], rules["bias"], rules["scale"], dropout)
    cast_q, cast_k = under_autocast(q, k)
    return output, make(scores_from(cast_q, cast_k, cast_k, AttentionOptions(**rules)), None)


def _dropped(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    B, H, T, _ = q.shape
    S, grouped = k.shape[2], k.shape[1] != H
    if mask.is_positional and mask.left is None and mask.right == 0 and T == S and bias is None:
        return scaled_dot_product_attention(
            q, k, v, None, dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
    if not mask.hides_nothing:
        what, instead = f"dense mask [{B}, 1, {T}, {S}] beside dropout", "use a shorter text, or model.eval()"
        budget.check(B * T * S, q.device, what, instead)
    added: Tensor | None = None if mask.hides_nothing else mask.full(T, S, B, H)
    if added is not None:
        added = added | ~added.any(-1, keepdim=True)  # a query that sees nothing would be NaN
    if bias is not None:
        added = bias.to(q.dtype) if added is None else bias.to(q.dtype).masked_fill(~added, -torch.inf)
    return scaled_dot_product_attention(q, k, v, added, dropout, scale=scale, enable_gqa=grouped)


def with_padding(mask: Mask, batch: int) -> Mask:
    """In self-attention, a key that no query may see is padding, and so is the query in its place."""
    if mask.queries is not None:
        return mask
    if mask.keys is not None:
        return replace(mask, queries=mask.keys)
    if mask.allowed is None or mask.allowed.shape[2] == 1:
        return mask
    if not can_read(mask.allowed):
        seen: Tensor | None = _seen_by_some(mask.allowed)
    else:
        seen = fact(mask.allowed, "seen by some", _unless_all)
    if seen is None:
        return mask
    seen = for_each(seen, batch)
    return replace(mask, keys=seen, queries=seen)


def for_each(real: Tensor, batch: int) -> Tensor:
    """Which positions are real, [B, S], from one row for all or one per sequence."""
    return real.expand(batch, -1) if real.shape[0] == 1 else real


def _seen_by_some(allowed: Tensor) -> Tensor:
    """Which keys some query may see, bool [B or 1, S]."""
    return allowed.any(2).any(1)


def _unless_all(allowed: Tensor) -> Tensor | None:
    """The same; None: all of them."""
    seen = _seen_by_some(allowed)
    return None if bool(seen.all()) else seen
