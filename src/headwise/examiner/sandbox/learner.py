"""Loading a learner's file as a module, and finding the attention in it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ...errors import ArgumentError, nearest

__all__ = ["choose", "load", "package_root"]

MULTI_HEAD = re.compile(r"multi.?head|mha", re.IGNORECASE)
ATTENTION = re.compile(r"att(entio)?n|softmax", re.IGNORECASE)
HEADS = re.compile(r"\b(self\.)?(num_?heads|n_?heads?|heads|h)\b")
LARGER = re.compile(r"block|layer|encoder|decoder|transformer|model|gpt|bert|embed|vit|net$", re.IGNORECASE)
NOT_MEANT = re.compile(r"^_|^test|^main$|^check|^demo|^train", re.IGNORECASE)


def package_root(path: Path, source: str) -> Path | None:
    """The folder the outermost package lies in, if the file imports relative to its package."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    if not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        return None
    folder = path.parent
    while (folder / "__init__.py").is_file() and folder != folder.parent:
        folder = folder.parent
    return None if folder == path.parent else folder


def load(path: Path, source: str) -> ModuleType:
    """Run the file as a module, not as "__main__"; its folder comes first among those to import from.

    Raises:
        BaseException: whatever the file raises.
    """
    root = package_root(path, source)
    sys.path.insert(0, str(root or path.parent))
    if root is not None:
        return importlib.import_module(".".join(path.with_suffix("").relative_to(root).parts))
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names or not path.stem.isidentifier()
    name = f"checked_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # a file not called .py
        from importlib.machinery import SourceFileLoader

        spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def choose(module: ModuleType, name: str | None) -> tuple[object, str, list[str]]:
    """The class or function to check, its name, and the names that might have been meant instead.

    Raises:
        ArgumentError: there is none.
    """
    own = _defined_in(module)
    if name is not None:
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is None:
            known = f"; {nearest(name, own)}" if own else "; the file defines no class and no function"
            raise ArgumentError(f"name must be a class or function of {module.__name__}: {name!r}{known}")
        if not callable(found):
            raise ArgumentError(f"name must be a class or function: {name!r} is {type(found).__name__}")
        return found, name, []
    points = {each: _likeness(each, thing) for each, thing in own.items()}
    likely = [each for each in own if points[each] > 0]
    if not likely:
        known = ", ".join(own) or "no class and no function"
        raise ArgumentError(f"file must define attention: found {known}; name the one to check, FILE:NAME")
    best = max(points[each] for each in likely)
    chosen = [each for each in likely if points[each] == best][-1]  # learners mend below what they had
    return own[chosen], chosen, [each for each in likely if each != chosen]


def _defined_in(module: ModuleType) -> dict[str, Any]:
    """Classes of modules and functions, in the order they are written."""
    found = {}
    for name, thing in vars(module).items():
        if getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(thing) or (inspect.isclass(thing) and issubclass(thing, nn.Module)):
            found[name] = thing
    return found


def _likeness(name: str, thing: object) -> int:
    """How much it looks like multi-head attention; 0 or less: not at all."""
    source = _source_of(thing)
    if NOT_MEANT.search(name) or not (ATTENTION.search(source) or MULTI_HEAD.search(name)):
        return 0
    points = 1 + 2 * inspect.isclass(thing)
    points += 4 if MULTI_HEAD.search(name) else 3 * bool(ATTENTION.search(name))
    points += 2 * bool(HEADS.search(source)) + 2 * ("softmax" in source or "scaled_dot_product" in source)
    return points - 6 * bool(LARGER.search(name) and not ATTENTION.search(name))


def _source_of(thing: Any) -> str:
    """Its text, and of a class also what it inherits from classes beside it."""
    parts = [thing]
    if inspect.isclass(thing):
        parts = [each for each in thing.__mro__ if each.__module__ == thing.__module__]
    try:
        return "\n".join(inspect.getsource(each) for each in parts)
    except (OSError, TypeError):
        return str(getattr(thing, "__name__", ""))
