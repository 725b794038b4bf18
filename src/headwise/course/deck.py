"""Interview questions with their answers, and code that computes what the answers state.

    # %% question: [7] Why is ..?         the lesson it belongs to, and the question
    # The answer, in Markdown.
    # %%
    print(..)                             its check, where there is one: runs by itself

They are in interview/easy.py, medium.py and hard.py; the questions of the lessons are asked as well.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from ..errors import ArgumentError
from .lesson import Question, lessons, read_cells

__all__ = ["LEVELS", "computed", "deck", "read_questions"]

Level = Literal["easy", "medium", "hard"]
LEVELS: tuple[Level, ...] = get_args(Level)
_ASKED = re.compile(r"\[(\d+)\] (.+\?)")


def deck(level: str | None = None, lesson: int | None = None) -> tuple[Question, ...]:
    """Questions from easy to hard, and in the order of the lessons.

    Args:
        level: "easy", "medium" or "hard"; without it, all.
        lesson: only those that belong to this lesson.

    Raises:
        ArgumentError: a level or a lesson that there is not.

    Example:
        >>> deck("easy", lesson=13)[-1].asked
        'What does a heat map of attention weights show, and what does it not show?'
    """
    if level is not None and level not in LEVELS:
        raise ArgumentError(
            f"level must be one of {', '.join(LEVELS)}: got {level!r}; or leave it out for all"
        )
    questions = _questions()
    numbers = sorted({question.lesson for question in questions})
    if lesson is not None and lesson not in numbers:
        raise ArgumentError(
            f"lesson must be {numbers[0]} to {numbers[-1]}: got {lesson!r}; or leave it out for all"
        )
    return tuple(
        question
        for question in questions
        if level in (None, question.level) and lesson in (None, question.lesson)
    )


def computed(question: Question) -> str:
    """Run the check of a question and return what it prints; empty where it has none.

    Whatever the check raises is raised: an AssertionError means that the answer is wrong.
    """
    import torch

    printed = io.StringIO()
    names: dict[str, Any] = {"__name__": "__check__"}
    before = torch.random.get_rng_state()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(question.check, f"the check of {question.asked!r}", "exec"), names)
    finally:
        torch.random.set_rng_state(before)
    return printed.getvalue()


def read_questions(level: Level, text: str) -> tuple[Question, ...]:
    """The questions that a file of the deck holds.

    Raises:
        ArgumentError: a question without its lesson or its question mark, code that belongs to no question.
    """
    questions: list[Question] = []
    for cell in read_cells(f"{level}.py", text)[1]:
        if cell.kind == "question":
            asked = _ASKED.fullmatch(cell.about)
            if asked is None:
                raise ArgumentError(f"a question must be written [lesson] ..?: {level}.py has {cell.about!r}")
            questions.append(Question(asked[2], cell.text, level, int(asked[1])))
        elif cell.kind == "code" and questions and not questions[-1].check:
            questions[-1] = replace(questions[-1], check=cell.text)
        else:
            raise ArgumentError(
                f"a cell must be a question or its one check: {level}.py has {cell.text[:40]!r}"
            )
    return tuple(questions)


@cache
def _questions() -> tuple[Question, ...]:
    folder = files(__package__) / "interview"
    found = [
        Question(cell.about, cell.text, _level_of(lesson.number), lesson.number)
        for lesson in lessons()
        for cell in lesson.cells
        if cell.kind == "question"
    ]
    for level in LEVELS:
        found += read_questions(level, (folder / f"{level}.py").read_text("utf-8"))
    return tuple(sorted(found, key=lambda question: (LEVELS.index(question.level), question.lesson)))


def _level_of(lesson: int) -> Level:
    if lesson <= 6:
        return "easy"
    return "medium" if lesson <= 14 else "hard"
