"""The backward of the first pass: gradients of q, k, v and of what is added to the scores.

With P the weights, O the output and dO its gradient,

    delta_i = sum_c dO_ic O_ic     dP = dO Vᵀ     dS_ij = P_ij (dP_ij - delta_i)     dV = Pᵀ dO

dS is made tile by tile, once for dq (a program keeps queries, and works out their delta), once for dk and dv
(a program keeps keys and walks all heads that share them, in order) and, where a bias learns, once for it (a
program keeps a tile and walks all sequences and heads that share it). No atomics: the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import PLANS, Plans
from ..scores import Scores
from .attend import mixed
from .backward import spread
from .launches import NOT_SPECIAL
from .lists import ROOM, Tables, own_list
from .request import (
    Launch,
    Prepared,
    Request,
    channels_of,
    described,
    describer,
    lister,
    rules_by,
    signature_of,
    strides_of,
)
from .tile import (
    BIG,
    Channels,
    factor,
    key_stop,
    keys_seen,
    load,
    load_lse,
    long,
    my_queries,
    open_scores,
    place,
    product,
    queries_seeing,
    tile_of,
    tile_ranges,
)

# From here on lse, as a power of two, is too inexact to compute weights from: with a bias of -1e9 on all keys
# it is -1e9 for one key and for a thousand. Such weights are divided by their sum.
ROUGH = tl.constexpr(4096.0)


@triton.jit
def weighed(a0, a1, b0, b1, values: tl.constexpr, setup: tl.constexpr):
    """a b^T over the channels of values, float32."""
    if setup.exact:
        dp = tl.dot(a0, b0.T, input_precision="tf32x3")
        if values.D1 > 0:
            dp = tl.dot(a1, b1.T, acc=dp, input_precision="tf32x3")
    else:
        dp = tl.dot(a0, b0.T)
        if values.D1 > 0:
            dp = tl.dot(a1, b1.T, acc=dp)
    return dp


@triton.jit
def slope(p, dp, delta, bent, rules):
    """(d loss / d score, d loss / d product without the scale) of a tile."""
    of_score = p * (dp - delta)
    of_product = of_score
    if rules.softcap is not None:
        of_product = of_score * (1.0 - bent * bent)
    return of_score, of_product


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "padded", "column_tiles"])
def attend_dq_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, V0, V1, v_strides, OUT0, OUT1, out_strides, GRAD0, GRAD1,
    grad_strides, LSE, POWERS, DELTA, SIZE, DQ, dq_strides, DSLOPES, TILES, TABLES, list_strides, rules,
    H, T, S, shift, left, right, b0, blocks, padded, column_tiles,
    values: tl.constexpr, outs: tl.constexpr, grads: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block, bh, b, h, rows, at, first, last = my_queries(rules, H, T, shift, b0, blocks, setup)
    valid = rows < T
    lse = load_lse(LSE + long(bh) * T + rows, valid)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    o0, o1 = load(OUT0, OUT1, out_strides, b, h, block * M, T, M, outs)
    g0, g1 = load(GRAD0, GRAD1, grad_strides, b, h, block * M, T, M, grads)
    delta = tl.sum(o0.to(tl.float32) * g0.to(tl.float32), 1)
    if values.D1 > 0:
        delta += tl.sum(o1.to(tl.float32) * g1.to(tl.float32), 1)
    tl.store(POWERS + long(bh) * padded + rows, lse)
    tl.store(DELTA + long(bh) * padded + rows, delta)
    stop = key_stop(rules, b, S)
    D0: tl.constexpr = setup.D0
    D1: tl.constexpr = setup.D1 if setup.D1 > 0 else 16
    dq0 = tl.zeros([M, D0], tl.float32)
    dq1 = tl.zeros([M, D1], tl.float32)
    dslope = tl.zeros([M], tl.float32)
    steep = factor(rules)
    i0, i1, i2, i3 = keys_seen(first, last, stop, left, right, setup)
    ask0, ask1, see0, see1, end0, end1 = tile_ranges(i0, i1, i2, i3, setup)
    if setup.chunk:
        TILES, ask1, see0 = own_list(
            TILES, TABLES, list_strides, rules, b, h, block, stop, T, S, shift, left, right, blocks,
            column_tiles, i0, i3, False, setup,
        )  # fmt: skip
        ask0 = 0
        see1 = column_tiles
        end0 = column_tiles
        end1 = column_tiles
    size = tl.full([M], 1.0, tl.float32)
    if SIZE is not None:
        if tl.max(tl.where(lse < 0.5 * BIG, tl.abs(lse), 0.0), 0) > ROUGH:
            mass = tl.zeros([M], tl.float32)
            for some in tl.static_range(2):  # by position all tiles follow each other
                lo = ask0 if some == 0 else (see0 if setup.listed else end1)
                hi = (ask1 if setup.listed else end1) if some == 0 else end1
                for i in tl.range(lo, hi, num_stages=1):
                    start = tile_of(TILES, i, setup) * N
                    k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
                    cols = start + tl.arange(0, N)
                    s, _ = open_scores(
                        product(q0, q1, k0, k1, setup), at[:, None], rows[:, None], cols[None, :], b, h,
                        stop, rules, T, S, left, right, True, setup,
                    )  # fmt: skip
                    mass += tl.sum(tl.exp2(s * steep - lse[:, None]), 1)
            size = tl.where(mass > 0, 1.0 / mass, 1.0)
        tl.store(SIZE + long(bh) * padded + rows, size)
    for phase in tl.static_range(3):
        lo = ask0 if phase == 0 else (see0 if phase == 1 else end0)
        hi = ask1 if phase == 0 else (see1 if phase == 1 else end1)
        needed = not setup.listed if phase == 2 else (phase == 1 or setup.left or setup.listed)
        if needed and (phase != 1 or not setup.each):
            for i in tl.range(lo, hi, num_stages=setup.stages if phase == 1 or setup.listed else 1):
                start = tile_of(TILES, i, setup) * N
                k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
                v0, v1 = load(V0, V1, v_strides, b, h // setup.G, start, S, N, values)
                cols = start + tl.arange(0, N)
                s, bent = open_scores(
                    product(q0, q1, k0, k1, setup), at[:, None], rows[:, None], cols[None, :], b, h, stop,
                    rules, T, S, left, right, phase != 1, setup,
                )  # fmt: skip
                p = tl.exp2(s * steep - lse[:, None])
                if SIZE is not None:
                    p = p * size[:, None]
                dp = weighed(g0, g1, v0, v1, values, setup)
                of_score, ds = slope(p, dp, delta[:, None], bent, rules)
                if DSLOPES is not None:
                    apart = tl.abs(at[:, None].to(tl.float32) - cols[None, :].to(tl.float32))
                    dslope -= tl.sum(of_score * apart, 1)
                dq0 = spread(ds, k0, dq0, setup)
                if setup.D1 > 0:
                    dq1 = spread(ds, k1, dq1, setup)
    if DSLOPES is not None:
        tl.store(DSLOPES + long(bh) * T + rows, dslope, mask=valid)
    DQ += long(b) * dq_strides[0] + long(h) * dq_strides[1] + (long(rows) * dq_strides[2])[:, None]
    c = tl.arange(0, D0)[None, :]
    tl.store(DQ + c, (dq0 * rules.scale).to(DQ.dtype.element_ty), mask=valid[:, None] & (c < setup.D))
    if setup.D1 > 0:
        c = D0 + tl.arange(0, D1)[None, :]
        tl.store(DQ + c, (dq1 * rules.scale).to(DQ.dtype.element_ty), mask=valid[:, None] & (c < setup.D))


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "padded", "column_tiles"])
def attend_dkv_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, V0, V1, v_strides, GRAD0, GRAD1, grad_strides, POWERS, DELTA, SIZE,
    DK, dk_strides, DV, dv_strides, TILES, TABLES, list_strides, rules,
    H, T, S, shift, left, right, b0, blocks, padded, column_tiles,
    values: tl.constexpr, grads: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block = tl.program_id(0)
    hk = tl.program_id(1)
    b = b0 + tl.program_id(2)
    keys = block * M + tl.arange(0, M)
    stop = key_stop(rules, b, S)
    k0, k1 = load(K0, K1, k_strides, b, hk, block * M, S, M, setup)
    v0, v1 = load(V0, V1, v_strides, b, hk, block * M, S, M, values)
    D0: tl.constexpr = setup.D0
    D1: tl.constexpr = setup.D1 if setup.D1 > 0 else 16
    E0: tl.constexpr = values.D0
    E1: tl.constexpr = values.D1 if values.D1 > 0 else 16
    dk0 = tl.zeros([M, D0], tl.float32)
    dk1 = tl.zeros([M, D1], tl.float32)
    dv0 = tl.zeros([M, E0], tl.float32)
    dv1 = tl.zeros([M, E1], tl.float32)
    steep = factor(rules)
    query_stop = tl.where(block * M < stop, tl.cdiv(T, N) * N, 0)  # beyond T weights are 0 anyway
    last_key = tl.minimum((block + 1) * M, S) - 1
    i0, i1, i2, i3 = queries_seeing(block * M, last_key, 0, query_stop, shift, left, right, setup)
    if rules.lengths is not None:
        i1 = tl.where(last_key < stop, i1, i3)  # padding in this block: each tile asks
        i2 = tl.maximum(i1, i2)
    for g in range(setup.G):
        h = hk * setup.G + g
        base = long(b * H + h) * padded
        ask0, ask1, see0, see1, end0, end1 = tile_ranges(i0, i1, i2, i3, setup)
        tiles = TILES
        if setup.chunk:
            tiles, ask1, see0 = own_list(
                TILES, TABLES, list_strides, rules, b, h, block, stop, T, S, shift, left, right, blocks,
                column_tiles, i0, i3, True, setup,
            )  # fmt: skip
            ask0 = 0
            see1 = column_tiles
            end0 = column_tiles
            end1 = column_tiles
        for phase in tl.static_range(3):
            lo = ask0 if phase == 0 else (see0 if phase == 1 else end0)
            hi = ask1 if phase == 0 else (see1 if phase == 1 else end1)
            # queries in any order: each tile asks, and they are the last
            needed = phase < 2 or ((setup.left or setup.placed) and not setup.listed)
            if needed and (phase != 1 or not setup.each):
                for i in tl.range(lo, hi, num_stages=setup.stages if phase == 1 or setup.listed else 1):
                    start = tile_of(tiles, i, setup) * N
                    q0, q1 = load(Q0, Q1, q_strides, b, h, start, T, N, setup)
                    g0, g1 = load(GRAD0, GRAD1, grad_strides, b, h, start, T, N, grads)
                    rows = start + tl.arange(0, N)
                    at = place(rules, rows, T, shift, setup)
                    lse = tl.load(POWERS + base + rows)
                    delta = tl.load(DELTA + base + rows)
                    s, bent = open_scores(
                        product(k0, k1, q0, q1, setup), at[None, :], rows[None, :], keys[:, None], b, h,
                        stop, rules, T, S, left, right, phase != 1, setup,
                    )  # fmt: skip
                    p = tl.exp2(s * steep - lse[None, :])
                    if SIZE is not None:
                        p = p * tl.load(SIZE + base + rows)[None, :]
                    dv0 = mixed(p, g0, dv0, setup)
                    if values.D1 > 0:
                        dv1 = mixed(p, g1, dv1, setup)
                    dp = weighed(v0, v1, g0, g1, values, setup)
                    _, ds = slope(p, dp, delta[None, :], bent, rules)
                    dk0 = spread(ds, q0, dk0, setup)
                    if setup.D1 > 0:
                        dk1 = spread(ds, q1, dk1, setup)
    inside = keys[:, None] < S
    DK += long(b) * dk_strides[0] + long(hk) * dk_strides[1] + (long(keys) * dk_strides[2])[:, None]
    DV += long(b) * dv_strides[0] + long(hk) * dv_strides[1] + (long(keys) * dv_strides[2])[:, None]
    c = tl.arange(0, D0)[None, :]
    tl.store(DK + c, (dk0 * rules.scale).to(DK.dtype.element_ty), mask=inside & (c < setup.D))
    if setup.D1 > 0:
        c = D0 + tl.arange(0, D1)[None, :]
        tl.store(DK + c, (dk1 * rules.scale).to(DK.dtype.element_ty), mask=inside & (c < setup.D))
    c = tl.arange(0, E0)[None, :]
    tl.store(DV + c, dv0.to(DV.dtype.element_ty), mask=inside & (c < values.D))
    if values.D1 > 0:
        c = E0 + tl.arange(0, E1)[None, :]
        tl.store(DV + c, dv1.to(DV.dtype.element_ty), mask=inside & (c < values.D))


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "padded", "column_tiles", "sequences", "heads"])
def attend_dbias_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, V0, V1, v_strides, GRAD0, GRAD1, grad_strides, POWERS, DELTA, SIZE,
    DBIAS, dbias_strides, rules, H, T, S, shift, left, right, b0, padded, column_tiles, sequences, heads,
    values: tl.constexpr, grads: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block = tl.program_id(0) // column_tiles
    tile = tl.program_id(0) % column_tiles
    own_h = tl.program_id(1)
    own_b = b0 + tl.program_id(2)
    rows = block * M + tl.arange(0, M)
    cols = tile * N + tl.arange(0, N)
    at = place(rules, rows, T, shift, setup)
    total = tl.zeros([M, N], tl.float32)
    steep = factor(rules)
    for n in range(sequences * heads):  # all that share the bias
        b = own_b + n // heads
        h = own_h + n % heads
        stop = key_stop(rules, b, S)
        q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
        g0, g1 = load(GRAD0, GRAD1, grad_strides, b, h, block * M, T, M, grads)
        k0, k1 = load(K0, K1, k_strides, b, h // setup.G, tile * N, S, N, setup)
        v0, v1 = load(V0, V1, v_strides, b, h // setup.G, tile * N, S, N, values)
        base = long(b * H + h) * padded + rows
        lse = tl.load(POWERS + base)
        delta = tl.load(DELTA + base)
        s, bent = open_scores(
            product(q0, q1, k0, k1, setup), at[:, None], rows[:, None], cols[None, :], b, h, stop, rules, T,
            S, left, right, True, setup,
        )  # fmt: skip
        p = tl.exp2(s * steep - lse[:, None]) * tl.load(SIZE + base)[:, None]
        dp = weighed(g0, g1, v0, v1, values, setup)
        of_score, _ = slope(p, dp, delta[:, None], bent, rules)
        total += of_score
    DBIAS += long(own_b) * dbias_strides[0] + long(own_h) * dbias_strides[1]
    offsets = long(rows)[:, None] * dbias_strides[2] + cols[None, :]
    inside = (rows[:, None] < T) & (cols[None, :] < S)
    tl.store(DBIAS + offsets, total.to(DBIAS.dtype.element_ty), mask=inside)


class Gradients(NamedTuple):
    """Gradients in the dtypes of their tensors, except slopes in float32; None: not requested."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    slopes: Tensor | None


class Plan(NamedTuple):
    """A plan for all calls with one signature."""

    by_query: dict[str, object]  # of each request, the shared attributes
    by_key: dict[str, object]
    values: Channels
    outs: Channels
    grads: Channels
    launch_q: Launch
    launch_k: Launch


def backward(prepared: Prepared, v: Tensor, out: Tensor, grad: Tensor, of_bias: bool = False) -> Gradients:
    """Return gradients from output, lse and the output's gradient of full rows; of_bias: also of biases."""
    (B, H, T, S), q, k, rules = prepared.shape, prepared.q, prepared.k, prepared.rules
    v, out, grad = (x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for x in (v, out, grad))
    signatures = tuple([signature_of(x) for x in (v, out, grad, prepared.lse)])
    signature = ("attend backward", prepared.signature, signatures, of_bias)
    plan: Plan | None = PLANS.get(signature)
    if plan is None:
        listed = "_listed" if prepared.is_listed else ""
        by_query = Request(prepared, f"attend_dq{listed}", arranged=True)
        by_key = Request(prepared, f"attend_dkv{listed}", keys_first=True, arranged=True)
        fits = by_key.setup.N <= by_query.setup.M <= ROOM
        assert fits, "what is kept per query is read as far as it was written"
        values, outs, grads = channels_of(v), channels_of(out), channels_of(grad)
    else:
        by_query, by_key = Request.again(plan.by_query, prepared), Request.again(plan.by_key, prepared)
        values, outs, grads = plan.values, plan.outs, plan.grads
    padded = -(-T // ROOM) * ROOM
    powers, delta = prepared.empty(B, H, padded), prepared.empty(B, H, padded)
    dq, dk, dv = _room(q), _room(k), _room(v)
    size = None if rules.bias is None else prepared.empty(B, H, padded)
    dslopes = prepared.empty(B, H, T) if of_bias and rules.slopes is not None else None
    if plan is None:
        lists_q, lists_k = by_query.lists_alike, by_key.lists_alike
    else:
        by_query.lend(by_key)
        lists_q, lists_k = by_query.tile_lists, by_key.tile_lists
    M, N = by_query.setup.M, by_query.setup.N
    to_q: tuple[object, ...] = (
        *described(v, N, values), strides_of(v)[:3], *described(out, M, outs), strides_of(out)[:3],
        *described(grad, M, grads), strides_of(grad)[:3], prepared.lse, powers, delta, size, dq,
        strides_of(dq)[:3], dslopes, *lists_q,
    )  # fmt: skip
    M, N = by_key.setup.M, by_key.setup.N
    to_k: tuple[object, ...] = (
        *described(v, M, values), strides_of(v)[:3], *described(grad, N, grads), strides_of(grad)[:3],
        powers, delta, size, dk, strides_of(dk)[:3], dv, strides_of(dv)[:3], *lists_k,
    )  # fmt: skip
    if plan is None:
        launch_q = by_query.planned(
            attend_dq_kernel, by_query.grid, *to_q,
            sizes=(by_query.blocks, padded, -(-S // by_query.setup.N)), options=(values, outs, grads),
        )  # fmt: skip
        launch_k = by_key.planned(
            attend_dkv_kernel, (by_key.blocks, k.shape[1]), *to_k,
            sizes=(by_key.blocks, padded, -(-T // N)), options=(values, grads),
        )  # fmt: skip
        same = by_query.without_tensors(), by_key.without_tensors()
        PLANS.keep(signature, Plan(*same, values, outs, grads, launch_q, launch_k))
        with launch_k.compiling(q, k, rules, *to_k):
            if by_query.has_tables or by_key.has_tables:
                with launch_q.compiling(q, k, rules, *to_q):
                    by_query.lend(by_key)
                    lists_q, lists_k = by_query.tile_lists, by_key.tile_lists
                to_q, to_k = (*to_q[: -len(lists_q)], *lists_q), (*to_k[: -len(lists_k)], *lists_k)
            launch_q(q, k, rules, *to_q)
    else:
        launch_q, launch_k = plan.launch_q, plan.launch_k
        launch_q(q, k, rules, *to_q)
    launch_k(q, k, rules, *to_k)
    dbias = None
    if of_bias and size is not None:
        dbias = _of_bias(prepared, v, grad, powers, delta, size)
    return Gradients(dq, dk, dv, dbias, None if dslopes is None else dslopes.sum((0, 2)))


GradientsOf = Callable[[Scores, Tensor, Tensor, Tensor, Tensor], Gradients]


def planned(of_bias: bool) -> GradientsOf:
    """Return `backward` for calls of one kind: the launches are cached by the layout of the tensors."""
    ready = Plans()

    def again(scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        scoring, rule_tensors = scores.scoring, scores.mask.tensors.values()
        learned = scoring.slopes, scoring.sinks, scoring.bias
        tensors = scores.q, scores.k, v, out, lse, grad, *learned, *rule_tensors
        # saved tensors may return with another layout
        layout = tuple([x if x is None else signature_of(x) for x in tensors])
        direct = ready.get(layout)
        if direct is not None:
            return direct(scores, v, out, lse, grad)
        prepared = Prepared(scores, lse)
        gradients = backward(prepared, v, out, grad, of_bias)
        if not ready.seen_before(layout):
            ready.keep(layout, _direct_backward(prepared, v, out, grad, of_bias))
        return gradients

    return again


def _direct_backward(
    prepared: Prepared, v: Tensor, out: Tensor, grad: Tensor, of_bias: bool
) -> GradientsOf | None:
    """Return a function with the two launches alone; None if more has to be done."""
    scores, (B, H, T, _) = prepared.scores, prepared.shape
    signatures = tuple([signature_of(x) for x in (v, out, grad, prepared.lse)])
    plan: Plan | None = PLANS.get(("attend backward", prepared.signature, signatures, of_bias))
    as_they_are = prepared.q is scores.q and prepared.k is scores.k and prepared.lse is prepared.input_lse
    if plan is None or not as_they_are or scores.scoring.bias is not None:
        return None
    if any(x.stride(-1) != 1 for x in (v, out, grad)):
        return None
    run_q, run_k = (launch.again(scores.q, scores.k) for launch in (plan.launch_q, plan.launch_k))
    if run_q is None or run_k is None:
        return None
    (M, N), (keys, queries) = plan.launch_q.setup[:2], plan.launch_k.setup[:2]
    v_of, out_of, grad_of = (
        describer(x, size, channels)
        for x, size, channels in ((v, N, plan.values), (out, M, plan.outs), (grad, M, plan.grads))
    )
    v_of_k, grad_of_k = describer(v, keys, plan.values), describer(grad, queries, plan.grads)
    v_steps, out_steps, grad_steps = (strides_of(x)[:3] for x in (v, out, grad))
    rules_of = rules_by(prepared)
    by_query, by_key = Request.again(plan.by_query, prepared), Request.again(plan.by_key, prepared)
    lists_of_q, lists_of_k = lister(by_query), lister(by_key)
    by_query.lend(by_key)
    lends = by_key.lent is not None
    slopes = of_bias and scores.scoring.slopes is not None
    padded_shape, empty, device = (B, H, -(-T // ROOM) * ROOM), torch.empty, v.device

    def direct(scores: Scores, v: Tensor, out: Tensor, lse: Tensor, grad: Tensor) -> Gradients:
        q, k = scores.q, scores.k
        powers, delta = (empty(padded_shape, dtype=torch.float32, device=device) for _ in range(2))
        dq, dk, dv = _room(q), _room(k), _room(v)
        dslopes = empty((B, H, T), dtype=torch.float32, device=device) if slopes else None
        rules = rules_of(scores)
        lists_q = lists_of_q(scores, rules, None)
        lists_k = lists_of_k(scores, rules, cast(Tables, lists_q[1])[1] if lends else None)
        run_q(
            q, k, rules, *v_of(v), v_steps, *out_of(out), out_steps, *grad_of(grad), grad_steps, lse, powers,
            delta, None, dq, strides_of(dq)[:3], dslopes, *lists_q,
        )  # fmt: skip
        run_k(
            q, k, rules, *v_of_k(v), v_steps, *grad_of_k(grad), grad_steps, powers, delta, None, dk,
            strides_of(dk)[:3], dv, strides_of(dv)[:3], *lists_k,
        )  # fmt: skip
        return Gradients(dq, dk, dv, None, None if dslopes is None else dslopes.sum((0, 2)))

    return direct


def _room(x: Tensor) -> Tensor:
    """Return an uninitialised gradient in x's layout, but never overlapping: channels lie side by side."""
    room = torch.empty_like(x)
    if room.stride(-1) == 1 or x.shape[-1] == 1:
        return room
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _of_bias(
    prepared: Prepared, v: Tensor, grad: Tensor, powers: Tensor, delta: Tensor, size: Tensor
) -> Tensor:
    """Return d loss / d bias, [B or 1, H or 1, T, S]."""
    B, H, T, S = prepared.shape
    bias = prepared.scores.scoring.bias
    assert bias is not None
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    request = Request(prepared, "attend_dbias")
    setup, values, grads = request.setup, channels_of(v), channels_of(grad)
    columns = -(-S // setup.N)
    sequences, heads = (full if shared == 1 else 1 for shared, full in zip(bias.shape, (B, H), strict=False))
    tensors = (
        *described(v, setup.N, values), strides_of(v)[:3], *described(grad, setup.M, grads),
        strides_of(grad)[:3], powers, delta, size, dbias, strides_of(dbias)[:3],
    )  # fmt: skip
    planned = request.planned(
        attend_dbias_kernel, (request.blocks * columns, bias.shape[1]), *tensors,
        sizes=(powers.shape[-1], columns, sequences, heads), options=(values, grads),
    )  # fmt: skip
    planned._replace(B=bias.shape[0])(prepared.q, prepared.k, prepared.rules, *tensors)
    return dbias
