"""The score on files that nobody here wrote, and a part of such files."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from check_wild import Expected, TableError, expected_in, meet, score, unknown_keys, verdict_on
from headwise.errors import ArgumentError
from headwise.examiner.catalogue import FAULTS
from headwise.examiner.evidence import Problem
from headwise.examiner.report import Named, Report
from headwise.examiner.source import candidates

WILD = Path(__file__).parents[1] / "wild"
HEADER = "file,verdict,fault,why\n"


def said(*keys: str, ok: bool = False, judged: bool = True, line: int | None = None) -> Report:
    """A report that names these faults."""
    report = Report("a", ok=ok, summary="so", judged=judged)
    report.faults = [Named.of(FAULTS[key], "") for key in keys]
    report.problems = [] if line is None else [Problem("call", "RuntimeError", "no", line)]
    return report


def test_a_score_counts_what_was_passed_named_caught_and_accused() -> None:
    right, wrong = (
        Expected("r.py", True),
        Expected("w.py", False, [{"no scale"}, {"scale by d_k", "sigmoid"}]),
    )
    met = [
        verdict_on(right, said(ok=True), 1.0),
        verdict_on(right, said("no scale"), 2.0),
        verdict_on(right, said(judged=False), 3.0),
        verdict_on(wrong, said("no scale"), 5.0),
        verdict_on(wrong, said("sigmoid", "scale by d_k"), 7.0),
        verdict_on(wrong, said("sigmoid"), 11.0),  # one of two
        verdict_on(wrong, said(), 13.0),  # caught, without a name
        verdict_on(wrong, said("no scale", "softmax twice"), 17.0),
        verdict_on(wrong, ArgumentError("file must define attention"), 19.0),
    ]
    assert [one.as_expected for one in met] == [True, False, False, True, True, False, False, False, False]
    lines = score(met)
    assert [" ".join(line.split()) for line in lines[:6]] == [
        "right passed 1 of 3 33.3%",
        "wrong named 2 of 6 33.3%",
        "wrong caught 5 of 6 83.3%",
        "accusations true 6 of 8 75.0%",
        "right not judged 1 of 3 33.3%",
        "wrong not judged 1 of 6 16.7%",
    ]
    assert lines[6].endswith("median 7.0, p90 19.0, worst 19.0") and len(lines) == 7 + 6
    assert lines[7] == "  r.py (right) -> wrong: no scale" and "must define attention" in lines[-1]


def test_where_code_raises_it_is_enough_to_say_where() -> None:
    raises = Expected("w.py", False, [{"raises"}])
    assert verdict_on(raises, said(line=3), 1.0).named
    assert not verdict_on(raises, said(), 1.0).named and not verdict_on(raises, said("no scale"), 1.0).named


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (None, "there is no .*expected.csv"),
        (HEADER + "a.py,maybe,,\n", "a.py is 'maybe' with fault ''"),
        (HEADER + "a.py,wrong,,\n", "a.py is 'wrong' with fault ''"),
        (HEADER + "b.py,right,,\n", "the table and the folder differ in a.py, b.py"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table: str | None, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    if table is not None:
        (tmp_path / "expected.csv").write_text(table)
    with pytest.raises(TableError, match=words):
        expected_in(tmp_path)


def test_alternatives_and_faults_at_once_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").touch()
    (tmp_path / "expected.csv").write_text(HEADER + "a.ipynb,wrong,no scale | sigmoid + relu added,\n")
    (one,) = expected_in(tmp_path)
    assert one.faults == [{"no scale"}, {"sigmoid", "relu added"}] and not unknown_keys([one])
    assert unknown_keys([Expected("a", False, [{"raises", "other"}])]) == ["other"]


CHOSEN = {
    "bert_split": "BertSelfAttention",
    "cabecas": "AtencaoMultiCabeca",
    "encdec_attention": "MehrkopfAufmerksamkeit",
    "functional_params": "Attention",
    "graph_token_attention": "TokenMixer",
    "image_patch_attn": "MHSA",
    "latent_attention": "MLA",
    "par_la_formule": "AttentionMultiTetes",
    "prenorm_globals": "AttentionSublayer",
    "seq2seq_layers": "MultiHeadAttentionLayer",
    "slides_code": "MHA",
}


@pytest.mark.parametrize("file", sorted((WILD / "open").glob("*.py")), ids=lambda path: path.stem)
def test_the_attention_of_a_wild_file_is_found(file: Path) -> None:
    """Of the others the name says it, and says it of one alone."""
    found = candidates(file.read_text("utf-8"))[0].name
    assert found == CHOSEN.get(file.stem, found) and (file.stem in CHOSEN or "ttention" in found)
    assert not found.endswith(("Block", "EncoderLayer")) and "DotProduct" not in found


PART = 8  # about as many files as there is time for
# Right, and not judged so far: a decoupled rotary part, windows that want H and W of their own
NOT_YET = {"mla.py", "local_window.py"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", sorted(path.parent for path in WILD.glob("*/expected.csv")), ids=os.path.basename
)
def test_a_part_of_the_wild_is_as_expected(folder: Path) -> None:
    """`make check-wild` runs all of it."""
    expected = expected_in(folder)
    met = meet(folder, expected[:: max(1, len(expected) // PART)])
    assert [line for line in score(met)[7:] if line.split()[0] not in NOT_YET] == []


def test_every_table_of_the_wild_fits_its_folder() -> None:
    for table in WILD.glob("*/expected.csv"):
        expected = expected_in(table.parent)
        with table.open(encoding="utf-8", newline="") as lines:
            assert all(row["why"] for row in csv.DictReader(lines))
        assert sum(one.right for one in expected) * 3 > len(expected)  # praise is tried as often as blame
