"""Everyday sizes: the cells of the grid, what is stored, what is said. No test here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import everyday, report
from benchmarks.cases.modules import TORCH
from benchmarks.registry import OURS

SMALL = {"B": 1, "H": 2, "E": 24}


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(everyday.runner, "LEAST_SAMPLE", 0.0)


def test_every_mask_and_every_way_to_ask_is_a_cell_at_every_length() -> None:
    names = [case.name for case in everyday.cells()]
    assert len(set(names)) == len(names) == 7 * 5 * 3
    assert {case.sizes["L"] for case in everyday.cells()} == {16, 64, 128, 256, 512, 1024, 2048}


def test_every_cell_is_right_and_stored_as_soon_as_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored_at: list[int] = []
    write = report.write
    monkeypatch.setattr(
        report, "write", lambda path, found: (stored_at.append(len(found["records"])), write(path, found))
    )
    stored = everyday.run(everyday.cells((17,), SMALL), 1, tmp_path, "abc")
    assert stored_at == list(range(1, 16))
    assert report.load(everyday.file_in(tmp_path)) == json.loads(json.dumps(stored))
    for record in stored["records"]:
        assert record["status"] == "ok", record.get("reason")
        assert set(record["median_ms"]) == {OURS, TORCH}
    said = everyday.summary(stored)
    assert "15 cells" in said and "torch against itself" in said


def _record(name: str, ratio: float, itself: float = 1.0, **other: Any) -> dict[str, Any]:
    return {
        "name": f"everyday_{name}",
        "status": "ok",
        "ratio": {"of_medians": ratio},
        "peer_against_itself": {"of_medians": itself},
        **other,
    }


def test_the_summary_is_the_geometric_mean_of_how_many_times_faster_and_names_the_worst() -> None:
    stored = {
        "run": {"machine": {"cpu": "a CPU"}},
        "records": [
            _record("L16_none_mean", 0.5, 0.96),
            _record("L16_causal_mean", 2.0, 1.03),
            _record("L16_both_mean", 0.25),
            {"name": "everyday_L64_none_mean", "status": "failed", "reason": "weights are off"},
        ],
    }
    said = everyday.summary(stored)
    assert "3 cells, a CPU: geometric mean 1.59 x as fast" in said
    assert "worst: L16_causal_mean 0.50, L16_none_mean 2.00, L16_both_mean 4.00" in said
    assert "torch against itself: 0.96 to 1.03" in said


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--longest", "8"], "--longest must be at least 16: got 8"),
        (["--turns", "0"], "--turns must be at least 1: got 0"),
        (["--show", "--out", "{}"], "no results of this kind of CPU lie in"),
    ],
)
def test_wrong_use_is_answered(
    given: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        everyday.main([word.format(tmp_path) for word in given])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_nothing_measured_is_said() -> None:
    assert "python -m benchmarks.everyday" in everyday.summary({"records": []})
