"""The formulas of docs/guides/scale.md, against what processes send."""

from __future__ import annotations

import pytest

from benchmarks import scale


@pytest.mark.slow
@pytest.mark.parametrize("way", ["heads", "sequence"])
def test_bytes_are_those_of_the_formula(way: str) -> None:
    assert scale.counted(way, 2) == scale.expected(way, 2)
