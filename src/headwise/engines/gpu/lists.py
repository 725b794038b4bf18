"""Preparations of a walk: lists of tiles, and lse as powers of two.

Lists are for rules kept as tensors: padding with holes, documents, dense masks. Each tile is looked at once;
a block of rows then walks only those that show it anything. Where sequences or heads share their rules they
share their lists.

In the first pass each program makes its own (`own_list`): the tiles that have to ask the rules from the
front, those that see everything from the back. Padding and documents are known by the extremes of each block,
where there are many from a table made before; a mask, and a bias that is one for all heads, which may be a
mask, are looked at tile by tile before (`tables`).

Kernels that load lse in every tile want it with room behind each row: padded to whole tiles, so that loading
it needs no mask; BIG for queries that see nothing, are not there or, if asked for, do not count.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import NOT_SPECIAL, Arguments, interpreted, launch, specialization
from .tile import BIG, HIDDEN, LOWEST_HALF, Setup, ends, key_stop, listed_rules, load_lse, long, place

if TYPE_CHECKING:
    from .request import Request

ROOM = 256  # no tile is larger
SIZE = 1024


# Lists of tiles


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "heads", "row_tiles", "column_tiles", "step", "parts", "begin"])
def look(
    VISIBLE, rules, heads, T, S, shift, left, right, row_tiles, column_tiles, step, parts, begin,
    KEYS_FIRST: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    """Compute whether a query of a tile may attend to a key of it.

    Column tile j starts at begin + j * step / parts, rounded up.
    """
    pid = tl.program_id(0)
    j = pid % column_tiles
    i = pid // column_tiles % row_tiles
    bh = pid // column_tiles // row_tiles
    b = bh // heads
    h = bh % heads
    start = begin + ((long(j) * step + parts - 1) // parts).to(tl.int32)
    beyond = begin + ((long(j + 1) * step + parts - 1) // parts).to(tl.int32)
    if KEYS_FIRST:
        cols = (i * setup.M + tl.arange(0, setup.M))[:, None]
        rows = (start + tl.arange(0, setup.N))[None, :]
        inside = rows < beyond
        at = place(rules, start + tl.arange(0, setup.N), T, shift, setup)[None, :]
    else:
        rows = (i * setup.M + tl.arange(0, setup.M))[:, None]
        cols = (start + tl.arange(0, setup.N))[None, :]
        inside = cols < beyond
        at = place(rules, i * setup.M + tl.arange(0, setup.M), T, shift, setup)[:, None]
    visible = inside & (cols < key_stop(rules, b, S)) & listed_rules(at, rows, cols, b, h, rules, T, S, setup)
    if setup.left:
        visible = visible & (cols >= at - left)
    if setup.right:
        visible = visible & (cols <= at + right)
    tl.store(VISIBLE + pid, tl.max(tl.max(visible.to(tl.int32), 1), 0).to(tl.uint8))


def seen_tiles(
    request: Request, step: int | None = None, parts: int = 1, columns: int | None = None, begin: int = 0
) -> Tensor:
    """Return which tiles show any key, bool [B or 1, H or 1, row tiles, column tiles].

    Column tile j starts at begin + j * step / parts.
    """
    setup: Setup = request.setup
    mask = request.prepared.scores.mask
    length = request.T if request.keys_first else request.S
    count = triton.cdiv(length, setup.N) if columns is None else columns
    batch, heads = request.B if mask.differs("b") else 1, request.H if mask.differs("h") else 1
    shown = torch.empty(
        batch, heads, request.blocks, count, dtype=torch.uint8, device=request.prepared.device
    )
    _, *numbers = request.prepared.numbers
    args = (
        shown, request.prepared.rules, heads, *numbers, request.blocks, count, step or setup.N, parts, begin
    )  # fmt: skip
    kinds = (request.prepared.kind, specialization(shown))
    launch(look, (shown.numel(), 1, 1), args, (request.keys_first, setup), kinds, shown.device)
    return shown.view(torch.bool)


@triton.jit(do_not_specialize=["columns"])
def order_kernel(VISIBLE, TILES, COUNTS, columns, CHUNK: tl.constexpr):
    row = tl.program_id(0)
    VISIBLE += long(row) * columns
    TILES += long(row) * columns
    count = 0
    for first in range(0, columns, CHUNK):
        j = first + tl.arange(0, CHUNK)
        visible = (tl.load(VISIBLE + j, mask=j < columns, other=0) != 0).to(tl.int32)
        tl.store(TILES + count + tl.cumsum(visible, 0) - 1, j, mask=visible != 0)
        count += tl.sum(visible, 0)
    tl.store(COUNTS + row, count)


def in_order(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return the tiles seen by each row of `seen_tiles`, int32, in order; and how many there are."""
    columns, device = visible.shape[-1], visible.device
    tiles = torch.zeros(visible.shape, dtype=torch.int32, device=device)
    counts = torch.empty(visible.shape[:-1], dtype=torch.int32, device=device)
    args = (visible.view(torch.uint8), tiles, counts, columns)  # all of it is room of our own, and aligned
    chunk = max(16, min(16 if interpreted() else CHUNK, triton.next_power_of_2(columns)))
    launch(order_kernel, (counts.numel(), 1, 1), args, (chunk,), None, device)
    return tiles, counts


# Lists for the first pass


ANY, ALL = tl.constexpr(1), tl.constexpr(2)  # what a tile shows: something, everything
CHUNK = 512
FEW_TILES = 32  # in a row: a program makes its list itself, which saves a launch or two
OWN_CHUNK = 32


@triton.jit(do_not_specialize=["heads", "T", "S", "row_tiles", "column_tiles"])
def glance(
    SHOWN, rules, heads, T, S, row_tiles, column_tiles, KEYS_FIRST: tl.constexpr, setup: tl.constexpr
):  # fmt: skip
    """What a mask, and a bias that may be one, show of a tile."""
    pid = tl.program_id(0)
    j = pid % column_tiles
    i = pid // column_tiles % row_tiles
    bh = pid // column_tiles // row_tiles
    b = bh // heads
    h = bh % heads
    if KEYS_FIRST:
        cols = (i * setup.M + tl.arange(0, setup.M))[:, None]
        rows = (j * setup.N + tl.arange(0, setup.N))[None, :]
    else:
        rows = (i * setup.M + tl.arange(0, setup.M))[:, None]
        cols = (j * setup.N + tl.arange(0, setup.N))[None, :]
    inside = (rows < T) & (cols < S)
    some = inside
    whole = (rows >= 0) & (cols >= 0)
    if rules.allowed is not None:
        base = rules.allowed + long(b) * rules.allowed_b + long(h) * rules.allowed_h
        offsets = long(rows) * rules.allowed_t + long(cols) * rules.allowed_s
        allowed = tl.load(base + offsets, mask=inside, other=1) != 0
        some = some & allowed
        whole = whole & allowed
    if setup.masking:
        base = rules.bias + long(b) * rules.bias_b
        offsets = long(rows) * rules.bias_t + long(cols) * rules.bias_s
        bias = tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)
        if rules.bias.dtype.element_ty == tl.float16:
            some = some & ~(bias <= LOWEST_HALF)
        else:
            some = some & ~(bias <= HIDDEN)
        whole = whole & (bias == 0)
    shows = tl.max(tl.max(some.to(tl.int32), 1), 0) * ANY + tl.min(tl.min(whole.to(tl.int32), 1), 0) * ALL
    tl.store(SHOWN + pid, shows.to(tl.uint8))


@triton.jit
def any_and_all(KEYS, spots, inside, AXIS: tl.constexpr):
    """Whether any of some keys is real, and whether all of them are."""
    some = tl.max(tl.load(KEYS + spots, mask=inside, other=0).to(tl.int32), AXIS) != 0
    whole = tl.min(tl.load(KEYS + spots, mask=inside, other=1).to(tl.int32), AXIS) != 0
    return some, whole


@triton.jit
def lowest_and_highest(IDS, spots, inside, AXIS: tl.constexpr):
    """Of some labels."""
    label = tl.load(IDS + spots, mask=inside, other=0)
    low = tl.min(tl.where(inside, label, 9223372036854775807), AXIS)
    high = tl.max(tl.where(inside, label, -9223372036854775808), AXIS)
    return low, high


@triton.jit(do_not_specialize=["T", "S", "shift", "query_tiles", "key_tiles"])
def extremes_kernel(
    OUT, rules, T, S, shift, query_tiles, key_tiles, FIELDS: tl.constexpr, SIZE_Q: tl.constexpr,
    SIZE_K: tl.constexpr, SIZE: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    """The smallest and the largest label of a block, of each kind; of keys whether any, all are real."""
    block = tl.program_id(0) % (query_tiles + key_tiles)
    b = tl.program_id(0) // (query_tiles + key_tiles)
    OUT += (long(b) * (query_tiles + key_tiles) + block) * FIELDS
    of_keys = block >= query_tiles
    start = tl.where(of_keys, (block - query_tiles) * SIZE_K, block * SIZE_Q)
    stop = tl.where(of_keys, tl.minimum(S, start + SIZE_K), tl.minimum(T, start + SIZE_Q))
    spots = start + tl.arange(0, SIZE)
    inside = spots < stop
    a_key = inside & (block + spots * 0 >= query_tiles)
    a_query = inside & (block + spots * 0 < query_tiles)
    if rules.keys is not None:
        real = tl.load(rules.keys + long(b) * S + spots, mask=a_key, other=1) != 0
        tl.store(OUT, tl.max((real & inside).to(tl.int64), 0))
        tl.store(OUT + 1, tl.min((real | ~inside).to(tl.int64), 0))
    if rules.key_ids is not None:
        labels: tl.constexpr = setup.labels
        for n in tl.static_range(labels):
            mine = long(b * rules.ids_batch * labels + n)
            key = tl.load(rules.key_ids + mine * S + spots, mask=a_key, other=0)
            query = tl.load(rules.query_ids + mine * T + spots, mask=a_query, other=0)
            label = tl.where(of_keys, key, query)
            tl.store(OUT + 2 + 2 * n, tl.min(tl.where(inside, label, 9223372036854775807), 0))
            tl.store(OUT + 3 + 2 * n, tl.max(tl.where(inside, label, -9223372036854775808), 0))


@triton.jit
def make_list(
    TILES, SHOWN, EXTREMES, rules, b, i, stop, T, S, shift, left, right, row_tiles, column_tiles, begin, end,
    KEYS_FIRST: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    """Block i's list: tiles that ask the rules from the front, tiles that see all from the back; how many.

    SHOWN, EXTREMES: what `glance` saw of its tiles and `extremes_kernel` of its sequence; without extremes
    they are found here. begin, end: outside, positions alone hide all.
    """
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    CHUNK: tl.constexpr = setup.chunk
    FIELDS: tl.constexpr = 2 + 2 * setup.labels
    mine = EXTREMES
    theirs = EXTREMES
    if EXTREMES is not None:
        if KEYS_FIRST:  # queries come first in the table
            mine = EXTREMES + (column_tiles + i) * FIELDS
            theirs = EXTREMES
        else:
            mine = EXTREMES + i * FIELDS
            theirs = EXTREMES + row_tiles * FIELDS
    if KEYS_FIRST:
        own = i * M
    else:
        spots = i * M + tl.arange(0, M)
        own, own_last = ends(place(rules, spots, T, shift, setup), spots, i * M, T, shift, M, setup)
    asking = 0
    seeing = 0
    for first_tile in range(begin, end, CHUNK):
        j = first_tile + tl.arange(0, CHUNK)
        some = j < end
        start = j * N
        if KEYS_FIRST:
            first_key = start * 0 + own
            last_key = tl.minimum(first_key + M, S) - 1
            whole = some & (own + M <= stop)
            first = start + shift
            last = tl.minimum(start + N, T) - 1 + shift
            if setup.placed:  # in any order
                first = start * 0 - 1073741824
                last = start * 0 + 1073741824
        else:
            first_key = start
            last_key = tl.minimum(start + N, S) - 1
            whole = some & (start + N <= stop)
            first = start * 0 + own
            last = start * 0 + own_last
        some = some & (first_key < stop)
        if setup.left:
            some = some & (last_key >= first - left)
            whole = whole & (first_key >= last - left)
        if setup.right:
            some = some & (first_key <= last + right)
            whole = whole & (last_key <= first + right)
        if KEYS_FIRST and setup.placed and (setup.left or setup.right):
            whole = j < 0
        if EXTREMES is not None:
            other = theirs + j * FIELDS
        my_spots = i * M + tl.arange(0, M)
        my_inside = my_spots < (S if KEYS_FIRST else T)
        their_spots = start[:, None] + tl.arange(0, N)[None, :]
        their_inside = some[:, None] & (their_spots < (T if KEYS_FIRST else S))
        if rules.keys is not None and EXTREMES is None:
            if KEYS_FIRST:
                any_real, all_real = any_and_all(rules.keys + long(b) * S, my_spots, my_inside, 0)
            else:
                any_real, all_real = any_and_all(rules.keys + long(b) * S, their_spots, their_inside, 1)
            some = some & any_real
            whole = whole & all_real
        elif rules.keys is not None:
            if KEYS_FIRST:
                some = some & (tl.load(mine) != 0)
                whole = whole & (tl.load(mine + 1) != 0)
            else:
                some = some & (tl.load(other, mask=j < column_tiles, other=0) != 0)
                whole = whole & (tl.load(other + 1, mask=j < column_tiles, other=0) != 0)
        if rules.key_ids is not None:
            labels: tl.constexpr = setup.labels
            for n in tl.static_range(labels):
                if EXTREMES is None:
                    row = long(b * rules.ids_batch * labels + n)
                    keys = rules.key_ids + row * S
                    queries = rules.query_ids + row * T
                    if KEYS_FIRST:
                        low, high = lowest_and_highest(keys, my_spots, my_inside, 0)
                        other_low, other_high = lowest_and_highest(queries, their_spots, their_inside, 1)
                    else:
                        low, high = lowest_and_highest(queries, my_spots, my_inside, 0)
                        other_low, other_high = lowest_and_highest(keys, their_spots, their_inside, 1)
                else:
                    low = tl.load(mine + 2 + 2 * n)
                    high = tl.load(mine + 3 + 2 * n)
                    other_low = tl.load(other + 2 + 2 * n, mask=j < column_tiles, other=0)
                    other_high = tl.load(other + 3 + 2 * n, mask=j < column_tiles, other=0)
                some = some & (low <= other_high) & (other_low <= high)
                whole = whole & (low == high) & (other_low == low) & (other_high == low)
        if SHOWN is not None:
            shows = tl.load(SHOWN + j, mask=j < column_tiles, other=0).to(tl.int32)
            some = some & ((shows & ANY) != 0)
            whole = whole & ((shows & ALL) != 0)
        whole = whole & some
        asks = (some & ~whole).to(tl.int32)
        sees = whole.to(tl.int32)
        tl.store(TILES + asking + tl.cumsum(asks, 0) - 1, j, mask=asks != 0)
        tl.store(TILES + column_tiles - seeing - tl.cumsum(sees, 0), j, mask=sees != 0)
        asking += tl.sum(asks, 0)
        seeing += tl.sum(sees, 0)
    return asking, seeing


@triton.jit
def own_list(
    TILES, TABLES, list_strides, rules, b, h, block, stop, T, S, shift, left, right, row_tiles, column_tiles,
    begin, end, KEYS_FIRST: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    """A program's list, made by itself: where it is, and the ends of its two parts.

    Heads that have their rules in common make the same list in the same place, each before it reads it.
    """
    TILES += long(b) * list_strides[0] + long(h) * list_strides[1] + long(block) * list_strides[2]
    SHOWN = TABLES[0]
    EXTREMES = TABLES[1]
    if SHOWN is not None:
        SHOWN += long(b) * list_strides[3] + long(h) * list_strides[4] + long(block) * column_tiles
    if EXTREMES is not None:
        EXTREMES += long(b) * list_strides[5]
    tl.debug_barrier()  # a list that was made here before has been read
    asking, seeing = make_list(
        TILES, SHOWN, EXTREMES, rules, b, block, stop, T, S, shift, left, right, row_tiles, column_tiles,
        begin, end, KEYS_FIRST, setup,
    )  # fmt: skip
    tl.debug_barrier()  # what some threads have written others will read
    return TILES, asking, column_tiles - seeing


class ListPlan(NamedTuple):
    """What all lists of requests with one signature have in common."""

    room: tuple[int, int, int, int]  # sequences and heads whose rules differ, tiles of rows and columns
    shown: tuple[int, int] | None  # sequences and heads whose masks are read
    batch: int  # sequences whose padding and documents differ
    blocks: tuple[int, int]  # of queries, of keys
    sizes: tuple[int, int]
    fields: int  # of a block's extremes; 0: there are none, or the kernel computes them

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides from one sequence, head and row to the next, of lists and of tables."""
        B, H, rows, columns = self.room
        shown, tiles = self.shown or (1, 1), rows * columns
        return (
            0 if B == 1 else H * tiles, 0 if H == 1 else tiles, columns,
            0 if shown[0] == 1 else shown[1] * tiles, 0 if shown[1] == 1 else tiles,
            0 if self.batch == 1 else sum(self.blocks) * self.fields,
        )  # fmt: skip


def chunk_of(columns: int, has_tensor_rules: bool) -> int:
    """Return how many tiles a program reads at once; has_tensor_rules: including padding or labels."""
    most = 16 if interpreted() else OWN_CHUNK if has_tensor_rules and columns <= FEW_TILES else CHUNK
    return max(16, min(most, triton.next_power_of_2(columns)))


def list_plan(request: Request) -> ListPlan:
    """Return the plan for the lists of a request."""
    setup, mask, rules = request.setup, request.prepared.scores.mask, request.prepared.rules
    rows, columns = request.blocks, -(-(request.T if request.keys_first else request.S) // setup.N)
    by_batch, by_head, shown = mask.differs("b"), mask.differs("h"), None
    looked = [x for x in (rules.allowed, rules.bias if setup.masking else None) if x is not None]
    if looked:
        shown = (max(x.shape[0] for x in looked), max(x.shape[1] for x in looked))
        by_batch |= shown[0] > 1
    sizes, blocks = (setup.M, setup.N), (rows, columns)
    if request.keys_first:
        sizes, blocks = (setup.N, setup.M), (columns, rows)
    has_tensor_rules = rules.keys is not None or rules.key_ids is not None
    tabled = has_tensor_rules and columns > (2 if interpreted() else FEW_TILES)
    batch = request.B if by_batch else 1
    room = (batch, request.H if by_head else 1, rows, columns)
    return ListPlan(room, shown, batch, blocks, sizes, 2 + 2 * setup.labels if tabled else 0)


Tables = tuple[Tensor | None, Tensor | None]


def tables(request: Request, lent: Tensor | None = None, filled: bool = True) -> Tables:
    """Return (what masks show of each tile, the extremes of each block), None where not needed.

    Args:
        known: extremes of the same blocks, from another request about the same scores.
        filled: False for uninitialised tensors.
    """
    setup, prepared, plan = request.setup, request.prepared, request.list_plan
    rules, device, kinds = prepared.rules, prepared.device, prepared.kind  # room of our own is aligned
    _, T, S, shift, _, _ = prepared.numbers
    shown, extremes = None, lent
    if plan.shown is not None:
        (B, H), (rows, columns) = plan.shown, plan.room[2:]
        shown = torch.empty(B, H, rows, columns, dtype=torch.uint8, device=device)
        if filled:
            arguments: Arguments = (shown, rules, H, T, S, rows, columns)
            launch(
                glance, (B * H * rows * columns, 1, 1), arguments, (request.keys_first, setup), kinds, device
            )
    if plan.fields and lent is None:
        count = sum(plan.blocks)
        extremes = torch.empty(plan.batch, count, plan.fields, dtype=torch.int64, device=device)
        if filled:
            arguments = (extremes, rules, T, S, shift, *plan.blocks)
            options: tuple[Hashable, ...] = (plan.fields, *plan.sizes, max(plan.sizes), setup)
            launch(extremes_kernel, (count * plan.batch, 1, 1), arguments, options, kinds, device)
    return shown, extremes


# lse as powers of two


@triton.jit(do_not_specialize=["H", "T", "padded"])
def powers_kernel(LSE, COUNTED, OUT, H, T, padded, SIZE: tl.constexpr):
    bh = tl.program_id(0)
    rows = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    powers = load_lse(LSE + long(bh) * T + rows, rows < T)
    if COUNTED is not None:
        counts = tl.load(COUNTED + long(bh // H) * T + rows, mask=rows < T, other=0)
        powers = tl.where(counts != 0, powers, BIG)
    tl.store(OUT + long(bh) * padded + rows, powers, mask=rows < padded)


def powers_of(lse: Tensor, kind: int, counted: Tensor | None = None) -> Tensor:
    """Return lse as powers of two, [B, H, T and padding], from lse [B, H, T], contiguous.

    Args:
        kind: of the request; see `Prepared.kind`.
        counted: which queries count, uint8 [B, T]; None: all.
    """
    B, H, T = lse.shape
    padded = -(-T // ROOM) * ROOM
    out = torch.empty(B, H, padded, dtype=torch.float32, device=lse.device)
    size = 64 if interpreted() else SIZE
    kinds = (kind, specialization((lse, counted)))
    args = (lse, counted, out, H, T, padded)
    launch(powers_kernel, (B * H, triton.cdiv(padded, size), 1), args, (size,), kinds, out.device)
    return out
