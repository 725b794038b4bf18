"""What learners meet every day: a crash is told once, with its line, the shapes there and what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headwise.errors import BackendUnavailable
from headwise.examiner import check_file
from headwise.examiner.marking.template import Copy, Template
from headwise.examiner.report import Report

FILE = """import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d = num_heads, d_model // num_heads
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value):
        B, T, E = query.shape
        S = key.shape[1]
        q = self.q(query).view(B, T, self.h, self.d).transpose(1, 2)
        k = self.k(key).view(B, S, self.h, self.d).transpose(1, 2)
        v = self.v(value).view(B, S, self.h, self.d).transpose(1, 2)
        s = q @ k.transpose(-2, -1) / self.d ** 0.5
        WEIGHTS
        y = w @ v
        RETURN
"""
RETURN = "return self.o(y.transpose(1, 2).reshape(B, T, E))"


def checked(tmp_path: Any, template: Any, weights: str, end: str = RETURN) -> Report:
    path = tmp_path / "attention.py"
    path.write_text(FILE.replace("WEIGHTS", weights.replace("\n", "\n        ")).replace("RETURN", end))
    return check_file(path, template=template)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (
            "e = s.exp()\nw = e / e.sum(dim=-1)",
            [
                "Line 22",
                "e is [3, 4, 7, 7]",
                "keepdim=True), which has the shape [3, 4, 7, 1] instead of [3, 4, 7]",
            ],
        ),
        (
            "w = (q * k).softmax(dim=-1)",
            [
                "Line 22",
                "w is [3, 4, 7, 6] and v is [3, 4, 7, 6]",
                "q @ k.transpose(-2, -1) instead of * on line 21",
            ],
        ),
        ("w = s.softmax(-1)[..., :5]", ["Line 22", "its shape should be [3, 4, 7, 7]"]),
        ("w = (q @ k).softmax(-1)", ["Line 21", "q is [3, 4, 7, 6] and k is [3, 4, 7, 6]", "k.transpose"]),
        ("w = (s - s.max(dim=-1, keepdim=True)).softmax(-1)", ["Line 21", "keepdim=True).values"]),
    ],
    ids=["no keepdim", "elementwise", "weights cut", "no transpose", "max gives two"],
)
def test_a_crash_is_told_once_with_line_shapes_and_hint(
    tmp_path: Any, one_template: Any, weights: str, words: list[str]
) -> None:
    report = checked(tmp_path, one_template, weights)
    assert report.verdict == "wrong"
    assert len(report.explained) == 1
    for each in words:
        assert each in report.explained[0]


def test_nothing_returned_is_wrong_and_says_so(tmp_path: Any, one_template: Any) -> None:
    report = checked(
        tmp_path, one_template, "w = s.softmax(-1)", "self.o(y.transpose(1, 2).reshape(B, T, E))"
    )
    assert report.verdict == "wrong"
    assert "it returned None; end forward with `return`" in report.summary


@pytest.mark.parametrize(
    "body", ["raise NotImplementedError", "raise NotImplementedError('w is yours')\nw = w + 1"]
)
def test_what_is_still_to_be_written_is_no_fault(tmp_path: Any, one_template: Any, body: str) -> None:
    """Not even of names that only lines after it use."""
    report = checked(tmp_path, one_template, body)
    assert report.verdict == "not judged"
    assert "MultiHeadAttention.forward is still to be written" in report.summary
    assert report.faults == []


def test_an_empty_forward_is_still_to_be_written(tmp_path: Any, one_template: Any) -> None:
    path = tmp_path / "attention.py"
    path.write_text(FILE[: FILE.index("        B, T, E")] + "        # YOUR CODE HERE\n        pass\n")
    report = check_file(path, template=one_template)
    assert report.verdict == "not judged"
    assert "MultiHeadAttention.forward is still to be written" in report.summary


def test_the_verdict_stays_if_the_process_for_the_repaired_file_cannot_start(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, one_template: Template
) -> None:
    """The exception of the second process replaced the verdict of the first."""
    tried = checked(tmp_path, one_template, "w = s.softmax(-2)")
    assert [fault.tried for fault in tried.faults] == [True] and "with this repair" in str(tried)

    folders = []

    def copy(self: Template, folder: Path, *ends: int) -> Copy:
        folders.append(folder)
        if len(folders) == 2:
            raise BackendUnavailable("a process cannot start: no memory is left")
        return own_copy(self, folder, *ends)

    own_copy = Template.copy
    monkeypatch.setattr(Template, "copy", copy)
    report = checked(tmp_path, one_template, "w = s.softmax(-2)")
    assert report.verdict == "wrong" and report.summary == tried.summary
    assert [(fault.key, fault.tried) for fault in report.faults] == [("softmax over queries", None)]
    assert "the repair was not tried: a process cannot start: no memory is left" in report.not_judged
    assert "repair was not tried" in str(report) and "with this repair" not in str(report)
