"""Hugging Face Transformers: headwise replaces a model's functions for attention and for masks.

Models look both up by a name in their config, and depend on that name, on whether there is a mask, and on the
mask's class. So names and registered functions stay; only flash and flex attention have another name in the
config inside a block. There the registries' lookup methods return a function that looks at the calling
module. For a watched module headwise computes what its function would return (`attend_for`); other modules
get their original function. After the block the lookup methods are Transformers' again.

    the layer's forward ──> q, k, v of its projections, its mask
        └─ looks up its attention function ──> `attend` ──> `attend_for`
              what its code says, checked once ──> mask, bias, scale ──> `attended` ──> listeners

Most functions compute softmax(scale q k + bias + mask) v, but with different arguments. So a call is
described not by its arguments but by what the function makes of them (`attention_functions.py`).
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
from ...heads.layer_names import path_in_words
from ...map import AttentionMap
from ...masks import CAUSAL, NOTHING_HIDDEN, Mask
from ...private_names import check_transformers
from ..active import active, announce, path_of, quietly, real_queries_now
from ..attachment import Attachment
from ..model_structure import DISPATCHES, names_in, sounds_cross
from ..module_overrides import share
from .attended import attended, remember_call, repeat_call
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

IMPLEMENTATION = "_attn_implementation_internal"

FIRST = ("query", "key", "value", "attention_mask")
SDPA = Reading(is_fused=True, gives_weights=False)
MOST_KINDS = 256  # of calls that are cached for a function
SUM_TOLERANCE = 0.02  # of a row of weights in half precision, which sums to 1


Function = Callable[..., Any]


def hear_huggingface(attachment: Attachment) -> None:
    """Replace the attention and mask functions of the model."""
    configs = _configs(attachment)
    if configs:  # the registries are changed once for all attachments
        share(attachment.undo, owner=_change_lookup, change=_change_lookup)
    for config in configs:
        if _is_kernel(config):
            share(attachment.undo, config, partial(_rename_implementation, attachment, config))


# Configs of watched models


def _configs(attachment: Attachment) -> list[object]:
    """Return the configs from which the model and its layers read the name of their implementation."""
    return attachment.structure.once("configs", lambda: _find_configs(attachment.model))


def _find_configs(model: nn.Module) -> list[object]:
    """Return what `_configs` does, uncached."""
    if "transformers" not in sys.modules:
        return []
    from transformers import PreTrainedModel

    configs: list[object] = []
    for module in model.modules():
        parts = module.modules() if isinstance(module, PreTrainedModel) else [module]
        if any(DISPATCHES in names_in(type(part)) for part in parts):
            check_transformers()
            config = getattr(module, "config", None)
            if hasattr(config, IMPLEMENTATION) and not any(config is other for other in configs):
                configs.append(config)
    return configs


# Opaque kernels, which are replaced by another implementation of the model


def _is_kernel(config: object) -> bool:
    """Return True if the implementation of a config is flash or flex attention."""
    name = getattr(config, IMPLEMENTATION)
    name = name.original if isinstance(name, _StandInName) else name  # set by another block
    return isinstance(name, str) and ("flash" in name or name == "flex_attention") and "paged|" not in name


class _StandInName(str):
    """The name of an implementation in place of the original; a copy of it is the original name."""

    original: str

    def __new__(cls, name: str, original: str) -> _StandInName:
        created = super().__new__(cls, name)
        created.original = original
        return created

    def __deepcopy__(self, _: object) -> str:
        return self.original

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.original,)


def _rename_implementation(attachment: Attachment, config: object, undo: ExitStack) -> None:
    """Set "sdpa" in place of flash or flex attention, or "eager" if a model has no "sdpa"."""
    from transformers import PreTrainedModel

    owners = [m for m in attachment.model.modules() if getattr(m, "config", None) is config]
    models = [m for m in owners if isinstance(m, PreTrainedModel)]
    name = "sdpa" if models and all(getattr(m, "_supports_sdpa", False) for m in models) else "eager"
    original = getattr(config, IMPLEMENTATION)
    stand_in = _StandInName(name, original)
    setattr(config, IMPLEMENTATION, stand_in)

    def restore() -> None:
        if getattr(config, IMPLEMENTATION) is stand_in:  # else the user has set another one
            setattr(config, IMPLEMENTATION, original)

    undo.callback(restore)


# The lookup


def _change_lookup(undo: ExitStack) -> None:
    """Wrap the lookup methods of Transformers' registries."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for kind, name, wrap in (
        (AttentionInterface, "get_interface", _wrapped),
        (AttentionInterface, "__getitem__", _wrapped),
        (AttentionMaskInterface, "__getitem__", _wrapped_masks),
    ):
        _set_method(undo, kind, name, _wrapped_lookup(getattr(kind, name), wrap))


def _wrapped_lookup(look_up: Function, wrap: Function) -> Function:
    """Return a lookup that returns a wrapper of each function, made once."""
    wrappers: dict[Function, Function] = {}

    @functools.wraps(look_up)
    def look_up_wrapped(self: object, *args: Any, **kwargs: Any) -> Function:
        original: Function = look_up(self, *args, **kwargs)
        if hasattr(original, "__headwise_original__"):  # another lookup has wrapped it already
            return original
        try:
            return wrappers.get(original) or wrappers.setdefault(original, wrap(original))
        except TypeError:  # not hashable
            function: Function = wrap(original)
            return function

    return look_up_wrapped


def _set_method(undo: ExitStack, kind: type, name: str, method: Function) -> None:
    """Set a method of a class until `undo` is closed."""
    before = vars(kind).get(name)
    setattr(kind, name, method)

    def restore() -> None:
        if vars(kind).get(name) is not method:
            return  # another wrapper calls this method, which then calls the original only
        if before is None:
            delattr(kind, name)
        else:
            setattr(kind, name, before)

    undo.callback(restore)


def _wrapped(original: Function) -> Function:
    """Wrap an attention function: calls of watched modules go to `attend_for`, others to the original."""

    @functools.wraps(original)
    def attend(module: nn.Module, *args: object, **kwargs: object) -> object:
        listening = active[:]  # a copy, for other threads may change it
        if len(listening) == 1 and module in listening[0].hooks:  # the usual case
            return attend_for(listening, original, module, args, kwargs)
        listening = [attachment for attachment in listening if module in attachment.paths]
        if not listening:
            return original(module, *map(as_tensor, args), **{n: as_tensor(x) for n, x in kwargs.items()})
        return attend_for(listening, original, module, args, kwargs)

    attend.__headwise_original__ = original  # type: ignore[attr-defined]
    return attend


def _wrapped_masks(original: Function) -> Function:
    """Wrap a mask function: a watched model gets a mask whose values are computed when they are read."""

    @functools.wraps(original)
    def mask(*args: object, **call: object) -> object:
        config = call.get("config")
        attachments = [a for a in active for other in _configs(a) if other is config]
        if args or not attachments:
            return original(*args, **call)
        for attachment in attachments:
            attachment.current_forward.masked.append(config)
        return compact_mask(original, **call)

    mask.__headwise_original__ = original  # type: ignore[attr-defined]
    return mask


# Computing in place of a function


def attend_for(
    listening: list[Attachment],
    function: Function,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> object:
    """Return what a model's function would, called with the module, `args` and `kwargs`.

    listening: the attachments of models that contain the module.
    """
    forward = listening[0]._running.run
    if forward is not None:
        for plan in forward.call_plans:
            repeated = repeat_call(plan, forward, function, module, args, kwargs)
            if repeated is not None:
                return repeated.transpose(1, 2).contiguous(), None  # [B, T, H, D]
    code = read(function)
    names = code.parameters[1:] or FIRST
    arguments = {**code.defaults, **dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, mask = map(arguments.pop, names[: len(FIRST)], (None,) * len(FIRST))
    call = FunctionCall(module, query, key, value, mask, arguments)
    reason = None if not code.unknown and code.uses.isdisjoint(arguments) else code.why_not(arguments)
    # Torch's function has no soft cap: that of Transformers raises, or, before 5.18, ignores the cap.
    refuses = code.is_sdpa and "softcap" in code.mentions and arguments.get("softcap") is not None
    if reason is None and not refuses:
        reading = SDPA if code.is_sdpa else _checked(code, function, call)
        if isinstance(reading, Reading):
            result, weights = _attend(code, reading, listening[0].paths[module], call)
            if forward is not None and code.is_sdpa:
                remember_call(forward, function, module, args, kwargs, weights)
            return result
        reason = reading
    if reason is not None and any(attachment.fallback is None for attachment in listening):
        raise AttentionBypassed(
            f"attention of {path_of(module)} must be one that headwise knows: {reason}; read its weights "
            "with fallback='eager' if it computes them, or leave this layer out with fallback='skip'"
        )
    with quietly():
        result = function(module, *map(as_tensor, args), **{n: as_tensor(x) for n, x in kwargs.items()})
    if any(attachment.reads_eager for attachment in listening):
        _announce_eager(code, module, result, query, key)
    return result


def _announce_eager(
    code: AttentionCode, module: nn.Module, result: object, query: Tensor, key: Tensor
) -> None:
    """Announce the weights that a model's function returns with its output, if each row sums to 1."""
    weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
    (B, H, T), S, path = query.shape[:3], key.shape[2], path_of(module)
    if not isinstance(weights, Tensor) or tuple(weights.shape) != (B, H, T, S):
        return
    sums = weights.detach().sum(-1, dtype=torch.float32)
    has_sink = not code.mentions.isdisjoint(("sinks", "s_aux"))  # a sink has the rest of a row
    is_wrong = (sums > 1 + SUM_TOLERANCE) | ((sums < 1 - SUM_TOLERANCE) & (sums != 0) & (not has_sink))
    if bool(is_wrong.any()):
        low, high = sums.min().item(), sums.max().item()
        raise AttentionBypassed(
            f"weights of {path_in_words(path or '')} must sum to 1 over the keys of each query: those that "
            f"{code.name} returns sum to {low:.3g} to {high:.3g}; run model.eval() if it returns them after "
            "dropout, or leave this layer out with fallback='skip'"
        )
    copy = weights.detach().clone()  # the model may write to its weights
    attention_map = AttentionMap.from_weights(copy, Mask(queries=real_queries_now(path, B, T)))
    cross = _is_cross(module, path, T, S, None, None)
    announce(module, "cross" if cross else "self", attention_map, None, None)


# What a function computes


class _Rules(NamedTuple):
    """What a function makes of a call: the arguments of `headwise.attention` beside q, k and v."""

    mask: Mask
    bias: Tensor | None
    used: int  # number of keys; the rest of the cache is not filled yet
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
    """Return the rules of a call; `itself`: the padding of keys is that of queries."""
    module, query, arguments = call.module, call.query, call.arguments
    (B, _, T, _), S = query.shape, call.key.shape[2]
    bias = None
    if mask is None:
        causal = arguments.get("is_causal")
        causal = causal if causal is not None else getattr(module, "is_causal", True)
        is_masked = reading.is_fused and causal and T > 1  # for other functions, no mask hides nothing
        used = min(S, T) if is_masked else S  # torch aligns the first query with the first key
        rules = NOTHING_HIDDEN if not is_masked else CAUSAL if used == T else Mask(right=T - used)
    else:
        if isinstance(mask, Tensor) and mask.ndim < 4:
            mask = mask[(None,) * (4 - mask.ndim)]  # as torch broadcasts it to scores [B, H, T, S]
        if isinstance(mask, Tensor) and not reading.is_fused and not mask.is_floating_point():
            rules, bias, used = Mask(), mask.to(query.dtype), S  # True is added as 1, which hides nothing
        else:
            rules, bias, used = rules_of(mask, T, S, itself, B)
    position_bias = arguments.get("position_bias") if "position_bias" in code.parameters else None
    if position_bias is not None:
        position_bias = position_bias[..., :used] if used < S else position_bias
        bias = position_bias if bias is None else bias + position_bias
    sinks = arguments.get("s_aux") if "s_aux" in code.parameters else None
    if "sinks" in code.mentions:
        sinks = module.sinks
    scale = arguments.get("scaling")
    return _Rules(
        rules, bias, used,
        scale if type(scale) is float else _scale(code, module, query, scale),
        arguments.get("softcap") if "softcap" in code.parameters else None,
        None if sinks is None else sinks.to(query.dtype).flatten(),
        (arguments.get("dropout") or 0.0) if reading.is_fused or module.training else 0.0,
    )  # fmt: skip


def _checked(code: AttentionCode, function: Function, call: FunctionCall) -> Reading | str:
    """Return how a function treats calls of this kind, checked by running it, or why it is refused."""
    query, key, arguments = call.query, call.key, call.arguments
    if not query.ndim == key.ndim == call.value.ndim == 4:
        return f"{code.name} is given query {list(query.shape)} and key {list(key.shape)}, not [B, H, T, D]"
    for name, x in (("attention_mask", call.mask), ("position_bias", arguments.get("position_bias"))):
        if x is not None and (not isinstance(x, Tensor) or x.ndim > 4):
            return f"{code.name} is given {name}={type(x).__name__}"
    kind = call_key(code, call)
    proof = code.proofs.get(kind)
    if proof is None:
        if len(code.proofs) >= MOST_KINDS:
            code.proofs.clear()
        proof = code.proofs[kind] = _check(code, function, draw(code, call), arguments.get("dropout"))
    return proof


def _check(code: AttentionCode, function: Function, call: FunctionCall, dropout: object) -> Reading | str:
    """Run a function on a small call; return how it treats it, or how its result differs from headwise's."""
    try:
        result = run(function, call)
        dropped = run(function, call, dropout=1.0) if dropout else None
    except Exception as error:  # any error of the function is reported
        return f"{code.name} raises {type(error).__name__} on small tensors of this kind: {error}"
    reasons = []
    suggests_fused = "softmax" not in code.mentions
    for is_fused in (suggests_fused, not suggests_fused):  # first what its code suggests
        reading = Reading(is_fused, gives_weights=isinstance(result, tuple) and result[-1] is not None)
        try:
            output, weights = _computed(code, reading, call)
        except HeadwiseError as error:
            reasons.append(f"takes arguments that headwise does not support ({error})")
            continue
        reason = difference(result, output, weights)
        if reason is None and dropped is not None:
            # With all weights dropped the output is 0, whatever the random numbers
            drops = is_fused or call.module.training
            reason = difference((dropped[0], None), torch.zeros_like(output) if drops else output, weights)
            reason = reason and f"{reason} when all weights are dropped out (dropout=1.0)"
        if reason is None:
            return reading
        reasons.append(reason)
    return f"{code.name} {reasons[0]}, run once on small tensors of this kind"


def _computed(code: AttentionCode, reading: Reading, call: FunctionCall) -> tuple[Tensor, Tensor]:
    """Return headwise's output [B, T, H, D] and weights [B, H, T, S] of a call."""
    S = call.key.shape[2]
    rules = _rules_of_call(code, reading, call, call.mask, itself=False)
    k, v = call.key[:, :, : rules.used], call.value[:, :, : rules.used]
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        budget.limit(budget.NO_LIMIT),  # the user's limit is for tensors that grow with the text
        quietly(),
    ):
        output, weights = attention(
            call.query,
            k,
            v,
            mask=rules.mask,
            bias=rules.bias,
            scale=rules.scale,
            softcap=rules.softcap,
            sinks=rules.sinks,
        )
        return output.transpose(1, 2), _dense(code, weights, S - rules.used)


def _dense(code: AttentionCode, weights: AttentionMap, unused: int) -> Tensor:
    """Return the weights as a function returns them, [B, H, T, S]."""
    p = torch.nn.functional.pad(weights.dense(), (0, unused))
    return p / p.sum(-1, keepdim=True) if "logsumexp" in code.mentions else p  # without the sink


def _attend(
    code: AttentionCode, reading: Reading, path: str, call: FunctionCall
) -> tuple[tuple[Tensor, Tensor | None], AttentionMap]:
    """Attend and announce the call; return what the model's function would, and the map.

    Returns ((output [B, T, H, D], weights that are computed when they are read), map).
    """
    module, query, key, value, attention_mask, arguments = call
    T, S = query.shape[2], key.shape[2]
    mask: CompactMask | Tensor | None = attention_mask
    if attention_mask is not None and not reading.is_fused and not attention_mask.is_floating_point():
        mask = as_tensor(attention_mask)  # its rules are not what is added to scores
    elif isinstance(attention_mask, LazyMask):
        mask = attention_mask.meaning
    cross = _is_cross(module, path, T, S, mask, arguments.get("is_causal"))
    is_custom = isinstance(mask, Tensor) and not cross and T == S and _is_masked(module)
    call_rules = _rules_of_call(code, reading, call, mask, itself=not cross and not is_custom)
    rules, used = call_rules.mask, call_rules.used
    if is_custom:
        rules = _with_padding(rules, real_queries_now(path, query.shape[0], T))
    # The filled part of a cache, copied if it may be a buffer that is filled in place
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
        mask=rules, bias=call_rules.bias, scale=call_rules.scale, softcap=call_rules.softcap,
        sinks=call_rules.sinks, dropout=call_rules.dropout,
    )  # fmt: skip
    joined = output.transpose(1, 2).contiguous()  # [B, T, H, D]
    if arguments.get("output_attentions"):
        return (joined, _dense(code, weights, S - used)), weights
    if not reading.gives_weights:
        return (joined, None), weights
    shape = torch.Size((*weights.shape[:3], S))
    lazy = LazyMask.of(shape, query.dtype, query.device, lambda: _dense(code, weights, S - used))
    return (joined, lazy), weights


def _with_padding(rules: Mask, real: Tensor | None) -> Mask:
    """Add padding to a mask that the model made itself, in which a hidden key need not be padding."""
    if real is None or rules.queries is not None:
        return rules
    allowed = rules.allowed
    sees_padding = allowed is not None and bool(
        (allowed & real[:, None, :, None] & ~real[:, None, None]).any()
    )
    return replace(rules, queries=real, keys=rules.keys if sees_padding else real)


def _is_masked(module: nn.Module) -> bool:
    """Return True if the model around a layer has called its mask function in this forward."""
    config = getattr(module, "config", None)
    lists = [attachment.current_forward.masked for attachment in tuple(active) if module in attachment.paths]
    return any(config is other for masked in lists for other in masked)


def _scale(code: AttentionCode, module: nn.Module, query: Tensor, scaling: Any) -> float | None:
    if scaling is None:
        D = getattr(module, "head_dim", None) if "head_dim" in code.mentions else None
        return float(query.shape[-1] if D is None else D) ** -0.5
    return float(scaling) if isinstance(scaling, Tensor) and not scaling.requires_grad else scaling


def _is_cross(
    module: nn.Module, path: str | None, T: int, S: int, mask: object, is_causal: bool | None
) -> bool:
    """Return True if keys come from another text, as far as the layer shows."""
    if getattr(module, "is_cross_attention", False) is True or sounds_cross(path):
        return True
    causal = is_causal or getattr(module, "is_causal", False)
    causal = mask.is_causal if isinstance(mask, CompactMask) else causal
    return T not in (1, S) and not causal
