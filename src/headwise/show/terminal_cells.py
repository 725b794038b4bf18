"""What heat maps in the terminal are made of: weights as cells, cells as characters and colours.

Letters: H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..heads.collection import Heads
from ..heads.layer import Head, LayerHeads
from ..heads.record import Record
from .pictured_heads import call_of, names_of, queries_inside
from .sheet import LIGHT_TO_DARK, NOTHING
from .texts import plain

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["FROM", "MARK", "PLAIN_SHADES", "SHADES", "Drawn", "Pen", "colours_of"]

FINEST = 256  # positions a side: beyond, no dense weights are made
FROM = (0.01, 0.1, 0.25, 0.5)  # the weights at which the next shade begins: even steps of the square root
SHADES, PLAIN_SHADES = "·░▒▓█", ".:+*#"
FRAME, PLAIN_FRAME = "┌─┐└┘│", "+-+++|"  # corners and what is between them, above and below; the sides
RIGHT_TO_LEFT = {"R", "AL", "AN"}
MARK = "\N{LEFT-TO-RIGHT MARK}"  # around a name from right to left, or the row would turn round with it


# Cells


@dataclass(frozen=True)
class Drawn:
    """The chosen heads of one layer."""

    heads: list[Head]
    mass: Tensor  # [H, rows, columns]: weights, or summed where positions share a cell
    counts: Tensor  # [rows]: how many queries each row is the sum of; of weights, which queries count
    lengths: tuple[int, int]
    queries: list[str] | None  # their names
    keys: list[str] | None
    by_path: bool

    @classmethod
    def of(cls, heads: Heads, path: str, members: list[Head], batch: int, pen: Pen) -> Drawn:
        layer: LayerHeads = heads[path]
        mass, counts, call = _mass(layer, batch)
        _, _, T, S = call.shape
        queries, keys = (
            None if names is None else [pen.known(plain(name)) for name in names]
            for names in names_of(heads, batch, call)
        )
        which = [head.head for head in members]
        return cls(members, mass[which], counts, (T, S), queries, keys, not isinstance(layer.layer, int))

    def cells(self, rows: int, columns: int) -> Tensor:
        """[H, rows, columns]: the mean over the queries of a row of the weight in a cell."""
        mass = _shared(self.mass, -1, columns)
        if self.mass.shape[-2] == self.lengths[0]:  # of weights; padded queries have theirs, until they share
            if rows == self.lengths[0]:
                return mass
            mass = mass * self.counts[:, None]
        counts = _shared(self.counts, -1, rows)
        return _shared(mass, -2, rows) / counts.clamp(min=1)[:, None]


def _mass(layer: LayerHeads, batch: int) -> tuple[Tensor, Tensor, Record]:
    """Weights, beyond 256 positions pooled; queries of each row; of which call, the last that has them."""
    call = call_of(layer)
    _, _, T, S = call.shape
    if call.map is None:
        assert call.pooled is not None
        picture = call.pooled[batch].cpu().float()
        return picture, queries_inside(T, picture.shape[1], call.pooled_queries, batch), call
    weights = call.map.select(batch=batch)
    mask = weights.mask.counted(T)
    counted = torch.ones(T) if mask is None else mask[0].cpu().float()
    if max(T, S) <= FINEST:
        return weights.dense().detach()[0].cpu().float(), counted, call
    picture = weights.pooled(FINEST).detach()[0].cpu().float()
    return picture, _shared(counted, -1, picture.shape[1]), call


def _shared(values: Tensor, dim: int, cells: int) -> Tensor:
    """Summed into so many cells along a dimension."""
    size = values.shape[dim]
    if cells >= size:
        return values
    shape = list(values.shape)
    shape[dim] = cells
    return values.new_zeros(shape).index_add_(dim, torch.arange(size) * cells // size, values)


# Characters


@dataclass(frozen=True)
class Pen:
    """The characters that an encoding has."""

    encoding: str
    shades: str
    frame: str
    cut: str

    @classmethod
    def of(cls, encoding: str) -> Pen:
        try:
            "".encode(encoding)
        except LookupError:
            encoding = "ascii"
        blocks = SHADES + FRAME
        fine = blocks.encode(encoding, "replace").decode(encoding) == blocks
        cut = "…" if "…".encode(encoding, "replace").decode(encoding) == "…" else "~"
        return cls(encoding, SHADES if fine else PLAIN_SHADES, FRAME if fine else PLAIN_FRAME, cut)

    def known(self, text: str) -> str:
        return text.encode(self.encoding, "replace").decode(self.encoding)

    def text(self, words: str = "", style: str = "") -> Text:
        from rich.text import Text

        return Text(self.known(words), style)

    def name(self, token: str, cells: int, *, right: bool = False) -> Text:
        """A token in exactly so many cells; what is too long is cut at its end."""
        from rich.cells import cell_len

        shown = token
        while cell_len(shown) > cells:
            shown = shown[: -1 - (shown != token)] + self.cut if len(shown) > 1 else ""
        space = " " * (cells - cell_len(shown))
        if any(unicodedata.bidirectional(char) in RIGHT_TO_LEFT for char in shown):
            shown = f"{MARK}{shown}{MARK}"
        return self.text(space + shown if right else shown + space)

    def cells(self, row: Sequence[float], wide: int) -> Text:
        """A row of a heat map."""
        shown = self.text()
        for weight in row:
            shown.append(self.shade(weight) * wide, colours_of(weight))
        return shown

    def shade(self, weight: float) -> str:
        """A character for the weight; where there is none, or no number, a space."""
        if not weight > 0:
            return " "
        return self.shades[sum(weight >= start for start in FROM)]

    def edge(self, columns: int, top: bool) -> Text:
        left, right = (0, 2) if top else (3, 4)
        return self.text(self.frame[left] + self.frame[1] * columns + self.frame[right], "dim")

    @property
    def side(self) -> Text:
        return self.text(self.frame[5], "dim")


def colours_of(weight: float) -> str:
    """The ramp of pictures; ground and letter alike, so that a cell is one field, and shaded where copied."""
    if not weight > 0:
        return f"on {NOTHING}"
    at = min(math.sqrt(weight), 1.0) * (len(LIGHT_TO_DARK) - 1)
    low = min(int(at), len(LIGHT_TO_DARK) - 2)
    here, there = (bytes.fromhex(LIGHT_TO_DARK[low + step][1:]) for step in (0, 1))
    mixed = (round(a + (b - a) * (at - low)) for a, b in zip(here, there, strict=True))
    ground = "#" + "".join(f"{part:02x}" for part in mixed)
    return f"{ground} on {ground}"
