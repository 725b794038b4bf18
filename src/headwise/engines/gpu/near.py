"""The weights around each query and of the first key: a few tiles a block, however long the rest."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .request import NOT_SPECIAL, Prepared, Request
from .tile import ends, key_stop, load, load_lse, log_weights, long, place, product

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
    H, T, S, shift, left, right, blocks, total_rows, reach, around, wants: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    pid = tl.program_id(0)
    block = pid % blocks
    bh = pid // blocks
    b = bh // H
    h = bh % H
    rows = block * M + tl.arange(0, M)
    at = place(rules, rows, T, shift, setup)
    first, last = ends(at, rows, T, shift, M, setup)
    base = long(bh) * T
    lse = load_lse(LSE + base + rows, rows < T)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = key_stop(rules, b, S)
    OUT += base + rows
    here = rows < T
    if wants.first >= 0:
        key = 0
        if FIRST is not None:
            key = tl.load(FIRST + b)
        k0, k1 = load(K0, K1, k_strides, b, h // setup.G, key, S, N, setup)
        cols = key + tl.arange(0, N)
        x = log_weights(
            product(q0, q1, k0, k1, setup), lse[:, None], at[:, None], rows[:, None], cols[None, :],
            b, h, stop, rules, T, S, left, right, True, setup,
        )  # fmt: skip
        p = tl.where(cols[None, :] == key, tl.exp2(x), 0.0)
        tl.store(OUT + wants.first * long(total_rows), tl.sum(p, 1), mask=here)
    if wants.around:
        previous = tl.zeros([M], tl.float32)
        itself = tl.zeros([M], tl.float32)
        next = tl.zeros([M], tl.float32)
        local = tl.zeros([M], tl.float32)
        from_key = tl.maximum(first - around, 0)
        to_key = tl.minimum(last + around + 1, S)
        for start in range(from_key, to_key, N):
            k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
            cols = start + tl.arange(0, N)
            x = log_weights(
                product(q0, q1, k0, k1, setup), lse[:, None], at[:, None], rows[:, None], cols[None, :],
                b, h, stop, rules, T, S, left, right, True, setup,
            )  # fmt: skip
            p = tl.exp2(x)
            ahead = cols[None, :] - at[:, None]
            if wants.previous >= 0:
                previous += tl.sum(tl.where(ahead == -1, p, 0.0), 1)
            if wants.itself >= 0:
                itself += tl.sum(tl.where(ahead == 0, p, 0.0), 1)
            if wants.next >= 0:
                next += tl.sum(tl.where(ahead == 1, p, 0.0), 1)
            if wants.local >= 0:
                local += tl.sum(tl.where(tl.abs(ahead) <= reach, p, 0.0), 1)
        if wants.previous >= 0:
            tl.store(OUT + wants.previous * long(total_rows), previous, mask=here)
        if wants.itself >= 0:
            tl.store(OUT + wants.itself * long(total_rows), itself, mask=here)
        if wants.next >= 0:
            tl.store(OUT + wants.next * long(total_rows), next, mask=here)
        if wants.local >= 0:
            tl.store(OUT + wants.local * long(total_rows), local, mask=here)


def near(prepared: Prepared, names: tuple[str, ...], reach: int, out: Tensor) -> None:
    """Fill out[len(names), B, H, T] with the named weights of each query."""
    request = Request(prepared, "near")
    slots = {name: names.index(name) if name in names else -1 for name in NAMES}
    wants = Wants(**slots, around=any(name != "first" for name in names))
    around = max(1, reach if "local" in names else 1)
    B, H, T, S = prepared.shape
    request.launch(
        near_kernel, request.blocks_of_all, prepared.lse, out, prepared.first_keys,
        sizes=(request.blocks, B * H * T, min(reach, T + S), min(around, T + S)), options=(wants,),
    )  # fmt: skip
