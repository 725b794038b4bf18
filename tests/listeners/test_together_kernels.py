"""Calls side by side as the heads of one map, measured by the kernels of a GPU, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise as hw
from headwise.engines.statistics import ROW_STATISTICS
from headwise.heads.record import Record, reduce
from interpreted_kernels import interpreted, launched, mended, poisoned

__all__ = ["interpreted", "launched", "mended", "poisoned"]

CALLS, B, H, Hk, T, S, D = 2, 2, 4, 2, 11, 13, 16
LENGTHS = hw.Mask.padding(torch.tensor([13, 7]), torch.tensor([11, 5]))
RULES: dict[str, dict[str, Any]] = {
    "sinks": {"window": 5, "softcap": 3.0, "sinks": True},
    "slopes": {"bias": "slopes", "mask": LENGTHS},
}


@pytest.mark.thinned(keep=["sinks"])
@pytest.mark.parametrize("name", RULES)
def test_side_by_side_the_kernels_measure_what_they_measure_alone(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    heads = hw.Heads()
    deferred = heads.deferred
    deferred.layers = {str(number): number for number in range(CALLS)}
    alone = []
    for number in range(CALLS):
        q, k = (torch.randn(B, n, L, D, generator=random) for n, L in ((H, T), (Hk, S)))
        rules = dict(RULES[name])
        if "sinks" in rules:
            rules["sinks"] = torch.randn(H, generator=random)
        else:
            rules["bias"] = hw.scoring.Alibi(torch.rand(H, generator=random))
        weights = hw.attention(q, k, torch.randn_like(k), **rules, backend="tiles")[1]
        record = Record((B, H, T, S))
        assert deferred.note("forward", str(number), record, weights, tuple(ROW_STATISTICS), 7, False)
        alone.append(reduce(weights, names=ROW_STATISTICS, pooled=7))
        q.zero_(), k.zero_()
    deferred.measure("forward")
    assert len(deferred._measured) == 1
    for layer, truth in zip(heads.values(), alone, strict=True):
        (record,) = layer.calls
        for of in ("rows", "counts", "large"):
            torch.testing.assert_close(getattr(record, of), getattr(truth, of))
