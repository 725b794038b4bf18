"""`survey`: documents of every kind, one by one; folders that go on where they stopped; what all comes to."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import headwise as hw
from headwise.corpus import documents, shards, summary
from headwise.corpus.document_rows import STATISTICS, Measure, Rows, fingerprint, places_of
from headwise.corpus.documents import Document, Plan, Texts
from headwise.corpus.shards import Shards, write_atomic
from headwise.corpus.summary import Moments, quantiles
from headwise.errors import ArgumentError, AttentionBypassed, PackageMissing
from headwise.heads.joint_measurement import joined_maps
from headwise.heads.record import Record
from headwise.models.pretrained import Pretrained, load
from trained import STORY, an_own_folder
from warm_start import started_warm

pytest.importorskip("pyarrow")

import pyarrow
import pyarrow.parquet

WORDS = STORY.replace(",", " ,").replace(".", " .").split()


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of 1 to 29 words, each another."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=1 + at % 29)) for at in range(count)]


def lines(path: Path, some: list[Any]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in some), "utf-8")
    return path


def table(path: Path, **columns: Any) -> Path:
    """A Parquet file of these columns."""
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    """A model of 2 layers with 3 heads each, which takes 41 tokens."""
    return load(an_own_folder(tmp_path_factory.mktemp("models") / "own", title="small"))


def run(model: Any, corpus: Path, out: Path, **options: Any) -> hw.corpus.result.Survey:
    return hw.survey(model, corpus, out=out, **({"progress": False, "roles": False} | options))


@pytest.fixture(scope="module")
def surveyed(small: Pretrained, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """37 documents, 2 of which cannot be read."""
    place = tmp_path_factory.mktemp("corpus")
    some: list[Any] = texts(37)
    some[11], some[13], some[17] = "", 5, "   "  # blanks are tokens
    return run(small, lines(place / "a.jsonl", some), place / "out")


def rows(folder: Path, table: str = shards.MEASURES) -> list[dict[str, Any]]:
    actual = [row for number in Shards(folder) for row in Shards(folder).read(table, number).to_pylist()]
    order = ("position",) if table == shards.DOCUMENTS else ("position", "layer", "head")
    return sorted(actual, key=lambda row: tuple(row[name] for name in order))


def files(folder: Path) -> dict[str, bytes]:
    """The shards of a folder, byte for byte."""
    return {
        file.name: file.read_bytes()
        for file in folder.iterdir()
        if file.name.startswith((shards.DOCUMENTS, shards.MEASURES))
    }


# Documents


def test_documents_of_every_kind_are_found_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "c.txt").write_text("no")
    (tmp_path / "b" / "same.txt").write_text("\ufeffsecond\r\nfile", "utf-8")
    (tmp_path / "a" / "same.txt").write_text("first", "utf-8")
    (tmp_path / "c.jsonl").write_bytes(
        b'{"text": "one"}\r\n\n{"text": "two", "n": 1}\n   \n{"text": "three"}'
    )
    table = pyarrow.table({"text": ["rows", None, "here"], "other": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet", row_group_size=2)
    (tmp_path / "e.pdf").write_text("another kind")
    plan = Plan.of(tmp_path)
    assert plan.documents == 8 and plan.left_out == documents.LeftOut(1, ["e.pdf"])
    listed = [each for number in range(len(plan)) for each in Texts(plan).block(number)]
    assert [(each.name, each.text) for each in listed] == [
        ("a/same.txt", "first"), ("b/same.txt", "second\nfile"),
        ("c.jsonl:1", "one"), ("c.jsonl:3", "two"), ("c.jsonl:5", "three"),
        ("d.parquet:0", "rows"), ("d.parquet:1", None), ("d.parquet:2", "here"),
    ]  # fmt: skip
    assert [each.position for each in listed] == list(range(8))
    assert listed[6].error == "field 'text' must be a string: got null"


BAD = {
    b"not json": "line must be JSON: Expecting value at character 0",
    b'{"text": "a': "line must be JSON: Unterminated string starting at at character 9",
    b'["a"]': "line must be an object with a field 'text': got list",
    b'{"body": "a"}': "line must have a field 'text': got 'body'",
    b'{"text": 3}': "field 'text' must be a string: got int",
    b'{"text": "\xff"}': "line must be UTF-8: invalid byte at position 10",
    b"[" * 100_000: "line must be JSON: it is nested too deeply",
}


@pytest.mark.parametrize(("line", "message"), BAD.items(), ids=[str(at) for at in range(len(BAD))])
def test_a_line_that_is_no_document_is_one_with_an_error(line: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "before"}\n' + line + b'\n{"text": "behind"}\n')
    first, bad, last = Texts(Plan.of(tmp_path / "a.jsonl")).block(0)
    assert (first.text, bad.text, last.text) == ("before", None, "behind")
    assert bad.name == "a.jsonl:2" and bad.error == message


def test_a_document_that_is_too_long_is_never_held_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "LONGEST", 200)
    monkeypatch.setattr(documents, "PIECE_BYTES", 150)
    lines(tmp_path / "a.jsonl", ["first", "x" * 1000, "last", "y" * 100])
    (tmp_path / "b.txt").write_text("z" * 300)
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe")
    listed = list(Texts(Plan.of(tmp_path)).block(0))
    assert [each.text and each.text[0] for each in listed] == ["f", None, "l", "y", None, None]
    assert listed[1].error == "document must be at most 200 bytes: it has 1013"
    assert [each.name for each in listed[:4]] == [f"a.jsonl:{number}" for number in (1, 2, 3, 4)]
    assert listed[4].error == "document must be at most 200 bytes: it has 300"
    assert listed[5].error == "text must be UTF-8: invalid byte at position 0"


def test_names_in_any_letters_are_documents(tmp_path: Path) -> None:
    (tmp_path / "猫 😀.txt").write_text("one")
    odd = os.fsencode(tmp_path) + b"/odd\xff.txt"
    try:
        Path(os.fsdecode(odd)).write_text("two")
    except OSError:
        pytest.skip("by design: a file system of whole letters")
    names = {each.name: each.text for each in Texts(Plan.of(tmp_path)).block(0)}
    assert names == {"odd\\udcff.txt": "two", "猫 😀.txt": "one"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda place: place / "none", "corpus must be a file or folder that exists: got '.*none'; check"),
        (
            lambda place: place,
            "corpus must hold a document: found 0 in '.*', among 0 files; the endings that are read are .txt",
        ),
        (lambda place: _file(place / "a.pdf", b"x"), r"corpus must end in .*: got '.*a.pdf'; rename it"),
        (
            lambda place: _file(place / "a.parquet", b"x"),
            r"a document that can be read: 'a.parquet': it is not a Parquet file \(.*\); check the file",
        ),
        (
            lambda place: table(place / "a.parquet", body=["a"]).parent,
            "'a.parquet': it has no column 'text'; its columns are body; check the file",
        ),
    ],
    ids=["nothing", "empty", "kind", "no parquet", "column"],
)
def test_what_is_no_corpus_is_refused(make: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        Plan.of(make(tmp_path))


def _file(place: Path, data: bytes) -> Path:
    place.write_bytes(data)
    return place


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.parquet"])
def test_a_file_that_changes_meanwhile_is_refused(name: str, tmp_path: Path) -> None:
    place = tmp_path / name

    def write(word: str) -> None:
        if name.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"text": [word]}), place, compression="none")
        else:
            place.write_text(json.dumps({"text": word}) if name.endswith("jsonl") else word)

    write("one cat")
    plan = Plan.of(place)
    write("one dog")  # as long
    with pytest.raises(ArgumentError, match=f"corpus must not change .* '{name}' has changed"):
        list(Texts(plan).block(0))
    place.unlink()
    with pytest.raises(ArgumentError, match=f"corpus must not change .* '{name}' cannot be read"):
        list(Texts(plan).block(0))


def test_links_are_followed_and_never_round_a_circle(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("two")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("one")
    (tmp_path / "corpus" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "round").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "up").symlink_to(tmp_path)
    names = [each.name for each in Texts(Plan.of(tmp_path / "corpus")).block(0)]
    assert names[:2] == ["a.txt", "link/b.txt"]


# What cannot be read


def a_broken_corpus(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three texts; a folder, a file, a link, a pipe and two Parquet files that cannot be read; two others."""
    for name in ("a.txt", "locked/b.txt", "z/c.txt", "unread.jsonl", "z/d.txt"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("The cat ran away.")
    (place / "bad.parquet").write_bytes(b"PAR1")
    (place / "gone.txt").symlink_to(place / "nowhere")
    os.mkfifo(place / "pipe.md")
    table(place / "z" / "column.parquet", body=["a"])
    (place / "notes.txt.gz").write_bytes(b"x")
    (place / "z" / "LICENSE").touch()
    scandir, opened = os.scandir, Path.open

    def refuse_folder(path: Any = ".") -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def refuse_file(self: Path, *args: Any, **named: Any) -> Any:
        if self.name == "unread.jsonl":
            raise OSError(5, "Input/output error", str(self))
        return opened(self, *args, **named)

    monkeypatch.setattr(os, "scandir", refuse_folder)  # not by permissions: root may read all
    monkeypatch.setattr(Path, "open", refuse_file)
    return place


def test_what_cannot_be_read_is_counted_named_and_read_by_a_later_run(
    small: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder and other kinds were skipped without a word, and one bad file refused the whole corpus."""
    corpus = tmp_path / "corpus"
    with monkeypatch.context() as patch:
        message = run(small, a_broken_corpus(corpus, patch), tmp_path / "out", block=2)
        assert "survey: 'bad.parquet' and 5 more cannot be read: " in capsys.readouterr().err
        usual = documents._why_no_file
        patch.setattr(documents, "_why_no_file", lambda at: "denied" if at.name == "a.txt" else usual(at))
        with pytest.raises(ArgumentError, match=r"'a.txt' cannot be read any more \(denied\)"):
            run(small, corpus, tmp_path / "out")
    assert message.documents == 3 and message.totals.failed == 6
    lost = {loss.kind: (loss.count, loss.first) for loss in message.lost}
    assert lost["folders"] == (1, [("locked/", "Permission denied")])
    assert dict(lost["files"][1]) | {"bad.parquet": ""} == {
        "bad.parquet": "", "gone.txt": "No such file or directory", "pipe.md": "it is not a regular file",
        "unread.jsonl": "Input/output error",
        "z/column.parquet": "it has no column 'text'; its columns are body",
    }  # fmt: skip
    count, first = lost["files of other kinds"]
    assert count == 2 and [name for name, _ in first] == ["notes.txt.gz", "z/LICENSE"]
    assert [loss.kind for loss in message.lost] == ["files", "folders", "files of other kinds"]

    again = run(small, corpus, tmp_path / "out")  # the folder and the file can be read now
    assert again.documents == 4 and {loss.kind: loss.count for loss in again.lost} == {
        "documents": 1, "files": 4, "files of other kinds": 2,
    }  # fmt: skip
    run(small, corpus, tmp_path / "clean", block=2)
    assert files(tmp_path / "out") == files(tmp_path / "clean")
    assert json.loads((tmp_path / "out" / "survey.json").read_text()) == json.loads(
        (tmp_path / "clean" / "survey.json").read_text()
    )


def test_a_row_group_that_is_damaged_is_recorded_and_the_others_are_read(tmp_path: Path) -> None:
    """Its bytes are those of the plan: reading them again would not help."""
    place = tmp_path / "a.parquet"
    table = pyarrow.table({"text": ["one cat " * 9, "two", "three"]})
    pyarrow.parquet.write_table(table, place, row_group_size=2, compression="zstd", use_dictionary=False)
    data = bytearray(place.read_bytes())
    start = pyarrow.parquet.ParquetFile(place).metadata.row_group(0).column(0).data_page_offset
    data[start + 20 : start + 60] = b"\xff" * 40
    place.write_bytes(data)
    first, second, third = Texts(Plan.of(place)).block(0)
    assert third.text == "three" and third.position == 2
    for position, bad in enumerate((first, second)):
        assert bad.text is None and bad.position == bad.number == position
        assert bad.failure == documents.FOR_GOOD and "row group must be readable: " in (bad.error or "")


# Failures that may pass


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> list[str]:
    """Let the model fail so many times on texts with a zebra; return the texts that it was asked to read."""
    arguments: list[str] = []
    usual = Measure.watched

    def watched(self: Measure, reading: Any, **options: Any) -> Any:
        arguments.append("".join(reading.tokens))
        if "zebra" in arguments[-1] and sum("zebra" in text for text in arguments) <= times:
            raise error
        return usual(self, reading, **options)

    monkeypatch.setattr(Measure, "watched", watched)
    return arguments


PASSING = {
    "GPU memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "memory": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "Python's memory": MemoryError(),
    "device": RuntimeError("CUDA error: unspecified launch failure"),
    "disk": OSError(5, "Input/output error"),
}


@pytest.mark.parametrize("error", PASSING.values(), ids=PASSING)
def test_a_failure_of_memory_a_device_or_a_disk_is_tried_at_once_and_may_pass(
    error: Exception, small: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested, messages = failing(monkeypatch, error, 9), Rows()
    Measure(small).add(Document("d", "d", None, 0, "the zebra ran"), messages)
    assert len(requested) == 2 and messages.documents[0]["failure"] == documents.RETRY and not messages.heads
    assert type(error).__name__ in messages.documents[0]["error"]


def test_a_failure_that_passes_leaves_no_trace(
    small: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was recorded for good. It is tried at once, at the end of the run, and in the next run."""
    error = PASSING["GPU memory"]
    corpus = lines(tmp_path / "a.jsonl", ["no one ran", "the zebra ran", "I saw", "who ran", "he saw it"])
    whole = run(small, corpus, tmp_path / "whole", block=2)
    for times, left in ((1, 0), (3, 0), (4, 1)):
        out = tmp_path / f"out{times}"
        with monkeypatch.context() as patch:
            failing(patch, error, times)
            message = run(small, corpus, out, block=2)
        assert message.totals.failed == left and message.is_complete == (not left)
        if not left:
            assert files(out) == files(tmp_path / "whole") and not message.lost
            continue
        assert message.documents == 4 and len(message.heads) == 6
        (loss,) = message.lost
        assert (loss.kind, loss.count, loss.first[0][0]) == ("documents to try again", 1, "a.jsonl:2")
        assert "documents-000000.retry.parquet" in files(out)
        with monkeypatch.context() as patch:
            requested = failing(patch, error, 0)
            again = run(small, corpus, out)
        assert len(requested) == 2 and "zebra" in requested[1]  # the look at the model, and no other document
        assert again.is_complete and files(out) == files(tmp_path / "whole")
        assert again.tables() == whole.tables()


def test_a_failure_of_the_document_itself_is_recorded_once(
    small: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested, messages = failing(monkeypatch, RuntimeError("size 3\nmore"), 9), Rows()
    Measure(small).add(Document("d", "d", None, 0, "the zebra ran"), messages)
    (row,) = messages.documents
    assert (
        len(requested) == 1
        and row["error"] == "RuntimeError: size 3"
        and row["failure"] == documents.FOR_GOOD
    )


def test_a_disk_that_fails_for_a_while_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.txt").write_text("I saw the cat.")
    lines(tmp_path / "corpus" / "b.jsonl", texts(3))
    usual = documents._read_bytes

    def broken(file: Path, path: str, piece: Any) -> bytes:
        if path == "b.jsonl":
            raise OSError(5, "Input/output error")
        return usual(file, path, piece)

    plan = Plan.of(tmp_path / "corpus")
    whole = list(Texts(plan).block(0))
    with monkeypatch.context() as patch:
        patch.setattr(documents, "_read_bytes", broken)
        first, *lost = Texts(plan).block(0)
    assert first == whole[0] and len(lost) == 3
    for line, (document, listed) in enumerate(zip(lost, whole[1:], strict=True), 1):
        assert document.name == listed.name == f"b.jsonl:{line}" and document.position == listed.position
        assert document.error == "Input/output error" and document.failure == documents.RETRY
    assert list(Texts(plan).block(0)) == whole


def test_a_block_with_failures_never_takes_the_place_of_one_without(tmp_path: Path) -> None:
    """A worker that was thought lost may come back, out of memory, when its block is finished."""
    good, bad = Rows(), Rows()
    for rows_of, failure in ((good, None), (bad, documents.RETRY)):
        row = {"document": "a", "position": 0, "tokens": 3, "found": 3, "failure": failure}
        rows_of.documents.append(row)
    store = Shards(tmp_path)
    store.write(0, bad)
    assert store.to_retry() == store.finished() == {0}
    store.write(0, good)
    store.write(0, bad)
    assert not store.to_retry() and store.finished() == {0} and len(files(tmp_path)) == 2
    store.place(shards.DOCUMENTS, 0, retry=True).touch()  # killed before it was taken away
    store.sweep()
    assert len(files(tmp_path)) == 2


def test_a_device_that_is_lost_ends_the_survey_and_names_the_document(
    small: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every later document would fail as well."""
    measure = Measure(small)
    failing(monkeypatch, RuntimeError("CUDA error: device lost"), 9)
    measure.device = torch.device("cuda:97")  # which is not here
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    def answer(error: Exception) -> None:
        def zeros(*size: int, device: torch.device) -> Any:
            raise error

        monkeypatch.setattr(torch, "zeros", zeros)

    answer(torch.OutOfMemoryError("full"))
    messages = Rows()
    measure.add(Document("d", "d", None, 0, "a zebra"), messages)
    assert messages.documents[0]["failure"] == documents.RETRY
    answer(torch.AcceleratorError("CUDA error: device lost"))
    with pytest.raises(ArgumentError, match=r"device must keep working: cuda:97 failed at document 'd'"):
        measure.add(Document("d", "d", None, 0, "a zebra"), Rows())


# One document


def test_a_documents_numbers_are_those_of_watch(small: Pretrained, surveyed: Any) -> None:
    rows_read = rows(surveyed.folder)
    text = surveyed.document(8).text
    with torch.no_grad(), hw.watch(small.model, tokenizer=small.tokenizer, patterns=True) as heads:
        small.model(small.tokenizer(text, return_tensors="pt")["input_ids"])
    mine = [row for row in rows_read if row["position"] == 8]
    assert [(row["layer"], row["head"]) for row in mine] == [(head.layer, head.head) for head in heads.all()]
    for row, head in zip(mine, heads.all(), strict=True):
        assert row["label"] == head.label.name
        for name in STATISTICS:
            theirs = head.values.get(name, math.nan)
            if math.isnan(theirs):
                assert row[name] is None
            else:  # the same weights, summed in another order
                assert row[name] == pytest.approx(theirs, rel=1e-5, abs=1e-6), name


def test_a_documents_result_does_not_depend_on_what_the_process_did_before(
    small: Pretrained, surveyed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without bfloat16 the first product of such numbers takes oneDNN from all products after it."""
    actual, visible = [Rows(), Rows()], []
    watched = Measure.watched

    def spying(self: Measure, *args: Any, **options: Any) -> Any:
        visible.append(torch.backends.mkldnn.enabled)
        return watched(self, *args, **options)

    monkeypatch.setattr(Measure, "watched", spying)
    before = torch.backends.mkldnn.enabled
    try:
        for each, enabled in zip(actual, (True, False), strict=True):
            torch.backends.mkldnn.enabled = enabled
            Measure(small).add(surveyed.document(23), each)
            assert torch.backends.mkldnn.enabled == enabled
    finally:
        torch.backends.mkldnn.enabled = before
    assert visible == [True, True] and actual[0] == actual[1] and actual[0].heads


def test_what_cannot_be_read_is_recorded_and_the_end_of_long_ones_left_out(surveyed: Any) -> None:
    rows_read = rows(surveyed.folder, shards.DOCUMENTS)
    assert len(rows_read) == 37 and {row["position"] for row in rows_read} == set(range(37))
    bad = {row["document"]: row["error"] for row in rows_read if row["error"] is not None}
    assert bad == {
        "a.jsonl:12": "text must hold at least one word: found 0; try a sentence",
        "a.jsonl:14": "field 'text' must be a string: got int",
    }
    for row in rows_read:
        assert row["error"] is not None or (row["tokens"] == min(row["found"], 41) and row["characters"])
    totals = surveyed.totals
    assert totals.failed == len(bad) and totals.documents == 37 - len(bad)
    assert totals.cut == sum(row["error"] is None and row["found"] > 41 for row in rows_read)
    assert surveyed.errors[0][0] == "a.jsonl:12"


def test_half_letters_and_texts_of_one_token_are_no_trouble(small: Pretrained) -> None:
    messages = Rows()
    for at, text in enumerate(["\ud800", "t", "</script>\u202e\0", "word " * 9]):
        Measure(small, max_tokens=3).add(Document(f"d{at}", "d", at, at, text), messages)
    assert messages.documents[0]["error"].startswith(
        "text must be valid Unicode: got a lone surrogate, '\\ud800'"
    )
    assert [row["tokens"] for row in messages.documents] == [None, 2, 3, 3]
    assert messages.documents[3]["found"] > 3
    assert all(row["place"] is None for row in messages.heads)
    assert all(value is None or value == value for row in messages.heads for value in row.values())


def test_what_is_wrong_with_the_model_ends_the_survey(
    small: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, AttentionBypassed("no"), 1)
    with pytest.raises(AttentionBypassed, match=r"no"):
        Measure(small).add(Document("d", "d", None, 0, "a zebra"), Rows())


def test_the_place_is_where_a_head_looks_elsewhere() -> None:
    T = 19
    keys = torch.arange(-1, T - 1).clamp(min=0).repeat(2, 1)  # both heads look at the token before
    keys[0, 13] = 5
    keys[1, 3] = 3  # too early to be asked: it sees four keys
    map = hw.AttentionMap.from_weights(torch.eye(T)[keys][None], hw.Mask.causal())
    record = Record((1, 2, T, T), map=map)
    (whole,) = joined_maps([record])
    first, other = places_of(whole, [f"t{at}" for at in range(T)])[id(record)]
    assert [first[name] for name in ("place", "token", "key", "key_token", "weight")] == [
        13,
        "t13",
        5,
        "t5",
        1,
    ]
    assert first["moved"] == pytest.approx(11 / 12)  # of twelve queries asked, eleven look at the one before
    assert other["moved"] == 0.0


# Exact sums


def test_sums_do_not_depend_on_the_order_and_are_exact() -> None:
    draw = numpy.random.default_rng(0)
    values = draw.normal(3, 1e-4, (1009, 5)).astype("float32")
    values[:, 1] *= 1e20
    values[:, 2] *= 1e-40
    values[draw.random(values.shape) < 0.1] = numpy.nan
    values[:, 4] = numpy.nan
    tokens = draw.integers(1, 4096, 1009)
    first, other = Moments(5), Moments(5)
    first.add(values, tokens)
    for some in numpy.array_split(draw.permutation(1009), 7):
        other.add(values[some], tokens[some])
    for name in ("count", "mean", "variance", "correlation"):
        assert str(getattr(first, name)) == str(getattr(other, name))
    for at in range(4):
        present = values[:, at].astype("float64")
        t = tokens[~numpy.isnan(present)]
        present = present[~numpy.isnan(present)]
        assert first.mean[at] == pytest.approx(math.fsum(present) / len(present), rel=1e-15)
        assert first.variance[at] == pytest.approx(present.var(), rel=1e-9)
        assert first.correlation[at] == pytest.approx(numpy.corrcoef(present, t)[0, 1], abs=1e-6)
    assert math.isnan(first.mean[4]) and first.count[4] == 0


def test_quantiles_are_numbers_that_were_measured() -> None:
    draw = numpy.random.default_rng(0)
    values = draw.normal(0, 1, (997, 4)).astype("float32")
    values[:, 1] = numpy.round(values[:, 1])  # many equals, and -0
    values[draw.random(values.shape) < 0.2] = numpy.nan
    values[:, 3] = numpy.nan
    shares = list(summary.SHARES.values())
    actual = quantiles(lambda: iter(numpy.array_split(values, 5)), 4, shares)
    for at in range(3):
        present = values[~numpy.isnan(values[:, at]), at]
        assert actual[at] == numpy.quantile(present, shares, method="inverted_cdf").astype("float64").tolist()
    assert all(map(math.isnan, actual[3]))


# What it comes to


def test_the_summary_is_what_the_tables_say(surveyed: Any) -> None:
    rows_read = rows(surveyed.folder)
    for head in surveyed:
        mine = [row for row in rows_read if (row["layer"], row["head"]) == (head.layer, head.head)]
        assert head.documents == len(mine) == surveyed.documents
        labels = [row["label"] for row in mine]
        assert head.share == labels.count(head.label) / len(labels) == max(head.labels.values())
        assert sum(head.labels.values()) == pytest.approx(1)
        for name, message in head.statistics.items():
            between = numpy.var([other.statistics[name].mean for other in surveyed])
            if not math.isnan(message.dependence):
                expected = message.spread**2 / (message.spread**2 + between)
                assert message.dependence == pytest.approx(expected, rel=1e-9)
            present = numpy.array([row[name] for row in mine if row[name] is not None], "float64")
            assert message.documents == len(present)
            assert message.mean == pytest.approx(present.mean(), rel=1e-12)
            assert message.spread == pytest.approx(present.std(), rel=1e-6, abs=1e-12)
            assert message.quantiles["median"] == numpy.quantile(present, 0.5, method="inverted_cdf")
            assert message.quantiles["least"] == present.min() and message.quantiles["most"] == present.max()
        is_expected = [
            head.statistics[name].dependence for name in summary.CHARACTER if name in head.statistics
        ]
        assert head.dependence == pytest.approx(numpy.nanmean(is_expected))
    assert math.isnan(surveyed[0, 0].statistics["next"].dependence)  # of a causal model always 0
    assert all(head.verdict == "stable" for head in surveyed.stable)
    assert all(head.dependence >= summary.OF_TEXT for head in surveyed.of_text)


def test_movers_are_the_documents_farthest_from_the_mean(surveyed: Any) -> None:
    rows_read = rows(surveyed.folder)
    head = surveyed[1, 2]
    mine = [row for row in rows_read if (row["layer"], row["head"]) == (1, 2)]
    far = {}
    for row in mine:
        away = [
            abs(row[name] - head.statistics[name].mean) / head.statistics[name].spread
            for name in summary.CHARACTER
            if row[name] is not None and head.statistics[name].spread > summary.LEAST_SPREAD
        ]
        far[row["document"]] = max(away)
    best = sorted(far, key=lambda name: -far[name])[: summary.LISTED]
    assert [mover.document for mover in head.movers] == best
    assert abs(head.movers[0].spreads or 0) == pytest.approx(far[best[0]])
    places = sorted((row for row in mine if row["moved"] is not None), key=lambda row: -row["moved"])
    assert [mover.document for mover in head.places] == [row["document"] for row in places[: summary.LISTED]]


def test_texts_that_are_the_same_are_listed_once(small: Pretrained, tmp_path: Path) -> None:
    some = [*texts(9), *["away away away"] * 9]
    message = run(small, lines(tmp_path / "a.jsonl", some), tmp_path / "out")
    assert message.documents == 18
    for head in message:
        names = [mover.document for mover in head.movers]
        assert len([name for name in names if int(name.partition(":")[2]) > 9]) <= 1
        assert not {f"a.jsonl:{at}" for at in range(11, 19)} & set(names)  # the first stands for all


def test_nothing_that_can_be_read_is_said_so(small: Pretrained, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("no\nnor this\n")
    with pytest.raises(
        ArgumentError, match=r"must have read a document: it read 0 of 2; .* line must be JSON"
    ):
        run(small, tmp_path / "a.jsonl", tmp_path / "out")
    assert repr(hw.load_survey(tmp_path / "out")).endswith("no document read)")


# Files


def test_files_are_read_by_duckdb_pandas_and_polars_as_they_are(surveyed: Any) -> None:
    duckdb, pandas, polars = map(pytest.importorskip, ("duckdb", "pandas", "polars"))
    place = f"{surveyed.folder}/measures-*.parquet"
    mean = surveyed[1, 2].statistics["entropy"].mean
    requested = "select avg(entropy), count(*) from read_parquet(?) where layer = 1 and head = 2"
    assert duckdb.execute(requested, [place]).fetchone() == (
        pytest.approx(mean, rel=1e-6),
        surveyed.documents,
    )
    some = polars.scan_parquet(place).filter((polars.col("layer") == 1) & (polars.col("head") == 2))
    actual = some.select(polars.col("entropy").cast(polars.Float64).mean()).collect().item()
    assert actual == pytest.approx(mean)
    frame = pandas.concat(map(pandas.read_parquet, sorted(surveyed.folder.glob("measures-*.parquet"))))
    mine = frame[(frame.layer == 1) & (frame["head"] == 2)]
    assert mine.entropy.astype("float64").mean() == pytest.approx(mean)
    assert surveyed.to_pandas("heads").verdict.tolist() == [head.verdict for head in surveyed]
    saved = pandas.read_parquet(surveyed.folder / "summary-statistics.parquet")
    pandas.testing.assert_frame_equal(saved, surveyed.to_pandas())
    with pytest.raises(ArgumentError, match=r"table must be a known name: got 'head'; did you mean 'heads'"):
        surveyed.to_pandas("head")


def test_a_survey_that_is_loaded_says_the_same(surveyed: Any, tmp_path: Path) -> None:
    again = hw.load_survey(surveyed.folder)
    assert again.tables() == surveyed.tables() and again.is_complete
    assert repr(again) == repr(surveyed) == f"Survey({surveyed.documents} documents, 6 heads)"
    with pytest.raises(ArgumentError, match=r"folder must contain a survey: '.*' has no survey.json; run"):
        hw.load_survey(tmp_path)
    with pytest.raises(
        ArgumentError, match=r"index must be a head of the survey: got layer 7, head 0; the layers are 0, 1"
    ):
        again[7, 0]
    with pytest.raises(ArgumentError, match=r"index must be a pair of layer and head: got 3"):
        again[3]
    with pytest.raises(ArgumentError, match=r"position must be one of 0 to 36: got 37;"):
        again.document(37)
    with pytest.raises(ArgumentError, match=r"trained must be given, .* got None for 'small'"):
        again.typical()
    (tmp_path / "survey.json").write_text("no")
    with pytest.raises(ArgumentError, match=r"survey.json in .* cannot be read"):
        hw.load_survey(tmp_path)


def test_the_table_fits_and_sorts(surveyed: Any) -> None:
    message = str(surveyed.table(top=2))
    assert "depends" in message and f"{max(head.dependence for head in surveyed):.2f}" in message
    for sort in ("share", "layer", "streaming", "entropy"):
        assert str(surveyed.table(sort=sort, descending=False))
    with pytest.raises(ArgumentError, match=r"sort must be a known name: got 'entrop'; did you"):
        surveyed.table(sort="entrop")
    with pytest.raises(ArgumentError, match=r"top must be at least 1: got 0"):
        surveyed.table(top=0)


def test_a_page_is_told_of_the_corpus(surveyed: Any, small: Pretrained, tmp_path: Path) -> None:
    place = surveyed.to_html(tmp_path / "heads.html")
    page = place.read_text("utf-8")
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    corpus = data["corpus"]
    assert data["heading"] == f"small: what 6 heads attend to over {surveyed.documents} documents"
    assert corpus["start"] == corpus["measures"][0]["name"] == "corpus:dependence"
    values = {(layer, head): value for layer, head, value in corpus["measures"][0]["values"]}
    assert values[1, 2] == round(surveyed[1, 2].dependence, 5)
    assert len(corpus["heads"]) == 6 and corpus["heads"][5]["movers"][0]["document"].startswith("a.jsonl:")
    mha = hw.MultiHeadAttention(6, 1)
    with hw.watch(mha) as heads:
        mha(torch.randn(1, 3, 6))
    with pytest.raises(ArgumentError, match=r"a survey of the model that was watched: it has layer 0"):
        heads.to_html(tmp_path / "no.html", corpus=surveyed)


# Begun, stopped, gone on with


def test_a_survey_goes_on_where_it_stopped(small: Pretrained, tmp_path: Path) -> None:
    corpus = lines(tmp_path / "a.jsonl", texts(23))
    whole = run(small, corpus, tmp_path / "whole", block=5)
    calls: list[int] = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if done >= 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small, corpus, tmp_path / "out", block=5, progress=stop)
    assert len(files(tmp_path / "out")) == 4  # two blocks
    assert hw.load_survey(tmp_path / "out").documents == 10
    assert not hw.load_survey(tmp_path / "out").is_complete
    measured = []
    again = run(small, corpus, tmp_path / "out", progress=lambda done, total: measured.append(done))
    assert measured[0] == 10 and measured[-1] == 23
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert again.tables() == whole.tables()
    written = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").glob("[dm]*-*.parquet")}
    run(small, corpus, tmp_path / "out")
    assert written == {file: file.stat().st_mtime_ns for file in written}


def test_a_folder_is_one_survey(small: Pretrained, tmp_path: Path) -> None:
    corpus, out = lines(tmp_path / "a.jsonl", texts(3)), tmp_path / "out"
    run(small, corpus, out)
    for options, messages in (
        (
            {"max_tokens": 7},
            r"these options: .* was started with .*'max_tokens': None.* this call has .*7",
        ),
        ({"threads": 2}, r"these options: .*'threads': 1.* this call has .*2"),
        ({"block": 3}, r"block must not change: .* was started with 16, this call has 3"),
    ):
        with pytest.raises(ArgumentError, match=messages):
            run(small, corpus, out, **options)
    with torch.no_grad():
        parameter = next(iter(small.model.parameters()))
        before = parameter[0, 0].item()
        parameter[0, 0] += 1
    try:
        with pytest.raises(ArgumentError, match=r"a survey of this model: .* with 'small' \(.*\), this call"):
            run(small, corpus, out)
    finally:
        with torch.no_grad():
            parameter[0, 0] = before
    for edit, messages in (
        (lambda: lines(corpus, texts(4)), "'a.jsonl' has changed"),
        (lambda: lines(corpus, texts(3)) and lines(tmp_path / "b.jsonl", ["x"]), None),
        (lambda: corpus.write_text(corpus.read_text().replace("cat", "cap")), "'a.jsonl' has changed"),
    ):
        edit()
        if messages is None:
            run(small, corpus, out)  # the corpus is that one file
            continue
        with pytest.raises(
            ArgumentError, match=f"corpus must be the one that .* was started with: {messages}"
        ):
            run(small, corpus, out)
    message = json.loads((out / "survey.json").read_text())
    (out / "survey.json").write_text(json.dumps(message | {"format": "headwise survey 0"}))
    with pytest.raises(ArgumentError, match=r"of this format, 'headwise survey 1': got 'headwise survey 0'"):
        run(small, corpus, out)
    (out / "survey.json").unlink()
    with pytest.raises(ArgumentError, match=r"has files of a survey but no survey.json"):
        run(small, corpus, out)


def test_of_two_that_begin_at_once_one_decides_what_the_folder_is(
    small: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan that came second once lay beside the survey that came first."""
    from headwise.corpus import survey as begun

    mine, theirs = lines(tmp_path / "a.jsonl", texts(3)), lines(tmp_path / "b.jsonl", texts(5))
    other = lines(tmp_path / "c.jsonl", texts(3))
    usual = begun.write_atomic

    def late(place: Path, data: bytes, *, anew: bool = False) -> bool:
        if anew and not place.exists():
            monkeypatch.setattr(begun, "write_atomic", usual)
            run(small, theirs, tmp_path / "out")
        return usual(place, data, anew=anew)

    monkeypatch.setattr(begun, "write_atomic", late)
    with pytest.raises(
        ArgumentError, match=r"corpus must be the one that .* was started with: 'b.jsonl' is missing"
    ):
        run(small, mine, tmp_path / "out")
    assert hw.load_survey(tmp_path / "out").document(4).name == "b.jsonl:5"
    (tmp_path / "out" / "corpus.parquet").unlink()  # killed in between
    with pytest.raises(ArgumentError, match=r"its files differ"):
        run(small, other, tmp_path / "out")
    assert run(small, theirs, tmp_path / "out").is_complete


def test_files_that_come_or_go_are_named(small: Pretrained, tmp_path: Path) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    corpus.mkdir()
    lines(corpus / "a.jsonl", texts(2))
    run(small, corpus, out)
    lines(corpus / "b.jsonl", texts(2))
    with pytest.raises(ArgumentError, match=r"'b.jsonl' is new"):
        run(small, corpus, out)
    (corpus / "a.jsonl").unlink()
    with pytest.raises(ArgumentError, match=r"'a.jsonl' is missing"):
        run(small, corpus, out)
    with pytest.raises(ArgumentError, match=r"out must not be the corpus itself"):
        run(small, corpus, corpus)
    inside = run(small, corpus, corpus / "out")  # which is no part of it
    assert inside.documents == run(small, corpus, corpus / "out").documents == 2


WRONG = {
    "field": ({"field": ""}, "field must be a name: got ''"),
    "tokens": ({"max_tokens": 0}, "max_tokens must be a whole number of at least 1: got 0"),
    "threads": ({"threads": True}, "threads must be a whole number of at least 1: got True"),
    "room": ({"max_tokens": 1}, "max_tokens must be more than the number of special tokens, 1: got 1"),
    "engine": ({"engine": "spark"}, "engine must be here or ray: got 'spark'"),
    "workers": ({"workers": 2}, "workers must be given only with engine='ray': got 2 with 'here'"),
    "device": (
        {"device": "cuda"},
        "device must be given only with the name of a model: got 'cuda' and Pretrained",
    ),
    "tokenizer": (
        {"tokenizer": len},
        "tokenizer must be given only with a module: got builtin_function_or_method for",
    ),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_what_is_asked_for_in_the_wrong_way_is_said(
    options: dict[str, Any], message: str, small: Pretrained, tmp_path: Path
) -> None:
    lines(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ArgumentError, match=message):
        run(small, tmp_path / "a.jsonl", tmp_path / "out", **options)


def test_a_model_itself_needs_its_tokenizer_and_stays_as_it_was(small: Pretrained, tmp_path: Path) -> None:
    corpus = lines(tmp_path / "a.jsonl", texts(2))
    with pytest.raises(ArgumentError, match=r"tokenizer must be given with a module: got Transformer alone"):
        run(small.model, corpus, tmp_path / "out")
    small.model.train()
    threads = torch.get_num_threads()
    try:
        message = run(small.model, corpus, tmp_path / "out", tokenizer=small.tokenizer, threads=2)
        assert small.model.training and all(module.training for module in small.model.modules())
    finally:
        small.model.eval()
    assert message.title == "Transformer" and torch.get_num_threads() == threads
    with pytest.raises(ArgumentError, match=r"device must be available: got 'nowhere' \(.*\); try 'cpu'"):
        run("mini", corpus, tmp_path / "other", device="nowhere")


def test_a_folder_that_cannot_be_one_is_refused(small: Pretrained, tmp_path: Path) -> None:
    corpus = lines(tmp_path / "a.jsonl", ["a word"])
    with pytest.raises(ArgumentError, match=r"out must be a folder: '.*a.jsonl' is a file"):
        run(small, corpus, corpus)
    with pytest.raises(ArgumentError, match=r"out must be a folder that can be created: '.*inside': Not"):
        run(small, corpus, corpus / "inside")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "survey.json").write_text("{")
    with pytest.raises(ArgumentError, match=r"out must hold a survey that can be read"):
        run(small, corpus, tmp_path / "out")


def test_a_full_disk_leaves_what_is_finished(
    small: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = lines(tmp_path / "a.jsonl", texts(13))
    usual, written = os.fsync, []

    def fsync(number: int) -> None:
        written.append(number)
        if len(written) == 11:
            raise OSError(28, "No space left on device")
        usual(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(
            ArgumentError, match=r"out must have free space: .*No space left on device; finished"
        ):
            run(small, corpus, tmp_path / "out", block=5)
    shards = Shards(tmp_path / "out")
    assert 0 < len(shards.finished()) < 3 and not list((tmp_path / "out").glob(".*"))
    run(small, corpus, tmp_path / "out")
    run(small, corpus, tmp_path / "whole", block=5)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    assert write_atomic(tmp_path / "a", b"one") and write_atomic(tmp_path / "a", b"two")
    assert not write_atomic(tmp_path / "a", b"three", anew=True)
    assert (tmp_path / "a").read_bytes() == b"two" and [file.name for file in tmp_path.iterdir()] == ["a"]
    with pytest.raises(ArgumentError, match=r"out must be writable: '.*b': No such file"):
        write_atomic(tmp_path / "none" / "b", b"")
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    (tmp_path / f".a@{shards._host()}+{int(dead.stdout)}-1.part").touch()
    (tmp_path / f".a@{shards._host()}+{os.getpid()}-1.part").touch()
    (tmp_path / ".a@elsewhere+1-1.part").touch()
    Shards(tmp_path).sweep()
    left = {f".a@{shards._host()}+{os.getpid()}-1.part", ".a@elsewhere+1-1.part"}
    assert {file.name for file in tmp_path.glob(".*")} == left


def test_a_shard_that_is_damaged_is_named(small: Pretrained, tmp_path: Path) -> None:
    run(small, lines(tmp_path / "a.jsonl", texts(2)), tmp_path / "out")
    (tmp_path / "out" / "measures-000000.parquet").write_bytes(b"PAR1")
    with pytest.raises(ArgumentError, match=r"measures-000000.parquet cannot be read \(.*documents-000000"):
        _ = hw.load_survey(tmp_path / "out").heads


# Shared work


class Counter:
    """A store in this process."""

    def __init__(self, lost_after: int | None = None) -> None:
        self.count, self.lost_after, self.held = 0, lost_after, {}

    def add(self, name: str, by: int) -> int:
        if self.lost_after is not None and self.count >= self.lost_after:
            raise RuntimeError("connection reset\nby peer")
        self.count += by
        return self.count

    def set(self, name: str, value: str) -> None:
        self.held[name] = value.encode()

    def get(self, name: str) -> bytes:
        return self.held[name]

    def check(self, names: list[str]) -> bool:
        return all(name in self.held for name in names)


class Finished:
    """Shards of which only it counts that they are there."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()

    def has(self, number: int) -> bool:
        return number in self.numbers

    def finished(self) -> set[int]:
        return set(self.numbers)


def test_whoever_is_free_takes_the_next_block_and_those_of_who_is_lost() -> None:
    store, finished = Counter(), Finished()
    finished.numbers = {3}
    first, two = (
        shards.blocks(11, finished, shards.Group(store, rank, 2), patience=0.01) for rank in range(2)
    )
    handled = [next(first), next(two)]
    finished.numbers.add(handled[0])
    handled.append(next(first))
    assert handled == [0, 1, 2]
    finished.numbers.add(2)
    rest = [
        number for number in first if not finished.numbers.add(number)
    ]  # the other is never heard of again
    assert rest == [4, 5, 6, 7, 8, 9, 10, 1]
    finished.numbers.remove(7)
    assert list(shards.blocks(11, finished, None)) == [7]


def test_where_the_store_is_lost_each_goes_on_by_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    finished = Finished()
    done = []
    for number in shards.blocks(7, finished, shards.Group(Counter(lost_after=2), 1, 2), patience=60):
        done.append(number)
        finished.numbers.add(number)
    assert sorted(done) == list(range(7)) and done[:2] == [0, 1]
    message = "survey: rank 1 continues without the store, which is lost: connection reset\n"
    assert capsys.readouterr().err == message


def test_who_joins_waits_until_the_first_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    group = shards.Group(Counter(), 1, 2)
    group.tell("")
    group.hear()
    group.tell("corpus must be there: no; check it")
    with pytest.raises(ArgumentError, match=r"start the survey: it failed: corpus must be there"):
        group.hear()
    monkeypatch.setattr(shards, "BEGIN_TIMEOUT", 0.0)
    with pytest.raises(ArgumentError, match=r"rank 0 must start the survey: no message from it in 0 s"):
        shards.Group(Counter(), 1, 2).hear()


def test_alone_there_is_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert shards.group_here() is None
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(ArgumentError, match=r"processes must be able to connect: rank 1 of 2 .* localhost:1"):
        shards.group_here(timeout=0.5)


def test_the_fingerprint_is_of_weights_config_and_tokens(small: Pretrained) -> None:
    first = fingerprint(small.model, small.tokenizer)
    assert first == fingerprint(small.model, small.tokenizer)
    assert first != fingerprint(small.model.double(), small.tokenizer)
    small.model.float()
    assert first == fingerprint(small.model, small.tokenizer)
    assert first != fingerprint(small.model, load("mini").tokenizer)


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("pyarrow", r'a survey needs pyarrow; .* "headwise\[survey'),
        ("ray", r"engine='ray' needs ray; install with: pip"),
    ],
)
def test_a_package_that_is_missing_is_named(
    package: str, message: str, small: Pretrained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = lines(tmp_path / "a.jsonl", ["a"])
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PackageMissing, match=message):
        run(small, corpus, tmp_path / "out", engine="ray")


# Processes


@dataclass
class Shared:
    """A model in a folder, a corpus, and the survey of it that one process made."""

    model: str
    corpus: Path
    whole: hw.corpus.result.Survey


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    place = tmp_path_factory.mktemp("shared")
    model = str(an_own_folder(place / "model", title="small"))
    corpus = lines(place / "a.jsonl", texts(140))
    return Shared(model, corpus, run(model, corpus, place / "whole", block=16))


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="by design: Ray is an extra of its own, not in dev"
)
@pytest.mark.filterwarnings("ignore")
def test_a_job_of_ray_writes_the_same_files(shared: Shared, tmp_path: Path) -> None:
    run(shared.model, shared.corpus, tmp_path, block=16, engine="ray", workers=2)
    assert files(tmp_path) == files(shared.whole.folder)


def command(shared: Shared, out: Path) -> list[str]:
    return ["survey", shared.model, str(shared.corpus), "--out", str(out), "--block", "16", "--no-roles"]


@pytest.mark.slow
def test_killed_again_and_again_it_ends_as_if_nothing_had_been(shared: Shared, tmp_path: Path) -> None:
    draw = random.Random(0)
    shards = Shards(tmp_path / "out")
    kills = 0
    for _ in range(6):
        begun = len(shards.finished()) if shards.folder.exists() else 0
        process = started_warm(*command(shared, shards.folder), message=tmp_path / "said")
        end = time.monotonic() + 60
        while process.is_alive() and time.monotonic() < end:
            if shards.folder.exists() and len(shards.finished()) > begun:
                break
            time.sleep(0.01)
        time.sleep(draw.random() * 0.1)
        if process.is_alive():
            process.kill()
            kills += 1
        process.join()
    assert kills >= 4
    run(shared.model, shared.corpus, shards.folder)
    assert files(shards.folder) == files(shared.whole.folder)
    assert not list(shards.folder.glob(".*.part"))


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        number: int = free.getsockname()[1]
    return number


@pytest.mark.slow
def test_two_processes_of_torchrun_write_what_one_writes(shared: Shared, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    place = str(Path(hw.__file__).parents[1])
    done = subprocess.run(
        [*torchrun, "-m", "headwise", *command(shared, tmp_path)],
        env=os.environ | {"PYTHONPATH": place, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("small read 140 documents") == 1
    assert files(tmp_path) == files(shared.whole.folder)
    assert hw.load_survey(tmp_path).tables() == shared.whole.tables()


@pytest.mark.slow
def test_a_worker_that_is_lost_leaves_its_documents_to_the_others(
    shared: Shared, tmp_path: Path, port: int
) -> None:
    """Without torchrun's agent, which would end them all: as under a job queue."""
    shards = Shards(tmp_path / "out")
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    messages = [tmp_path / f"said {rank}" for rank in range(2)]
    both = [
        started_warm(*command(shared, shards.folder), message=messages[rank], **environment, RANK=str(rank))
        for rank in range(2)
    ]
    end = time.monotonic() + 60
    while (not shards.folder.exists() or len(shards.finished()) < 4) and time.monotonic() < end:
        time.sleep(0.01)
    both[1].kill()
    for process in both:
        process.join(90)
    assert both[0].exitcode == 0, messages[0].read_text()
    assert "small read 140 documents" in messages[0].read_text()
    assert files(shards.folder) == files(shared.whole.folder)
