"""Sums over each query's keys, in one walk, and with them a picture whose cells are wider than a tile.

One program: M queries of one head, longest rows first, so that the tail of the grid is short. Only what is
asked for is summed. A picture's cell is closed when the walk leaves it; each block of queries writes its own
share, which `add_up` then adds in order. The light pass gives the log-sum-exp of each query's scores alone,
where the first pass did not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import PLANS
from ..scores import Scores
from .launches import NOT_SPECIAL, launch, specialization
from .request import Launch, Prepared, Request, rules_and_lists_by
from .tile import (
    BIG,
    HIDDEN,
    LN2,
    LOG2E,
    added,
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

NAMES = ("entropy", "effective_keys", "confidence", "distance", "max_logit", "mass")
# A float32 forward may have been told to multiply in TF32, three digits.
SLACK = {torch.float32: 2.0**-3, torch.float16: 2.0**-5, torch.bfloat16: 2.0**-5}


class Wants(NamedTuple):
    """The row of each statistic in the result, -1: none; and the layout of the pooled map."""

    entropy: int
    effective_keys: int
    confidence: int
    distance: int
    max_logit: int
    mass: int
    surprise: bool
    peak: bool
    away: bool
    picture: bool
    aligned: bool  # no cell ends inside a tile
    whole_tiles: bool  # and no tile is left out: cells end after so many of them
    one_cell: bool  # no row of cells ends inside a block of queries
    counted_only: bool  # queries that do not count need no values
    shares: int  # parts a cell's mass is written in
    slack: float  # how far from 0 the logarithm of a row's mass may be


class Picture(NamedTuple):
    """A picture of rows x columns cells."""

    rows: int
    columns: int


class Walked(NamedTuple):
    """The results of a walk over rows, and its launch."""

    values: Tensor  # [names, B, H, T]
    picture: Tensor | None  # [B, H, rows, columns]
    launch: Launch


@triton.jit
def shared_out(mass, shares: tl.constexpr, M: tl.constexpr):
    """The sum of [M, 4], one share a warp: adding those up here would make warps wait for each other."""
    if shares == 1:
        return tl.sum(tl.sum(mass, 1), 0) + tl.zeros([1], tl.float32)
    else:
        return tl.sum(tl.sum(tl.reshape(mass, [M // shares // 16, shares, 64]), 0), 1)


@triton.jit
def close_cell(PICTURE, cell, counts, my_rows, at, row_cells, columns, wants: tl.constexpr):
    """Write the mass of a finished cell."""
    M: tl.constexpr = cell.shape[0]
    mass = cell * counts[:, None]
    PICTURE += at * wants.shares + tl.arange(0, wants.shares)
    if wants.one_cell:
        tl.store(PICTURE, shared_out(mass, wants.shares, M))
    else:
        for r in range(row_cells):
            mine = tl.where(my_rows[:, None] == r, mass, 0.0)
            tl.store(PICTURE + r * columns * wants.shares, shared_out(mine, wants.shares, M))


@triton.jit
def cell_end(cell, S, columns):
    """The first key beyond a cell."""
    return ((long(cell + 1) * S + columns - 1) // columns).to(tl.int32)


@triton.jit
def cell_of(key, S, columns):
    """The cell a key falls into."""
    return (long(key) * columns // S).to(tl.int32)


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "total_rows", "cell_rows", "columns", "row_cells", "width"])
def rows_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, LSE, OUT, PICTURE, TILES, COUNTS, list_strides, rules,
    H, T, S, shift, left, right, b0, blocks, total_rows, cell_rows, columns, row_cells, width,
    wants: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block, bh, b, h, rows, at, first, last = my_queries(rules, H, T, shift, b0, blocks, setup)
    base = long(bh) * T
    lse = load_lse(LSE + base + rows, rows < T)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = key_stop(rules, b, S)
    counts = tl.full([M], 1.0, tl.float32)
    if rules.counted is not None:
        counts = tl.load(rules.counted + long(b) * T + rows, mask=rows < T, other=0).to(tl.float32)
        if wants.counted_only:
            stop = tl.where(tl.sum(counts, 0) > 0, stop, 0)

    zeros = tl.zeros([M, 4], tl.float32)
    mass = zeros  # sums of p, all but those of the open cell
    cell = zeros  # sums of p in the open cell
    surprise = zeros  # sums of p x
    peak = tl.full([M, 4], HIDDEN, tl.float32)  # largest x
    away = zeros  # what distance needs
    open_cell = 0
    open_end = cell_end(open_cell, S, columns)
    my_rows = tl.zeros([M], tl.int32)
    if wants.picture:
        PICTURE += (long(bh) * blocks + block) * row_cells * columns * wants.shares
        my_rows = (long(rows) * cell_rows // T).to(tl.int32) - cell_of(block * M, T, cell_rows)

    if setup.listed:
        TILES = list_of(TILES, list_strides, b, h, block)
        i0 = 0
        i1 = length_of(COUNTS, list_strides, b, h, block)
        i2 = i1
        i3 = i1
        if wants.counted_only:
            i1 = tl.where(stop > 0, i1, 0)
    else:
        i0, i1, i2, i3 = keys_seen(first, last, stop, left, right, setup)
    tiles_left = width // N  # until the open cell ends
    if wants.picture and wants.whole_tiles:
        open_cell = i0 // tiles_left
        tiles_left = tiles_left - i0 % tiles_left
    for phase in tl.static_range(3):
        lo = i0 if phase == 0 else (i1 if phase == 1 else i2)
        hi = i1 if phase == 0 else (i2 if phase == 1 else i3)
        needed = setup.listed if phase == 0 else not setup.listed
        if needed or (phase == 0 and setup.left):
            # at the edges there are a tile or two: a pipeline would only take registers
            for i in tl.range(lo, hi, num_stages=setup.stages if phase == 1 or setup.listed else 1):
                start = tile_of(TILES, i, setup) * N
                k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
                cols = start + tl.arange(0, N)
                x = log_weights(
                    product(q0, q1, k0, k1, setup), lse[:, None], at[:, None], rows[:, None], cols[None, :],
                    b, h, stop, rules, T, S, left, right, phase != 1, setup,
                )  # fmt: skip
                p = tl.exp2(x)
                part = added(p, M, N)
                if wants.surprise:
                    surprise += added(p * x, M, N)
                if wants.peak:
                    peak = tl.maximum(peak, largest(x, M, N))
                if wants.away:
                    if (
                        setup.behind
                    ):  # sum of p (first - j) / 8, but for the thread's place, which `mass` knows
                        eighth = tl.arange(0, N // 8).to(tl.float32)[None, :, None, None]
                        odd = tl.arange(0, 2).to(tl.float32)[None, None, None, :]
                        above = tl.sum(tl.sum(fours(p, M, N) * (eighth + odd * 0.125), 1), 2)
                        away += part * ((first - start) * 0.125) - above
                    else:
                        apart = tl.abs((at[:, None] - cols[None, :]).to(tl.float32))
                        away += added(p * apart, M, N)
                if wants.picture and wants.whole_tiles:
                    cell += part
                    tiles_left -= 1
                    if tiles_left == 0:
                        close_cell(PICTURE, cell, counts, my_rows, open_cell, row_cells, columns, wants)
                        mass += cell
                        cell = zeros
                        open_cell += 1
                        tiles_left = width // N
                elif wants.picture:
                    if start >= open_end:
                        close_cell(PICTURE, cell, counts, my_rows, open_cell, row_cells, columns, wants)
                        mass += cell
                        cell = zeros
                        if wants.aligned:  # 64-bit divisions, a tile at a time, would be felt
                            open_cell = start // width
                            open_end = (open_cell + 1) * width
                        else:
                            open_cell = cell_of(start, S, columns)
                            open_end = cell_end(open_cell, S, columns)
                    if wants.aligned or start + N <= open_end:
                        cell += part
                    else:
                        within = cols[None, :] < open_end
                        cell += added(tl.where(within, p, 0.0), M, N)
                        close_cell(PICTURE, cell, counts, my_rows, open_cell, row_cells, columns, wants)
                        mass += cell
                        cell = added(tl.where(within, 0.0, p), M, N)
                        open_cell += 1
                        open_end = cell_end(open_cell, S, columns)
                else:
                    mass += part
    if wants.picture:  # noqa: SIM102, decided when the kernel is compiled, the other one in every program
        if open_cell < columns:
            close_cell(PICTURE, cell, counts, my_rows, open_cell, row_cells, columns, wants)
    mass += cell

    valid = rows < T
    empty = lse > 0.5 * BIG
    total = tl.sum(mass, 1)
    sums = total
    OUT += base + rows
    sunk = tl.zeros([M], tl.float32)
    if rules.sinks is not None:
        sunk = tl.load(rules.sinks + h).to(tl.float32) * LOG2E - lse
        sums += tl.exp2(sunk)
    # Not this row's lse: q, k or the mask were overwritten since. Nothing here can raise, and nothing may be
    # divided away: NaN says it.
    strange = tl.abs(tl.log(sums)) > wants.slack * (1 + tl.abs(lse) / 64)
    sums = tl.where(empty, 1.0, tl.where(strange, float("nan"), sums))
    if wants.mass >= 0:
        tl.store(OUT + wants.mass * long(total_rows), sums, mask=valid)
    if wants.surprise:
        nats = -tl.sum(surprise, 1)
        if rules.sinks is not None:
            nats -= tl.where(empty, 0.0, tl.exp2(sunk) * tl.maximum(sunk, -1e4))  # 0 times -inf is not 0
        entropy = tl.where(empty, 0.0, nats * LN2 / sums + tl.log(sums))
        if wants.entropy >= 0:
            tl.store(OUT + wants.entropy * long(total_rows), entropy, mask=valid)
        if wants.effective_keys >= 0:
            tl.store(
                OUT + wants.effective_keys * long(total_rows),
                tl.where(empty, 0.0, tl.exp(entropy)),
                mask=valid,
            )
    if wants.peak:
        top = tl.max(peak, 1)
        if wants.confidence >= 0:
            tl.store(OUT + wants.confidence * long(total_rows), tl.exp2(top) / sums, mask=valid)
        if wants.max_logit >= 0:
            logit = tl.where(empty, -float("inf"), (top + lse) * LN2)
            tl.store(OUT + wants.max_logit * long(total_rows), logit, mask=valid)
    if wants.away:
        apart = tl.sum(away, 1)
        if setup.behind:
            place = tl.arange(0, 4).to(tl.float32) * 2
            apart = apart * 8 - tl.sum(mass * place[None, :], 1) + (at - first).to(tl.float32) * total
        tl.store(OUT + wants.distance * long(total_rows), apart / sums, mask=valid)


@triton.jit(do_not_specialize=["T", "blocks", "cell_rows", "columns", "row_cells"])
def add_up(
    PARTS,
    PICTURE,
    T,
    blocks,
    cell_rows,
    columns,
    row_cells,
    shares: tl.constexpr,
    M: tl.constexpr,
    C: tl.constexpr,
):
    """One row of cells: the shares of all blocks of queries it runs through, in their order."""
    r = tl.program_id(0) % cell_rows
    bh = long(tl.program_id(0) // cell_rows)
    cells = tl.program_id(1) * C + tl.arange(0, C)
    start = ((long(r) * T + cell_rows - 1) // cell_rows).to(tl.int32)
    stop = ((long(r + 1) * T + cell_rows - 1) // cell_rows).to(tl.int32)
    total = tl.zeros([C], tl.float32)
    for block in range(start // M, tl.cdiv(stop, M)):
        mine = r - cell_of(block * M, T, cell_rows)
        parts = PARTS + (((bh * blocks + block) * row_cells + mine) * columns + cells)[:, None] * shares
        parts += tl.arange(0, shares)[None, :]
        total += tl.sum(tl.load(parts, mask=(cells < columns)[:, None], other=0.0), 1)
    tl.store(PICTURE + (bh * cell_rows + r) * columns + cells, total, mask=cells < columns)


def wide(request: Request, picture: Picture) -> bool:
    """Return True if no tile touches three cells."""
    return request.S // picture.columns >= request.setup.N


def rows(
    request: Request,
    names: tuple[str, ...],
    picture: Picture | None = None,
    counted_only: bool = False,
    out: Tensor | None = None,
) -> Walked:
    """Compute values per query, and optionally a pooled map, in one walk.

    counted_only: queries that do not count may be left out. out: the tensor for the values.
    """
    assert picture is None or wide(request, picture)
    slots = {name: names.index(name) if name in names else -1 for name in NAMES}
    prepared, B, H, T, S = request.prepared, request.B, request.H, request.T, request.S
    M, N = request.setup.M, request.setup.N
    cells = picture or Picture(1, 1)
    fills_tiles = T % (cells.rows * M) == 0
    row_cells = 1 if fills_tiles else min(cells.rows, M * cells.rows // T + 2)
    aligned = S % (cells.columns * N) == 0
    # 16 rows a warp, in the matrix unit's layout. Where a bias or mask is loaded tiles may take another one,
    # in which Triton 3.6 adds up shares wrongly.
    plain = prepared.rules.bias is None and not request.setup.listed
    shares = min(request.tuned.warps, M // 16) if plain else 1
    wants = Wants(
        **slots,
        surprise="entropy" in names or "effective_keys" in names,
        peak="confidence" in names or "max_logit" in names,
        away="distance" in names,
        picture=picture is not None,
        aligned=aligned,
        whole_tiles=aligned and not request.setup.listed,
        one_cell=fills_tiles,
        counted_only=counted_only and prepared.counted is not None,
        shares=shares,
        slack=SLACK[prepared.q.dtype],
    )
    if out is None:
        out = prepared.empty(len(names), B, H, T)
    parts = out
    if picture is not None:
        parts = prepared.zeros(B * H, request.blocks, row_cells, cells.columns, shares)
    launched = request.launch(
        rows_kernel, request.grid, prepared.lse, out, parts, *request.tile_lists,
        sizes=(request.blocks, B * H * T, cells.rows, cells.columns, row_cells, S // cells.columns),
        options=(wants,),
    )  # fmt: skip
    return Walked(out, None if picture is None else added_up(request, parts, picture), launched)


def added_up(request: Request, parts: Tensor, picture: Picture) -> Tensor:
    """Return [B, H, rows, columns] from each block's shares, [B * H, blocks, row_cells, columns, shares]."""
    B, H, T = request.B, request.H, request.T
    C = min(256, triton.next_power_of_2(picture.columns))
    out = request.prepared.empty(B, H, *picture)
    args = (parts, out, T, parts.shape[1], picture.rows, picture.columns, parts.shape[2])
    grid = (B * H * picture.rows, triton.cdiv(picture.columns, C), 1)
    constants = (parts.shape[4], request.setup.M, C)
    launch(add_up, grid, args, constants, specialization((parts, out, T)), parts.device)
    return out


def mass_of(prepared: Prepared) -> Tensor:
    """Return the sum of each query's weights and sink, [B, H, T]: 1 but for the rounding of lse."""
    return rows(Request(prepared, "rows"), ("mass",)).values[0]


def settled(prepared: Prepared) -> Prepared:
    """Return the request with an lse that fits these products, if float32 makes the difference visible."""
    if prepared.q.dtype != torch.float32:
        return prepared
    return replace(prepared, input_lse=prepared.lse + mass_of(prepared).log())


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
    """Return the lse, [B, H, T], natural logarithm; -inf for queries that see nothing."""
    prepared = Prepared(scores)
    key = ("lse", prepared.signature)
    plan: Callable[[Prepared], Tensor] | None = PLANS.get(key)
    if plan is not None:
        return plan(prepared)
    request = Request(prepared, "lse")
    out = prepared.empty(*prepared.shape[:3])
    launched = request.launch(lse_kernel, request.grid, out, *request.tile_lists, sizes=(request.blocks,))
    if PLANS.seen_before(key):
        go = launched.again(prepared.q, prepared.k)
        PLANS.keep(key, None if go is None else _planned(request, go))
    return out


def _planned(request: Request, go: Callable[..., None]) -> Callable[[Prepared], Tensor]:
    """Return `lse_of` as a single launch, for all requests with the signature of this one."""
    rules_and_lists, shape, device = (
        rules_and_lists_by(request),
        request.prepared.shape[:3],
        request.prepared.device,
    )

    def again(prepared: Prepared) -> Tensor:
        rules, lists = rules_and_lists(prepared)
        out = torch.empty(shape, dtype=torch.float32, device=device)
        go(prepared.q, prepared.k, rules, out, *lists)
        return out

    return again
