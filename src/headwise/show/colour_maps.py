"""Colours of weights and of differences, the same in pictures, in the terminal and on the page.

Weights go from paper to dark ink: magma from white instead of yellow, so that lightness falls evenly.
Differences go from blue (less, or below 0) through paper to orange (more, or above 0), which every kind of
colour vision tells apart. `page/src/shared/colours.ts` holds the same stops for pages, and their dark
versions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

NOTHING = "#e9ecf1"  # where there is no weight, as under a mask
WEIGHTS = ("#fffdfa", "#fecf92", "#fd9467", "#e95561", "#ab337c", "#6b1d81", "#2a115c")
DIFFERENCES = ("#123f9c", "#2f6ee0", "#a5c4f5", "#fffdfa", "#f6c896", "#e07a18", "#8f4300")


@lru_cache(1)
def weight_colours() -> Colormap:
    """Return the colour map of weights from 0 to 1."""
    return _colour_map("headwise weights", WEIGHTS)


@lru_cache(1)
def difference_colours() -> Colormap:
    """Return the colour map of signed numbers: blue is below 0, orange above."""
    return _colour_map("headwise differences", DIFFERENCES)


def _colour_map(name: str, stops: tuple[str, ...]) -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(name, stops).with_extremes(bad=NOTHING)
