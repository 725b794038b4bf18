"""What is made ready before a walk: lists of tiles, and lse as powers of two.

Lists are for rules kept as tensors: padding with holes, documents, dense masks. Each tile is looked at once;
a block of rows then walks only those that show it anything. Where sequences or heads share their rules they
share their lists.

Kernels that load lse in every tile want it with room behind each row: padded to whole tiles, so that loading
it needs no mask; BIG for queries that see nothing, are not there or, if asked for, do not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launches import NOT_SPECIAL, interpreted, kind_of, launch
from .tile import BIG, Setup, key_stop, listed_rules, load_lse, long, place

if TYPE_CHECKING:
    from .request import Request

__all__ = ["in_order", "lists", "powers_of", "seen_tiles"]

ROOM = 256  # no tile is larger
SIZE = 1024


# Lists of tiles


@triton.jit(do_not_specialize=[*NOT_SPECIAL, "heads", "row_tiles", "column_tiles", "step", "parts", "begin"])
def look(
    SEEN, rules, heads, T, S, shift, left, right, row_tiles, column_tiles, step, parts, begin,
    KEYS_FIRST: tl.constexpr, setup: tl.constexpr,
):  # fmt: skip
    """Whether a tile shows anything. Column tile j starts at begin + j * step / parts, rounded up."""
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
    seen = inside & (cols < key_stop(rules, b, S)) & listed_rules(at, rows, cols, b, h, rules, T, S, setup)
    if setup.left:
        seen = seen & (cols >= at - left)
    if setup.right:
        seen = seen & (cols <= at + right)
    tl.store(SEEN + pid, tl.max(tl.max(seen.to(tl.int32), 1), 0).to(tl.uint8))


def seen_tiles(
    request: Request, step: int | None = None, parts: int = 1, columns: int | None = None, begin: int = 0
) -> Tensor:
    """bool [B or 1, H or 1, row tiles, column tiles]; column tile j starts at begin + j * step / parts."""
    setup: Setup = request.setup
    mask = request.prepared.scores.mask
    length = request.T if request.keys_first else request.S
    count = triton.cdiv(length, setup.N) if columns is None else columns
    batch, heads = request.B if mask.differs("b") else 1, request.H if mask.differs("h") else 1
    seen = torch.empty(batch, heads, request.blocks, count, dtype=torch.uint8, device=request.prepared.device)
    _, *numbers = request.prepared.numbers
    args = (
        seen, request.prepared.rules, heads, *numbers, request.blocks, count, step or setup.N, parts, begin
    )  # fmt: skip
    kinds = (request.prepared.kind, kind_of(seen))
    launch(look, (seen.numel(), 1, 1), args, (request.keys_first, setup), kinds, seen.device)
    return seen.view(torch.bool)


def lists(request: Request) -> tuple[Tensor, Tensor]:
    """(int32 [B or 1, H or 1, row tiles, column tiles]: the tiles seen, in order; how many of them)."""
    return in_order(seen_tiles(request))


def in_order(seen: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the true entries of each row, in order, and how many there are."""
    place_in_list = seen.cumsum(-1, dtype=torch.int32)
    counts = place_in_list[..., -1].contiguous()
    tiles = torch.zeros(*seen.shape[:-1], seen.shape[-1] + 1, dtype=torch.int32, device=seen.device)
    # whatever is not seen is written to a place that nobody reads, one beyond the last
    where = torch.where(seen, place_in_list - 1, seen.shape[-1]).long()
    numbers = torch.arange(seen.shape[-1], dtype=torch.int32, device=seen.device)
    tiles.scatter_(-1, where, numbers.expand_as(where))
    return tiles, counts


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
    """[B, H, T and room] from lse [B, H, T], contiguous.

    Args:
        kind: of the request; see `Prepared.kind`.
        counted: which queries count, uint8 [B, T]; None: all.
    """
    B, H, T = lse.shape
    padded = -(-T // ROOM) * ROOM
    out = torch.empty(B, H, padded, dtype=torch.float32, device=lse.device)
    size = 64 if interpreted() else SIZE
    kinds = (kind, kind_of((lse, counted)))
    args = (lse, counted, out, H, T, padded)
    launch(powers_kernel, (B * H, triton.cdiv(padded, size), 1), args, (size,), kinds, out.device)
    return out
