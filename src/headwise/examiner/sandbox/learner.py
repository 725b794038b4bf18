"""Runs in the process of the learner's code: loads the file, and answers the hidden probes."""

from __future__ import annotations
import __future__

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import linecache
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, nearest
from ..evidence import packed, unpacked
from ..examine.call_plan import express
from ..examine.caller import Caller
from ..examine.environment import CAUGHT, float64_environment, problem_of
from ..examine.subject import METHODS
from ..source.likely_classes import is_notebook, load_notebook, package_root
from ..steps.step_engine import Callee
from .stand_ins import has_no_effect, named_in
from .verdicts import of_exception


def load(path: Path, source: str, changed: bool = False) -> ModuleType:
    """Run the file as a module, not as "__main__", with its folder first on the import path.

    Args:
        path: of the file.
        source: of the file.
        changed: run `source` instead of the content of the file.
    Raises:
        BaseException: whatever the file raises.
    """
    if is_notebook(path):
        return load_notebook(path, source)
    root = package_root(path, source)
    sys.path.insert(0, str(root or path.parent))
    if root is not None:
        return importlib.import_module(".".join(path.with_suffix("").relative_to(root).parts))
    is_used = path.stem in sys.modules or path.stem in sys.stdlib_module_names or not path.stem.isidentifier()
    name = f"checked_{path.stem}" if is_used else path.stem
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
    """Return the class or function of this name, or a method: "MyAttention.split".

    Raises:
        ArgumentError: there is none; `name` is None if nothing in the source looks like attention.
    """
    if name is None:
        raise ArgumentError("file must define attention: nothing in it looks like attention; use FILE:NAME")
    obj: object = module
    for part in name.split("."):
        obj = getattr(obj, part, None)
    if obj is None:
        own = [
            each
            for each, thing in vars(module).items()
            if getattr(thing, "__module__", None) == module.__name__
            and (inspect.isfunction(thing) or inspect.isclass(thing))
        ]
        hint = f"; {nearest(name, own)}" if own else "; the file defines no class and no function"
        raise ArgumentError(f"name must be a class or function of {module.__name__}: got {name!r}{hint}")
    _give_forward(obj)
    if not callable(obj):
        kind = type(obj).__name__
        raise ArgumentError(f"name must be a class or function: {name!r} is {kind}; name another")
    return obj


def _give_forward(cls: object) -> None:
    """Set forward to the method that a module without forward uses instead."""
    if not isinstance(cls, type) or not issubclass(cls, nn.Module):
        return
    if cls.forward is nn.Module.forward and cls.__call__ is nn.Module.__call__:
        method = next((getattr(cls, name) for name in METHODS if name in vars(cls)), None)
        if method is not None:
            cls.forward = method


PACKAGE, DEPTH = "checked_package", 4  # the package of a file with relative imports, and its depth there


class StandIn:
    """An object that accepts any arguments, has any attribute, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *_: object, **__: object) -> StandIn:
        return self

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()


class _Base(nn.Module):
    """Stands in for a base class of modules, such as mmengine's BaseModule."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()


DEVICES = frozenset(("device", "DEVICE"))
BASES = frozenset(("BaseModule",))
USUAL = {"torch": "torch", "nn": "torch.nn", "F": "torch.nn.functional", "np": "numpy", "math": "math"}


class _Module(ModuleType):
    def __init__(self, name: str, *folders: str) -> None:
        super().__init__(name)
        self.__path__ = list(folders)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in DEVICES:
            return "cpu"
        stand_in = named_in(self.__name__, name)
        if stand_in is not None:
            return stand_in
        return type(name, (_Base if name in BASES else StandIn,), {"__module__": self.__name__})


class _Finder(MetaPathFinder, Loader):
    """Finds stand-ins for modules that the file imports and no other finder knows."""

    def __init__(self, roots: set[str], usual: set[str]) -> None:
        self.roots, self.usual, self.names = roots, usual, list[str]()

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
        """Add the usual names that the file uses and does not import: `from utils import *`."""
        for name in self.usual:
            with contextlib.suppress(ImportError):
                setattr(module, name, importlib.import_module(USUAL[name]))


class Skipped(NamedTuple):
    """A statement that raised while its file was loaded, and was skipped."""

    line: int
    names: set[str]  # the names that it assigns
    error: BaseException


def load_all_the_same(path: Path, source: str) -> tuple[ModuleType, list[str], list[Skipped]]:
    """Load a file that lacks modules, files or a network, statement by statement.

    Return the module, the names of the modules that were stood in for, and the statements that raised: those
    that define and import nothing are skipped.

    Raises:
        BaseException: whatever a definition or an import raises.
    """
    tree = ast.parse(source)
    finder = _Finder({*_roots(tree), PACKAGE}, _usual_names(tree))
    sys.meta_path.append(finder)
    if is_notebook(path):
        return load_notebook(path, source), finder.names, []
    package = PACKAGE
    for folder in reversed(path.resolve().parents[:DEPTH]):  # files beside it are found, and above
        sys.modules[package] = _Module(package, str(folder))
        package += ".inner"
    name = f"{package.removesuffix('.inner')}.{path.stem}"
    spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, str(path)))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    linecache.cache[str(path)] = len(source), None, source.splitlines(keepends=True), str(path)
    return module, finder.names, list(_run_by_statement(tree, path, module))


DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Import, ast.ImportFrom)


def _run_by_statement(tree: ast.Module, path: Path, module: ModuleType) -> Iterator[Skipped]:
    features = [
        getattr(__future__, alias.name).compiler_flag
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "__future__"
        for alias in node.names
    ]
    flags = functools.reduce(operator.or_, features, 0)
    for statement in tree.body:
        _without_inert_decorators(statement, vars(module))
        code = compile(ast.Module([statement], []), str(path), "exec", flags, dont_inherit=True)
        try:
            if trains(statement):
                raise RuntimeError("it trains a model")
            exec(code, vars(module))
        except (Exception, SystemExit) as error:
            if any(isinstance(node, DEFINITIONS) for node in ast.walk(statement)):
                raise
            names = {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            yield Skipped(statement.lineno, names, error)


def trains(statement: ast.stmt) -> bool:
    """Return True for a loop that computes gradients."""
    calls = (node.func for node in ast.walk(statement) if isinstance(node, ast.Call))
    return isinstance(statement, (ast.For, ast.While)) and any(
        isinstance(function, ast.Attribute) and function.attr == "backward" for function in calls
    )


def lacks_something(error: BaseException, source: str) -> bool:
    """Return True where a module, a file, the network or an argument of the command line was missing."""
    if isinstance(error, SystemExit):
        return "parse_args" in source
    problem = of_exception(error, Path(), "import", 0, confined=True)
    return isinstance(error, (ImportError, FileNotFoundError)) or problem.kind == "network"


def trains_while_loading(source: str) -> bool:
    """Return True if a loop at the top of the file trains a model."""
    with contextlib.suppress(SyntaxError, ValueError):
        return any(map(trains, ast.parse(source).body))
    return False


def _without_inert_decorators(statement: ast.stmt, names: dict[str, Any]) -> None:
    """Remove decorators that come from stand-ins, such as registries, which change no number."""
    for node in ast.walk(statement):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.decorator_list = [
                decorator for decorator in node.decorator_list if not _is_stand_in(decorator, names)
            ]


def _is_stand_in(decorator: ast.expr, names: dict[str, Any]) -> bool:
    while isinstance(decorator, (ast.Call, ast.Attribute)):
        decorator = decorator.func if isinstance(decorator, ast.Call) else decorator.value
    origin = names.get(decorator.id) if isinstance(decorator, ast.Name) else None
    stands_in = isinstance(origin, type) and issubclass(origin, StandIn)
    of_known = isinstance(origin, _Module) and has_no_effect(origin.__name__)  # it has decorators of its own
    return stands_in or isinstance(origin, StandIn) or (isinstance(origin, _Module) and not of_known)


def _usual_names(tree: ast.Module) -> set[str]:
    """Return the usual names of modules that the file uses and does not bind itself."""
    nodes = list(ast.walk(tree))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    bound = {
        (alias.asname or alias.name).partition(".")[0]
        for node in nodes
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    return (used - bound) & USUAL.keys()


def _roots(tree: ast.Module) -> set[str]:
    """Return the first parts of the names of the modules that a file imports."""
    roots = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    return roots


def answers(caller: Caller | Callee, questions: Any, numbers: bytearray) -> tuple[object, bytes]:
    """Return for each question the output or the exception of the code, as JSON and numbers."""
    replies, out = [], bytearray()
    with float64_environment():
        for packed_question in questions:
            question = unpacked(packed_question, numbers)
            try:
                if isinstance(caller, Callee):
                    replies.append(_of_step(caller, question, out))
                    continue
                if "values" in question:
                    _put(caller, question["places"], question["values"])
                query, key, value = (question[name] for name in question["inputs"])
                chosen = _sayable(caller, question["masks"])
                mask = None if chosen is None else question["masks"][chosen]
                with torch.no_grad():
                    output = caller.call(query, key, value, mask).output
                replies.append(packed({"output": output.detach().double(), "mask": chosen}, out))
            except CAUGHT as error:
                replies.append({"problem": asdict(problem_of(error, "call", _files(caller)))})
    return replies, bytes(out)


def _of_step(callee: Callee, question: dict[str, Any], out: bytearray) -> object:
    """Return the answer of a single step."""
    answer, _ = callee.answer(question["probe"], question["inputs"])
    if answer.problem is not None:
        return {"problem": asdict(answer.problem)}
    return packed({"output": answer.output, "mask": None}, out)


def _sayable(caller: Caller, masks: list[Tensor]) -> int | None:
    """Return the index of the first mask that the code's arguments can express, or None."""
    for i, mask in enumerate(masks):
        samples = mask.split(1) if caller.plan.layout == "one sequence" else (mask,)
        if all(express(caller.conventions, sample, caller.subject.sizes.H) is not None for sample in samples):
            return i
    return None


def _files(caller: Caller | Callee) -> frozenset[str]:
    return caller.files if isinstance(caller, Callee) else caller.subject.files


@torch.no_grad()
def _put(caller: Caller, places: Tensor, values: Tensor) -> None:
    """Write values to these indices of all parameters, flattened and concatenated in order."""
    parameters = list(caller.subject.parameters.values())
    flat = torch.cat([parameter.detach().double().flatten() for parameter in parameters])
    flat[places] = values
    parts = flat.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view(parameter.shape))
