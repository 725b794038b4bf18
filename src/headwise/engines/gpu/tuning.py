"""Block sizes: a small measured table instead of minutes of autotuning at the first call.

Measured on an H200 (compute capability 9.0); LOG.md has the runners-up. Older GPUs have less shared memory
and take the careful column.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .cannot import interpreted

__all__ = ["FEW_ROWS", "SHORT", "SHORT_ROWS", "Blocks", "blocks_for", "takes_descriptors"]


class Blocks(NamedTuple):
    """Rows and columns of a tile, warps a program, stages of the software pipeline."""

    M: int
    N: int
    warps: int
    stages: int
    registers: int = 0  # most a thread may have; 0: as many as the compiler likes


# kind -> for 16-bit inputs with head_dim up to 64, up to 128, up to 256
HOPPER: dict[str, tuple[Blocks, Blocks, Blocks]] = {
    "rows": (Blocks(128, 128, 8, 2), Blocks(128, 128, 8, 2, 128), Blocks(128, 64, 4, 3)),
    "received": (Blocks(128, 128, 4, 2), Blocks(128, 128, 4, 2, 208), Blocks(128, 128, 4, 2)),
    "mean": (Blocks(128, 64, 8, 3, 128), Blocks(128, 64, 8, 3, 128), Blocks(64, 64, 4, 2)),
    "dense": (Blocks(128, 128, 4, 2), Blocks(128, 128, 4, 2), Blocks(64, 64, 4, 2)),
    "picture": (Blocks(128, 128, 4, 2), Blocks(128, 128, 4, 2), Blocks(64, 64, 4, 2)),
    "top": (Blocks(64, 128, 4, 2), Blocks(64, 128, 4, 2), Blocks(64, 64, 4, 2)),
    "near": (Blocks(64, 16, 4, 4), Blocks(64, 16, 4, 4), Blocks(64, 16, 4, 4)),
    "lse": (Blocks(128, 128, 8, 2), Blocks(128, 128, 4, 2), Blocks(128, 64, 4, 3)),
    "back_q": (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1)),
    "back_k": (Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1)),
}
CAREFUL = Blocks(64, 64, 4, 2)  # float32, whose tiles take twice the room; and older GPUs
VERY_CAREFUL = Blocks(32, 32, 4, 1)  # the same with long heads
FEW_ROWS = Blocks(16, 128, 4, 2)  # a handful of queries: the keys are what there is to load
SHORT, SHORT_ROWS = 1024, Blocks(128, 64, 4, 3)  # up to so many keys of short heads: dense weights
INTERPRETED = Blocks(16, 16, 1, 1)


def blocks_for(kind: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Blocks:
    """The blocks a kernel uses."""
    if interpreted():
        return INTERPRETED
    size = 0 if head_dim <= 64 else 1 if head_dim <= 128 else 2
    if dtype == torch.float32 or not takes_descriptors(device.index):
        return VERY_CAREFUL if size == 2 else CAREFUL
    return HOPPER[kind][size]


@functools.cache
def takes_descriptors(device: int | None) -> bool:
    """Whether the GPU has the copy engine that tensor descriptors drive."""
    return interpreted() or torch.cuda.get_device_capability(device) >= (9, 0)
