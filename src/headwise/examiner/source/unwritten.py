"""What a file leaves to be written: exercises begin so."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from .parsed import tree_of


@dataclass(frozen=True)
class Unwritten:
    """A function or method whose body is left to the learner."""

    name: str  # "MultiHeadAttention.forward"
    line: int
    task: str  # the first line of its docstring


def unwritten(source: str) -> list[Unwritten]:
    """What raises NotImplementedError, or has no body but `...` or `pass`; nothing in what cannot be read."""
    tree = tree_of(source)
    if tree is None:
        return []
    found: list[Unwritten] = []
    _look_into(tree, "", found)
    return found


def _look_into(node: ast.AST, inside: str, found: list[Unwritten]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            _look_into(child, f"{inside}{child.name}.", found)
        elif isinstance(child, ast.FunctionDef):
            line = _left_open(child)
            if line is not None:
                told = (ast.get_docstring(child) or "").partition("\n")[0]
                found.append(Unwritten(f"{inside}{child.name}", line, told))


def _left_open(function: ast.FunctionDef) -> int | None:
    """The line that says it is not written."""
    body = [one for one in function.body if not _is_text(one)]
    for one in ast.walk(function):
        if isinstance(one, ast.Raise) and "NotImplementedError" in ast.unparse(one):
            return one.lineno
    bare = all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and one.value.value is ...)
        for one in body
    )
    return function.body[-1].lineno if bare else None


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
