"""The loss against the number of heads removed, as a matplotlib figure that touches no global state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..listeners.importance import Robustness
from .sheet import FAINT, INK, drawing, words
from .texts import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["robustness_curve"]

ORDERED, RANDOM, RANGE, PALE = "#ab337c", "#b06a00", "#f8e3c2", "#c9ced6"
TITLE = "What heads are worth: the loss without them"
NAMED = (0.3, 0.72)  # where along the axis there is room for a curve's name


class Curve(NamedTuple):
    """A curve and its name."""

    losses: list[float]
    name: str
    colour: str
    marker: str


def robustness_curve(measured: Robustness) -> Figure:
    """Both curves, random orders with their range, and single heads as dots at 1, the costliest named.

    Raises:
        PackageMissing: matplotlib is not installed.

    Example:
        >>> measured = Robustness(2.0, 4, [0, 2, 4], torch.tensor([2.0, 2.1, 3.0]), None, None)
        >>> robustness_curve(measured).axes[0].get_ylabel()
        'loss'
    """
    Figure, Canvas, _ = drawing()
    figure = Figure(figsize=(7.6, 4.4), dpi=150, layout="constrained")
    Canvas(figure)
    ax = figure.add_subplot()
    removed, curves = measured.removed, []
    ax.axhline(measured.baseline, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)), zorder=1)
    if measured.at_random is not None:
        low, high = measured.at_random.amin(0).tolist(), measured.at_random.amax(0).tolist()
        orders = len(measured.at_random)
        ax.fill_between(removed, low, high, color=RANGE, linewidth=0, zorder=0)
        name = "at random" if orders == 1 else f"at random: mean and range of {orders}"
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

    ax.set_title(
        TITLE, loc="left", size=12, pad=12, **words(INK, TITLE),
    )  # fmt: skip
    ax.set_xlabel(f"heads removed, of {measured.num_heads}", size=9, **words(FAINT))
    ax.set_ylabel("loss", size=9, **words(FAINT))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.margins(x=0.02, y=0.08)
    ax.tick_params(labelsize=8, labelcolor=FAINT, color=PALE)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        ax.spines[side].set_color(PALE)


def _single(ax: Axes, measured: Robustness) -> None:
    """Each head alone as a dot at 1; the costliest is named."""
    if not measured.single:
        return
    alone = [
        (loss, layer, head)
        for layer, losses in measured.single.items()
        for head, loss in enumerate(losses.tolist())
    ]
    ax.scatter(
        [1] * len(alone), [loss for loss, _, _ in alone], 14, color=INK, alpha=0.35, linewidth=0, zorder=2
    )
    loss, layer, head = max(alone, key=lambda each: each[0])
    where = f"{layer}.{head}" if isinstance(layer, int) else f"head {head} of {layer}"
    _say(ax, f"one head alone:\n{label(where, 40)} costs most", (1, loss), (7, 0), INK, va="center")


def _names(ax: Axes, removed: Sequence[int], curves: Sequence[Curve]) -> None:
    """Each curve's name beside it, where the two are farthest apart: the upper one's above, to the left."""
    ends = [removed[-1] * share for share in NAMED]
    inside = [at for at, count in enumerate(removed) if ends[0] <= count <= ends[1]] or [len(removed) // 2]
    first, last = (curves[0].losses, curves[-1].losses) if curves else ([0.0], [0.0])
    best = max(inside, key=lambda at: abs(first[at] - last[at])) if curves else 0
    for curve in curves:
        upper = curve.losses[best] >= max(first[best], last[best])
        upper = upper and (curve is curves[0] or first[best] != last[best])
        offset, ha, va = ((-6, 6), "right", "bottom") if upper else ((6, -6), "left", "top")
        _say(
            ax,
            curve.name,
            (removed[best], curve.losses[best]),
            offset,
            curve.colour,
            ha=ha,
            va=va,
            weight="bold",
        )


def _ends(ax: Axes, measured: Robustness, curves: Sequence[Curve]) -> None:
    """The losses with all heads and with none."""
    end, (bottom, top) = measured.removed[-1], ax.get_ylim()
    told = [(measured.baseline, "all heads")]
    if curves and end == measured.num_heads:
        told.append((curves[0].losses[-1], "no head"))
    apart = max(told)[0] - min(told)[0] > 0.12 * (top - bottom)  # else they would be over each other
    for loss, what in told:
        side = "bottom" if (loss, what) == max(told) else "top"
        va = "center" if apart or len(told) == 1 else side
        _say(ax, f"{loss:.3g}\n{what}", (end, loss), (11, 0), FAINT, va=va)


def _say(
    ax: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], colour: str, **how: Any
) -> None:
    """Words that can be read over lines."""
    from matplotlib.patheffects import withStroke

    drawn = ax.annotate(
        text, at, offset, "data", "offset points", size=8.5, annotation_clip=False, zorder=4, **how,
        **words(colour),
    )  # fmt: skip
    drawn.set_path_effects([withStroke(linewidth=2.5, foreground="white")])
