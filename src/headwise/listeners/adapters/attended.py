"""What all adapters do with the q, k, v and rules they found: attend, and tell.

A watched layer costs Python as much as the layer itself does, and everyday models wait for Python. Yet what
a Hugging Face layer's function is asked, which rules a mask comes to, which kernel runs, who listens and how
the call is noted: none of it differs from one layer to the next. So a layer leaves behind how it was answered
(`Alike`), for as long as its forward lasts. A call after it goes that way if all that decided it is the same;
any other call takes the ordinary way.
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
    silence,
    statistics_asked_for,
)
from ..attachment import Attachment
from ..model_structure import sounds_cross
from .huggingface_masks import CompactMask, LazyMask

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
            rules: dict[str, Any] = {
                "mask": mask, "scale": scale, "softcap": softcap, "bias": bias, "sinks": sinks,
            }  # fmt: skip
            with wanted(asked):
                if not dropout or softcap is not None or sinks is not None:
                    output, weights = attention(q, k, v, dropout=dropout, **rules)
                else:  # torch drops weights without keeping them; ours would keep the matrix for its gradient
                    output = _dropped(q, k, v, mask, bias, scale, dropout)
                    cast_q, cast_k = under_autocast(q, k)
                    weights = make(scores_from(cast_q, cast_k, cast_k, AttentionOptions(**rules)), None)
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


def _dropped(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None, scale: float | None, dropout: float
) -> Tensor:
    """The output with weights dropped by torch's own function."""
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


# Layers of one forward that are alike: what was decided for one is not decided again for those after it


NUMBERS = ("scaling", "softcap", "is_causal", "dropout")
SAYS = ("is_causal", "is_cross_attention")  # what a layer says of itself
ITS_OWN = ("position_bias", "s_aux", "output_attentions")  # with one of these a layer goes its own way
MOST = 4  # ways that are kept of a forward, whose layers may be of several kinds in turn
MISSING: Any = object()


class Alike(NamedTuple):
    """A call of this forward, and how it was answered."""

    attachment: Attachment
    listening: int  # which listeners there were
    noted: Noted
    tokens: dict[str, Tensor]
    decided_by: tuple[object, ...]  # see `_what_decides`
    mask: Tensor | None
    meaning: CompactMask | Tensor | None
    given: Mapping[str, object]
    rules: Mask
    scoring: Scoring
    held: Hashable  # what of the tensors in the rules is part of a plan key
    key: first_pass.PlanKey
    lse_later: bool


def _what_decides(function: Any, module: nn.Module) -> tuple[object, ...]:
    """What decides how a layer is answered, beside its function's arguments; all must be the same."""
    inference = torch.is_inference_mode_enabled()  # what is made in it cannot be written to outside
    said = [getattr(module, name, MISSING) for name in SAYS]
    return function, getattr(function, "__code__", None), type(module), module.training, inference, *said


def remember_answer(
    run: ForwardState,
    function: Any,
    module: nn.Module,
    args: tuple[Any, ...],
    given: Mapping[str, object],
    weights: AttentionMap,
) -> None:
    """A layer was answered: those after it may go its way, where that is known to be the same."""
    listening = active[:]
    if len(listening) != 1 or len(run.alike) >= MOST or len(args) != 4 or in_backward():
        return
    attachment = listening[0]
    noted, mask = attachment.noted(run), args[3]
    if noted is None or noted.kind != "self":
        return
    for name in ITS_OWN:
        if given.get(name) is not None and given[name] is not False:
            return
    for name in NUMBERS:  # one that lies in a tensor may be another by the next layer
        if isinstance(given.get(name), Tensor):
            return
    if given.get("dropout"):
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
    held, by, how = first_pass.rules_key(scores), scores.mask, scores.scoring
    if held is first_pass.UNUSUAL or (meaning is not None and not isinstance(meaning, CompactMask)):
        return
    same = first_pass.plan_key(q, k, v, by.left, by.right, how.scale, how.softcap, held)
    if same is not None:
        path = attachment.paths[module]
        run.alike.append(
            Alike(
                attachment, attachment.listeners_version, noted, run.tokens(attachment.decodes(path)),
                _what_decides(function, module), mask, meaning, dict(given), by, how, held, same, lse is None,
            )
        )  # fmt: skip


def answered_alike(
    alike: Alike,
    run: ForwardState,
    function: Any,
    module: nn.Module,
    args: tuple[Any, ...],
    given: Mapping[str, object],
) -> Tensor | None:
    """The heads' output [B, H, T, Dv] of a call like another, noted as that was; None: it is not.

    The function is called with the module, `args` and `given`.
    """
    if len(args) != 4 or args[3] is not alike.mask or _what_decides(function, module) != alike.decided_by:
        return None
    attachment, mask, noted, before = alike.attachment, alike.mask, alike.noted, alike.given
    if active != [attachment] or attachment.listeners_version != alike.listening:
        return None
    if len(noted.group.notes) >= noted.group.room or in_backward():
        return None
    if isinstance(mask, LazyMask) and mask.meaning is not alike.meaning:
        return None
    if len(given) != len(before):
        return None
    for name, value in given.items():
        then = before.get(name, MISSING)
        if value is not then and not (type(value) is float and type(then) is float and value == then):
            return None
    path = attachment.paths.get(module)
    if path is None or path in run.told or sounds_cross(path) or torch.compiler.is_compiling():
        return None
    if run.tokens(attachment.is_encoder_decoder and attachment.decodes(path)) is not alike.tokens:
        return None
    q, k, v, _ = args
    if q.requires_grad or k.requires_grad:
        return None
    rules, scoring = alike.rules, alike.scoring
    left, right, scale = rules.left, rules.right, scoring.scale
    if first_pass.plan_key(q, k, v, left, right, scale, scoring.softcap, alike.held) != alike.key:
        return None
    lse = None
    silence.depth += 1  # quietly: this is on every layer's way
    try:
        if alike.lse_later:
            causal, grouped = right == 0 and q.shape[2] > 1, q.shape[1] != k.shape[1]
            output = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
            scores = Scores(q, k, rules, scoring)
        else:
            filled = k.is_inference() or k._version > 0  # a cache, perhaps, which goes on being filled
            kept = k.clone() if filled else k
            scores = Scores(q, kept, rules, scoring)
            plan = first_pass.plan_for(alike.key)
            if kept is not k and (kept.stride() != k.stride() or (kept.data_ptr() | k.data_ptr()) & 15):
                output, lse, _ = first_pass.compute(scores, v)  # a copy with other strides has another key
            elif plan is None:
                output, lse, _ = first_pass.compute(scores, v, (), alike.key)
            else:
                output, lse, _ = plan.runner.forward(scores, v)  # nothing in it learns
        return output if attachment.note(run, path, noted, scores, lse) else None
    finally:
        silence.depth -= 1
