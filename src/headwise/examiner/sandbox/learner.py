"""Loading a learner's file as a module, and the class or function of a name in it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

from ...errors import ArgumentError, nearest
from ..source.notebooks import is_notebook, load_notebook


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
    if is_notebook(path):
        return load_notebook(path, source)
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


def choose(module: ModuleType, name: str | None) -> object:
    """The class or function of this name, or a method: "MyAttention.split".

    Which one is meant is decided where the source is read (`source.candidates`): None, if none is.

    Raises:
        ArgumentError: there is none.
    """
    if name is None:
        raise ArgumentError("file must define attention: nothing in it looks like it; name it, FILE:NAME")
    found: object = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        own = [
            each
            for each, thing in vars(module).items()
            if getattr(thing, "__module__", None) == module.__name__
            and (inspect.isfunction(thing) or inspect.isclass(thing))
        ]
        known = f"; {nearest(name, own)}" if own else "; the file defines no class and no function"
        raise ArgumentError(f"name must be a class or function of {module.__name__}: {name!r}{known}")
    if not callable(found):
        raise ArgumentError(f"name must be a class or function: {name!r} is {type(found).__name__}")
    return found
