"""Statistics and pictures together, in as few walks as they need: `measure` plans them.

One walk goes over rows (rows.py), and a picture whose cells are wider than a tile comes with it. The others
are here: the weights around each query, and of the first key, which take a few tiles a block, however long
the rest; what each key receives, a sum over its queries, for which one program keeps M keys of one head and
walks the queries that see them; and pictures of narrower cells. Nothing is shared between programs, so there
are no atomics, and the same bits come out every time. A head's value is the mean over its counted queries, or
the largest.

For narrow cells a tile covers as many whole cells as fit into its columns, so no cell is shared between
tiles. Its weights are added up by two products with indicators, columns first. In 16 bits a weight goes in as
two numbers, which together hold it to 2^-17.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..plans import PLANS
from . import rows as by_row
from .launches import NOT_SPECIAL, Arguments, interpreted, launch, ready, specialization
from .lists import in_order, powers_of, seen_tiles
from .request import Launch, Prepared, Request, as_lists, rules_and_lists_by
from .rows import Picture, added_up, cell_of
from .tile import (
    Rules,
    added,
    fours,
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
    tile_of,
)

# Around each query


NEAR = ("first", "previous", "itself", "next", "local")


class Wants(NamedTuple):
    """The row of each statistic in the result, -1: none."""

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
    valid = rows < T
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
        tl.store(OUT + wants.first * long(total_rows), tl.sum(leading, 1), mask=valid)
    if wants.previous >= 0:
        tl.store(OUT + wants.previous * long(total_rows), tl.sum(previous, 1), mask=valid)
    if wants.itself >= 0:
        tl.store(OUT + wants.itself * long(total_rows), tl.sum(itself, 1), mask=valid)
    if wants.next >= 0:
        tl.store(OUT + wants.next * long(total_rows), tl.sum(next, 1), mask=valid)
    if wants.local >= 0:
        tl.store(OUT + wants.local * long(total_rows), tl.sum(local, 1), mask=valid)


def near(prepared: Prepared, names: tuple[str, ...], reach: int, out: Tensor) -> Launch:
    """Fill out[len(names), B, H, T] with the named weights of each query; the launch that did it."""
    request = Request(prepared, "near")
    slots = {name: names.index(name) if name in names else -1 for name in NEAR}
    wants = Wants(**slots, around=any(name != "first" for name in names))
    around = max(1, reach if "local" in names else 1)
    B, H, T, S = prepared.shape
    return request.launch(
        near_kernel, request.grid, prepared.lse, out, prepared.first_keys,
        sizes=(request.blocks, B * H * T, min(reach, T + S), min(around, T + S)), options=(wants,),
    )  # fmt: skip


# What each key receives


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
    mass = tl.where(keys < stop, tl.sum(tl.sum(total, 2), 1), 0.0)
    tl.store(OUT + long(bh) * S + keys, mass, mask=keys < S)


def received(prepared: Prepared) -> Tensor:
    """Return [B, H, S]: the weights of all counted queries, summed for each key."""
    rules = prepared.rules
    biased = rules.bias is not None or rules.relative is not None
    request = Request(prepared, "received_bias" if biased else "received", keys_first=True)
    out = prepared.empty(request.B, request.H, request.S)
    powers = powers_of(prepared.lse, prepared.kind, prepared.rules.counted)
    request.launch(
        received_kernel, request.grid, powers, out, prepared.counted_range, *request.tile_lists,
        sizes=(powers.shape[-1],),
    )  # fmt: skip
    return out


# From queries to heads


# How a statistic is told to the kernel: its offset + 1, or 3; and 4 for the largest.
NO_OFFSET, LARGEST = 3, 4
Kind = tuple[int | None, bool]  # (offset, whether the largest is meant)


@triton.jit(do_not_specialize=["H", "shift", "programs", "low_kinds", "high_kinds"])
def of_heads_kernel(
    VALUES, LSE, OUT, rules, H, T, S, shift, programs, low_kinds, high_kinds, SIZE: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0)
    n = tl.program_id(1)
    kinds = tl.where(n < 8, low_kinds, high_kinds)
    kind = (kinds >> (n % 8 * 3)) & 7
    b = bh // H
    base = long(bh) * T
    stop = key_stop(rules, b, S)
    VALUES += (long(n) * programs) * T + base
    total = tl.zeros([SIZE], tl.float32)
    count = tl.zeros([SIZE], tl.float32)
    largest = tl.full([SIZE], -float("inf"), tl.float32)
    for start in range(0, T, SIZE):
        rows = start + tl.arange(0, SIZE)
        valid = rows < T
        counts = tl.load(LSE + base + rows, mask=valid, other=-float("inf")) != -float("inf")
        if rules.counted is not None:
            counts = counts & (tl.load(rules.counted + long(b) * T + rows, mask=valid, other=0) != 0)
        at = rows + shift
        if PLACED:
            at = tl.load(rules.at + rows, mask=valid, other=0)
        key = at + (kind & 3) - 1
        real = (key >= 0) & (key < stop)
        if rules.keys is not None:
            real = real & (tl.load(rules.keys + long(b) * S + key, mask=real, other=0) != 0)
        counts = tl.where((kind & 3) == 3, counts, counts & real)
        value = tl.load(VALUES + rows, mask=counts, other=0.0)
        total += value
        count += tl.where(counts, 1.0, 0.0)
        largest = tl.maximum(largest, tl.where(counts, value, -float("inf")))
    summed = tl.sum(total, 0)
    highest = tl.where(summed == summed, tl.max(largest, 0), summed)  # a NaN is the largest of all
    of_head = tl.where(kind >= 4, highest, summed / tl.sum(count, 0))
    tl.store(OUT + n * programs + bh, of_head)


class _Fold(NamedTuple):
    """A launch of `of_heads_kernel` without its tensors."""

    grid: tuple[int, int, int]
    numbers: Arguments
    constants: tuple[Hashable, ...]
    kinds: Hashable
    warps: int


def _fold(prepared: Prepared, values: Tensor, out: Tensor, kinds: Sequence[Kind]) -> _Fold:
    codes = [(NO_OFFSET if offset is None else offset + 1) + LARGEST * largest for offset, largest in kinds]
    low, high = (sum(code << (3 * i) for i, code in enumerate(part)) for part in (codes[:8], codes[8:]))
    assert len(codes) <= 16
    B, H, T, S = prepared.shape
    placed = prepared.scores.positions is not None
    return _Fold(
        (B * H, len(kinds), 1),
        (H, T, S, S - T, B * H, low, high),
        (32 if interpreted() else 1024 if T <= 1024 else 4096, placed),
        (prepared.kind, specialization((values, prepared.lse, out))),
        4 if T <= 1024 else 8,
    )


def of_heads(prepared: Prepared, values: Tensor, kinds: Sequence[Kind]) -> Tensor:
    """Return [n, B, H] from [n, B, H, T]; each kind is (offset, whether the largest is wanted)."""
    out = prepared.empty(len(kinds), *prepared.shape[:2])
    fold = _fold(prepared, values, out, kinds)
    arguments = (values, prepared.lse, out, prepared.rules, *fold.numbers)
    launch(of_heads_kernel, fold.grid, arguments, fold.constants, fold.kinds, values.device, fold.warps)
    return out


def of_heads_again(
    prepared: Prepared, values: Tensor, out: Tensor, kinds: Sequence[Kind]
) -> Callable[[Tensor, Tensor, Tensor, Rules], None] | None:
    """Return `of_heads` as a single launch after it has run; it takes values, lse, the result, rules."""
    fold = _fold(prepared, values, out, kinds)
    go = ready(of_heads_kernel, fold.grid, fold.constants, fold.kinds, values.device, fold.warps)
    numbers = fold.numbers
    if go is None:
        return None
    return lambda values, lse, out, rules: go(values, lse, out, rules, *numbers)


# Pictures of narrow cells


@triton.jit
def dot_with_ones(a, ones, EXACT: tl.constexpr):
    """a @ ones, with a in float32."""
    if EXACT:
        return tl.dot(a, ones.to(tl.float32), input_precision="tf32x3")
    high = a.to(tl.bfloat16)
    low = (a - high.to(tl.float32)).to(tl.bfloat16)
    ones = ones.to(tl.bfloat16)
    return tl.dot(low, ones, acc=tl.dot(high, ones))


@triton.jit
def even_cells(p, R: tl.constexpr, C: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """[R, C]: a tile cut into equal cells, each added up."""
    by_column = tl.sum(tl.reshape(p, [M, C, N // C]), 2)  # [M, C]
    return tl.sum(tl.reshape(by_column, [R, M // R, C]), 1)


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "cell_rows", "columns", "row_cells", "fit"])
def picture_kernel(
    Q0, Q1, K0, K1, q_strides, k_strides, POWERS, PARTS, CELLS, TILES, COUNTS, list_strides, rules,
    H, T, S, shift, left, right, b0, blocks, cell_rows, columns, row_cells, fit, padded,
    R: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = setup.M
    N: tl.constexpr = setup.N
    block, bh, b, h, rows, at, first, last = my_queries(rules, H, T, shift, b0, blocks, setup)
    powers = tl.load(POWERS + long(bh) * padded + rows)
    q0, q1 = load(Q0, Q1, q_strides, b, h, block * M, T, M, setup)
    stop = key_stop(rules, b, S)
    my_rows = (long(rows) * cell_rows // T).to(tl.int32) - cell_of(block * M, T, cell_rows)
    by_row = my_rows[None, :] == tl.arange(0, R)[:, None]  # [R, M]
    PARTS += (long(bh) * blocks + block) * row_cells * columns
    if setup.listed:
        TILES = list_of(TILES, list_strides, b, h, block)
        from_tile = 0
        to_tile = length_of(COUNTS, list_strides, b, h, block)
    else:
        a, _, _, d = keys_seen(first, last, stop, left, right, setup)
        from_tile = cell_of(a * N, S, columns) // fit
        to_tile = tl.where(d > a, cell_of(tl.minimum(d * N, S) - 1, S, columns) // fit + 1, from_tile)
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, C)[None, :]
    for i in tl.range(from_tile, to_tile, num_stages=setup.stages):
        tile = i
        if setup.listed:
            tile = tl.load(TILES + i)
        cell = tile * fit
        if EVEN:
            start = tile * N
            beyond = start + N
        else:
            start = ((long(cell) * S + columns - 1) // columns).to(tl.int32)
            beyond = ((long(cell + fit) * S + columns - 1) // columns).to(tl.int32)
        k0, k1 = load(K0, K1, k_strides, b, h // setup.G, start, S, N, setup)
        cols = start + tl.arange(0, N)
        x = log_weights(
            product(q0, q1, k0, k1, setup), powers[:, None], at[:, None], rows[:, None], cols[None, :],
            b, h, tl.minimum(stop, beyond), rules, T, S, left, right, True, setup,
        )  # fmt: skip
        p = tl.exp2(x)
        if EVEN:
            masses = even_cells(p, R, C, M, N)
        else:
            by_column = tl.load(CELLS + cols, mask=cols < S, other=-1) - cell
            pooled = dot_with_ones(p, by_column[:, None] == c, setup.exact)  # [M, C]
            if setup.exact:
                masses = tl.dot(by_row.to(tl.float32), pooled, input_precision="tf32x3")
            else:
                high = pooled.to(tl.bfloat16)
                low = (pooled - high.to(tl.float32)).to(tl.bfloat16)
                masses = tl.dot(by_row.to(tl.bfloat16), low, acc=tl.dot(by_row.to(tl.bfloat16), high))
        mine = (r < row_cells) & (c < fit) & (cell + c < columns)
        tl.store(PARTS + r * columns + cell + c, masses, mask=mine)


def narrow(prepared: Prepared, picture: Picture) -> Tensor:
    """Return [B, H, rows, columns]: the true mass of each cell."""
    request = Request(prepared, "picture")
    setup, T, S = request.setup, request.T, request.S
    M, N = setup.M, setup.N
    even = all(
        length % cells == 0 and size % (length // cells) == 0 and length % size == 0
        for length, cells, size in ((T, picture.rows, M), (S, picture.columns, N))
    )
    # whole cells that surely fit into a tile's columns
    fit = N // (S // picture.columns) if even else max(1, (N - 1) * picture.columns // S)
    row_cells = M // (T // picture.rows) if even else min(picture.rows, M * picture.rows // T + 2)
    parts = prepared.zeros(request.B * request.H, request.blocks, row_cells, picture.columns, 1)
    listed: Arguments = (None, None, None)
    if setup.listed:
        count = triton.cdiv(picture.columns, fit)
        listed = as_lists(*in_order(seen_tiles(request, fit * S, picture.columns, count)))
    shapes = (row_cells, fit) if even else tuple(max(16, triton.next_power_of_2(n)) for n in (row_cells, fit))
    cells = None
    if not even:
        cells = (torch.arange(S, device=prepared.device) * picture.columns // S).to(torch.int32)
    powers = powers_of(prepared.lse, prepared.kind, prepared.rules.counted)
    request.launch(
        picture_kernel, request.grid, powers, parts, cells, *listed,
        sizes=(request.blocks, picture.rows, picture.columns, row_cells, fit, powers.shape[-1]),
        options=(*shapes, even),
    )  # fmt: skip
    return added_up(request, parts, picture)


# Statistics and a picture together


# Row statistics that have a kernel.
NAMES = (*(name for name in by_row.NAMES if name != "mass"), *NEAR)


class Measured(NamedTuple):
    """The results of `measure`."""

    rows: dict[str, Tensor]  # [B, H], or [B, H, T] per query
    received: Tensor | None  # [B, H, S]
    picture: Tensor | None  # [B, H, rows, columns]


def measure(
    prepared: Prepared,
    kinds: Mapping[str, tuple[int | None, bool]],
    per_query: bool,
    reach: int,
    keys: bool,
    cells: tuple[int, int] | None,
) -> Measured:
    """Measure row statistics by name, each with (offset, whether a head's value is the largest).

    Args:
        kinds: the row statistics wanted.
        per_query: [B, H, T] instead of [B, H].
        reach: how near counts as local.
        keys: whether `received` is wanted.
        cells: rows and columns of the pooled map, if one is wanted.
    """
    signature = None
    if kinds and not (per_query or keys):
        lse = prepared.lse
        at = lse.data_ptr() & 15
        signature = ("measure", prepared.signature, *kinds.items(), reach, cells, lse.dtype, at)
        plan: Callable[[Prepared], dict[str, Tensor]] | None = PLANS.get(signature)
        if plan is not None:
            head_values = plan(prepared)
            return Measured(head_values, None, None if cells is None else narrow(prepared, Picture(*cells)))
    original = prepared
    walked = tuple([name for name in kinds if name in by_row.NAMES])
    glanced = tuple([name for name in kinds if name in NEAR])
    picture = None if cells is None else Picture(*cells)
    if glanced or keys or picture is not None:  # the walk itself divides by a row's mass
        prepared = by_row.settled(prepared)
    request = Request(prepared, "rows")
    fits = picture is not None and by_row.wide(request, picture)
    out = prepared.empty(len(walked) + len(glanced), *prepared.shape[:3])
    drawn, walk, glance = None, None, None
    if walked or fits:
        _, drawn, walk = by_row.rows(request, walked, picture if fits else None, not per_query, out)
    if glanced:
        glance = near(prepared, glanced, reach, out[len(walked) :])
    if picture is not None and not fits:
        drawn = narrow(prepared, picture)
    names = walked + glanced
    if names and not per_query:
        values, chosen = out, [kinds[name] for name in names]
        out = of_heads(prepared, values, chosen)
        # not if lse was recomputed, or a pooled map is computed in the same walk
        plannable = prepared is original and not fits
        if signature is not None and plannable and PLANS.seen_before(signature):
            fold = of_heads_again(prepared, values, out, chosen)
            PLANS.keep(signature, _planned(request, names, len(walked), walk, glance, fold))
    return Measured(dict(zip(names, out.unbind(), strict=True)), received(prepared) if keys else None, drawn)


def _planned(
    request: Request,
    names: tuple[str, ...],
    walked: int,
    walk: Launch | None,
    glance: Launch | None,
    fold: Callable[..., None] | None,
) -> Callable[[Prepared], dict[str, Tensor]] | None:
    """Return a function for the same signature that launches at once; None if it cannot be planned.

    Args:
        walked: how many of the names come from the walk.
        walk, glance: launches that were made; None: not needed.
        fold: see `of_heads_again`.
    """
    prepared = request.prepared
    q, k = prepared.q, prepared.k
    walk_on = None if walk is None else walk.again(q, k)
    look_around = None if glance is None else glance.again(q, k)
    if fold is None or (walk and not walk_on) or (glance and not look_around):
        return None
    rules_and_lists, ragged = rules_and_lists_by(request), prepared.first_keys is not None
    (B, H, T, _), count, device = prepared.shape, len(names), prepared.device

    def again(prepared: Prepared) -> dict[str, Tensor]:
        q, k, lse = prepared.q, prepared.k, prepared.lse
        rules, lists = rules_and_lists(prepared)
        values = torch.empty((count, B, H, T), dtype=torch.float32, device=device)
        if walk_on is not None:
            walk_on(q, k, rules, lse, values, values, *lists)
        if look_around is not None:
            first = prepared.first_keys if ragged else None
            look_around(q, k, rules, lse, values[walked:], first)
        out = torch.empty((count, B, H), dtype=torch.float32, device=device)
        fold(values, lse, out, rules)
        return dict(zip(names, out.unbind(), strict=True))

    return again


def pooled(prepared: Prepared, cells: tuple[int, int]) -> Tensor:
    """Return the pooled map, [B, H, rows, columns]: the summed weights of each cell."""
    picture = measure(prepared, {}, per_query=True, reach=0, keys=False, cells=cells).picture
    assert picture is not None
    return picture
