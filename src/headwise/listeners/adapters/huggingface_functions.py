"""What the attention functions of Hugging Face's models do, read from their code; answering in their place.

Most compute softmax(scale q k + bias + mask) v, each with another selection of what they take. So what counts
is not what a call hands over but what the function makes of it: an argument its code does not mention comes
to nothing, one that it uses and we do not is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...errors import AttentionBypassed
from ...map import AttentionMap
from ...masks import CAUSAL, NOTHING_HIDDEN, Mask
from ..active import active, announce, padding_now, path_of, quietly
from ..attachment import Attachment
from ..model_structure import sounds_cross
from .attended import attended
from .huggingface_masks import CompactMask, Standing, as_tensor, rules_of
from .layers_alike import answered_alike, leave

__all__ = ["answered"]

# The names in the code of functions that compute softmax(scale q k + bias + mask) v, with a soft cap or a
# sink or without. One that mentions another name may compute something else.
WORDS = frozenset(
    "torch nn F functional matmul transpose softmax dropout training contiguous dtype to type float float32 "
    "repeat_kv num_key_value_groups size shape head_dim tanh sinks reshape expand view unsqueeze cat max "
    "values logsumexp sigmoid getattr hasattr maybe_autocast device".split()
)
# What we do as well; sliding_window says again what the mask says, for kernels that take no mask.
UNDERSTOOD = frozenset("scaling dropout softcap position_bias s_aux output_attentions sliding_window".split())

Function = Callable[..., Any]


# What a model's own function does


@dataclass(frozen=True)
class _Own:
    """What was read in the code of an attention function."""

    function: str  # its name
    parameters: tuple[str, ...]
    mentions: frozenset[str]
    uses: frozenset[str]  # of that, what we know nothing of if it is an argument
    is_fused: bool  # torch's function does the work: no mask leaves the matter to the layer
    unknown: tuple[str, ...]  # names in it that we know nothing of
    code: CodeType | None = None


FIRST = ("query", "key", "value", "attention_mask")
_read: WeakKeyDictionary[FunctionType, _Own] = WeakKeyDictionary()


def _own(function: Function) -> _Own:
    """What is read in a function's code, once for as long as it has that code."""
    if not isinstance(function, FunctionType):
        return _read_code(function)
    read = _read[function] = _read_code(function)
    return read


def _read_code(function: Function) -> _Own:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    parts = (
        getattr(function, "__module__", None),
        getattr(function, "__qualname__", type(function).__name__),
    )
    name = ".".join(str(part) for part in parts if part)
    if not isinstance(function, FunctionType):
        return _Own(
            name, (), frozenset(), frozenset(), False, (f"what a {type(function).__name__} may hold",)
        )
    parameters = inspect.signature(function).parameters
    names, words = _names_and_words(function.__code__)
    is_fused = function is sdpa_attention_forward
    unknown = set() if is_fused else {*(names - WORDS), *function.__code__.co_freevars}
    if not is_fused and "softmax" not in names:
        unknown.add("a softmax that is not there")
    mentions = frozenset(parameters) | names | words
    uses = mentions - UNDERSTOOD - ({"is_causal"} if is_fused else set())
    return _Own(name, tuple(parameters), mentions, uses, is_fused, tuple(sorted(unknown)), function.__code__)


def _names_and_words(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names in a function's code, and the strings, with the functions inside it."""
    names, words = set(code.co_names), set[str]()
    for value in code.co_consts:
        if isinstance(value, CodeType):
            inner = _names_and_words(value)
            names |= inner[0]
            words |= inner[1]
        elif isinstance(value, str):
            words.add(value)
    return frozenset(names), frozenset(words)


def _why_not(own: _Own, given: Mapping[str, object]) -> str | None:
    """What keeps us from answering for a function, in words; None: nothing."""
    if own.unknown:
        return f"{own.function} uses {', '.join(own.unknown)}"
    for name, value in given.items():
        # What its own code does not mention, a function cannot use: there it comes to nothing, as here.
        if value is not None and name in own.uses:
            shape = f" {list(value.shape)}" if isinstance(value, Tensor) else ""
            return f"{own.function} is given {name}={type(value).__name__}{shape}"
    return None


# Answering


def answered(
    listening: list[Attachment],
    function: Function,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> object:
    """What a model's own function would answer.

    Args:
        listening: who listens to this module.
        args, kwargs: what the function is called with, after the module.

    Raises:
        AttentionBypassed: it does what we do not know, and nobody allowed for that.
    """
    run = listening[0]._running.run
    if run is not None:
        for alike in run.alike:
            again = answered_alike(alike, run, function, module, args, kwargs)
            if again is not None:
                return again.transpose(1, 2).contiguous(), None  # [B, T, H, D]
    own = _read.get(function) if isinstance(function, FunctionType) else None
    if own is None or own.code is not function.__code__:
        own = _own(function)
    names = own.parameters[1:] or FIRST
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value, mask = map(given.pop, names[: len(FIRST)], (None,) * len(FIRST))
    reason = None if not own.unknown and own.uses.isdisjoint(given) else _why_not(own, given)
    # Torch's function has no soft cap: Transformers' around it says so, or, before 5.18, leaves the cap out.
    refuses = own.is_fused and "softcap" in own.mentions and given.get("softcap") is not None
    if reason is None and not refuses:
        path = listening[0].paths[module]
        answer, weights = attention_function(own, module, path, query, key, value, mask, given)
        if run is not None and own.is_fused:
            leave(run, function, module, args, kwargs, weights)
        return answer
    if reason is not None and any(attachment.fallback is None for attachment in listening):
        raise AttentionBypassed(
            f"attention of {path_of(module)} must be one that headwise knows: {reason}; read its weights "
            "with fallback='eager' if it makes them, or leave this layer out with fallback='skip'"
        )
    with quietly():
        answer = function(module, *map(as_tensor, args), **{n: as_tensor(x) for n, x in kwargs.items()})
    if any(attachment.reads_eager for attachment in listening):
        _look(module, answer, query, key)
    return answer


def _look(module: nn.Module, answer: object, query: Tensor, key: Tensor) -> None:
    """Tell of the weights that a model's own function gives beside its output."""
    weights = answer[1] if isinstance(answer, tuple) and len(answer) > 1 else None
    (B, H, T), S, path = query.shape[:3], key.shape[2], path_of(module)
    if isinstance(weights, Tensor) and tuple(weights.shape) == (B, H, T, S):
        kind = "cross" if _is_cross(module, path, T, S, None, None) else "self"
        copied = weights.detach().clone()  # the model may write to its own
        given = AttentionMap.from_weights(copied, Mask(queries=padding_now(path, B, T)))
        announce(module, kind, given, None, None)


def attention_function(
    own: _Own,
    module: nn.Module,
    path: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    given: dict[str, Any],
) -> tuple[tuple[Tensor, Tensor | None], AttentionMap]:
    """What a model's own function would give, with the heads' output announced on its way; and the map.

    Args:
        path: of the module.
        query: [B, H, T, D]
        key, value: [B, Hk, S, D], not repeated.
        given: what else it was called with.

    Returns:
        ([B, T, H, D], the weights, made where they are looked at), map
    """
    T, S = query.shape[2], key.shape[2]
    mask = None if attention_mask is None else _meaning(own, attention_mask)
    is_causal = given.get("is_causal")
    cross = _is_cross(module, path, T, S, mask, is_causal)
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        hides = own.is_fused and causal and T > 1  # elsewhere no mask hides nothing
        used = min(S, T) if hides else S  # torch puts the first query beside the first key
        bias = None
        rules = NOTHING_HIDDEN if not hides else CAUSAL if used == T else Mask(right=T - used)
    else:
        if isinstance(mask, Tensor) and mask.ndim < 4:
            mask = mask[(None,) * (4 - mask.ndim)]  # as torch spreads it over scores [B, H, T, S]
        made = isinstance(mask, Tensor) and not cross and T == S and _is_masked(module)
        if isinstance(mask, Tensor) and not own.is_fused and not mask.is_floating_point():
            rules, bias, used = Mask(), mask.to(query.dtype), S  # True is added as 1, and hides nothing
        else:
            rules, bias, used = rules_of(mask, T, S, not cross and not made, query.shape[0])
        if made:
            rules = _with_padding_given(rules, padding_now(path, query.shape[0], T))
    position_bias = given.get("position_bias") if "position_bias" in own.parameters else None
    # What is filled of a cache; a copy, for a buffer that is filled in place, as far as one can know, goes on
    # changing.
    if used < S or key.is_inference() or key._version > 0:
        key, value = key[:, :, :used].clone(), value[:, :, :used].clone()
        position_bias = None if position_bias is None else position_bias[..., :used]
    if cross and rules.queries is None:
        real = padding_now(path, query.shape[0], T)
        if real is not None and isinstance(mask, CompactMask):
            rules = mask.counting(rules, real)
        elif real is not None:
            rules = replace(rules, queries=real)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    sinks = given.get("s_aux") if "s_aux" in own.parameters else None
    if "sinks" in own.mentions:
        sinks = module.sinks
    dropout, scale = given.get("dropout") or 0.0, given.get("scaling")
    output, weights = attended(
        module,
        "cross" if cross else "self",
        query, key.to(query.dtype), value.to(query.dtype),
        mask=rules, bias=bias, scale=scale if type(scale) is float else _scale(own, module, query, scale),
        softcap=given.get("softcap") if "softcap" in own.parameters else None,
        sinks=None if sinks is None else sinks.to(query.dtype).flatten(),
        dropout=dropout if own.is_fused or module.training else 0.0,
    )  # fmt: skip
    joined = output.transpose(1, 2).contiguous()  # [B, T, H, D]

    def dense() -> Tensor:
        p = torch.nn.functional.pad(weights.dense(), (0, S - used))
        return p / p.sum(-1, keepdim=True) if "logsumexp" in own.mentions else p  # before the sink

    if given.get("output_attentions"):
        return (joined, dense()), weights
    if own.is_fused:
        return (joined, None), weights
    standing = Standing.of(torch.Size((*weights.shape[:3], S)), query.dtype, query.device, dense)
    return (joined, standing), weights


def _meaning(own: _Own, mask: Tensor) -> CompactMask | Tensor:
    """What a mask says to a model's own function: torch's hides where it is False, others add what it is."""
    if not own.is_fused and not mask.is_floating_point():
        numbers: Tensor = as_tensor(mask)
        return numbers
    return mask.meaning if isinstance(mask, Standing) else mask


def _with_padding_given(rules: Mask, real: Tensor | None) -> Mask:
    """Rules that a model made of its padding itself: a key that nobody sees may be one that nobody chose."""
    if real is None or rules.queries is not None:
        return rules
    seen = rules.allowed
    sees_padding = seen is not None and bool((seen & real[:, None, :, None] & ~real[:, None, None]).any())
    return replace(rules, queries=real, keys=rules.keys if sees_padding else real)


def _is_masked(module: nn.Module) -> bool:
    """Whether the model around a layer has asked its own mask function in this forward."""
    config = getattr(module, "config", None)
    around = [attachment.forward.masked for attachment in active if module in attachment.paths]
    return any(config is asked for masked in around for asked in masked)


def _scale(own: _Own, module: nn.Module, query: Tensor, scaling: Any) -> float | None:
    if scaling is None:
        D = getattr(module, "head_dim", None) if "head_dim" in own.mentions else None
        return float(query.shape[-1] if D is None else D) ** -0.5
    return float(scaling) if isinstance(scaling, Tensor) and not scaling.requires_grad else scaling


def _is_cross(
    module: nn.Module, path: str | None, T: int, S: int, mask: object, is_causal: bool | None
) -> bool:
    """Whether keys come from elsewhere, as far as a layer lets one know."""
    if getattr(module, "is_cross_attention", False) is True or sounds_cross(path):
        return True
    causal = (
        mask.is_causal if isinstance(mask, CompactMask) else is_causal or getattr(module, "is_causal", False)
    )
    return T not in (1, S) and not causal
