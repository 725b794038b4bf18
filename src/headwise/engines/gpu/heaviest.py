"""The heaviest keys of each query; the light pass: the log-sum-exp alone.

The heaviest keys are a running list of the best, entered wherever a tile beats its last. The light pass gives
the log-sum-exp of each query's scores, where the first pass did not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..scores import Scores
from .launches import NOT_SPECIAL, PLANS
from .request import Prepared, Request, rules_and_lists_by
from .rows import settled
from .tile import (
    BIG,
    HIDDEN,
    LN2,
    LOG2E,
    fours,
    key_stop,
    keys_seen,
    largest,
    length_of,
    list_of,
    load,
    load_lse,
    log_weights,
    long,
    my_queries,
    product,
    tile_of,
)

__all__ = ["lse_of", "top"]


# The heaviest keys


@triton.jit
def insert(x, cols, best, keys, K: tl.constexpr):
    """Put the tile's scores that beat a row's worst into the row's list, one a round."""
    highest = tl.max(x, 1)
    worst = tl.min(best, 1)
    while tl.max((highest > worst).to(tl.int32), 0) > 0:
        better = highest > worst
        # of equal scores the first key enters first, and the last key leaves first
        key = tl.min(tl.where(x == highest[:, None], cols[None, :], 2147483647), 1)
        leaves = best == worst[:, None]
        last = tl.max(tl.where(leaves, keys, -2), 1)
        slots = tl.arange(0, K)[None, :]
        slot = tl.min(tl.where(leaves & (keys == last[:, None]), slots, K), 1)
        here = better[:, None] & (slots == slot[:, None])
        best = tl.where(here, highest[:, None], best)
        keys = tl.where(here, key[:, None], keys)
        x = tl.where(better[:, None] & (cols[None, :] == key[:, None]), HIDDEN, x)
        highest = tl.max(x, 1)
        worst = tl.min(best, 1)
    return best, keys


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "count"])
def top_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, LSE, VALUES, INDICES, TILES, COUNTS, list_strides, rules,
    H, T, S, shift, left, right, b0, blocks, count, K: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block, bh, b, h, rows, at, first, last = my_queries(rules, H, T, shift, b0, blocks, setup)
    base = long(bh) * T
    lse = load_lse(LSE + base + rows, rows < T)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = key_stop(rules, b, S)
    slots = tl.arange(0, K)
    # slots beyond the count are never the worst, so nothing enters them
    best = tl.where(slots[None, :] < count, HIDDEN, BIG) + tl.zeros([M, 1], tl.float32)
    keys = tl.full([M, K], -1, tl.int32)
    if setup.listed:
        TILES = list_of(TILES, list_strides, b, h, block)
        i0 = 0
        i1 = length_of(COUNTS, list_strides, b, h, block)
        i2 = i1
        i3 = i1
    else:
        i0, i1, i2, i3 = keys_seen(first, last, stop, left, right, setup)
    for phase in tl.static_range(3):
        lo = i0 if phase == 0 else (i1 if phase == 1 else i2)
        hi = i1 if phase == 0 else (i2 if phase == 1 else i3)
        needed = setup.listed if phase == 0 else not setup.listed
        if needed or (phase == 0 and setup.left):
            for i in tl.range(lo, hi, num_stages=setup.stages):
                start = tile_of(TILES, i, setup) * N
                k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
                cols = start + tl.arange(0, N)
                x = log_weights(
                    product(q0, q1, k0, k1, setup), lse[:, None], at[:, None], rows[:, None], cols[None, :],
                    b, h, stop, rules, T, S, left, right, phase != 1, setup,
                )  # fmt: skip
                best, keys = insert(tl.maximum(x, HIDDEN), cols, best, keys, K)
    best = tl.where(slots[None, :] < count, best, 2 * HIDDEN)
    here = rows < T
    for n in range(count):
        heaviest = tl.max(best, 1)
        key = tl.min(tl.where(best == heaviest[:, None], keys, 2147483647), 1)
        slot = tl.min(tl.where((best == heaviest[:, None]) & (keys == key[:, None]), slots[None, :], K), 1)
        seen = heaviest > 0.5 * HIDDEN
        there = (base + rows) * count + n
        value = tl.where(seen, tl.exp2(heaviest), 0.0)
        tl.store(VALUES + there, tl.where(lse == lse, value, lse), mask=here)  # no maximum knows a NaN
        tl.store(INDICES + there, long(tl.where(seen, key, -1)), mask=here)
        best = tl.where(slots[None, :] == slot[:, None], 2 * HIDDEN, best)


def top(prepared: Prepared, count: int) -> tuple[Tensor, Tensor]:
    """(weights, keys), each [B, H, T, count], heaviest first; of equal weights the first key."""
    prepared = settled(prepared)
    request = Request(prepared, "top")
    shape = (request.B, request.H, request.T, count)
    values = prepared.empty(*shape)
    indices = torch.empty(shape, dtype=torch.int64, device=prepared.device)
    request.launch(
        top_kernel, request.grid, prepared.lse, values, indices, *request.tile_lists,
        sizes=(request.blocks, count), options=(max(2, triton.next_power_of_2(count)),),
    )  # fmt: skip
    return values, indices


# The light pass


@triton.jit(do_not_specialize=NOT_SPECIAL)
def lse_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, OUT, TILES, COUNTS, list_strides, rules,
    H, T, S, shift, left, right, b0, blocks, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block, bh, b, h, rows, at, first, last = my_queries(rules, H, T, shift, b0, blocks, setup)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = key_stop(rules, b, S)
    top = tl.full([M, 4], HIDDEN, tl.float32)
    total = tl.zeros([M, 4], tl.float32)
    nothing = tl.zeros([M, 1], tl.float32)
    if setup.listed:
        TILES = list_of(TILES, list_strides, b, h, block)
        i0 = 0
        i1 = length_of(COUNTS, list_strides, b, h, block)
        i2 = i1
        i3 = i1
    else:
        i0, i1, i2, i3 = keys_seen(first, last, stop, left, right, setup)
    for phase in tl.static_range(3):
        lo = i0 if phase == 0 else (i1 if phase == 1 else i2)
        hi = i1 if phase == 0 else (i2 if phase == 1 else i3)
        needed = setup.listed if phase == 0 else not setup.listed
        if needed or (phase == 0 and setup.left):
            for i in tl.range(lo, hi, num_stages=setup.stages):
                start = tile_of(TILES, i, setup) * N
                k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
                cols = start + tl.arange(0, N)
                x = log_weights(
                    product(q0, q1, k0, k1, setup), nothing, at[:, None], rows[:, None], cols[None, :],
                    b, h, stop, rules, T, S, left, right, phase != 1, setup,
                )  # fmt: skip
                higher = tl.maximum(top, largest(x, M, N))
                p = tl.exp2(fours(x, M, N) - higher[:, None, :, None])
                total = total * tl.exp2(top - higher) + tl.sum(tl.sum(p, 1), 2)
                top = higher
    highest = tl.max(top, 1)
    empty = highest <= 0.5 * HIDDEN
    summed = tl.sum(total * tl.exp2(top - highest[:, None]), 1)
    if rules.sinks is not None:
        sink = tl.load(rules.sinks + h).to(tl.float32) * LOG2E
        higher = tl.maximum(highest, sink)
        summed = summed * tl.exp2(highest - higher) + tl.exp2(sink - higher)
        highest = higher
    lse = tl.where(empty, -float("inf"), (highest + tl.log2(summed)) * LN2)
    tl.store(OUT + long(bh) * T + rows, lse, mask=rows < T)


def lse_of(scores: Scores) -> Tensor:
    """[B, H, T], natural logarithm; -inf for queries that see nothing."""
    prepared = Prepared(scores)
    key = ("lse", prepared.signature)
    plan: Callable[[Prepared], Tensor] | None = PLANS.get(key)
    if plan is not None:
        return plan(prepared)
    request = Request(prepared, "lse")
    out = prepared.empty(*prepared.shape[:3])
    launched = request.launch(lse_kernel, request.grid, out, *request.tile_lists, sizes=(request.blocks,))
    if PLANS.is_back(key):
        go = launched.again(prepared.q, prepared.k)
        PLANS.keep(key, None if go is None else _planned(request, go))
    return out


def _planned(request: Request, go: Callable[..., None]) -> Callable[[Prepared], Tensor]:
    """`lse_of` for all that have the signature of these: room, and a launch at once."""
    given_by, shape, device = rules_and_lists_by(request), request.prepared.shape[:3], request.prepared.device

    def again(prepared: Prepared) -> Tensor:
        rules, lists = given_by(prepared)
        out = torch.empty(shape, dtype=torch.float32, device=device)
        go(prepared.q, prepared.k, rules, out, *lists)
        return out

    return again
