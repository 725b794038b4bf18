"""Gradients of q and k from weights, from their mean over heads, or from entropy.

With P the weights and dP what is wanted of them (chosen keys only: elsewhere 0),

    delta_i = sum_j P_ij dP_ij        dS_ij = P_ij (dP_ij - delta_i)

and entropy is the case dP_ij = -g_i log P_ij, delta_i = g_i H_i. Nothing quadratic is kept but the cotangent
the caller has: dS is made tile by tile, once for dq (a program keeps queries) and once for dk (a program
keeps keys and walks all heads that share them, in order: no atomics).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import NOT_SPECIAL
from .request import Prepared, Request
from .rows import mass_of, rows
from .tile import (
    LN2,
    added,
    key_stop,
    keys_seen,
    length_of,
    list_of,
    load,
    load_lse,
    log_weights,
    long,
    my_queries,
    place,
    product,
    queries_seeing,
    tanh,
    tile_of,
)


class Wanted(NamedTuple):
    """The kind of cotangent: a tile of numbers (of the keys in [begin, begin + count)), or one a query."""

    entropy: bool


@triton.jit
def cotangent(GRAD, grad_strides, x, rows, cols, b, h, T, begin, count, wanted: tl.constexpr):
    """d loss / d weights of a tile, float32."""
    mine = GRAD + long(b) * grad_strides[0] + long(h) * grad_strides[1]
    offsets = long(rows) * grad_strides[2]
    if wanted.entropy:
        g = tl.load(mine + offsets, mask=rows < T, other=0.0).to(tl.float32)
        dp = g * tl.maximum(x, -1000.0) * (-LN2)  # a hidden key's weight is 0, whatever this is
    else:
        spots = cols - begin
        inside = (rows < T) & (spots >= 0) & (spots < count)
        dp = tl.load(mine + offsets + long(spots) * grad_strides[3], mask=inside, other=0.0).to(tl.float32)
    return dp


@triton.jit
def slope(s, x, lse, size, delta, dp, rules, setup: tl.constexpr):
    """d loss / d product of a tile, from its products s and log2 weights x."""
    ds = tl.exp2(x) * size * (dp - delta) * rules.scale
    if rules.softcap is not None:
        bent = tanh(s * (rules.scale / rules.softcap), setup.rough_tanh)
        ds = ds * (1.0 - bent * bent)
    return ds


@triton.jit
def spread(ds, x, acc, setup: tl.constexpr):
    """acc + ds @ x, in the inputs' own precision."""
    if setup.exact:
        return tl.dot(ds, x, acc=acc, input_precision="tf32x3")
    if setup.dtype == tl.float16:  # a slope is often too small for float16: tf32 holds it, and x exactly
        return tl.dot(ds, x.to(tl.float32), acc=acc, input_precision="tf32")
    return tl.dot(ds.to(setup.dtype), x, acc=acc)


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "begin", "count"])
def delta_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, LSE, GRAD, grad_strides, OUT, TILES, COUNTS, list_strides, rules,
    H, T, S, shift, left, right, b0, blocks, begin, count, wanted: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block, bh, b, h, rows, at, first, last = my_queries(rules, H, T, shift, b0, blocks, setup)
    base = long(bh) * T
    lse = load_lse(LSE + base + rows, rows < T)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = tl.minimum(key_stop(rules, b, S), begin + count)
    total = tl.zeros([M, 4], tl.float32)
    if setup.listed:
        TILES = list_of(TILES, list_strides, b, h, block)
        i0 = 0
        i3 = length_of(COUNTS, list_strides, b, h, block)
    else:
        i0, i1, i2, i3 = keys_seen(first, last, stop, left, right, setup)
        i0 = tl.maximum(i0, begin // N)
    for i in tl.range(i0, i3, num_stages=setup.stages):
        start = tile_of(TILES, i, setup) * N
        k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
        cols = start + tl.arange(0, N)
        x = log_weights(
            product(q0, q1, k0, k1, setup), lse[:, None], at[:, None], rows[:, None], cols[None, :],
            b, h, stop, rules, T, S, left, right, True, setup,
        )  # fmt: skip
        dp = cotangent(GRAD, grad_strides, x, rows[:, None], cols[None, :], b, h, T, begin, count, wanted)
        total += added(tl.exp2(x) * dp, M, N)
    tl.store(OUT + base + rows, tl.sum(total, 1), mask=rows < T)


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "begin", "count"])
def back_q_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, LSE, SIZE, DELTA, GRAD, grad_strides, DQ, TILES, COUNTS,
    list_strides, rules, H, T, S, shift, left, right, b0, blocks, begin, count,
    wanted: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block, bh, b, h, rows, at, first, last = my_queries(rules, H, T, shift, b0, blocks, setup)
    base = long(bh) * T
    valid = rows < T
    lse = load_lse(LSE + base + rows, valid)
    size = tl.load(SIZE + base + rows, mask=valid, other=0.0)
    delta = tl.load(DELTA + base + rows, mask=valid, other=0.0)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = key_stop(rules, b, S)
    D0: tl.constexpr = setup.D0
    D1: tl.constexpr = setup.D1 if setup.D1 > 0 else 16
    dq0 = tl.zeros([M, D0], tl.float32)
    dq1 = tl.zeros([M, D1], tl.float32)
    if setup.listed:
        TILES = list_of(TILES, list_strides, b, h, block)
        i0 = 0
        i3 = length_of(COUNTS, list_strides, b, h, block)
    else:
        i0, i1, i2, i3 = keys_seen(first, last, stop, left, right, setup)
    for i in tl.range(i0, i3, num_stages=setup.stages):
        start = tile_of(TILES, i, setup) * N
        k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
        cols = start + tl.arange(0, N)
        s = product(q0, q1, k0, k1, setup)
        x = log_weights(
            s, lse[:, None], at[:, None], rows[:, None], cols[None, :], b, h, stop, rules, T, S, left, right,
            True, setup,
        )  # fmt: skip
        dp = cotangent(GRAD, grad_strides, x, rows[:, None], cols[None, :], b, h, T, begin, count, wanted)
        ds = slope(s, x, lse[:, None], size[:, None], delta[:, None], dp, rules, setup)
        dq0 = spread(ds, k0, dq0, setup)
        if setup.D1 > 0:
            dq1 = spread(ds, k1, dq1, setup)
    DQ += (base + rows)[:, None] * setup.D
    c0 = tl.arange(0, setup.D0)[None, :]
    tl.store(DQ + c0, dq0, mask=valid[:, None] & (c0 < setup.D))
    if setup.D1 > 0:
        c1 = setup.D0 + tl.arange(0, setup.D1)[None, :]
        tl.store(DQ + c1, dq1, mask=valid[:, None] & (c1 < setup.D))


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "begin", "count"])
def back_k_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, LSE, SIZE, DELTA, GRAD, grad_strides, DK, TILES, COUNTS,
    list_strides, rules, H, T, S, shift, left, right, b0, blocks, begin, count,
    wanted: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block = tl.program_id(0)
    hk = tl.program_id(1)
    b = b0 + tl.program_id(2)
    keys = block * M + tl.arange(0, M)
    stop = key_stop(rules, b, S)
    k0, k1 = load(K0, K1, k_strides, b, hk, block * M, S, M, setup)
    D0: tl.constexpr = setup.D0
    D1: tl.constexpr = setup.D1 if setup.D1 > 0 else 16
    dk0 = tl.zeros([M, D0], tl.float32)
    dk1 = tl.zeros([M, D1], tl.float32)
    query_stop = tl.where(block * M < stop, T, 0)
    for g in range(setup.G):
        h = hk * setup.G + g
        base = long(b * H + h) * T
        tiles = TILES
        if setup.listed:
            tiles = list_of(TILES, list_strides, b, h, block)
            i0 = 0
            i3 = length_of(COUNTS, list_strides, b, h, block)
        else:
            last_key = tl.minimum((block + 1) * M, S) - 1
            i0, i1, i2, i3 = queries_seeing(block * M, last_key, 0, query_stop, shift, left, right, setup)
        for i in tl.range(i0, i3, num_stages=setup.stages):
            start = tile_of(tiles, i, setup) * N
            q0, q1 = load(Q0, Q1, q_strides, b, h, start, T, N, setup)
            rows = start + tl.arange(0, N)
            at = place(rules, rows, T, shift, setup)
            valid = rows < T
            lse = load_lse(LSE + base + rows, valid)
            size = tl.load(SIZE + base + rows, mask=valid, other=0.0)
            delta = tl.load(DELTA + base + rows, mask=valid, other=0.0)
            s = product(k0, k1, q0, q1, setup)
            x = log_weights(
                s, lse[None, :], at[None, :], rows[None, :], keys[:, None], b, h, stop, rules, T, S, left,
                right, True, setup,
            )  # fmt: skip
            dp = cotangent(GRAD, grad_strides, x, rows[None, :], keys[:, None], b, h, T, begin, count, wanted)
            ds = slope(s, x, lse[None, :], size[None, :], delta[None, :], dp, rules, setup)
            dk0 = spread(ds, q0, dk0, setup)
            if setup.D1 > 0:
                dk1 = spread(ds, q1, dk1, setup)
    DK += (long(b * (H // setup.G) + hk) * S + keys)[:, None] * setup.D
    inside = keys[:, None] < S
    c0 = tl.arange(0, setup.D0)[None, :]
    tl.store(DK + c0, dk0, mask=inside & (c0 < setup.D))
    if setup.D1 > 0:
        c1 = setup.D0 + tl.arange(0, setup.D1)[None, :]
        tl.store(DK + c1, dk1, mask=inside & (c1 < setup.D))


Gradients = tuple[Tensor, Tensor, Tensor | None]


def of_weights(prepared: Prepared, begin: int, count: int, grad: Tensor) -> Gradients:
    """Return (dq, dk, dsinks) from d loss / d weights, [B, H or 1, T, count], of keys from `begin` on."""
    mass = mass_of(prepared)
    grad = grad.expand(*prepared.shape[:3], count)
    pull = Pull(grad, begin, count, Wanted(entropy=False))
    request = Request(prepared, "back_q")
    delta = torch.empty_like(mass)
    request.launch(
        delta_kernel, request.grid, prepared.lse, grad, grad.stride(), delta, *request.tile_lists,
        sizes=(request.blocks, begin, count), options=(pull.wanted,),
    )  # fmt: skip
    delta = delta / mass
    dq, dk = _walk(prepared, mass, delta, pull)
    if prepared.scores.sinks is None:
        return dq, dk, None
    return dq, dk, -(_sunk(prepared, mass) * delta).sum((0, 2))


def of_entropy(prepared: Prepared, grad: Tensor) -> Gradients:
    """Return (dq, dk, dsinks) from d loss / d entropy, [B, H, T]."""
    entropy, mass = rows(Request(prepared, "rows"), ("entropy", "mass")).values
    grad = grad.float()
    delta = grad * (entropy - mass.log())
    dq, dk = _walk(prepared, mass, delta, Pull(grad, 0, prepared.shape[3], Wanted(entropy=True)))
    if prepared.scores.sinks is None:
        return dq, dk, None
    sunk = _sunk(prepared, mass)
    return dq, dk, -(grad * (torch.xlogy(sunk, sunk) + sunk * entropy)).sum((0, 2))


class Pull(NamedTuple):
    """The cotangent of weights: of the keys [begin, begin + size), or one value per query."""

    grad: Tensor
    begin: int
    size: int
    wanted: Wanted


def _sunk(prepared: Prepared, mass: Tensor) -> Tensor:
    """Return the weight of each query's sink, [B, H, T]."""
    sinks, lse = prepared.scores.sinks, prepared.input_lse
    assert sinks is not None and lse is not None
    return torch.where(torch.isneginf(lse), 0.0, (sinks.float()[:, None] - lse).exp() / mass)


def _walk(prepared: Prepared, mass: Tensor, delta: Tensor, pull: Pull) -> tuple[Tensor, Tensor]:
    """Return (dq, dk), float32, by one walk over keys for each query and one over queries for each key."""
    by_query, by_key = Request(prepared, "back_q"), Request(prepared, "back_k", keys_first=True)
    k = prepared.k
    dq, dk = prepared.empty(*prepared.q.shape), prepared.empty(*k.shape)
    rest = (prepared.lse, (1 / mass).contiguous(), delta.contiguous(), pull.grad, pull.grad.stride())
    by_query.launch(
        back_q_kernel, by_query.grid, *rest, dq, *by_query.tile_lists,
        sizes=(by_query.blocks, pull.begin, pull.size), options=(pull.wanted,),
    )  # fmt: skip
    by_key.launch(
        back_k_kernel, (by_key.blocks, k.shape[1]), *rest, dk, *by_key.tile_lists,
        sizes=(by_key.blocks, pull.begin, pull.size), options=(pull.wanted,),
    )  # fmt: skip
    return dq, dk
