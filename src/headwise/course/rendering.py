"""Running lessons, and writing them as notebooks and as text for a terminal."""

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
    """What a cell printed, with its last value, and its pictures as PNG."""

    printed: str = ""
    pictures: list[bytes] = field(default_factory=list)


def run_lesson(lesson: Lesson) -> dict[int, Shown]:
    """Run the code and the solution of a lesson. Return what each cell shows, by the index of the cell."""
    with needed("matplotlib", "the pictures of a lesson need matplotlib"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
        from matplotlib.figure import Figure

    import torch

    names: dict[str, Any] = {"__name__": "__lesson__"}
    outputs = {}
    before = torch.random.get_rng_state()
    try:
        for index, cell in enumerate(lesson.cells):
            if cell.kind not in ("code", "solution"):
                continue
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                value = _run_cell(cell.text, f"{lesson.file_name}, cell {index}", names)
                if value is not None and not _is_picture(value):
                    print(value)  # noqa: T201 - what a notebook would show
            shown = outputs[index] = Shown(printed.getvalue())
            figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
            figures += [value] if isinstance(value, Figure) and value not in figures else []
            for figure in figures:
                picture = io.BytesIO()
                figure.savefig(picture, format="png", dpi=110, bbox_inches="tight")
                shown.pictures.append(picture.getvalue())
            pyplot.close("all")
    finally:
        torch.random.set_rng_state(before)
    return outputs


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

FIRST_CELL = """# Installs headwise if it is missing, for example on Colab.
import importlib.util

if importlib.util.find_spec("headwise") is None:
    %pip install --quiet "headwise[cli,viz]"
%matplotlib inline"""


def notebook(lesson: Lesson) -> str:
    """Return the lesson as the JSON of a notebook, with the solution and the answers folded."""
    cells = [
        _markdown(f"# {lesson.number}. {lesson.title}\n\n*{lesson.idea[0].upper()}{lesson.idea[1:]}.*"),
        _code(FIRST_CELL),
    ]
    has_questions = False
    for cell in lesson.cells:
        if cell.kind == "question" and not has_questions:
            cells.append(_markdown("## Questions"))
            has_questions = True
        cells += _notebook_cells(cell)
    content = {
        "cells": [{**cell, "id": f"cell-{index}"} for index, cell in enumerate(cells)],
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
            _markdown("The next cell has the solution. It is folded."),
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
    r"\qquad": "  ", r"\leftarrow": "←", r"\partial": "∂", r"\circ": "∘", r"\ln": "ln ", r"\cos": "cos ",
    r"\mathbb{R}": "ℝ", r"\{": "{", r"\}": "}", r"\%": "%",
}  # fmt: skip
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=\S)\$", re.DOTALL)


def plain_formulas(text: str) -> str:
    r"""Write the formulas of a Markdown text in Unicode, `\sqrt{d_k}` as √d_k. Code is left unchanged."""
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)
    return "".join(
        part if index % 2 else FORMULA.sub(lambda match: _plain_formula(match[1] or match[2]), part)
        for index, part in enumerate(parts)
    )


def _plain_formula(formula: str) -> str:
    group = "{([^{}]*)}"
    formula, before = formula.replace("{,}", ","), ""  # thousands
    while before != formula:  # innermost groups first
        before = formula
        formula = re.sub(rf"\\(?:text|mathrm|mathbf|operatorname|bar|hat){group}", r"\1", formula)
        formula = re.sub(rf"\\sqrt{group}", lambda match: f"√{_closed(match[1])}", formula)
        formula = re.sub(
            rf"\\frac{group}{group}", lambda match: f"{_closed(match[1])} / {_closed(match[2])}", formula
        )
        formula = re.sub(rf"([_^]){group}", lambda match: match[1] + _closed(match[2], r"[^\W_]+"), formula)
    for sign in sorted(_SIGNS, key=len, reverse=True):
        formula = formula.replace(sign, _SIGNS[sign])
    formula = re.sub(r"\\([a-zA-Z]+)", r"\1 ", formula)  # other commands by their names
    return " ".join(formula.replace("^ᵀ", "ᵀ").replace("*", r"\*").split())


def _closed(term: str, word: str = r"[\w\\^√]+") -> str:
    """Return the term, in brackets if it is more than one word."""
    term = term.strip()
    return term if re.fullmatch(rf"{word}|\w*\^?\([^()]*\)", term) else f"({term})"
