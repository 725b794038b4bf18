"""The template for course platforms: a folder in, results.json out."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "docs" / "examples" / "autograder"
GRADE = runpy.run_path(str(TEMPLATE / "grade.py"))
FAULT = {"hints": ["one", "two", "three"], "title": "so", "repair": "x = 1", "line": 3, "cell": 2}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `headwise check` is made to say, by the file's name."""
    said: dict[str, Any] = {}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        code, report = said[Path(command[5]).name]
        return subprocess.CompletedProcess(
            command, code, json.dumps(report) if report else "", "headwise: no such name"
        )

    monkeypatch.setattr(GRADE["subprocess"], "run", run)
    return said


def graded(folder: Path, *options: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """results.json."""
    monkeypatch.setattr(
        sys, "argv", ["grade.py", str(folder), str(folder / "results" / "results.json"), *options]
    )
    assert GRADE["main"]() == 0
    return json.loads((folder / "results" / "results.json").read_text("utf-8"))


def test_three_outcomes_become_points_and_words(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good.py", "bad.ipynb", "odd.py", "notes.txt"):
        (tmp_path / name).touch()
    answers["good.py"] = (0, {"ok": True})
    answers["bad.ipynb"] = (1, {"ok": False, "summary": "it is so", "faults": [FAULT]})
    answers["odd.py"] = (2, None)
    found = graded(tmp_path, monkeypatch=monkeypatch)
    assert found["score"] == 10 and found["visibility"] == "visible" and found["output"] == ""
    assert [(one["name"], one["score"], one["max_score"], one["status"]) for one in found["tests"]] == [
        ("bad.ipynb", 0, 10, "failed"),
        ("good.py", 10, 10, "passed"),
        ("odd.py", 0, 10, "failed"),
    ]
    assert found["tests"][0]["output"] == "Not right yet.\none"
    assert found["tests"][2]["output"].startswith("Not judged: headwise: no such name\n")


def test_tasks_have_points_of_their_own_and_hints_tell_no_more_than_allowed(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps.py").touch()
    answers["steps.py:softmax"] = (0, [{"ok": True}])
    answers["steps.py:split"] = (1, {"summary": "it is so", "faults": [FAULT]})
    tasks = ("--task", "steps.py:softmax=2.5", "--task", "steps.py:split=3", "--task", "absent.py=4")
    found = graded(tmp_path, *tasks, "--hint", "4", monkeypatch=monkeypatch)
    assert found["score"] == 2.5 and [one["max_score"] for one in found["tests"]] == [2.5, 3, 4]
    assert found["tests"][1]["output"] == "it is so\ncell 2, line 3: so\nInstead: x = 1"
    assert found["tests"][2]["output"] == "absent.py was not submitted."
    assert GRADE["words"]({"faults": [FAULT]}, 0) == "Not right yet."
    assert GRADE["words"]({"summary": "it raises", "faults": []}, 1) == "it raises"


def test_a_claim_to_be_right_without_the_exit_code_gets_nothing(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").touch()
    for said in ((2, {"ok": True, "summary": "s"}), (0, None), (0, {"ok": False}), (-9, {"ok": True})):
        answers["a.py"] = said
        assert graded(tmp_path, monkeypatch=monkeypatch)["score"] == 0
    (tmp_path / "a.py").unlink()
    assert "no Python file" in graded(tmp_path, monkeypatch=monkeypatch)["output"]


@pytest.mark.slow
def test_the_script_a_platform_starts_grades_a_real_file(tmp_path: Path) -> None:
    submission = tmp_path / "submission"
    submission.mkdir()
    (submission / "mha.py").write_bytes((TEMPLATE.parent / "mha.py").read_bytes())
    (submission / "headwise.py").write_text("raise SystemExit(0)\n")  # must not be taken for ours
    results = tmp_path / "results.json"
    subprocess.run(
        [TEMPLATE / "run_autograder", submission, results],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src")},
        cwd=submission,
        check=True,
    )
    found = {one["name"]: one for one in json.loads(results.read_text("utf-8"))["tests"]}
    assert found["mha.py"]["score"] == 0 and found["mha.py"]["output"].startswith("Not right yet.")
    assert found["headwise.py"]["output"].startswith("Not judged: ")
