"""What a file leaves to be written: exercises begin with bodies that are not written yet."""

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
    """Return the functions that raise NotImplementedError, or whose body is only `...` or `pass`.

    The list is empty if Python cannot read the source.
    """
    tree = tree_of(source)
    return [] if tree is None else _unwritten_inside(tree, "")


def _unwritten_inside(node: ast.AST, prefix: str) -> list[Unwritten]:
    functions: list[Unwritten] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            functions += _unwritten_inside(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef) and (line := _unwritten_line(child)) is not None:
            task = (ast.get_docstring(child) or "").partition("\n")[0]
            functions.append(Unwritten(f"{prefix}{child.name}", line, task))
    return functions


def _unwritten_line(function: ast.FunctionDef) -> int | None:
    """Return the line that shows the body is not written, or None if it is written."""
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node):
            return node.lineno
    body = function.body[ast.get_docstring(function, clean=False) is not None :]
    is_empty = all(isinstance(node, ast.Pass) or ast.unparse(node) == "..." for node in body)
    return function.body[-1].lineno if is_empty else None
