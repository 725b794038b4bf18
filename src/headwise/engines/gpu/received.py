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
    fours,
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
    H, T, S, shift, left, right, b0, padded, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block = tl.program_id(0)  # the first keys are seen by most queries: longest first
    h = tl.program_id(1)
    b = b0 + tl.program_id(2)
    bh = b * H + h
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
    total = tl.zeros([M, 4, 2], tl.float32)
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
    for edge in tl.static_range(2):  # first where all is seen, then [i0, i1) and [i2, i3)
        lo = i0 if edge else i1
        hi = i1 + i3 - i2 if edge else i2
        if edge or not setup.listed:
            for n in tl.range(lo, hi, num_stages=1 if edge and not setup.listed else setup.stages):
                i = tl.where(n < i1, n, n - i1 + i2) if edge else n
                start = tile_of(TILES, i, setup) * N
                q0, q1 = load(Q0, Q1, q_strides, b, h, start, T, N, setup)
                rows = start + tl.arange(0, N)
                at = place(rules, rows, T, shift, setup)
                lse = tl.load(POWERS + rows)
                x = log_weights(
                    product(k0, k1, q0, q1, setup), lse[None, :], at[None, :], rows[None, :], keys[:, None],
                    b, h, stop, rules, T, S, left, right, edge == 1, setup,
                )  # fmt: skip
                total += tl.sum(fours(tl.exp2(x), M, N), 1)
    found = tl.where(keys < stop, tl.sum(tl.sum(total, 2), 1), 0.0)
    tl.store(OUT + long(bh) * S + keys, found, mask=keys < S)


def received(prepared: Prepared) -> Tensor:
    """[B, H, S]: the weights of all counted queries, summed for each key."""
    request = Request(prepared, "received", keys_first=True)
    out = prepared.empty(request.B, request.H, request.S)
    powers = powers_of(prepared.lse, prepared.kind, prepared.rules.counted)
    request.launch(
        received_kernel, request.grid, powers, out, prepared.counted_range, *request.tile_lists,
        sizes=(powers.shape[-1],),
    )  # fmt: skip
    return out
