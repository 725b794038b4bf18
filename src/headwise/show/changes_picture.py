"""Two texts through one model: the heads that changed most, as a picture and as a table."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..heads.layer import MIXED
from ..heads.text_changes import Alignment, Change, Changes
from .colour_maps import difference_colours, weight_colours
from .heads_tables import HeadsTable
from .sheet import (
    FAINT,
    INK,
    LONGEST,
    STEPS,
    axes_at,
    heat,
    need_matplotlib,
    new_figure,
    plain_bar,
    weight_scale,
    words,
    write,
)  # fmt: skip
from .tables import as_text, empty_table
from .texts import label, plain, readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

NAMED = 24  # tokens that can be read along an axis
FEW = 12  # of a longer text: those that changed most
MARKER = "#ffe08a"  # behind the tokens that differ, as a pen would
FAINTEST = 0.05  # a difference below which no colour is strong
GUIDE = (
    "Rows are tokens that attend (queries), columns the tokens they attend to (keys). Left: attention "
    "weights on "
    "the first text. Middle: on the second text. Right: second minus first; orange is more weight, blue "
    "is less. "
    "“Changed” is the Jensen-Shannon divergence of the two, averaged over queries, in nats: 0 = the same "
    "weights, 0.69 = no key in common."
)
PART = (
    f"Only the {FEW} rows that changed most and the {FEW} keys that contributed most are shown, with "
    "positions."
)


def changes_picture(changes: Changes, top: int = 6) -> Figure:
    """Draw three maps of each of the most changed heads: first text, second text, difference.

    All three share their rows and columns: the tokens of both texts as one line, "he/she" where they differ,
    and hatched where a text has no such token. Of more than 24 tokens those are shown, with their positions,
    whose rows changed most, and the keys that made the difference.
    """
    shown = changes.first(top)
    need_matplotlib()
    views = [View.of(changes, change) for change in shown]
    sheet = Sheet.of(changes, shown, views)
    figure = new_figure(sheet.width, sheet.height)
    scale = weight_scale()
    apart = _spread([view.difference for view in views])
    of_kind: dict[bool, Axes] = {}
    for number, (change, view) in enumerate(zip(shown, views, strict=True)):
        x, y = sheet.corner(number)
        for column, cells in enumerate((view.first, view.second, view.difference)):
            is_difference = column == 2
            ax = axes_at(figure, x + column * (sheet.side + GAP), y, sheet.side, sheet.side)
            of_kind.setdefault(is_difference, ax)
            _map(ax, cells, apart if is_difference else scale, is_difference=is_difference)
            _lines(ax, view)
            _absent(ax, view, (0, 1) if is_difference else (column,))
            _mark(ax, sheet, view)
            _name(ax, view, left=column == 0, below=sheet.names_below(number))
            ax.set_title(sheet.headings[column], loc="left", fontsize=7.5, pad=3, **words(FAINT))
        _headline(figure, sheet, number, change, _token(changes, change))
    _title(figure, sheet)
    _bars(figure, sheet, of_kind)
    return figure


@dataclass(frozen=True, eq=False)
class View:
    """What is shown of one head: its weights [R, C] on both texts, and the difference; NaN: no such token.

    rows, columns: the places of the alignments that are shown.
    """

    queries: Alignment
    keys: Alignment
    rows: list[int]
    columns: list[int]
    first: Tensor
    second: Tensor
    difference: Tensor

    @classmethod
    def of(cls, changes: Changes, change: Change) -> View:
        layer = changes.layers[change.path]
        first, second = changes.weights(change)
        R, C = first.shape
        apart = (second.nan_to_num(0.0) - first.nan_to_num(0.0)).abs()
        rows, columns = list(range(R)), list(range(C))
        if R > NAMED:
            rows = sorted(
                layer.queries.shared[at] for at in _largest(layer.rows[change.head].nan_to_num(0.0))
            )
        if C > NAMED:
            columns = sorted(_largest(apart[rows].sum(0)))
        first, second = first[rows][:, columns], second[rows][:, columns]
        difference = (second - first).masked_fill((first == 0) & (second == 0), math.nan)
        queries, keys = _readable(layer.queries), _readable(layer.keys)
        return cls(queries, keys, rows, columns, first, second, difference)

    @property
    def is_whole(self) -> bool:
        return len(self.rows) == len(self.queries.places) and len(self.columns) == len(self.keys.places)

    @cached_property
    def names(self) -> tuple[list[str], list[str]]:
        return _names(self.queries, self.rows), _names(self.keys, self.columns)


def _largest(numbers: Tensor) -> list[int]:
    few: list[int] = numbers.argsort(descending=True, stable=True)[:FEW].tolist()
    return few


def _readable(text: Alignment) -> Alignment:
    """Return the tokens without the marks of their tokenizer: "Ġthe" is "the"."""
    sides = (readable([pair[side] for pair in text.tokens]) for side in (0, 1))
    return replace(text, tokens=tuple(zip(*sides, strict=True)))


def _token(changes: Changes, change: Change) -> str:
    """Return the token at which a head changed most, or ""."""
    if change.places is None:
        return ""
    text = changes.layers[change.path].queries
    return _readable(text).names[text.places.index(change.places)]


def _names(text: Alignment, places: Sequence[int]) -> list[str]:
    """Return the names of tokens, with their positions where some tokens are left out."""
    names = text.names
    short = [label(names[at], 2 * LONGEST + 1 if text.changed[at] else LONGEST) for at in places]
    if len(places) == len(names) or text.by_position:
        return short
    where = [next(own for own in text.places[at] if own is not None) for at in places]
    return [f"{name} {own}" for name, own in zip(short, where, strict=True)]


@dataclass(frozen=True)
class Sheet:
    """The measures of the picture, in inches."""

    side: float  # of one map
    left: float  # for the names of rows
    above: float  # for the text on a head
    below: float  # for the names of columns, where every head has its own
    across: int  # heads side by side
    count: int
    top: float
    width: float
    height: float
    title: str
    guide: list[str]
    headings: tuple[str, str, str]

    @classmethod
    def of(cls, changes: Changes, shown: Sequence[Change], views: Sequence[View]) -> Sheet:
        side = max(1.45, 0.15 * max(max(view.first.shape) for view in views))
        margin = 0.066 * max(len(name) for view in views for name in view.names[0]) + 0.12
        under = 0.066 * max(len(name) for view in views for name in view.names[1]) + 0.2
        wide = margin + 0.12 + 3 * side + 2 * GAP
        across = 2 if len(views) > 2 else 1
        width = max(across * (wide + 0.23) + 0.85, 7.6)
        whole = all(view.is_whole for view in views)
        guide = textwrap.wrap(GUIDE if whole else f"{GUIDE} {PART}", int(width / 0.067))
        everywhere = not whole or len({id(changes.layers[change.path].keys) for change in shown}) > 1
        rows = math.ceil(len(views) / across)
        top, above = 0.44 + 0.165 * len(guide), 0.76
        height = top + rows * (above + side) + (rows if everywhere else 1) * under
        return cls(
            side, margin + 0.12, above, under if everywhere else 0.0, across, len(views), top, width, height,
            title_of(changes), guide, _headings(_readable(changes.text)),
        )  # fmt: skip

    def corner(self, number: int) -> tuple[float, float]:
        """Return the position of the first map of a head, from the left and from the top."""
        row, column = divmod(number, self.across)
        x = self.left + column * (self.left + 3 * self.side + 2 * GAP + 0.23)
        return x, self.top + self.above + row * (self.above + self.side + self.below)

    def names_below(self, number: int) -> bool:
        """Return True if the names of columns stand below this head."""
        return self.below > 0 or number + self.across >= self.count


GAP = 0.16  # between the three maps of a head


def _map(ax: Axes, cells: Tensor, scale: Normalize, *, is_difference: bool) -> None:
    import numpy

    R, C = cells.shape
    array = cells.numpy()
    hidden = numpy.isnan(array) if is_difference else ~(array > 0)
    cells_shown = numpy.ma.masked_where(hidden, array)
    colour = difference_colours() if is_difference else weight_colours()
    heat(ax, cells_shown, (-0.5, C - 0.5, R - 0.5, -0.5), scale, colour)
    ax.set_frame_on(False)
    ax.tick_params(which="both", length=0, labelsize=7, labelcolor=FAINT, pad=6)


def _lines(ax: Axes, view: View) -> None:
    """Draw lines between cells, broader ones where tokens are left out."""
    for places, draw in ((view.columns, ax.axvline), (view.rows, ax.axhline)):
        for at, (before, after) in enumerate(pairwise(places)):
            draw(at + 0.5, color="white", linewidth=0.8 if after == before + 1 else 2.6)


def _absent(ax: Axes, view: View, sides: tuple[int, ...]) -> None:
    """Hatch the rows and columns of tokens that a text does not have."""
    from matplotlib.patches import Rectangle

    R, C = view.first.shape
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": "#cfd4dc", "hatch": "//////", "linewidth": 0}
    for at, row in enumerate(view.rows):
        if any(view.queries.places[row][side] is None for side in sides):
            ax.add_patch(Rectangle((-0.5, at - 0.5), C, 1, **style))
    for at, column in enumerate(view.columns):
        if any(view.keys.places[column][side] is None for side in sides):
            ax.add_patch(Rectangle((at - 0.5, -0.5), 1, R, **style))


def _mark(ax: Axes, sheet: Sheet, view: View) -> None:
    """Mark each row and column that differs, beside the cells."""
    from matplotlib.patches import Rectangle

    thick = 0.05 / sheet.side  # as a share of the map
    R, C = view.first.shape
    style: dict[str, Any] = {"facecolor": "#f2b705", "linewidth": 0, "clip_on": False}
    style["transform"] = ax.transAxes
    for at, row in enumerate(view.rows):
        if view.queries.changed[row]:
            ax.add_patch(Rectangle((-1.6 * thick, 1 - (at + 1) / R), thick, 1 / R, **style))
    for at, column in enumerate(view.columns):
        if view.keys.changed[column]:
            ax.add_patch(Rectangle((at / C, -1.6 * thick), 1 / C, thick, **style))


def _name(ax: Axes, view: View, *, left: bool, below: bool) -> None:
    upright: dict[str, Any] = {"rotation": 90, "rotation_mode": "anchor", "ha": "right", "va": "center"}
    names = view.names[1] if below else []
    ax.set_xticks(range(len(names)), names, **upright, **words(FAINT))
    names = view.names[0] if left else []
    ax.set_yticks(range(len(names)), names, **words(FAINT))
    of_axis = (
        (view.keys, view.columns, ax.get_xticklabels()),
        (view.queries, view.rows, ax.get_yticklabels()),
    )
    for text, places, ticks in of_axis:
        for place, tick in zip(places, ticks, strict=False):
            if text.changed[place]:
                tick.set(color=INK, weight="bold")
                tick.set_bbox({"facecolor": MARKER, "edgecolor": "none", "boxstyle": "square,pad=0.12"})


def _spread(differences: Sequence[Tensor]) -> Normalize:
    """Return one colour scale for all differences, by square root on either side of 0."""
    import numpy
    from matplotlib.colors import FuncNorm

    largest = max((float(each.nan_to_num(0.0).abs().max()) for each in differences), default=0.0)
    most = max(largest, FAINTEST)
    return FuncNorm(
        (lambda x: numpy.sign(x) * numpy.sqrt(numpy.abs(x)), lambda x: numpy.sign(x) * numpy.square(x)),
        vmin=-most,
        vmax=most,
    )


def title_of(changes: Changes) -> str:
    name = changes.title or "Model"
    before, after = (plain(word, 40) for word in _readable(changes.text).words)
    if before and after:
        event = f"when “{before}” became “{after}”"
    elif before or after:
        event = f"when “{after}” was added" if after else f"when “{before}” was left out"
    else:
        event = "between two runs" if changes.text.by_position else "between two identical texts"
    return f"{name}: the heads that changed most {event}"


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


def _headline(figure: Figure, sheet: Sheet, number: int, change: Change, token: str) -> None:
    x, y = sheet.corner(number)
    where = f"layer {change.layer}" if isinstance(change.layer, int) else label(change.layer, 40)
    room = int((3 * sheet.side + 2 * GAP) / 0.078)
    title = label(f"{where}, head {change.head}", room)
    write(figure, x, y - 0.4, title, size=9, va="baseline", weight="bold", **words(INK))
    parts = ["nothing to compare"] if math.isnan(change.distance) else [f"changed {change.distance:.3f} nats"]
    if change.places is not None and change.largest > 0:
        parts.append(f"most at “{label(token, 2 * LONGEST + 1)}”, {change.largest:.2f}")
    parts += [_labels(change)] if _labels(change) else []
    summary = label("; ".join(parts), int(room * 1.25))
    write(figure, x, y - 0.235, summary, size=7.5, va="baseline", **words(FAINT))


def _title(figure: Figure, sheet: Sheet) -> None:
    size = min(12.5, max(8.0, 106 * sheet.width / len(sheet.title)))
    title = label(sheet.title, int(106 * sheet.width / size))
    write(figure, 0.12, 0.27, title, size=size, weight="bold", **words(INK))
    for number, line in enumerate(sheet.guide):
        write(figure, 0.12, 0.53 + 0.165 * number, line, size=8.2, **words(FAINT))


def _bars(figure: Figure, sheet: Sheet, of_kind: dict[bool, Axes]) -> None:
    """Draw both colour bars at the right, one above the other."""
    x, y = sheet.corner(sheet.across - 1)
    x += 3 * sheet.side + 2 * GAP + 0.14
    rows = math.ceil(sheet.count / sheet.across)
    end = y + rows * sheet.side + (rows - 1) * (sheet.above + sheet.below)
    long = min((end - y - 0.3) / 2, 2.4)
    for is_difference, ax in of_kind.items():
        start = y + (long + 0.3) * is_difference
        image = ax.images[0]
        most = float(image.get_clim()[1])
        ticks = [-most, -most / 4, 0, most / 4, most] if is_difference else STEPS
        bar = figure.colorbar(image, cax=axes_at(figure, x, start, 0.11, long), ticks=ticks)
        bar.set_ticklabels([f"{tick:+.2f}" if is_difference and tick else f"{tick:g}" for tick in ticks])
        meaning = "difference (orange: more)" if is_difference else "weight (grey: none)"
        bar.set_label(meaning, size=7.5, **words(FAINT))
        plain_bar(bar, 6.5)
        bar.ax.minorticks_off()


def changes_table(changes: Changes, top: int | None = 10) -> HeadsTable:
    """Return a row per head: mean and largest change, the token of the largest, its label on each text."""
    table = empty_table(title_of(changes), elsewhere="Changes.all")
    table.add("head", least=0)
    table.add("mean\nchange", "mean change")
    table.add("largest\nchange", "largest change", rank=1)
    table.add("at", rank=2, least=6)
    table.add("label (score)", "label", rank=3, least=14, easy=21)
    for change in changes.first(top):
        label = as_text(_labels(change) or MIXED)
        label.stylize("dim" if change.after_label.name == MIXED else "")
        table.add_row(
            as_text(f"{change.layer}.{change.head}"), _number(change.distance), _number(change.largest),
            as_text(_token(changes, change)), label,
        )  # fmt: skip
    return HeadsTable(table)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"
