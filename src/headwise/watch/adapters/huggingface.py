"""Hugging Face Transformers: we stand between a model and its own functions for attention and for masks.

Models look both up by the name in their config, and branch on that name, on whether there is a mask, on what
class it has. So names, configs and registries stay as they are: only the lookup answers, inside a block, with
a function that asks who calls. A module that is listened to is answered by us as its own function would
answer; every other module by its own function. What is understood of a function is read from its code: one
that mentions what we know nothing of, or is handed what it uses and we do not, is refused by name.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...errors import AttentionBypassed
from ...map import AttentionMap
from ...masks import Mask
from ..attachment import Attachment
from ..holding import Undo, hold, undo_all
from ..now import active, announce, padding_now, path_of, quietly
from ..places import DISPATCHES, names_in, sounds_cross
from .attending import attended
from .huggingface_masks import CompactMask, Standing, as_tensor, compact_mask, rules_of

__all__ = ["install"]

NAME = "headwise"
OWN = "_attn_implementation_internal"

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


def install(attachment: Attachment) -> Undo:
    """Stand between the model and its own functions."""
    configs = _configs(attachment)
    if not configs:
        return lambda: None
    other = [config for config in configs if _is_a_kernel_of(config)]
    undos = [hold(("lookup", NAME), _stand_between)]
    return undo_all(undos + [hold(_Same(config), partial(_stand_in, attachment, config)) for config in other])


class _Same:
    """A key that is this very object, and keeps it: a number of an object may go to another one."""

    def __init__(self, this: Any) -> None:
        self.this = this

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.this is other.this

    def __hash__(self) -> int:
        return id(self.this)


# Whose masks and calls are ours


def _configs(attachment: Attachment) -> list[Any]:
    """The configs that layers which dispatch, and the models around them, read the implementation from."""
    return attachment.structure.once(NAME, lambda: _find_configs(attachment.model))


def _find_configs(model: nn.Module) -> list[Any]:
    if "transformers" not in sys.modules:
        return []
    found: list[Any] = []
    for module in model.modules():
        is_one = DISPATCHES in names_in(type(module))
        if is_one or any(DISPATCHES in names_in(type(inner)) for inner in _below_a_model(module)):
            config = getattr(module, "config", None)
            if hasattr(config, OWN) and not any(config is each for each in found):
                found.append(config)
    return found


def _below_a_model(module: nn.Module) -> list[nn.Module]:
    from transformers import PreTrainedModel

    return list(module.modules()) if isinstance(module, PreTrainedModel) else []


def _listening_to(config: Any) -> list[Attachment]:
    return [one for one in active if any(config is each for each in _configs(one))]


# Kernels that say nothing of what they do: the model's other implementation takes their place


def _is_a_kernel_of(config: Any) -> bool:
    name = getattr(config, OWN)
    return isinstance(name, str) and ("flash" in name or name == "flex_attention") and "paged|" not in name


class _InPlaceOf(str):
    """The name of an implementation that stands in for another; a copy of it is that other's name."""

    own: str

    def __new__(cls, name: str, own: str) -> _InPlaceOf:
        made = super().__new__(cls, name)
        made.own = own
        return made

    def __deepcopy__(self, _: Any) -> str:
        return self.own

    def __reduce__(self) -> Any:
        return str, (self.own,)


def _stand_in(attachment: Attachment, config: Any) -> Undo:
    """Flash and flex attention compute what "sdpa" does, or "eager" where a model has no "sdpa"."""
    from transformers import PreTrainedModel

    owners = [m for m in attachment.model.modules() if getattr(m, "config", None) is config]
    models = [m for m in owners if isinstance(m, PreTrainedModel)]
    name = "sdpa" if models and all(getattr(m, "_supports_sdpa", False) for m in models) else "eager"
    own = getattr(config, OWN)
    set_to = _InPlaceOf(name, own)
    setattr(config, OWN, set_to)

    def undo() -> None:
        if getattr(config, OWN) is set_to:  # else somebody has chosen another one meanwhile
            setattr(config, OWN, own)

    return undo


# The lookup


def _stand_between() -> Undo:
    from transformers import AttentionInterface, AttentionMaskInterface

    found = AttentionInterface.get_interface

    @functools.wraps(found)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Function:
        return _between(found(self, *args, **kwargs))

    return undo_all(
        [
            _put(AttentionInterface, "get_interface", get_interface),
            _put(AttentionInterface, "__getitem__", _answering(AttentionInterface.__getitem__, _between)),
            _put(
                AttentionMaskInterface,
                "__getitem__",
                _answering(AttentionMaskInterface.__getitem__, _between_masks),
            ),
        ]
    )


def _answering(look_up: Function, between: Function) -> Function:
    @functools.wraps(look_up)
    def __getitem__(self: Any, name: Any) -> Function:  # noqa: N807
        found: Function = between(look_up(self, name))
        return found

    return __getitem__


def _put(kind: type, name: str, ours: Function) -> Undo:
    before = vars(kind).get(name)
    setattr(kind, name, ours)

    def undo() -> None:
        if vars(kind).get(name) is not ours:
            return  # somebody stands before us now; alone, ours answers as theirs would
        if before is None:
            delattr(kind, name)
        else:
            setattr(kind, name, before)

    return undo


def _between(own: Function) -> Function:
    """The function a model looked up, ours for those who are listened to."""
    if hasattr(own, "__headwise_own__"):
        return own

    @functools.wraps(own)
    def attend(module: Any, *args: Any, **kwargs: Any) -> Any:
        listening = [each for each in active if module in each.paths]
        if not listening:
            return own(module, *map(as_tensor, args), **{n: as_tensor(x) for n, x in kwargs.items()})
        return _attend(listening, own, module, args, kwargs)

    attend.__headwise_own__ = own  # type: ignore[attr-defined]
    return attend


def _between_masks(own: Function) -> Function:
    if hasattr(own, "__headwise_own__"):
        return own

    @functools.wraps(own)
    def mask(*args: Any, **call: Any) -> Any:
        listening = [] if args else _listening_to(call.get("config"))
        for each in listening:
            each.forward.masked.append(call["config"])
        return compact_mask(own, **call) if listening else own(*args, **call)

    mask.__headwise_own__ = own  # type: ignore[attr-defined]
    return mask


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
_read: WeakKeyDictionary[Any, _Own] = WeakKeyDictionary()


def _own(function: Function) -> _Own:
    if not isinstance(function, FunctionType):
        return _read_code(function)
    found = _read.get(function)
    if found is None or found.code is not function.__code__:
        found = _read[function] = _read_code(function)
    return found


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


def _why_not(own: _Own, given: dict[str, Any]) -> str | None:
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


def _attend(
    listening: list[Attachment],
    function: Function,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    own = _own(function)
    names = own.parameters[1:] or FIRST
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value, mask = (given.pop(name, None) for name in names[: len(FIRST)])
    reason = _why_not(own, given)
    if reason is None and not (own.is_fused and given.get("softcap") is not None):
        return attention_function(own, module, query, key, value, mask, given)
    if reason is not None and any(each.fallback is None for each in listening):
        raise AttentionBypassed(
            f"attention of {path_of(module)} must be one that headwise knows: {reason}; read its weights "
            "with fallback='eager' if it makes them, or leave this layer out with fallback='skip'"
        )
    with quietly():  # torch's function has no soft cap, and says so
        answer = function(module, *map(as_tensor, args), **{n: as_tensor(x) for n, x in kwargs.items()})
    if any(each.reads_eager for each in listening):
        _look(module, answer, query, key)
    return answer


def _look(module: nn.Module, answer: Any, query: Tensor, key: Tensor) -> None:
    """Tell of the weights that a model's own function gives beside its output."""
    weights = answer[1] if isinstance(answer, tuple) and len(answer) > 1 else None
    (B, H, T), S, path = query.shape[:3], key.shape[2], path_of(module)
    if isinstance(weights, Tensor) and tuple(weights.shape) == (B, H, T, S):
        found = AttentionMap.from_weights(weights.detach(), Mask(queries=padding_now(path, B, T)))
        announce(module, "cross" if _is_cross(module, T, S, None, None) else "self", found, None, None)


def attention_function(
    own: _Own,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    given: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """What a model's own function would give, with the heads' output announced on its way.

    Args:
        query: [B, H, T, D]
        key, value: [B, Hk, S, D], not repeated.
        given: what else it was called with.

    Returns:
        [B, T, H, D], and the weights, made where they are looked at.
    """
    T, S = query.shape[2], key.shape[2]
    mask = _meaning(own, attention_mask)
    is_causal = given.get("is_causal")
    cross = _is_cross(module, T, S, mask, is_causal)
    if mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        hides = own.is_fused and causal and T > 1  # elsewhere no mask hides nothing
        used = min(S, T) if hides else S  # torch puts the first query beside the first key
        rules, bias = Mask(right=T - used) if hides else Mask(), None
    else:
        if isinstance(mask, Tensor) and mask.ndim < 4:
            mask = mask[(None,) * (4 - mask.ndim)]  # as torch spreads it over scores [B, H, T, S]
        made = isinstance(mask, Tensor) and not cross and T == S and _is_masked(module)
        if isinstance(mask, Tensor) and not own.is_fused and not mask.is_floating_point():
            rules, bias, used = Mask(), mask.to(query.dtype), S  # True is added as 1, and hides nothing
        else:
            rules, bias, used = rules_of(mask, T, S, not cross and not made, query.shape[0])
        if made:
            rules = _with_padding_given(rules, padding_now(path_of(module), query.shape[0], T))
    position_bias = given.get("position_bias") if "position_bias" in own.parameters else None
    if used < S or _is_written_to(key):  # what is filled of a cache; a copy, for the cache goes on changing
        key, value = key[:, :, :used].clone(), value[:, :, :used].clone()
        position_bias = None if position_bias is None else position_bias[..., :used]
    if cross and rules.queries is None:
        rules = replace(rules, queries=padding_now(path_of(module), query.shape[0], T))
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    sinks = given.get("s_aux") if "s_aux" in own.parameters else None
    if "sinks" in own.mentions:
        sinks = module.sinks
    dropout = given.get("dropout") or 0.0
    output, weights = attended(
        module,
        "cross" if cross else "self",
        query, key.to(query.dtype), value.to(query.dtype),
        mask=rules, bias=bias, scale=_scale(own, module, query, given.get("scaling")),
        softcap=given.get("softcap") if "softcap" in own.parameters else None,
        sinks=None if sinks is None else sinks.to(query.dtype).flatten(),
        dropout=dropout if own.is_fused or module.training else 0.0,
    )  # fmt: skip
    joined = output.transpose(1, 2).contiguous()  # [B, T, H, D]

    def dense() -> Tensor:
        found = torch.nn.functional.pad(weights.dense(), (0, S - used))
        return (
            found / found.sum(-1, keepdim=True) if "logsumexp" in own.mentions else found
        )  # before the sink

    if given.get("output_attentions"):
        return joined, dense()
    shape = torch.Size((*weights.shape[:3], S))
    return joined, None if own.is_fused else Standing.of(shape, query.dtype, query.device, dense)


def _meaning(own: _Own, mask: Tensor | None) -> CompactMask | Tensor | None:
    """What a mask says to a model's own function: torch's hides where it is False, others add what it is."""
    if mask is None:
        return None
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
    return any(config is each for one in active if module in one.paths for each in one.forward.masked)


def _scale(own: _Own, module: nn.Module, query: Tensor, scaling: Any) -> float | None:
    if scaling is None:
        D = getattr(module, "head_dim", None) if "head_dim" in own.mentions else None
        return float(query.shape[-1] if D is None else D) ** -0.5
    return float(scaling) if isinstance(scaling, Tensor) and not scaling.requires_grad else scaling


def _is_written_to(key: Tensor) -> bool:
    """Whether keys lie in a buffer that is filled in place, as far as one can know."""
    return key.is_inference() or key._version > 0


def _is_cross(module: nn.Module, T: int, S: int, mask: Any, is_causal: bool | None) -> bool:
    """Whether keys come from elsewhere, as far as a layer lets one know."""
    if getattr(module, "is_cross_attention", False) is True:
        return True
    if sounds_cross(path_of(module)):
        return True
    causal = (
        mask.is_causal if isinstance(mask, CompactMask) else is_causal or getattr(module, "is_causal", False)
    )
    return T not in (1, S) and not causal
