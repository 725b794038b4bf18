"""Public names of a package that are imported on first use (PEP 562)."""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_attributes(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package.

    A package whose `__init__` imports its own modules can fail where two threads import it at once: each
    waits for a module of the other's, and Python hands one of them a module that is not finished.

    Args:
        homes: the module of each public name, relative to the package. Other names may be its modules.
    """
    module = sys.modules[package]

    def get(name: str) -> object:
        if name in homes:
            value: object = getattr(import_module(homes[name], package), name)
            setattr(module, name, value)
            return value
        if not name.startswith("_"):
            try:
                return import_module(f".{name}", package)
            except ModuleNotFoundError as missing:
                if missing.name != f"{package}.{name}":
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(module), *homes, *module.__all__})

    return get, names
