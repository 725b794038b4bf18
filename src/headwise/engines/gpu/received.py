"""Attention received: sums over each key's queries.

One program keeps M keys of one head and walks the queries that see them. Nothing is shared between programs,
so there are no atomics, and the same bits come out every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .powers import powers_of
from .request import NOT_SPECIAL, Prepared, Request
from .tile import (
    eights,
    key_stop,
    length_of,
    list_of,
    load,
    log_weights,
    long,
    place,
    product,
    queries_seeing,
    tile_of,
)

__all__ = ["received"]


@triton.jit(do_not_specialize=[*NOT_SPECIAL])
def received_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, POWERS, OUT, COUNTED, TILES, COUNTS, list_strides, rules,
    H, T, S, shift, left, right, blocks, padded, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    pid = tl.program_id(0)
    block = pid % blocks  # the first keys are seen by most queries: longest first
    bh = pid // blocks
    b = bh // H
    h = bh % H
    keys = block * M + tl.arange(0, M)
    stop = key_stop(rules, b, S)
    k0, k1 = load(K0, K1, k_strides, b, h // setup.G, block * M, S, M, setup)
    POWERS += long(bh) * padded
    first_query = 0
    query_stop = T
    if COUNTED is not None:
        first_query = tl.load(COUNTED + 2 * b)
        query_stop = tl.load(COUNTED + 2 * b + 1)
    query_stop = tl.where(block * M < stop, query_stop, 0)
    total = tl.zeros([M, 8], tl.float32)
    if setup.listed:
        TILES = list_of(TILES, list_strides, b, h, block)
        i0 = 0
        i1 = length_of(COUNTS, list_strides, b, h, block)
        i2 = i1
        i3 = i1
    else:
        last_key = tl.minimum((block + 1) * M, S) - 1
        i0, i1, i2, i3 = queries_seeing(
            block * M, last_key, first_query, query_stop, shift, left, right, setup
        )
    for phase in tl.static_range(3):
        lo = i0 if phase == 0 else (i1 if phase == 1 else i2)
        hi = i1 if phase == 0 else (i2 if phase == 1 else i3)
        if phase == 0 or not setup.listed:
            for i in tl.range(lo, hi, num_stages=setup.stages):
                start = tile_of(TILES, i, setup) * N
                q0, q1 = load(Q0, Q1, q_strides, b, h, start, T, N, setup)
                rows = start + tl.arange(0, N)
                at = place(rules, rows, T, shift, setup)
                lse = tl.load(POWERS + rows)
                x = log_weights(
                    product(k0, k1, q0, q1, setup), lse[None, :], at[None, :], rows[None, :], keys[:, None],
                    b, h, stop, rules, T, S, left, right, phase != 1, setup,
                )  # fmt: skip
                total += tl.sum(eights(tl.exp2(x), M, N), 1)
    found = tl.where(keys < stop, tl.sum(total, 1), 0.0)
    tl.store(OUT + long(bh) * S + keys, found, mask=keys < S)


def received(prepared: Prepared) -> Tensor:
    """[B, H, S]: the weights of all counted queries, summed for each key."""
    request = Request(prepared, "received", keys_first=True)
    out = prepared.empty(request.B, request.H, request.S)
    powers = powers_of(prepared, counted=True)
    request.launch(
        received_kernel, request.blocks_of_all, powers, out, prepared.counted_range, *request.tile_lists,
        sizes=(request.blocks, powers.shape[-1]),
    )  # fmt: skip
    return out
