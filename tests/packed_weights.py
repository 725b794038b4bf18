"""Arrays of a page read again, as the page reads them (`page/src/heads/packed.ts`)."""

from __future__ import annotations

import base64
import math
import zlib

import torch
from torch import Tensor

from headwise.show.offline_pages import BYTE, EVEN, LEVELS, RATIO, STEP, Blob

VALUES = torch.tensor(
    [math.nan]
    + [n * STEP for n in range(EVEN + 1)]
    + [min(1.0, EVEN * STEP * RATIO**n) for n in range(1, LEVELS - 1 - EVEN)]
)  # what each level stands for


def weights(data: bytes, rows: int, columns: int) -> Tensor:
    """Levels as weights again, [rows, columns]; NaN where they are hidden."""
    count = rows * columns
    level = torch.tensor(list(data[:count]), dtype=torch.long)
    large = level == BYTE
    assert len(data) == count + int(large.sum())
    level[large] += torch.tensor(list(data[count:]), dtype=torch.long)
    return VALUES[level].view(rows, columns)


def unpacked(text: str, blob: Blob) -> bytes:
    """What `Blobs.pack` took in."""
    return zlib.decompress(base64.b64decode(text[slice(*blob)]))
