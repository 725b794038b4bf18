"""The formulas of docs/guides/scale.md, against what processes send."""

from __future__ import annotations

import multiprocessing

import pytest

from benchmarks import scale
from process_groups import PROCESSES


@pytest.mark.slow
@pytest.mark.parametrize("way", ["heads", "sequence"])
def test_bytes_are_those_of_the_formula(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: PROCESSES)  # where torch is imported
    assert scale.counted(way, 2) == scale.expected(way, 2)
