"""`headwise learn` from the shell, as somebody new would walk through it."""

from __future__ import annotations

import io
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from command_line import PROGRAM, started

from headwise.cli import main
from headwise.course.exercises import PLANTS, exercise_of, repair_of
from headwise.course.lesson import lesson
from headwise.examiner.marking.template import Template

pytest.importorskip("typer")


@pytest.fixture
def learn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    one_template: Template,
) -> Callable[..., tuple[int, str]]:
    """Run `headwise learn` in its own folder: returns exit code and output. All checks share one template."""
    monkeypatch.setattr("headwise.cli.learn_verbs.template_of_checks", lambda: nullcontext(one_template))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words: str, stdin: str = "") -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(["learn", *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_way_of_somebody_new(learn: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, output = learn()
    assert code == 0 and "0 of 17 exercises solved" in output and "headwise learn start 1" in output

    code, output = learn("start", "3")
    file = tmp_path / "headwise-course" / "03_one_head.py"
    assert code == 0 and "Wrote headwise-course/03_one_head.py" in output and file.exists()
    code, output = learn("check")
    assert code == 1 and "still to be written" in output and "attend" in output

    right = exercise_of(lesson(3)).solution
    file.write_text(right.replace("softmax(dim=-1)", "softmax(dim=-2)"), "utf-8")
    code, output = learn("check")
    assert code == 1 and "softmax over queries" not in output and "headwise learn hint 3" in output
    assert "Hint 1" in output and "Hint 2" not in output
    code, output = learn("hint")
    assert code == 0 and "Hint 2" in output and "Hint 3" not in output
    code, output = learn("hint")
    assert code == 0 and "Hint 3" in output and "--answer" in output
    code, output = learn("solution")
    assert code == 2 and "before its solution is shown: 3 is not solved" in output
    code, output = learn("check", "--answer")
    assert code == 1 and "softmax over queries" in output

    file.write_text(right, "utf-8")
    code, output = learn("check", "3")
    assert code == 0 and "is solved" in output and "headwise learn start 4" in output
    code, output = learn("solution")
    assert code == 0 and output == right
    code, output = learn()
    assert "✓" in output and "1 of 17 exercises solved" in output

    code, output = learn("quiz", "--lesson", "3", stdin="\ny\n\nn\nq\n")
    assert code == 0 and "You knew 1 of 2." in output
    progress = json.loads((tmp_path / "headwise-course" / "progress.json").read_text("utf-8"))
    assert sorted(progress["questions"].values()) == [False, True]
    assert progress["exercises"]["03_one_head.py"] == {
        "tries": 4, "hints": 0, "solved": True, "mistake": "",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_repair_from_the_shell(learn: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, output = learn("repair")
    file = tmp_path / "headwise-course" / "repair_01.py"
    first = next(iter(PLANTS))
    assert code == 0 and file.exists() and first not in output + file.read_text("utf-8")
    assert learn("check")[0] == 1
    file.write_text(repair_of(first).solution, "utf-8")
    code, output = learn("check")
    assert code == 0 and "Repair 1 is solved" in output
    assert "repair_02.py" in learn("repair")[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_in_the_middle_nothing_is_lost(learn: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    learn("start", "3")
    folder = tmp_path / "headwise-course"
    file = folder / "03_one_head.py"
    file.write_text(exercise_of(lesson(3)).solution, "utf-8")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for pause in (0.2, 1.0, 3.0):
        with started(*PROGRAM, "learn", "check", cwd=tmp_path) as running:
            time.sleep(pause)
            running.send_signal(signal.SIGKILL)
        assert file.read_bytes() == before[file.name]
        json.loads((folder / "progress.json").read_text("utf-8"))
    assert learn("check")[0] == 0


def test_what_is_there_stays_and_mistakes_are_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "--folder", "mine", "start", "1"]) == 0
    assert (tmp_path / "mine").is_dir() and not (tmp_path / "headwise-course").exists()
    assert main(["learn", "start", "1", "--folder", "mine"]) == 0
    assert "exists already" in capsys.readouterr().out
    assert main(["learn", "notebook", "1", "--folder", "mine"]) == 0
    assert main(["learn", "notebook", "1", "--folder", "mine"]) == 0
    assert "exists already" in capsys.readouterr().out
    assert main(["learn", "reset", "1", "--folder", "mine"]) == 0
    assert "before-1" in capsys.readouterr().out
    for words in (["start", "99"], ["check"], ["solution", "x"], ["quiz", "--level", "no"], ["read", "0"]):
        assert main(["learn", *words]) == 2
        output = capsys.readouterr().err
        assert output.startswith("headwise: ") and output.count("\n") == 1


def test_a_lesson_is_read_in_the_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["learn", "read", "3", "--no-run"]) == 0
    output = capsys.readouterr().out
    assert "One head" in output and "√d" in output and "headwise learn start 3" in output
    assert "rows sum to [1.0, 1.0]" not in output
    assert main(["learn", "read", "3"]) == 0
    output = capsys.readouterr().out
    assert "rows sum to [1.0, 1.0]" in output and "[a picture: see the notebook]" in output
