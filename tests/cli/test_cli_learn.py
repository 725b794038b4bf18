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
    """`headwise learn` in a folder of its own: exit code, and what is said. All checks share one template."""
    monkeypatch.setattr("headwise.cli.learn_verbs.template_of_checks", lambda: nullcontext(one_template))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def asked(*words: str, stdin: str = "") -> tuple[int, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(["learn", *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return asked


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_way_of_somebody_new(learn: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, said = learn()
    assert code == 0 and "0 of 17 exercises solved" in said and "headwise learn start 1" in said

    code, said = learn("start", "3")
    file = tmp_path / "headwise-course" / "03_one_head.py"
    assert code == 0 and "Wrote headwise-course/03_one_head.py" in said and file.exists()
    code, said = learn("check")
    assert code == 1 and "still to be written" in said and "attend" in said

    right = exercise_of(lesson(3)).solution
    file.write_text(right.replace("softmax(dim=-1)", "softmax(dim=-2)"), "utf-8")
    code, said = learn("check")
    assert code == 1 and "softmax over queries" not in said and "headwise learn hint 3" in said
    assert "Hint 1" in said and "Hint 2" not in said
    code, said = learn("hint")
    assert code == 0 and "Hint 2" in said and "Hint 3" not in said
    code, said = learn("hint")
    assert code == 0 and "Hint 3" in said and "--answer" in said
    code, said = learn("solution")
    assert code == 2 and "solution must come after success" in said
    code, said = learn("check", "--answer")
    assert code == 1 and "softmax over queries" in said

    file.write_text(right, "utf-8")
    code, said = learn("check", "3")
    assert code == 0 and "is solved" in said and "headwise learn start 4" in said
    code, said = learn("solution")
    assert code == 0 and said == right
    code, said = learn()
    assert "✓" in said and "1 of 17 exercises solved" in said

    code, said = learn("quiz", "--lesson", "3", stdin="\ny\n\nn\nq\n")
    assert code == 0 and "1 of 2 known" in said
    told = json.loads((tmp_path / "headwise-course" / "progress.json").read_text("utf-8"))
    assert sorted(told["questions"].values()) == [False, True]
    assert told["exercises"]["03_one_head.py"] == {
        "tries": 4, "hints": 0, "solved": True, "mistake": "",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_repair_from_the_shell(learn: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    code, said = learn("repair")
    file = tmp_path / "headwise-course" / "repair_01.py"
    first = next(iter(PLANTS))
    assert code == 0 and file.exists() and first not in said + file.read_text("utf-8")
    assert learn("check")[0] == 1
    file.write_text(repair_of(first).solution, "utf-8")
    code, said = learn("check")
    assert code == 0 and "Repair 1 is solved" in said
    assert "repair_02.py" in learn("repair")[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_in_the_middle_nothing_is_lost(learn: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    learn("start", "3")
    folder = tmp_path / "headwise-course"
    file = folder / "03_one_head.py"
    file.write_text(exercise_of(lesson(3)).solution, "utf-8")
    before = {one.name: one.read_bytes() for one in folder.iterdir()}
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
    assert "stays as it is" in capsys.readouterr().out
    assert main(["learn", "notebook", "1", "--folder", "mine"]) == 0
    assert main(["learn", "notebook", "1", "--folder", "mine"]) == 0
    assert "stays as it is" in capsys.readouterr().out
    assert main(["learn", "reset", "1", "--folder", "mine"]) == 0
    assert "before-1" in capsys.readouterr().out
    for words in (["start", "99"], ["check"], ["solution", "x"], ["quiz", "--level", "no"], ["read", "0"]):
        assert main(["learn", *words]) == 2
        said = capsys.readouterr().err
        assert said.startswith("headwise: ") and said.count("\n") == 1


def test_a_lesson_is_read_in_the_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["learn", "read", "3", "--no-run"]) == 0
    said = capsys.readouterr().out
    assert "One head" in said and "√d" in said and "headwise learn start 3" in said
    assert "rows sum to [1.0, 1.0]" not in said
    assert main(["learn", "read", "3"]) == 0
    said = capsys.readouterr().out
    assert "rows sum to [1.0, 1.0]" in said and "[a picture: see the notebook]" in said
