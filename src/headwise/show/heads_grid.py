"""A number for every head, as a grid: a row per layer, blue below 0 and orange above."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .colour_maps import difference_colours
from .sheet import FAINT, INK, heat, new_figure, plain_bar, words
from .texts import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..heads.layer_names import Layer

CELL = 0.3  # inches


def heads_grid(values: Mapping[Layer, Tensor], title: str, unit: str) -> Figure:
    """Draw numbers of heads, [H] by layer; layers with fewer heads end earlier.

    Raises:
        PackageMissing: matplotlib is not installed.
    """
    from matplotlib.colors import Normalize

    count = max(len(row) for row in values.values())
    grid = torch.full((len(values), count), torch.nan)
    for place, row in zip(grid, values.values(), strict=True):
        place[: len(row)] = row
    most = float(grid.nan_to_num(0.0).abs().max()) or 1.0
    width, height = CELL * count + 2.2, CELL * len(values) + 1.3
    figure = new_figure(width, height)
    ax = figure.add_axes((1.1 / width, 0.6 / height, CELL * count / width, CELL * len(values) / height))
    scale = Normalize(-most, most)
    heat(ax, grid.numpy(), (-0.5, count - 0.5, len(values) - 0.5, -0.5), scale, difference_colours())
    step = max(1, count // 16)
    ax.set_xticks(range(0, count, step), list(map(str, range(0, count, step))))
    ax.set_yticks(range(len(values)), [plain(str(layer), 14) for layer in values])
    ax.tick_params(labelsize=7.5, labelcolor=FAINT, length=0)
    ax.set_xlabel("head", fontsize=8, color=FAINT)
    ax.set_ylabel("layer", fontsize=8, color=FAINT)
    figure.text(0.02, 1 - 0.28 / height, title, fontsize=10, va="center", **words(INK, title))
    bar_at = ((CELL * count + 1.25) / width, 0.6 / height, 0.1 / width, CELL * len(values) / height)
    bar = figure.colorbar(ax.images[0], cax=figure.add_axes(bar_at))
    plain_bar(bar, 7.5)
    bar.set_label(unit, fontsize=7.5, color=FAINT)
    return figure
