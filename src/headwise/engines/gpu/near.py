"""The weights around each query and of the first key: a few tiles a block, however long the rest."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .request import NOT_SPECIAL, Prepared, Request
from .tile import added, key_stop, load, load_lse, log_weights, long, my_queries, product

__all__ = ["NAMES", "near"]

NAMES = ("first", "previous", "itself", "next", "local")


class Wants(NamedTuple):
    """Where each value goes, -1: nowhere."""

    first: int
    previous: int
    itself: int
    next: int
    local: int
    around: bool  # anything but the first key


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "total_rows", "reach", "around"])
def near_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, LSE, OUT, FIRST, rules,
    H, T, S, shift, left, right, b0, blocks, total_rows, reach, around,
    wants: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block, bh, b, h, rows, at, first, last = my_queries(rules, H, T, shift, b0, blocks, setup)
    base = long(bh) * T
    lse = load_lse(LSE + base + rows, rows < T)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = key_stop(rules, b, S)
    OUT += base + rows
    here = rows < T
    # one walk: a tile that begins with the first key, if that is asked for, then those around the queries
    key = 0
    if FIRST is not None:
        key = tl.load(FIRST + b)
    ahead_tiles: tl.constexpr = 1 if wants.first >= 0 else 0
    from_key = first - around
    to_key = last + around + 1
    if setup.left:
        from_key = tl.maximum(from_key, first - left)
    if setup.right:
        to_key = tl.minimum(to_key, last + right + 1)
    from_key = tl.maximum(from_key, 0)
    tiles = tl.maximum(tl.cdiv(tl.minimum(to_key, S) - from_key, N), 0) if wants.around else 0
    leading = tl.zeros([M, 4], tl.float32)
    previous = tl.zeros([M, 4], tl.float32)
    itself = tl.zeros([M, 4], tl.float32)
    next = tl.zeros([M, 4], tl.float32)
    local = tl.zeros([M, 4], tl.float32)
    for n in tl.range(0, ahead_tiles + tiles, num_stages=setup.stages):
        lead = n < ahead_tiles
        start = tl.where(lead, key, from_key + (n - ahead_tiles) * N)
        k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
        cols = start + tl.arange(0, N)
        x = log_weights(
            product(q0, q1, k0, k1, setup), lse[:, None], at[:, None], rows[:, None], cols[None, :],
            b, h, stop, rules, T, S, left, right, True, setup,
        )  # fmt: skip
        p = tl.exp2(x)
        if wants.first >= 0:
            leading += added(tl.where(lead & (cols == key)[None, :], p, 0.0), M, N)
            p = tl.where(lead, 0.0, p)
        ahead = cols[None, :] - at[:, None]
        if wants.previous >= 0:
            previous += added(tl.where(ahead == -1, p, 0.0), M, N)
        if wants.itself >= 0:
            itself += added(tl.where(ahead == 0, p, 0.0), M, N)
        if wants.next >= 0:
            next += added(tl.where(ahead == 1, p, 0.0), M, N)
        if wants.local >= 0:
            local += added(tl.where(tl.abs(ahead) <= reach, p, 0.0), M, N)
    if wants.first >= 0:
        tl.store(OUT + wants.first * long(total_rows), tl.sum(leading, 1), mask=here)
    if wants.previous >= 0:
        tl.store(OUT + wants.previous * long(total_rows), tl.sum(previous, 1), mask=here)
    if wants.itself >= 0:
        tl.store(OUT + wants.itself * long(total_rows), tl.sum(itself, 1), mask=here)
    if wants.next >= 0:
        tl.store(OUT + wants.next * long(total_rows), tl.sum(next, 1), mask=here)
    if wants.local >= 0:
        tl.store(OUT + wants.local * long(total_rows), tl.sum(local, 1), mask=here)


def near(prepared: Prepared, names: tuple[str, ...], reach: int, out: Tensor) -> None:
    """Fill out[len(names), B, H, T] with the named weights of each query."""
    request = Request(prepared, "near")
    slots = {name: names.index(name) if name in names else -1 for name in NAMES}
    wants = Wants(**slots, around=any(name != "first" for name in names))
    around = max(1, reach if "local" in names else 1)
    B, H, T, S = prepared.shape
    request.launch(
        near_kernel, request.grid, prepared.lse, out, prepared.first_keys,
        sizes=(request.blocks, B * H * T, min(reach, T + S), min(around, T + S)), options=(wants,),
    )  # fmt: skip
