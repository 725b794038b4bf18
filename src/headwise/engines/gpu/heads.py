"""From a value a query to a value a head: the mean over counted queries, or the largest."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .cannot import interpreted
from .request import Prepared, kind_of, launch
from .tile import long

__all__ = ["of_heads"]

NO_OFFSET, LARGEST = (
    3,
    4,
)  # how a statistic is told to the kernel: its offset + 1, or 3; and 4 for the largest


@triton.jit(do_not_specialize=["H", "shift", "programs", "low_kinds", "high_kinds"])
def of_heads_kernel(
    VALUES, LSE, OUT, rules, H, T, S, shift, programs, low_kinds, high_kinds, SIZE: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0)
    n = tl.program_id(1)
    kinds = tl.where(n < 8, low_kinds, high_kinds)
    kind = (kinds >> (n % 8 * 3)) & 7
    b = bh // H
    base = long(bh) * T
    VALUES += (long(n) * programs) * T + base
    total = tl.zeros([SIZE], tl.float32)
    count = tl.zeros([SIZE], tl.float32)
    largest = tl.full([SIZE], -float("inf"), tl.float32)
    for start in range(0, T, SIZE):
        rows = start + tl.arange(0, SIZE)
        here = rows < T
        counts = tl.load(LSE + base + rows, mask=here, other=-float("inf")) != -float("inf")
        if rules.counted is not None:
            counts = counts & (tl.load(rules.counted + long(b) * T + rows, mask=here, other=0) != 0)
        at = rows + shift
        if PLACED:
            at = tl.load(rules.at + rows, mask=here, other=0)
        key = tl.where((kind & 3) == 3, 0, at + (kind & 3) - 1)
        counts = counts & (key >= 0) & (key < S)
        value = tl.load(VALUES + rows, mask=counts, other=0.0)
        total += value
        count += tl.where(counts, 1.0, 0.0)
        largest = tl.maximum(largest, tl.where(counts, value, -float("inf")))
    summed = tl.sum(total, 0)
    highest = tl.where(summed == summed, tl.max(largest, 0), summed)  # a NaN is the largest of all
    found = tl.where(kind >= 4, highest, summed / tl.sum(count, 0))
    tl.store(OUT + n * programs + bh, found)


def of_heads(prepared: Prepared, values: Tensor, kinds: list[tuple[int | None, bool]]) -> Tensor:
    """[n, B, H] from [n, B, H, T]; each kind is (offset, whether the largest is meant)."""
    codes = [(NO_OFFSET if offset is None else offset + 1) + LARGEST * largest for offset, largest in kinds]
    low, high = (sum(code << (3 * i) for i, code in enumerate(part)) for part in (codes[:8], codes[8:]))
    assert len(codes) <= 16
    B, H, T, S = prepared.shape
    out = prepared.empty(len(kinds), B, H)
    placed = prepared.scores.positions is not None
    args = (values, prepared.lse, out, prepared.rules, H, T, S, S - T, B * H, low, high)
    constants = (32 if interpreted() else 1024 if T <= 1024 else 4096, placed)
    launch(
        of_heads_kernel,
        (B * H, len(kinds), 1),
        args,
        constants,
        (prepared.kind, kind_of((values, out))),
        values.device,
        warps=4 if T <= 1024 else 8,
    )
    return out
