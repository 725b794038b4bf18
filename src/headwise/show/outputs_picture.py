"""A picture of the steps from heads to output: each head, all concatenated, each head times W_O, the sum.

Letters: B batch, T query_len, H num_heads, Dv value_dim, E the width of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError
from ..listeners.head_outputs import OutputProjection, written
from ..listeners.pruning import is_conv1d
from .colour_maps import NOTHING, difference_colours
from .sheet import FAINT, INK, LONGEST, axes_at, need_matplotlib, new_figure, plain_bar, words
from .texts import fitted, inches, label, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

NAMED = 30  # tokens that can be read beside a map
CLIPPED = 0.995  # of all numbers lie inside the scale; a few large channels would leave the others pale
FINE = 75  # columns an inch, so that each can be seen
LENGTH = "#6b1d81"


def outputs_picture(
    heads: Tensor,
    projection: nn.Module | OutputProjection,
    tokens: Sequence[str] | None = None,
    *,
    batch: int = 0,
    title: str | None = None,
) -> Figure:
    """Draw the four steps from heads to output; rows of each map are tokens, columns channels.

    1. the output of each head, [T, Dv]; 2. all of them concatenated, [T, H Dv]; 3. each head's output times
    its rows of W_O, [T, E], and beside it the norm at each token; 4. the sum of these over heads, with the
    bias: the output of the layer, [T, E]. Orange is above 0, blue below; steps 1 and 2 share one scale, 3 and
    4 another.

    Args:
        heads: [B, H, T, Dv], of `headwise.collect` or `MultiHeadAttention.head_outputs`.
        projection: W_O, such as `mha.out_proj`.
        tokens: one a position; written out where there are at most 30.
        batch: which sequence.

    Raises:
        ArgumentError: a projection that is not linear.
        ShapeError: heads, projection and tokens that do not fit together.
        IndexError: no such sequence.
        PackageMissing: matplotlib is not installed.

    Example:
        >>> import headwise as hw
        >>> mha, x = hw.MultiHeadAttention(64, 4), torch.randn(1, 5, 64)
        >>> figure = outputs_picture(mha.head_outputs(x), mha.out_proj, "The quick brown fox jumps".split())
        >>> figure.savefig("outputs.png")    # doctest: +SKIP

    Elhage 2021, "A Mathematical Framework for Transformer Circuits": concatenation and W_O are a sum over
    heads.
    """
    output_projection = _projection(heads, projection)
    need_matplotlib()
    B, H, T, Dv = heads.shape
    if not -B <= batch < B:
        raise IndexError(f"batch must be between 0 and {B - 1}: got {batch}; choose one of those")
    if tokens is not None and len(tokens) != T:
        raise ShapeError(f"tokens must match query_len: {len(tokens)} tokens for {T}; give one per position")
    head_outputs = heads[batch].detach().float().cpu()  # [H, T, Dv]
    parts = written(heads[batch, None], output_projection)[0].float().cpu()  # [H, T, E]
    total = (
        parts.sum(0)
        if output_projection.bias is None
        else parts.sum(0) + output_projection.bias.float().cpu()
    )
    names = [label(token, LONGEST) for token in readable(tokens or ())] if T <= NAMED else []
    sheet = Sheet.of(H, T, names, title is not None)
    figure = new_figure(sheet.width, sheet.height)
    ax = figure.add_axes((0, 0, 1, 1))  # one unit is one inch, y grows downwards
    ax.set_axis_off()
    before, after = _scale(head_outputs), _scale(torch.cat([parts.flatten(), total.flatten()]))
    bias = "" if output_projection.bias is None else " and the bias added"
    E, longest = parts.shape[2], float(parts.norm(dim=-1).max().clamp(min=1e-30))
    up_to = f"at most {longest:.2g}"
    headings = (
        ("1  Output of each head", f"{Dv} channels each"),
        ("2  Concatenated", f"{H} × {Dv} = {H * Dv} channels"),
        (
            "3  Times W_O, head by head",
            f"what each head adds to the output: {E} channels; bars: its norm, {up_to}",
        ),
        ("4  Summed", f"over heads{bias}: the layer's output, {E} channels"),
    )
    for step, (heading, note) in enumerate(headings):
        _heading(ax, sheet.tops[step], heading, note)
        _rows(ax, sheet, sheet.tops[step], names)
    for head in range(H):
        left = sheet.left_of(head)
        joined = sheet.left + head * sheet.joined
        _map(ax, head_outputs[head], before, left, sheet.tops[0], sheet.side, sheet.tall)
        _map(ax, head_outputs[head], before, joined, sheet.tops[1], sheet.joined, sheet.tall)
        _map(ax, parts[head], after, left, sheet.tops[2], sheet.narrow, sheet.tall)
        _lengths(ax, parts[head].norm(dim=-1) / longest, sheet, left + sheet.narrow)
        for top, side in ((sheet.tops[0], sheet.side), (sheet.tops[2], sheet.narrow)):
            name = f"head {head}" if H <= 12 else str(head)
            ax.text(left + side / 2, top - 0.05, name, size=8, ha="center", **words(INK))
        _funnel(ax, sheet, head)
    _map(ax, total, after, sheet.left, sheet.tops[3], sheet.across, sheet.tall)
    _joints(ax, sheet, H)
    if title is not None:
        shown, size = fitted(label(title, 200), sheet.width - 0.3, 13, 9, bold=True)
        ax.text(0.15, 0.28, shown, size=size, va="center", **words(INK, shown))
    ax.set_xlim(0, sheet.width)
    ax.set_ylim(sheet.height, 0)
    _bar(figure, sheet, before, 0, "output of heads")
    _bar(figure, sheet, after, 2, "output of the layer")
    return figure


def _projection(heads: Tensor, projection: nn.Module | OutputProjection) -> OutputProjection:
    if heads.ndim != 4:
        raise ShapeError(
            f"heads must be [B, H, T, Dv]: got {list(heads.shape)}; pass one sequence as heads[None]"
        )
    H, width = heads.shape[1], heads.shape[1] * heads.shape[3]
    if isinstance(projection, OutputProjection):
        weight, bias = projection.weight.flatten(0, 1), projection.bias
    elif isinstance(projection, nn.Linear) or is_conv1d(projection):
        linear: Any = projection
        weight, bias = linear.weight if is_conv1d(projection) else linear.weight.T, linear.bias
    else:
        raise ArgumentError(
            f"projection must be nn.Linear: got {type(projection).__name__}; use for example mha.out_proj"
        )
    if weight.shape[0] != width:
        raise ShapeError(
            f"projection must take the concatenated heads: it has {weight.shape[0]} input channels for {H} "
            f"heads of {heads.shape[3]}; use the projection of the same layer"
        )
    return OutputProjection("", weight, bias, H)


@dataclass(frozen=True)
class Sheet:
    """The measures of the picture, in inches."""

    left: float  # where maps begin
    side: float  # of one head's map
    gap: float  # between two
    across: float  # of a map as wide as all
    joined: float  # of a head's part of it
    narrow: float  # of a map with bars beside it
    tall: float  # of any map
    tops: tuple[float, ...]  # where the four rows of maps begin
    width: float
    height: float

    @classmethod
    def of(cls, heads: int, tokens: int, names: Sequence[str], titled: bool) -> Sheet:
        across = max(10.5, 0.42 * heads)
        gap = min(0.22, 2.2 / heads)
        side = (across - gap * (heads - 1)) / heads
        tall = min(max(0.9, 0.19 * tokens), 3.0)
        left = 0.25 + max([0.2, *(inches(name, 8) for name in names)])
        first = 0.95 if titled else 0.6
        tops = (first, *(first + step * (tall + 0.86) for step in (1, 2, 3)))
        return cls(
            left, side, gap, across, across / heads, 0.72 * side, tall, tops,
            left + across + 0.95, tops[3] + tall + 0.2,
        )  # fmt: skip

    def left_of(self, head: int) -> float:
        return self.left + head * (self.side + self.gap)


def _scale(values: Tensor) -> Normalize:
    from matplotlib.colors import Normalize

    sizes = values.flatten().abs().sort().values
    most = float(sizes[int(CLIPPED * (len(sizes) - 1))]) or float(sizes[-1]) or 1.0
    return Normalize(-most, most)


def _map(ax: Axes, values: Tensor, scale: Normalize, x: float, y: float, wide: float, tall: float) -> None:
    from matplotlib.patches import Rectangle

    shown = _strongest(values, int(FINE * wide))
    extent = (x, x + wide, y + tall, y)
    smooth = "antialiased" if len(shown) > 100 * tall else "nearest"
    ax.imshow(
        shown, cmap=difference_colours(), norm=scale, extent=extent, aspect="auto", interpolation=smooth
    )
    ax.add_patch(Rectangle((x, y), wide, tall, fill=False, edgecolor="#aab1bd", linewidth=0.5))


def _strongest(values: Tensor, most: int) -> Any:
    """Return values [T, columns]: if channels outnumber pixels, the one farthest from 0 of each group.

    Their mean would be next to nothing: channels have no order.
    """
    import numpy

    array, E = values.numpy(), values.shape[1]
    if E <= most:
        return array
    starts = -(-numpy.arange(most) * E // most)  # the first channel of each column, rounded up
    above, below = (best.reduceat(array, starts, axis=1) for best in (numpy.maximum, numpy.minimum))
    return numpy.where(above >= -below, above, below)


def _heading(ax: Axes, top: float, text: str, note: str) -> None:
    room: dict[str, Any] = {"facecolor": "white", "edgecolor": "none", "pad": 2}  # over what goes through
    first = ax.text(0.15, top - 0.3, text, size=10.5, bbox=room, **words(INK, text))
    ax.annotate(
        note, (1, 0.5), (8, 0), first, "offset points", size=9, va="center", bbox=room, annotation_clip=False,
        **words(FAINT),
    )  # fmt: skip


def _rows(ax: Axes, sheet: Sheet, top: float, names: Sequence[str]) -> None:
    for at, name in enumerate(names):
        y = top + sheet.tall * (at + 0.5) / len(names)
        size = min(8.0, 62 * sheet.tall / len(names))
        ax.text(sheet.left - 0.07, y, name, size=size, ha="right", va="center", **words(FAINT))


def _lengths(ax: Axes, lengths: Tensor, sheet: Sheet, x: float) -> None:
    """Draw bars of the norm of what a head writes, relative to the largest of all heads and tokens."""
    T = len(lengths)
    room, step = 0.25 * sheet.side, sheet.tall / T
    y = [sheet.tops[2] + (at + 0.5) * step for at in range(T)]
    ax.barh(y, [room] * T, 0.62 * step, left=x + 0.04, color=NOTHING, linewidth=0)
    ax.barh(y, (lengths * room).tolist(), 0.62 * step, left=x + 0.04, color=LENGTH, linewidth=0)


def _funnel(ax: Axes, sheet: Sheet, head: int) -> None:
    """Shade the way from a head's map to its part of the concatenation."""
    start, end = sheet.tops[0] + sheet.tall + 0.04, sheet.tops[1] - 0.04
    above, below = sheet.left_of(head), sheet.left + head * sheet.joined
    corners_x = [above, above + sheet.side, below + sheet.joined - 0.02, below + 0.02]
    ax.fill(corners_x, [start, start, end, end], color=NOTHING, linewidth=0, zorder=0)


def _joints(ax: Axes, sheet: Sheet, heads: int) -> None:
    """Draw lines between heads that are concatenated, and a plus between those that are added."""
    for head in range(1, heads):
        x = sheet.left + head * sheet.joined
        ax.plot([x, x], [sheet.tops[1], sheet.tops[1] + sheet.tall], color=INK, linewidth=0.8)
        if sheet.gap > 0.15:
            middle = sheet.left_of(head) - sheet.gap / 2
            ax.text(middle, sheet.tops[2] - 0.05, "+", size=11, ha="center", **words(INK))


def _bar(figure: Figure, sheet: Sheet, scale: Normalize, step: int, meaning: str) -> None:
    from matplotlib.cm import ScalarMappable

    top, bottom = sheet.tops[step], sheet.tops[step + 1] + sheet.tall
    place = axes_at(figure, sheet.left + sheet.across + 0.15, top, 0.12, bottom - top)
    bar = figure.colorbar(ScalarMappable(scale, difference_colours()), cax=place, extend="both")
    bar.set_label(meaning, size=8, **words(FAINT))
    plain_bar(bar, 7)
