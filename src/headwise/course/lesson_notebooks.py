"""A lesson as a notebook to work in, in Jupyter or Colab."""

from __future__ import annotations

import json
from typing import Any

from .lesson import Cell, Lesson

__all__ = ["notebook"]

FIRST = """# Installs headwise where it is missing (on Colab, say).
import importlib.util

if importlib.util.find_spec("headwise") is None:
    %pip install --quiet "headwise[cli,viz]"
%matplotlib inline"""


def notebook(lesson: Lesson) -> str:
    """The JSON of it: texts, code, the exercise with its check, the solution and the answers folded away."""
    cells = [
        _markdown(f"# {lesson.number}. {lesson.title}\n\n*{lesson.idea[0].upper()}{lesson.idea[1:]}.*"),
        _code(FIRST),
    ]
    asked = False
    for cell in lesson.cells:
        if cell.kind == "question" and not asked:
            cells.append(_markdown("## Questions"))
            asked = True
        cells += _cells(cell)
    told = {
        "cells": [{**each, "id": f"cell-{place}"} for place, each in enumerate(cells)],
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(told, indent=1, ensure_ascii=False) + "\n"


def _cells(cell: Cell) -> list[dict[str, Any]]:
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
