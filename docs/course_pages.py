"""For the site: the lessons as pages, run while the site is built, with what they print and show.

A lesson's formulas become MathML, which browsers draw by themselves: nothing is fetched for it.
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
    """The lessons, below Learn."""
    learn = next(entry["Learn"] for entry in config["nav"] if "Learn" in entry)
    learn.append({"Lessons": [{f"{one.number}. {one.title}": page_of(one)} for one in lessons()]})
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """A page for each lesson, and its pictures."""
    found = run_all()
    for one in lessons():
        shown = found[one.number]
        files.append(File.generated(config, page_of(one), content=as_page(one, shown)))
        for cell, each in shown.items():
            for number, picture in enumerate(each.pictures):
                files.append(
                    File.generated(config, f"learn/{picture_of(one, cell, number)}", content=picture)
                )
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Formulas of every page that is not code."""
    parts = re.split(r"(^```.*?^```|`[^`\n]*`)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if place % 2 else FORMULA.sub(mathml, part) for place, part in enumerate(parts))


def mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] else "inline"
    return latex2mathml.converter.convert(" ".join((found[1] or found[2]).split()), display=display)


RUN = """
import pickle, sys
from headwise.course.lesson import lesson
from headwise.course.rendering import run_lesson
found = {number: run_lesson(lesson(number)) for number in map(int, sys.argv[2:])}
with open(sys.argv[1], "wb") as file:
    pickle.dump(found, file)
"""


def run_all() -> dict[int, dict[int, Shown]]:
    """What the cells of every lesson print and show, in two processes with a thread each."""
    numbers = [str(one.number) for one in lessons()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    found: dict[int, dict[int, Shown]] = {}
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(half) for half in range(2)]
        running = [
            subprocess.Popen([sys.executable, "-c", RUN, str(place), *numbers[half::2]], env=environment)
            for half, place in enumerate(places)
        ]
        for each, place in zip(running, places, strict=True):
            if each.wait() != 0:
                raise PluginError("a lesson does not run; its error stands above")
            found |= pickle.loads(place.read_bytes())
    return found


def page_of(one: Lesson) -> str:
    return f"learn/{one.number:02}_{one.name}.md"


def picture_of(one: Lesson, cell: int, number: int) -> str:
    return f"{one.number:02}_{one.name}-{cell}-{number}.png"


def as_page(one: Lesson, shown: dict[int, Shown]) -> str:
    """One lesson in Markdown."""
    said = [
        f"# {one.number}. {one.title}",
        f"*{one.idea[0].upper()}{one.idea[1:]}.*",
        f"{one.minutes} minutes, for a {one.level}. To work in it: `headwise learn notebook {one.number}`.",
    ]
    asked = False
    for place, cell in enumerate(one.cells):
        if cell.kind == "markdown":
            said.append(cell.text)
        elif cell.kind == "code":
            said.append(f"```python\n{cell.text}\n```")
            each = shown[place]
            if each.printed.strip():
                said.append(f"```text\n{each.printed.rstrip()}\n```")
            said += [
                f"![What the code above draws]({picture_of(one, place, number)})"
                for number in range(len(each.pictures))
            ]
        elif cell.kind == "exercise":
            said += [
                "## Exercise",
                f"`headwise learn start {one.number}` lays this into your folder; `headwise learn check` "
                "examines it.",
                f"```python\n{cell.text}\n```",
            ]
        elif cell.kind == "solution":
            said.append(folded("The solution", f"```python\n{cell.text}\n```"))
        else:
            said += [] if asked else ["## Questions"]
            asked = True
            said.append(folded(cell.about, cell.text, "question"))
    repairs = [
        f"`headwise learn repair {list(PLANTS).index(key) + 1}`" for key in one.repairs if key in PLANTS
    ]
    if repairs:
        said.append(f"More to repair, with a fault of this lesson in it: {', '.join(repairs)}.")
    return "\n\n".join(said) + "\n"


def folded(title: str, text: str, kind: str = "note") -> str:
    inside = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? {kind} "{title.replace(chr(34), chr(39))}"\n\n{inside}'
