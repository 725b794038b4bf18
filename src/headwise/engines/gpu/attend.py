"""The first pass in one kernel: outputs, lse and, optionally, statistics of each query's weights.

One program: M queries of one head over the tiles they see, an online softmax. What it may keep beside the
row's largest score and its sum are two more sums, of p x and of p times a distance, moved along whenever the
largest score moves. The keys of a few queries are cut into parts, put together by `merge_kernel`.

Scores are those of the second pass (`tile.scores`), so lse and weights agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import ON_THE_WAY
from ..plans import PLANS
from ..scores import Scores
from .launches import (
    FEW_QUERIES,
    NOT_SPECIAL,
    Arguments,
    interpreted,
    launch,
    multiprocessors,
    specialization,
)
from .lists import own_list
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
    LN2,
    LOG2E,
    Channels,
    ends,
    factor,
    finite,
    key_stop,
    keys_seen,
    load,
    long,
    open_scores,
    place,
    product,
    tile_of,
    tile_ranges,
)

LOWEST = tl.constexpr(-1.5e30)  # below every score that is not hidden
SHORTEST_PART = 512  # keys


class Wants(NamedTuple):
    """The row of each statistic in the result, -1: none; and the sums that the statistics need."""

    entropy: int = -1
    effective_keys: int = -1
    confidence: int = -1
    distance: int = -1
    max_logit: int = -1
    surprise: bool = False
    away: bool = False
    parts: bool = False  # whether keys are cut into parts


@triton.jit
def mixed(p, v, acc, setup: tl.constexpr):
    """acc + p v, in the inputs' own precision."""
    if setup.exact:
        return tl.dot(p, v, acc=acc, input_precision="tf32x3")
    else:
        return tl.dot(p.to(setup.dtype), v, acc=acc)


@triton.jit
def share_of(lo, hi, split, splits):
    """The split-th part of [lo, hi)."""
    return lo + (hi - lo) * split // splits, lo + (hi - lo) * (split + 1) // splits


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "total_rows", "column_tiles", "splits"])
def attend_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, V0, V1, v_strides, OUT, out_strides, LSE, ROWS, TILES, TABLES,
    list_strides, rules, H, T, S, shift, left, right, b0, blocks, total_rows, column_tiles, splits,
    values: tl.constexpr, wants: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    split = 0
    block = tl.program_id(0)
    if wants.parts:
        split = block % splits
        block = block // splits
    block = blocks - 1 - block  # longest rows first
    h = tl.program_id(1)
    b = b0 + tl.program_id(2)
    rows = block * M + tl.arange(0, M)
    at = place(rules, rows, T, shift, setup)
    first, last = ends(at, rows, block * M, T, shift, M, setup)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = key_stop(rules, b, S)
    D0: tl.constexpr = values.D0
    D1: tl.constexpr = values.D1 if values.D1 > 0 else 16
    top = tl.full([M], LOWEST, tl.float32)
    total = tl.zeros([M], tl.float32)
    surprise = tl.zeros([M], tl.float32)  # sums of p (x - top)
    away = tl.zeros([M], tl.float32)  # sums of p times a distance
    out0 = tl.zeros([M, D0], tl.float32)
    out1 = tl.zeros([M, D1], tl.float32)
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
    if wants.parts:
        ask0, ask1 = share_of(ask0, ask1, split, splits)
        see0, see1 = share_of(see0, see1, split, splits)
        end0, end1 = share_of(end0, end1, split, splits)
    for phase in tl.static_range(3):
        lo = ask0 if phase == 0 else (see0 if phase == 1 else end0)
        hi = ask1 if phase == 0 else (see1 if phase == 1 else end1)
        needed = not setup.listed if phase == 2 else (phase == 1 or setup.left or setup.listed)
        if needed and (phase != 1 or not setup.each):
            for i in tl.range(lo, hi, num_stages=setup.stages if phase == 1 or setup.listed else 1):
                start = tile_of(TILES, i, setup) * N
                k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
                cols = start + tl.arange(0, N)
                s, _ = open_scores(
                    product(q0, q1, k0, k1, setup), at[:, None], rows[:, None], cols[None, :], b, h, stop,
                    rules, T, S, left, right, phase != 1, setup,
                )  # fmt: skip
                higher = tl.maximum(top, tl.max(s, 1) * steep)
                x = s * steep - higher[:, None]
                p = tl.exp2(x)
                shrunk = tl.exp2(top - higher)
                part = tl.sum(p, 1)
                if wants.surprise:
                    if phase != 1 or rules.bias is not None or rules.relative is not None:
                        x = tl.maximum(x, -1e4)  # 0 times -inf is not 0
                    surprise = shrunk * (surprise + total * (top - higher)) + tl.sum(p * x, 1)
                if wants.away:
                    if setup.behind:  # sum of p (first - j)
                        near = tl.arange(0, N).to(tl.float32)
                        apart = part * (first - start) - tl.sum(p * near[None, :], 1)
                    else:
                        apart = tl.sum(p * tl.abs((at[:, None] - cols[None, :]).to(tl.float32)), 1)
                    away = away * shrunk + apart
                total = total * shrunk + part
                v0, v1 = load(V0, V1, v_strides, b, h // setup.G, start, S, N, values)
                out0 = mixed(p, v0, out0 * shrunk[:, None], setup)
                if values.D1 > 0:
                    out1 = mixed(p, v1, out1 * shrunk[:, None], setup)
                top = higher

    empty = total == 0
    peak = top
    if wants.away and setup.behind:
        away += (at - first).to(tl.float32) * total
    if rules.sinks is not None and not wants.parts:
        sink = finite(tl.load(rules.sinks + h)) * LOG2E
        higher = tl.maximum(top, sink)
        shrunk = tl.exp2(top - higher)
        sunk = tl.exp2(sink - higher)
        surprise = shrunk * (surprise + total * (top - higher)) + sunk * tl.maximum(sink - higher, -1e4)
        total = total * shrunk + sunk
        away = away * shrunk
        out0 = out0 * shrunk[:, None]
        out1 = out1 * shrunk[:, None]
        top = higher
    total = tl.where(empty, 1.0, total)
    valid = rows < T
    base = long(b * H + h) * T + rows
    if wants.parts:
        base += long(split) * total_rows
        OUT += long(split) * out_strides[3]
    tl.store(LSE + base, tl.where(empty, -float("inf"), (top + tl.log2(total)) * LN2), mask=valid)
    share = tl.where(empty, 0.0, 1.0 / total)
    OUT += long(b) * out_strides[0] + long(h) * out_strides[1] + (long(rows) * out_strides[2])[:, None]
    c = tl.arange(0, D0)[None, :]
    done = valid[:, None] & (c < values.D)
    tl.store(OUT + c, (out0 * share[:, None]).to(OUT.dtype.element_ty), mask=done)
    if values.D1 > 0:
        c = D0 + tl.arange(0, D1)[None, :]
        done = valid[:, None] & (c < values.D)
        tl.store(OUT + c, (out1 * share[:, None]).to(OUT.dtype.element_ty), mask=done)
    if wants.surprise:
        entropy = tl.where(empty, 0.0, (tl.log2(total) - surprise / total) * LN2)
        if wants.entropy >= 0:
            tl.store(ROWS + wants.entropy * long(total_rows) + base, entropy, mask=valid)
        if wants.effective_keys >= 0:
            keys = tl.where(empty, 0.0, tl.exp(entropy))
            tl.store(ROWS + wants.effective_keys * long(total_rows) + base, keys, mask=valid)
    if wants.away:
        tl.store(ROWS + wants.distance * long(total_rows) + base, away / total, mask=valid)
    if wants.confidence >= 0:
        weight = tl.where(empty, 0.0, tl.exp2(peak - top) / total)
        tl.store(ROWS + wants.confidence * long(total_rows) + base, weight, mask=valid)
    if wants.max_logit >= 0:
        logit = tl.where(empty, -float("inf"), peak * LN2)
        tl.store(ROWS + wants.max_logit * long(total_rows) + base, logit, mask=valid)


@triton.jit(do_not_specialize=["H", "T", "splits", "total_rows"])
def merge_kernel(
    PARTS, PARTS_LSE, OUT, out_strides, LSE, SINKS, H, T, splits, total_rows,
    D: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One query: its parts, which lie [splits, B, H, T, D], by their lse."""
    row = tl.program_id(0)
    t = row % T
    h = row // T % H
    b = row // T // H
    parts = tl.arange(0, MOST)
    channels = tl.arange(0, WIDE)
    offsets = long(parts) * total_rows + row
    lse = tl.load(PARTS_LSE + offsets, mask=parts < splits, other=-float("inf"))
    top = tl.max(lse, 0)
    empty = top == -float("inf")
    if SINKS is not None:
        sink = finite(tl.load(SINKS + h))
        top = tl.maximum(top, sink)
    top = tl.where(empty, 0.0, top)
    weights = tl.exp2((lse - top) * LOG2E)
    total = tl.sum(weights, 0)
    if SINKS is not None:
        total += tl.exp2((sink - top) * LOG2E)
    out = tl.load(
        PARTS + offsets[:, None] * D + channels[None, :],
        mask=(parts[:, None] < splits) & (channels[None, :] < D), other=0.0,
    )  # fmt: skip
    out = tl.sum(out * weights[:, None], 0) / tl.where(empty, 1.0, total)
    tl.store(LSE + row, tl.where(empty, -float("inf"), top + tl.log2(total) * LN2))
    OUT += long(b) * out_strides[0] + long(h) * out_strides[1] + long(t) * out_strides[2]
    tl.store(OUT + channels, tl.where(empty, 0.0, out).to(OUT.dtype.element_ty), mask=channels < D)


class Plan(NamedTuple):
    """A plan for all calls with one signature."""

    same: dict[str, object]  # shared attributes of the request
    values: Channels
    launch: Launch
    splits: int
    steps: tuple[int, ...]  # the output's, and from one part to the next


def attend(
    prepared: Prepared, v: Tensor, names: tuple[str, ...] = ()
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (output [B, H, T, Dv], lse [B, H, T], [len(names), B, H, T] values per query or None)."""
    v = v if v.stride(-1) == 1 or v.shape[-1] == 1 else v.contiguous()
    signature = ("attend", prepared.signature, signature_of(v), names)
    plan: Plan | None = PLANS.get(signature)
    if plan is None:
        request = Request(prepared, _kind(prepared, names), arranged=True)
    else:
        request = Request.again(plan.same, prepared)
    B, H, T, S = prepared.shape
    out, lse = room_like(prepared.q, v), prepared.empty(B, H, T)
    rows = prepared.empty(len(names), B, H, T) if names else None
    full_out, full_lse, splits = out, lse, _splits(prepared, names) if plan is None else plan.splits
    if splits > 1:
        out, lse = prepared.empty(splits, B, H, T, v.shape[-1]), prepared.empty(splits, B, H, T)
    if plan is None:
        values = channels_of(v)
        steps = (*strides_of(out)[-4:-1], out.stride(0) if splits > 1 else 0)
        tensors = _tensors(request, v, values, out, steps, lse, rows, request.lists_alike)
        launch_it = request.planned(
            attend_kernel, (request.blocks * splits, H), *tensors,
            sizes=(request.blocks, B * H * T, -(-S // request.setup.N), splits),
            options=(values, _wants(names, splits)),
        )  # fmt: skip
        plan = Plan(request.without_tensors(), values, launch_it, splits, steps)
        PLANS.keep(signature, plan)
        if request.has_tables:
            with launch_it.compiling(prepared.q, prepared.k, prepared.rules, *tensors):
                _ = request.tile_lists
    launch_it, lists = plan.launch, request.tile_lists
    tensors = _tensors(request, v, plan.values, out, plan.steps, lse, rows, lists)
    launch_it(prepared.q, prepared.k, prepared.rules, *tensors)
    if splits > 1:
        _merge(prepared, out, lse, full_out, full_lse)
    return full_out, full_lse, rows


Output = tuple[Tensor, Tensor, Tensor | None]


def planned(scores: Scores, v: Tensor, names: tuple[str, ...]) -> Callable[[Scores, Tensor], Output]:
    """Return `attend` as a single launch, for all calls with the signatures of one that has run."""
    prepared = Prepared(scores)
    plan: Plan | None = PLANS.get(("attend", prepared.signature, signature_of(v), names))
    go = None
    if plan is not None and plan.splits == 1 and prepared.q is scores.q and prepared.k is scores.k:
        go = plan.launch.again(scores.q, scores.k) if v.stride(-1) == 1 else None
    if plan is None or go is None:
        return lambda scores, v: attend(Prepared(scores), v, names)
    v_of, v_steps, out_steps = describer(v, plan.launch.setup.N, plan.values), strides_of(v)[:3], plan.steps
    rules_of, lists_of = rules_by(prepared), lister(Request.again(plan.same, prepared))
    (B, H, T), count, empty, device = scores.q.shape[:3], len(names), torch.empty, v.device
    float32, room = torch.float32, room_by(scores.q, v)

    def again(scores: Scores, v: Tensor) -> Output:
        # torch reads sizes faster one by one than as a tuple
        out, lse = room(scores.q), empty(B, H, T, dtype=float32, device=device)
        rows = empty(count, B, H, T, dtype=float32, device=device) if names else None
        rules = rules_of(scores)
        lists = lists_of(scores, rules, None)
        go(scores.q, scores.k, rules, *v_of(v), v_steps, out, out_steps, lse, rows, *lists)
        return out, lse, rows

    return again


def _tensors(
    request: Request, v: Tensor, values: Channels, out: Tensor, steps: tuple[int, ...], lse: Tensor,
    rows: Tensor | None, lists: Arguments,
) -> Arguments:  # fmt: skip
    return *described(v, request.setup.N, values), strides_of(v)[:3], out, steps, lse, rows, *lists


def _wants(names: tuple[str, ...], splits: int) -> Wants:
    return Wants(
        **{name: names.index(name) if name in names else -1 for name in ON_THE_WAY},
        surprise="entropy" in names or "effective_keys" in names,
        away="distance" in names,
        parts=splits > 1,
    )


def _merge(prepared: Prepared, parts: Tensor, parts_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Compute output and lse of full rows from those of their parts."""
    (B, H, T, _), splits, Dv = prepared.shape, parts.shape[0], out.shape[-1]
    tensors = (parts, parts_lse, out, strides_of(out)[:3], lse, prepared.rules.sinks)
    constants = (Dv, max(16, triton.next_power_of_2(Dv)), max(2, triton.next_power_of_2(splits)))
    numbers = (H, T, splits, B * H * T)
    launch(
        merge_kernel, (B * H * T, 1, 1), (*tensors, *numbers), constants, specialization(tensors), out.device
    )


def room_like(q: Tensor, v: Tensor) -> Tensor:
    """Return an uninitialised output [B, H, T, Dv] in q's layout: by head, or by position."""
    B, H, T, Dv = *q.shape[:3], v.shape[-1]
    if q.stride(1) < q.stride(2) and H > 1 and T > 1:
        return torch.empty(B, T, H, Dv, dtype=v.dtype, device=v.device).transpose(1, 2)
    return torch.empty(B, H, T, Dv, dtype=v.dtype, device=v.device)


def room_by(q: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
    """Return `room_like` as a function of q, for all with the sizes, strides and dtypes of these."""
    room, like = room_like(q, v), torch.empty_like(q)
    if (room.shape, room.stride(), room.dtype) == (like.shape, like.stride(), like.dtype):
        return torch.empty_like  # the fastest way
    empty, dtype, device, (B, H, T, Dv) = torch.empty, v.dtype, v.device, room.shape
    if room.is_contiguous():
        return lambda q: empty(B, H, T, Dv, dtype=dtype, device=device)
    return lambda q: empty(B, T, H, Dv, dtype=dtype, device=device).transpose(1, 2)


def _kind(prepared: Prepared, names: tuple[str, ...]) -> str:
    """Return the kind of blocks: smaller ones where there is more to do than a product, or little of it."""
    (B, H, T, _), scoring = prepared.shape, prepared.scores.scoring
    if _splits(prepared, names) > 1:
        return "few"
    if scoring.bias is not None:  # beside it two larger blocks would not fit
        return "attend_bias"
    if prepared.is_listed:
        return "attend_listed"
    few = B * H * -(-T // 128) < 4 * multiprocessors(prepared.device)
    return "attend_rules" if few or scoring.softcap is not None or scoring.adds else "attend"


def _splits(prepared: Prepared, names: tuple[str, ...]) -> int:
    """Return the number of parts into which the keys of a few queries are cut, one per multiprocessor."""
    B, H, T, S = prepared.shape
    if T > FEW_QUERIES or names:
        return 1
    programs = B * H * -(-T // 16)
    shortest = 16 if interpreted() else SHORTEST_PART
    return max(1, min(2 * multiprocessors(prepared.device) // programs, S // shortest, 64))
