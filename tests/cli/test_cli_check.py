"""`headwise check` as its users meet it: what it is called with, exit codes, watching, Ctrl-C."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from headwise.cli import main
from headwise.cli.terminal import file_and_name
from headwise.errors import ArgumentError
from headwise.examiner.report import Named, Report

RIGHT = Report("MyAttention", ok=True, summary="MyAttention is as torch's class", path="mha.py")
FAULT = Named(
    "scale by d_model", "scores are divided by sqrt(24), not sqrt(6)", "the formula", "the right one",
    ("the first hint", "the second hint", "the third hint"), "the why", "the repair",
    line=2, text="a [b]line[/b]",
)  # fmt: skip
WRONG = Report("MyAttention", ok=False, summary="scale", path="mha.py", faults=[FAULT])


class Examiner:
    """In place of `check_file`: notes what it was asked, and answers from a list, the last one for ever."""

    def __init__(self, *answers: Report | BaseException) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[Path, str | None, dict[str, Any]]] = []
        self.read: list[str] = []

    def __call__(self, path: Path, name: str | None = None, **options: Any) -> Report:
        self.requests.append((path, name, options))
        self.read.append(path.read_text())
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    Path("mha.py").write_text("class MyAttention: ...")


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these runs a file: no template is started for one."""
    monkeypatch.setattr("headwise.cli.check_verb.template_of_checks", nullcontext)


@pytest.fixture
def examiner(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Examiner]:
    def appoint(*answers: Report | BaseException) -> Examiner:
        fake = Examiner(*answers)
        monkeypatch.setattr(import_module("headwise.examiner"), "check_file", fake)
        monkeypatch.setattr("headwise.examiner.marking.submissions.check_file", fake)
        started = nullcontext(SimpleNamespace(stop=nothing, folder=None))
        monkeypatch.setattr("headwise.examiner.marking.submissions.Template", lambda: started)
        return fake

    return appoint


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistaken command prints; nothing else is said."""
    assert main(["check", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.strip()


# Exit codes, and what is printed


def test_right_is_0_and_wrong_is_1(examiner, capsys) -> None:
    examiner(RIGHT)
    assert main(["check", "mha.py"]) == 0
    assert "MyAttention is as torch's class" in capsys.readouterr().out
    examiner(WRONG)
    assert main(["check", "mha.py"]) == 1
    printed = capsys.readouterr()
    assert "scale by d_model: scores are divided by sqrt(24), not sqrt(6)" in printed.out
    assert "the repair" in printed.out and "a [b]line[/b]" in printed.out
    assert "the first hint" not in printed.out
    assert printed.err == ""


def test_everything_is_handed_on(examiner) -> None:
    fake = examiner(RIGHT)
    assert main(["check", "mha.py"]) == 0
    limits = ["--seconds", "5", "--memory", "1.5 GiB", "--trust", "--heads", "3", "--d-model", "12"]
    limits += ["--role", "q=W_q.weight", "--arg", "dropout=0.5", "--arg", "kind=full", "--arg", "n=(1, None)"]
    assert main(["check", "mha.py:MyAttention", *limits]) == 0
    standard = {"seconds": 60.0, "memory": 4 * 2**30, "trust": False, "d_model": None, "num_heads": None}
    standard |= {"roles": None, "arguments": None, "template": None}
    options = {"seconds": 5.0, "memory": 3 * 2**29, "trust": True, "d_model": 12, "num_heads": 3}
    options |= {"roles": {"q": "W_q.weight"}, "template": None}
    options["arguments"] = {"dropout": 0.5, "kind": "full", "n": (1, None)}
    assert fake.requests == [(Path("mha.py"), None, standard), (Path("mha.py"), "MyAttention", options)]


@pytest.mark.parametrize("hint", [1, 2, 3])
def test_hints_are_all_that_is_given(examiner, capsys, hint: int) -> None:
    examiner(WRONG)
    assert main(["check", "mha.py", "--hint", str(hint)]) == 1
    output = capsys.readouterr().out
    assert ("the second hint" in output) == (hint >= 2)
    assert "the repair" not in output and "scale by d_model" not in output and "a [b]line[/b]" not in output


def test_json_is_all_that_is_printed(examiner, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)  # graders need no colours
    examiner(WRONG)
    assert main(["check", "mha.py", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["ok"], report["faults"][0]["key"]) == (1, False, "scale by d_model")


def test_json_says_also_what_could_not_be_checked(examiner, capsys) -> None:
    """A grader that reads standard output found nothing there."""
    examiner(ArgumentError("file must define attention to check: nothing in mha.py looks like it"))
    assert main(["check", "mha.py", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["exit_code"], report["path"]) == ("not judged", 2, "mha.py")
    assert report["summary"].startswith("file must define attention")


def test_many_files_are_one_table_and_the_class_in_numbers(examiner, capsys) -> None:
    Path("class").mkdir()
    for name in ("class/a.py", "class/b.py", "class/.c.py"):
        Path(name).touch()
    examiner(WRONG)
    assert main(["check", "class", "mha.py", "--jobs", "1", "--csv", "all.csv"]) == 1
    output = capsys.readouterr().out
    assert output.count("scale by d_model") == 4 and "3 files: 3 wrong" in output
    assert "3 of 3 scale by d_model" in output
    assert Path("all.csv").read_text().splitlines()[1].split(",")[2:4] == ["wrong", "1"]
    fake = examiner(RIGHT)
    assert main(["check", "class"]) == 0
    assert {call[2]["seconds"] for call in fake.requests} == {10.0}
    examiner(ArgumentError("file must be readable: x; check it"))
    assert main(["check", "class", "--json"]) == 2
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [report["verdict"] for report in reports] == ["not judged"] * 2


def test_a_class_gets_points_and_feedback(examiner, capsys) -> None:
    Path("class").mkdir()
    for name in ("class/a.py", "class/b.py"):
        Path(name).touch()
    Path("r.toml").write_text("full = 8\n[steps]\nscale = 2.5\n")
    examiner(WRONG)
    options = ["--rubric", "r.toml", "--feedback", "told", "--csv", "all.csv", "--jobs", "1"]
    assert main(["check", "class", *options, "--hint", "1"]) == 1
    assert "5.5 of 8" in capsys.readouterr().out
    assert sorted(each.name for each in Path("told").iterdir()) == ["a.py.md", "b.py.md", "class.md"]
    text = Path("told/a.py.md").read_text("utf-8")
    assert "**Points:** 5.5 of 8" in text and "the first hint" in text
    assert "the second hint" not in text and "the repair" not in text
    assert Path("all.csv").read_text().splitlines()[1].endswith(",5.5,8")
    assert main(["check", "class", "--json", "--hint", "1", "--rubric", "r.toml"]) == 1
    out = capsys.readouterr().out
    facts = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [(each["points"], each["hints"]) for each in facts] == [(5.5, [["the first hint"]])] * 2
    assert "the second hint" not in out and "the repair" not in out


def test_what_a_class_is_marked_with_is_read_before_anything_is_run(examiner, capsys) -> None:
    fake = examiner(WRONG)
    Path("r.toml").write_text("full = 8\nflor = 1\n")
    assert "did you mean 'floor'" in mistake(capsys, "mha.py", "--rubric", "r.toml")
    assert "rubric must be a readable file" in mistake(capsys, "mha.py", "--rubric", "none.toml")
    assert "feedback must be a writable folder" in mistake(capsys, "mha.py", "--feedback", "r.toml")
    assert fake.requests == []


def test_a_hint_holds_for_json(examiner, capsys) -> None:
    examiner(WRONG)
    assert main(["check", "mha.py", "--json", "--hint", "2"]) == 1
    out = capsys.readouterr().out
    assert json.loads(out)["hints"] == [["the first hint", "the second hint"]]
    assert "the third hint" not in out and "the repair" not in out and "sqrt(24)" not in out


def test_protections_that_are_missing_are_named(examiner, capsys) -> None:
    report = Report("A", ok=True, summary="right", path="mha.py", protections=["limits: memory"])
    report.missing_protections = ["Landlock: the kernel does not offer it"]
    examiner(report)
    assert main(["check", "mha.py"]) == 0
    assert "with restrictions: limited time and memory; not available on this system: Landlock" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["check", "mha.py", "mha.py"]) == 0
    assert "This system lacks:\n  Landlock: the kernel does not offer it" in capsys.readouterr().out


def test_a_name_is_for_a_file_and_for_a_whole_folder(examiner) -> None:
    Path("class").mkdir()
    Path("class/a.py").touch()
    fake = examiner(RIGHT)
    assert main(["check", "mha.py", "--name", "Mine"]) == 0
    assert main(["check", "class", "mha.py:Other", "--name", "Mine", "--jobs", "1"]) == 0
    assert [call[1] for call in fake.requests] == ["Mine", "Mine", "Other"]


def test_what_the_task_says_is_held_to(examiner, capsys) -> None:
    for words in (["mha.py"], ["mha.py", "mha.py"]):
        report = Report("MyAttention", ok=True, summary="right", path="mha.py", errors={"plain": 0.0})
        examiner(report)
        assert main(["check", *words, "--require", "mask=true-attends"]) == 1
        assert "not as the task says" in capsys.readouterr().out


def test_refusals_are_2_and_one_line(examiner, capsys) -> None:
    examiner(ArgumentError("name must be in the file: there is no 'Other'; choose from MyAttention"))
    assert mistake(capsys, "mha.py:Other").endswith("there is no 'Other'; choose from MyAttention")
    examiner(ArgumentError("file must be fenced in: no Landlock here; add --trust"))
    assert "add --trust" in mistake(capsys, "mha.py")
    examiner(ArgumentError("name must be in the file: there is no '\x1b[2J'; choose another"))
    assert "\x1b" not in mistake(capsys, "mha.py")


def test_mistakes_are_2_and_nothing_is_run(examiner, capsys) -> None:
    fake = examiner(RIGHT)
    assert "there is no 'mah.py'; did you mean 'mha.py'?" in mistake(capsys, "mah.py")
    assert "there is no 'nowhere/x.py'; check the name" in mistake(capsys, "nowhere/x.py")
    assert "standard input is not read" in mistake(capsys, "-")
    assert "seconds must be a positive number: got 0; " in mistake(capsys, "mha.py", "--seconds", "0")
    assert "got nan" in mistake(capsys, "mha.py", "--seconds", "nan")
    assert "got inf" in mistake(capsys, "mha.py", "--seconds", "inf")
    assert "memory must be a size: got 'much'; " in mistake(capsys, "mha.py", "--memory", "much")
    assert "--hint" in mistake(capsys, "mha.py", "--hint", "4")
    assert "--heads" in mistake(capsys, "mha.py", "--heads", "0")
    assert "hint must be used with --json or --feedback for several files: got --hint 2" in mistake(
        capsys, "mha.py", "mha.py", "--hint", "2"
    )
    assert "watch must be used with one file, without --rubric and --feedback: got a.py b.py; " in mistake(
        capsys, "a.py", "b.py", "--watch"
    )
    assert "role must be q, k, v, o or qkv, = and a parameter: got 'x=W'; " in mistake(
        capsys, "mha.py", "--role", "x=W"
    )
    assert "arg must be NAME=VALUE: got 'dropout'; " in mistake(capsys, "mha.py", "--arg", "dropout")
    assert "arg must be a Python literal: got 'a=f()'; " in mistake(capsys, "mha.py", "--arg", "a=f()")
    assert "got 'mask=odd'; choose from" in mistake(capsys, "mha.py", "--require", "mask=odd")
    assert "got 'maks=added'; did you mean" in mistake(capsys, "mha.py", "mha.py", "--require", "maks=added")
    Path("empty").mkdir()
    assert "folder must contain Python files or notebooks: empty contains 0" in mistake(capsys, "empty")
    assert "FILE[:NAME]" in mistake(capsys)
    assert fake.requests == []


def test_ctrl_c_while_checking_is_quiet(examiner, capsys) -> None:
    examiner(KeyboardInterrupt())
    assert main(["check", "mha.py"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_without_rich_it_says_how_to_get_it(examiner, capsys, monkeypatch) -> None:
    fake = examiner(RIGHT)
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["check", "mha.py"]) == 1
    assert 'pip install "headwise[cli]"' in capsys.readouterr().err
    assert fake.requests == []


# FILE[:NAME]


@pytest.mark.parametrize(
    ("argument", "file", "name"),
    [
        ("mha.py", "mha.py", None),
        ("mha.py:MyAttention", "mha.py", "MyAttention"),
        ("./mha.py:Outer.Inner", "mha.py", "Outer.Inner"),
        ("odd:name.py", "odd:name.py", None),
        ("odd:name.py:f", "odd:name.py", "f"),
        ("C:\\code\\mha.py", "C:\\code\\mha.py", None),
        ("C:\\code\\mha.py:MyAttention", "C:\\code\\mha.py", "MyAttention"),
        ("C:mha.py", "C:mha.py", None),
        ("mha.py:Внимание", "mha.py", "Внимание"),
        ("~/mha.py:f", "home/mha.py", "f"),
    ],
)
def test_file_and_name(argument: str, file: str, name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "home")
    Path("home").mkdir()
    Path(file).touch()
    assert file_and_name(argument) == (Path(file), name)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("", "standard input is not read; save the code"),
        ("-", "standard input is not read; save the code"),
        ("other.py", "there is no 'other.py'; check the name"),
        ("other.py:MyAttention", "there is no 'other.py'; check the name"),
        ("mhA.py:MyAttention", "there is no 'mhA.py'; did you mean 'mha.py'?"),
        ("D:\\code\\mha.py", "there is no 'D:\\\\code\\\\mha.py'; "),
        ("D:\\code\\x.py:MyAttention", "there is no 'D:\\\\code\\\\x.py'; "),
        ("D:mha", "there is no 'D:mha'; "),
        (":MyAttention", "there is no ':MyAttention'; "),
        ("mha.py:", "NAME must be a class or function in 'mha.py': got ''; "),
        ("mha.py:3x", "got '3x'; "),
        ("mha.py:f(x)", "got 'f(x)'; "),
        ("mha.py::f", "there is no 'mha.py::f'; "),
        ("folder", "'folder' is a folder or a device; "),
        ("folder:f", "'folder' is a folder or a device; "),
        ("a\0b.py", "there is no 'a\\x00b.py'; "),
        ("x" * 5000, "check the name"),
    ],
)
def test_what_is_no_file_and_name_is_refused(argument: str, words: str) -> None:
    Path("folder").mkdir()
    with pytest.raises(ArgumentError) as refusal:
        file_and_name(argument)
    assert words in str(refusal.value)


# Watching


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[float]]:
    """A clock that stands still: while the command waits, the next thing happens; after the last, Ctrl-C."""

    def plan(*events: Callable[[], object]) -> list[float]:
        waits: list[float] = []
        left: Iterator[Callable[[], object]] = iter(events)

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if seconds < 0.1:  # only letting a save settle
                return
            event = next(left, None)
            if event is None:
                raise KeyboardInterrupt
            event()

        monkeypatch.setattr("headwise.cli.check_verb.sleep", sleep)
        return waits

    return plan


def write(text: str) -> None:
    Path("mha.py").write_text(text)


def rename(text: str) -> None:
    """As many editors save: another file takes the name; here of the same size and time."""
    before = os.stat("mha.py")
    Path("new").write_text(text)
    os.utime("new", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace("new", "mha.py")


def nothing() -> None: ...


def test_watch_checks_again_after_every_save(examiner, meanwhile, capsys) -> None:
    fake = examiner(WRONG, RIGHT)
    waits = meanwhile(nothing, lambda: write("second"), nothing, nothing)
    assert main(["check", "mha.py:MyAttention", "--watch", "--hint", "1"]) == 130
    assert fake.read == ["class MyAttention: ...", "second"]
    assert {wait for wait in waits if wait > 0.1} == {0.3}
    printed = capsys.readouterr()
    assert printed.out.index("the first hint") < printed.out.index("MyAttention is as torch's class")
    assert printed.out.count("save mha.py:MyAttention to check it again; Ctrl-C ends.") == 2
    assert printed.err.strip() == "" and "\x1b" not in printed.out  # nothing to clear where nobody watches


def test_watch_sees_editors_that_rename_or_remove_first(examiner, meanwhile) -> None:
    fake = examiner(WRONG)
    same_size = "CLASS MYATTENTION: ..."
    meanwhile(lambda: rename(same_size), Path("mha.py").unlink, nothing, lambda: write("back"), nothing)
    assert main(["check", "mha.py", "--watch"]) == 130
    assert fake.read == ["class MyAttention: ...", same_size, "back"]


def test_watch_waits_until_a_save_has_settled(examiner, monkeypatch) -> None:
    fake = examiner(WRONG)
    steps: Iterator[Callable[[], object]] = iter(
        [nothing, lambda: write(""), lambda: write("half"), lambda: write("the whole"), nothing]
    )

    def sleep(seconds: float) -> None:
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    monkeypatch.setattr("headwise.cli.check_verb.sleep", sleep)
    assert main(["check", "mha.py", "--watch"]) == 130
    assert fake.read == ["class MyAttention: ...", "the whole"]


def test_watch_sees_what_is_saved_while_it_checks(meanwhile, monkeypatch) -> None:
    read = []

    def check_file(path: Path, *rest: object, **options: object) -> Report:
        read.append(path.read_text())
        if len(read) == 1:
            write("meanwhile")
        return WRONG

    monkeypatch.setattr(import_module("headwise.examiner"), "check_file", check_file)
    meanwhile(nothing)
    assert main(["check", "mha.py", "--watch"]) == 130
    assert read == ["class MyAttention: ...", "meanwhile"]


def test_watch_outlives_mistakes_that_a_save_can_mend(examiner, meanwhile, capsys) -> None:
    examiner(ArgumentError("name must be in the file: there is no 'X'\x1b; write it"), RIGHT)
    meanwhile(lambda: write("class X: ..."), nothing)
    assert main(["check", "mha.py:X", "--watch"]) == 130
    printed = capsys.readouterr()
    assert "headwise: name must be in the file: there is no 'X'" in printed.err and "\x1b" not in printed.err
    assert "MyAttention is as torch's class" in printed.out


def test_watch_as_json_is_a_line_a_save(examiner, meanwhile, capsys) -> None:
    examiner(WRONG, RIGHT)
    meanwhile(lambda: write("second"))
    assert main(["check", "mha.py", "--watch", "--json"]) == 130
    assert [json.loads(line)["ok"] for line in capsys.readouterr().out.splitlines()] == [False, True]
