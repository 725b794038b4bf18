"""Verbs for teachers, below `headwise learn`: slides, a lesson plan, a handout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..course.lesson import lesson
from ..whole_files import whole_file
from .learn_verbs import Folder, Number, _study, learn
from .terminal import progress_line

__all__ = ["learn"]  # with the verbs below

Force = Annotated[bool, typer.Option("--force", help="Rewrite the file if it exists.")]


@learn.command()
def slides(number: Number, force: Force = False, folder: Folder = None) -> None:
    """Write the slides of a lesson into your folder, as one HTML file that needs no network.

    Its code is run. In the browser: s opens your notes, o shows all slides, f fills the screen. The browser
    also prints them, each slide on a page.

    Example: headwise learn slides 3
    """

    def page() -> str:
        from ..course.slides import slides_html

        return slides_html(lesson(number))

    _write(number, folder, "slides.html", page, "Running", force)


@learn.command()
def plan(
    number: Number,
    minutes: Annotated[int, typer.Option(help="Length of the session.", show_default=True)] = 45,
    force: Force = False,
    folder: Folder = None,
) -> None:
    """Write the plan of a session about a lesson into your folder, as Markdown.

    It has the times, questions with the answers to expect, and the usual mistakes with a hint for each.

    Example: headwise learn plan 3 --minutes 90
    """

    def text() -> str:
        from ..course.lesson_plan import plan_text

        return plan_text(lesson(number), minutes)

    _write(number, folder, "plan.md", text, "Planning", force)


@learn.command()
def handout(
    number: Number,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Write a PDF file. Needs Chromium; HEADWISE_BROWSER may name it.")
    ] = False,
    force: Force = False,
    folder: Folder = None,
) -> None:
    """Write the handout of a lesson into your folder: one page of A4 to write on, as HTML or PDF.

    Example: headwise learn handout 3 --pdf
    """
    from ..course.handout import browser_path, handout_html, write_pdf

    def page() -> str:
        return handout_html(lesson(number))

    if not pdf:
        _write(number, folder, "handout.html", page, "Running", force)
        return
    browser_path()  # before the work
    path = _path(number, folder, "handout.pdf")
    is_written = force or not path.exists()
    if is_written:
        with progress_line(f"Running lesson {number}"):
            write_pdf(page(), path)
    _report(path, is_written)


def _path(number: int, folder: Path | None, ending: str) -> Path:
    chosen = lesson(number)
    return _study(folder).folder / f"{chosen.number:02}_{chosen.name}_{ending}"


def _write(
    number: int, folder: Path | None, ending: str, make: Callable[[], str], doing: str, force: bool
) -> None:
    """Write a file into the folder; unless `force`, an existing one is not changed, and nothing is made."""
    path = _path(number, folder, ending)
    exists = path.exists()
    if exists and not force:
        _report(path, False)
        return
    with progress_line(f"{doing} lesson {number}"):
        text = make()
    if exists:
        with whole_file(path, "folder") as half:
            half.write_text(text, "utf-8")
    _report(path, exists or _study(folder).write_new(path, text))


def _report(path: Path, is_written: bool) -> None:
    typer.echo(
        f"Wrote {path}" if is_written else f"{path} exists already and was not changed; --force rewrites it"
    )
