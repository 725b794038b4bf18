"""Hugging Face Transformers: we stand between a model and its own functions for attention and for masks.

Models look both up by the name in their config, and branch on that name, on whether there is a mask, on what
class it has. So names stay as they are, and so does what is registered; only flash and flex attention have
another name in their config meanwhile. Inside a block the registries' lookup methods answer with a function
that asks who calls. A module that is listened to is answered by us as its own function would answer
(huggingface_functions.py); every other module by its own function. After the block the lookup is
Transformers' own again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ...private_names import check_transformers
from ..active import active
from ..attachment import Attachment
from ..model_structure import DISPATCHES, names_in
from ..shared_patches import Undo, hold, undo_all
from .huggingface_functions import answered
from .huggingface_masks import as_tensor, compact_mask

__all__ = ["hear_huggingface"]

NAME = "headwise"
OWN = "_attn_implementation_internal"

Function = Callable[..., Any]


def hear_huggingface(attachment: Attachment) -> Undo:
    """Stand between the model and its own functions."""
    configs = _configs(attachment)
    if not configs:
        return lambda: None
    other = [config for config in configs if _is_a_kernel_of(config)]
    undos = [hold(("lookup", NAME), _stand_between)]
    return undo_all(undos + [hold(_Same(config), partial(_stand_in, attachment, config)) for config in other])


class _Same:
    """A key that is this very object, and keeps it: a number of an object may go to another one."""

    def __init__(self, this: object) -> None:
        self.this = this

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.this is other.this

    def __hash__(self) -> int:
        return id(self.this)


# Whose masks and calls are ours


def _configs(attachment: Attachment) -> list[object]:
    """The configs that layers which dispatch, and the models around them, read the implementation from."""
    return attachment.structure.once(NAME, lambda: _find_configs(attachment.model))


def _find_configs(model: nn.Module) -> list[object]:
    if "transformers" not in sys.modules:
        return []
    configs: list[object] = []
    for module in model.modules():
        is_one = DISPATCHES in names_in(type(module))
        if is_one or any(DISPATCHES in names_in(type(inner)) for inner in _below_a_model(module)):
            check_transformers()
            config = getattr(module, "config", None)
            if hasattr(config, OWN) and not any(config is known for known in configs):
                configs.append(config)
    return configs


def _below_a_model(module: nn.Module) -> list[nn.Module]:
    from transformers import PreTrainedModel

    return list(module.modules()) if isinstance(module, PreTrainedModel) else []


def _listening_to(config: object) -> list[Attachment]:
    return [attachment for attachment in active for known in _configs(attachment) if known is config]


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


def _stand_in(attachment: Attachment, config: object) -> Undo:
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

    ours = _answering(AttentionInterface.get_interface, _between)
    items = _answering(AttentionInterface.__getitem__, _between)
    masks = _answering(AttentionMaskInterface.__getitem__, _between_masks)
    return undo_all(
        [
            _put(AttentionInterface, "get_interface", ours),
            _put(AttentionInterface, "__getitem__", items),
            _put(AttentionMaskInterface, "__getitem__", masks),
        ]
    )


def _answering(look_up: Function, between: Function) -> Function:
    """A lookup that finds, in place of each function, the one that stands between; made once each."""
    made: dict[Function, Function] = {}

    @functools.wraps(look_up)
    def answer(self: object, *args: Any, **kwargs: Any) -> Function:
        own: Function = look_up(self, *args, **kwargs)
        try:
            return made.get(own) or made.setdefault(own, between(own))
        except TypeError:  # one that is not to be found again
            function: Function = between(own)
            return function

    return answer


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
    def attend(module: nn.Module, *args: object, **kwargs: object) -> object:
        listening = active[:]  # as they are now: other threads come and go
        if len(listening) == 1 and module in listening[0].posts:  # nothing else, mostly
            return answered(listening, own, module, args, kwargs)
        listening = [attachment for attachment in listening if module in attachment.paths]
        if not listening:
            return own(module, *map(as_tensor, args), **{n: as_tensor(x) for n, x in kwargs.items()})
        return answered(listening, own, module, args, kwargs)

    attend.__headwise_own__ = own  # type: ignore[attr-defined]
    return attend


def _between_masks(own: Function) -> Function:
    if hasattr(own, "__headwise_own__"):
        return own

    @functools.wraps(own)
    def mask(*args: object, **call: object) -> object:
        listening = [] if args else _listening_to(call.get("config"))
        for attachment in listening:
            attachment.forward_here.masked.append(call["config"])
        return compact_mask(own, **call) if listening else own(*args, **call)

    mask.__headwise_own__ = own  # type: ignore[attr-defined]
    return mask
