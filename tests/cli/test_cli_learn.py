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
from headwise.cli.learn_verbs import _is_interactive
from headwise.course.exercises import PLANTS, exercise_of, repair_of
from headwise.course.lesson import lesson, lessons
from headwise.course.study import Study
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
    monkeypatch.delenv("HEADWISE_COURSE", raising=False)

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
    assert "You have not started yet." in output

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
        "tries": 3, "hints": 0, "written": 0, "solved": True, "mistake": "",
    }  # fmt: skip


def test_hints_before_the_first_attempt(learn: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """`hint` said that the exercise must be started, and of an untouched file only that it is not written."""
    file = tmp_path / "headwise-course" / "03_one_head.py"
    code, output = learn("hint", "3")
    assert code == 0 and "Hint 1 of 3: the idea" in output and "weighted mean" in output
    assert "Then: headwise learn start 3\nMore help: headwise learn hint 3\n" in output and not file.exists()
    assert "You are at Lesson 3: One head, not started yet." in learn()[1]
    assert "Wrote headwise-course/03_one_head.py" in learn("start")[1]
    code, output = learn("hint")
    assert code == 0 and "Hint 2 of 3: the formula" in output and "Hint 1" not in output
    assert "softmax(QKᵀ / √D) V" in output and "Then: headwise learn check 3" in output
    output = learn("hint", "3")[1]
    assert "Hint 3 of 3: the shape of the code" in output and "[.., T, S]" in output
    assert "headwise learn read 3, or our solution: headwise learn solution --give-up 3" in output
    output = learn("hint", "3")[1]
    assert all(f"Hint {number} of 3" in output for number in (1, 2, 3))
    code, output = learn("check")
    assert code == 1 and "still to be written" in output and "headwise learn hint" not in output
    assert output.endswith("The lesson: headwise learn read 3\n")
    assert learn("hint", "99")[0] == 2


def test_a_mistake_without_a_name_is_shown_with_the_next_hint_of_the_lesson(
    learn: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    learn("start", "2")
    file = tmp_path / "headwise-course" / "02_softmax.py"
    file.write_text("import torch\n\n\ndef softmax(x, dim=-1):\n    return x.softmax(dim)\n", "utf-8")
    code, output = learn("check")
    assert code == 1 and "must be solved without softmax" in output and "headwise learn hint 2" in output
    code, output = learn("hint")
    assert code == 0 and "must be solved without softmax" in output and "Hint 1 of 3: the idea" in output
    assert "Hint 2 of 3: the formula" in learn("hint")[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_exception_is_shown_with_the_next_hint_of_the_lesson(
    learn: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    learn("start", "3")
    file = tmp_path / "headwise-course" / "03_one_head.py"
    right = exercise_of(lesson(3)).solution
    file.write_text(right.replace("return weights @ v", "return weights.no_such(v)"), "utf-8")
    code, output = learn("check")
    assert code == 1 and "AttributeError" in output and "restrictions" not in output
    code, output = learn("hint")
    assert code == 0 and "AttributeError" in output and "Hint 1 of 3: the idea" in output
    file.write_text(right.replace("softmax(dim=-1)", "softmax(dim=-2)"), "utf-8")
    code, output = learn("hint")
    assert code == 0 and "Hint 1" in output and "of 3: the" not in output
    file.write_text(right, "utf-8")
    code, output = learn("hint")
    assert code == 0 and "is solved" in output and "Next: headwise learn start 4" in output


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("number", "source", "lines"),
    [
        (
            3,
            "def attend(q, k, v):\n    return (q @ k.mT / k.shape[-1] ** 0.5).softmax(dim=1) @ v",
            [
                "✗ attend does not yet do what the exercise asks for. It is right for other inputs than the "
                "exercise's:",
                "  the exercise: inputs [B, H, T, D]",
                "  your code:    one sequence at a time, [T, E]",
                "Which axes are counted from the front? With more axes in front, dim=1, .T and "
                "transpose(1, 2) mean other axes: count from the end.",
            ],
        ),
        (
            4,
            "def split_heads(x, num_heads):\n    return x.unflatten(-1, (num_heads, -1))",
            [
                "✗ split_heads does not yet do what the exercise asks for. It is right, but for the layout "
                "of its output:",
                "  the exercise: returns [B, H, T, D]",
                "  your code:    returns [B, T, H, D]",
                "Compare the order of the axes with that of the exercise.",
            ],
        ),
        (
            1,
            "def scaled_scores(q, k):\n    return nn.functional.normalize(q, dim=-1) @ "
            "nn.functional.normalize(k, dim=-1).mT",
            [
                "✗ scaled_scores does not yet do what the exercise asks for:",
                "  your code:    queries and keys of length 1 (cosine attention)",
                "  your code:    a scale other than 1 / sqrt(d_k)",
            ],
        ),
    ],
)
def test_code_that_is_right_for_something_else_is_not_called_correct(
    learn: Callable[..., tuple[int, str]],
    tmp_path: Path,
    monkeypatch,
    number: int,
    source: str,
    lines: list[str],
) -> None:
    """`check` said "attend is correct", and then that it takes one sequence at a time."""
    monkeypatch.setenv("COLUMNS", "200")
    learn("start", str(number))
    file = tmp_path / "headwise-course" / lesson(number).file_name
    file.write_text(f"import torch\nfrom torch import nn\n\n\n{source}\n", "utf-8")
    code, output = learn("check")
    assert code == 1
    assert output.splitlines() == [*lines, f"A hint: headwise learn hint {number}"]


def test_a_lesson_without_an_exercise_and_a_path(learn: Callable[..., tuple[int, str]]) -> None:
    assert learn("start", "0") == (2, "Lesson 0 has no exercise: headwise learn read 0\n")
    code, output = learn("start", "two")
    assert code == 2 and output.startswith("headwise: lesson must be a number: got 'two'")
    code, output = learn("start", "2")
    assert code == 0 and "To try your code: python" in output and "headwise-course/02_softmax.py\n" in output
    code, output = learn("check", "headwise-course/02_softmax.py")
    assert code == 1 and "still to be written" in output


def test_a_quiz_asks_again_for_y_or_n(learn: Callable[..., tuple[int, str]]) -> None:
    code, output = learn("quiz", "--lesson", "3", stdin="\nyeah\n\ny\nq\n")
    assert code == 0 and "You knew 1 of 1." in output and output.count("y, n or q: ") == 2


def test_a_quiz_shows_the_code_of_an_answer(learn: Callable[..., tuple[int, str]]) -> None:
    """`read` printed it, with its numbers, above the question."""
    code, output = learn("quiz", "--lesson", "4", "--level", "easy", stdin="\ny\n" * 3)
    assert code == 0 and "channel 17 is channel 5 of head 2" in output and "divmod(17, D)" in output
    output = learn("read", "4")[1]
    assert "channel 17 is" not in output and "divmod(17" not in output and "\n\n\n\n" not in output
    assert "for a picture: see the notebook]\n\nWith the right split, head 0 has the numbers" in output


def test_a_repair_has_no_hints_before_its_first_check(learn: Callable[..., tuple[int, str]]) -> None:
    for ready in (False, True):
        code, output = learn("hint", "repair_07")
        assert code == 0 and "Hints begin after the first check" in output
        assert ("headwise learn repair 7" in output) is not ready
        assert output.endswith("Then: headwise learn check repair_07\n")
        learn("repair", "7")
    code, output = learn("start")
    assert code == 0 and "Repair 7 is started and not solved yet" in output
    assert output.endswith("Or a lesson: headwise learn start 1\n")
    code, output = learn("check", "repair_09")
    assert code == 2 and "run headwise learn repair 9" in output


def test_start_continues(learn: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert "01_dot_product.py" in learn("start")[1]
    code, output = learn("start")
    assert code == 0 and "is started and not solved yet: headwise-course/01_dot_product.py" in output
    assert "Next: headwise learn check 1 (a hint: headwise learn hint 1)" in output
    output = learn()[1]
    assert output.endswith("Next: headwise learn check 1 (a hint: headwise learn hint 1)\n")
    assert "You are at Lesson 1: The dot product and its scale" in output
    assert "(headwise-course/01_dot_product.py): not checked yet." in " ".join(output.split())
    study = Study(tmp_path / "headwise-course")
    for entry in lessons():
        study.progress.of(entry.file_name).solved = entry.number != 12
    study.progress.save()
    assert "Wrote headwise-course/12_why_many_heads.py" in learn("start")[1]
    study.progress.of(lesson(12).file_name).solved = True
    study.progress.save()
    code, output = learn("start")
    assert code == 0 and output == (
        "All exercises are solved. Next: headwise learn quiz, questions as in job interviews.\n"
    )
    assert "You have solved all exercises." in learn()[1]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("typed", "is_started"), [("\n", True), ("y\n", True), ("n\n", False), ("", False)], ids=repr
)
def test_after_a_success_a_terminal_offers_the_next_exercise(
    learn: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch, typed: str, is_started: bool
) -> None:
    folder = tmp_path / "headwise-course"
    learn("start", "3")
    (folder / "03_one_head.py").write_text(exercise_of(lesson(3)).solution, "utf-8")
    code, output = learn("check", stdin=typed)
    assert code == 0 and "[Y/n]" not in output and "Next: headwise learn start 4" in output
    monkeypatch.setattr("headwise.cli.learn_verbs._is_interactive", lambda: True)
    code, output = learn("check", stdin=typed)
    assert code == 0 and "Start lesson 4 now? [Y/n]" in output
    assert (folder / "04_split_and_merge.py").exists() is is_started
    assert ("Next: headwise learn start 4" in output) is not is_started
    if is_started:
        assert "Continue lesson 4 now? [Y/n]" in learn("check", "3", stdin="n\n")[1]


def test_a_question_is_asked_only_if_input_and_output_are_a_terminal(monkeypatch) -> None:
    for on_input, on_output in ((True, True), (True, False), (False, True), (False, False)):
        monkeypatch.setattr(sys, "stdin", Terminal() if on_input else io.StringIO())
        monkeypatch.setattr(sys, "stdout", Terminal() if on_output else io.StringIO())
        assert _is_interactive() is (on_input and on_output)
    monkeypatch.setattr(sys, "stdin", None)
    assert not _is_interactive()


def test_commands_work_from_inside_the_folder_and_from_folders_in_it(
    learn: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch
) -> None:
    """From inside headwise-course, `start` wrote to headwise-course/headwise-course."""
    inside = tmp_path / "headwise-course"
    learn("notebook", "3")  # marks the folder, too
    deep = inside / "notes" / "old"
    deep.mkdir(parents=True)
    for place, path, verb in (
        (inside, "01_dot_product.py", ("start",)),
        (deep, "../../repair_02.py", ("repair", "2")),
        (tmp_path, "headwise-course/04_split_and_merge.ipynb", ("notebook", "4")),
        (deep, "../../05_multi_head_attention.ipynb", ("notebook", "5")),
    ):
        monkeypatch.chdir(place)
        code, output = learn(*verb)
        assert code == 0 and output.startswith(f"Wrote {path}\n") and "--folder" not in output
        assert (place / path).exists()
    monkeypatch.chdir(inside)
    assert "Judged" not in learn("check", "1")[1] and "01_dot_product.py" in learn("start", "1")[1]
    assert "before-1" in learn("reset", "1")[1]
    assert not list(tmp_path.rglob("headwise-course/**/headwise-course"))
    code, output = learn("start", "6", "--folder", "my own")
    assert code == 0 and "Then: headwise learn check 6 --folder 'my own'" in output
    monkeypatch.setenv("HEADWISE_COURSE", str(tmp_path / "mine"))
    code, output = learn("start", "6")
    assert f"Wrote {tmp_path / 'mine'}" in output and "--folder" not in output
    for words in (("--folder", "other", "start", "7"), ("start", "8", "--folder", "other")):
        code, output = learn(*words)  # an option before the command was less than the variable
        assert code == 0 and output.startswith("Wrote other/") and "--folder other" in output


def test_a_file_of_progress_of_another_program_is_left_alone(
    learn: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "progress.json").write_text('{"version": 3, "percent": 40}', "utf-8")
    assert "Wrote headwise-course/01_dot_product.py" in learn("start")[1]
    assert (tmp_path / "progress.json").read_text("utf-8") == '{"version": 3, "percent": 40}'


def test_help_is_a_command_and_an_option(learn: Callable[..., tuple[int, str]]) -> None:
    code, whole = learn("-h")
    assert code == 0 and "Commands:" in whole and "headwise learn start 1" in whole
    assert learn("help") == (0, whole) == learn("--help")
    code, hint = learn("hint", "-h")
    assert code == 0 and "Usage: headwise learn hint" in hint and learn("help", "hint") == (0, hint)
    code, output = learn("help", "no-such")
    assert code == 2 and output.startswith("headwise: COMMAND must be a command of learn: got 'no-such'")


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
    for words in (["start", "99"], ["check"], ["solution", "x"], ["quiz", "--level", "no"], ["read", "18"]):
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
