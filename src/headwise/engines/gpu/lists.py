"""Lists of tiles, for rules kept as tensors: padding with holes, documents, dense masks.

Each tile is looked at once; a block of rows then walks only those that show it anything. Where sequences or
heads share their rules they share their lists.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .request import NOT_SPECIAL, kind_of, launch
from .tile import Setup, key_stop, listed_rules, long, place

__all__ = ["lists", "seen_tiles"]


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
    seen = inside & (cols < key_stop(rules, b, S)) & listed_rules(rows, cols, b, h, rules, T, S, setup)
    if setup.left:
        seen = seen & (cols >= at - left)
    if setup.right:
        seen = seen & (cols <= at + right)
    tl.store(SEEN + pid, tl.max(tl.max(seen.to(tl.int32), 1), 0).to(tl.uint8))


def seen_tiles(
    request: Any, step: int | None = None, parts: int = 1, columns: int | None = None, begin: int = 0
) -> Tensor:
    """bool [B or 1, H or 1, row tiles, column tiles]; column tile j starts at begin + j * step / parts."""
    setup: Setup = request.setup
    mask = request.prepared.scores.mask
    length = request.T if request.keys_first else request.S
    count = triton.cdiv(length, setup.N) if columns is None else columns
    each = mask.keys is not None or (mask.key_ids is not None and mask.key_ids.shape[0] > 1)
    batch = request.B if each or (mask.allowed is not None and mask.allowed.shape[0] > 1) else 1
    heads = request.H if mask.allowed is not None and mask.allowed.shape[1] > 1 else 1
    seen = torch.empty(batch, heads, request.blocks, count, dtype=torch.uint8, device=request.prepared.device)
    _, *numbers = request.prepared.numbers
    args = (
        seen, request.prepared.rules, heads, *numbers, request.blocks, count, step or setup.N, parts, begin
    )  # fmt: skip
    kinds = (request.prepared.kind, kind_of(seen))
    launch(look, (seen.numel(), 1, 1), args, (request.keys_first, setup), kinds, seen.device)
    return seen.view(torch.bool)


def lists(request: Any) -> tuple[Tensor, Tensor]:
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
