"""A learner's source as a syntax tree, read and never run."""

from __future__ import annotations

import ast
import textwrap
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


_parsing = threading.Lock()


@contextmanager
def unwarned() -> Iterator[None]:
    """No warnings while a source is parsed: "\\d" in a learner's string is their business.

    One at a time: the filters are the process's, and Python puts them back right only if one comes after the
    other; and Python 3.11 counts the depth of trees for all threads together, and raises where two meet.
    """
    with _parsing, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@lru_cache(maxsize=8)
def readable(source: str) -> str | None:
    """The source as Python takes it, an indented class moved to the left; None if it does not parse."""
    for text in (source, textwrap.dedent(source)):
        try:
            with unwarned():
                ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        return text
    return None


@lru_cache(maxsize=8)
def tree_of(source: str) -> ast.Module | None:
    """The tree, or None where the source is no Python. Lines are those of `source`."""
    text = readable(source)
    if text is None:
        return None
    with unwarned():
        return ast.parse(text)


def text_of(source: str, line: int | None) -> str:
    """One line, stripped; "" where there is none."""
    lines = source.splitlines()
    return lines[line - 1].strip() if line is not None and 0 < line <= len(lines) else ""


def dotted(node: ast.AST) -> str:
    """`torch.nn.Linear` as "torch.nn.Linear"; "" for anything that is not names and dots."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return ""


def inner_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function or class without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, DEFINITIONS):
            yield from inner_nodes(child)


def bound_in(function: Function) -> set[str]:
    """Parameters and whatever is assigned in the function itself."""
    spec = function.args
    parameters = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    names = {one.arg for one in parameters if one is not None}
    names |= {
        node.id
        for node in inner_nodes(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return names | {node.name for node in inner_nodes(function) if isinstance(node, DEFINITIONS)}
