"""Curves: how heads specialise over the steps of training, and the loss as heads are removed.

Letters: C checkpoints, L layers, H heads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from ..heads.layer import LABELS, MIXED
from ..listeners.importance import Robustness
from ..models.specialised_heads import Specialisation
from .heads_tables import HeadsTable
from .heatmaps import OF_LABEL
from .sheet import FAINT, INK, PALE, new_figure, open_frame, words
from .tables import as_number, as_text, empty_table
from .texts import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Panel(NamedTuple):
    """A panel of one statistic."""

    name: str
    threshold: float  # from where on a head is one of these
    colour: str
    words: str


PANELS = (
    Panel("previous", 0.5, OF_LABEL["previous-token"], "previous token\nweight on the token before"),
    Panel(
        "induction_stripe", 0.4, OF_LABEL["induction"],
        "induction\nweight on the token after\nan earlier copy",
    ),
)  # fmt: skip
NAMED = 4  # heads a panel names at most
ROLES = 6
EDGE: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.8}  # between two areas of like colour
OF_ROLE = ("#ab337c", "#e9a23b", "#1b9e8f", "#5b4fc4", "#c8452f", "#50606f")
GUIDE, LEAST = "induction_stripe", 0.2  # the line through all panels; below this there is nothing to mark
UNDECIDED = {"broad": "#a9d3d5"}  # paler than in heat maps: beside "local", and not yet anything
GUIDE_TEXT = (
    "Each line is a head. Heads whose last score is above the dashed threshold are named layer.head; if "
    "there is none, the best head is."
)
LEGEND = 1.015  # right of the panel, in its width
CLOSEST = 0.085  # names in a margin, in the panel's height


def specialisation_picture(life: Specialisation) -> Figure:
    """Draw the training of all heads: loss, previous-token and induction scores, roles, and heads by label.

    Every line is one head. Those that end above the threshold (dashed) are coloured and named, layer.head, or
    else the best one; all others are grey. The dotted line through all panels is where induction forms: the
    checkpoint at which the best induction head has half of its last score.
    """
    panels = [panel for panel in PANELS if panel.name in life.statistics]
    roles = _roles(life)
    ratios = [1.0, *([1.15] * len(panels)), *([1.15] * bool(roles)), 1.0]
    figure = new_figure(9, 0.9 + 1.5 * sum(ratios), layout="constrained")
    axes: list[Axes] = list(figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios).flat)
    at = _places(life.steps)
    _losses(axes[0], life, at)
    for ax, panel in zip(axes[1:], panels, strict=False):
        _curves(ax, life.statistics[panel.name], at, panel.threshold, panel.colour)
        ax.set_ylabel(panel.words, color=FAINT, fontsize=8)
    if roles:
        _role_curves(axes[1 + len(panels)], life, at, roles)
    _census(axes[-1], life, at)
    _guide(axes, life, at)
    _finish(axes, life, at)
    figure.align_ylabels(axes)
    _, L, H = life.shape
    title = f"How the {L} x {H} heads of {life.title} specialise in training"
    axes[0].set_title(title, loc="left", color=INK, fontsize=12, pad=22)
    axes[0].annotate(GUIDE_TEXT, (0, 1), (0, 8), "axes fraction", "offset points", fontsize=8, color=FAINT)
    return figure


def _guide(axes: Sequence[Axes], life: Specialisation, at: Sequence[float]) -> None:
    """Draw a line where induction forms, with a note, if it forms."""
    if GUIDE not in life.statistics:
        return
    layer, head = life.best(GUIDE)
    scores: list[float] = life.statistics[GUIDE][:, layer, head].tolist()
    if scores[-1] < LEAST:
        return
    number = next(number for number, score in enumerate(scores) if score >= scores[-1] / 2)
    for ax in axes:
        ax.axvline(at[number], color=INK, linewidth=0.8, linestyle=":")
    late = at[number] > math.sqrt(at[0] * at[-1])
    step = int(life.steps[number])
    note = f" induction forms: at step {step:,}, head {layer}.{head} reaches half of its final score "
    axes[0].annotate(
        note, (at[number], 1), xycoords=("data", "axes fraction"), va="top", fontsize=8, color=INK,
        ha="right" if late else "left",
    )  # fmt: skip


def _places(steps: Tensor) -> list[float]:
    """Return the places of checkpoints on a log axis; step 0 is put at half the first step."""
    numbers: list[float] = [float(step) for step in steps.tolist()]
    first = min((step for step in numbers if step > 0), default=1.0)
    return [max(step, first / 2) for step in numbers]


def _losses(ax: Axes, life: Specialisation, at: Sequence[float]) -> None:
    if len(life.curve):
        steps, losses = life.curve[:, 0].tolist(), life.curve[:, 1].tolist()
        visible = [(x, y) for x, y in zip(steps, losses, strict=True) if x >= at[0]]
        ax.plot([x for x, _ in visible], [y for _, y in visible], color=PALE, linewidth=1.2, label="training")
    ax.plot(at, life.validation.tolist(), "o-", color=INK, markersize=3, linewidth=1.2, label="validation")
    last = float(life.validation[-1])
    ax.annotate(f"  {last:.2f}", (at[-1], last), fontsize=8, color=INK, va="center", annotation_clip=False)
    ax.set_ylabel("loss\nnats per token", color=FAINT, fontsize=8)
    ax.legend(frameon=False, fontsize=8, labelcolor=INK, loc="lower left")


def _curves(ax: Axes, scores: Tensor, at: Sequence[float], threshold: float, colour: str) -> None:
    last = scores[-1].nan_to_num(-math.inf)  # [L, H]
    order = last.flatten().argsort(descending=True).tolist()
    H = scores.shape[2]
    passing = [divmod(index, H) for index in order[:NAMED] if float(last.flatten()[index]) >= threshold]
    best = passing or [divmod(order[0], H)]
    flat = scores.flatten(1)  # [C, L H]
    for index in reversed(order):
        if divmod(index, H) not in best:
            ax.plot(at, flat[:, index].tolist(), color=PALE, linewidth=0.7)
    for layer, head in reversed(best):
        ax.plot(at, scores[:, layer, head].tolist(), color=colour, linewidth=1.8)
    ax.axhline(threshold, color=FAINT, linewidth=0.7, linestyle="--")
    ax.set_ylim(-0.03, 1.03)
    first = "" if passing else "best: "
    ends = [(float(last[layer, head]), layer, head) for layer, head in best]
    _in_margin(ax, [(end, f"{first}{layer}.{head}  {end:.2f}", colour) for end, layer, head in ends])


def _in_margin(ax: Axes, words: Sequence[tuple[float, str, str]]) -> None:
    """Write texts (height, text, colour) to the right of a panel from 0 to 1, without overlap."""
    placed: list[float] = []
    for height, text, colour in sorted(words, reverse=True):
        place = min(height, 1.0) if not placed else min(height, placed[-1] - CLOSEST)
        placed.append(place)
        ax.annotate(
            text, (LEGEND, (place + 0.03) / 1.06), xycoords="axes fraction", fontsize=8, color=colour,
            va="center", annotation_clip=False,
        )  # fmt: skip


def _roles(life: Specialisation) -> list[str]:
    """Return the roles found at the last checkpoint, those of the largest share first."""
    passed = [name for name in life.roles if life.found.get(name, (False,))[-1]]
    return sorted(passed, key=lambda name: -float(life.roles[name][-1].nan_to_num(0).max()))[:ROLES]


def _role_curves(ax: Axes, life: Specialisation, at: Sequence[float], roles: Sequence[str]) -> None:
    """Draw, for every role found at the end, the curve of the best head."""
    words = []
    for name, colour in zip(roles, OF_ROLE, strict=False):
        layer, head = life.best(name)
        values = life.roles[name][:, layer, head]
        ax.plot(at, values.tolist(), color=colour, linewidth=1.5)
        words.append((float(values[-1]), f"{layer}.{head}  {name}", colour))
    ax.set_ylim(-0.03, 1.03)
    ax.set_ylabel(
        "roles\nshare of cases in which the\nhead attends to the right word", color=FAINT, fontsize=8
    )
    _in_margin(ax, words)


def _census(ax: Axes, life: Specialisation, at: Sequence[float]) -> None:
    """Draw how many heads have each label, as stacked areas."""
    C, L, H = life.shape
    counts = [Counter(name for layer in each for name in layer if name is not None) for each in life.labels]
    order = [entry.name for entry in LABELS]
    present = [name for name in order if any(count[name] for count in counts)]
    below = [0] * C
    for name in present:
        above = [low + count[name] for low, count in zip(below, counts, strict=True)]
        colour = UNDECIDED.get(name, OF_LABEL.get(name, FAINT))
        ax.fill_between(at, below, above, color=colour, alpha=0.85, label=name, **EDGE)
        below = above
    ax.fill_between(at, below, [L * H] * C, color="#eef0f3", linewidth=0, label=f"{MIXED}, no label")
    ax.set_ylim(0, L * H)
    ax.set_ylabel("heads by label", color=FAINT, fontsize=8)
    handles, labels = ax.get_legend_handles_labels()
    ax.legend(
        handles[::-1], labels[::-1], frameon=False, fontsize=8, labelcolor=INK, loc="center left",
        bbox_to_anchor=(LEGEND - 0.02, 0.5), handlelength=1.0,
    )  # fmt: skip


def _finish(axes: Sequence[Axes], life: Specialisation, at: Sequence[float]) -> None:
    for ax in axes:
        ax.set_xscale("log")
        ax.set_xlim(at[0], at[-1])
        ax.tick_params(labelsize=8, colors=FAINT)
        ax.minorticks_off()
        open_frame(ax)
    last = axes[-1]
    round_numbers = [m * 10**k for k in range(9) for m in (1, 2, 5)]
    zero = [0.0] if int(life.steps.min()) == 0 else []
    begin = 1.7 * at[0] if zero else at[0]
    ticks = [float(x) for x in round_numbers if begin <= x <= at[-1]]
    last.set_xticks([*([at[0]] if zero else []), *ticks], [f"{int(x):,}" for x in (*zero, *ticks)])
    per_step = int(life.tokens[-1]) // max(int(life.steps[-1]), 1)
    last.set_xlabel(f"training steps of {per_step:,} tokens each", color=FAINT, fontsize=9)


def specialisation_table(life: Specialisation) -> HeadsTable:
    """Return a row per checkpoint: steps, tokens, losses, best heads, roles found, heads by label."""
    table = empty_table(life.title)
    shown = [panel.name for panel in PANELS if panel.name in life.statistics]
    best = [f"best\n{name.replace('_', ' ')}" for name in shown]
    roles_header = ["roles\nfound"] if life.found else []
    for header in ("step", "tokens", "loss", "vali-\ndation", *best, *roles_header):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("labels")
    H = life.shape[2]
    for number, labels in enumerate(life.labels):
        cells = [f"{int(life.steps[number]):,}", f"{int(life.tokens[number]) / 1e6:.1f} M"]
        losses = (float(life.losses[number]), float(life.validation[number]))
        row = [*map(as_text, cells), *(as_number("entropy", loss) for loss in losses)]
        for name in shown:
            scores = life.statistics[name][number].nan_to_num(-math.inf)
            layer, head = divmod(int(scores.argmax()), H)
            row.append(as_text(f"{float(scores[layer, head]):.2f} ({layer}.{head})"))
        if life.found:
            row.append(as_text(str(sum(each[number] for each in life.found.values()))))
        counts = Counter(name or MIXED for layer in labels for name in layer)
        order = sorted(counts.items(), key=lambda counted: (counted[0] == MIXED, -counted[1], counted[0]))
        row.append(as_text(", ".join(f"{count} {name}" for name, count in order)))
        table.add_row(*row)
    return HeadsTable(table)


ORDERED, RANDOM, RANGE = "#ab337c", "#b06a00", "#f8e3c2"
TITLE = "Loss after removing heads"
ROOM_FOR_NAMES = (0.3, 0.72)  # where along the axis there is room for a curve's name


class Curve(NamedTuple):
    """A curve and its name."""

    losses: list[float]
    name: str
    colour: str
    marker: str


def robustness_curve(measured: Robustness) -> Figure:
    """Draw the loss against the number of removed heads, and single heads as dots at 1."""
    figure = new_figure(7.6, 4.4, layout="constrained")
    ax = figure.add_subplot()
    removed, curves = measured.removed, []
    ax.axhline(measured.baseline, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    if measured.at_random is not None:
        low, high = measured.at_random.amin(0).tolist(), measured.at_random.amax(0).tolist()
        orders = len(measured.at_random)
        ax.fill_between(removed, low, high, color=RANGE, linewidth=0, zorder=0)
        name = "at random" if orders == 1 else f"at random: mean and range of {orders} orders"
        curves.append(Curve(measured.at_random.mean(0).tolist(), name, RANDOM, "o"))
    if measured.by_importance is not None:
        curves.append(Curve(measured.by_importance.tolist(), "least important first", ORDERED, "s"))
    for curve in curves:
        ax.plot(
            removed, curve.losses, marker=curve.marker, color=curve.colour, markersize=4, linewidth=1.8,
            markeredgecolor="white", markeredgewidth=0.5, zorder=3,
        )  # fmt: skip
    _single(ax, measured)
    _dress(ax, measured)
    _names(ax, removed, curves)
    _ends(ax, measured, curves)
    return figure


def _dress(ax: Axes, measured: Robustness) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_title(TITLE, loc="left", size=12, pad=12, **words(INK, TITLE))
    ax.set_xlabel(f"heads removed, of {measured.num_heads}", size=9, **words(FAINT))
    ax.set_ylabel("loss", size=9, **words(FAINT))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.margins(x=0.02, y=0.08)
    ax.tick_params(labelsize=8, labelcolor=FAINT, color=PALE)
    open_frame(ax)


def _single(ax: Axes, measured: Robustness) -> None:
    """Draw each single head as a dot at 1, and name the one that costs most."""
    if not measured.single:
        return
    single = measured.single.items()
    alone = [(loss, layer, head) for layer, all in single for head, loss in enumerate(all.tolist())]
    losses = [loss for loss, _, _ in alone]
    ax.scatter([1] * len(alone), losses, 14, color=INK, alpha=0.35, linewidth=0, zorder=2)
    loss, layer, head = max(alone, key=lambda each: each[0])
    where = f"{layer}.{head}" if isinstance(layer, int) else f"head {head} of {layer}"
    _say(
        ax,
        f"one head removed:\n{label(where, 40)} increases the loss most",
        (1, loss),
        (7, 0),
        INK,
        va="center",
    )


def _names(ax: Axes, removed: Sequence[int], curves: Sequence[Curve]) -> None:
    """Write each curve's name where the two curves are farthest apart."""
    ends = [removed[-1] * share for share in ROOM_FOR_NAMES]
    inside = [at for at, count in enumerate(removed) if ends[0] <= count <= ends[1]] or [len(removed) // 2]
    first, last = (curves[0].losses, curves[-1].losses) if curves else ([0.0], [0.0])
    best = max(inside, key=lambda at: abs(first[at] - last[at])) if curves else 0
    for curve in curves:
        upper = curve.losses[best] >= max(first[best], last[best])
        upper = upper and (curve is curves[0] or first[best] != last[best])
        offset, ha, va = ((-6, 6), "right", "bottom") if upper else ((6, -6), "left", "top")
        at = removed[best], curve.losses[best]
        _say(ax, curve.name, at, offset, curve.colour, ha=ha, va=va, weight="bold")


def _ends(ax: Axes, measured: Robustness, curves: Sequence[Curve]) -> None:
    end, (bottom, top) = measured.removed[-1], ax.get_ylim()
    notes = [(measured.baseline, "all heads")]
    if curves and end == measured.num_heads:
        notes.append((curves[0].losses[-1], "no head"))
    apart = max(notes)[0] - min(notes)[0] > 0.12 * (top - bottom)  # else they would be over each other
    for loss, name in notes:
        side = "bottom" if (loss, name) == max(notes) else "top"
        va = "center" if apart or len(notes) == 1 else side
        _say(ax, f"{loss:.3g}\n{name}", (end, loss), (11, 0), FAINT, va=va)


def _say(
    ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], colour: str, **style: Any
) -> None:
    """Write text with a white outline, readable over lines."""
    from matplotlib.patheffects import withStroke

    drawn = ax.annotate(
        text, at, offset, "data", "offset points", size=8.5, annotation_clip=False, zorder=4, **style,
        **words(colour),
    )  # fmt: skip
    drawn.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
