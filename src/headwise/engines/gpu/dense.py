"""The weights themselves: of chosen keys, their mean over heads, and the heaviest keys of each query.

Keys are a run [begin, begin + count) of all keys, or, picked one by one, a copy of theirs with their numbers
beside it. Where float32 is asked for, each row is divided by its own sum: lse is rounded, and a weight is
only as exact as that.

The heaviest keys are a running list of the best, entered wherever a tile beats its last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...indexing import Index
from .launches import FEW_ROWS, NOT_SPECIAL, SHORT, SHORT_ROWS, interpreted, takes_descriptors
from .lists import powers_of, seen_tiles
from .request import Prepared, Request
from .rows import mass_of, settled
from .tile import (
    BIG,
    HIDDEN,
    between,
    ends,
    in_band,
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
    tile_of,
)

PROGRAMS = 528  # enough to fill any GPU of today a few times over
PATCH = 16  # blocks of rows that are worked on together, so that keys come from the cache


@triton.jit
def keys_shown(first, last, stop, left, right, begin, count, SIZE: tl.constexpr, setup: tl.constexpr):
    """`between` for a block of queries, in tiles of the keys asked for."""
    any_from = 0
    all_from = 0
    all_to = tl.minimum(stop - begin, count)
    any_to = all_to
    if setup.left:
        any_from = first - left - begin
        all_from = last - left - begin
    if setup.right:
        any_to = tl.minimum(any_to, last + right + 1 - begin)
        all_to = tl.minimum(all_to, first + right + 1 - begin)
    return between(any_from, all_from, all_to, any_to, SIZE)


@triton.jit
def numbers_of(COLUMNS, begin, start, count, S, N: tl.constexpr):
    """The keys of a tile; S, which is hidden, beyond the last."""
    spots = start + tl.arange(0, N)
    if COLUMNS is not None:
        cols = tl.load(COLUMNS + spots, mask=spots < count, other=2147483647)
    else:
        cols = begin + spots
    return spots, cols


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "begin", "splits", "tiles"])
def dense_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, LSE, MASS, OUT, COLUMNS, VISIBLE, visible_strides, rules,
    H, T, S, shift, left, right, b0, begin, count, splits, tiles, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits
    h = tl.program_id(1)
    b = b0 + tl.program_id(2)
    bh = b * H + h
    rows = block * M + tl.arange(0, M)
    at = place(rules, rows, T, shift, setup)
    first, last = ends(at, rows, block * M, T, shift, M, setup)
    base = long(bh) * T
    lse = load_lse(LSE + base + rows, rows < T)
    if MASS is not None:
        right_size = 1.0 / tl.load(MASS + base + rows, mask=rows < T, other=1.0)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = key_stop(rules, b, S)
    out = OUT + (base + rows)[:, None] * count
    per = tl.cdiv(tiles, splits)
    lo = split * per
    hi = tl.minimum(lo + per, tiles)
    if setup.listed or COLUMNS is not None:
        a = lo
        z = hi
        c = hi
        d = hi
    else:
        a, z, c, d = keys_shown(first, last, stop, left, right, begin, count, N, setup)
        a = tl.minimum(tl.maximum(a, lo), hi)
        z = tl.minimum(tl.maximum(z, a), hi)
        c = tl.minimum(tl.maximum(c, z), hi)
        d = tl.minimum(tl.maximum(d, c), hi)
    if setup.listed:
        VISIBLE += long(b) * visible_strides[0] + long(h) * visible_strides[1]
        VISIBLE += long(block) * visible_strides[2]
    for phase in tl.static_range(3):
        from_tile = a if phase == 0 else (z if phase == 1 else c)
        to_tile = z if phase == 0 else (c if phase == 1 else d)
        for tile in tl.range(from_tile, to_tile, num_stages=setup.stages):
            spots, cols = numbers_of(COLUMNS, begin, tile * N, count, S, N)
            inside = (rows[:, None] < T) & (spots[None, :] < count)
            shown = True
            if setup.listed:
                shown = tl.load(VISIBLE + tile) != 0
            if shown:
                k0, k1 = load(K0, K1, k_strides, b, h // setup.G, begin + tile * N, begin + count, N, setup)
                x = log_weights(
                    product(q0, q1, k0, k1, setup), lse[:, None], at[:, None], rows[:, None], cols[None, :],
                    b, h, stop, rules, T, S, left, right, phase != 1, setup,
                )  # fmt: skip
                p = tl.exp2(x)
                if MASS is not None:
                    p = p * right_size[:, None]
                tl.store(out + spots[None, :], p.to(OUT.dtype.element_ty), mask=inside)
            else:
                nothing = tl.zeros([M, N], OUT.dtype.element_ty)
                tl.store(out + spots[None, :], nothing, mask=inside)
    nothing = tl.zeros([M, N], OUT.dtype.element_ty)
    for tile in range(lo, a):
        spots = tile * N + tl.arange(0, N)
        tl.store(out + spots[None, :], nothing, mask=(rows[:, None] < T) & (spots[None, :] < count))
    for tile in range(d, hi):
        spots = tile * N + tl.arange(0, N)
        tl.store(out + spots[None, :], nothing, mask=(rows[:, None] < T) & (spots[None, :] < count))


@triton.jit
def add_heads(
    total, more, Q0, Q1, K0, K1, q_strides, k_strides, POWERS, MASS, rules, b, H, T, S, padded,
    at, rows, cols, more_cols, from_row, from_key, key_end, stop, left, right,
    setup: tl.constexpr,
):  # fmt: skip
    """Add the weights of one tile, head after head: two halves that share a block of queries.

    Where the rules are numbers they are the same for all heads, and the sum is hidden, not each of them.
    """
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    powers = POWERS + long(b * H) * padded + rows
    masses = MASS
    if MASS is not None:
        masses = MASS + long(b * H) * T + rows
    for h in tl.range(0, H, num_stages=setup.stages):
        q0, q1 = load(Q0, Q1, q_strides, b, h, from_row, T, M, setup)
        lse = tl.load(powers)
        powers += padded
        size = tl.full([M, 1], 1.0, tl.float32)
        if MASS is not None:
            size = 1.0 / tl.load(masses, mask=rows < T, other=1.0)[:, None]
            masses += T
        k0, k1 = load(K0, K1, k_strides, b, h // setup.G, from_key, key_end, N, setup)
        x = log_weights(
            product(q0, q1, k0, k1, setup), lse[:, None], at[:, None], rows[:, None], cols[None, :],
            b, h, stop, rules, T, S, left, right, setup.listed, setup,
        )  # fmt: skip
        total += tl.exp2(x) if MASS is None else tl.exp2(x) * size
        k0, k1 = load(K0, K1, k_strides, b, h // setup.G, from_key + N, key_end, N, setup)
        x = log_weights(
            product(q0, q1, k0, k1, setup), lse[:, None], at[:, None], rows[:, None], more_cols[None, :],
            b, h, stop, rules, T, S, left, right, setup.listed, setup,
        )  # fmt: skip
        more += tl.exp2(x) if MASS is None else tl.exp2(x) * size
    return total, more


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "begin"])
def mean_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, POWERS, MASS, OUT, COLUMNS, VISIBLE, visible_strides, rules,
    H, T, S, shift, left, right, b0, begin, count, padded, PATCH: tl.constexpr,
    setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block = tl.program_id(1) * PATCH + tl.program_id(0) % PATCH
    tile = tl.program_id(0) // PATCH
    b = b0 + tl.program_id(2)
    rows = block * M + tl.arange(0, M)
    at = place(rules, rows, T, shift, setup)
    first, last = ends(at, rows, block * M, T, shift, M, setup)
    stop = key_stop(rules, b, S)
    spots, cols = numbers_of(COLUMNS, begin, tile * 2 * N, count, S, N)
    more_spots, more_cols = numbers_of(COLUMNS, begin, tile * 2 * N + N, count, S, N)
    if setup.listed or COLUMNS is not None:
        a = tile
        z = tile + 1
        c = z
        d = z
    else:
        a, z, c, d = keys_shown(first, last, stop, left, right, begin, count, 2 * N, setup)
    if setup.listed:
        entry = VISIBLE + long(b) * visible_strides[0] + long(block) * visible_strides[1] + 2 * tile
        d = tl.where((tl.load(entry) != 0) | (tl.load(entry + 1) != 0), d, a)
    total = tl.zeros([M, N], tl.float32)
    more = tl.zeros([M, N], tl.float32)
    if (tile >= a) & (tile < d):
        total, more = add_heads(
            total, more, Q0, Q1, K0, K1, q_strides, k_strides, POWERS, MASS, rules, b, H, T, S, padded,
            at, rows, cols, more_cols, block * M, begin + tile * 2 * N, begin + count, stop, left, right,
            setup,
        )  # fmt: skip
        total = tl.where(in_band(at[:, None], cols[None, :], stop, left, right, setup), total, 0.0)
        more = tl.where(in_band(at[:, None], more_cols[None, :], stop, left, right, setup), more, 0.0)
    share = 1.0 / H
    out = OUT + (long(b) * T + rows)[:, None] * count
    tl.store(
        out + spots[None, :], (total * share).to(OUT.dtype.element_ty),
        mask=(rows[:, None] < T) & (spots[None, :] < count),
    )  # fmt: skip
    tl.store(
        out + more_spots[None, :], (more * share).to(OUT.dtype.element_ty),
        mask=(rows[:, None] < T) & (more_spots[None, :] < count),
    )  # fmt: skip


def dense(prepared: Prepared, columns: Index | None) -> Tensor:
    """Return [B, H, T, n] weights of keys in `columns` (slice, index tensor, or None: all), in q's dtype."""
    selection = _select(prepared, columns, "dense")
    B, H, T, _ = prepared.shape
    out = torch.empty(B, H, T, selection.size, dtype=prepared.q.dtype, device=prepared.device)
    visible = _visible_tiles(selection, triton.cdiv(selection.size, selection.request.setup.N))
    strides = None
    if visible is not None:
        strides = (
            *(0 if n == 1 else s for n, s in zip(visible.shape[:2], visible.stride(), strict=False)),
            visible.stride(2),
        )
    tiles = triton.cdiv(selection.size, selection.request.setup.N)
    programs = selection.request.B * selection.request.H * selection.request.blocks
    splits = min(tiles, max(min(4, triton.cdiv(tiles, 16)), triton.cdiv(PROGRAMS, programs)))
    selection.request.launch(
        dense_kernel, (splits * selection.request.blocks, selection.request.H), prepared.lse, _mass(prepared),
        out, selection.numbers, visible, strides, sizes=(selection.begin, selection.size, splits, tiles),
    )  # fmt: skip
    return out


def mean(prepared: Prepared, columns: Index | None) -> Tensor:
    """Return [B, T, n], the mean over heads; the weights of a head are never stored."""
    selection = _select(prepared, columns, "mean")
    B, _, T, _ = prepared.shape
    out = torch.empty(B, T, selection.size, dtype=prepared.q.dtype, device=prepared.device)
    visible = _visible_tiles(selection, 2 * triton.cdiv(selection.size, 2 * selection.request.setup.N))
    strides = None
    if visible is not None:
        visible = visible.amax(1)  # [B or 1, row tiles, column tiles]: what any head is shown
        strides = (0 if visible.shape[0] == 1 else visible.stride(0), visible.stride(1))
    powers = powers_of(prepared.lse, prepared.kind)
    blocks = selection.request.blocks
    patch = min(PATCH, triton.next_power_of_2(blocks))
    tiles = triton.cdiv(selection.size, 2 * selection.request.setup.N)
    selection.request.launch(
        mean_kernel, (patch * tiles, triton.cdiv(blocks, patch)), powers, _mass(prepared), out,
        selection.numbers, visible, strides, sizes=(selection.begin, selection.size, powers.shape[-1]),
        options=(patch,),
    )  # fmt: skip
    return out


class Selection(NamedTuple):
    """The keys that were selected."""

    request: Request
    begin: int  # the first of them
    size: int
    numbers: Tensor | None  # int32 [size], if they are indices


def _select(prepared: Prepared, columns: Index | None, kind: str) -> Selection:
    S, q = prepared.shape[3], prepared.q
    blocks = None
    if kind == "dense" and q.dtype != torch.float32 and not interpreted():
        if q.shape[2] <= FEW_ROWS.M:
            blocks = FEW_ROWS
        elif S <= SHORT and q.shape[3] <= 64 and takes_descriptors(q.device.index):
            blocks = SHORT_ROWS
    if columns is None or (isinstance(columns, slice) and columns.indices(S)[2] == 1):
        start, stop, _ = (columns or slice(None)).indices(S)
        return Selection(Request(prepared, kind, blocks=blocks), start, max(0, stop - start), None)
    if isinstance(columns, slice):
        columns = torch.tensor(range(S)[columns], device=prepared.device)
    numbers = columns.to(prepared.device, torch.int64)
    picked = prepared.k.index_select(2, numbers)  # the rules need their indices
    return Selection(
        Request(prepared, kind, blocks=blocks, keys=picked), 0, len(numbers), numbers.to(torch.int32)
    )


def _visible_tiles(selection: Selection, tiles: int) -> Tensor | None:
    """Return which tiles show any key, uint8 [B or 1, H or 1, row tiles, tiles]; None without a list."""
    request = selection.request
    if not request.setup.listed:
        return None
    if selection.numbers is not None:
        return torch.ones(1, 1, request.blocks, tiles, dtype=torch.uint8, device=request.prepared.device)
    return seen_tiles(request, columns=tiles, begin=selection.begin).view(torch.uint8)


def _mass(prepared: Prepared) -> Tensor | None:
    return mass_of(prepared) if prepared.q.dtype == torch.float32 else None


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
        chosen = better[:, None] & (slots == slot[:, None])
        best = tl.where(chosen, highest[:, None], best)
        keys = tl.where(chosen, key[:, None], keys)
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
    valid = rows < T
    for n in range(count):
        heaviest = tl.max(best, 1)
        key = tl.min(tl.where(best == heaviest[:, None], keys, 2147483647), 1)
        slot = tl.min(tl.where((best == heaviest[:, None]) & (keys == key[:, None]), slots[None, :], K), 1)
        visible = heaviest > 0.5 * HIDDEN
        offsets = (base + rows) * count + n
        value = tl.where(visible, tl.exp2(heaviest), 0.0)
        tl.store(VALUES + offsets, tl.where(lse == lse, value, lse), mask=valid)  # no maximum knows a NaN
        tl.store(INDICES + offsets, long(tl.where(visible, key, -1)), mask=valid)
        best = tl.where(slots[None, :] == slot[:, None], 2 * HIDDEN, best)


def top(prepared: Prepared, count: int) -> tuple[Tensor, Tensor]:
    """Return (weights, keys), each [B, H, T, count], heaviest first; of equal weights the first key."""
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
