"""Notebooks as files of somebody's attention: which cells run, and where a fault is said to be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headwise.errors import ArgumentError
from headwise.examiner import check_file
from headwise.examiner.evidence import Finding, Problem
from headwise.examiner.marking.template import Template
from headwise.examiner.report import Named, Report
from headwise.examiner.sandbox.learner import load, load_all_the_same
from headwise.examiner.source.likely_classes import Cells, broken_cell, number_by_cell, source_of

ATTENTION = """class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d_k = num_heads, d_model // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / SCALE(q.shape[-1])
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""
IMPORTS = "import torch\nfrom torch import nn\n"


def notebook(folder: Path, *cells: str, version: int = 4, name: str = "week 3.ipynb") -> Path:
    """A notebook of code cells, a text between each two."""
    written: list[dict[str, Any]] = []
    for at, cell in enumerate(cells):
        lines = cell.splitlines(keepends=True)
        written.append({"cell_type": "markdown", "source": ["# not Python: 3 % of it\n"]})
        if version == 4:
            written.append({"cell_type": "code", "metadata": {}, "source": lines if at % 2 else cell})
        else:
            written.append({"cell_type": "code", "language": "python", "input": lines})
    book = {"cells": written} if version == 4 else {"worksheets": [{"cells": written}]}
    (folder / name).write_text(json.dumps(book | {"nbformat": version}), "utf-8")
    return folder / name


@pytest.mark.parametrize("version", [3, 4])
def test_cells_are_one_source_and_a_line_is_found_again(version: int, tmp_path: Path) -> None:
    path = notebook(tmp_path, "a = 1\nb = 2", "", "c = 3\n\nd = 5\n", version=version)
    source, cells = source_of(path)
    assert source.splitlines() == ["a = 1", "b = 2", "", "c = 3", "", "d = 5"]
    assert [cells.place(line) for line in (1, 2, 3, 4, 6)] == [(1, 1), (1, 2), (2, 1), (3, 1), (3, 3)]
    assert cells.words(6) == "cell 3, line 3" and Cells().words(6) == "line 6"


def test_magics_and_the_shell_are_blank_and_numbers_hold(tmp_path: Path) -> None:
    path = notebook(
        tmp_path,
        "%matplotlib inline\n!pip install einops\nfiles = !ls\nx = 7 \\\n    % 4\nw = (7\n% 4)",
        "if True:\n    !nvidia-smi\ny = 2",
        "%%bash\nls | wc",
        "\n%%time\nz = 3\nz?",
        'words = """\n%s\n!\n"""',
    )
    source, cells = source_of(path)
    assert "pip" not in source and "nvidia" not in source and "wc" not in source
    names: dict[str, Any] = {}
    exec(source, names)
    assert (names["files"], names["y"], names["z"], names["words"]) == (None, 2, 3, "\n%s\n!\n")
    assert cells.place(source.splitlines().index("z = 3") + 1) == (4, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"week.ipynb is not valid JSON \(Expecting"),
        ("[" * 100_000, r"is not valid JSON \("),
        ("[1]", "week.ipynb contains a JSON list instead of an object; save it again"),
        ('{"cells": 7}', "week.ipynb has no cells"),
        ('{"cells": [{"cell_type": "markdown", "source": "x"}]}', "week.ipynb has no cell with code"),
    ],
)
def test_what_is_no_notebook_is_refused(text: str, words: str, tmp_path: Path, one_template: Any) -> None:
    (tmp_path / "week.ipynb").write_text(text)
    with pytest.raises(ArgumentError, match=f"file must be a notebook: .*{words}"):
        check_file(tmp_path / "week.ipynb", template=one_template)


def test_only_what_definitions_need_is_run_and_what_fails_beside_them_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = notebook(
        tmp_path,
        IMPORTS + "import matplotlib_of_nowhere.pyplot as plt\ntorch.manual_seed(3)",
        "sizes = {}\nsizes['d'] = 12\ntable = open('there is none')\nwidth = sizes['d']",
        "def read():\n    total = width\n    return total\nclass Unfinished(nn.Module):\n    y = table",
        "for total in range(10**12):\n    pass\nplt.show()\nraise SystemExit",
        "def later(self):\n    return display(2)\nread.more = later",
    )
    module = load(path, source_of(path)[0])
    assert module.read() == 12 and module.read.more(None) is None
    assert not hasattr(module, "total") and not hasattr(module, "Unfinished")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    bare = notebook(tmp_path, "import nowhere_at_all as no\nclass A:\n    x = no.x", name="bare.ipynb")
    with pytest.raises(ImportError, match="nowhere_at_all"):
        load(bare, source_of(bare)[0])
    module, names, _ = load_all_the_same(bare, source_of(bare)[0])
    assert module.A and names == ["nowhere_at_all"]
    broken = notebook(tmp_path, "n = 1 / 0\nm = n\nclass A:\n    x = m", name="broken.ipynb")
    with pytest.raises(ZeroDivisionError):
        load(broken, source_of(broken)[0])


def test_a_bracket_left_open_is_told_in_its_own_cell(tmp_path: Path, one_template: Any) -> None:
    path = notebook(tmp_path, "import torch", "x = 1\ny = (2,\n", ATTENTION)
    report = check_file(path, template=one_template)
    assert (report.problems[0].cell, report.problems[0].line) == (2, 2)
    assert report.summary.startswith("Cell 2, line 2") and "week" in str(report)
    assert "cell 2, line 2" in str(report) and not report.ok
    assert broken_cell("x = 1\n", Cells((1,))) is None and broken_cell("x = (", Cells()) is None


def test_a_name_that_nothing_defines_counts_where_the_attention_is(tmp_path: Path, one_template: Any) -> None:
    path = notebook(tmp_path, "nowhere + 1\ndisplay(3)", IMPORTS, ATTENTION)
    report = check_file(path, template=one_template)
    assert [named.key for named in report.faults] == ["undefined name"]
    assert (report.faults[0].cell, report.faults[0].line) == (3, 9)
    assert "in cell 3, line 9" in report.faults[0].detail and "SCALE" in report.summary
    assert f"{path.name}, cell 3, line 9" in str(report)


def test_everything_a_report_says_of_lines_is_number_by_cell() -> None:
    named = Named("k", "t", "", "", ("", "", ""), "", "as in line 5", "line 4: so", 6, "text of line 4")
    report = Report("f", ok=False, summary="Line 5 is wrong", path="line 4.ipynb", faults=[named])
    report.problems = [Problem("call", "E", "said on line 5", 4)]
    report.findings = [Finding("f", "wrong", "in line 4", None, 5)]
    report.explained = ["See line 6."]
    number_by_cell(report, Cells())
    assert report.summary == "Line 5 is wrong" and named.cell is None
    number_by_cell(report, Cells((1, 4)))
    assert report.summary == "Cell 2, line 2 is wrong" and report.explained == ["See cell 2, line 3."]
    assert (named.cell, named.line, named.repair) == (2, 3, "as in cell 2, line 2")
    assert named.text == "text of line 4" and report.path == "line 4.ipynb"
    assert (report.problems[0].cell, report.problems[0].message) == (2, "said on line 5")
    assert (report.findings[0].line, report.findings[0].detail) == (2, "in cell 2, line 1")


@pytest.mark.slow
def test_a_notebook_is_checked_and_its_fault_number_by_cell(tmp_path: Path, one_template: Template) -> None:
    cells = (
        "%pip install torch\n" + IMPORTS,
        "SCALE = lambda d: d ** 0.5",
        ATTENTION,
        "m = MultiHeadAttention(8, 2)\nfor _ in range(10**12):\n    m(torch.randn(2, 3, 8))",
    )
    assert check_file(notebook(tmp_path, *cells), template=one_template).ok
    wrong = ATTENTION.replace(" / SCALE(q.shape[-1])", " / self.d_k")
    report = check_file(notebook(tmp_path, cells[0], cells[1], wrong, cells[3]), template=one_template)
    assert [named.key for named in report.faults] == ["scale by d_k"]
    assert (report.faults[0].cell, report.faults[0].line) == (3, 9)
