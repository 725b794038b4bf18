"""Weights in a page: levels, packed; what the page unpacks again (`page/src/heads/packed.ts` says the same).

A weight is one of `LEVELS` levels, within 1% or 1e-4 of it: level 0 is hidden, 1 + n is n steps of 2e-4 up
to 0.01, from there on each level is 1.02 times the one before. Levels up to 254 are one byte; 255 stands for
"255 and more", and what is more follows behind all bytes, a byte for each 255 in order.
"""

from __future__ import annotations

import base64
import ctypes
import math
import zlib

import torch
from torch import Tensor

from ..errors import ArgumentError

__all__ = ["LEVELS", "VALUES", "Blob", "Blobs", "as_bytes", "levels", "weights"]

STEP = 2e-4
EVEN = 50  # steps up to 0.01
RATIO = 1.02
LEVELS = 1 + EVEN + math.ceil(math.log(100) / math.log(RATIO)) + 2
VALUES = torch.tensor(
    [math.nan]
    + [n * STEP for n in range(EVEN + 1)]
    + [min(1.0, EVEN * STEP * RATIO**n) for n in range(1, LEVELS - 1 - EVEN)]
)  # what each level stands for
HIDDEN = 0
BYTE = 255  # the level from which on it takes two
ROOM = 1.01  # up to where a weight is 1 but for rounding

Blob = tuple[int, int]  # from and to, in letters of base64


def levels(cells: Tensor) -> bytes:
    """Weights of one map as levels, before packing; nothing, or no number, is hidden.

    Args:
        cells: [rows, columns], from 0 to 1.

    Raises:
        ArgumentError: a weight above 1.

    Example:
        >>> list(levels(torch.tensor([[0.0, 0.002, 1.0]])))
        [0, 11, 255, 29]
    """
    p = cells.detach().flatten().to("cpu", torch.float32)
    most = float(p.nan_to_num(0.0).max()) if len(p) else 0.0
    if most > ROOM:
        raise ArgumentError(
            f"weights must be at most 1 in a page: got {most:g}; give weights that a softmax made"
        )
    even = (p / STEP).round() + 1
    ratio = (p.clamp(min=EVEN * STEP) / (EVEN * STEP)).log().div(math.log(RATIO)).round() + (1 + EVEN)
    level = torch.where(p <= EVEN * STEP, even, ratio).clamp(max=LEVELS - 1)
    level = torch.where(p > 0, level, float(HIDDEN)).short()
    more = level[level >= BYTE] - BYTE
    return as_bytes(level.clamp(max=BYTE).byte()) + as_bytes(more.byte())


def weights(data: bytes, rows: int, columns: int) -> Tensor:
    """Levels as weights again, [rows, columns]; NaN where they are hidden.

    Raises:
        ArgumentError: more or fewer bytes than such a map has.
    """
    count = rows * columns
    level = torch.tensor(list(data[:count]), dtype=torch.long)
    large = level == BYTE
    if len(level) != count or len(data) != count + int(large.sum()):
        raise ArgumentError(
            f"data must be levels of {rows} x {columns} cells: got {len(data)} bytes; unpack a whole map"
        )
    level[large] += torch.tensor(list(data[count:]), dtype=torch.long)
    return VALUES[level].view(rows, columns)


def as_bytes(values: Tensor) -> bytes:
    """The numbers of a tensor as they lie in memory, in order; numpy is not asked."""
    there = values.detach().cpu().contiguous()
    return ctypes.string_at(there.data_ptr(), there.nbytes) if there.nbytes else b""


class Blobs:
    """Packed arrays, one behind the other, as the text of a page holds them.

    Example:
        >>> blobs = Blobs()
        >>> blobs.pack(bytes(100)), blobs.pack(b"abc")
        ((0, 16), (16, 32))
        >>> Blobs.unpacked(blobs.text, (16, 32))
        b'abc'
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0

    def pack(self, data: bytes) -> Blob:
        """Take it in, compressed, and say where it lies: [from, to)."""
        # only runs of one byte are looked for: weights repeat nothing else; it takes a fiftieth of the time
        deflate = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
        part = base64.b64encode(deflate.compress(data) + deflate.flush()).decode("ascii")
        start = self._length
        self._parts.append(part)
        self._length += len(part)
        return start, self._length

    def __len__(self) -> int:
        """In letters."""
        return self._length

    @property
    def text(self) -> str:
        """All of them."""
        return "".join(self._parts)

    @staticmethod
    def unpacked(text: str, blob: Blob) -> bytes:
        """What was taken in, as the page reads it."""
        return zlib.decompress(base64.b64decode(text[slice(*blob)]))
