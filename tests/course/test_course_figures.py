"""Every figure that a lesson quotes from a study equals the study's result.

`course_figures.json` lists the figures. Each entry has the lesson, the figure, the words around it, the file
of studies/results, the path of keys in that file, and how the numbers at its end are rounded and summarised.
In a path, {"heads": 4} selects the items of a list that have this value, {"heads": [1, 2]} those with 1, then
those with 2. A result that is a text must contain the figure.
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
LESSONS_WITH_FIGURES = sorted({entry["lesson"] for entry in FIGURES})


def _rise(runs: list[dict[str, Any]]) -> float:
    return fmean(fmean(run["one"]) - run["baseline"] for run in runs)


SUMMARIES: dict[str, Callable[[list[Any], int], str]] = {
    "mean": lambda numbers, digits: f"{fmean(numbers):,.{digits}f}",
    "deviation": lambda numbers, digits: f"{stdev(numbers):.{digits}f}",
    "mean ± deviation": lambda numbers, digits: f"{fmean(numbers):.{digits}f} ± {stdev(numbers):.{digits}f}",
    "rise without one head": lambda numbers, digits: f"{_rise(numbers):.{digits}f}",
}


@cache
def read_lesson_file(name: str) -> Lesson:
    return read_lesson(name, (LESSONS / name).read_text("utf-8"))


def text_of(name: str, *kinds: str) -> str:
    """Return the texts of a lesson's cells of these kinds, with single spaces instead of line breaks."""
    cells = [cell for cell in read_lesson_file(name).cells if cell.kind in kinds]
    return " ".join(" ".join(f"{cell.about} {cell.text}" for cell in cells).split())


@cache
def result(file: str) -> Any:
    return json.loads((RESULTS / file).read_text("utf-8"))


def values_at(data: Any, path: list[Any]) -> list[list[Any]]:
    """Return the values at the end of a path: one list, or one for each value that the path lists."""
    for i, key in enumerate(path):
        if isinstance(key, dict):
            for name, choices in key.items():
                if isinstance(choices, list):
                    paths = [[*path[:i], {name: choice}, *path[i + 1 :]] for choice in choices]
                    return [values for single in paths for values in values_at(data, single)]
    nodes = [data]
    for key in path:
        if isinstance(key, dict):
            nodes = [item for items in nodes for item in items if key.items() <= item.items()]
        else:
            nodes = [node[key] for node in nodes]
    return [nodes]


def has_number(figure: str, text: str) -> bool:
    """Return True if the text has this number, not as a part of another: 0.7 is not in 0.72, nor 3 in 13."""
    before = r"(?<![\d.])" if figure[0].isdigit() else ""
    return re.search(before + re.escape(figure) + r"(?!\d|\.\d)", text) is not None


@pytest.mark.parametrize("entry", FIGURES, ids=lambda entry: f"{entry['lesson'][:2]}-{entry['text']}")
def test_a_figure_of_a_lesson_is_what_was_measured(entry: dict[str, Any]) -> None:
    """If this fails after new results, update the lesson's text and the list."""
    assert entry["text"] in text_of(entry["lesson"], "markdown", "question", "code")
    assert has_number(entry["figure"], entry["text"])
    measured = values_at(result(entry["file"]), entry["path"])
    assert all(measured), "nothing is at the end of the path"
    if isinstance(measured[0][0], str):
        ((text,),) = measured
        assert has_number(entry["figure"].lstrip("+"), text)
    else:
        summary = SUMMARIES[entry.get("how", "mean")]
        assert ", ".join(summary(numbers, entry["rounding"]) for numbers in measured) == entry["figure"]


@pytest.mark.parametrize("name", LESSONS_WITH_FIGURES)
def test_every_decimal_number_of_a_text_has_a_source(name: str) -> None:
    """Each decimal number of a text is in the list or in the lesson's code, which asserts or draws it."""
    listed = " ".join(entry["text"] for entry in FIGURES if entry["lesson"] == name)
    code = text_of(name, "code")
    heads = r"\b\d\.\d\b(?!\d)"  # 3.0 is head 0 of layer 3
    for number in re.findall(r"\d+\.\d+", text_of(name, "markdown", "question")):
        assert has_number(number, listed) or has_number(number, code) or re.fullmatch(heads, number), number


def test_which_head_counts_are_told_apart_is_what_lesson_12_says() -> None:
    """A count is clearly different from 8 heads if the difference by seed exceeds its interval."""
    losses = by_heads(result("head_counts.json"), LOSS)
    clear = []
    for count in counts_of(result("head_counts.json")):
        gap = difference(losses[count], losses[8]) if count != 8 else None
        if gap is not None and abs(gap[0]) > gap[1]:
            assert gap[0] > 0
            clear.append(count)
    assert clear == [16, 32]
    text = text_of("12_why_many_heads.py", "markdown")
    assert "**16 and 32 heads are clearly worse than 8**" in text
    assert "**For 1, 2 and 4 heads there is no clear difference from 8**" in text


def test_sinks_of_smollm2_are_more_than_all_other_labels_as_lesson_13_says() -> None:
    rows = {row["about"]: row for row in result("claims_smollm2.json")["claims"]}
    note = rows["every head has a pattern that can be named"]["note"]
    labels = {name: int(count) for name, count in (part.rsplit(" ", 1) for part in note.split(", "))}
    assert labels["sink"] > sum(count for name, count in labels.items() if name not in ("sink", "mixed"))


def test_a_path_with_several_values_gives_a_list_for_each() -> None:
    data = {"rows": [{"n": 1, "x": 5}, {"n": 2, "x": 7}, {"n": 1, "x": 6}]}
    assert values_at(data, ["rows", {"n": [2, 1]}, "x"]) == [[7], [5, 6]]
    assert has_number("0.7", "0.7; 1") and not has_number("0.7", "0.72") and not has_number("3", "13 or 3.5")
