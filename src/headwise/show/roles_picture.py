"""Roles by head: how often each head finds the word of each relation, and the rule that it is held against.

Letters: L layers, H heads in the largest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..heads.roles import MARGIN, Role, Roles
from .sheet import FAINT, INK, colours, drawing, words
from .texts import fitted, in_bold, inches, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

__all__ = ["roles_picture"]

FOUND, NOT_FOUND, LINE = "#ab337c", "#a4abb8", "#c9ced6"
ROW = 0.235  # inches of a relation


def roles_picture(roles: Roles) -> Figure:
    """Left, relations down and heads across, layer by layer: the share of cases in which a head is right.

    Right, the best head of each relation (a dot, with its 95% interval) against the best rule that
    understands nothing (a diamond). Those that are found are coloured, and outlined on the left.

    Raises:
        ArgumentError: no relation was asked about.
        PackageMissing: matplotlib is not installed.
    """
    if not roles:
        raise ArgumentError(
            f"roles must hold a relation: 0 of {len(roles.unasked)} were asked about; give "
            "headwise.roles more sentences"
        )
    Figure, Canvas, _ = drawing()
    order = sorted(roles.values(), key=lambda role: (not role.found, role.rules[role.rule] == 1, -role.share))
    L, H = len(roles.layers), max(scores.shape[1] for scores in roles.scores.values())
    names = 0.3 + max(inches(label(role.name, 40), 8.5, bold=role.found) for role in order)
    map_wide, dots_wide, rules_wide = min(max(0.085 * L * H, 3.2), 7.5), 3.3, 2.5
    width, below = names + map_wide + 0.55 + dots_wide + rules_wide, 0.62
    height = 1.2 + ROW * len(order) + below
    figure = Figure(figsize=(width, height), dpi=150)
    Canvas(figure)
    tall = ROW * len(order) / height
    left = figure.add_axes((names / width, below / height, map_wide / width, tall))
    right = figure.add_axes(((names + map_wide + 0.55) / width, below / height, dots_wide / width, tall))
    _map(figure, left, roles, order, L, H)
    _dots(right, order)
    title = f"{roles.title or 'Model'}: {len(roles.found)} of {len(roles)} relations found"
    shown, size = fitted(label(title, 160), width - 0.4, 13, 9, bold=True)
    figure.text(0.2 / width, 1 - 0.27 / height, shown, size=size, va="center", **words(INK, shown))
    how = (
        "A row is a relation of words: from the first to the second. Found is what beats every trivial rule "
        f"by {MARGIN} and more (outlined, coloured), on sentences that the head was not chosen on."
    )
    figure.text(0.2 / width, 1 - 0.53 / height, how, size=8.5, va="center", **words(FAINT))
    for ax, what in (
        (left, "how often each head looks at the right word"),
        (right, "the best head against the best rule"),
    ):
        ax.set_title(what, loc="left", size=9, pad=17, **words(INK, what))
    return figure


def _map(figure: Figure, ax: Axes, roles: Roles, order: Sequence[Role], L: int, H: int) -> None:
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    rows = []
    for role in order:
        padded = [[*row, *([math.nan] * (H - len(row)))] for row in roles.scores[role.name].tolist()]
        rows.append([share for row in padded for share in row])
    image = ax.imshow(rows, cmap=colours(), norm=Normalize(0, 1), aspect="auto", interpolation="nearest")
    ax.set_frame_on(False)
    ax.set_yticks(range(len(order)), [label(role.name, 40) for role in order], size=8.5, **words(FAINT))
    for text, role in zip(ax.get_yticklabels(), order, strict=True):
        text.set_color(INK if role.found else FAINT)
        text.set_fontweight("bold" if role.found and in_bold(text.get_text()) else "normal")
    ax.set_xticks([H * at + (H - 1) / 2 for at in range(L)], [_layer(layer, L) for layer in roles.layers])
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelsize=7.5, labelcolor=FAINT, pad=2)
    ax.tick_params(axis="y", labelsize=8.5, pad=4)
    for at in range(1, L):
        ax.axvline(H * at - 0.5, color="white", linewidth=2.2)
        ax.axvline(H * at - 0.5, color=LINE, linewidth=0.6)
    for at in range(1, len(order)):
        ax.axhline(at - 0.5, color="white", linewidth=0.8)
    for row, role in enumerate(order):
        for layer, head, _ in role.heads:
            x = H * roles.layers.index(layer) + head
            ax.add_patch(
                Rectangle(
                    (x - 0.5, row - 0.5),
                    1,
                    1,
                    fill=False,
                    edgecolor=INK,
                    linewidth=1.5,
                    clip_on=False,
                    zorder=4,
                )
            )
    _scale(figure, ax, image)


def _layer(layer: int | str, layers: int) -> str:
    if isinstance(layer, int):
        return f"layer {layer}" if layers <= 8 else str(layer)
    return label(layer.rpartition(".")[2] if layers > 3 else layer, 14)


def _scale(figure: Figure, ax: Axes, image: AxesImage) -> None:
    place, inch = ax.get_position(), 1 / figure.get_figheight()
    room = figure.add_axes((place.x0, place.y0 - 0.2 * inch, min(0.6 * place.width, 0.25), 0.09 * inch))
    bar = figure.colorbar(
        image, cax=room, orientation="horizontal", ticks=[0, 0.25, 0.5, 0.75, 1], format="%g"
    )
    bar.ax.tick_params(length=2, labelsize=7, labelcolor=FAINT, color=FAINT, pad=1)
    bar.outline.set_visible(False)
    bar.ax.annotate(
        "share of cases",
        (1, 0.5),
        (8, 0),
        "axes fraction",
        "offset points",
        size=7.5,
        va="center",
        **words(FAINT),
    )


def _dots(ax: Axes, order: Sequence[Role]) -> None:
    """A line from the rule to the head; the head's name at its side, the rule in words at the far right."""
    for row, role in enumerate(order):
        colour, best = FOUND if role.found else NOT_FOUND, role.rules[role.rule]
        ax.plot([best, role.share], [row, row], color=colour, linewidth=1.1, alpha=0.6, zorder=1)
        ax.plot(
            [role.low, role.high],
            [row, row],
            color=colour,
            linewidth=3.6,
            alpha=0.3,
            zorder=1,
            solid_capstyle="butt",
        )
        ax.scatter([best], [row], 26, marker="D", facecolor="white", edgecolor=FAINT, linewidth=1, zorder=2)
        ax.scatter([role.share], [row], 34, color=colour, edgecolor="white", linewidth=0.6, zorder=3)
        ahead = role.share >= best
        end = max(role.high, best, role.share) if ahead else min(role.low, best, role.share)
        where = f"{role.layer}.{role.head}" if isinstance(role.layer, int) else f"head {role.head}"
        ax.annotate(
            where, (end, row), (5 if ahead else -5, 0), "data", "offset points", size=7.5,
            va="center", ha="left" if ahead else "right", annotation_clip=False,
            **(words(colour, where) if role.found else words(FAINT)),
        )  # fmt: skip
        ax.annotate(
            label(f"{best:.2f}  {role.rule}", 44), (1.13, row), size=7.5, va="center",
            annotation_clip=False, **words(FAINT),
        )  # fmt: skip
    ax.annotate(
        "◇ best rule", (1.13, 1), (0, 17), ("data", "axes fraction"), "offset points", size=8,
        annotation_clip=False, **words(FAINT),
    )  # fmt: skip
    ax.set_xlim(-0.02, 1.09)
    ax.set_ylim(len(order) - 0.5, -0.5)
    ax.set_yticks([])
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    ax.tick_params(labelsize=7.5, labelcolor=FAINT, color=LINE, length=2)
    ax.grid(axis="x", color="#eef0f3", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(LINE)
    ax.set_xlabel("share of cases; bar: 95%", size=8, labelpad=2, **words(FAINT))
