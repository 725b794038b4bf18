"""Lessons as people see them: what their cells print and draw, as notebooks, and formulas for a terminal."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from dataclasses import dataclass, field
from typing import Any

from ..errors import needed
from .lesson import Cell, Lesson

__all__ = ["FORMULA", "Shown", "notebook", "plain_formulas", "run_lesson"]


@dataclass
class Shown:
    """What a cell printed, its last value in words, and its pictures as PNG."""

    printed: str = ""
    pictures: list[bytes] = field(default_factory=list)


def run_lesson(lesson: Lesson) -> dict[int, Shown]:
    """Run what a notebook would run, and return what each cell shows, by the number of the cell."""
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
                value = _run_cell(cell.text, f"{lesson.file_name}, cell {place}", names)
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


def _run_cell(code: str, called: str, names: dict[str, Any]) -> Any:
    """Run code and return the value of its last line, if that is an expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, called, "exec", dont_inherit=True), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), called, "eval", dont_inherit=True), names)


def _is_picture(value: object) -> bool:
    return type(value).__module__.startswith("matplotlib") or (
        isinstance(value, list | tuple) and bool(value) and all(map(_is_picture, value))
    )


# Notebooks

FIRST_CELL = """# Installs headwise where it is missing (on Colab, say).
import importlib.util

if importlib.util.find_spec("headwise") is None:
    %pip install --quiet "headwise[cli,viz]"
%matplotlib inline"""


def notebook(lesson: Lesson) -> str:
    """Return the lesson as JSON of a notebook: the solution and the answers are folded away."""
    cells = [
        _markdown(f"# {lesson.number}. {lesson.title}\n\n*{lesson.idea[0].upper()}{lesson.idea[1:]}.*"),
        _code(FIRST_CELL),
    ]
    asked = False
    for cell in lesson.cells:
        if cell.kind == "question" and not asked:
            cells.append(_markdown("## Questions"))
            asked = True
        cells += _notebook_cells(cell)
    content = {
        "cells": [{**each, "id": f"cell-{place}"} for place, each in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _notebook_cells(cell: Cell) -> list[dict[str, Any]]:
    if cell.kind == "markdown":
        return [_markdown(cell.text)]
    if cell.kind == "code":
        return [_code(cell.text)]
    if cell.kind == "exercise":
        check = f"import headwise as hw\n\nhw.check({cell.about})"
        return [_markdown("## Exercise"), _code(cell.text), _code(check)]
    if cell.kind == "solution":
        folded = {"jupyter": {"source_hidden": True}, "collapsed": True, "cellView": "form"}
        return [
            _markdown("The solution is in the folded cell below."),
            _code(f"# @title Solution\n{cell.text}", folded),
        ]
    return [_markdown(f"**{cell.about}**\n\n<details><summary>Answer</summary>\n\n{cell.text}\n\n</details>")]


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}


def _code(text: str, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": None,
        "metadata": metadata or {},
        "outputs": [],
        "source": text.splitlines(keepends=True),
    }


# Formulas

_SIGNS = {
    r"\top": "ᵀ", r"\times": "×", r"\cdot": "·", r"\sum": "Σ", r"\infty": "∞", r"\leq": "≤", r"\le": "≤",
    r"\geq": "≥", r"\ge": "≥", r"\ldots": "…", r"\dots": "…", r"\cdots": "…", r"\approx": "≈", r"\in": "∈",
    r"\alpha": "α", r"\sigma": "σ", r"\theta": "θ", r"\lambda": "λ", r"\mu": "μ", r"\pm": "±", r"\to": "→",
    r"\rightarrow": "→", r"\quad": " ", r"\,": " ", r"\;": " ", r"\!": "", r"\left": "", r"\right": "",
    r"\log": "log", r"\exp": "exp", r"\max": "max", r"\min": "min", r"\ne": "≠", r"\neq": "≠", r"\odot": "⊙",
    r"\mathbb{R}": "ℝ", r"\{": "{", r"\}": "}", r"\%": "%",
}  # fmt: skip
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=\S)\$", re.DOTALL)


def plain_formulas(text: str) -> str:
    r"""Write the formulas of a Markdown text in plain letters, `\sqrt{d_k}` as √d_k; code stays as it is."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)
    return "".join(
        part if place % 2 else FORMULA.sub(lambda found: _plain_formula(found[1] or found[2]), part)
        for place, part in enumerate(parts)
    )


def _plain_formula(formula: str) -> str:
    held = "{([^{}]*)}"
    before = ""
    while before != formula:  # from the inside out
        before = formula
        formula = re.sub(rf"\\(?:text|mathrm|mathbf|operatorname|bar|hat){held}", r"\1", formula)
        formula = re.sub(rf"\\sqrt{held}", lambda found: f"√{_closed(found[1])}", formula)
        formula = re.sub(
            rf"\\frac{held}{held}", lambda found: f"{_closed(found[1])} / {_closed(found[2])}", formula
        )
        formula = re.sub(rf"\^{held}", lambda found: f"^{_closed(found[1])}", formula)
        formula = re.sub(rf"_{held}", lambda found: f"_{found[1]}", formula)
    for sign in sorted(_SIGNS, key=len, reverse=True):
        formula = formula.replace(sign, _SIGNS[sign])
    formula = re.sub(r"\\([a-zA-Z]+)", r"\1 ", formula)  # what has no sign of its own, by its name
    return " ".join(formula.replace("^ᵀ", "ᵀ").replace("*", r"\*").split())


def _closed(term: str) -> str:
    """In brackets where it is more than one word."""
    term = term.strip()
    return term if re.fullmatch(r"[\w\\^√]+|\(.*\)", term) else f"({term})"
