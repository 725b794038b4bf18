"""`headwise survey`: a table and a page at the end; mistakes in one line; Ctrl-C, a full disk, progress."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("pyarrow")

from command_line import PROGRAM, run, started
from typer.testing import CliRunner

from headwise.cli import application, main, terminal
from headwise.corpus import documents
from headwise.show.tables import Bar
from trained import an_own_folder

TEXTS = [
    "The cat that I saw yesterday ran away.",
    "The cat came back, and the cat ran.",
    "I saw the cat. " * 9,
]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of 2 layers with 3 heads each, which takes 41 tokens."""
    return str(an_own_folder(tmp_path_factory.mktemp("models") / "own", title="small"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    place = tmp_path / "a.jsonl"
    place.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "no json\n")
    return place


def survey(*arguments: str, columns: int = 80, code: int = 3) -> str:
    """What is printed; `code`: 3, since one line of the corpus is no document."""
    result = CliRunner().invoke(
        application(), ["survey", *arguments], env={"COLUMNS": str(columns)}, standalone_mode=False
    )
    assert result.exception is None and result.return_value == code, result.output
    return result.output


def mistake(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["survey", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    return printed.err.strip()


def test_a_survey_ends_with_a_table_words_and_a_page(own: str, corpus: Path, tmp_path: Path) -> None:
    output = survey(own, str(corpus), "--out", str(tmp_path / "out"), "--no-roles", "--top", "2", columns=130)
    assert len(re.findall(r"^ +\d +\d [a-z]", output, re.MULTILINE)) == 2
    assert (
        "small read 3 documents," in output
        and "1 document longer than the token limit was read only up to it." in output
    )
    assert "Not measured: 1 document." in output
    assert re.search(r"^ *1 document +a.jsonl:4 +line must be JSON", output, re.MULTILINE)
    assert "2 of 6 heads; --top 6 shows all" in output
    assert f"Wrote {tmp_path / 'out' / 'heads.html'}" in output
    assert (tmp_path / "out" / "heads.html").read_text("utf-8").startswith("<!doctype html>")
    again = survey(own, str(corpus), "--out", str(tmp_path / "out"), "--no-roles", "--sort", "layer")
    assert "small read 3 documents," in again


def test_the_exit_code_tells_what_is_not_in_the_numbers(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was 0 whatever was left out."""
    place = tmp_path / "corpus"
    place.mkdir()
    for at, text in enumerate(TEXTS):
        (place / f"{at}.txt").write_text(text)
    arguments = [own, str(place), "--out", str(tmp_path / "out"), "--no-roles"]
    assert "not read" not in survey(*arguments, code=0)
    (place / "3.txt.gz").write_bytes(b"x")
    output = survey(*arguments, code=4, columns=120)
    assert "Not measured: 1 file of other kinds." in output and "documents-*" not in output
    assert re.search(r"^ *1 file of other kinds +3.txt.gz +only .txt, .text", output, re.MULTILINE)
    (place / "4.parquet").write_bytes(b"x")
    output = survey(own, str(place), "--out", str(tmp_path / "other"), "--no-roles", code=3, columns=120)
    assert "Not measured: 1 file, 1 file of other kinds." in output
    assert re.search(r"^ *1 file +4.parquet +it is not a Parquet file", output, re.MULTILINE)
    assert "documents-*.parquet lists every document that was not measured" in output


def test_roles_are_measured_once(
    own: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwise.heads.roles import Roles

    calls = []

    def roles(*arguments: object, **options: object) -> Roles:
        calls.append(arguments)
        return Roles({}, {}, [0, 1], title="small")

    monkeypatch.setattr("headwise.corpus.survey.roles_of", roles)
    for _ in range(2):
        assert "role" in survey(own, str(corpus), "--out", str(tmp_path / "out"), columns=150)
    assert len(calls) == 1 and (tmp_path / "out" / "roles.json").is_file()


def test_a_model_that_cannot_be_asked_for_roles_is_surveyed_all_the_same(
    own: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["survey", own, str(corpus), "--out", str(tmp_path / "out")]) == 3
    assert "survey: roles were not measured: " in capsys.readouterr().err


def test_mistakes_are_one_line(
    own: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert "or folder that exists: got" in mistake(capsys, own, str(tmp_path / "none"), "--out", out)
    assert "sort must be a known name: got 'x'" in mistake(
        capsys, own, str(corpus), "--out", out, "--sort", "x"
    )
    assert "engine must be here or ray: got 'x'" in mistake(
        capsys, own, str(corpus), "--out", out, "--engine", "x"
    )
    assert "is a file" in mistake(capsys, own, str(corpus), "--out", str(corpus))
    assert "--out" in mistake(capsys, own, str(corpus))


def test_nothing_is_loaded_before_packages_are_known_to_be_there(
    own: str, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["survey", own, str(corpus), "--out", "out"]) == 1
    message = capsys.readouterr().err
    assert "headwise survey needs pyarrow, numpy and rich; install with: pip install" in message


def test_shells_complete_what_a_survey_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.parquet", "c.pdf"):
        Path(name).touch()
    Path("folder").mkdir()
    assert terminal.complete_corpora("") == ["a.jsonl", "b.parquet", "folder/"]
    assert terminal.complete_devices("cu") == ["cuda"]
    assert set(terminal.CORPORA) == set(documents.ENDINGS)


def test_progress_is_lines_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("headwise.show.tables.monotonic", lambda: now[0])
    with Bar("Surveying", "documents") as bar:
        for done in range(0, 100, 10):
            bar.tell(1000 + done, 2000)
            now[0] += 10
    messages = capsys.readouterr().err.splitlines()
    assert messages[0] == "Surveying: 1,040 of 2,000 documents, 1 a second, 16:00 left" and len(messages) == 2


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Bar("Surveying", "documents") as bar:
        bar.tell(1, 20)
        bar.tell(7, 20)
        assert bar._bar is not None and bar._bar.tasks[0].completed == 7
        assert bar._bar.tasks[0].fields["rate"].endswith("documents/s")


@pytest.mark.slow
def test_ctrl_c_ends_it_without_a_word_and_it_goes_on(own: str, tmp_path: Path) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{at} {TEXTS[at % 3]}"}) + "\n" for at in range(160)))
    command = [own, str(corpus), "--out", str(tmp_path / "out"), "--no-roles"]
    process = started(*PROGRAM, "survey", *command)
    end = time.monotonic() + 60
    while not list((tmp_path / "out").glob("documents-*")) and time.monotonic() < end:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and (out, err) == (b"", b"")
    assert not list((tmp_path / "out").glob(".*"))
    assert "small read 160 documents" in survey(*command, code=0)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="by design: a small disk is made on Linux")
def test_a_disk_that_is_full_is_said_and_survived(own: str, tmp_path: Path) -> None:
    """A limit on the size of files is what a full disk is to a process: a write that fails half way."""
    corpus = tmp_path / "a.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{at} {TEXTS[at % 3]}"}) + "\n" for at in range(48)))
    command = [own, str(corpus), "--out", str(tmp_path / "out"), "--no-roles"]
    small = "ulimit -f 8; trap '' XFSZ; exec \"$@\""  # 8 KiB
    code, _, err = run("bash", "-c", small, "bash", *PROGRAM, "survey", *command)
    assert code == 2, err
    assert re.fullmatch(
        r"headwise: out must be writable: .*File too large; .*run the same command again\n", err
    )
    assert not list((tmp_path / "out").glob(".*"))
    assert "small read 48 documents" in survey(*command, code=0)
