"""Which class of a file is judged, and what is said of the others."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from headwise.errors import ArgumentError
from headwise.examiner import check_file
from headwise.examiner.marking.submissions import as_table, check_files, write_csv
from headwise.examiner.marking.template import Template
from headwise.examiner.report import Other, Report
from headwise.examiner.report_formats import as_json, as_text
from headwise.examiner.several_classes import SeveralClasses
from headwise.examiner.source.likely_classes import Candidate, Cells, line_of_name, plausible

TOP = "import torch\nfrom torch import nn\n\n\n"
WHOLE = """class {name}(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.heads, self.width = num_heads, d_model // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, key, value):
        B = len(query)
        q, k, v = (
            layer(x).view(B, -1, self.heads, self.width).transpose(1, 2)
            for layer, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        weights = (q @ k.mT{scale}).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


"""
RIGHT, WRONG = " / self.width**0.5", ""
HELPER = """class ScaledDotProductAttention(nn.Module):
    def forward(self, q, k, v):
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return weights @ v


"""
LAYER = """class DecoderLayer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.a, self.b = SelfAttention(d, h), CrossAttention(d, h)
        self.norm, self.inner = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU())

    def forward(self, x, memory):
        return self.norm(self.b(self.a(x, x, x), memory, memory))
"""
DERIVED = "class CausalAttention(SelfAttention):\n    pass\n"


def whole(name: str, scale: str = RIGHT) -> str:
    """One class of attention."""
    return WHOLE.format(name=name, scale=scale)


def judged(source: str) -> set[str]:
    return {candidate.name for candidate in plausible(TOP + source)[0]}


def test_classes_that_do_not_use_each_other_are_both_judged() -> None:
    assert judged(whole("SelfAttention") + whole("CrossAttention")) == {"SelfAttention", "CrossAttention"}


def test_a_layer_that_holds_both_makes_neither_a_part() -> None:
    assert judged(whole("SelfAttention") + whole("CrossAttention") + LAYER) == {
        "SelfAttention",
        "CrossAttention",
    }


def test_a_helper_is_not_judged_whatever_its_variables_are_called() -> None:
    both = TOP + HELPER + whole("MultiHeadAttention")
    likely, beside = plausible(both)
    assert [candidate.name for candidate in likely] == ["MultiHeadAttention"]
    assert [candidate.name for candidate in beside] == ["ScaledDotProductAttention"]


def test_a_base_class_is_judged_through_the_one_that_derives_from_it() -> None:
    assert judged(whole("SelfAttention") + DERIVED) == {"CausalAttention"}


def test_the_line_of_a_name() -> None:
    source = TOP + whole("A") + whole("B")
    assert line_of_name(source, "A") == 5 and line_of_name(source, "A.forward") == 11
    assert line_of_name(source, "C") is None and line_of_name("not (python", "A") is None


def _reports() -> list[Report]:
    report = Report("B", ok=False, summary="no scale", path="x.py", line=22)
    report.others = [Other("A", 5, None, "right", "fine"), Other("helper", 40)]
    return [report]


def test_the_first_line_says_what_was_judged() -> None:
    first = as_text(_reports()[0]).split("\n\n")[0]
    line = " ".join(first.split())
    assert line.startswith("Judged: B (line 22). Also judged: A (line 5): right. Not judged")
    assert "helper (line 40)" in first


def test_table_csv_and_json_name_the_others() -> None:
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=100)
    console.print(as_table(_reports()))
    assert "B, A: right" in console.file.getvalue()
    written = io.StringIO()
    write_csv(_reports(), written)
    [row] = csv.DictReader(io.StringIO(written.getvalue()))
    assert row["name"] == "B" and row["others"] == "A: right; helper: not checked"
    assert '"others": [{"name": "A", "line": 5' in as_json(_reports()[0], indent=None)


@pytest.mark.thinned(keep=["the wrong one last"])
@pytest.mark.parametrize("order", [1, -1], ids=["the wrong one last", "the wrong one first"])
def test_one_wrong_class_makes_the_file_wrong(tmp_path: Path, one_template: Template, order: int) -> None:
    file = tmp_path / "two.py"
    file.write_text(TOP + "".join([whole("SelfAttention"), whole("CrossAttention", WRONG)][::order]))
    report = check_file(file, template=one_template)
    assert (report.verdict, report.name) == ("wrong", "CrossAttention")
    assert [(report.name, report.verdict) for report in report.others] == [("SelfAttention", "right")]
    assert check_file(file, "SelfAttention", template=one_template).ok


def test_a_name_is_for_every_file(tmp_path: Path, one_template: Template) -> None:
    for file, scale in (("one.py", RIGHT), ("two.py", WRONG)):
        (tmp_path / file).write_text(TOP + whole("SelfAttention", scale) + whole("CrossAttention"))
    (tmp_path / "other.py").write_text(TOP + whole("MultiHeadAttention"))
    targets = [(path, "CrossAttention") for path in sorted(tmp_path.glob("*.py"))]
    reports = list(check_files(targets, template=one_template))
    assert [report.verdict for report in reports] == ["right", "not judged", "right"]
    assert "MultiHeadAttention" in reports[1].summary and not reports[0].others


@pytest.mark.parametrize(
    ("answers", "expected", "verdict"),
    [
        ([["right", "right"]], ["A", "B"], "right"),
        ([["right", "not judged"]], ["A", "B"], "not judged"),
        ([["right", None], ["right", "wrong"]], ["A", "B", "B"], "wrong"),
        ([["right", "not judged"], ["right", "wrong"]], ["A", "B", "B"], "wrong"),
        ([["right", None], ["right", None]], ["A", "B", "B"], "not judged"),
    ],
)
def test_a_class_beside_the_likeliest_is_checked_until_it_can_be_judged(
    answers: list[list[str | None]], expected: list[str], verdict: str
) -> None:
    """`answers`: of each way to check, the verdict on A and on B; None: it refuses."""
    checked: list[str] = []

    def way(verdicts: list[str | None]) -> Callable[[str], Report]:
        def check(name: str) -> Report:
            checked.append(name)
            outcome = verdicts["AB".index(name)]
            if outcome is None:
                raise ArgumentError(f"arguments must name parameters of {name}")
            return Report(name, ok=outcome == "right", summary="", judged=outcome != "not judged")

        return check

    judged = [Candidate(name, "class", 1, 2, 5.0) for name in "AB"]
    report = SeveralClasses(judged, [], Cells()).check_each(*map(way, answers))
    every = {report.name: report.verdict} | {report.name: report.verdict for report in report.others}
    assert checked == expected and every == {"A": "right", "B": verdict}
