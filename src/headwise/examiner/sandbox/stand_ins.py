"""Stand-ins for modules a file imports and that are not installed here.

Public files import their project's other files. Most of the time the attention in them needs none of those,
and can be checked all the same.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

from ..source.notebooks import is_notebook, load_notebook
from .packages_without_effect import named_in

PACKAGE, DEPTH = "checked_package", 4  # what a file with relative imports is a part of, and how deep in it


class StandIn:
    """Takes any arguments, has any attribute, does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> StandIn:
        return self

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class _Module(ModuleType):
    def __init__(self, name: str, *folders: str) -> None:
        super().__init__(name)
        self.__path__ = list(folders)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        known = named_in(self.__name__, name)
        return type(name, (StandIn,), {"__module__": self.__name__}) if known is None else known


class _Finder(MetaPathFinder, Loader):
    """Comes last, and answers only for what the file itself asks for."""

    def __init__(self, roots: set[str]) -> None:
        self.roots, self.names = roots, list[str]()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.roots:
            return None
        self.names.append(name.replace(f"{PACKAGE}.", "").replace("inner.", "."))
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


def load_all_the_same(path: Path, source: str) -> tuple[ModuleType, list[str]]:
    """The file as a module, and the names of the modules that were stood in for.

    Raises:
        BaseException: whatever the file raises.
    """
    finder = _Finder({*_roots(ast.parse(source)), PACKAGE})
    sys.meta_path.append(finder)
    if is_notebook(path):
        return load_notebook(path, source), finder.names
    package = PACKAGE
    for folder in reversed(path.resolve().parents[:DEPTH]):  # files beside it are found, and above
        sys.modules[package] = _Module(package, str(folder))
        package += ".inner"
    name = f"{package.removesuffix('.inner')}.{path.stem}"
    spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module, finder.names


def _roots(tree: ast.Module) -> set[str]:
    """The modules it imports, by the first part of their names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
