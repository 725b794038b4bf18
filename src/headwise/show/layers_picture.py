"""Statistics by layer: a dot per head, the layer's mean as a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import ArgumentError, nearest
from ..heads.collection import Heads
from ..heads.labels import LABELS, MIXED
from ..heads.layer import Head
from .pictured_heads import OF_LABEL
from .sheet import FAINT, INK, drawing, words
from .texts import fitted, inches, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["layers_picture"]

UNLABELLED, LINE = "#a4abb8", "#c9ced6"
SMALL, LEADING = 8.5, 0.19  # points of what is said above, inches from line to line
WIDE = 0.62  # of a layer's room, that its heads share
MEANINGS = {
    "entropy": "entropy: how many keys it looks at, in nats",
    "effective_keys": "effective keys: as many, weighed alike",
    "confidence": "confidence: weight of the heaviest key",
    "distance": "distance: how far it looks, in tokens",
    "first": "first: weight on the first token",
    "previous": "previous: weight on the token before",
    "itself": "itself: weight on its own token",
    "next": "next: weight on the token after",
    "local": "local: weight near by",
    "max_logit": "max logit: the largest score",
    "induction": "induction: weight on what followed before",
    "duplicate_token": "duplicate token: weight on earlier copies",
    "special": "special: weight on special tokens",
    "punctuation": "punctuation: weight on it",
    "written_first": "written first: what it writes from the first token",
    "written_special": "written special: what it writes from special tokens",
}
NOT_SHARES = ("entropy", "effective_keys", "distance", "max_logit")


def layers_picture(heads: Heads, statistics: Sequence[str] | str) -> Figure:
    """A panel per statistic. In each, layers from left to right, and in each layer its heads likewise.

    A dot is a head, in the colour of its label; the line goes through the layers' means. The largest of a
    panel is named, layer.head.

    Raises:
        ArgumentError: nothing was watched; a statistic that was not measured.
        PackageMissing: matplotlib is not installed.
    """
    names = [statistics] if isinstance(statistics, str) else list(statistics)
    everyone = heads.all()
    measured = dict.fromkeys(name for head in everyone for name in head.values)
    for name in names:
        if name not in measured:
            raise ArgumentError(
                f"statistics must have been measured: got {name!r}; {nearest(name, measured)}; "
                "others are asked of watch"
            )
    if not names:
        raise ArgumentError("statistics must be names: got none; for example ['entropy']")
    Figure, Canvas, _ = drawing()
    columns = min(len(names), 2 if len(names) in (2, 4) else 3)
    rows = math.ceil(len(names) / columns)
    wide = min(7.0, max(3.9, 0.62 * len(heads)))
    legend = _legend(everyone, columns * wide)
    top = 0.81 + LEADING * len(legend)
    figure = Figure(figsize=(columns * wide + 0.4, rows * 2.65 + top + 0.05), dpi=150)
    Canvas(figure)
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.62 / width, right=1 - 0.2 / width, top=1 - top / height, bottom=0.55 / height,
        wspace=0.5 / wide, hspace=0.3,
    )  # fmt: skip
    stacks = {
        stack: {number: list(heads[path]) for number, path in members.items()}
        for stack, members in heads.stacks.items()
    }
    for number, name in enumerate(names):
        ax = figure.add_subplot(rows, columns, number + 1)
        _panel(ax, name, stacks)
        _layers(ax, stacks, wide, bottom=number + columns >= len(names))
    _headline(figure, heads, legend)
    return figure


Stacks = Mapping[str, Mapping[int, Sequence[Head]]]  # a stack's name -> layers by number -> their heads


def _panel(ax: Axes, name: str, stacks: Stacks) -> None:
    means, best = [], (-math.inf, 0.0, "", INK)
    dots: list[tuple[bool, float, float, str]] = []
    numbered = [(number, group) for stack in stacks.values() for number, group in stack.items()]
    for at, (number, group) in enumerate(numbered):
        values = [head.values.get(name, math.nan) for head in group]
        there = [value for value in values if math.isfinite(value)]
        means.append(sum(there) / len(there) if there else math.nan)
        for head, value in zip(group, values, strict=True):
            if not math.isfinite(value):
                continue
            x = at + WIDE * ((head.head + 0.5) / len(group) - 0.5)
            known = head.label.name != MIXED
            colour = OF_LABEL.get(head.label.name, FAINT) if known else UNLABELLED
            dots.append((known, x, value, colour))
            best = max(best, (value, x, f"head {number}.{head.head}", colour if known else FAINT))
    dots.sort(key=lambda dot: dot[0])  # those with a label over the others
    _, x_of, y_of, colours = zip(*dots, strict=True) if dots else ((), (), (), ())
    ax.scatter(x_of, y_of, 20, c=list(colours), linewidth=0.4, edgecolor="white", zorder=2)
    start = 0
    for stack in stacks.values():
        own = range(start, start := start + len(stack))
        ax.plot(own, means[own.start : own.stop], color=INK, linewidth=1.4, zorder=1, solid_capstyle="round")
    value, x, where, colour = best
    if where:
        late = x > (len(numbered) - 1) / 2
        ax.annotate(
            where, (x, value), (-5 if late else 5, 3), "data", "offset points", size=7.5,
            ha="right" if late else "left", annotation_clip=False, **words(colour, where),
        )  # fmt: skip
    ax.set_title(MEANINGS.get(name, name.replace("_", " ")), loc="left", size=9, pad=7, **words(INK))
    if name not in NOT_SHARES and all(0 <= value <= 1 for value in y_of):
        ax.set_ylim(-0.03, 1.05)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    else:
        low, high = min(0.0, *y_of, 0.0), max(0.0, *y_of, 0.0)
        ax.set_ylim(low - 0.03 * (high - low), high + 0.1 * (high - low) or 1)


def _layers(ax: Axes, stacks: Stacks, wide: float, *, bottom: bool) -> None:
    """The layers below; where there are several stacks, a line between two of them, and their names."""
    numbers = [number for stack in stacks.values() for number in stack]
    ax.set_xlim(-0.6, len(numbers) - 0.4)
    step = math.ceil(len(numbers) / 24)
    ticks = [at for at, number in enumerate(numbers) if number % step == 0]
    ax.set_xticks(ticks, [str(numbers[at]) for at in ticks])
    ax.tick_params(labelsize=7.5, labelcolor=FAINT, color=LINE, length=2)
    ax.grid(axis="y", color="#eef0f3", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(LINE)
    if len(stacks) == 1 and bottom:
        ax.set_xlabel("layer", size=8, labelpad=3, **words(FAINT))
    start = 0
    for name, stack in stacks.items() if len(stacks) > 1 else ():
        if start:
            ax.axvline(start - 0.5, color=LINE, linewidth=0.8, linestyle=":")
        if bottom:
            room = 0.85 * wide * len(stack) / len(numbers)
            said, size = fitted(label(name.replace(".*", ""), 60), room, 7.5, 5)
            middle = (start + (len(stack) - 1) / 2, 0)
            ax.annotate(
                said, middle, (0, -20), ("data", "axes fraction"), "offset points", size=size, ha="center",
                va="top", annotation_clip=False, **words(FAINT),
            )  # fmt: skip
        start += len(stack)


def _headline(figure: Figure, heads: Heads, legend: Sequence[Sequence[tuple[str, str]]]) -> None:
    """What it is, how to read it, and which colour is which label."""
    height, width = figure.get_figheight(), figure.get_figwidth()
    title = f"{heads.title or 'Model'}: its {sum(map(len, heads.values()))} heads, layer by layer"
    shown, size = fitted(label(title, 120), width - 0.4, 12, 8, bold=True)
    figure.text(0.2 / width, 1 - 0.26 / height, shown, size=size, va="center", **words(INK, shown))
    for number, line in enumerate(legend):
        x, y = 0.2, 0.52 + LEADING * number
        for text, colour in line:
            figure.text(x / width, 1 - y / height, text, size=SMALL, va="center", **words(colour))
            x += inches(text, SMALL) + 0.15


def _legend(everyone: Sequence[Head], room: float) -> list[list[tuple[str, str]]]:
    """(text, colour) in lines of so many inches."""
    there = {head.label.name for head in everyone}
    names = [entry.name for entry in LABELS if entry.name in there]
    told = [("A dot is a head, the line their mean.", FAINT)]
    told += [(f"●  {name}", OF_LABEL.get(name, FAINT)) for name in names]
    told += [(f"●  {MIXED}, no label", UNLABELLED)] if MIXED in there else []
    lines: list[list[tuple[str, str]]] = [[]]
    for each in told:
        if lines[-1] and sum(inches(text, SMALL) + 0.15 for text, _ in (*lines[-1], each)) > room + 0.15:
            lines.append([])
        lines[-1].append(each)
    return lines
