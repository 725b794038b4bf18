"""Attention of watched layers: every adapter calls `attended`, which attends and announces the call.

Watching a layer takes as much time in Python as the layer, and small models wait for Python. But the
arguments of a Hugging Face layer's function, the rules of its mask, the kernel, the listeners and how the
call is deferred are mostly the same for all layers of a forward pass. So each call leaves a plan
(`CallPlan`), which is kept until the forward pass ends. A later call runs by that plan if everything that
decides it is the same, and otherwise by `attended`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ... import budget
from ...arguments import AttentionOptions, scores_from, under_autocast
from ...engines import first_pass
from ...engines.backend import wanted
from ...engines.kernels import MOST_CHANNELS
from ...engines.plain import transforms_are_active
from ...engines.scores import Scores
from ...functional import attention
from ...map import AttentionMap, make
from ...masks import CAUSAL, NOTHING_HIDDEN, Mask
from ...scoring import Scoring
from ..active import (
    ForwardState,
    Noted,
    active,
    announce,
    in_backward,
    quietly,
    requested_statistics,
    silence,
)
from ..attachment import Attachment
from ..model_structure import sounds_cross
from .huggingface_masks import CompactMask, LazyMask

LSE_LATER = ("cuda",)  # devices where lse of all layers together takes less time than one by one


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
    """Return the heads' output [B, H, T, Dv] of a call, as the listeners leave it, and its map."""
    names, are_waiting = requested_statistics((*q.shape[:3], k.shape[2]), q.is_cpu)
    with quietly():
        by_torch = None
        is_plain = not (names or dropout) and bias is None and softcap is None and sinks is None
        if (
            is_plain
            and are_waiting
            and q.device.type in LSE_LATER
            and mask.left is None
            and mask.is_positional
        ):
            by_torch = _output_alone(q, k, v, mask, scale)
        if by_torch is not None:
            output, scores = by_torch
            weights = make(scores, None)
        else:
            if any(x.device != q.device for x in mask.tensors.values()):
                mask = mask.to(q.device)
            rules: dict[str, Any] = {
                "mask": mask, "scale": scale, "softcap": softcap, "bias": bias, "sinks": sinks,
            }  # fmt: skip
            with wanted(names):
                if not dropout or softcap is not None or sinks is not None:
                    output, weights = attention(q, k, v, dropout=dropout, **rules)
                else:  # torch's function drops weights without storing them for the gradient
                    output = _dropped(q, k, v, mask, bias, scale, dropout)
                    cast_q, cast_k = under_autocast(q, k)
                    weights = make(scores_from(cast_q, cast_k, cast_k, AttentionOptions(**rules)), None)
    changed = announce(module, kind, weights, v, output)
    assert changed is not None
    return changed, weights


def _output_alone(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None
) -> tuple[Tensor, Scores] | None:
    """Return output and scores by torch's function, or None if it would need T x S memory or a gradient.

    It takes the least time in Python, but returns no lse, which can be computed later from copies of q and k.
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
    except RuntimeError:  # a nested tensor has no shape
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


def _dropped(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """Return the output with dropout, by torch's function."""
    B, H, T, _ = q.shape
    S, grouped = k.shape[2], k.shape[1] != H
    if mask.is_positional and mask.left is None and mask.right == 0 and T == S and bias is None:
        return scaled_dot_product_attention(
            q, k, v, None, dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
    if not mask.hides_nothing:
        tensor, instead = (
            f"dense mask [{B}, 1, {T}, {S}] beside dropout",
            "use a shorter text, or model.eval()",
        )
        budget.check(B * T * S, q.device, tensor, instead)
    added: Tensor | None = None if mask.hides_nothing else mask.full(T, S, B, H)
    if added is not None:
        added = added | ~added.any(-1, keepdim=True)  # a query that sees nothing would be NaN
    if bias is not None:
        added = bias.to(q.dtype) if added is None else bias.to(q.dtype).masked_fill(~added, -torch.inf)
    return scaled_dot_product_attention(q, k, v, added, dropout, scale=scale, enable_gqa=grouped)


# Plans of calls: decisions for one layer hold for later layers of the same forward


NUMBERS = ("scaling", "softcap", "is_causal", "dropout")
ATTRIBUTES = ("is_causal", "is_cross_attention")  # of a layer, which decide its rules
VARYING = ("position_bias", "s_aux", "output_attentions")  # arguments that may differ from layer to layer
MOST_PLANS = 4  # of a forward, whose layers may be of several kinds
MISSING: Any = object()


class CallPlan(NamedTuple):
    """A call of this forward pass: its arguments, and how it was run."""

    attachment: Attachment
    listeners_version: int
    noted: Noted
    tokens: dict[str, Tensor]
    decided_by: tuple[object, ...]  # see `_deciding`
    mask: Tensor | None
    meaning: CompactMask | Tensor | None
    arguments: Mapping[str, object]
    rules: Mask
    scoring: Scoring
    rules_key: Hashable  # the part of a plan key that depends on tensors in the rules
    key: first_pass.PlanKey
    lse_later: bool


def _deciding(function: Any, module: nn.Module) -> tuple[object, ...]:
    """Return what decides how a layer is run, beside its function's arguments, to compare it."""
    inference = torch.is_inference_mode_enabled()  # tensors made in it cannot be written to outside
    values = [getattr(module, name, MISSING) for name in ATTRIBUTES]
    return function, getattr(function, "__code__", None), type(module), module.training, inference, *values


def remember_call(
    run: ForwardState,
    function: Any,
    module: nn.Module,
    args: tuple[Any, ...],
    arguments: Mapping[str, object],
    weights: AttentionMap,
) -> None:
    """Store the plan of a call for later layers, if a layer like it can be recognized."""
    listening = active[:]
    if len(listening) != 1 or len(run.call_plans) >= MOST_PLANS or len(args) != 4 or in_backward():
        return
    attachment = listening[0]
    noted, mask = attachment.noted(run), args[3]
    if noted is None or noted.kind != "self":
        return
    for name in VARYING:
        if arguments.get(name) is not None and arguments[name] is not False:
            return
    for name in NUMBERS:  # a tensor may change before the next layer
        if isinstance(arguments.get(name), Tensor):
            return
    if arguments.get("dropout"):
        return
    meaning = mask.meaning if isinstance(mask, LazyMask) else mask
    scores, lse, _ = weights.as_made
    q, k, v = args[:3]
    if q.requires_grad or k.requires_grad or v.requires_grad or torch.compiler.is_compiling():
        return
    if not q.dtype is k.dtype is v.dtype:
        return
    if not isinstance(scores, Scores) or scores.scoring.has_tensors or scores.k.shape != k.shape:
        return
    rules_key, rules, scoring = first_pass.rules_key(scores), scores.mask, scores.scoring
    if rules_key is first_pass.UNUSUAL or (meaning is not None and not isinstance(meaning, CompactMask)):
        return
    key = first_pass.plan_key(q, k, v, rules.left, rules.right, scoring.scale, scoring.softcap, rules_key)
    if key is not None:
        path = attachment.paths[module]
        run.call_plans.append(
            CallPlan(
                attachment, attachment.listeners_version, noted, run.tokens(attachment.decodes(path)),
                _deciding(function, module), mask, meaning, dict(arguments), rules, scoring, rules_key,
                key, lse is None,
            )
        )  # fmt: skip


def repeat_call(
    call_plan: CallPlan,
    run: ForwardState,
    function: Any,
    module: nn.Module,
    args: tuple[Any, ...],
    arguments: Mapping[str, object],
) -> Tensor | None:
    """Run a call by the plan of an earlier one; return the heads' output [B, H, T, Dv].

    None if the call differs from the plan. The function is called with the module, `args` and `arguments`.
    """
    if len(args) != 4 or args[3] is not call_plan.mask or _deciding(function, module) != call_plan.decided_by:
        return None
    attachment, mask, noted, earlier = (
        call_plan.attachment,
        call_plan.mask,
        call_plan.noted,
        call_plan.arguments,
    )
    if active != [attachment] or attachment.listeners_version != call_plan.listeners_version:
        return None
    if len(noted.group.notes) >= noted.group.room or in_backward():
        return None
    if isinstance(mask, LazyMask) and mask.meaning is not call_plan.meaning:
        return None
    if len(arguments) != len(earlier):
        return None
    for name, value in arguments.items():
        earlier_value = earlier.get(name, MISSING)
        if value is not earlier_value and not (
            type(value) is float and type(earlier_value) is float and value == earlier_value
        ):
            return None
    path = attachment.paths.get(module)
    if path is None or path in run.call_counts or sounds_cross(path) or torch.compiler.is_compiling():
        return None
    if run.tokens(attachment.is_encoder_decoder and attachment.decodes(path)) is not call_plan.tokens:
        return None
    q, k, v, _ = args
    if q.requires_grad or k.requires_grad:
        return None
    rules, scoring = call_plan.rules, call_plan.scoring
    left, right, scale = rules.left, rules.right, scoring.scale
    if (
        first_pass.plan_key(q, k, v, left, right, scale, scoring.softcap, call_plan.rules_key)
        != call_plan.key
    ):
        return None
    lse = None
    silence.depth += 1  # `quietly` inlined: this runs for every layer
    try:
        if call_plan.lse_later:
            causal, grouped = right == 0 and q.shape[2] > 1, q.shape[1] != k.shape[1]
            output = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
            scores = Scores(q, k, rules, scoring)
        else:
            may_change = k.is_inference() or k._version > 0  # k may be a cache that is filled later
            stored = k.clone() if may_change else k
            scores = Scores(q, stored, rules, scoring)
            plan = first_pass.plan_for(call_plan.key)
            if stored is not k and (stored.stride() != k.stride() or (stored.data_ptr() | k.data_ptr()) & 15):
                output, lse, _ = first_pass.compute(scores, v)  # a copy with other strides has another key
            elif plan is None:
                output, lse, _ = first_pass.compute(scores, v, (), call_plan.key)
            else:
                output, lse, _ = plan.runner.forward(scores, v)  # no gradient is needed
        return output if attachment.note(run, path, noted, scores, lse) else None
    finally:
        silence.depth -= 1
