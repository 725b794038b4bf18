"""The command line, as its users meet it: files written, one line for a mistake, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import headwise
from headwise.errors import ArgumentError

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from typer.testing import CliRunner

from headwise.cli import application, main
from headwise.cli.text import text_or_file
from headwise.show.handmade import HEADS


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a mistaken command prints; nothing is written, nothing else is said."""
    before = sorted(os.listdir())
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert sorted(os.listdir()) == before
    return said.err.strip()


def test_look_draws_a_sentence_and_prints_every_head() -> None:
    result = CliRunner().invoke(application(), ["look"])
    assert result.exit_code == 0, result.output
    assert "hand-made heads, not a trained model" in result.output
    for name in HEADS:
        assert f" {name} " in result.output
    assert "heads.png" in result.output.splitlines()[-1]
    assert Path("heads.png").read_bytes().startswith(b"\x89PNG")
    assert os.listdir() == ["heads.png"]


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    output = CliRunner().invoke(application(), ["look"], env={"COLUMNS": "80"}).output
    assert "…" not in output
    assert len([line for line in output.splitlines() if "0." in line]) == len(HEADS)


def test_look_takes_text_and_a_place(capsys) -> None:
    assert main(["look", "to be or not to be", "--out", "to be [b].svg"]) == 0
    assert b"<svg" in Path("to be [b].svg").read_bytes()
    assert "to be [b].svg" in capsys.readouterr().out


def test_look_reads_a_file_that_exists(monkeypatch) -> None:
    Path("story.txt").write_bytes("\ufeffto be or $not$ to be 日本".encode())
    seen = []
    monkeypatch.setattr("headwise.show.heatmaps.label", lambda text, length: seen.append(text) or "x")
    assert main(["look", "story.txt"]) == 0
    assert seen[1:8] == ["to", "be", "or", "$not$", "to", "be", "日本"]


def test_the_command_is_a_true_program(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error::UserWarning", "-m", "headwise"]
    root = str(Path(headwise.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [*command, "look", "a b a b", "--out", "x.png"],
        env=env,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "Wrote x.png" in done.stdout
    done = subprocess.run([*command, "look", ""], env=env, capture_output=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("headwise: text must hold at least one word: found 0; ")


def test_version_and_help(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headwise {headwise.__version__}\n"
    assert main([]) == main(["--help"]) == 0
    assert capsys.readouterr().out.count("look") == 2
    assert main(["look", "--help"]) == 0
    said = capsys.readouterr().out
    assert "hand-made heads, not a trained model" in said
    assert "--out" in said


def test_mistakes_are_one_line(capsys) -> None:
    assert "at least one word: found 0; " in mistake(capsys, "look", " ")
    assert "at most 1000 words: found 1001; " in mistake(capsys, "look", "a " * 1001)
    assert "out must end in .png, .svg, .pdf: got 'a.gif'; " in mistake(capsys, "look", "--out", "a.gif")
    assert "there is no" in mistake(capsys, "look", "--out", "nowhere/a.png")
    assert "--bogus" in mistake(capsys, "look", "--bogus")
    assert "lok" in mistake(capsys, "lok")
    assert "extra argument" in mistake(capsys, "look", "two", "texts")


def test_files_that_hold_no_text_are_refused(capsys) -> None:
    assert "there is no 'story.txt'; " in mistake(capsys, "look", "story.txt")
    assert "there is no './story'; " in mistake(capsys, "look", "./story")
    Path("folder").mkdir()
    assert "'folder' is a folder" in mistake(capsys, "look", "folder")
    Path("latin").write_bytes("caf\xe9 au lait".encode("latin-1"))
    assert "'latin' is not, at byte 3; " in mistake(capsys, "look", "latin")
    Path("zero").write_bytes(b"a\0b")
    assert "'zero' has a zero at character 1; " in mistake(capsys, "look", "zero")
    Path("large").write_bytes(b"a" * (1 << 20) + b"b")
    assert "'large' has 1048577; " in mistake(capsys, "look", "large")
    Path("many").write_text("a " * 1001)
    assert "found 1001" in mistake(capsys, "look", "many")
    Path("empty").touch()
    assert "found 0" in mistake(capsys, "look", "empty")


@pytest.mark.parametrize("text", ["Mr. Smith went to ./home.", "3.5", "so.", "a\0b", "x" * 5000, "either/or"])
def test_what_is_no_file_is_text(text: str) -> None:
    assert text_or_file(text) == text


def test_a_file_that_cannot_be_read_is_a_mistake(monkeypatch) -> None:
    Path("secret").touch()

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ArgumentError, match="FILE must be readable: 'secret': Permission denied"):
        text_or_file("secret")


def test_a_full_disk_is_one_line_and_leaves_nothing(monkeypatch, capsys) -> None:
    def fail(self, file, **options) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    assert "No space left on device; " in mistake(capsys, "look")


def test_ctrl_c_ends_quietly_and_leaves_nothing(monkeypatch, capsys) -> None:
    def interrupt(self, file, **options) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", interrupt)
    assert main(["look"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert os.listdir() == []


def test_a_missing_extra_says_how_to_get_it(monkeypatch, capsys) -> None:
    for package, hint in (
        ("typer", "headwise[cli]"),
        ("matplotlib", "headwise[viz]"),
        ("rich", "headwise[cli]"),
    ):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.split(".")[0] == package]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, package, None)
            assert main(["look"]) == 1
        said = capsys.readouterr()
        assert f'pip install "{hint}"' in said.err
        assert said.err.count("\n") == 1


def test_our_own_faults_are_not_hidden(monkeypatch) -> None:
    def fault(*args: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("headwise.show.handmade.handmade_heads", fault)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["look"])
