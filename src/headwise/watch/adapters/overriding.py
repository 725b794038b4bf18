"""Another forward for some modules, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from ..attachment import Undo

__all__ = ["override"]

_held: dict[nn.Module, int] = {}  # how many attachments want it overridden


def override(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> Undo:
    """Let `forward(module, ...)` run in place of each module's; one with a forward of its own is left alone.

    Where a placement library has wrapped the forward of a module (device_map), what it wrapped is replaced.
    """
    taken: list[nn.Module] = []
    for module in modules:
        if module in _held:
            _held[module] += 1
            taken.append(module)
        elif "forward" not in module.__dict__:
            _take(module, "forward", forward)
            taken.append(module)
        elif "_old_forward" in module.__dict__:
            _take(module, "_old_forward", forward)
            taken.append(module)

    def undo() -> None:
        for module in taken:
            _held[module] -= 1
            if not _held[module]:
                del _held[module]
                name, original = module.__dict__.pop(MARK)
                if original is None:
                    del module.__dict__[name]
                else:
                    module.__dict__[name] = original

    return undo


MARK = "_headwise_own_forward"


def _take(module: nn.Module, name: str, forward: Callable[..., Any]) -> None:
    module.__dict__[MARK] = (name, module.__dict__.get(name))
    module.__dict__[name] = lambda *args, **kwargs: forward(module, *args, **kwargs)
    _held[module] = 1
