"""Verbs for teachers, below `headwise learn`: slides, a lesson plan, a handout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..course.lesson import lesson
from .learn_verbs import Folder, Number, _echo_written, _study, learn
from .terminal import progress_line

__all__ = ["learn"]  # with the verbs below


@learn.command()
def slides(number: Number, folder: Folder = None) -> None:
    """Write the slides of a lesson into your folder, as one HTML file that needs no network.

    Its code is run. In the browser: s opens your notes, o shows all slides, f fills the screen. The browser
    also prints them, each slide on a page.

    Example: headwise learn slides 3
    """

    def page() -> str:
        from ..course.slides import slides_html

        return slides_html(lesson(number))

    _write(number, folder, "slides.html", page, "Running")


@learn.command()
def plan(
    number: Number,
    minutes: Annotated[int, typer.Option(help="Length of the session.", show_default=True)] = 45,
    folder: Folder = None,
) -> None:
    """Write the plan of a session about a lesson into your folder, as Markdown.

    It has the times, questions with the answers to expect, and the usual mistakes with a hint for each.

    Example: headwise learn plan 3 --minutes 90
    """

    def text() -> str:
        from ..course.lesson_plan import plan_text

        return plan_text(lesson(number), minutes)

    _write(number, folder, "plan.md", text, "Planning")


@learn.command()
def handout(
    number: Number,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Write a PDF file. Needs Chromium; HEADWISE_BROWSER may name it.")
    ] = False,
    folder: Folder = None,
) -> None:
    """Write the handout of a lesson into your folder: one page of A4 to write on, as HTML or PDF.

    Example: headwise learn handout 3 --pdf
    """
    from ..course.handout import browser_path, handout_html, write_pdf

    def page() -> str:
        return handout_html(lesson(number))

    if not pdf:
        _write(number, folder, "handout.html", page, "Running")
        return
    browser_path()  # before the work
    path = _path(number, folder, "handout.pdf")
    is_new = not path.exists()
    if is_new:
        with progress_line(f"Running lesson {number}"):
            write_pdf(page(), path)
    _echo_written(path, is_new)


def _path(number: int, folder: Path | None, ending: str) -> Path:
    chosen = lesson(number)
    return _study(folder).folder / f"{chosen.number:02}_{chosen.name}_{ending}"


def _write(number: int, folder: Path | None, ending: str, make: Callable[[], str], doing: str) -> None:
    """Write a new file into the folder; an existing file is left as it is, and nothing is made."""
    path = _path(number, folder, ending)
    if path.exists():
        _echo_written(path, False)
        return
    with progress_line(f"{doing} lesson {number}"):
        text = make()
    _echo_written(path, _study(folder).write_new(path, text))
