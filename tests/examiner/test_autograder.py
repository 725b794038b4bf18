"""The templates for course platforms: a folder in, results.json out; a gradebook; a workflow."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from headwise.cli import application
from headwise.examiner.marking.rubric import STEPS, read_rubric

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "docs" / "examples" / "autograder"
GRADE = runpy.run_path(str(TEMPLATE / "grade.py"))
FAULT = {"hints": ["one", "two", "three"], "title": "so", "repair": "x = 1", "line": 3, "cell": 2}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `headwise check` is made to say, by the file's name."""
    answer: dict[str, Any] = {}

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        code, report = answer[Path(command[5]).name]
        return subprocess.CompletedProcess(
            command, code, json.dumps(report) if report else "", "headwise: no such name"
        )

    monkeypatch.setattr(GRADE["subprocess"], "run", run)
    return answer


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
    results = graded(tmp_path, monkeypatch=monkeypatch)
    assert results["score"] == 10 and results["visibility"] == "visible" and results["output"] == ""
    assert [
        (test["name"], test["score"], test["max_score"], test["status"]) for test in results["tests"]
    ] == [
        ("bad.ipynb", 0, 10, "failed"),
        ("good.py", 10, 10, "passed"),
        ("odd.py", 0, 10, "failed"),
    ]
    assert results["tests"][0]["output"] == "Not right yet.\none"
    assert results["tests"][2]["output"].startswith("Not judged: headwise: no such name\n")


def test_tasks_have_points_of_their_own_and_hints_tell_no_more_than_allowed(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "steps.py").touch()
    answers["steps.py:softmax"] = (0, [{"ok": True}])
    answers["steps.py:split"] = (1, {"summary": "it is so", "faults": [FAULT]})
    tasks = ("--task", "steps.py:softmax=2.5", "--task", "steps.py:split=3", "--task", "absent.py=4")
    results = graded(tmp_path, *tasks, "--hint", "4", monkeypatch=monkeypatch)
    assert results["score"] == 2.5 and [test["max_score"] for test in results["tests"]] == [2.5, 3, 4]
    assert results["tests"][1]["output"] == "it is so\ncell 2, line 3: so\nInstead: x = 1"
    assert results["tests"][2]["output"] == "absent.py was not submitted."
    assert GRADE["words"]({"faults": [FAULT]}, 0) == "Not right yet."
    assert GRADE["words"]({"summary": "it raises", "faults": []}, 1) == "it raises"


def test_a_claim_to_be_right_without_the_exit_code_gets_nothing(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").touch()
    for output in ((2, {"ok": True, "summary": "s"}), (0, None), (0, {"ok": False}), (-9, {"ok": True})):
        answers["a.py"] = output
        assert graded(tmp_path, monkeypatch=monkeypatch)["score"] == 0
    (tmp_path / "a.py").unlink()
    assert "no Python file" in graded(tmp_path, monkeypatch=monkeypatch)["output"]


def test_a_rubric_gives_a_share_of_the_points(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.py").touch()
    wrong = {"ok": False, "faults": [FAULT], "points": 7.5, "full": 10.0}
    options = ("--task", "a.py=4", "--rubric", "rubric.toml")
    for code, report, score in (
        (1, wrong, 3.0),
        (1, wrong | {"points": 0.0}, 0.0),
        (0, {"ok": True, "points": 10.0, "full": 10.0}, 4.0),
        (2, wrong | {"points": None}, 0.0),
    ):
        answers["a.py"] = (code, report)
        (test,) = graded(tmp_path, *options, monkeypatch=monkeypatch)["tests"]
        assert (test["score"], test["status"]) == (score, "passed" if code == 0 else "failed")


def test_a_link_is_not_read(answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "submission", tmp_path / "elsewhere"
    for each in (folder, elsewhere):
        each.mkdir()
    (elsewhere / "solution.py").touch()
    (folder / "a.py").symlink_to(elsewhere / "solution.py")
    (folder / "linked").symlink_to(elsewhere)
    for task in ("a.py", "linked/solution.py", "../elsewhere/solution.py"):
        (test,) = graded(folder, "--task", f"{task}=4", monkeypatch=monkeypatch)["tests"]
        assert test["output"] == f"{task} is a link, and is not read: submit the file itself."
    assert answers == {}


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
    tests = {test["name"]: test for test in json.loads(results.read_text("utf-8"))["tests"]}
    assert tests["mha.py"]["score"] == 0 and tests["mha.py"]["output"].startswith("Not right yet.")
    assert tests["headwise.py"]["output"].startswith("Not judged: ")


# nbgrader

NOTEBOOK = TEMPLATE.parent / "nbgrader" / "grade.py"


class Book:
    """In place of nbgrader's gradebook: what was entered, by student."""

    def __init__(self, address: str) -> None:
        self.db = self
        self.address, self.grades, self.committed = address, dict[str, SimpleNamespace](), False

    def __enter__(self) -> Book:
        return self

    def __exit__(self, *_: object) -> None: ...

    def find_grade(self, cell: str, notebook: str, assignment: str, student: str) -> SimpleNamespace:
        assert (cell, notebook, assignment) == ("multi_head", "attention", "ps1")
        return self.grades.setdefault(student, SimpleNamespace())

    def commit(self) -> None:
        self.committed = True


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> list[Book]:
    opened: list[Book] = []

    def open_book(address: str) -> Book:
        opened.append(Book(address))
        return opened[-1]

    monkeypatch.setitem(sys.modules, "nbgrader", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nbgrader.api", SimpleNamespace(Gradebook=open_book))
    return opened


def a_course(folder: Path) -> None:
    source = (TEMPLATE.parent / "mha.py").read_text("utf-8")
    for student, text in (
        ("anna", source.replace("query.shape[-1]", "self.d_k")), ("ben", source), ("cem", "x = 1")
    ):  # fmt: skip
        place = folder / "submitted" / student / "ps1" / "attention.ipynb"
        place.parent.mkdir(parents=True)
        cells = [
            {"cell_type": "code", "source": text, "metadata": {}, "outputs": [], "execution_count": None}
        ]
        place.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))


def entered(folder: Path, books: list[Book], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    script = runpy.run_path(str(NOTEBOOK))
    rubric = str(TEMPLATE.parent / "rubric.toml")
    feedback = str(folder / "feedback")
    arguments = ["--cell", "multi_head", "--rubric", rubric, "--feedback", feedback, "--hint", "1"]
    monkeypatch.setattr(sys, "argv", ["grade.py", str(folder), "ps1", "attention", *arguments])
    assert script["main"]() == 0
    (book,) = books
    assert book.committed and book.address == f"sqlite:///{folder}/gradebook.db"
    return {name: (grade.manual_score, grade.needs_manual_grade) for name, grade in book.grades.items()}


def test_points_go_into_a_gradebook_and_the_rest_to_a_person(
    books: list[Book], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_course(tmp_path)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        files = [each for each in command if each.endswith(".ipynb")]
        lines = [
            json.dumps({"path": file, "points": points})
            for file, points in zip(files, (10, 7.5, None), strict=True)
        ]
        return subprocess.CompletedProcess(command, 1, "\n".join(lines), "")

    monkeypatch.setattr(subprocess, "run", run)
    assert entered(tmp_path, books, monkeypatch) == {
        "anna": (10, False), "ben": (7.5, False), "cem": (None, True),
    }  # fmt: skip
    nothing = subprocess.CompletedProcess([], 2, "", "headwise: rubric must be")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: nothing)
    with pytest.raises(SystemExit, match="said nothing of some notebooks: headwise: rubric must be"):
        entered(tmp_path, books, monkeypatch)
    with pytest.raises(SystemExit, match=r"there is no attention\.ipynb of ps1"):
        entered(tmp_path / "submitted", books, monkeypatch)


@pytest.mark.slow
def test_a_course_of_notebooks_is_graded(
    books: list[Book], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_course(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    assert entered(tmp_path, books, monkeypatch) == {
        "anna": (10, False), "ben": (8, False), "cem": (None, True),
    }  # fmt: skip
    text = (tmp_path / "feedback" / "ben" / "ps1" / "attention.ipynb.md").read_text("utf-8")
    assert "**Points:** 8 of 10" in text and "d\\_model" not in text


# GitHub Classroom


def test_the_workflow_reports_every_step_and_its_commands_are_headwises() -> None:
    yaml = pytest.importorskip("yaml")
    text = (TEMPLATE.parent / "github_classroom" / "classroom.yml").read_text("utf-8")
    (job,) = yaml.safe_load(text)["jobs"].values()
    graders = {step["id"]: step["with"] for step in job["steps"] if "command-grader" in step.get("uses", "")}
    reporter = job["steps"][-1]
    assert reporter["with"]["runners"].split(",") == list(graders)
    assert reporter["env"] == {
        f"{name.upper()}_RESULTS": f"${{{{steps.{name}.outputs.result}}}}" for name in graders
    }
    check = typer.main.get_group(application()).commands["check"]
    for each in graders.values():
        no_link, command = each["command"].split(" && ")
        start, _, words = command.partition(" check ")
        assert start == "python -P -m headwise"
        file = words.split()[0].partition(":")[0]
        assert no_link == f"test ! -L {file}"
        check.make_context("check", words.split(), resilient_parsing=True)


def test_the_rubric_of_the_guide_is_one() -> None:
    rubric = read_rubric(TEMPLATE.parent / "rubric.toml")
    assert (rubric.full, rubric.floor) == (10, 1) and {*rubric.steps} <= {*STEPS}
    text = (TEMPLATE.parent / "rubric.toml").read_text("utf-8")
    named = re.search(r"\[steps\] +# (.*)", text)
    assert named is not None and {*named[1].split(", ")} <= {*STEPS}
