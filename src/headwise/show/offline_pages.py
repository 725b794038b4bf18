"""Pages of one file: they load nothing, and run nothing but the script that is in them.

What is put into a template is looked at once: a text that looks like one of its marks stays a text.
Templates, styles and scripts lie in page/ beside this file; `make page` builds them from the sources.

Arrays are packed, and the page unpacks them again (`page/src/heads/packed.ts` says the same). A weight is
one of `LEVELS` levels, within 1% or 1e-4 of it: level 0 is hidden, 1 + n is n steps of 2e-4 up to 0.01, from
there on each level is 1.02 times the one before. Levels up to 254 are one byte; 255 stands for "255 and
more", and what is more follows behind all bytes, a byte for each 255 in order.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import html
import math
import os
import struct
import zlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError, ShapeError
from ..whole_files import place_for, whole_file


class Built(NamedTuple):
    """A page's three files, as they are put together."""

    template: str
    style: str
    script: str


def built(name: str) -> Built:
    """Return the template, style and script of one of our pages, "heads" or "explain"."""
    folder = files(__package__) / "page"
    return Built(*((folder / f"{name}.{ending}").read_text("utf-8") for ending in ("html", "css", "js")))


def filled(template: str, fill: Mapping[str, str]) -> str:
    """Return the template with each {{MARK}} replaced.

    Example:
        >>> filled("<p>{{TEXT}}</p>", {"TEXT": "{{TEXT}}"})
        '<p>{{TEXT}}</p>'
    """
    before, *rest = template.split("{{")
    for piece in rest:
        mark, after = piece.split("}}", 1)
        before += fill[mark] + after
    return before


def policy(
    *,
    style: str,
    script: str | None = None,
    images: bool = False,
    wasm: bool = False,
    ask: bool = False,
    inner: Built | None = None,
) -> str:
    """Return the Content-Security-Policy of a page: its own style, script and images, and no network.

    Args:
        images: pictures that are in the page, and those that its script makes.
        wasm: the script may compile WebAssembly that it holds; still no text becomes code.
        ask: the script may send requests to the server that the page came from, and to no other.
        inner: a page of ours that the page holds in frames: its style and script are allowed, too.
    """
    if wasm and script is None:
        raise ArgumentError(f"wasm must be given with a script: wasm={wasm}, script={script}; pass both")
    styles = [style, inner.style] if inner is not None else [style]
    parts = ["default-src 'none'", f"style-src {' '.join(map(_hash, styles))}"]
    if script is not None:
        scripts = [script, inner.script] if inner is not None else [script]
        parts.append(f"script-src {' '.join(map(_hash, scripts))}" + " 'wasm-unsafe-eval'" * wasm)
    if images:
        parts.append("img-src data:" + " blob:" * (script is not None))
    if ask:
        parts.append("connect-src 'self'")
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def framed(page: str, title: str, *, height: int, scripts: bool = False) -> str:
    """Return a page in a sandboxed frame for a notebook; with scripts, its pictures can be saved, too."""
    allowed = "allow-scripts allow-downloads" if scripts else ""
    return (
        f'<iframe title="{html.escape(title)}" sandbox="{allowed}" '
        f'style="width: 100%; height: {height}px; border: 1px solid #8886; border-radius: 8px" '
        f'srcdoc="{html.escape(page)}"></iframe>'
    )


def save_page(text: str, path: str | os.PathLike[str], example: str) -> Path:
    """Write a page, whole or not at all, and return where; raises `ArgumentError` where that cannot be."""
    place = check_page_path(path, example)
    with whole_file(place) as half:
        half.write_text(text, "utf-8", newline="\n")
    return place


def check_page_path(path: str | os.PathLike[str], example: str) -> Path:
    """Return the resolved path of a page, or raise `ArgumentError` as `save_page` does."""
    return place_for(path, (".html", ".htm"), ".html", example)


STEP = 2e-4
EVEN = 50  # steps up to 0.01
RATIO = 1.02
LEVELS = 1 + EVEN + math.ceil(math.log(100) / math.log(RATIO)) + 2
HIDDEN = 0
BYTE = 255  # the level from which on it takes two
ROOM = 1.01  # up to where a weight is 1 but for rounding

Blob = tuple[int, int]  # from and to, in letters of base64


def levels(cells: Tensor) -> bytes:
    """Return the weights of a map as levels for packing; 0 and NaN are hidden.

    Args:
        cells: [rows, columns], from 0 to 1.

    Raises:
        ArgumentError: a weight above 1.

    Example:
        >>> list(levels(torch.tensor([[0.0, 0.002, 1.0]])))
        [0, 11, 255, 29]
    """
    return levels_of_heads(cells[None])[0]


def levels_of_heads(cells: Tensor) -> list[bytes]:
    """Return `levels` of each head's cells, [h, rows, columns]; all heads are converted together."""
    p = cells.detach().flatten(1).to("cpu", torch.float32)
    most = float(p.nan_to_num(0.0).max()) if p.numel() else 0.0
    if most > ROOM:
        raise ArgumentError(
            f"weights must be at most 1 in a page: got {most:g}; pass the output of a softmax"
        )
    even = (p / STEP).round() + 1
    ratio = (p.clamp(min=EVEN * STEP) / (EVEN * STEP)).log().div(math.log(RATIO)).round() + (1 + EVEN)
    level = torch.where(p <= EVEN * STEP, even, ratio).clamp(max=LEVELS - 1)
    level = torch.where(p > 0, level, float(HIDDEN)).short()
    first = level.clamp(max=BYTE).byte()
    return [
        as_bytes(bytes_of_head) + as_bytes((own[own >= BYTE] - BYTE).byte())
        for bytes_of_head, own in zip(first, level, strict=True)
    ]


def as_bytes(values: Tensor) -> bytes:
    """Return the bytes of a tensor in order, without numpy."""
    array = values.detach().cpu().contiguous()
    return ctypes.string_at(array.data_ptr(), array.nbytes) if array.nbytes else b""


class Blobs:
    """Packed arrays, one behind the other, as the text of a page holds them.

    Example:
        >>> blobs = Blobs()
        >>> blobs.pack(bytes(100)), blobs.pack(b"abc")
        ((0, 16), (16, 32))
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._length = 0

    def pack(self, data: bytes) -> Blob:
        """Add compressed data, and return where it lies: [from, to)."""
        # only runs of one byte are looked for: weights repeat nothing else; it takes a fiftieth of the time
        deflate = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, zlib.DEF_MEM_LEVEL, zlib.Z_RLE)
        part = base64.b64encode(deflate.compress(data) + deflate.flush()).decode("ascii")
        start = self._length
        self._parts.append(part)
        self._length += len(part)
        return start, self._length

    @property
    def text(self) -> str:
        return "".join(self._parts)


LEADING = 8  # tokens at most that stand before the patches of an image: [CLS], registers


def image_data(
    image: Any, patches: tuple[int, int] | None, sequences: int, tokens: int
) -> dict[str, Any] | None:
    """Return the input image as a PNG, and the positions of its patches among the tokens."""
    if image is None:
        if patches is not None:
            raise ArgumentError(
                f"patches must be given with image: got patches={patches!r} alone; give image=, too"
            )
        return None
    if sequences > 1:
        raise ArgumentError(
            f"image must be for one sequence: the last forward had {sequences}; choose one with batch="
        )
    pixels = _pixels(image)
    rows, columns, first = _patches(patches, tokens)
    src = f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode('ascii')}"
    return {"src": src, "rows": rows, "columns": columns, "first": first}


def _patches(patches: tuple[int, int] | None, count: int) -> tuple[int, int, int]:
    if patches is None:
        for first in (0, 1):
            side = math.isqrt(count - first)
            if side and side * side == count - first:
                return side, side, first
        raise ArgumentError(
            f"patches must be given if the tokens form no square: got {count} tokens, {count - 1} without "
            "[CLS]; give patches=(rows, columns)"
        )
    pair = tuple(patches)
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise ArgumentError(f"patches must be (rows, columns), both positive: got {patches!r}; try (14, 14)")
    rows, columns = pair
    first = count - rows * columns
    if not 0 <= first <= LEADING:
        raise ArgumentError(
            f"patches must match the tokens (at most {LEADING} tokens may precede the patches): got {rows} x "
            f"{columns} = {rows * columns} for {count} tokens; correct rows and columns"
        )
    return rows, columns, first


def _pixels(image: Any) -> Tensor:
    """Return the pixels of an image, uint8 [H, W, 3]."""
    pixels = image if isinstance(image, Tensor) else torch.as_tensor(image)
    pixels = pixels.detach().cpu()
    if pixels.ndim == 2:
        pixels = pixels[..., None].expand(-1, -1, 3)
    if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise ShapeError(
            f"image must be [H, W] or [H, W, 3]: got {list(image.shape)}; for [3, H, W] use "
            "image.permute(1, 2, 0)"
        )
    if pixels.dtype == torch.uint8:
        return pixels.contiguous()
    if not pixels.is_floating_point():
        raise ArgumentError(
            f"image must be uint8, or floats from 0 to 1: got {pixels.dtype}; use image.byte()"
        )
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= 1):
        raise ArgumentError(
            f"image must be from 0 to 1 if it has floats: got {low:g} to {high:g}; pass it as it was before "
            "the model's preprocessing"
        )
    return (pixels * 255).round().byte().contiguous()


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
