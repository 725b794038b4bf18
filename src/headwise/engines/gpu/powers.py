"""lse as powers of two, with room behind each row: what kernels that load it in every tile want.

Padded to whole tiles, so that loading it needs no mask; BIG for queries that see nothing, are not there or,
if asked for, do not count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .cannot import interpreted
from .request import kind_of, launch
from .tile import BIG, load_lse, long

__all__ = ["powers_of"]

ROOM = 256  # no tile is larger
SIZE = 1024


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
