"""What a learner gets to do: a file to write or to repair; and what in it is still to be written."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from ..errors import ArgumentError
from .lesson import Exercise, Lesson
from .plants import repair_of

__all__ = ["Unwritten", "exercise_of", "laid_out", "unwritten"]


@dataclass(frozen=True)
class Unwritten:
    """A function or method whose body is left to the learner."""

    name: str  # "MultiHeadAttention.forward"
    line: int
    task: str  # the first line of its docstring


def exercise_of(lesson: Lesson, fault: str | None = None) -> Exercise:
    """The lesson's exercise; with `fault`, one of repair.

    Raises:
        ArgumentError: the lesson has none.
    """
    if fault is not None:
        return repair_of(fault)
    asked = next((cell for cell in lesson.cells if cell.kind == "exercise"), None)
    if asked is None:
        raise ArgumentError(
            f"lesson must have an exercise: {lesson.number} has none; headwise learn repair gives one"
        )
    return Exercise("write", asked.about, f"{asked.text}\n", f"{lesson.text_of('solution')}\n")


def laid_out(exercise: Exercise, title: str, command: str) -> str:
    """The file as it is laid into the learner's folder: what to do on top."""
    if exercise.kind == "write":
        task = f"Write {exercise.name}: what is to be written says `raise NotImplementedError`."
    else:
        task = f"One thing in {exercise.name} is wrong. Find and repair it."
    return f"# {title}\n# {task}\n# Then: {command}\n\n{exercise.start}"


def unwritten(source: str) -> list[Unwritten]:
    """What raises NotImplementedError, or has no body but `...` or `pass`; nothing in what cannot be read."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
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
