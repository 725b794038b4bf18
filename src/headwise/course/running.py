"""A lesson, run: what each of its cells prints and shows."""

from __future__ import annotations

import ast
import contextlib
import io
from dataclasses import dataclass, field
from typing import Any

from ..errors import needed
from .lesson import Lesson

__all__ = ["Shown", "run_lesson"]


@dataclass
class Shown:
    """What a cell printed, its last value in words, and its pictures as PNG."""

    printed: str = ""
    pictures: list[bytes] = field(default_factory=list)


def run_lesson(lesson: Lesson) -> dict[int, Shown]:
    """Runs what a notebook would run; by the number of the cell.

    Whatever a cell raises is raised.
    """
    with needed("matplotlib", "the pictures of a lesson need matplotlib"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.figure import Figure

    import torch

    names: dict[str, Any] = {"__name__": "__lesson__"}
    found = {}
    before = torch.random.get_rng_state()
    try:
        for place, cell in enumerate(lesson.cells):
            if cell.kind not in ("code", "solution"):
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                value = _run(cell.text, f"{lesson.file_name}, cell {place}", names)
                if value is not None and not _is_picture(value):
                    print(value)  # noqa: T201 - what a notebook would show
            shown = found[place] = Shown(printed.getvalue())
            figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
            figures += [value] if isinstance(value, Figure) and value not in figures else []
            for figure in figures:
                picture = io.BytesIO()
                figure.savefig(picture, format="png", dpi=110, bbox_inches="tight")
                shown.pictures.append(picture.getvalue())
            pyplot.close("all")
    finally:
        torch.random.set_rng_state(before)
    return found


def _run(code: str, called: str, names: dict[str, Any]) -> Any:
    """The value of its last line, where that is an expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, called, "exec", dont_inherit=True), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), called, "eval", dont_inherit=True), names)


def _is_picture(value: object) -> bool:
    return type(value).__module__.startswith("matplotlib") or (
        isinstance(value, list | tuple) and bool(value) and all(_is_picture(one) for one in value)
    )
