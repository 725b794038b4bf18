"""The handout of a lesson: one page of A4 to write on, as HTML, and as PDF through a browser."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from html import escape
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import INSTALLATION, ArgumentError, PackageMissing
from ..whole_files import whole_file
from .html_text import blocks, code_html, inline_html, markdown_html
from .lesson import Lesson
from .rendering import Shown, run_lesson
from .slides import PICTURE_DPI, key_points, narrow_code, signature_of, task_of

__all__ = ["BROWSERS", "VARIABLE", "browser_path", "handout_html", "page_html", "write_pdf"]

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "microsoft-edge",
)
VARIABLE = "HEADWISE_BROWSER"  # names a browser that is not on the PATH
PATIENCE = 120  # seconds for a PDF
POINTS, POINT_LETTERS = 6, 520  # at most, on the page
CODE_LINES = 12  # longer code is only in the file of the exercise


def handout_html(lesson: Lesson) -> str:
    """Run the lesson and return its handout as an HTML page of one A4 page."""
    return page_html(lesson, run_lesson(lesson, PICTURE_DPI))


def page_html(lesson: Lesson, shown: dict[int, Shown]) -> str:
    """Return the handout of a lesson that was run.

    Args:
        shown: the result of `run_lesson`.
    """
    from ..show.offline_pages import policy

    style = (files(__package__) / "handout.css").read_text("utf-8")
    allowed = policy(style=style, images=True)
    idea = f"{lesson.idea[0].upper()}{lesson.idea[1:]}."
    parts = [
        f"<header><h1>{escape(lesson.title)}</h1><span>headwise, lesson {lesson.number} · Name:"
        " ______________________</span></header>",
        f'<p class="idea">{inline_html(idea)}</p>',
        _middle(lesson, shown),
        _exercise(lesson),
        _questions(lesson),
        _mistakes(lesson),
        f"<footer>Read: <code>headwise learn read {lesson.number}</code> · Answers: "
        f"<code>headwise learn quiz --lesson {lesson.number}</code><br>{inline_html(INSTALLATION)}</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{allowed}">\n'
        f"<title>{lesson.number}. {escape(lesson.title)}: handout</title>\n<style>{style}</style>\n</head>\n"
        f"<body>\n<main>\n{chr(10).join(filter(None, parts))}\n</main>\n</body>\n</html>\n"
    )


def _middle(lesson: Lesson, shown: dict[int, Shown]) -> str:
    """Return the points and the formulas, beside the first picture of the lesson."""
    points, letters = [], 0
    for point in key_points(lesson)[:POINTS]:
        letters += len(point)
        if letters > POINT_LETTERS:
            break
        points.append(f"<li>{inline_html(point)}</li>")
    formulas = list(
        dict.fromkeys(
            block.text
            for cell in lesson.cells
            if cell.kind in ("markdown", "slide")
            for block in blocks(cell.text)
            if block.kind == "formula"
        )
    )
    text = f"<h2>In short</h2><ul>{''.join(points)}</ul>" if points else ""
    text += "".join(markdown_html(formula) for formula in formulas[:2])
    solution = next(
        (index for index, cell in enumerate(lesson.cells) if cell.kind == "solution"), len(lesson.cells)
    )
    picture = next(
        (show.pictures[0] for index, show in shown.items() if show.pictures and index < solution), None
    )
    if picture is None:
        return f'<div class="middle whole"><div>{text}</div></div>'
    data = base64.b64encode(picture).decode()
    image = f'<figure><img src="data:image/png;base64,{data}" alt="A plot of the lesson"></figure>'
    return f'<div class="middle"><div>{text}</div>{image}</div>'


def _exercise(lesson: Lesson) -> str:
    cell = next((cell for cell in lesson.cells if cell.kind == "exercise"), None)
    if cell is None:
        return ""
    code = narrow_code(signature_of(cell))
    listing = f"<pre>{code_html(code)}</pre>" if code.count("\n") < CODE_LINES else ""
    start, check = (f"<code>headwise learn {verb} {lesson.number}</code>" for verb in ("start", "check"))
    return (
        f"<div><h2>Exercise: write <code>{escape(cell.about)}</code></h2><p>{inline_html(task_of(cell))} "
        f"{start}, then {check}.</p>{listing}</div>"
    )


def _questions(lesson: Lesson) -> str:
    questions = [cell.about for cell in lesson.cells if cell.kind == "question"][:2]
    rows = [
        f'<div class="question"><p><b>{number}.</b> {inline_html(text)}</p><div class="lines"></div></div>'
        for number, text in enumerate(questions, 1)
    ]
    rows = rows or ['<div class="question"><div class="lines"></div></div>']
    return f'<div class="questions"><h2>{"Questions" if questions else "Notes"}</h2>{"".join(rows)}</div>'


def _mistakes(lesson: Lesson) -> str:
    if not lesson.repairs:
        return ""
    from ..examiner.steps import FAULTS

    rows = [
        f"<li>{escape(FAULTS[key].title)}: <code>{escape(FAULTS[key].formula)}</code></li>"
        for key in lesson.repairs[:3]
    ]
    return f"<div><h2>Mistakes to avoid</h2><ul>{''.join(rows)}</ul></div>"


# PDF


def browser_path() -> str:
    """Return the path of a browser that writes PDF files.

    Raises:
        PackageMissing: there is none.
    """
    named = os.environ.get(VARIABLE)
    path = named or next((path for path in map(shutil.which, BROWSERS) if path), None)
    if path is None or shutil.which(path) is None:
        looked = (
            f"{VARIABLE}={named!r} cannot be run"
            if named
            else f"none of {', '.join(BROWSERS)} is on the PATH"
        )
        raise PackageMissing(
            f"pdf must be written by a browser: {looked}; install Chromium (apt-get install chromium), or "
            f"name a browser in {VARIABLE}, or leave out --pdf and print the page from your browser",
            name="chromium",
        )
    return path


def write_pdf(page: str, path: Path) -> None:
    """Write an HTML page as a PDF file, whole or not at all.

    Raises:
        PackageMissing: there is no browser.
        ArgumentError: the browser writes no file, or the folder cannot be written to.
    """
    browser = browser_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"folder must be writable: {path.parent}: {error.strerror}; choose another with --folder"
        ) from error
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, whole_file(path, "folder") as half:
        source, printed = Path(folder, "handout.html"), Path(folder, "handout.pdf")
        source.write_text(page, "utf-8")
        as_root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        command = [
            browser, "--headless=new", "--disable-gpu", "--no-first-run", "--no-pdf-header-footer", *as_root,
            f"--user-data-dir={folder}/profile", f"--print-to-pdf={printed}", source.as_uri(),
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            reason = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"it took more than {PATIENCE} seconds"
        if not printed.is_file():
            raise ArgumentError(
                f"pdf must be written by a browser: {browser} wrote none ({reason}); leave out --pdf and "
                "print the page from your browser"
            )
        shutil.copyfile(printed, half)
