"""Every figure that a lesson or an article quotes from a study equals the study's result.

`course_figures.json` lists the figures. Each entry has the lesson (or the page of docs/learn), the figure,
the words around it, the file of studies/results, the path of keys in that file, and how the numbers at its
end are rounded and summarised.
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
import torch
from studies.claim_measures import PROSE
from studies.head_counts_table import LOSS, by_heads, counts_of, difference
from torch.nn.functional import cross_entropy

import headwise as hw
from headwise.course.lesson import Lesson, read_lesson
from headwise.course.rendering import run_lesson
from headwise.nn.presets import PRESETS

ROOT = Path(__file__).parents[2]
ARTICLES = ROOT / "docs" / "learn"
LESSONS, RESULTS = ROOT / "src" / "headwise" / "course" / "lessons", ROOT / "studies" / "results"
FIGURES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "course_figures.json").read_text("utf-8"))
LESSONS_WITH_FIGURES = sorted({entry["lesson"] for entry in FIGURES})


def _rise(runs: list[dict[str, Any]]) -> float:
    return fmean(fmean(run["one"]) - run["baseline"] for run in runs)


SUMMARIES: dict[str, Callable[[list[Any], int], str]] = {
    "mean": lambda numbers, digits: f"{fmean(numbers):,.{digits}f}",
    "deviation": lambda numbers, digits: f"{stdev(numbers):.{digits}f}",
    "mean ± deviation": lambda numbers, digits: f"{fmean(numbers):.{digits}f} ± {stdev(numbers):.{digits}f}",
    "count": lambda numbers, digits: f"{len(numbers)}",
    "rise without one head": lambda numbers, digits: f"{_rise(numbers):.{digits}f}",
}


@cache
def read_lesson_file(name: str) -> Lesson:
    return read_lesson(name, (LESSONS / name).read_text("utf-8"))


def text_of(name: str, *kinds: str) -> str:
    """Return the texts of a lesson's cells of these kinds, with single spaces instead of line breaks.

    Of an article it is the whole text, which counts as Markdown.
    """
    if name.endswith(".md"):
        return " ".join((ARTICLES / name).read_text("utf-8").split()) if "markdown" in kinds else ""
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


@cache
def printed_by(name: str) -> str:
    return "\n".join(shown.printed for shown in run_lesson(read_lesson_file(name)).values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("00_attention.py", r"\d+%|\d+\.\d+"),
        ("01_dot_product.py", r"\d+\.\d+"),
    ],  # a 90% quantile is no result
)
def test_every_number_of_a_text_is_printed_by_its_lesson(name: str, form: str) -> None:
    pytest.importorskip("matplotlib")
    text = re.sub(r"[Hh]ead \d\.\d", "", text_of(name, "markdown", "question", "slide"))
    numbers = re.findall(form, text)
    assert len(numbers) >= 5
    assert [number for number in numbers if not has_number(number, printed_by(name))] == []


def test_the_text_without_code_quotes_lesson_0() -> None:
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs" / "learn" / "without_code.md").read_text("utf-8")
    paragraph = next(text for text in page.split("\n\n") if "([lesson 0](00_attention.md))" in text)
    assert re.findall(r"\d+%", paragraph) == ["78%", "92%", "2%"]
    assert all(has_number(number, printed_by("00_attention.py")) for number in ("78%", "92%", "2%"))


def labels_of(model: str) -> dict[str, int]:
    """Return the number of heads by label on the passage of the claims."""
    rows = {row["about"]: row for row in result(f"claims_{model}.json")["claims"]}
    note = rows["every head has a pattern that can be named"]["note"]
    return {name: int(count) for name, count in (part.rsplit(" ", 1) for part in note.split(", "))}


def test_the_text_without_code_counts_labels_as_the_claims_do() -> None:
    page = text_of("without_code.md", "markdown")
    counts = [labels_of(model) for model in ("minilm", "smollm2", "mini")]
    resting = [labels.get("sink", 0) + labels.get("special-token", 0) for labels in counts]
    broad = [labels["broad"] for labels in counts]
    named = [sum(n.values()) - n["mixed"] - r - b for n, r, b in zip(counts, resting, broad, strict=True)]
    assert "{} of 72 heads in MiniLM, {} of 270 in SmolLM2 and {} of 56 in mini".format(*named) in page
    assert "to special tokens ({}, {} and {}) or almost".format(*resting) in page
    assert "almost evenly to all ({}, {} and {})".format(*broad) in page
    assert f"{labels_of('mini')['sink']} of mini's heads on that passage" in page


@torch.no_grad()
def test_the_text_without_code_says_what_two_texts_lose_without_head_3_4() -> None:
    model, tokenizer, _ = hw.models.load("mini")
    single, passage = (
        tokenizer(text, return_tensors="pt")["input_ids"]
        for text in ("The captain read the letter. Then the captain read the", PROSE)
    )
    shares, errors = [], []
    for off in ([], [(3, 4)]):
        with hw.ablate(model, off):
            shares.append(f"{model(single)[0, -1].softmax(-1)[single[0, 5]]:.1%}")
            errors.append(f"{cross_entropy(model(passage)[0, :-1], passage[0, 1:]):.2f}")
    page = text_of("without_code.md", "markdown")
    assert f"a probability of {shares[0]}; without that head, with {shares[1]}" in page
    assert f"rises only from {errors[0]} to {errors[1]} without head 3.4" in page


@pytest.mark.slow
def test_the_text_without_code_quotes_lesson_17() -> None:
    pytest.importorskip("matplotlib")
    page, printed = text_of("without_code.md", "markdown"), printed_by("17_cost_of_a_head.py")
    for figure in ("10,240", "53,248", "13%", "71%", "0.9%"):
        assert has_number(figure, page) and has_number(figure, printed)


def test_the_article_quotes_lesson_0_and_the_presets() -> None:
    pytest.importorskip("matplotlib")
    page = text_of("why_many_heads.md", "markdown")
    shares = re.findall(r"\d+%", page)
    assert len(shares) == 5 and all(has_number(share, printed_by("00_attention.py")) for share in shares)
    widths = [preset.head_dim or preset.d_model // preset.num_heads for preset in PRESETS.values()]
    usual = sum(width in (64, 128) for width in widths)
    assert f"In {usual} of {len(widths)} well-known models a head has 64 or 128 numbers" in page


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
    labels = labels_of("smollm2")
    assert labels["sink"] > sum(count for name, count in labels.items() if name not in ("sink", "mixed"))


def test_a_path_with_several_values_gives_a_list_for_each() -> None:
    data = {"rows": [{"n": 1, "x": 5}, {"n": 2, "x": 7}, {"n": 1, "x": 6}]}
    assert values_at(data, ["rows", {"n": [2, 1]}, "x"]) == [[7], [5, 6]]
    assert has_number("0.7", "0.7; 1") and not has_number("0.7", "0.72") and not has_number("3", "13 or 3.5")
