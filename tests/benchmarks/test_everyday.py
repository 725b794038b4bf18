"""What people do every day: cases, what is stored, what is said. No test here looks at a time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.cases.modules import BY_HAND, TORCH
from benchmarks.cases.watched_families import EAGER
from benchmarks.cases.watched_models import UNWATCHED
from benchmarks.registry import OURS, Case

from benchmarks import everyday, everyday_cases, everyday_table, readme, report, runner

SMALL = {"B": 1, "H": 2, "E": 24}
CASES = everyday_cases.every()


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LEAST_SAMPLE", 0.0)


# The cases


@pytest.mark.thinned(8, slow=2)
@pytest.mark.parametrize(
    "case", [case for case in CASES if not case.name.startswith("everyday")], ids=lambda case: case.name
)
def test_every_case_passes_its_check_at_a_tiny_size(case: Case) -> None:
    (record,) = everyday.run([case], "cpu", 1, tiny=True)
    assert record["status"] == "ok", record.get("reason")
    assert not record["unavailable"]
    arms = set(record["median_ms"])
    group = everyday_cases.group_of(case.name)
    assert arms >= {OURS, case.peer}
    assert group not in ("modules", "class") or arms == {OURS, BY_HAND, TORCH}
    assert group != "watch" or arms == {OURS, UNWATCHED, EAGER}


def test_a_tiny_call_is_timed_until_it_returns_and_others_until_the_result_is_there() -> None:
    waited: list[str] = []
    felt, host = runner.FeltTimer("cpu"), runner.HostTimer("cpu")
    for timer in (felt, host):
        timer._wait = lambda: waited.append("waits")  # type: ignore[method-assign,assignment]
        timer(lambda: waited.append("call"), 3)
        waited.append("|")
    assert "".join(word[0] for word in waited) == "wcwcwcw|wcccw|"


# What is stored


def test_every_cell_is_stored_as_soon_as_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored_at: list[int] = []
    write = report.write
    monkeypatch.setattr(
        report, "write", lambda path, actual: (stored_at.append(len(actual["cases"])), write(path, actual))
    )
    records = everyday.run(everyday_cases.grid((17,), SMALL), "cpu", 1, tmp_path, "abc")
    assert stored_at == list(range(1, 19))
    stored = report.load(everyday.file_in(tmp_path))
    assert stored is not None and stored["runs"].keys() == {
        record["run"] for record in stored["cases"].values()
    }
    for record in records:
        assert record["status"] == "ok", record.get("reason")
        assert set(record["median_ms"]) == {OURS, TORCH}
        assert json.loads(json.dumps(record)).items() <= stored["cases"][record["name"]].items()
    assert "18 cells" in everyday_table.summary(records)


def test_what_time_does_not_allow_is_said_and_missing_cases_come_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--quick",
        "--only",
        "call_full,call_causal",
        "--out",
        str(tmp_path),
        "--commit",
        "abcdefabcdef",
    ]
    clock = iter([0.0, 0.0, 0.0, 0.0])
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic", lambda: next(clock, 2.0))
        assert everyday.main([*arguments, "--seconds", "1"]) == 0
    stored = report.load(everyday.file_in(tmp_path))
    assert stored is not None and list(stored["cases"]) == ["call_full"]
    (about,) = stored["runs"].values()
    assert about["skipped"] == ["call_causal"] and "skipped: call_causal" in capsys.readouterr().err
    done: list[str] = []
    run = everyday.run
    monkeypatch.setattr(
        everyday,
        "run",
        lambda chosen, *rest: (done.extend(case.name for case in chosen), run(chosen, *rest))[1],
    )
    assert everyday.main([*arguments[:-1], "abcdefa", "--missing"]) == 0
    assert everyday.main([*arguments[:-1], "0123456", "--missing"]) == 0
    assert done == ["call_causal", "call_full", "call_causal"]


# What is said


def _record(name: str, ratio: float, itself: float = 1.0, **other: Any) -> dict[str, Any]:
    return {
        "name": name,
        "description": name,
        "dtype": "float32",
        "sizes": {"L": 7},
        "status": "ok",
        "ours": OURS,
        "peer": "peer",
        "median_ms": {OURS: 1.0, "peer": 2.0, "other": 0.5},
        "ratio": {"median": ratio, "median_95": [ratio, ratio], "middle_90": [ratio, ratio]},
        "ratio_to_others": {"other": {"median": 2.0, "median_95": [1.9, 2.1]}},
        "peer_against_itself": {"median": itself, "middle_90": [itself, itself]},
        **other,
    }


def test_the_summary_is_the_geometric_mean_of_how_many_times_faster_and_names_the_worst() -> None:
    records = [
        _record("everyday_L16_none_mean", 0.5, 0.96),
        _record("everyday_L16_causal_mean", 2.0, 1.03),
        _record("everyday_L16_both_mean", 0.25),
        {"name": "everyday_L64_none_mean", "status": "failed", "reason": "weights are off"},
    ]
    message = everyday_table.summary(records)
    assert "3 cells of torch's class: geometric mean 1.59 x as fast" in message
    assert "worst: L16_causal_mean 0.50, L16_none_mean 2.00, L16_both_mean 4.00" in message
    assert "torch against itself: 0.96 to 1.03" in message
    assert message.endswith("failed: everyday_L64_none_mean")


def test_a_line_names_every_peer_with_its_ratio() -> None:
    (_, line) = everyday_table.summary([_record("call_full", 0.5, 0.97)]).splitlines()
    assert (
        line.split()
        == (
            "call_full 0.50 [0.50, 0.50] 1 ms peer 2 ms (itself 0.97 to 0.97); "
            "other 500 µs, 2.00 [1.90, 2.10]"
        ).split()
    )


def test_the_page_shows_the_commit_with_the_most_cases() -> None:
    run = {"machine": {"gpu": "A GPU"}, "versions": {"torch": "2.11"}, "dirty": False, "quick": False}
    runs = {
        "old": {**run, "commit": "a" * 40, "started": "2026-01-30T00:00:00Z"},
        "cut": {**run, "commit": "a" * 7, "started": "2026-01-31T00:00:00Z"},
        "new": {**run, "commit": "b" * 40, "started": "2026-02-01T00:00:00Z"},
    }
    sizes = {"B": 3, "L": 1024}
    cases = {
        name: {**_record(name, ratio), "run": started, "description": words, "sizes": sizes, **more}
        for name, ratio, started, words, more in (
            ("call_full", 0.5, "old", "attention of 16 tokens, full", {"peer": "SDPA"}),
            ("module_gpt_inference", 0.5, "cut", "module, GPT", {}),
            ("module_gpt_training", 0.75, "cut", "module, GPT, forward and backward", {}),
            ("everyday_L16_none_mean", 0.5, "old", "torch's class", {}),
            ("row_full_L1024", 0.5, "new", "one row of one head, read from an existing map, full", {}),
        )
    }
    records = readme.complete("cuda", [{"device": "cuda", "runs": runs, "cases": cases}])
    text = "\n".join(everyday_table.tables(records))
    assert text.startswith("Everyday calls: torch 2.11, commit aaaaaaaaaa, 2026-01-30 to 2026-01-31.")
    assert "| GPT, B3 L1024 | 1 ms | – | – | **0.50** | 1 ms | **0.75** |" in text
    assert "| full | 1 ms | – | **0.50** |" in text and "existing map, full" not in text
    assert "Peer / itself: 1.00–1.00." in text
    assert "1 cells of torch's class: geometric mean 2.00 x as fast" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--longest", "8"], "--longest must be at least 16: got 8"),
        (["--turns", "0"], "--turns must be at least 1: got 0"),
        (["--only", "no_such"], "no case for cpu fits 'no_such'"),
        (["--show", "--out", "{}"], "--show needs results of this machine: "),
    ],
)
def test_wrong_use_is_answered(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        everyday.main([word.format(tmp_path) for word in arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
