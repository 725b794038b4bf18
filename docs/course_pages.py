"""For the site: lessons and interview questions as pages, with their output. They run while it is built.

Formulas become MathML, which browsers display without further files.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from headwise.course.exercises import PLANTS  # noqa: E402
from headwise.course.html_text import mathml  # noqa: E402
from headwise.course.lesson import LEVELS, Cell, Lesson, Question, deck, hint_title, lessons  # noqa: E402
from headwise.course.lesson import lesson as lesson_of  # noqa: E402
from headwise.course.rendering import FORMULA, Shown  # noqa: E402


def on_config(config: Any, **_: Any) -> Any:
    """Add the lessons and the questions to the navigation, below Learn."""
    learn = next(entry["Learn"] for entry in config["nav"] if "Learn" in entry)
    learn.append({"Lessons": [{f"{lesson.number}. {lesson.title}": page_of(lesson)} for lesson in lessons()]})
    learn.append({"Interview questions": [{level.capitalize(): questions_page(level)} for level in LEVELS]})
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page for each lesson with its pictures and live pages, and a page of questions for each level."""
    outputs, printed = run_all()
    for lesson in lessons():
        shown = outputs[lesson.number]
        files.append(File.generated(config, page_of(lesson), content=as_page(lesson, shown)))
        for cell, output in shown.items():
            for number, picture in enumerate(output.pictures):
                files.append(
                    File.generated(config, f"learn/{picture_of(lesson, cell, number)}", content=picture)
                )
        for index, cell in enumerate(lesson.cells):
            if cell.kind == "page":
                place = f"learn/{live_page_of(lesson, index)}"
                files.append(File.generated(config, place, content=live_page(cell)))
    for level in LEVELS:
        content = as_questions(level, printed)
        files.append(File.generated(config, questions_page(level), content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Convert the formulas of a page to MathML, except in code."""
    parts = re.split(r"(^ *```.*?^ *```|`[^`\n]*`)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if index % 2 else FORMULA.sub(mathml, part) for index, part in enumerate(parts))


RUN = """
import pickle, sys
from headwise.course.lesson import computed, deck, lessons
from headwise.course.rendering import run_lesson
half = int(sys.argv[2])
outputs = {lesson.number: run_lesson(lesson) for lesson in lessons()[half::2]}
printed = {question.text: computed(question) for question in deck()[half::2] if question.check}
with open(sys.argv[1], "wb") as file:
    pickle.dump((outputs, printed), file)
"""


def run_all() -> tuple[dict[int, dict[int, Shown]], dict[str, str]]:
    """Run all lessons and the checks of all questions, in two processes of one thread.

    Return what the cells show, by lesson and cell, and what the checks print, by question.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    outputs: dict[int, dict[int, Shown]] = {}
    printed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(half) for half in range(2)]
        processes = [
            subprocess.Popen([sys.executable, "-c", RUN, str(path), str(half)], env=environment)
            for half, path in enumerate(paths)
        ]
        for process, path in zip(processes, paths, strict=True):
            if process.wait() != 0:
                raise PluginError("a lesson or a question does not run; its error is printed above")
            of_lessons, of_questions = pickle.loads(path.read_bytes())
            outputs |= of_lessons
            printed |= of_questions
    return outputs, printed


def page_of(lesson: Lesson) -> str:
    return f"learn/{lesson.number:02}_{lesson.name}.md"


def picture_of(lesson: Lesson, cell: int, number: int) -> str:
    return f"{lesson.number:02}_{lesson.name}-{cell}-{number}.png"


# Live pages


def live_page_of(lesson: Lesson, cell: int) -> str:
    return f"{lesson.number:02}_{lesson.name}-{cell}.html"


def live_page(cell: Cell) -> bytes:
    """Return the page of mini's heads on the text of a cell, as `headwise look --html` writes it."""
    text = cell.about.partition("#")[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heads.html"
        command = [sys.executable, "-m", "headwise", "look", text, "--html", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise PluginError(f"a live page was not written: {done.stderr}")
        return path.read_bytes()


def framed(lesson: Lesson, index: int, cell: Cell) -> str:
    """Return a live page in a frame, which loads it when the reader scrolls there."""
    text, _, view = cell.about.partition("#")
    address = escape(f"{live_page_of(lesson, index)}#{view}")
    command = f"headwise look {json.dumps(text)} --html heads.html"
    return (
        "Below is the same head on a live page: mini runs in your browser. Change the text, point at a token "
        "to see its weights, switch heads off and see which tokens mini then expects.\n\n"
        f'<iframe class="live" src="{address}" title="Heads of mini, live" loading="lazy"></iframe>\n\n'
        f'<a href="{address}" target="_blank">Open it in a tab</a>. On your computer, `{command}` writes it.'
    )


# Lessons


def as_page(lesson: Lesson, shown: dict[int, Shown]) -> str:
    """Return a lesson in Markdown."""
    parts = [
        f"# {lesson.number}. {lesson.title}",
        f"*{lesson.idea[0].upper()}{lesson.idea[1:]}.*",
        f"{lesson.minutes} minutes, for a {lesson.level}. "
        f"As a notebook: `headwise learn notebook {lesson.number}`.",
    ]
    has_questions = False
    for index, cell in enumerate(lesson.cells):
        if index in lesson.codes_of_questions:
            continue
        if cell.kind == "markdown":
            parts.append(cell.text)
        elif cell.kind == "code":
            parts.append(f"```python\n{cell.text}\n```")
            output = shown[index]
            if output.printed.strip():
                parts.append(f"```text\n{output.printed.rstrip()}\n```")
            parts += [
                f"![The plot of the code above]({picture_of(lesson, index, number)})"
                for number in range(len(output.pictures))
            ]
        elif cell.kind == "page":
            parts.append(framed(lesson, index, cell))
        elif cell.kind == "exercise":
            parts += [
                "## Exercise",
                f"`headwise learn start {lesson.number}` writes this into your folder; "
                "`headwise learn check` examines it. The hints below are also in "
                f"`headwise learn hint {lesson.number}`.",
                f"```python\n{cell.text}\n```",
            ]
        elif cell.kind == "hint":
            parts.append(folded(hint_title(cell.about), cell.text, "tip"))
        elif cell.kind == "solution":
            parts.append(folded("The solution", f"```python\n{cell.text}\n```"))
        elif cell.kind == "question":
            parts += [] if has_questions else ["## Questions"]
            has_questions = True
            answer = [cell.text]
            if (code := lesson.code_of(index)) is not None:
                answer.append(f"```python\n{lesson.cells[code].text}\n```")
                if printed := shown[code].printed.rstrip():
                    answer.append(f"```text\n{printed}\n```")
            parts.append(folded(cell.about, "\n\n".join(answer), "question"))
    repairs = [
        f"`headwise learn repair {list(PLANTS).index(key) + 1}`" for key in lesson.repairs if key in PLANTS
    ]
    if repairs:
        parts.append(f"Code to repair, with mistakes of this lesson: {', '.join(repairs)}.")
    return "\n\n".join(parts) + "\n"


# Questions


def questions_page(level: str) -> str:
    return f"learn/questions_{level}.md"


def as_questions(level: str, printed: dict[str, str]) -> str:
    """Return the interview questions of a level in Markdown, each with its answer folded."""
    counts = {each: sum(bool(question.check) for question in deck(each)) for each in LEVELS}
    others = [f"[{count} {each}]({Path(questions_page(each)).name})" for each, count in counts.items()]
    questions = deck(level)
    own = [question for question in questions if question.check]
    parts = [
        f"# {level.capitalize()} questions",
        f"{counts[level]} of {sum(counts.values())} interview questions: {', '.join(others)}. Answer each "
        "yourself before you open its answer. Every answer comes with the code that computes its numbers, "
        "and with what the code printed when this page was built.",
        f"In the terminal: `headwise learn quiz --level {level}`.",
    ]
    for number, question in enumerate(own, 1):
        parts += [f"## {number}. {question.text}", folded("Answer", answer_of(question, printed), "question")]
    of_lessons = [
        f"- [{question.text}]({Path(page_of(lesson_of(question.lesson))).name}#questions)"
        for question in questions
        if not question.check
    ]
    parts += ["## More questions, in the lessons", "\n".join(of_lessons)]
    return "\n\n".join(parts) + "\n"


def answer_of(question: Question, printed: dict[str, str]) -> str:
    chosen = lesson_of(question.lesson)
    return "\n\n".join(
        [
            question.answer,
            f"The code that computes it:\n\n```python\n{question.check}\n```",
            f"It printed:\n\n```text\n{printed[question.text].rstrip()}\n```",
            f"More in lesson [{chosen.number}. {chosen.title}]({Path(page_of(chosen)).name}).",
        ]
    )


def folded(title: str, text: str, kind: str = "note") -> str:
    inside = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? {kind} "{title.replace(chr(34), chr(39))}"\n\n{inside}'
