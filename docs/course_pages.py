"""For the site: the lessons as pages, with their output. They run while the site is built.

Formulas become MathML, which browsers display without further files.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from headwise.course.exercises import PLANTS  # noqa: E402
from headwise.course.lesson import Lesson, lessons  # noqa: E402
from headwise.course.rendering import FORMULA, Shown  # noqa: E402


def on_config(config: Any, **_: Any) -> Any:
    """Add the lessons to the navigation, below Learn."""
    learn = next(entry["Learn"] for entry in config["nav"] if "Learn" in entry)
    learn.append({"Lessons": [{f"{lesson.number}. {lesson.title}": page_of(lesson)} for lesson in lessons()]})
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page for each lesson, and its pictures."""
    outputs = run_all()
    for lesson in lessons():
        shown = outputs[lesson.number]
        files.append(File.generated(config, page_of(lesson), content=as_page(lesson, shown)))
        for cell, output in shown.items():
            for number, picture in enumerate(output.pictures):
                files.append(
                    File.generated(config, f"learn/{picture_of(lesson, cell, number)}", content=picture)
                )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Convert the formulas of a page to MathML, except in code."""
    parts = re.split(r"(^```.*?^```|`[^`\n]*`)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if index % 2 else FORMULA.sub(mathml, part) for index, part in enumerate(parts))


def mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] else "inline"
    return latex2mathml.converter.convert(" ".join((match[1] or match[2]).split()), display=display)


RUN = """
import pickle, sys
from headwise.course.lesson import lesson
from headwise.course.rendering import run_lesson
outputs = {number: run_lesson(lesson(number)) for number in map(int, sys.argv[2:])}
with open(sys.argv[1], "wb") as file:
    pickle.dump(outputs, file)
"""


def run_all() -> dict[int, dict[int, Shown]]:
    """Run every lesson in two processes of one thread. Return what the cells show, by lesson and cell."""
    numbers = [str(lesson.number) for lesson in lessons()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    outputs: dict[int, dict[int, Shown]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(half) for half in range(2)]
        processes = [
            subprocess.Popen([sys.executable, "-c", RUN, str(path), *numbers[half::2]], env=environment)
            for half, path in enumerate(paths)
        ]
        for process, path in zip(processes, paths, strict=True):
            if process.wait() != 0:
                raise PluginError("a lesson does not run; its error is printed above")
            outputs |= pickle.loads(path.read_bytes())
    return outputs


def page_of(lesson: Lesson) -> str:
    return f"learn/{lesson.number:02}_{lesson.name}.md"


def picture_of(lesson: Lesson, cell: int, number: int) -> str:
    return f"{lesson.number:02}_{lesson.name}-{cell}-{number}.png"


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
        elif cell.kind == "exercise":
            parts += [
                "## Exercise",
                f"`headwise learn start {lesson.number}` writes this into your folder; "
                "`headwise learn check` examines it.",
                f"```python\n{cell.text}\n```",
            ]
        elif cell.kind == "solution":
            parts.append(folded("The solution", f"```python\n{cell.text}\n```"))
        else:
            parts += [] if has_questions else ["## Questions"]
            has_questions = True
            parts.append(folded(cell.about, cell.text, "question"))
    repairs = [
        f"`headwise learn repair {list(PLANTS).index(key) + 1}`" for key in lesson.repairs if key in PLANTS
    ]
    if repairs:
        parts.append(f"Code to repair, with mistakes of this lesson: {', '.join(repairs)}.")
    return "\n\n".join(parts) + "\n"


def folded(title: str, text: str, kind: str = "note") -> str:
    inside = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? {kind} "{title.replace(chr(34), chr(39))}"\n\n{inside}'
