"""Lessons and interview questions: Python files in cells, and functions that read them.

    \"\"\"One head.

    idea: a head is a soft lookup
    minutes: 8
    level: junior
    repairs: keys and values swapped
    without: softmax
    \"\"\"
    # %% [markdown]
    # Text in Markdown, as comments.
    # %% slide: A head is a lookup     optional: a slide for the text above and the code below (slides.py)
    # - Its points, in Markdown.
    # %% page: The cat sat#layer=5    a live page of mini: its text, and the view that it opens
    # %%
    q = torch.randn(5, 8)            code; its output and plots are shown
    # %% exercise: attend
    def attend(q, k, v): ...         what the learner starts from
    # %% hint: idea
    # The first hint, in Markdown; then `# %% hint: formula` and `# %% hint: code`.
    # %% solution
    def attend(q, k, v): ...         the solution
    # %% try
    print(attend(q, k, v).shape)     optional: code that calls it, for the end of the learner's file
    # %% question: Why is ..?
    # The answer, in Markdown.

A code cell below the solution belongs to the question directly below it, unless Markdown is directly above
the cell: it is shown with the answer.

The file runs from top to bottom. The pages, notebooks and exercises are generated from it. A lesson may have
no exercise.

The deck has the questions of interview/easy.py, medium.py and hard.py, and those of the lessons.

    # %% question: [7] Why is ..?      the number of its lesson, and the question
    # The answer, in Markdown.
    # %%
    print(..)                          its check, optional: code that computes the numbers of the answer
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal, get_args

from ..errors import ArgumentError

Kind = Literal["markdown", "slide", "code", "page", "exercise", "hint", "solution", "try", "question"]
_HEAD = re.compile(r"^# %%(?: \[(markdown)\]| (slide|page|exercise|hint|solution|try|question)(?:: (.+))?)?$")
HINTS = {"idea": "the idea", "formula": "the formula", "code": "the shape of the code"}  # in this order
READERS = ("beginner", "product manager", "junior", "data scientist")
Level = Literal["easy", "medium", "hard"]
LEVELS: tuple[Level, ...] = get_args(Level)
_QUESTION = re.compile(r"\[(\d+)\] (.+\?)")


@dataclass(frozen=True)
class Cell:
    """A cell; `about` is the text after the colon of its head: a name, a question, a key of HINTS."""

    kind: Kind
    text: str
    about: str = ""


@dataclass(frozen=True)
class Question:
    """A question of a lesson or of the interview deck."""

    text: str
    answer: str
    level: Level
    lesson: int
    check: str = ""  # code that computes the numbers of the answer
    code: str = ""  # the lesson's cell that belongs to it


@dataclass(frozen=True)
class Lesson:
    """A lesson, as its file defines it."""

    number: int
    name: str  # of the file, without number and ending
    title: str
    idea: str
    minutes: int
    level: str
    repairs: tuple[str, ...]
    cells: tuple[Cell, ...]
    without: tuple[str, ...] = ()  # functions that its exercise must not call

    @property
    def file_name(self) -> str:
        """The file name of the exercise in the learner's folder."""
        return f"{self.number:02}_{self.name}.py"

    @property
    def has_exercise(self) -> bool:
        """True if the lesson has an exercise."""
        return any(cell.kind == "exercise" for cell in self.cells)

    @property
    def hints(self) -> tuple[str, ...]:
        """The hints for the exercise, in the order of HINTS; none if the lesson has no exercise."""
        return tuple(cell.text for cell in self.cells if cell.kind == "hint")

    def code_of(self, question: int) -> int | None:
        """Return the index of the code cell that belongs to the question at this index, None without."""
        code = question - 1
        is_code = code > 0 and self.cells[code].kind == "code" and self.cells[code - 1].kind != "markdown"
        return code if is_code and any(cell.kind == "solution" for cell in self.cells[:code]) else None

    @property
    def codes_of_questions(self) -> frozenset[int]:
        """The indices of the code cells that belong to questions."""
        codes = (self.code_of(index) for index, cell in enumerate(self.cells) if cell.kind == "question")
        return frozenset(code for code in codes if code is not None)


def read_lesson(file_name: str, text: str) -> Lesson:
    """Return the lesson of a file's text."""
    number, _, name = file_name.removesuffix(".py").partition("_")
    docstring, cells = read_cells(file_name, text)
    title, _, lines = docstring.partition("\n")
    fields = dict(line.split(": ", 1) for line in lines.strip().splitlines() if ": " in line)
    missing = [field for field in ("idea", "minutes", "level") if field not in fields]
    if missing:
        raise ArgumentError(
            f"lesson {file_name} must have a line {missing[0]!r}: got {sorted(fields)}; add the line"
        )
    if fields["level"] not in READERS:
        raise ArgumentError(f"lesson {file_name} must have a level: got {fields['level']!r}; use {READERS}")
    hints = [cell.about for cell in cells if cell.kind == "hint"]
    if hints and hints != [*HINTS]:
        raise ArgumentError(
            f"lesson {file_name} must have the hints {', '.join(HINTS)}: got {hints}; use these"
        )
    return Lesson(
        int(number),
        name,
        title.rstrip("."),
        fields["idea"],
        int(fields["minutes"]),
        fields["level"],
        _split(fields.get("repairs", "")),
        cells,
        _split(fields.get("without", "")),
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(";") if part.strip())


def read_cells(file_name: str, text: str) -> tuple[str, tuple[Cell, ...]]:
    """Return the docstring at the top of a file, and the cells below it."""
    head, *rest = re.split(r"(?m)^(?=# %%)", text)
    return ast.get_docstring(ast.parse(head)) or "", tuple(_cell(file_name, part) for part in rest)


def _cell(file_name: str, text: str) -> Cell:
    head, _, body = text.partition("\n")
    match = _HEAD.match(head)
    if match is None:
        raise ArgumentError(
            f"lesson {file_name} must have cells of a known kind: got {head!r}; see course/lesson.py"
        )
    kind: Kind = match[1] or match[2] or "code"  # type: ignore[assignment]
    if kind in ("markdown", "slide", "hint", "question"):
        lines = body.rstrip().splitlines()
        bare = [line for line in lines if line and not line.startswith("#")]
        if bare:
            raise ArgumentError(f"lesson {file_name} must have text in comments only: got {bare[0]!r}; add #")
        body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)
    return Cell(kind, body.strip("\n"), match[3] or "")


def hint_title(name: str) -> str:
    """Return the title of a hint, by its key of HINTS: "Hint 2 of 3: the formula"."""
    return f"Hint {[*HINTS].index(name) + 1} of {len(HINTS)}: {HINTS[name]}"


@cache
def lessons() -> tuple[Lesson, ...]:
    """Return all lessons, in order."""
    folder = files(__package__) / "lessons"
    paths = {file.name: file for file in folder.iterdir() if re.fullmatch(r"\d\d_\w+\.py", file.name)}
    return tuple(read_lesson(name, paths[name].read_text("utf-8")) for name in sorted(paths))


def lesson(number: int) -> Lesson:
    """Return the lesson of this number."""
    by_number = {entry.number: entry for entry in lessons()}
    if number not in by_number:
        raise ArgumentError(f"lesson must be 0 to {max(by_number)}: got {number}; see headwise learn")
    return by_number[number]


# Interview questions


def deck(level: str | None = None, lesson: int | None = None) -> tuple[Question, ...]:
    """Return interview questions, from easy to hard and in the order of the lessons.

    Args:
        level: "easy", "medium" or "hard"; by default all.
        lesson: the number of a lesson; by default all lessons.

    Raises:
        ArgumentError: if there is no such level or lesson.

    Example:
        >>> deck("easy", lesson=13)[-1].text
        'What does a heat map of attention weights show, and what does it not show?'
    """
    if level is not None and level not in LEVELS:
        raise ArgumentError(f"level must be one of {', '.join(LEVELS)}: got {level!r}; leave it out for all")
    questions = _questions()
    numbers = sorted({question.lesson for question in questions})
    if lesson is not None and lesson not in numbers:
        raise ArgumentError(
            f"lesson must be {numbers[0]} to {numbers[-1]}: got {lesson!r}; leave it out for all"
        )
    return tuple(
        question
        for question in questions
        if level in (None, question.level) and lesson in (None, question.lesson)
    )


def computed(question: Question) -> str:
    """Run the check of a question and return what it prints; "" if it has no check.

    Exceptions of the check are raised: an AssertionError means that the answer is wrong.
    """
    import torch

    printed = io.StringIO()
    names: dict[str, Any] = {"__name__": "__check__"}
    before = torch.random.get_rng_state()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(question.check, f"the check of {question.text!r}", "exec"), names)
    finally:
        torch.random.set_rng_state(before)
    return printed.getvalue()


def read_questions(level: Level, text: str) -> tuple[Question, ...]:
    """Return the questions of a file of the deck."""
    questions: list[Question] = []
    for cell in read_cells(f"{level}.py", text)[1]:
        if cell.kind == "question":
            match = _QUESTION.fullmatch(cell.about)
            if match is None:
                raise ArgumentError(
                    f"question must be [lesson] ..?: {level}.py has {cell.about!r}; try [1] Why?"
                )
            questions.append(Question(match[2], cell.text, level, int(match[1])))
        elif cell.kind == "code" and questions and not questions[-1].check:
            questions[-1] = replace(questions[-1], check=cell.text)
        else:
            raise ArgumentError(
                f"cell must be a question, or the only code cell after one: {level}.py has "
                f"{cell.text[:40]!r}; remove it"
            )
    return tuple(questions)


@cache
def _questions() -> tuple[Question, ...]:
    folder = files(__package__) / "interview"
    questions = [
        Question(
            cell.about,
            cell.text,
            _level_of(lesson.number),
            lesson.number,
            code="" if (code := lesson.code_of(index)) is None else lesson.cells[code].text,
        )
        for lesson in lessons()
        for index, cell in enumerate(lesson.cells)
        if cell.kind == "question"
    ]
    for level in LEVELS:
        questions += read_questions(level, (folder / f"{level}.py").read_text("utf-8"))
    return tuple(sorted(questions, key=lambda question: (LEVELS.index(question.level), question.lesson)))


def _level_of(lesson: int) -> Level:
    if lesson <= 6:
        return "easy"
    return "medium" if lesson <= 14 else "hard"
