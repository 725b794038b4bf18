"""Rules on a GPU: cells, peers, merging, the table. Tiny, on a CPU; no test here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.registry import OURS
from benchmarks.rule_cell import Cell

import headwise as hw
from benchmarks import flex, report, rule_cell, rule_table, rules

SMALL = {"H": 2, "D": 16, "L": 24}


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "WINDOW", 5)
    monkeypatch.setattr(flex, "REACH", 3)


# Cells


@pytest.mark.thinned(4, slow=2)
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("rule", flex.RULES)
def test_every_rule_is_right_and_agrees_with_its_peer(rule: str, way: str) -> None:
    record = rule_cell.measure(Cell(way, rule, SMALL), "cpu", turns=1)
    assert record["status"] == "ok", record["reason"]
    assert set(record["check"]) >= ({"output"} if way == "forward" else {"output", "dq", "dk", "dv"})
    assert set(record["median_us"]) == set(record["felt_us"]) == {OURS, record["peer"]}
    assert set(record["peer_against_itself"]) == {"median", "middle_90", "median_95"}
    assert record["backend"] in ("flash", "tiles", "plain")


def test_a_forward_with_statistics_is_checked_against_their_formulas() -> None:
    record = rule_cell.measure(Cell("statistics", "causal", SMALL), "cpu", turns=1)
    if record["status"] == "failed":  # until attention has the keyword
        assert "statistics" in record["reason"]
    else:
        assert set(record["check"]) == {"output", *rule_cell.STATISTICS}


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "CAP", 1.0)
    right = flex.plain
    monkeypatch.setattr(flex, "plain", lambda q, k, v, options: right(q, k, v, {**options, "softcap": 2.0}))
    record = rule_cell.measure(Cell("forward", "softcap", SMALL), "cpu", turns=1)
    assert record["status"] == "failed" and "output off by" in record["reason"]
    assert "median_us" not in record


def test_a_peer_that_says_something_else_fails_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    other = [{"liar": lambda: flex.Peer("liar", lambda q, k, v: v + 1)}]
    monkeypatch.setattr(flex, "peers", lambda message, q, k: other)
    record = rule_cell.measure(Cell("forward", "causal", SMALL), "cpu", turns=1)
    assert record["status"] == "failed" and record["reason"].startswith("ValueError: liar and ours differ")


def test_the_second_choice_runs_where_the_first_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> flex.Peer:
        raise RuntimeError("no such instruction")

    right = flex.Peer("second", lambda q, k, v: flex.plain(q, k, v, {"causal": True}))
    monkeypatch.setattr(flex, "peers", lambda message, q, k: [{"first": broken, "second": lambda: right}])
    record = rule_cell.measure(Cell("forward", "causal", SMALL), "cpu", turns=1)
    assert record["peer"] == "second" and record["unavailable"] == {
        "first": "RuntimeError: no such instruction"
    }


# FlexAttention's side, as it runs without compiling


def _eagerly(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    q, k, v = torch.randn(3, flex.sequences(rule), 2, 24, 16).unbind(0)
    message = flex.RULES[rule](q)
    expected = hw.attention(q, k, v, **message.options)[0]
    for score in [score for term in message.scores for score in term.values()]:
        torch.testing.assert_close(flex.Flex(message, score, q, k)(q, k, v), expected)
        torch.testing.assert_close(flex.Flex(message, score, q, k).remade(q, k, v), expected)
    if message.added is not None:
        arguments = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=message.added)
        torch.testing.assert_close(arguments, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", [rule for rule in flex.RULES if rule not in ("causal", "full")])
def test_the_rule_that_flexattention_is_told_is_ours(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _eagerly(rule, monkeypatch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rule", ["documents", "padding", "dense"])
def test_a_mask_that_changes_with_the_batch_is_charged(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    monkeypatch.setattr(
        flex,
        "peers",
        lambda message, q, k: [{flex.FLEX: lambda: flex.Peer(flex.FLEX, flex.Flex(message, None, q, k))}],
    )
    record = rule_cell.measure(Cell("forward", rule, SMALL), "cpu", turns=1)
    assert record["status"] == "ok", record["reason"]
    assert set(record["charged_us"]) == {OURS, flex.FLEX} and record["charged_ratio"] > 0
    assert set(record["block_mask_seconds"]) == {"first", "second"}


# What is stored


def test_a_cell_that_breaks_is_recorded_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(q: torch.Tensor) -> flex.SizedRule:
        raise RuntimeError("out of luck")

    monkeypatch.setitem(flex.RULES, "alibi", broken)
    monkeypatch.setattr(
        rules, "choose", lambda only, quick: [Cell("forward", x, SMALL) for x in ("alibi", "full")]
    )
    assert rules.main(["--device", "cpu", "--quick", "--out", str(tmp_path)]) == 1
    stored = json.loads(rule_table.file_in(tmp_path, "cpu").read_text())
    assert [record["status"] for record in stored["cases"].values()] == ["failed", "ok"]
    assert list(stored["means"]) == ["forward_full"]
    captured = capsys.readouterr()
    assert "FAILED  RuntimeError: out of luck" in captured.out and "1 of 2 failed" in captured.err


# What is said


def made_up(cell: Cell, **other: Any) -> dict[str, Any]:
    """A record of that cell."""
    record = {
        "name": cell.name,
        "way": cell.way,
        "rule": cell.rule,
        "group": f"{cell.way}_{cell.rule}",
        "sizes": {"B": 1, **cell.sizes},
        "device": "cuda",
        "status": "ok",
        "backend": "triton",
        "median_us": {OURS: 50.0, "FlexAttention": 100.0, "SDPA": 200.0},
        "peer": "FlexAttention",
        "ratio": 0.5,
        "ratios": {"FlexAttention": 0.5, "SDPA": 0.25},
        "felt_ratio": 0.75,
        "charged_ratio": None,
    }
    return {**record, **other}


def stored_up(records: list[dict[str, Any]]) -> dict[str, Any]:
    """A file of them."""
    run = {
        "started": "2026-01-31T12:00:00Z",
        "machine": {"gpu": "A GPU"},
        "versions": {"torch": "2.11"},
        "commit": "0123456789abcdef",
        "dirty": False,
        "quick": False,
    }
    actual: dict[str, Any] | None = None
    for record in records:
        actual = report.merge(actual, run, record)
    assert actual is not None
    return actual


def test_means_are_geometric_and_leave_out_what_failed() -> None:
    short, long = (Cell("forward", "alibi", {"H": 16, "D": 128, "L": L}) for L in (1024, 4096))
    failed = made_up(Cell("forward", "alibi", SMALL), status="failed", reason="wrong")
    actual = rule_table.means([made_up(short), made_up(long, ratio=2.0, charged_ratio=0.1), failed])
    assert actual == {
        "forward_alibi": {
            "cells": 2,
            "ratio": 1.0,
            "felt": 0.75,
            "charged": 0.1,
            "beside": {"FlexAttention": 0.5, "SDPA": 0.25},
        }
    }


def test_the_table_has_a_row_for_each_rule_with_the_fastest_peer() -> None:
    short, long = (Cell("forward", "alibi", {"H": 16, "D": 128, "L": L}) for L in (1024, 4096))
    failed = made_up(Cell("forward", "full", SMALL), status="failed", reason="wrong")
    table = rule_table.table(stored_up([made_up(long, ratio=2.0), made_up(short), failed]))
    assert "bfloat16, torch 2.11, commit 0123456789, 2026-01-31." in table
    assert "| ALiBi, causal, D128 | 4,096 | 50 µs | FlexAttention | **1.00** |" in table.splitlines()
    assert "full" not in table
    assert rule_table.table(stored_up([failed])) == rule_table.NOTHING
