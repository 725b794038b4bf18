"""The benchmarks: every case is right at a tiny size, the arithmetic of ratios, and what is stored.

No test here looks at a time: timers are made up, or only asked whether they were called.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.cases import choose, every, second_pass
from benchmarks.registry import Apart, Case, Prepared
from benchmarks.runner import (
    compare,
    median_interval,
    run_case,
)
from benchmarks.verdicts import check
from torch import Tensor

import headwise as hw
from benchmarks import __main__ as command
from benchmarks import (
    machine,
    memory,
    page,
    readme,
    registry,
    report,
    truths,
)
from benchmarks import problem as problems
from headwise import reference

ROOT = Path(__file__).resolve().parents[2]
CASES = every()


# The cases


def test_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    with pytest.raises(ValueError, match=f"{CASES[0].name} exists already"):
        registry.register(CASES[0])


@pytest.mark.thinned(8, slow=2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_passes_its_check_at_a_tiny_size(case: Case) -> None:
    """Cases for a GPU, too: on a CPU the backends they pin may be missing, ours and the peer never are."""
    timed: list[str] = []
    record = run_case(replace(case, memory=False), "cpu", 2, tiny=True, timer=logging_timer(timed))
    assert record["status"] == "ok", record.get("reason")
    assert set(record["check"]) >= {case.ours} | ({case.peer} - {None})
    assert len(timed) > 0


@pytest.mark.parametrize("spoilt", ["pooled", "received"])
def test_far_cells_and_keys_are_judged_at_their_own_size(spoilt: str) -> None:
    """In bfloat16 half of a picture could be 0: one rounding of its first cell was as much as any other."""
    sizes = {"B": 1, "H": 2, "L": 256, "D": 16, "cells": 64}
    prepared = second_pass.statistics(sizes, torch.device("cpu"), torch.bfloat16)
    truth, plain = prepared.truth(), prepared.yardstick
    assert plain is not None
    result = dict(prepared.arms[registry.OURS]())

    def wrong() -> list[str]:
        actual = {registry.OURS: prepared.part(result)}
        checked = check(truth, actual, registry.OURS, None, torch.bfloat16, yardstick=plain())
        return [comparison.value for comparison in checked if not comparison.ok]

    assert wrong() == []
    result[spoilt] = result[spoilt].clone()
    result[spoilt][:, :, result[spoilt].shape[2] // 2 :] = 0
    assert wrong() == [f"{spoilt} from {8 if spoilt == 'pooled' else 64}"]


# The judge


def test_beside_a_peer_a_yardstick_counts_where_it_is_further_off() -> None:
    truth = {"near": torch.tensor([1.0]), "far": torch.tensor([1.0])}
    actual = {
        registry.OURS: {name: value + 0.02 for name, value in truth.items()},
        "peer": {name: value + 0.001 for name, value in truth.items()},
    }
    checked = check(
        truth, actual, registry.OURS, "peer", torch.bfloat16, 2.0, yardstick={"far": torch.tensor([1.015])}
    )
    assert {comparison.value: comparison.ok for comparison in checked if comparison.arm == registry.OURS} == {
        "near": False,
        "far": True,
    }


RULES: dict[str, tuple[problems.Visibility | None, hw.Mask]] = {
    "full": (None, hw.Mask()),
    "causal": (problems.causal, hw.Mask.causal()),
    "window": (problems.window(3), hw.Mask.window(3)),
    "padding": (problems.padding(torch.tensor([7, 11])), hw.Mask.padding([7, 11])),
    "documents": (
        problems.all_of(problems.causal, problems.documents(torch.tensor([0] * 4 + [1] * 7))),
        hw.Mask.causal() & hw.Mask.documents([0] * 4 + [1] * 7),
    ),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["uncapped", "capped"])
def test_the_truth_agrees_with_the_paper(rule: str, sinks: Tensor | None, softcap: float | None) -> None:
    visible, mask = RULES[rule]
    sizes = {"B": 2, "H": 4, "Hk": 2, "T": 5, "S": 11, "D": 3}
    made = problems.make(sizes, torch.device("cpu"), torch.float64, visible, softcap)
    problem = replace(made, sinks=sinks)
    output, weights, _ = reference.attention(*problem.qkv, mask=mask, sinks=sinks, softcap=softcap)
    rows = torch.tensor([0, 2, 4])
    torch.testing.assert_close(problem.output(rows), output[:, :, rows])
    torch.testing.assert_close(problem.weights(rows)[1], weights[:, :, rows])
    torch.testing.assert_close(problem.weights(rows, head=3)[1], weights[:, 3:, rows])


def test_the_truth_about_entropys_gradients_is_what_autograd_finds() -> None:
    sizes = {"B": 2, "H": 3, "L": 13, "D": 5}
    problem = problems.make(sizes, torch.device("cpu"), torch.float64, problems.causal)
    q, k, _ = (x.requires_grad_() for x in problem.qkv)
    p = problem.weights(torch.arange(13))[1]
    entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
    grad = torch.randn(2, 3, 13, dtype=torch.float64)
    dq, dk = torch.autograd.grad(entropy, (q, k), grad)
    for heads in ([0, 1, 2], [2]):
        actual = truths.entropy_gradients(problem, grad, heads)
        torch.testing.assert_close(actual["entropy"], entropy[:, heads])
        torch.testing.assert_close(actual["dq"], dq[:, heads])
        torch.testing.assert_close(actual["dk"], dk[:, heads])


def values(*numbers: float) -> dict[str, Tensor]:
    return {"x": torch.tensor(numbers)}


def test_ours_may_be_off_by_twice_the_peer_and_a_rounding() -> None:
    truth = {"x": torch.tensor([1.0, -4.0], dtype=torch.float64)}
    actual = {"ours": values(1.000003, -4), "peer": values(1.000002, -4), "other": values(1.00001, -4)}
    assert all(comparison.ok for comparison in check(truth, actual, "ours", "peer", torch.float32))
    actual["ours"] = values(1.00001, -4)
    wrong = [
        comparison for comparison in check(truth, actual, "ours", "peer", torch.float32) if not comparison.ok
    ]
    assert [comparison.arm for comparison in wrong] == ["ours"]
    assert wrong[0].error == pytest.approx(1e-5, rel=0.05)
    assert wrong[0].allowed == pytest.approx(2 * (2e-6 + 4 * 2**-23), rel=0.05)


def test_a_peer_that_computes_something_else_excuses_nobody() -> None:
    truth = {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    actual = {"ours": values(1.5, 2), "peer": values(3, 2)}
    assert not any(comparison.ok for comparison in check(truth, actual, "ours", "peer", torch.float32))


@pytest.mark.parametrize("bad", [values(math.nan, 2), values(1, 2, 3), {}], ids=["nan", "shape", "missing"])
def test_what_cannot_be_compared_is_wrong(bad: dict[str, Tensor]) -> None:
    truth = {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    actual = {"ours": bad, "peer": values(1, 2)}
    results = {
        comparison.arm: comparison.ok for comparison in check(truth, actual, "ours", "peer", torch.float32)
    }
    assert results == {"ours": False, "peer": True}


# The runner


def logging_timer(log: list[str]) -> Any:
    """A timer that notes it was called, calls the arm and makes the time up."""

    def timer(arm: Any, loops: int) -> float:
        log.append("sample")
        arm()
        return 0.25

    return timer


def made_up(arms: dict[str, Any], truth: float = 1.0, **changes: Any) -> Case:
    """A case of arms that return numbers."""

    def setup(*_: object) -> Prepared:
        exact = {"x": torch.tensor([truth], dtype=torch.float64)}
        return Prepared(arms, lambda: exact, lambda actual: {"x": torch.tensor([float(actual)])})

    options: dict[str, Any] = {"peer": "peer", "ours": "ours", **changes}
    return Case("made_up", "made up", setup, {"L": 8}, tiny={}, **options)


def test_a_ratio_is_the_median_within_a_turn_with_its_spread() -> None:
    below = [1.0, 1.0, 2.0, 1.0, 1.0]
    ratio = compare([2.0, 2.0, 4.0, 2.0, 9.0], below)
    assert ratio.median == 2.0
    assert ratio.middle_90 == pytest.approx((2.0, 7.6))
    same = compare(below, below)
    assert (same.median, same.middle_90, same.median_95) == (1.0, (1.0, 1.0), (1.0, 1.0))


@pytest.mark.parametrize(("count", "left_out"), [(1, 0), (5, 0), (9, 1), (30, 9), (101, 40)])
def test_the_median_lies_between_order_statistics(count: int, left_out: int) -> None:
    """Known table: of 30 values the tenth and the twenty-first hold the median with 95% confidence."""
    numbers = [float(i) for i in range(count)]
    assert median_interval(numbers[::-1]) == (left_out, count - 1 - left_out)


def test_a_wrong_arm_is_refused_and_never_timed() -> None:
    timed: list[str] = []
    case = made_up({"ours": lambda: 1.1, "peer": lambda: 1.0})
    record = run_case(case, "cpu", 3, timer=logging_timer(timed))
    assert record["status"] == "failed"
    assert "ours: x is off by 0.1" in record["reason"]
    assert timed == [] and "ratio" not in record and "median_ms" not in record
    assert "FAILED" in report.line(record)


def beside_something_else(theirs: float, its_truth: float) -> Case:
    """Ours and, beside it, a peer that computes something else."""

    def number(actual: float) -> dict[str, Tensor]:
        return {"x": torch.tensor([float(actual)])}

    def exactly(value: float) -> Any:
        return lambda: {"x": torch.tensor([value], dtype=torch.float64)}

    def setup(*_: object) -> Prepared:
        judge = Apart(exactly(its_truth), number)
        arms = {"ours": lambda: 1.0, "peer": lambda: theirs}
        return Prepared(arms, exactly(1.0), number, lambda: values(1.0), {"peer": judge})

    return Case("aside", "made up", setup, {"L": 8}, tiny={}, peer="peer", ours="ours")


def test_a_peer_that_computes_something_else_has_a_truth_of_its_own() -> None:
    record = run_case(beside_something_else(7.0, 7.0), "cpu", 3, timer=logging_timer([]))
    assert record["status"] == "ok", record.get("reason")
    assert set(record["check"]) == {"ours", "peer"}
    assert record["ratio"]["median"] == 1.0


def test_a_peer_that_computes_something_else_must_be_right_about_it() -> None:
    record = run_case(beside_something_else(7.1, 7.0), "cpu", 3, timer=logging_timer([]))
    assert record["status"] == "failed"
    assert "peer: x is off by 0.1" in record["reason"]


def test_a_case_that_breaks_is_reported() -> None:
    def breaks() -> float:
        raise RuntimeError("no such kernel\nand a long story")

    record = run_case(made_up({"ours": breaks, "peer": lambda: 1.0}), "cpu", 3)
    assert (record["status"], record["reason"]) == ("failed", "RuntimeError: no such kernel")


def test_an_arm_beside_the_two_may_be_missing_with_a_reason() -> None:
    def missing() -> float:
        raise RuntimeError("not on this machine")

    arms = {"ours": lambda: 1.0, "peer": lambda: 1.0, "third": missing, "fourth": lambda: 1.0}
    record = run_case(made_up(arms), "cpu", 3, timer=logging_timer([]))
    assert record["status"] == "ok"
    assert record["unavailable"] == {"third": "RuntimeError: not on this machine"}
    assert set(record["ratio_to_others"]) == {"fourth"}
    assert record["ratio"]["median"] == record["peer_against_itself"]["median"] == 1.0
    assert "third: left out" in report.line(record)


# Memory


@pytest.mark.slow
def test_extra_memory_is_seen_in_every_call_and_without_a_thread() -> None:
    """torch's allocator on ARM keeps what is freed: a second call hid in what the first one left, 0 bytes.

    And what was let go of before the call's end was seen only if a sampling thread was scheduled meanwhile.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("by design: memory on a CPU is measured on Linux only")
    script = """
        import json, torch
        from benchmarks import memory
        kept = lambda: torch.ones(64 * 2**20, dtype=torch.uint8)
        let_go = lambda: kept().numel()
        found = [memory.peak_of(arm) for arm in (kept, let_go, kept)]
        memory._reset_mark = lambda: False
        print(json.dumps(found + [memory.peak_of(arm) for arm in (kept, let_go, kept)]))
    """
    environment = {**os.environ, **memory.GIVES_BACK}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
    for measured in json.loads(done.stdout):
        assert 0.9 * 2**26 < measured["extra_bytes"] < 1.5 * 2**26, done.stdout


@pytest.mark.slow
def test_memory_is_measured_in_a_fresh_process() -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("by design: memory on a CPU is measured on Linux only")
    measured = memory.in_fresh_process("dense_L1024", registry.OURS, tiny=True)
    assert measured["how"] in ("VmHWM", "VmHWM over ballast")
    assert measured["extra_bytes"] >= 0
    failed = memory.in_fresh_process("dense_L1024", "no such arm", tiny=True)
    assert failed["extra_bytes"] is None and "no such arm" in failed["how"]


# What is stored


def run_of(started: str = "2026-01-31T12:00:00Z", **changes: Any) -> dict[str, Any]:
    return {
        "started": started,
        "machine": {"cpu": "A processor", "cores": 2, "threads": 2},
        "versions": {"python": "3.11", "torch": "2.13", "triton": None, "headwise": "0.1.0"},
        "commit": "0123456789abcdef",
        "dirty": False,
        "sources": "fedcba98",
        "repeats": 30,
        "quick": False,
        **changes,
    }


def record_of(name: str = "made_up", **changes: Any) -> dict[str, Any]:
    case = replace(made_up({"ours": lambda: 1.0, "peer": lambda: 1.0}, headline=True), name=name)
    return {**run_case(case, "cpu", 6, timer=logging_timer([])), **changes}


def test_results_survive_the_file(tmp_path: Path) -> None:
    path = report.file_for(tmp_path / "new", "cpu", "2026-01-31T12:00:00Z")
    assert path.name == "cpu_202601.json"
    stored = report.add(path, run_of(), record_of())
    assert report.load(path) == json.loads(json.dumps(stored))
    assert report.load_all(path.parent) == [report.load(path)]
    assert [each.name for each in path.parent.iterdir()] == ["cpu_202601.json"]


def test_a_run_of_some_cases_leaves_the_others() -> None:
    first, second = run_of(), run_of("2026-01-31T13:00:00Z")
    whole = report.merge(None, first, record_of("a"))
    whole = report.merge(whole, first, record_of("b"))
    whole = report.merge(whole, second, record_of("a"))
    assert {name: case["run"] for name, case in whole["cases"].items()} == {
        "a": second["started"],
        "b": first["started"],
    }
    whole = report.merge(whole, second, record_of("b"))
    assert list(whole["runs"]) == [second["started"]]


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cpu_202601.json").write_text('{"schema": 99}')
    with pytest.raises(ValueError, match="got 99"):
        report.load_all(tmp_path)


def test_the_machine_is_described_without_its_paths() -> None:
    described = machine.describe("cpu")
    assert described["machine"]["threads"] == torch.get_num_threads()
    assert described["versions"]["torch"] == torch.__version__
    assert str(ROOT) not in json.dumps(described)
    assert machine.describe("cpu", "abc")["commit"] in ("abc", described["commit"])


def test_the_command_runs_and_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--only", "attention_full_L256", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    (stored,) = report.load_all(tmp_path)
    record = stored["cases"]["attention_full_L256"]
    assert stored["runs"][record["run"]]["quick"] is True
    assert record["sizes"]["L"] < 256
    assert "attention_full_L256" in capsys.readouterr().out


def test_ctrl_c_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = command.run_case

    def stops(case: Case, *rest: Any) -> dict[str, Any]:
        if case.name != "attention_full_L256":
            raise KeyboardInterrupt
        return real(case, *rest)

    monkeypatch.setattr(command, "run_case", stops)
    assert command.main(["--quick", "--only", "attention_full_L*", "--out", str(tmp_path)]) == 130
    assert list(report.load_all(tmp_path)[0]["cases"]) == ["attention_full_L256"]


def test_parts_are_all_of_it_and_no_case_twice(capsys: pytest.CaptureFixture[str]) -> None:
    parts = [command.part_of(CASES, f"{number}/3") for number in (1, 2, 3)]
    names = [case.name for part in parts for case in part]
    assert sorted(names) == sorted(case.name for case in CASES)
    for part in ("0/3", "4/3", "2", "a/b", "1/"):
        with pytest.raises(SystemExit, match="2"):
            command.main(["--part", part, "--quick"])
        assert f"got {part}; 2/3 is the second third" in capsys.readouterr().err


def test_what_is_stored_of_this_commit_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []

    def made(case: Case, *rest: Any) -> dict[str, Any]:
        done.append(case.name)
        failed = case.name.endswith("L512") and len(done) == 2
        return record_of(case.name, **({"status": "failed", "reason": "wrong"} if failed else {}))

    monkeypatch.setattr(command, "run_case", made)
    arguments = ["--quick", "--only", "attention_full_L*", "--out", str(tmp_path), "--missing"]
    names = [case.name for case in choose("attention_full_L*", "cpu")]
    assert command.main([*arguments, "--commit", "abcdefabcdef"]) == 1 and done == names
    assert command.main([*arguments, "--commit", "abcdefa"]) == 0 and done[len(names) :] == [
        "attention_full_L512"
    ]
    assert command.main([*arguments, "--commit", "1234567", "--seconds", "0"]) == 0
    assert len(done) == len(names) + 1
    assert f"out of time, skipped: {', '.join(names)}" in capsys.readouterr().err


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--only", "no_such_case"])
    assert "no_such_case" in capsys.readouterr().err
    assert command.main(["--list"]) == 0
    assert set(capsys.readouterr().out.split()) >= {case.name for case in CASES}


# README and docs/benchmarks.md


def test_the_table_is_made_from_results_alone() -> None:
    measured = {"peer": {"extra_bytes": None}, "ours": {"extra_bytes": 3 * 2**20}}
    run = run_of(machine={"gpu": "A card"})
    whole = report.merge(None, run, record_of("a", device="cuda", memory=measured))
    whole = report.merge(whole, run, record_of("hidden", headline=False, description="not shown"))
    whole = report.merge(whole, run, record_of("broken", status="failed", description="broke"))
    table = readme.statistics_table([{**whole, "device": "cuda"}])
    assert "torch 2.13, commit 0123456789, 2026-01-31." in table
    row = next(line for line in table.splitlines() if line.startswith("| made up"))
    assert row == "| made up | L8 | 250 ms | peer: 250 ms | **1.00** | 3 MiB, not measured |"
    assert "not shown" not in table and "broke" not in table
    assert readme.statistics_table([]) == ""


def test_a_table_is_of_one_commit_the_most_complete_and_then_the_newest() -> None:
    two_cases = report.merge(None, run_of(), record_of("a", description="old"))
    two_cases = report.merge(two_cases, run_of(), record_of("b", description="old"))
    newer = run_of("2026-02-01T00:00:00Z", commit="b" * 40)
    one_case = report.merge(None, newer, record_of("a", description="new"))
    tiny = report.merge(None, run_of("2026-03-01T00:00:00Z", quick=True), record_of(description="tiny"))

    def described(*results: dict[str, Any]) -> list[str]:
        return [record["description"] for record in readme.complete("cpu", results)]

    assert described(two_cases, one_case, tiny) == ["old", "old"]
    assert (
        described(two_cases, report.merge(one_case, newer, record_of("b", description="new"))) == ["new"] * 2
    )
    assert described(tiny) == [] and readme.complete("cuda", [two_cases]) == []


def test_text_is_written_between_the_markers(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    begin, end = page.MARKERS
    path.write_text(f"before\n{begin}\nstale\n{end}\nafter\n")
    readme.put(path, "new\n", begin, end)
    text = path.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "stale" not in text
    assert readme.table_in(text, begin, end) == "new\n"
    path.write_text("no markers")
    with pytest.raises(ValueError, match="must contain the markers"):
        page.write(tmp_path, path)


def test_a_ratio_never_lies_outside_its_own_interval() -> None:
    """Median over median stood beside the interval of the median of ratios: 1.10 in [1.04, 1.08]."""
    above, below = [4.0, 1.0, 9.0, 3.0, 8.0, 2.0, 7.0, 6.0], [1.0, 5.0, 2.0, 9.0, 3.0, 7.0, 8.0, 4.0]
    for turn in range(8):
        actual = compare(above[turn:] + above[:turn], below)
        low, high = actual.median_95
        assert low <= actual.median <= high
    old = {"of_medians": 1.1, "median_95": [1.04, 1.08]}
    assert (report.ratio_text(old), report.ratio_text({**old, "median": 1.06})) == (
        "1.10",
        "1.06 [1.04, 1.08]",
    )


def test_the_page_and_readme_show_what_the_stored_results_say() -> None:
    """Red after new results: `python -m benchmarks --readme` writes README's line and docs/benchmarks.md."""
    shown = readme.table_in(page.PAGE.read_text("utf-8"), *page.MARKERS)
    assert shown == page.sections()
    line = readme.table_in((ROOT / "README.md").read_text("utf-8"), *readme.SPEED)
    assert line == readme.speed(report.load_all()) != readme.NOTHING


def test_every_stored_result_passed_its_check_and_is_shown_or_cited() -> None:
    stored = [report.load(path) for path in sorted(report.RESULTS.glob("*.json"))]
    cases = [case for whole in stored if whole and "cases" in whole for case in whole["cases"].values()]
    assert len(cases) > 600 and all(case["status"] == "ok" for case in cases)
    names = {path.name.rpartition("_")[0] for path in report.RESULTS.glob("*.json")}
    assert names == {"cuda", "everyday", "everyday_x86", "pages", "rules", "sweep"}


def test_the_line_of_speed_tells_what_was_measured_and_nothing_else() -> None:
    """It said 4.16 times as fast, of bool masks: with the mask that torch makes, ours was a little slower."""
    run = run_of(machine={"cpu": "A processor", "threads": 2, "gpu": "A card"})
    case = record_of(
        readme.STATISTICS,
        sizes={"H": 3, "L": 5000},
        median_ms={"headwise": 2.0, "eager": 7.0},
        ours="headwise",
        peer="eager",
        memory={"headwise": {"extra_bytes": 5 * 2**20}, "eager": {"extra_bytes": None}},
        run="one",
    )

    def stored(case: dict[str, Any]) -> dict[str, Any]:
        return {"device": "cuda", "runs": {"one": run}, "cases": {case["name"]: case}}

    heads = "Computing all statistics of 3 heads over 5,000 tokens"
    line = f"{heads} on A card takes 2 ms and 5 MiB; computing them from the full matrix takes 7 ms.\n"
    assert readme.speed([stored(case)]) == line
    assert readme.speed([stored({**case, "status": "failed"})]) == readme.NOTHING


def test_stored_results_are_of_cases_that_exist() -> None:
    names = {case.name for case in every()}
    stored = {name for results in report.load_all() for name in results["cases"]}
    assert stored <= names
