"""In the process of the learner's code: it is loaded, and answers for other numbers in its parameters."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import linecache
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError, nearest
from ..evidence import packed, unpacked
from ..examine.call_plan import express
from ..examine.caller import Caller
from ..examine.environment import CAUGHT, float64_environment, problem_of
from ..source.likely_classes import is_notebook, load_notebook, package_root
from ..steps.step_engine import Callee
from .stand_ins import named_in


def load(path: Path, source: str, changed: bool = False) -> ModuleType:
    """Run the file as a module, not as "__main__"; its folder comes first among those to import from.

    changed: run `source` in place of what the file holds.

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
    if changed:
        linecache.cache[str(path)] = len(source), None, source.splitlines(keepends=True), str(path)
        exec(compile(source, str(path), "exec"), vars(module))
    else:
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


def answers(caller: Caller | Callee, asked: Any, numbers: bytearray) -> tuple[object, bytes]:
    """One answer a question: the raw output, or what the code raised; as JSON can hold them, and numbers."""
    said, out = [], bytearray()
    with float64_environment():
        for one in asked:
            question = unpacked(one, numbers)
            try:
                if isinstance(caller, Callee):
                    said.append(_of_step(caller, question, out))
                    continue
                if "values" in question:
                    _put(caller, question["places"], question["values"])
                query, key, value = (question[name] for name in question["inputs"])
                chosen = _sayable(caller, question["masks"])
                mask = None if chosen is None else question["masks"][chosen]
                with torch.no_grad():
                    output = caller.call(query, key, value, mask).output
                said.append(packed({"output": output.detach().double(), "mask": chosen}, out))
            except CAUGHT as error:
                said.append({"problem": asdict(problem_of(error, "call", _files(caller)))})
    return said, bytes(out)


def _of_step(callee: Callee, question: dict[str, Any], out: bytearray) -> object:
    """A single step's answer, as it is."""
    answer, _ = callee.answer(question["probe"], question["inputs"])
    if answer.problem is not None:
        return {"problem": asdict(answer.problem)}
    return packed({"output": answer.output, "mask": None}, out)


def _sayable(caller: Caller, masks: list[Tensor]) -> int | None:
    """Which of the masks its arguments can say, the first of them."""
    for i, mask in enumerate(masks):
        samples = mask.split(1) if caller.plan.layout == "one sequence" else (mask,)
        if all(express(caller.conventions, one, caller.subject.sizes.H) is not None for one in samples):
            return i
    return None


def _files(caller: Caller | Callee) -> frozenset[str]:
    return caller.files if isinstance(caller, Callee) else caller.subject.files


@torch.no_grad()
def _put(caller: Caller, places: Tensor, values: Tensor) -> None:
    """These numbers at these places of all parameters in order, flat; all others stay what they are."""
    parameters = list(caller.subject.parameters.values())
    flat = torch.cat([one.detach().double().flatten() for one in parameters])
    flat[places] = values
    for one, part in zip(parameters, flat.split([one.numel() for one in parameters]), strict=True):
        one.copy_(part.view(one.shape))
