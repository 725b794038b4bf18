"""Running lessons, and writing them as notebooks and as text for a terminal."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import textwrap
from dataclasses import dataclass, field
from typing import Any

from ..errors import INSTALLATION, needed
from .lesson import Cell, Lesson, hint_title

__all__ = ["FORMULA", "Shown", "notebook", "page_note", "plain_formulas", "run_lesson"]


@dataclass
class Shown:
    """What a cell printed, with its last value, and its pictures as PNG."""

    printed: str = ""
    pictures: list[bytes] = field(default_factory=list)


def run_lesson(lesson: Lesson, dpi: int = 110) -> dict[int, Shown]:
    """Run the code and the solution of a lesson. Return what each cell shows, by the index of the cell.

    `dpi` is the resolution of its pictures.
    """
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
                figure.savefig(picture, format="png", dpi=dpi, bbox_inches="tight")
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

_INSTALLATION_LINES = "\n".join(f"        {line + ' '!r}" for line in textwrap.wrap(INSTALLATION, 80))
FIRST_CELL = f"""# The lesson needs headwise, installed for the Python of this notebook.
import importlib.util

if importlib.util.find_spec("headwise") is None:
    raise ModuleNotFoundError(
{_INSTALLATION_LINES}
    )
%matplotlib inline"""


def notebook(lesson: Lesson) -> str:
    """Return the lesson as the JSON of a notebook, with the hints, the solution and the answers folded."""
    cells = [
        _markdown(f"# {lesson.number}. {lesson.title}\n\n*{lesson.idea[0].upper()}{lesson.idea[1:]}.*"),
        _code(FIRST_CELL),
    ]
    has_questions = False
    for index, cell in enumerate(lesson.cells):
        if index in lesson.codes_of_questions:
            continue
        if cell.kind == "question" and not has_questions:
            cells.append(_markdown("## Questions"))
            has_questions = True
        cells += _notebook_cells(cell)
        if cell.kind == "question" and (code := lesson.code_of(index)) is not None:
            cells.append(_folded_code("Code of the answer", lesson.cells[code].text))
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
    if cell.kind in ("slide", "try"):
        return []
    if cell.kind == "code":
        return [_code(cell.text)]
    if cell.kind == "page":
        return [_markdown(page_note(cell))]
    if cell.kind == "exercise":
        check = f"import headwise as hw\n\nhw.check({cell.about})"
        return [_markdown("## Exercise"), _code(cell.text), _code(check)]
    if cell.kind == "solution":
        return [
            _markdown("The next cell has the solution. It is folded."),
            _folded_code("Solution", cell.text),
        ]
    if cell.kind == "hint":
        return [_markdown(_folded(hint_title(cell.about), cell.text))]
    return [_markdown(f"**{cell.about}**\n\n{_folded('Answer', cell.text)}")]


def _folded_code(title: str, text: str) -> dict[str, Any]:
    folded = {"jupyter": {"source_hidden": True}, "collapsed": True, "cellView": "form"}
    return _code(f"# @title {title}\n{text}", folded)


def page_note(cell: Cell) -> str:
    """Return how to open the live page of a cell, in Markdown."""
    text, _, view = cell.about.partition("#")
    return (
        f"The same head on a live page: `headwise look {json.dumps(text)} --html heads.html` writes a file. "
        f"Open it in a browser, as `heads.html#{view}`."
    )


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


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
    r"\{": "{", r"\}": "}", r"\%": "%", r"\|": "‖",
}  # fmt: skip
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$(?=\S)([^$\n]+?)(?<=\S)\$", re.DOTALL)


def plain_formulas(text: str) -> str:
    r"""Write the formulas of a Markdown text in Unicode, `\sqrt{d_k}` as √d_k. Code is left unchanged.

    A command that is not in `_SIGNS` stays as it is, with its backslash: the tests look for it.
    """
    parts = re.split(r"(```.*?```|`[^`\n]*`)", text, flags=re.DOTALL)
    return "".join(
        part if index % 2 else FORMULA.sub(lambda match: _plain_formula(match[1] or match[2]), part)
        for index, part in enumerate(parts)
    )


def _plain_formula(formula: str) -> str:
    group = "{([^{}]*)}"
    formula, before = formula.replace("{,}", ",").replace(r"\mathbb{R}", "ℝ"), ""  # {,}: thousands
    formula = re.sub(r"\\sqrt +(\w)", r"\\sqrt{\1}", formula)
    while before != formula:  # innermost groups first
        before = formula
        formula = re.sub(rf"\\(?:text|mathrm|mathbf|operatorname|bar|hat){group}", r"\1", formula)
        formula = re.sub(rf"\\sqrt{group}", lambda match: f"√{_closed(match[1])}", formula)
        formula = re.sub(
            rf"\\frac{group}{group}", lambda match: f"{_closed(match[1])} / {_closed(match[2])}", formula
        )
        formula = re.sub(rf"([_^]){group}", lambda match: match[1] + _closed(match[2], r"[^\W_]+"), formula)
    formula = re.sub(r"\\(?:[a-zA-Z]+|.)", lambda match: _SIGNS.get(match[0], match[0]), formula)
    return " ".join(formula.replace("^ᵀ", "ᵀ").replace("*", r"\*").split())


def _closed(term: str, word: str = r"[\w\\^√]+") -> str:
    """Return the term, in brackets if it is more than one word."""
    term = term.strip()
    return term if re.fullmatch(rf"{word}|\w*\^?\([^()]*\)", term) else f"({term})"
