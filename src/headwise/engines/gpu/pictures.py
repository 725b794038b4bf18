"""Pictures of narrow cells; statistics and pictures together, in as few walks as they need.

`measure` plans the walks: one over rows, one over keys, a glance around each query. A picture whose cells are
wider than a tile comes with the walk over rows (rows.py); here is the one for narrower cells. There a tile
covers as many whole cells as fit into its columns, so no cell is shared between tiles. Its weights are added
up by two products with indicators, columns first. In 16 bits a weight goes in as two numbers, which together
hold it to 2^-17.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import neighbours as around
from . import rows as by_row
from .launches import NOT_SPECIAL, PLANS, Arguments
from .lists import in_order, powers_of, seen_tiles
from .neighbours import of_heads, of_heads_again, received
from .request import Launch, Prepared, Request, as_lists, rules_and_lists_by
from .rows import Picture, added_up, cell_of
from .tile import key_stop, keys_seen, length_of, list_of, load, log_weights, long, my_queries, product

__all__ = ["NAMES", "Measured", "measure", "narrow", "pooled"]


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
    """[B, H, rows, columns]: the true mass of each cell."""
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
NAMES = (*(name for name in by_row.NAMES if name != "mass"), *around.NAMES)


class Measured(NamedTuple):
    """What was asked for."""

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
    """Row statistics by name, each with (offset, whether a head's value is the largest).

    Args:
        kinds: the row statistics wanted.
        per_query: [B, H, T] instead of [B, H].
        reach: how near counts as local.
        keys: whether `received` is wanted.
        cells: rows and columns of the picture, if one is wanted.
    """
    signature = None
    if kinds and not (per_query or keys):
        lse = prepared.lse
        signature = (
            "measure",
            prepared.signature,
            *kinds.items(),
            reach,
            cells,
            lse.dtype,
            lse.data_ptr() & 15,
        )
        plan: Callable[[Prepared], dict[str, Tensor]] | None = PLANS.get(signature)
        if plan is not None:
            found = plan(prepared)
            return Measured(found, None, None if cells is None else narrow(prepared, Picture(*cells)))
    given = prepared
    walked = tuple([name for name in kinds if name in by_row.NAMES])
    glanced = tuple([name for name in kinds if name in around.NAMES])
    picture = None if cells is None else Picture(*cells)
    if glanced or keys or picture is not None:  # what is walked divides by a row's mass itself
        prepared = by_row.settled(prepared)
    request = Request(prepared, "rows")
    fits = picture is not None and by_row.wide(request, picture)
    out = prepared.empty(len(walked) + len(glanced), *prepared.shape[:3])
    drawn, walk, glance = None, None, None
    if walked or fits:
        _, drawn, walk = by_row.rows(request, walked, picture if fits else None, not per_query, out)
    if glanced:
        glance = around.near(prepared, glanced, reach, out[len(walked) :])
    if picture is not None and not fits:
        drawn = narrow(prepared, picture)
    names = walked + glanced
    if names and not per_query:
        values, chosen = out, [kinds[name] for name in names]
        out = of_heads(prepared, values, chosen)
        # not where an lse was measured in between, or a picture is made in the same walk
        plannable = prepared is given and not fits
        if signature is not None and plannable and PLANS.is_back(signature):
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
    """Statistics of heads for all with the signature of these: room, and launches at once; None: no plan.

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
    given_by, ragged = rules_and_lists_by(request), prepared.first_keys is not None
    (B, H, T, _), count, device = prepared.shape, len(names), prepared.device

    def again(prepared: Prepared) -> dict[str, Tensor]:
        q, k, lse = prepared.q, prepared.k, prepared.lse
        rules, lists = given_by(prepared)
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
    """[B, H, rows, columns]: the true mass of each cell."""
    picture = measure(prepared, {}, per_query=True, reach=0, keys=False, cells=cells).picture
    assert picture is not None
    return picture
