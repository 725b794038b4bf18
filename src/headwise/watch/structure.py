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


# The modules weakly: what is kept beside a model must not keep it, and a number may go to another object.
_known: WeakKeyDictionary[nn.Module, tuple[list[tuple[Any, type, Any]], Structure]] = WeakKeyDictionary()


def structure_of(model: nn.Module) -> Structure:
    """The model's structure, as it is now.

    Raises:
        ArgumentError: a scripted or traced module in it.
    """
    modules, kept = list(model.modules()), _known.get(model)
    if kept is not None and len(kept[0]) == len(modules):
        pairs = zip(modules, kept[0], strict=True)
        if all(
            module is each() and type(module) is kind and module.__dict__.get("config") is config
            for module, (each, kind, config) in pairs
        ):
            return kept[1]
    found = Structure(model)
    _known[model] = [(ref(module), type(module), module.__dict__.get("config")) for module in modules], found
    return found
