"""If heads fail, do the others make up for it? The loss against the number of heads removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..heads.layer_names import ByLayer, GivenByLayer, Layer, names_of
from ..models.batches import Loss, as_batches, tracked
from .ablation import Switches, check_heard
from .chosen_heads import by_path
from .importance import Importance, importance
from .model_door import attach
from .model_structure import structure_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["METHODS", "Robustness", "robustness"]

METHODS = ("importance", "random")
POINTS = 10  # points of a curve, besides the one with all heads

Off = list[tuple[str, int]]


@dataclass(frozen=True, eq=False)
class Robustness:
    """The loss with more and more heads at zero; print it, or `plot()` it."""

    baseline: float  # all heads on
    num_heads: int  # of the whole model
    removed: list[int]  # how many heads are off at each point, from 0
    by_importance: Tensor | None  # [points], the least important first
    at_random: Tensor | None  # [repeats, points]
    single: ByLayer[Tensor] | None  # [H], one head off at a time

    def to_dict(self) -> dict[str, object]:
        """Plain numbers and lists, as JSON takes them."""
        return {
            "baseline": self.baseline,
            "num_heads": self.num_heads,
            "removed": list(self.removed),
            "by_importance": None if self.by_importance is None else self.by_importance.tolist(),
            "at_random": None if self.at_random is None else self.at_random.tolist(),
            "single": None if self.single is None else {str(k): v.tolist() for k, v in self.single.items()},
        }

    def plot(self) -> Figure:
        """The curves, as a matplotlib figure (`pip install "headwise[viz]"`)."""
        from ..show.curves import robustness_curve

        return robustness_curve(self)

    def __str__(self) -> str:
        heads = "its one head" if self.num_heads == 1 else f"all {self.num_heads} heads"
        words = [f"With {heads} the loss is {self.baseline:.4g}."]
        if self.single and self.num_heads > 1:  # a head that is alone is all heads
            changes = {(layer, h): loss - self.baseline for layer, losses in self.single.items()
                       for h, loss in enumerate(losses.tolist())}  # fmt: skip
            (layer, head), worst = max(changes.items(), key=lambda item: item[1])
            small = sum(abs(change) <= 0.01 * abs(self.baseline) for change in changes.values())
            words.append(
                f"Without any one of them it changes by at most 1% for {small} of {len(changes)}; the "
                f"costliest is layer {layer} head {head} ({worst:+.3g})."
            )
        last = len(self.removed) - 1
        middle = min(range(1, last + 1), key=lambda i: abs(self.removed[i] - self.num_heads / 2))
        curves = {"least important first": self.by_importance, "at random": self.at_random}
        measured = {name: curve for name, curve in curves.items() if curve is not None}
        if measured:
            told = "; ".join(self._at(point, measured) for point in dict.fromkeys((middle, last)))
            words.append(f"{told[0].upper()}{told[1:]}.")
        return " ".join(words)

    def _at(self, point: int, curves: Mapping[str, Tensor]) -> str:
        """The loss at a point. Without any head, all orders come to the same."""
        if self.removed[point] == self.num_heads:
            return f"without any head it is {next(iter(curves.values()))[..., point].mean():.4g}"
        losses = []
        for name, curve in curves.items():
            here = curve[..., point]
            spread = f" ± {here.std():.2g}" if here.numel() > 1 else ""
            losses.append(f"{here.mean():.4g}{spread} {name}")
        return f"with {self.removed[point]} removed it is {' and '.join(losses)}"


def robustness(
    model: nn.Module,
    batches: Iterable[object],
    loss_fn: Loss | None = None,
    *,
    method: str | Sequence[str] = METHODS,
    repeats: int = 5,
    points: int | Sequence[int] | None = None,
    single: bool = True,
    scores: Importance | GivenByLayer[Tensor] | None = None,
    seed: int = 0,
    progress: bool = True,
    fallback: str | None = None,
) -> Robustness:
    """The loss against the number of heads removed (at zero), and with each single head removed.

    Takes one forward a batch for each point of each curve, and one for each head if `single`. Removal goes
    on where it was: the heads of a point are among those of the next. The model stays in the mode it is in.

    Args:
        batches: kept in memory and gone through again and again.
        loss_fn: as in `headwise.importance`; that of several batches is their mean, weighted by their
            sequences.
        method: which curves: "importance", the least important head first, and "random".
        repeats: random orders.
        points: how many after the one with all heads, evenly spaced up to no head at all; or the
            numbers of removed heads themselves. None: 10, or as many as there are heads.
        single: whether to remove each head alone, too.
        scores: how important the heads are, where that is known; else `headwise.importance` by gradients.
        seed: of the random orders.
        progress, fallback: as in `headwise.importance`.

    Raises:
        ArgumentError: an unknown method; fewer than one repeat or point; points that are no whole numbers;
            more heads than there are; scores of other heads; and as `headwise.importance`.
        AttentionBypassed: a layer whose outputs are not in hand.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> mha, x = MultiHeadAttention(8, 4), torch.randn(5, 3, 8)
        >>> found = robustness(mha, [x], lambda model, batch: model(batch)[0].square().mean(), repeats=2)
        >>> found.removed, found.at_random.shape
        ([0, 1, 2, 3, 4], torch.Size([2, 5]))

    Michel 2019, section 4.2; Voita 2019, section 6.
    """
    methods = [method] if isinstance(method, str) else list(method)
    for name in methods:
        if name not in METHODS:
            raise ArgumentError(f"method must be of 'importance' and 'random': got {name!r}; or both")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ArgumentError(
            f"repeats must be a whole number of at least 1: got {repeats!r}; 5 shows a spread"
        )
    asked = _whole_numbers(points)
    kept = list(as_batches(batches))
    if "importance" in methods and scores is None:
        scores = importance(model, kept, loss_fn, progress=progress, fallback=fallback)
    switches = Switches()
    with attach(model, switches, fallback):
        weights = _weights(model, kept, loss_fn, switches)
        every = switches.every_head()
        removed = _counts(asked, len(every))
        trials: list[Off] = [[]]
        trials += [[head] for head in every] if single else []
        sequences: list[Off] = []
        if "importance" in methods:
            assert scores is not None
            sequences.append(_least_first(by_path(model, scores, "scores"), every))
        if "random" in methods:
            sequences += _shuffled(every, repeats, seed)
        trials += [ordered[:count] for ordered in sequences for count in removed[1:]]
        losses = []
        for off in tracked(trials, "robustness", progress):
            of_batches = [switches.loss(model, loss_fn, batch, off) for batch in kept]
            losses.append(sum(loss * weight for loss, weight in zip(of_batches, weights, strict=True)))
    alone = every if single else []
    return _assembled(losses, alone, len(every), removed, methods, names_of(structure_of(model).places))


def _weights(
    model: nn.Module, batches: list[object], loss_fn: Loss | None, switches: Switches
) -> list[float]:
    """Each batch's share of the sequences; on the way the switches hear every layer."""
    counts = []
    for batch in batches:
        switches.loss(model, loss_fn, batch, ())
        counts.append(switches.examples)
    check_heard(model, switches.num_heads)
    return [count / sum(counts) for count in counts]


def _whole_numbers(points: int | Sequence[int] | None) -> int | list[int]:
    """How many points, or the numbers of removed heads; known to be whole before the model runs."""
    try:
        if isinstance(points, Iterable):
            return [index(number) for number in points]
        count = POINTS if points is None else index(points)
    except TypeError:
        raise ArgumentError(
            f"points must be a whole number, or whole numbers of removed heads: got {points!r}; a share of "
            "the heads goes in as [round(share * num_heads)]"
        ) from None
    if isinstance(points, bool) or count < 1:
        raise ArgumentError(f"points must be at least 1: got {points!r}; 10 draws a curve")
    return count


def _counts(points: int | list[int], total: int) -> list[int]:
    """How many heads are off at each point, from 0."""
    if isinstance(points, int):
        count = min(points, total)
        return [round(total * point / count) for point in range(count + 1)]
    counts = sorted({0, *points})
    if len(counts) < 2 or counts[0] < 0 or counts[-1] > total:
        raise ArgumentError(
            f"points must be numbers of removed heads, 1 to {total}: got {points}; or give a count"
        )
    return counts


def _least_first(scores: Mapping[str, Tensor], every: Off) -> Off:
    for path, head in every:
        if path not in scores or head >= len(scores[path]):
            raise ArgumentError(
                f"scores must cover every head: head {head} of {path} is missing; use "
                "importance of this model"
            )
    return sorted(every, key=lambda at: float(scores[at[0]][at[1]]))


def _shuffled(every: Off, repeats: int, seed: int) -> list[Off]:
    random = torch.Generator().manual_seed(seed)
    return [[every[i] for i in torch.randperm(len(every), generator=random)] for _ in range(repeats)]


def _assembled(
    losses: list[float],
    alone: Off,
    num_heads: int,
    removed: list[int],
    methods: list[str],
    names: dict[str, Layer],
) -> Robustness:
    """The losses in the order in which they were asked for: all heads, each alone, then curve by curve."""
    baseline, rest = losses[0], losses[1 + len(alone) :]
    single: dict[str, list[float]] = {}
    for (path, _), loss in zip(alone, losses[1:], strict=False):
        single.setdefault(path, []).append(loss)
    by_path = {path: torch.tensor(without, dtype=torch.float64) for path, without in single.items()}
    points = len(removed) - 1
    curves = torch.tensor(
        [[baseline, *rest[i : i + points]] for i in range(0, len(rest), points)], dtype=torch.float64
    )
    first = int("importance" in methods)
    return Robustness(
        baseline,
        num_heads,
        removed,
        curves[0] if first else None,
        curves[first:] if "random" in methods else None,
        ByLayer(by_path, names) if by_path else None,
    )
