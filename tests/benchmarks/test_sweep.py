"""Lengths: what the sweep stores, and that table and picture are made of it. No test here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cases.maps import BY_HEAD, DENSE
from benchmarks.cases.second_pass import CUDNN
from benchmarks.registry import OURS

import headwise as hw
from benchmarks import lengths, page, peers, report, runner, sweep, verdicts

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"B": 1, "H": 3, "D": 8, "cells": 4}
EAGER = (DENSE, BY_HEAD)


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep.runner, "LEAST_SAMPLE", 0.0)
    monkeypatch.setattr(sweep, "TURNS", 2)


# Measuring


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The arm and the name of every value that is compared with the truth."""
    noted: list[tuple[str, str]] = []

    def check(*args: Any) -> list[verdicts.Checked]:
        actual = verdicts.check(*args)
        noted.extend((value.arm, value.value) for value in actual)
        return actual

    monkeypatch.setattr(runner, "check", check)
    return noted


def test_a_length_is_checked_timed_and_stored_as_soon_as_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, judged: list[tuple[str, str]]
) -> None:
    stored_at: list[int] = []
    write = report.write
    monkeypatch.setattr(
        report, "write", lambda path, actual: (stored_at.append(len(actual["records"])), write(path, actual))
    )
    actual = sweep.run("cpu", (8, 16), tmp_path, "abc", SMALL)
    assert stored_at == [1, 2]
    assert report.load(sweep.file_in(tmp_path, "cpu")) == json.loads(json.dumps(actual))
    assert actual["run"]["commit"] == "abc" and "cpu" in actual["run"]["machine"]
    assert [record["sizes"]["L"] for record in actual["records"]] == [8, 16]
    for record in actual["records"]:
        assert record["status"] == "ok", record.get("reason")
        assert set(record["median_ms"]) == {OURS, CUDNN, *EAGER}
        assert set(record["check"]) == {OURS, CUDNN, *EAGER}
        assert record["out_of_memory"] == {}
    assert {value for _, value in judged} >= {
        "entropy",
        "received from 0",
        "pooled from 0",
        "output from 0",
    }


def test_beyond_what_float64_can_judge_a_row_of_cells_and_the_sums_are_checked(
    monkeypatch: pytest.MonkeyPatch, judged: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(sweep, "WHOLE_HEAD", 8)
    (record,) = sweep.run("cpu", (16,), None, None, SMALL)["records"]
    assert record["status"] == "ok", record.get("reason")
    assert {value for arm, value in judged if arm == OURS} == {
        "last row of cells from 0",
        "in the picture",
        "received",
    }


def test_a_picture_that_loses_weight_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "WHOLE_HEAD", 8)
    honest = hw.AttentionMap.statistics

    def loses(self: hw.AttentionMap, *names: str, **options: Any) -> Any:
        actual = honest(self, *names, **options)
        actual["pooled"][:, 0, 0] = 0
        return actual

    monkeypatch.setattr(hw.AttentionMap, "statistics", loses)
    (record,) = sweep.run("cpu", (16,), None, None, SMALL)["records"]
    assert record["status"] == "failed" and "in the picture is off by" in record["reason"]


def test_what_cannot_fit_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    one_head = peers.bytes_of_statistics(1, 16, torch.float32)
    monkeypatch.setattr(sweep, "MOST_BYTES", one_head)
    first, second = sweep.run("cpu", (16, 32), None, None, SMALL)["records"]
    assert first["out_of_memory"] == {DENSE: 3 * one_head}
    assert set(first["median_ms"]) == {OURS, CUDNN, BY_HEAD}
    assert second["out_of_memory"] == {DENSE: 12 * one_head, BY_HEAD: 4 * one_head}
    assert set(second["median_ms"]) == {OURS, CUDNN}


def test_what_dies_when_tried_is_out_of_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 80 GiB")

    monkeypatch.setattr(peers, "dense_statistics", dies)
    (record,) = sweep.run("cpu", (16,), None, None, SMALL)["records"]
    assert record["status"] == "ok", record.get("reason")
    assert set(record["out_of_memory"]) == set(EAGER)
    assert set(record["median_ms"]) == {OURS, CUDNN}


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, complaint in (
        (["--longest", "1000"], "got 1000"),
        (["--plot", "--out", str(tmp_path)], f"{tmp_path} has none; run without --plot"),
    ):
        with pytest.raises(SystemExit, match="2"):
            sweep.main(arguments)
        assert complaint in capsys.readouterr().err


# Table and picture


def made_up() -> dict[str, Any]:
    """Results of a machine that never was, for three lengths: the eager routes end, one after the other."""
    times = ({DENSE: 3.0, BY_HEAD: 4.0}, {BY_HEAD: 16.0}, {})
    records = []
    for length, eager in zip((1024, 4096, 16384), times, strict=True):
        arms = {OURS: length / 1000, CUDNN: length / 2000, **eager}
        needs = sweep.needed({**sweep.SIZES, "L": length}, torch.bfloat16)
        records.append(
            {
                "sizes": {**sweep.SIZES, "L": length},
                "status": "ok",
                "median_ms": arms,
                "ratio": {"of_medians": 2.0},
                "memory": {arm: {"extra_bytes": length * 2**12} for arm in arms},
                "unavailable": {},
                "out_of_memory": {arm: needs[arm] for arm in EAGER if arm not in arms},
            }
        )
    return {
        "schema": report.SCHEMA,
        "device": "cuda",
        "run": {
            "started": "2026-01-31T12:00:00Z",
            "machine": {"cpu": "A processor", "threads": 2, "gpu": "A GPU"},
            "versions": {"torch": "2.13"},
            "commit": "0123456789abcdef",
            "dirty": False,
            "sizes": sweep.SIZES,
        },
        "first_call": {"sizes": {"L": 4096}, "first_seconds": 12.5, "second_seconds": 0.0025},
        "records": records,
    }


def one_everyday_call() -> dict[str, Any]:
    """Everyday calls measured on the same machine: a section of the page begins with them."""
    record = {
        "name": "call_full",
        "description": "attention of 16 tokens, full",
        "device": "cuda",
        "status": "ok",
        "sizes": {},
        "ours": OURS,
        "median_ms": {OURS: 1.0, "SDPA": 2.0},
        "ratio": {"median": 0.5},
        "peer_against_itself": {"middle_90": [1.0, 1.0]},
    }
    return report.merge(None, {**made_up()["run"], "quick": False}, record)


def test_the_table_says_what_was_measured_and_what_would_not_fit() -> None:
    lines = lengths.table(made_up()).splitlines()
    assert "B1 H8 D128, causal; torch 2.13, commit 0123456789, 2026-01-31." in lines
    rows = [line for line in lines if line.startswith(("| 1", "| 4"))]
    assert rows == [
        "| 1,024 | 1.02 ms, 4 MiB | 512 µs, 4 MiB | 2.00 | 3 ms, 4 MiB | 4 ms, 4 MiB |",
        "| 4,096 | 4.1 ms, 16 MiB | 2.05 ms, 16 MiB | 2.00 | out of memory: 1.2 GiB | 16 ms, 16 MiB |",
        "| 16,384 | 16.4 ms, 64 MiB | 8.19 ms, 64 MiB | 2.00 | out of memory: 20.0 GiB "
        "| out of memory: 2.5 GiB |",
    ]
    assert "took 12.5 s (4,096 tokens), the second 2.5 ms." in lines[-1]
    failed = made_up()
    failed["records"][0] = {"sizes": {"L": 1024}, "status": "failed"}
    assert "| 1,024 | failed its check | | | | |" in lengths.table(failed)


def test_table_and_picture_are_drawn_from_a_file_of_results(tmp_path: Path) -> None:
    path = sweep.file_in(tmp_path, "cuda")
    report.write(path, made_up())
    documentation = tmp_path / "benchmarks.md"
    documentation.write_text(f"before\n{page.MARKERS[0]}\nstale\n{page.MARKERS[1]}\nafter\n")
    stored = report.load(path)
    assert stored is not None
    report.write(tmp_path / "everyday_cuda.json", one_everyday_call())
    sweep.draw(stored, tmp_path, tmp_path)
    text = documentation.read_text("utf-8")
    assert lengths.table(made_up()) in text
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
    drawn = (tmp_path / "lengths.png").read_bytes()
    assert drawn[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(drawn[16:20], "big") == 1800


def test_the_picture_names_each_curve_once_and_marks_where_memory_ended() -> None:
    figure = lengths.picture(made_up())
    assert len(figure.axes) == 2
    for axes in figure.axes:
        names = [text.get_text() for text in axes.texts]
        assert sorted(names) == sorted([*lengths.SHORT.values(), "\u2716 longer: out of memory"])
        crosses = [line for line in axes.lines if line.get_marker() == "X"]
        assert sorted(line.get_xdata()[0] for line in crosses) == [1024, 4096]


def test_the_stored_lengths_have_their_picture() -> None:
    assert report.load(sweep.file_in(report.RESULTS, "cuda")) is not None
    assert (ROOT / "docs" / "lengths.png").exists()
