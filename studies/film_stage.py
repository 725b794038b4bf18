"""The canvas of the film: boxes, numbers, words and lines, and how they move.

Places are in units, from the upper left: a frame is 960 x 540 units, and a unit is `SCALE` dots wide. What is
drawn later lies above.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.font_manager import FontProperties
from matplotlib.patches import BoxStyle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D
from torch import Tensor

from headwise.show.sheet import FAINT, INK, PALE

__all__ = [
    "FAINT",
    "HEAD",
    "HEIGHT",
    "INK",
    "NEGATIVE",
    "PALE",
    "PAPER",
    "POSITIVE",
    "SCALE",
    "WIDTH",
    "Place",
    "Stage",
    "between",
    "eased",
    "signed",
    "toned",
    "width_of",
]

WIDTH, HEIGHT = 960, 540  # in units
SCALE = 2  # dots in a unit: a frame is 1920 x 1080 dots
DPI = 100
PAPER = "#fbfbfc"
POSITIVE, NEGATIVE = "#d9601a", "#2a6db5"
HEAD = ("#0b7f7a", "#a8327a")  # of head 1, of head 2
EMPTY = "#eef0f4"  # a cell of zero

UPSIDE_DOWN = Affine2D().scale(SCALE, -SCALE).translate(0, HEIGHT * SCALE)  # the renderer counts from below
EDGE = 2  # dots left free around drawn words

Dots = numpy.ndarray[Any, Any]
Colour = Any  # a name, "#rrggbb", or red, green, blue from 0 to 1
Tone = Callable[[float], tuple[float, float, float]]


class Place(NamedTuple):
    """The position of a grid of cells, and the size of a cell."""

    x: float
    y: float
    size: float


# How things move


def eased(t: float, start: float = 0.0, end: float = 1.0) -> float:
    """Return 0 until `start` and 1 from `end` on, with a smooth step in between."""
    share = min(max((t - start) / (end - start), 0.0), 1.0)
    return share * share * (3 - 2 * share)


def between(a: Place, b: Place, share: float) -> Place:
    """Return the place at a share of the way from one place to another."""
    return Place(*(start + (other - start) * share for start, other in zip(a, b, strict=True)))


# Colours


@lru_cache(4096)
def rgb(colour: Colour) -> tuple[float, float, float]:
    """Return red, green and blue of a colour, from 0 to 1."""
    if not isinstance(colour, str):
        red, green, blue = colour
        return red, green, blue
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def blend(a: Colour, b: Colour, share: float) -> tuple[float, float, float]:
    """Return the colour at a share of the way from one colour to another."""
    red, green, blue = (
        start + (other - start) * min(max(share, 0.0), 1.0)
        for start, other in zip(rgb(a), rgb(b), strict=True)
    )
    return red, green, blue


def signed(top: float) -> Tone:
    """Return a colour function of numbers: blue below zero, orange above, full at `top`."""

    def tone(value: float) -> tuple[float, float, float]:
        return blend(EMPTY, POSITIVE if value > 0 else NEGATIVE, (abs(value) / top) ** 0.8 * 0.92)

    return tone


def toned(colour: Colour) -> Tone:
    """Return a colour function of shares from 0 to 1: from pale to this colour."""
    return lambda value: blend(EMPTY, colour, value**0.7)


def _on(colour: Colour) -> str:
    """Return a text colour that is legible on a background colour."""
    red, green, blue = rgb(colour)
    return "#ffffff" if 0.30 * red + 0.59 * green + 0.11 * blue < 0.58 else INK


@lru_cache(4096)
def _lettered(words: str, size: float, bold: bool) -> tuple[Dots, float, float]:
    """Return drawn words as coverage of pixels, uint8 [rows, columns], their width, and their baseline."""
    font = FontProperties(family="DejaVu Sans", size=size * 72 / DPI, weight="bold" if bold else "normal")
    measure = RendererAgg(1, 1, DPI)
    width, height, below = measure.get_text_width_height_descent(words, font, False)
    base = EDGE + math.ceil(height - below)
    paper = RendererAgg(math.ceil(width) + 2 * EDGE, base + math.ceil(below) + EDGE, DPI)
    pen = paper.new_gc()
    paper.draw_text(pen, EDGE, base, words, font, 0)
    return numpy.asarray(paper.buffer_rgba())[..., 3].copy(), width, base


def width_of(words: str, size: float, bold: bool = False) -> float:
    """Return the width of words in units."""
    return _advance(words, round(4 * size * SCALE) / 4, bold) / SCALE


@lru_cache(4096)
def _advance(words: str, size: float, bold: bool) -> float:
    """Return the width of words in dots, with the spaces at their end."""
    font = FontProperties(family="DejaVu Sans", size=size * 72 / DPI, weight="bold" if bold else "normal")
    measure = RendererAgg(1, 1, DPI)
    ends = [measure.get_text_width_height_descent(text, font, False)[0] for text in (f"{words}|", "|")]
    return float(ends[0] - ends[1])


# The stage


class Stage:
    """A frame: draw on it, then read its pixels.

    Things go straight to matplotlib's renderer, and a word is drawn once for all frames: as artists on axes a
    frame takes several times as long.
    """

    def __init__(self) -> None:
        self._renderer = RendererAgg(WIDTH * SCALE, HEIGHT * SCALE, DPI)
        self.box(0, 0, WIDTH, HEIGHT, PAPER)

    def dots(self) -> Dots:
        """Return red, green, blue and opacity of every dot, uint8 [1080, 1920, 4]."""
        return numpy.asarray(self._renderer.buffer_rgba())

    # Plain things

    def _path(
        self, path: Path, *, fill: Colour | None = None, edge: Colour | None = None, line: float = 0,
        alpha: float = 1,
    ) -> None:  # fmt: skip
        pen = self._renderer.new_gc()
        pen.set_linewidth(line * SCALE * 72 / DPI if edge is not None else 0)
        pen.set_foreground((*rgb(PAPER if edge is None else edge), alpha), isRGBA=True)
        pen.set_joinstyle("round")
        self._renderer.draw_path(pen, path, UPSIDE_DOWN, None if fill is None else (*rgb(fill), alpha))

    def box(self, x: float, y: float, width: float, height: float, colour: Colour, alpha: float = 1) -> None:
        """Draw a filled box."""
        if alpha > 0 and width > 0:
            corners = [(x, y), (x + width, y), (x + width, y + height), (x, y + height), (x, y)]
            self._path(Path(corners, closed=True), fill=colour, alpha=alpha)

    def outline(
        self, x: float, y: float, width: float, height: float, colour: Colour, *, line: float = 2,
        alpha: float = 1, corner: float = 3,
    ) -> None:  # fmt: skip
        """Draw the outline of a box with round corners."""
        if alpha > 0:
            around = BoxStyle.Round(pad=0, rounding_size=corner)(x, y, width, height, 1)
            self._path(around, edge=colour, line=line, alpha=alpha)

    def line(
        self, points: Sequence[tuple[float, float]], colour: Colour, width: float = 1.5, *, alpha: float = 1
    ) -> None:
        """Draw a line from point to point."""
        if alpha > 0 and len(points) > 1:
            self._path(Path(points), edge=colour, line=width, alpha=alpha)

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: Colour, alpha: float = 1) -> None:
        """Draw a thin arrow."""
        self.line([(x, y), (to_x, to_y)], colour, 1.6, alpha=alpha)
        angle = math.atan2(to_y - y, to_x - x)
        barbs = [
            (to_x - 8 * math.cos(angle + turn), to_y - 8 * math.sin(angle + turn)) for turn in (-0.5, 0.5)
        ]
        self.line([barbs[0], (to_x, to_y), barbs[1]], colour, 1.6, alpha=alpha)

    def disc(self, x: float, y: float, radius: float, colour: Colour, alpha: float = 1) -> None:
        """Draw a filled circle with a light rim."""
        if alpha > 0:
            self._path(Path.circle((x, y), radius), fill=colour, edge="#ffffff", line=1.2, alpha=alpha)

    def text(
        self, x: float, y: float, words: str, size: float = 15, colour: Colour = INK, *, at: str = "center",
        bold: bool = False, alpha: float = 1, turned: bool = False,
    ) -> None:  # fmt: skip
        """Write text centred at a height; size in units. `at`: which end of the text is at x.

        turned: from the bottom to the top, with their middle at x.
        """
        if alpha <= 0 or not words:
            return
        drawn, width, base = _lettered(words, round(4 * size * SCALE) / 4, bold)
        middle = base - 0.36 * size * SCALE  # of a capital letter, in rows from the top
        left = {"left": 0.0, "center": width / 2, "right": width}[at] + EDGE
        if turned:
            drawn, left, middle = numpy.rot90(drawn), middle, len(drawn[0]) / 2
        coloured = numpy.empty((*drawn.shape, 4), numpy.uint8)
        coloured[..., :3] = [round(255 * part) for part in rgb(colour)]
        coloured[..., 3] = drawn * alpha
        top = round(y * SCALE - middle)
        pen = self._renderer.new_gc()
        below = HEIGHT * SCALE - top - len(drawn)
        self._renderer.draw_image(pen, round(x * SCALE - left), below, coloured[::-1])

    # Grids of numbers

    def cells(
        self, values: Tensor, place: Place, tone: Tone, *, numbers: str = "", alpha: float = 1,
        shown: Callable[[int, int], float] | None = None,
        at: Callable[[int, int], tuple[float, float]] | None = None,
    ) -> None:  # fmt: skip
        """Draw a grid of coloured cells.

        Args:
            values: [rows, columns]
            numbers: how they are written into the cells, as `format` takes it; "": not at all.
            shown: how far a cell is there, 0 to 1, by row and column.
            at: where a cell stands, in cells from the grid's corner, by row and column; by default there.
        """
        gap = max(1.0, place.size / 18)
        for row, line in enumerate(values.tolist()):
            for column, value in enumerate(line):
                opacity = alpha * (1.0 if shown is None else shown(row, column))
                if opacity <= 0.004:
                    continue
                right, down = (column, row) if at is None else at(row, column)
                x, y = place.x + right * place.size, place.y + down * place.size
                colour = tone(value)
                side = place.size - gap
                self.box(x, y, side, side, colour, opacity)
                if numbers:
                    text = _number(value, numbers)
                    self.text(x + side / 2, y + side / 2, text, place.size * 0.36, _on(colour), alpha=opacity)

    def words_beside(self, words: Sequence[str], place: Place, size: float = 14, alpha: float = 1) -> None:
        """Write words to the left of a grid's rows."""
        for row, word in enumerate(words):
            self.text(place.x - 8, place.y + (row + 0.47) * place.size, word, size, at="right", alpha=alpha)

    def words_above(self, words: Sequence[str], place: Place, size: float = 12, alpha: float = 1) -> None:
        """Write words above a grid's columns."""
        for column, word in enumerate(words):
            self.text(place.x + (column + 0.47) * place.size, place.y - 10, word, size, alpha=alpha)


def _number(value: float, form: str) -> str:
    """Return a number as the text of a cell: no minus before zero, a true minus sign."""
    words = format(value, form)
    if float(words) == 0:
        words = words.removeprefix("-")
    return words.replace("-", "−")
