"""Two texts through one model: the heads that changed most, as a picture and as a table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..heads.labels import MIXED
from ..heads.text_changes import Alignment, Change, Changes
from .heads_tables import HeadsTable
from .heatmaps import FAINT, INK, LONGEST, NOTHING, STEPS, colours, drawing, words
from .tables import as_text, empty_table, label, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

__all__ = ["changes_picture", "changes_table"]

NAMED = 24  # tokens that can be read along an axis
CELLS = 256  # the finest picture: beyond it positions share a cell
LESS_TO_MORE = ("#0b3c7d", "#3f7fc4", "#a9cbe8", "#fbfaf7", "#f8c08a", "#e07b24", "#8a3b04")  # no red, no green
MARKER = "#ffe08a"  # behind the tokens that differ, as a pen would
FAINTEST = 0.05  # a difference below which no colour is strong
HOW = (
    "A row is a token that attends (query), a column one that is attended to (key). Left: weights on the first "
    "text. Middle: on the second. Right: what the second has more of (orange) or less (blue). "
    "Changed: the mean over queries of the Jensen-Shannon divergence, in nats; 0 is none, 0.69 all."
)


# The picture


def changes_picture(changes: Changes, top: int = 6) -> Figure:
    """Of each of the most changed heads three maps: on the first text, on the second, and the difference.

    All three share their rows and columns: the tokens of both texts as one line, "he/she" where they differ,
    and hatched where a text has no such token. Up to 24 tokens are written out; of longer texts those that
    differ.

    Raises:
        ArgumentError: top below 1.
        PackageMissing: matplotlib is not installed.
    """
    shown = changes.first(top)
    Figure, Canvas, scale = drawing()
    grids = [changes.weights(change) for change in shown]
    sheet = Sheet.of(changes, shown, [first.shape for first, _ in grids])
    figure = Figure(figsize=(sheet.width, sheet.height), dpi=150)
    Canvas(figure)
    apart = _spread([(second - first) for first, second in grids])
    of_kind: dict[bool, Axes] = {}
    for number, (change, (first, second)) in enumerate(zip(shown, grids, strict=True)):
        layer = changes.layers[change.path]
        for column, cells in enumerate((first, second, second - first)):
            is_difference = column == 2
            ax = figure.add_axes(sheet.box(number, column))
            of_kind.setdefault(is_difference, ax)
            _map(ax, cells, _differing() if is_difference else colours(), apart if is_difference else scale)
            _absent(ax, layer.queries, layer.keys, (0, 1) if is_difference else (column,))
            _mark(ax, sheet, layer.queries, layer.keys)
            _name(ax, layer.queries, layer.keys, left=column == 0, below=sheet.names_below(number))
            ax.set_title(sheet.headings[column], loc="left", fontsize=7.5, pad=3, **words(FAINT))
        _headline(figure, sheet, number, change)
    _title(figure, sheet, changes)
    _bars(figure, sheet, of_kind, pooled=any(max(first.shape) > CELLS for first, _ in grids))
    return figure


@dataclass(frozen=True)
class Sheet:
    """The measures of the picture, in inches."""

    side: float  # of one map
    left: float  # for the names of rows
    above: float  # for what is said of a head
    below: float  # for the names of columns
    across: int  # heads side by side
    count: int
    everywhere: bool  # whether columns are named under every head
    top: float
    width: float
    height: float
    title: str
    how: list[str]
    headings: tuple[str, str, str]

    @classmethod
    def of(cls, changes: Changes, shown: Sequence[Change], sizes: Sequence[Sequence[int]]) -> Sheet:
        layers = [changes.layers[change.path] for change in shown]
        longest = max(max(size) for size in sizes)
        named = longest <= NAMED
        side = max(1.45, 0.15 * longest) if named else 2.3
        texts = [each for layer in layers for each in (layer.queries, layer.keys)]
        written = [len(_short(each.names[at])) for each in texts for at in _spots(each)]
        margin = 0.062 * max(written, default=4) + 0.12
        wide = margin + 3 * side + 2 * GAP
        across = 2 if len(shown) > 2 and 2 * wide < 15 else 1
        width = max(across * (wide + 0.35) + 0.85, 7.6)
        how = textwrap.wrap(HOW, int(width / 0.067))
        keys = {id(layer.keys) for layer in layers}
        everywhere = len(keys) > 1
        rows = math.ceil(len(shown) / across)
        top = 0.62 + 0.165 * len(how)
        above = 0.62
        height = top + rows * (above + side) + (rows if everywhere else 1) * (margin + 0.08)
        return cls(
            side, margin + 0.12, above, margin + 0.08 if everywhere else 0.0, across, len(shown), everywhere, top,
            width, height, _said(changes), how, _headings(changes.text),
        )  # fmt: skip

    def corner(self, number: int) -> tuple[float, float]:
        """Where the first map of a head begins, from the left and from above."""
        row, column = divmod(number, self.across)
        x = self.left + column * (self.left + 3 * self.side + 2 * GAP + 0.23)
        return x, self.top + self.above + row * (self.above + self.side + self.below)

    def box(self, number: int, column: int) -> tuple[float, float, float, float]:
        """Of one map, as matplotlib places it."""
        x, y = self.corner(number)
        x += column * (self.side + GAP)
        return (
            x / self.width,
            1 - (y + self.side) / self.height,
            self.side / self.width,
            self.side / self.height,
        )

    def names_below(self, number: int) -> bool:
        """Whether a head is the last of its column, or all have names."""
        return self.everywhere or number + self.across >= self.count


GAP = 0.16  # between the three maps of a head


def _map(ax: Axes, cells: Tensor, colour: Colormap, scale: Normalize) -> None:
    import numpy

    R, C = cells.shape
    array = _pooled(cells).numpy()
    hidden = numpy.isnan(array) if colour.name == DIFFERENCE else ~(array > 0)
    ax.imshow(
        numpy.ma.masked_where(hidden, array),
        cmap=colour,
        norm=scale,
        extent=(-0.5, C - 0.5, R - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest" if max(R, C) <= NAMED else "antialiased",
    )
    ax.set_frame_on(False)
    ax.tick_params(which="both", length=0, labelsize=7, labelcolor=FAINT, pad=6)
    if max(R, C) <= NAMED:
        ax.set_xticks([x + 0.5 for x in range(C - 1)], minor=True)
        ax.set_yticks([y + 0.5 for y in range(R - 1)], minor=True)
        ax.grid(which="minor", color="white", linewidth=0.8)


def _pooled(cells: Tensor) -> Tensor:
    """At most 256 cells a side: what of a query's weight, in the mean over the queries of a cell, is in it."""
    if max(cells.shape) <= CELLS:
        return cells
    for dim in (0, 1):
        size = cells.shape[dim]
        if size > CELLS:
            known = ~cells.isnan()
            cell = torch.arange(size) * CELLS // size
            shape = list(cells.shape)
            shape[dim] = CELLS
            total = torch.zeros(shape).index_add_(dim, cell, cells.nan_to_num(0.0))
            number = torch.zeros(shape).index_add_(dim, cell, known.float())
            cells = torch.where(number > 0, total / number.clamp(min=1) if dim == 0 else total, math.nan)
    return cells


def _absent(ax: Axes, queries: Alignment, keys: Alignment, sides: tuple[int, ...]) -> None:
    """Hatched: rows and columns of tokens that a text does not have."""
    from matplotlib.patches import Rectangle

    R, C = len(queries.places), len(keys.places)
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": "#cfd4dc", "hatch": "//////", "linewidth": 0}
    for at, place in enumerate(queries.places):
        if any(place[side] is None for side in sides):
            ax.add_patch(Rectangle((-0.5, at - 0.5), C, 1, **style))
    for at, place in enumerate(keys.places):
        if any(place[side] is None for side in sides):
            ax.add_patch(Rectangle((at - 0.5, -0.5), 1, R, **style))


def _mark(ax: Axes, sheet: Sheet, queries: Alignment, keys: Alignment) -> None:
    """A mark beside each row and under each column that differs, outside the cells."""
    from matplotlib.patches import Rectangle

    thick = 0.05 / sheet.side  # as a share of the map
    R, C = len(queries.places), len(keys.places)
    style: dict[str, Any] = {"facecolor": "#f2b705", "linewidth": 0, "clip_on": False, "transform": ax.transAxes}
    for at in (at for at, differs in enumerate(queries.changed) if differs):
        ax.add_patch(Rectangle((-1.6 * thick, 1 - (at + 1) / R), thick, max(1 / R, 0.006), **style))
    for at in (at for at, differs in enumerate(keys.changed) if differs):
        ax.add_patch(Rectangle((at / C, -1.6 * thick), max(1 / C, 0.006), thick, **style))


def _spots(text: Alignment) -> list[int]:
    """The places with a name along an axis: all, or those that differ, with the first and the last."""
    size = len(text.places)
    if size <= NAMED:
        return list(range(size))
    changed = [at for at, differs in enumerate(text.changed) if differs]
    apart = changed[:1] + [at for before, at in pairwise(changed) if at - before > size // 12]
    ends = [at for at in (0, size - 1) if all(abs(at - other) > size // 12 for other in apart)]
    return sorted([*ends, *apart])


def _short(name: str) -> str:
    return label(name, 2 * LONGEST + 1 if "/" in name else LONGEST)


def _name(ax: Axes, queries: Alignment, keys: Alignment, *, left: bool, below: bool) -> None:
    upright: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    at, names = _spots(keys), keys.names
    long = len(keys.places) > NAMED
    if below:
        ax.set_xticks(at, [_spot(names[each], each, keys, long) for each in at], **upright, **words(FAINT))
    else:
        ax.set_xticks([])
    rows, names = _spots(queries), queries.names
    tall = len(queries.places) > NAMED
    if left:
        ax.set_yticks(rows, [_spot(names[each], each, queries, tall) for each in rows], **words(FAINT))
    else:
        ax.set_yticks([])
    for text, places, ticks in ((keys, at, ax.get_xticklabels()), (queries, rows, ax.get_yticklabels())):
        for place, tick in zip(places, ticks, strict=False):
            if text.changed[place]:
                tick.set(color=INK, weight="bold")
                tick.set_bbox({"facecolor": MARKER, "edgecolor": "none", "pad": 1.0, "boxstyle": "square"})


def _spot(name: str, at: int, text: Alignment, long: bool) -> str:
    """A token, or, in a long text that does not differ there, its place."""
    return str(at) if long and not text.changed[at] else _short(name)


DIFFERENCE = "headwise difference"


def _differing() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(DIFFERENCE, LESS_TO_MORE).with_extremes(bad=NOTHING)


def _spread(differences: Sequence[Tensor]) -> Normalize:
    """One scale for all: by square root on either side, as that of weights is."""
    import numpy
    from matplotlib.colors import FuncNorm

    largest = max((float(each.nan_to_num(0.0).abs().max()) for each in differences), default=0.0)
    most = max(largest, FAINTEST)
    return FuncNorm(
        (lambda x: numpy.sign(x) * numpy.sqrt(numpy.abs(x)), lambda x: numpy.sign(x) * numpy.square(x)),
        vmin=-most,
        vmax=most,
    )


# What is said


def _said(changes: Changes) -> str:
    """The title."""
    name = changes.title or "Model"
    before, after = (plain(word, 40) for word in changes.text.words)
    if before and after:
        what = f"when “{before}” became “{after}”"
    elif before or after:
        what = f"when “{after}” was added" if after else f"when “{before}” was left out"
    else:
        what = "between two runs" if changes.text.by_position else "between two texts that say the same"
    return f"{name}: the heads that changed most {what}"


def _headings(text: Alignment) -> tuple[str, str, str]:
    before, after = text.words
    if before and after and max(len(before), len(after)) <= LONGEST:
        return f"with “{label(before, LONGEST)}”", f"with “{label(after, LONGEST)}”", "difference"
    return "first text", "second text", "difference"


def _labels(change: Change) -> str:
    before, after = change.before_label, change.after_label
    if before.name == after.name == MIXED:
        return ""
    return str(after) if before.name == after.name else f"{before} → {after}"


def _headline(figure: Figure, sheet: Sheet, number: int, change: Change) -> None:
    x, y = sheet.corner(number)

    def write(text: str, down: float, **how: Any) -> None:
        figure.text(x / sheet.width, 1 - (y + down) / sheet.height, text, va="baseline", **how)

    where = f"layer {change.layer}" if isinstance(change.layer, int) else label(change.layer, 40)
    room = int((3 * sheet.side + 2 * GAP) / 0.078)
    write(label(f"{where}, head {change.head}", room), -0.4, size=9, weight="bold", **words(INK))
    parts = ["nothing to compare"] if math.isnan(change.distance) else [f"changed {change.distance:.3f}"]
    if change.places is not None and change.largest > 0:
        parts.append(f"most at “{_short(change.token)}”, {change.largest:.2f}")
    parts += [_labels(change)] if _labels(change) else []
    write(label("; ".join(parts), int(room * 1.25)), -0.235, size=7.5, **words(FAINT))


def _title(figure: Figure, sheet: Sheet, changes: Changes) -> None:
    def write(text: str, down: float, **how: Any) -> None:
        figure.text(0.12 / sheet.width, 1 - down / sheet.height, text, va="center", **how)

    size = min(12.5, max(8.0, 106 * sheet.width / len(sheet.title)))
    write(label(sheet.title, int(106 * sheet.width / size)), 0.27, size=size, weight="bold", **words(INK))
    for number, line in enumerate(sheet.how):
        write(line, 0.53 + 0.165 * number, size=8.2, **words(FAINT))


def _bars(figure: Figure, sheet: Sheet, of_kind: dict[bool, Axes], *, pooled: bool) -> None:
    """The two scales, to the right of everything, one above the other."""
    x, y = sheet.corner(sheet.across - 1)
    x += 3 * sheet.side + 2 * GAP + 0.14
    rows = math.ceil(sheet.count / sheet.across)
    end = y + rows * sheet.side + (rows - 1) * (sheet.above + sheet.below)
    long = min((end - y - 0.3) / 2, 2.4)
    for is_difference, ax in of_kind.items():
        start = y + (long + 0.3) * is_difference
        place = (
            x / sheet.width,
            1 - (start + long) / sheet.height,
            0.11 / sheet.width,
            long / sheet.height,
        )
        image = ax.images[0]
        most = image.norm.vmax or 1.0
        ticks = [-most, -most / 4, 0, most / 4, most] if is_difference else STEPS
        shown = [f"{tick:+.2f}" if tick else "0" for tick in ticks] if is_difference else None
        bar = figure.colorbar(image, cax=figure.add_axes(place), ticks=ticks)
        if shown is None:
            shown = [f"{tick:g}" for tick in ticks]
        bar.set_ticklabels(shown)
        meaning = "difference" if is_difference else "weight"
        bar.set_label(f"{meaning}, mean per cell" if pooled else meaning, size=7.5, **words(FAINT))
        bar.ax.tick_params(length=2, labelsize=6.5, labelcolor=FAINT, color=FAINT)
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)


# The table


def changes_table(changes: Changes, top: int | None = 10) -> HeadsTable:
    """One row per head: how much it changed, at which token most, and what it is called on both texts.

    Numbers are whole at any width, words are wrapped.

    Raises:
        ArgumentError: top below 1.
        PackageMissing: rich is not installed.
    """
    table = empty_table(_said(changes))
    shown = changes.first(top)
    table.add_column("head", justify="right", overflow="fold")
    table.add_column("mean\nnats", justify="right", no_wrap=True)
    table.add_column("most", justify="right", no_wrap=True)
    table.add_column("at", overflow="fold")
    table.add_column("label (score)", overflow="fold")
    for change in shown:
        label = as_text(_labels(change) or MIXED)
        label.stylize("dim" if change.after_label.name == MIXED else "")
        table.add_row(
            as_text(f"{change.layer}.{change.head}"), _number(change.distance), _number(change.largest),
            as_text(change.token), label,
        )  # fmt: skip
    return HeadsTable(table)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
