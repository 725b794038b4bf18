"""How the command line starts and ends: without torch, with completion, and by Ctrl-C at any moment."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import textwrap
import time
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("typer")

from command_line import run, started

from headwise.cli import Interruption, main, may_just_end, terminal
from headwise.engines.statistics import ROW_STATISTICS
from headwise.errors import ArgumentError
from headwise.heads.record import PATTERNS
from headwise.nn.presets import PRESETS
from headwise.show.heads_tables import check_sort
from headwise.whole_files import half_written, whole_file

HEAVY = ("torch", "numpy", "matplotlib", "transformers")


def fresh(source: str, cwd: Path) -> str:
    """What a process of its own prints, with `run(*arguments)` for the command line."""
    prelude = f"""
import contextlib, io, json, os, sys
from headwise.cli import main

def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(arguments)
    loaded = {HEAVY!r} & {{name.partition(".")[0] for name in sys.modules}}
    assert not loaded, (arguments, loaded)
    return code, out.getvalue()
""".replace(repr(HEAVY), repr(set(HEAVY)))
    command = [sys.executable, "-W", "error", "-c", prelude + textwrap.dedent(source)]
    code, out, err = run(*command, cwd=cwd, HOME=str(cwd), COLUMNS="80")
    assert (code, err) == (0, ""), err
    return out


# Without torch


def test_what_only_tells_loads_no_torch(tmp_path: Path) -> None:
    output = fresh(
        """
        verbs = ("look", "check", "explain", "survey", "serve", "presets", "doctor", "learn")
        for arguments in ([], ["--version"], ["--help"], *([verb, "--help"] for verb in verbs)):
            code, out = run(*arguments)
            assert code == 0 and out, arguments
        assert "rich" not in sys.modules
        mistakes = (["presets", "no such"], ["lok"], ["look", "--out", "a.gif"], ["check", "nothing.py"])
        with contextlib.redirect_stderr(io.StringIO()) as err:
            assert [run(*arguments)[0] for arguments in mistakes] == [2, 2, 2, 2]
        assert err.getvalue().count("\\n") == 4
        assert run("presets", "--json")[0] == 0 and "rich" not in sys.modules
        print(json.dumps([run("presets", *more) for more in ([], ["gpt2"], ["llama3-8b"])]))
        """,
        tmp_path,
    )
    codes, outputs = zip(*json.loads(output), strict=True)
    assert codes == (0, 0, 0)
    assert all(name in outputs[0] for name in PRESETS) and "rope=Rope(base=500000.0)" in outputs[2]


def test_the_top_of_the_help_has_a_line_for_each_verb_and_examples(capsys) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    _, commands = output.split("Commands:\n")
    verbs, _, rest = commands.partition("\n\n")
    named = [line.split()[0] for line in verbs.splitlines()]
    assert named == "look check explain survey serve presets doctor learn".split()
    assert "..." not in verbs
    assert 'headwise look "' in rest and "headwise --install-completion" in rest
    assert max(map(len, output.splitlines())) <= 80


# Completion


def test_shells_are_told_verbs_options_and_values(tmp_path: Path) -> None:
    (tmp_path / "mha.py").touch()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    output = fresh(
        """
        def typed(shell, words):
            asked = {
                "bash": {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)},
                "zsh": {"_TYPER_COMPLETE_ARGS": words},
                "fish": {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
                "powershell": {
                    "_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_WORD_TO_COMPLETE": words.split(" ")[-1],
                },
            }[shell]
            os.environ.update(asked, _HEADWISE_COMPLETE=f"complete_{shell}")
            return run()

        lines = ["headwise lo", "headwise presets llama2", "headwise look --so", "headwise look --sort ent",
                 "headwise look --model m", "headwise check m", "headwise look --out mo"]
        asked = {line: [typed("bash", line)] for line in lines}
        for line in ("headwise lo", "headwise look --model m"):
            asked[line] += [typed(shell, line) for shell in ("zsh", "fish", "powershell")]
        print(json.dumps(asked))
        """,
        tmp_path,
    )
    expected = {
        "headwise lo": ["look"],
        "headwise presets llama2": ["llama2-7b", "llama2-70b"],
        "headwise look --so": ["--sort"],
        "headwise look --sort ent": ["entropy"],
        "headwise look --model m": ["mini", "minilm", "model"],
        "headwise check m": ["mha.py", "model/"],
        "headwise look --out mo": ["model/"],
    }
    for line, answers in json.loads(output).items():
        assert answers[0] == [0, "\n".join(expected[line]) + "\n"], line
        for code, answer in answers[1:]:
            assert code == 0 and all(value in answer for value in expected[line]), (line, answer)
            assert "notes" not in answer


def test_completion_is_shown_and_installed(tmp_path: Path) -> None:
    output = fresh(
        """
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # then the shell is an argument
        shells = ("bash", "zsh", "fish", "powershell")
        print(json.dumps([run("--show-completion", shell) for shell in shells]))
        for shell in ("bash", "zsh", "fish"):
            assert run("--install-completion", shell)[0] == 0
        """,
        tmp_path,
    )
    for code, script in json.loads(output):
        assert code == 0 and "_HEADWISE_COMPLETE" in script
    assert "headwise.sh" in (tmp_path / ".bashrc").read_text()
    assert (tmp_path / ".zfunc" / "_headwise").is_file()
    assert (tmp_path / ".config" / "fish" / "completions" / "headwise.fish").is_file()


def test_columns_that_are_completed_are_those_that_can_be_sorted_by() -> None:
    assert sorted(terminal.SORTS) == sorted({"label", "layer", "head", *ROW_STATISTICS, *PATTERNS})
    for name in terminal.SORTS:
        check_sort(name)
    with pytest.raises(ArgumentError, match="got 'entrop'"):
        check_sort("entrop")


def test_paths_are_completed_as_they_were_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "deep").mkdir()
    for name in ("a.py", ".hidden.py", "b.PNG", "deep/c.py", "page.html", "d.json"):
        (tmp_path / name).touch()
    assert terminal.complete_python_files("") == ["a.py", "deep/"]
    assert terminal.complete_python_files(".h") == [".hidden.py"]
    assert terminal.complete_python_files("./") == ["./a.py", "./deep/"]
    assert terminal.complete_python_files("~/deep/") == ["~/deep/c.py"]
    assert terminal.complete_python_files("nowhere/x") == []
    assert terminal.complete_pictures("") == ["b.PNG", "deep/"]
    assert terminal.complete_pages("") == ["d.json", "deep/", "page.html"]
    assert terminal.complete_texts("d") == ["d.json", "deep/"]


# Ctrl-C


def interrupted(after: float, cwd: Path, *arguments: str) -> tuple[int, str]:
    """The command line's end by a Ctrl-C so many seconds after Python is up."""
    code = "print('up', flush=True); import sys; from headwise.cli import program; sys.exit(program())"
    with started(sys.executable, "-c", code, *arguments, cwd=cwd) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    return process.returncode, err.decode()


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="by design: no SIGINT to send there")
@pytest.mark.parametrize("after", [0.2, 0.5, 1.0, 3.0])
def test_ctrl_c_ends_look_at_any_moment_without_a_word(after: float, tmp_path: Path) -> None:
    """It was a traceback during the first seconds, out of an import."""
    files = ["--html", "x.html", "--out", "x.pdf"]
    code, err = interrupted(after, tmp_path, "look", "to be or not to be " * 40, *files)
    if code == 0:  # a quick machine was done
        assert sorted(os.listdir(tmp_path)) == ["x.html", "x.pdf"]
    else:
        assert (code, err.strip()) == (130, "")
        assert set(os.listdir(tmp_path)) <= {"x.html", "x.pdf"}  # whole files alone


def test_ctrl_c_while_the_command_line_itself_is_loaded_is_130(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('in it', flush=True)\ntime.sleep(30)\n")
    code = "import sys; sys.path.insert(0, '.'); from headwise.cli import program; sys.exit(program())"
    with started(sys.executable, "-c", code, "look", cwd=tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == b"in it\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == (b"", b"") and process.returncode == 130


def test_it_ends_at_once_in_an_import_alone_and_not_while_a_file_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[bool] = []
    monkeypatch.setattr(sys, "looks", lambda: answers.append(may_just_end(sys._getframe())), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_at_rest.py").write_text("import sys\nsys.looks()\n")
    (tmp_path / "imported_in_between.py").write_text("import sys\nsys.looks()\n")
    import_module("imported_at_rest")
    with whole_file(tmp_path / "x.png") as half:
        half.touch()
        assert half_written == {half}
        import_module("imported_in_between")
    assert answers == [True, False] and half_written == set()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="by design: no such device there")
def test_what_cannot_be_printed_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            assert main(["--version"]) == 2
        message = "headwise: standard output must be writable: No space left on device; redirect it\n"
        assert capsys.readouterr() == ("", message)
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        for closed in (None, full):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stderr", closed)
                assert main(["presets", "nothing"]) == 2
            assert capsys.readouterr() == ("", "")


def test_who_reads_no_further_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    end, start = os.pipe()
    os.close(end)
    with contextlib.suppress(OSError), open(start, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert main(["--version"]) == 0


def test_a_text_that_begins_with_a_dash_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", "-5 degrees"]) == 2
    assert "begins with a dash after --: headwise look -- '-5 degrees'" in capsys.readouterr().err
    assert main(["look", "--nothing"]) == 2
    assert "see headwise look --help" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="by design: no SIGTERM to hear there")
def test_what_ends_the_process_takes_half_written_files_along(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from headwise.cli import Interruption
from headwise.whole_files import whole_file
Interruption()
with whole_file(Path("x.png")) as half:
    half.touch()
    os.kill(os.getpid(), int(sys.argv[1]))
"""
    for number in (signal.SIGTERM, signal.SIGHUP):
        ended = run(sys.executable, "-c", code, str(int(number)), cwd=tmp_path)
        assert ended == (-number, "", "") and os.listdir(tmp_path) == []


def test_a_torch_that_does_not_load_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libtorch.so: undefined symbol')\n")
    code = "import sys; sys.path.insert(0, '.'); from headwise.cli import main; sys.exit(main())"
    message = "headwise: torch must load: libtorch.so: undefined symbol; install it again, see https://pytorch.org\n"
    assert run(sys.executable, "-c", code, "look", "a text", cwd=tmp_path) == (1, "", message)


def test_garbage_is_looked_for_as_before_and_nothing_is_frozen_in_another_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    assert gc.isenabled()
    with contextlib.suppress(KeyboardInterrupt), terminal.uncollected():
        assert not gc.isenabled()
        raise KeyboardInterrupt
    assert gc.isenabled() and not frozen
    monkeypatch.setattr(terminal, "ends_with_it", True)
    with terminal.uncollected(), terminal.uncollected():
        assert not gc.isenabled()
    assert gc.isenabled() and frozen == [True]
    gc.disable()
    try:
        with terminal.uncollected():
            pass
        assert not gc.isenabled() and frozen == [True]
    finally:
        gc.enable()


def test_main_inside_another_program_leaves_its_signals_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    assert main(["--version"]) == 0
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN)  # as under nohup
    assert not Interruption().pressed
    monkeypatch.undo()
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
