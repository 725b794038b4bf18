"""The image that a model read in patches, as a page holds it: a PNG, and where its patches stand."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError
from .packed_maps import as_bytes
from .page_readings import Reading

__all__ = ["image_data"]

LEADING = 8  # tokens at most that stand before the patches of an image: [CLS], registers


def image_data(image: Any, patches: tuple[int, int] | None, readings: list[Reading]) -> dict[str, Any] | None:
    """The image that was read, and where its patches stand among the tokens."""
    if image is None:
        if patches is not None:
            raise ArgumentError(f"patches must come with their image: got {patches!r}; give image=, too")
        return None
    if len(readings) > 1:
        raise ArgumentError(
            f"image must be of one sequence: the last forward had {len(readings)}; give batch=, too"
        )
    pixels = _pixels(image)
    count = max(len(view.keys) for view in readings[0].layers if view is not None)
    rows, columns, first = _patches(patches, count)
    src = f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode('ascii')}"
    return {"src": src, "rows": rows, "columns": columns, "first": first}


def _patches(patches: tuple[int, int] | None, count: int) -> tuple[int, int, int]:
    if patches is None:
        for first in (0, 1):
            side = math.isqrt(count - first)
            if side and side * side == count - first:
                return side, side, first
        raise ArgumentError(
            f"patches must be given where they are no square: {count} tokens, [CLS] or not; give "
            "patches=(rows, columns)"
        )
    pair = tuple(patches)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise ArgumentError(f"patches must be rows and columns: got {patches!r}; give (14, 14)")
    rows, columns = pair
    first = count - rows * columns
    if not 0 <= first <= LEADING:
        raise ArgumentError(
            f"patches must be as many as the tokens, but for {LEADING} before them: {rows} x {columns} = "
            f"{rows * columns} of {count}; count them again"
        )
    return rows, columns, first


def _pixels(image: Any) -> Tensor:
    """uint8 [H, W, 3]"""
    given = image if isinstance(image, Tensor) else torch.as_tensor(image)
    given = given.detach().cpu()
    if given.ndim == 2:
        given = given[..., None].expand(-1, -1, 3)
    if given.ndim != 3 or given.shape[2] != 3 or 0 in given.shape:
        raise ShapeError(
            f"image must be [H, W] or [H, W, 3]: got {list(image.shape)}; of [3, H, W] give "
            "image.permute(1, 2, 0)"
        )
    if given.dtype == torch.uint8:
        return given.contiguous()
    if not given.is_floating_point():
        raise ArgumentError(
            f"image must be uint8, or floats from 0 to 1: got {given.dtype}; use image.byte()"
        )
    low, high = float(given.min()), float(given.max())
    if not (low >= 0 and high <= 1):
        raise ArgumentError(
            f"image must be from 0 to 1 where it is of floats: got {low:g} to {high:g}; undo what was done "
            "to it for the model"
        )
    return (given * 255).round().byte().contiguous()


def _png(pixels: Tensor) -> bytes:
    rows, columns, _ = pixels.shape
    lines = torch.cat([torch.zeros(rows, 1, dtype=torch.uint8), pixels.flatten(1)], dim=1)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(as_bytes(lines), 9)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(inside)) + name + inside + struct.pack(">I", zlib.crc32(name + inside))
        for name, inside in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
