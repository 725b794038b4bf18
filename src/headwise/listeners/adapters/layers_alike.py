"""Layers of one forward that are alike: what was decided for one is not decided again for those after it.

A watched layer costs Python as much as the layer itself does, and everyday models wait for Python. Yet what
the layer's function is asked, which rules a mask comes to, which kernel runs, who listens and how the call is
noted: none of it differs from one layer to the next. So a layer leaves behind how it was answered, for as
long as its forward lasts. A call after it goes that way if all that decided it is the same: the very function
and mask, equal numbers beside them, the kind of its tensors (`first_pass.kind_of`: shapes, strides, dtypes,
whether gradients are wanted, what stands around the call), the listener, and the tokens it is told of.
Any other call takes the ordinary way.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ...engines import first_pass
from ...engines.scores import Scores
from ...map import AttentionMap
from ...masks import Mask
from ...scoring import Scoring
from ..active import ForwardState, Noted, active, in_backward, silence
from ..attachment import Attachment
from ..model_structure import sounds_cross
from .huggingface_masks import CompactMask, LazyMask

NUMBERS = ("scaling", "softcap", "is_causal", "dropout")
CAUSAL, CROSS = "is_causal", "is_cross_attention"  # what a layer says of itself
ITS_OWN = ("position_bias", "s_aux", "output_attentions")  # with one of these a layer goes its own way
MOST = 4  # ways that are kept of a forward, whose layers may be of several kinds in turn
MISSING: Any = object()


class Alike(NamedTuple):
    """A call of this forward, and how it was answered."""

    attachment: Attachment
    listening: int  # which listeners there were
    noted: Noted
    tokens: dict[str, Tensor]
    function: FunctionType
    code: CodeType
    layer: type[nn.Module]
    is_causal: object  # what the layer says of itself
    is_cross: object
    training: bool
    mask: Tensor | None
    meaning: CompactMask | Tensor | None
    given: Mapping[str, object]
    rules: Mask
    scoring: Scoring
    held: Hashable  # what of the tensors in the rules is part of a kind
    kind: first_pass.Kind
    lse_later: bool
    inference: bool  # mode: what is made in it cannot be written to outside


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
    kind: type = type(module)
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
    held, by, how = first_pass.rules_kind(scores), scores.mask, scores.scoring
    if held is first_pass.UNUSUAL or (meaning is not None and not isinstance(meaning, CompactMask)):
        return
    same = first_pass.kind_of(q, k, v, by.left, by.right, how.scale, how.softcap, held)
    if same is not None:
        path = attachment.paths[module]
        run.alike.append(
            Alike(
                attachment, attachment.listeners_version, noted,
                run.tokens(attachment.decodes(path)), function,
                function.__code__, kind, getattr(module, CAUSAL, MISSING), getattr(module, CROSS, MISSING),
                module.training, mask, meaning, dict(given), by, how, held, same, lse is None,
                torch.is_inference_mode_enabled(),
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

    Args:
        args, given: what the function is called with, after the module.
    """
    if len(args) != 4 or args[3] is not alike.mask or type(module) is not alike.layer:
        return None
    attachment, mask, noted, before = alike.attachment, alike.mask, alike.noted, alike.given
    if function is not alike.function or function.__code__ is not alike.code:
        return None
    if active != [attachment] or attachment.listeners_version != alike.listening:
        return None
    if len(noted.group.notes) >= noted.group.room or in_backward():
        return None
    if getattr(module, CAUSAL, MISSING) is not alike.is_causal or module.training is not alike.training:
        return None
    if getattr(module, CROSS, MISSING) is not alike.is_cross:
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
    if q.requires_grad or k.requires_grad or torch.is_inference_mode_enabled() is not alike.inference:
        return None
    rules, scoring = alike.rules, alike.scoring
    left, right, scale = rules.left, rules.right, scoring.scale
    if first_pass.kind_of(q, k, v, left, right, scale, scoring.softcap, alike.held) != alike.kind:
        return None
    lse = None
    silence.depth += 1  # quietly: this is on every layer's way
    try:
        if alike.lse_later:
            causal, grouped = right == 0 and q.shape[2] > 1, q.shape[1] != k.shape[1]
            output = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
            scores = Scores(q, k, rules, scoring)
        else:
            kept = k
            if k.is_inference() or k._version > 0:  # a cache, perhaps, which goes on being filled
                kept = k.clone()
            scores = Scores(q, kept, rules, scoring)
            plan = first_pass.known(alike.kind)
            if kept is not k and (kept.stride() != k.stride() or (kept.data_ptr() | k.data_ptr()) & 15):
                output, lse, _ = first_pass.answer(scores, v)  # a copy that lies otherwise is of another kind
            elif plan is None:
                output, lse, _ = first_pass.answer(scores, v, (), alike.kind)
            else:
                output, lse, _ = plan.runner.forward(scores, v)  # nothing in it learns
        return output if attachment.note(run, path, noted, scores, lse) else None
    finally:
        silence.depth -= 1
