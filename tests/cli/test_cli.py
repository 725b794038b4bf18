"""The command line, as its users meet it: files written, one line for a mistake, exit codes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from command_line import PROGRAM, run

import headwise
from headwise.errors import ArgumentError

pytest.importorskip("typer")

from headwise.cli import main
from headwise.cli.terminal import text_or_file
from trained import mini


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _model_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = mini()
    monkeypatch.setattr("headwise.models.pretrained.load", lambda name=None: trained)


def test_the_command_is_a_true_program() -> None:
    message = "headwise: text must hold at least one word: found 0; try a sentence\n"
    assert run(*PROGRAM, "look", "") == (2, "", message)


def test_version_and_help(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headwise {headwise.__version__}\n"
    assert main([]) == main(["--help"]) == 0
    assert capsys.readouterr().out.count("\n  look ") == 2
    assert main(["look", "--help"]) == 0
    output = capsys.readouterr().out
    for option in ("--model", "--out", "--layer", "--sort", "--top"):
        assert option in output


@pytest.mark.parametrize(
    "verb", [[], ["look"], ["survey"], ["check"], ["learn"], ["learn", "start"]], ids=str
)
def test_every_command_has_a_short_option_for_help(verb: list[str], capsys) -> None:
    assert main([*verb, "-h"]) == 0
    short = capsys.readouterr().out
    assert main([*verb, "--help"]) == 0
    assert short == capsys.readouterr().out
    assert "-h, --help" in short


@pytest.mark.parametrize("text", ["Mr. Smith went to ./home.", "3.5", "so.", "a\0b", "x" * 5000, "either/or"])
def test_what_is_no_file_is_text(text: str) -> None:
    assert text_or_file(text) == text


def test_a_file_that_cannot_be_read_is_a_mistake(monkeypatch) -> None:
    Path("secret").touch()

    def refuse(self: Path, mode: str) -> NoReturn:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ArgumentError, match="FILE must be readable: 'secret': Permission denied"):
        text_or_file("secret")


@pytest.mark.usefixtures("_model_at_hand")
def test_a_full_disk_is_one_line_and_leaves_nothing(monkeypatch, capsys) -> None:
    def fail(self, file, **options) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    assert main(["look"]) == 2
    printed = capsys.readouterr()
    assert "No space left on device; " in printed.err and printed.err.count("\n") == 1
    assert "Wrote" not in printed.out and os.listdir() == []


@pytest.mark.usefixtures("_model_at_hand")
def test_ctrl_c_ends_quietly_and_leaves_nothing(monkeypatch, capsys) -> None:
    def interrupt(self, file, **options) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", interrupt)
    assert main(["look"]) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert os.listdir() == []


def test_a_missing_extra_says_how_to_get_it(monkeypatch, capsys) -> None:
    """All of it at once: who had installed one thing was told of the next."""
    everything = 'pip install "headwise[cli,viz]"'
    for package, hint in (
        ("typer", 'the headwise command needs typer; install with: pip install "headwise[cli]"'),
        ("matplotlib", f"headwise look needs matplotlib; install with: {everything}"),
        ("rich", f"headwise look needs rich; install with: {everything}"),
        ("tokenizers", f"headwise look needs tokenizers; install with: {everything}"),
        ("safetensors", f"headwise look needs safetensors; install with: {everything}"),
    ):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.split(".")[0] == package]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, package, None)
            assert main(["look"]) == 1
        assert capsys.readouterr().err == f"headwise: {hint}\n"


@pytest.mark.usefixtures("_model_at_hand")
def test_our_own_faults_are_not_hidden(monkeypatch) -> None:
    def fault(*args: object, **options: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr("headwise.show.heads_pictures.model_picture", fault)
    with pytest.raises(RuntimeError, match="a fault"):
        main(["look"])
