"""Lessons say what studies measured: every figure that a lesson carries over is what the result says.

`course_figures.json` lists them. Each entry: the lesson, the figure as it stands there, the words around it,
the file of studies/results and the path of keys in it, how it is rounded and, of several numbers, joined. In
a path, {"heads": 4} means every item of a list that has this, {"heads": [1, 2]} those with 1, then those with
2. What a result says in words stands in the lesson as it stands there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from studies.head_counts_table import LOSS, by_heads, counts_of, difference

from headwise.course.lesson import Lesson, read_lesson

ROOT = Path(__file__).parents[2]
LESSONS, RESULTS = ROOT / "src" / "headwise" / "course" / "lessons", ROOT / "studies" / "results"
FIGURES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "course_figures.json").read_text("utf-8"))
CARRYING = sorted({entry["lesson"] for entry in FIGURES})


def _rise(found: list[dict[str, Any]]) -> float:
    return fmean(fmean(one["one"]) - one["baseline"] for one in found)


HOW: dict[str, Callable[[list[Any], int], str]] = {
    "mean": lambda found, digits: f"{fmean(found):,.{digits}f}",
    "deviation": lambda found, digits: f"{stdev(found):.{digits}f}",
    "mean ± deviation": lambda found, digits: f"{fmean(found):.{digits}f} ± {stdev(found):.{digits}f}",
    "rise without one head": lambda found, digits: f"{_rise(found):.{digits}f}",
}


@cache
def the_lesson(name: str) -> Lesson:
    return read_lesson(name, (LESSONS / name).read_text("utf-8"))


def said(name: str, *kinds: str) -> str:
    """What the cells of a lesson say, lines joined: a text may go on in the next line."""
    cells = [cell for cell in the_lesson(name).cells if cell.kind in kinds]
    return " ".join(f"{cell.about} {cell.text}" for cell in cells).replace("\n", " ")


@cache
def result(file: str) -> Any:
    return json.loads((RESULTS / file).read_text("utf-8"))


def lying(data: Any, path: list[Any]) -> list[list[Any]]:
    """What lies at the end of a path: one list, or where the path asks for several, one list each."""
    for place, key in enumerate(path):
        if isinstance(key, dict):
            for name, values in key.items():
                if isinstance(values, list):
                    each = [[*path[:place], {name: value}, *path[place + 1 :]] for value in values]
                    return [found for one in each for found in lying(data, one)]
    found = [data]
    for key in path:
        if isinstance(key, dict):
            found = [item for items in found for item in items if key.items() <= item.items()]
        else:
            found = [one[key] for one in found]
    return [found]


def stands_in(figure: str, text: str) -> bool:
    """As a number of its own: 0.7 does not stand in 0.72, nor 3 in 13."""
    before = r"(?<![\d.])" if figure[0].isdigit() else ""
    return re.search(before + re.escape(figure) + r"(?!\d|\.\d)", text) is not None


@pytest.mark.parametrize("entry", FIGURES, ids=lambda entry: f"{entry['lesson'][:2]}-{entry['text']}")
def test_a_figure_of_a_lesson_is_what_was_measured(entry: dict[str, Any]) -> None:
    """Red after new results: bring the lesson's text up to date, and the list with it."""
    assert entry["text"] in said(entry["lesson"], "markdown", "question", "code")
    assert stands_in(entry["figure"], entry["text"])
    found = lying(result(entry["file"]), entry["path"])
    assert all(found), "nothing lies at the end of the path"
    if isinstance(found[0][0], str):
        ((told,),) = found
        assert stands_in(entry["figure"].lstrip("+"), told)
    else:
        how = HOW[entry.get("how", "mean")]
        assert ", ".join(how(numbers, entry["rounding"]) for numbers in found) == entry["figure"]


@pytest.mark.parametrize("name", CARRYING)
def test_no_figure_of_a_text_is_held_by_nothing(name: str) -> None:
    """A number with a point is in the list, or in the code of the lesson, which asserts it or draws it."""
    listed = " ".join(entry["text"] for entry in FIGURES if entry["lesson"] == name)
    code = said(name, "code")
    heads = r"\b\d\.\d\b(?!\d)"  # 3.0 is head 0 of layer 3
    for number in re.findall(r"\d+\.\d+", said(name, "markdown", "question")):
        assert stands_in(number, listed) or stands_in(number, code) or re.fullmatch(heads, number), number


def test_which_head_counts_are_told_apart_is_what_lesson_12_says() -> None:
    """Clear is what differs from 8 heads, seed by seed, by more than the interval of the difference."""
    losses = by_heads(result("head_counts.json"), LOSS)
    clear = []
    for count in counts_of(result("head_counts.json")):
        gap = difference(losses[count], losses[8]) if count != 8 else None
        if gap is not None and abs(gap[0]) > gap[1]:
            assert gap[0] > 0
            clear.append(count)
    assert clear == [16, 32]
    text = said("12_why_many_heads.py", "markdown")
    assert "**16 and 32 heads are clearly worse than 8**" in text
    assert "**1, 2 and 4 cannot be told apart from 8**" in text


def test_sinks_of_smollm2_are_more_than_all_other_labels_as_lesson_13_says() -> None:
    rows = {row["about"]: row for row in result("claims_smollm2.json")["claims"]}
    told = rows["every head has a pattern that can be named"]["note"]
    labels = {name: int(count) for name, count in (one.rsplit(" ", 1) for one in told.split(", "))}
    assert labels["sink"] > sum(count for name, count in labels.items() if name not in ("sink", "mixed"))


def test_a_path_that_asks_for_several_gives_each() -> None:
    data = {"rows": [{"n": 1, "x": 5}, {"n": 2, "x": 7}, {"n": 1, "x": 6}]}
    assert lying(data, ["rows", {"n": [2, 1]}, "x"]) == [[7], [5, 6]]
    assert stands_in("0.7", "0.7; 1") and not stands_in("0.7", "0.72") and not stands_in("3", "13 or 3.5")
