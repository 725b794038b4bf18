"""Statistics by layer: a dot per head, the layer's mean as a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ArgumentError, nearest
from ..heads.collection import Heads
from ..heads.labels import LABELS, MIXED
from ..heads.layer import Head
from .heads_pictures import OF_LABEL
from .sheet import FAINT, INK, drawing, words
from .tables import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["layers_picture"]

UNLABELLED, LINE = "#a4abb8", "#c9ced6"
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
    figure = Figure(figsize=(columns * wide + 0.4, rows * 2.65 + 1.05), dpi=150)
    Canvas(figure)
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=0.62 / width, right=1 - 0.2 / width, top=1 - 1.0 / height, bottom=0.55 / height,
        wspace=0.5 / wide, hspace=0.3,
    )  # fmt: skip
    groups = [list(layer) for layer in heads.values()]
    for number, name in enumerate(names):
        ax = figure.add_subplot(rows, columns, number + 1)
        _panel(ax, name, groups)
        _layers(ax, heads, bottom=number + columns >= len(names))
    _headline(figure, heads, everyone)
    return figure


def _panel(ax: Axes, name: str, groups: Sequence[Sequence[Head]]) -> None:
    means, best = [], (-math.inf, 0.0, "", INK)
    dots: list[tuple[bool, float, float, str]] = []
    for at, group in enumerate(groups):
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
            best = max(best, (value, x, f"head {head.layer}.{head.head}", colour if known else FAINT))
    dots.sort(key=lambda dot: dot[0])  # those with a label over the others
    _, x_of, y_of, colours = zip(*dots, strict=True) if dots else ((), (), (), ())
    ax.scatter(x_of, y_of, 20, c=list(colours), linewidth=0.4, edgecolor="white", zorder=2)
    ax.plot(range(len(groups)), means, color=INK, linewidth=1.4, zorder=1, solid_capstyle="round")
    value, x, where, colour = best
    if where:
        late = x > (len(groups) - 1) / 2
        ax.annotate(
            label(where, 40), (x, value), (-5 if late else 5, 3), "data", "offset points", size=7.5,
            weight="bold", ha="right" if late else "left", annotation_clip=False, **words(colour),
        )  # fmt: skip
    ax.set_title(MEANINGS.get(name, name.replace("_", " ")), loc="left", size=9, pad=7, **words(INK))
    if name in NOT_SHARES:
        bottom, top = ax.get_ylim()
        ax.set_ylim(bottom if name == "max_logit" else -0.03 * top, 1.05 * top)
    else:
        ax.set_ylim(-0.03, 1.05)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])


def _layers(ax: Axes, heads: Heads, *, bottom: bool) -> None:
    """The layers below, a line between two stacks of them."""
    count = len(heads)
    ax.set_xlim(-0.6, count - 0.4)
    numbered = [number for stack in heads.stacks.values() for number in stack]
    places = {path: at for at, path in enumerate(heads.paths)}
    order = [places[path] for stack in heads.stacks.values() for path in stack.values()]
    shown = dict(zip(order, numbered, strict=True))
    step = max(1, math.ceil(count / 24))
    ticks = [at for at in range(count) if shown[at] % step == 0]
    ax.set_xticks(ticks, [str(shown[at]) for at in ticks])
    if bottom:
        ax.set_xlabel("layer", size=8, labelpad=3, **words(FAINT))
    ax.tick_params(labelsize=7.5, labelcolor=FAINT, color=LINE, length=2)
    ax.grid(axis="y", color="#eef0f3", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(LINE)
    if len(heads.stacks) > 1:
        for stack in heads.stacks.values():
            first = min(places[path] for path in stack.values())
            if first:
                ax.axvline(first - 0.5, color=LINE, linewidth=0.8, linestyle=":")


def _headline(figure: Figure, heads: Heads, everyone: Sequence[Head]) -> None:
    """What it is, how to read it, and which colour is which label."""
    height, width = figure.get_figheight(), figure.get_figwidth()
    left = 0.2 / width
    title = f"{heads.title or 'Model'}: its {len(everyone)} heads, layer by layer"
    figure.text(
        left,
        1 - 0.26 / height,
        label(title, int(9 * width)),
        size=12,
        weight="bold",
        va="center",
        **words(INK),
    )
    there = {head.label.name for head in everyone}
    names = [entry.name for entry in LABELS if entry.name in there]
    last = figure.text(
        left,
        1 - 0.52 / height,
        "A dot is a head, the line their mean.",
        size=8.5,
        va="center",
        **words(FAINT),
    )
    for name in [*names, *([f"{MIXED}, no label"] if MIXED in there else [])]:
        colour = OF_LABEL.get(name, UNLABELLED)
        last = figure.axes[0].annotate(
            f"●  {name}", (1, 0.5), (10, 0), last, "offset points", size=8.5, va="center",
            annotation_clip=False, **words(colour),
        )  # fmt: skip
