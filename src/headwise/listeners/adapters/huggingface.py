"""Hugging Face Transformers: we stand between a model and its own functions for attention and for masks.

Models look both up by the name in their config, and branch on that name, on whether there is a mask, on what
class it has. So names stay as they are, and so does what is registered; only flash and flex attention have
another name in their config meanwhile. Inside a block the registries' lookup methods answer with a function
that asks who calls. A module that is listened to is answered by us as its own function would answer
(`answered`); every other module by its own function. After the block the lookup is Transformers' own again.

    the layer's forward ──> q, k, v of its own projections, its mask
        └─ looks up its attention function ──> `attend` ──> `answered`
              what its code says, proved once ──> mask, bias, scale ──> `attended` ──> listeners

Most functions compute softmax(scale q k + bias + mask) v, each with another selection of what they take. So
what counts is not what a call hands over but what the function makes of it (`attention_functions.py`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import budget
from ...errors import AttentionBypassed, HeadwiseError
from ...functional import attention
from ...map import AttentionMap
from ...masks import CAUSAL, NOTHING_HIDDEN, Mask
from ...private_names import check_transformers
from ..active import active, announce, path_of, quietly, real_queries_now
from ..attachment import Attachment
from ..model_structure import DISPATCHES, names_in, sounds_cross
from ..module_overrides import share
from .attended import answered_alike, attended, remember_answer
from .attention_functions import (
    AttentionCode,
    FunctionCall,
    Reading,
    call_key,
    difference,
    draw,
    read,
    run,
)
from .huggingface_masks import CompactMask, LazyMask, as_tensor, compact_mask, rules_of

OWN = "_attn_implementation_internal"

FIRST = ("query", "key", "value", "attention_mask")
SDPA = Reading(is_fused=True, gives_weights=False)
MOST_KINDS = 256  # of calls that are remembered of a function
SUM = 0.02  # by how much a row of weights in half precision may miss 1


Function = Callable[..., Any]


def hear_huggingface(attachment: Attachment) -> None:
    """Stand between the model and its own functions."""
    configs = _configs(attachment)
    if configs:  # the registries are changed once for all attachments
        share(attachment.undo, owner=_change_lookup, change=_change_lookup)
    for config in configs:
        if _is_a_kernel_of(config):
            share(attachment.undo, config, partial(_name_another, attachment, config))


# Whose masks and calls are ours


def _configs(attachment: Attachment) -> list[object]:
    """The configs that layers which dispatch, and the models around them, read the implementation from."""
    return attachment.structure.once("configs", lambda: _find_configs(attachment.model))


def _find_configs(model: nn.Module) -> list[object]:
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    configs: list[object] = []
    for module in model.modules():
        inside = module.modules() if isinstance(module, PreTrainedModel) else [module]
        if any(DISPATCHES in names_in(type(inner)) for inner in inside):
            check_transformers()
            config = getattr(module, "config", None)
            if hasattr(config, OWN) and not any(config is known for known in configs):
                configs.append(config)
    return configs


# Kernels that say nothing of what they do: the model's other implementation takes their place


def _is_a_kernel_of(config: object) -> bool:
    name = getattr(config, OWN)
    name = name.own if isinstance(name, _InPlaceOf) else name  # another block is at work
    return isinstance(name, str) and ("flash" in name or name == "flex_attention") and "paged|" not in name


class _InPlaceOf(str):
    """The name of an implementation that stands in for another; a copy of it is that other's name."""

    own: str

    def __new__(cls, name: str, own: str) -> _InPlaceOf:
        made = super().__new__(cls, name)
        made.own = own
        return made

    def __deepcopy__(self, _: object) -> str:
        return self.own

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.own,)


def _name_another(attachment: Attachment, config: object, undo: ExitStack) -> None:
    """Flash and flex attention compute what "sdpa" does, or "eager" where a model has no "sdpa"."""
    from transformers import PreTrainedModel

    owners = [m for m in attachment.model.modules() if getattr(m, "config", None) is config]
    models = [m for m in owners if isinstance(m, PreTrainedModel)]
    name = "sdpa" if models and all(getattr(m, "_supports_sdpa", False) for m in models) else "eager"
    own = getattr(config, OWN)
    set_to = _InPlaceOf(name, own)
    setattr(config, OWN, set_to)

    def name_own() -> None:
        if getattr(config, OWN) is set_to:  # else somebody has chosen another one meanwhile
            setattr(config, OWN, own)

    undo.callback(name_own)


# The lookup


def _change_lookup(undo: ExitStack) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    for kind, name, between in (
        (AttentionInterface, "get_interface", _between),
        (AttentionInterface, "__getitem__", _between),
        (AttentionMaskInterface, "__getitem__", _between_masks),
    ):
        _set_method(undo, kind, name, _answering(getattr(kind, name), between))


def _answering(look_up: Function, between: Function) -> Function:
    """A lookup that finds, in place of each function, the one that stands between; made once each."""
    made: dict[Function, Function] = {}

    @functools.wraps(look_up)
    def answer(self: object, *args: Any, **kwargs: Any) -> Function:
        own: Function = look_up(self, *args, **kwargs)
        if hasattr(own, "__headwise_own__"):  # one of the other lookups has answered already
            return own
        try:
            return made.get(own) or made.setdefault(own, between(own))
        except TypeError:  # one that is not to be found again
            function: Function = between(own)
            return function

    return answer


def _set_method(undo: ExitStack, kind: type, name: str, ours: Function) -> None:
    before = vars(kind).get(name)
    setattr(kind, name, ours)

    def put_back() -> None:
        if vars(kind).get(name) is not ours:
            return  # somebody stands before us now; alone, ours answers as theirs would
        if before is None:
            delattr(kind, name)
        else:
            setattr(kind, name, before)

    undo.callback(put_back)


def _between(own: Function) -> Function:
    """Wrap an attention function: calls of watched modules go to `answered`, others to the original."""

    @functools.wraps(own)
    def attend(module: nn.Module, *args: object, **kwargs: object) -> object:
        listening = active[:]  # as they are now: other threads come and go
        if len(listening) == 1 and module in listening[0].hooks:  # nothing else, mostly
            return answered(listening, own, module, args, kwargs)
        listening = [attachment for attachment in listening if module in attachment.paths]
        if not listening:
            return own(module, *map(as_tensor, args), **{n: as_tensor(x) for n, x in kwargs.items()})
        return answered(listening, own, module, args, kwargs)

    attend.__headwise_own__ = own  # type: ignore[attr-defined]
    return attend


def _between_masks(own: Function) -> Function:
    """Wrap a mask function: a watched model is given a mask that is not made unless it is read."""

    @functools.wraps(own)
    def mask(*args: object, **call: object) -> object:
        config = call.get("config")
        known = [a for a in active for each in _configs(a) if each is config]
        if args or not known:
            return own(*args, **call)
        for attachment in known:
            attachment.current_forward.masked.append(config)
        return compact_mask(own, **call)

    mask.__headwise_own__ = own  # type: ignore[attr-defined]
    return mask


# Answering


def answered(
    listening: list[Attachment],
    function: Function,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> object:
    """What a model's own function would answer, called with the module, `args` and `kwargs`.

    `listening`: who listens to this module.
    """
    forward = listening[0]._running.run
    if forward is not None:
        for alike in forward.alike:
            again = answered_alike(alike, forward, function, module, args, kwargs)
            if again is not None:
                return again.transpose(1, 2).contiguous(), None  # [B, T, H, D]
    code = read(function)
    names = code.parameters[1:] or FIRST
    given = {**code.defaults, **dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, mask = map(given.pop, names[: len(FIRST)], (None,) * len(FIRST))
    call = FunctionCall(module, query, key, value, mask, given)
    reason = None if not code.unknown and code.uses.isdisjoint(given) else code.why_not(given)
    # Torch's function has no soft cap: Transformers' around it says so, or, before 5.18, leaves the cap out.
    refuses = code.is_sdpa and "softcap" in code.mentions and given.get("softcap") is not None
    if reason is None and not refuses:
        reading = SDPA if code.is_sdpa else _proved(code, function, call)
        if isinstance(reading, Reading):
            answer, weights = _answer(code, reading, listening[0].paths[module], call)
            if forward is not None and code.is_sdpa:
                remember_answer(forward, function, module, args, kwargs, weights)
            return answer
        reason = reading
    if reason is not None and any(attachment.fallback is None for attachment in listening):
        raise AttentionBypassed(
            f"attention of {path_of(module)} must be one that headwise knows: {reason}; read its weights "
            "with fallback='eager' if it makes them, or leave this layer out with fallback='skip'"
        )
    with quietly():
        answer = function(module, *map(as_tensor, args), **{n: as_tensor(x) for n, x in kwargs.items()})
    if any(attachment.reads_eager for attachment in listening):
        _look(code, module, answer, query, key)
    return answer


def _look(code: AttentionCode, module: nn.Module, answer: object, query: Tensor, key: Tensor) -> None:
    """Tell of the weights that a model's own function gives beside its output, if they are shares of keys."""
    weights = answer[1] if isinstance(answer, tuple) and len(answer) > 1 else None
    (B, H, T), S, path = query.shape[:3], key.shape[2], path_of(module)
    if not isinstance(weights, Tensor) or tuple(weights.shape) != (B, H, T, S):
        return
    sums = weights.detach().sum(-1, dtype=torch.float32)
    has_sink = not code.mentions.isdisjoint(("sinks", "s_aux"))  # which takes the rest of a row
    wrong = (sums > 1 + SUM) | ((sums < 1 - SUM) & (sums != 0) & (not has_sink))
    if bool(wrong.any()):
        low, high = sums.min().item(), sums.max().item()
        raise AttentionBypassed(
            f"weights of {path} must sum to 1 over the keys of each query: those that {code.name} returns "
            f"sum to {low:.3g} to {high:.3g}; run model.eval() if it returns them after dropout, or leave "
            "this layer out with fallback='skip'"
        )
    copied = weights.detach().clone()  # the model may write to its own
    given = AttentionMap.from_weights(copied, Mask(queries=real_queries_now(path, B, T)))
    cross = _is_cross(module, path, T, S, None, None)
    announce(module, "cross" if cross else "self", given, None, None)


# What a function computes


class _Rules(NamedTuple):
    """What a function makes of a call: all that `headwise.attention` takes beside q, k and v."""

    mask: Mask
    bias: Tensor | None
    used: int  # how many of the keys; the rest are places of a cache that are not yet filled
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float


def _rules_of_call(
    code: AttentionCode,
    reading: Reading,
    call: FunctionCall,
    mask: CompactMask | Tensor | None,
    itself: bool,
) -> _Rules:
    """Return the rules of a call; `itself`: what is padding among the keys is so among the queries."""
    module, query, given = call.module, call.query, call.given
    (B, _, T, _), S = query.shape, call.key.shape[2]
    bias = None
    if mask is None:
        causal = given.get("is_causal")
        causal = causal if causal is not None else getattr(module, "is_causal", True)
        hides = reading.is_fused and causal and T > 1  # elsewhere no mask hides nothing
        used = min(S, T) if hides else S  # torch puts the first query beside the first key
        rules = NOTHING_HIDDEN if not hides else CAUSAL if used == T else Mask(right=T - used)
    else:
        if isinstance(mask, Tensor) and mask.ndim < 4:
            mask = mask[(None,) * (4 - mask.ndim)]  # as torch spreads it over scores [B, H, T, S]
        if isinstance(mask, Tensor) and not reading.is_fused and not mask.is_floating_point():
            rules, bias, used = Mask(), mask.to(query.dtype), S  # True is added as 1, and hides nothing
        else:
            rules, bias, used = rules_of(mask, T, S, itself, B)
    position_bias = given.get("position_bias") if "position_bias" in code.parameters else None
    if position_bias is not None:
        position_bias = position_bias[..., :used] if used < S else position_bias
        bias = position_bias if bias is None else bias + position_bias
    sinks = given.get("s_aux") if "s_aux" in code.parameters else None
    if "sinks" in code.mentions:
        sinks = module.sinks
    scale = given.get("scaling")
    return _Rules(
        rules, bias, used,
        scale if type(scale) is float else _scale(code, module, query, scale),
        given.get("softcap") if "softcap" in code.parameters else None,
        None if sinks is None else sinks.to(query.dtype).flatten(),
        (given.get("dropout") or 0.0) if reading.is_fused or module.training else 0.0,
    )  # fmt: skip


def _proved(code: AttentionCode, function: Function, call: FunctionCall) -> Reading | str:
    """Return how a function treats calls of this kind, shown by running it; or why it is not known."""
    query, key, given = call.query, call.key, call.given
    if not query.ndim == key.ndim == call.value.ndim == 4:
        return f"{code.name} is given query {list(query.shape)} and key {list(key.shape)}, not [B, H, T, D]"
    for name, x in (("attention_mask", call.mask), ("position_bias", given.get("position_bias"))):
        if x is not None and (not isinstance(x, Tensor) or x.ndim > 4):
            return f"{code.name} is given {name}={type(x).__name__}"
    kind = call_key(code, call)
    proof = code.proofs.get(kind)
    if proof is None:
        if len(code.proofs) >= MOST_KINDS:
            code.proofs.clear()
        proof = code.proofs[kind] = _prove(code, function, draw(code, call), given.get("dropout"))
    return proof


def _prove(code: AttentionCode, function: Function, call: FunctionCall, dropout: object) -> Reading | str:
    try:
        answer = run(function, call)
        dropped = run(function, call, dropout=1.0) if dropout else None
    except Exception as error:  # whatever a stranger's function raises is told
        return f"{code.name} raises {type(error).__name__} on small tensors of this kind: {error}"
    reasons = []
    fused = "softmax" not in code.mentions
    for is_fused in (fused, not fused):  # what its code suggests, then the other
        reading = Reading(is_fused, gives_weights=isinstance(answer, tuple) and answer[-1] is not None)
        try:
            output, weights = _ours(code, reading, call)
        except HeadwiseError as error:
            reasons.append(f"takes what headwise does not ({error})")
            continue
        reason = difference(answer, output, weights)
        if reason is None and dropped is not None:
            # All weights dropped leave 0, whichever random numbers dropped them
            drops = is_fused or call.module.training
            reason = difference((dropped[0], None), torch.zeros_like(output) if drops else output, weights)
            reason = reason and f"{reason} when all weights are dropped out (dropout=1.0)"
        if reason is None:
            return reading
        reasons.append(reason)
    return f"{code.name} {reasons[0]}, run once on small tensors of this kind"


def _ours(code: AttentionCode, reading: Reading, call: FunctionCall) -> tuple[Tensor, Tensor]:
    """(output [B, T, H, D], weights [B, H, T, S]) that we answer with"""
    S = call.key.shape[2]
    by = _rules_of_call(code, reading, call, call.mask, itself=False)
    k, v = call.key[:, :, : by.used], call.value[:, :, : by.used]
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        budget.limit(budget.NO_LIMIT),  # a user's is for what grows with the text
        quietly(),
    ):
        output, weights = attention(
            call.query, k, v, mask=by.mask, bias=by.bias, scale=by.scale, softcap=by.softcap, sinks=by.sinks
        )
        return output.transpose(1, 2), _dense(code, weights, S - by.used)


def _dense(code: AttentionCode, weights: AttentionMap, unused: int) -> Tensor:
    """The weights as a function returns them."""
    p = torch.nn.functional.pad(weights.dense(), (0, unused))
    return p / p.sum(-1, keepdim=True) if "logsumexp" in code.mentions else p  # before the sink


def _answer(
    code: AttentionCode, reading: Reading, path: str, call: FunctionCall
) -> tuple[tuple[Tensor, Tensor | None], AttentionMap]:
    """What a model's own function would give, with the heads' output announced on its way; and the map.

    Returns ((output [B, T, H, D], its weights, made where they are looked at), map).
    """
    module, query, key, value, attention_mask, given = call
    T, S = query.shape[2], key.shape[2]
    mask: CompactMask | Tensor | None = attention_mask
    if attention_mask is not None and not reading.is_fused and not attention_mask.is_floating_point():
        mask = as_tensor(attention_mask)  # what it says is not what is added
    elif isinstance(attention_mask, LazyMask):
        mask = attention_mask.meaning
    cross = _is_cross(module, path, T, S, mask, given.get("is_causal"))
    made = isinstance(mask, Tensor) and not cross and T == S and _is_masked(module)
    by = _rules_of_call(code, reading, call, mask, itself=not cross and not made)
    rules, used = by.mask, by.used
    if made:
        rules = _with_padding_given(rules, real_queries_now(path, query.shape[0], T))
    # What is filled of a cache; a copy, for a buffer that is filled in place, as far as one can know, goes on
    # changing.
    if used < S or key.is_inference() or key._version > 0:
        key, value = key[:, :, :used].clone(), value[:, :, :used].clone()
    if cross and rules.queries is None:
        real = real_queries_now(path, query.shape[0], T)
        if real is not None and isinstance(mask, CompactMask):
            rules = mask.counting(rules, real)
        elif real is not None:
            rules = replace(rules, queries=real)
    output, weights = attended(
        module,
        "cross" if cross else "self",
        query, key.to(query.dtype), value.to(query.dtype),
        mask=rules, bias=by.bias, scale=by.scale, softcap=by.softcap, sinks=by.sinks, dropout=by.dropout,
    )  # fmt: skip
    joined = output.transpose(1, 2).contiguous()  # [B, T, H, D]
    if given.get("output_attentions"):
        return (joined, _dense(code, weights, S - used)), weights
    if not reading.gives_weights:
        return (joined, None), weights
    shape = torch.Size((*weights.shape[:3], S))
    standing = LazyMask.of(shape, query.dtype, query.device, lambda: _dense(code, weights, S - used))
    return (joined, standing), weights


def _with_padding_given(rules: Mask, real: Tensor | None) -> Mask:
    """Rules that a model made of its padding itself: a key that nobody sees may be one that nobody chose."""
    if real is None or rules.queries is not None:
        return rules
    seen = rules.allowed
    sees_padding = seen is not None and bool((seen & real[:, None, :, None] & ~real[:, None, None]).any())
    return replace(rules, queries=real, keys=rules.keys if sees_padding else real)


def _is_masked(module: nn.Module) -> bool:
    """Return True if the model around a layer has asked its own mask function in this forward."""
    config = getattr(module, "config", None)
    around = [attachment.current_forward.masked for attachment in tuple(active) if module in attachment.paths]
    return any(config is asked for masked in around for asked in masked)


def _scale(code: AttentionCode, module: nn.Module, query: Tensor, scaling: Any) -> float | None:
    if scaling is None:
        D = getattr(module, "head_dim", None) if "head_dim" in code.mentions else None
        return float(query.shape[-1] if D is None else D) ** -0.5
    return float(scaling) if isinstance(scaling, Tensor) and not scaling.requires_grad else scaling


def _is_cross(
    module: nn.Module, path: str | None, T: int, S: int, mask: object, is_causal: bool | None
) -> bool:
    """Return True if keys come from elsewhere, as far as a layer lets one know."""
    if getattr(module, "is_cross_attention", False) is True or sounds_cross(path):
        return True
    causal = is_causal or getattr(module, "is_causal", False)
    causal = mask.is_causal if isinstance(mask, CompactMask) else causal
    return T not in (1, S) and not causal
