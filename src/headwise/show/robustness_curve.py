"""The loss against the number of heads removed, as a matplotlib figure that touches no global state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import needed
from ..listeners.robustness import Robustness

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["robustness_curve"]

INK, FAINT, ORDERED, RANDOM = "#1f2430", "#5b6270", "#ab337c", "#e9a23b"


def robustness_curve(measured: Robustness) -> Figure:
    """Both curves, random orders with their range, and single heads as dots at 1.

    Raises:
        PackageMissing: matplotlib is not installed.

    Example:
        >>> measured = Robustness(2.0, 4, [0, 2, 4], torch.tensor([2.0, 2.1, 3.0]), None, None)
        >>> robustness_curve(measured).axes[0].get_ylabel()
        'loss'
    """
    with needed("matplotlib", "headwise pictures need matplotlib"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    ax.axhline(measured.baseline, color=FAINT, linewidth=0.8, linestyle=":", label="all heads")
    if measured.single is not None:
        alone = [loss for losses in measured.single.values() for loss in losses.tolist()]
        ax.plot([1] * len(alone), alone, ".", color=INK, alpha=0.4, markersize=5, label="one head removed")
    if measured.at_random is not None:
        low, high = measured.at_random.amin(0).tolist(), measured.at_random.amax(0).tolist()
        ax.fill_between(measured.removed, low, high, color=RANDOM, alpha=0.25, linewidth=0)
        label = f"at random, mean and range of {len(measured.at_random)}"
        ax.plot(
            measured.removed,
            measured.at_random.mean(0).tolist(),
            "o-",
            color=RANDOM,
            markersize=3,
            label=label,
        )
    if measured.by_importance is not None:
        label = "least important first"
        ax.plot(
            measured.removed, measured.by_importance.tolist(), "s-", color=ORDERED, markersize=3, label=label
        )
    ax.set_xlabel(f"heads removed, of {measured.num_heads}", color=FAINT)
    ax.set_ylabel("loss", color=FAINT)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.tick_params(labelsize=8, colors=FAINT)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.legend(frameon=False, fontsize=8, labelcolor=INK)
    return figure
