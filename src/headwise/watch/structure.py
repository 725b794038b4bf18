"""What a model is made of, worked out once: paths, places of attention, which modules need a hook.

Watching begins and ends around single forwards, so what does not change between them is kept beside the
model, for as long as it has the same modules, of the same classes, with the same configs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from ..errors import ArgumentError
from .places import likely_places

__all__ = ["Structure", "structure_of"]

Found = TypeVar("Found")


class Structure:
    """The parts of one model."""

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise ArgumentError(
                f"model must not be scripted or traced: {type(model).__name__} holds a ScriptModule, which "
                "takes no hooks; watch the model it was made from"
            )
        # Weakly: what is kept beside a model must not keep the model.
        self.paths = WeakKeyDictionary({module: path for path, module in model.named_modules()})
        self.places = likely_places(model)
        places = set(self.places)
        self.hooked = WeakKeyDictionary(
            {
                module: (path, path in places)
                for module, path in self.paths.items()
                if not path or path in places or not _is_bystander(module)
            }
        )
        self._memo: dict[str, Any] = {}

    def once(self, name: str, find: Callable[[], Found]) -> Found:
        """What `find` returns, worked out the first time."""
        if name not in self._memo:
            self._memo[name] = find()
        found: Found = self._memo[name]
        return found


def _is_bystander(module: nn.Module) -> bool:
    """Whether a module surely does not attend by itself: torch's layers; in Transformers, all but models."""
    home = type(module).__module__
    if home.startswith("transformers."):
        return not hasattr(type(module), "from_pretrained")
    return home.startswith("torch.nn.")


class _Seen:
    """The modules of a model as they were looked at, without keeping them."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(_weak(module), type(module), _weak(_config(module))) for module in model.modules()]

    def is_still(self, model: nn.Module) -> bool:
        """Whether the model has these very modules: never by id, which a new one may have of a dead one."""
        modules = list(model.modules())
        return len(modules) == len(self.modules) and all(
            seen() is module and kind is type(module) and config() is _config(module)
            for module, (seen, kind, config) in zip(modules, self.modules, strict=True)
        )


def _config(module: nn.Module) -> Any:
    return module.__dict__.get("config")


def _weak(thing: Any) -> Callable[[], Any]:
    try:
        return ref(thing)
    except TypeError:  # None, a dict: kept, so that nothing else can come to be in its place
        return lambda: thing


_known: WeakKeyDictionary[nn.Module, tuple[_Seen, Structure]] = WeakKeyDictionary()


def structure_of(model: nn.Module) -> Structure:
    """The model's structure, as it is now.

    Raises:
        ArgumentError: a scripted or traced module in it.
    """
    kept = _known.get(model)
    if kept is not None and kept[0].is_still(model):
        return kept[1]
    found = Structure(model)
    _known[model] = (_Seen(model), found)
    return found
