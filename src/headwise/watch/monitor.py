"""`Monitor`: how the heads of a model fare while it is trained, as plain numbers every so many steps.

    step    0  measured: attached, heard, reduced where the model is, read once, detached
    step    1  nothing is attached
    ...
    step  100  measured

What is watched for, and who saw it go wrong first:

    entropy     falls to 0 as attention collapses onto one key  Zhai 2023
    max_logit   grows without bound before a loss diverges      Dehghani 2023; Wortsman 2023
    first       rises as a head comes to rest on the first key  Xiao 2024
    output      falls to 0 as a head says less and less: dead   Sandoval-Segura 2025
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from ..engines.statistics import ROW_STATISTICS
from ..errors import ArgumentError, AttentionBypassed, nearest
from ..heads.naming import Layer, names_of
from .attachment import attach
from .measuring import OUTPUT, Measuring, Values

if TYPE_CHECKING:
    import pandas

__all__ = ["Monitor"]

HISTORY = 1000  # measured steps that are kept
SUMMARIES = {"entropy": ("min", "mean"), "max_logit": ("max",)}  # of all heads; others: their mean


class Monitor:
    """Entropy, largest logit, first-key mass and dead heads of a model in training, every `every` steps.

        monitor = hw.Monitor(model, every=100)
        for batch in data:
            with monitor.step():
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
            if monitor.measured:
                log(monitor.latest)

    Measured are the first step and then the first of every `every`. In all others nothing is attached to the
    model: they cost what they cost without a monitor. In a measured one attention runs on headwise's engines,
    and loss and gradients are the same up to rounding; dropout may be drawn otherwise, and numbers (but for
    `output`) are those before it. A compiled model runs that one step uncompiled. Several forwards in a step,
    as in gradient accumulation, count together: means are over all their queries, padding left out. What a
    checkpointed forward repeats in backward is not counted; with checkpointing, keep backward inside the
    block, or torch may refuse it for repeating something else. Numbers stay where the model is until the
    block ends, and are then read at once. In distributed training every rank has a monitor, which measures
    that rank's part of the batch; `nn.DataParallel` is not supported.

    A head is dead when its output, before W_O, has on average at most `dead` times the norm that the heads
    of its layer have on average. That is the average head output norm, layer-normalised, of Sandoval-Segura
    2025, which finds heads that can be removed and that weights alone would not tell. The threshold is ours,
    and strict: a hundredth of what its neighbours say. A head that rests on a first key with next to no value
    is dead; one that rests there and repeats a large value is not, and shows in `first`. Where all heads of a
    layer say nothing at all, all are dead; where all grow faint together, none is.

    Args:
        model: with everything inside it.
        every: how many steps from one that is measured to the next.
        statistics: which, of the row statistics of `headwise.AttentionMap.statistics`.
        dead: the share of its layer's mean output norm up to which a head is dead; None: not measured.
        fallback: for layers that compute their own weights: None raises, "eager" reads those (without
            `max_logit`, `output` and dead heads), "skip" leaves these layers out.

    Attributes:
        number: of the next step, from 0. Set it where training resumes.
        measured: whether the last step was.
        latest: the numbers of the last measured step, by name: "heads/<layer>/<head>/<statistic>" for every
            head; "layers/<layer>/dead", how many are; and over all heads "entropy/min", "entropy/mean",
            "max_logit/max", "output/min", "<statistic>/mean" of others, and "dead". A head's `output` is its
            mean output norm, divided by its layer's mean. A layer goes by its number, or by its path where
            there are several stacks.

    Raises:
        ArgumentError: not a module; `every` below 1; an unknown statistic or fallback; `dead` not in [0, 1).

    Example:
        >>> import torch
        >>> from headwise.nn import MultiHeadAttention
        >>> model = MultiHeadAttention(8, 2)
        >>> monitor = Monitor(model, every=100)
        >>> for _ in range(3):
        ...     with monitor.step():
        ...         loss = model(torch.randn(1, 5, 8))[0].square().mean()
        ...         loss.backward()
        >>> sorted(monitor.summary), [step for step, _ in monitor.history]
        (['dead', 'entropy/mean', 'entropy/min', 'first/mean', 'max_logit/max', 'output/min'], [0])

    Sandoval-Segura 2025 (arXiv 2504.03889); Zhai 2023; Dehghani 2023; Wortsman 2023, section 3.1; Xiao 2024.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        *,
        statistics: Iterable[str] | str = ("entropy", "max_logit", "first"),
        dead: float | None = 0.01,
        fallback: str | None = None,
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ArgumentError(
                f"every must be a whole number of steps, at least 1: got {every!r}; 100 costs next to nothing"
            )
        self.statistics = (statistics,) if isinstance(statistics, str) else tuple(dict.fromkeys(statistics))
        for name in self.statistics:
            if name not in ROW_STATISTICS:
                raise ArgumentError(
                    f"statistics must be row statistics: got {name!r}; {nearest(str(name), ROW_STATISTICS)}"
                )
        if dead is not None and (isinstance(dead, bool) or not 0 <= dead < 1):
            raise ArgumentError(
                f"dead must be a share of the layer's mean output norm, from 0 to below 1: got {dead!r}; "
                "0.01 finds heads that say next to nothing, None looks for none"
            )
        self.model, self.every, self.dead, self.fallback = model, every, dead, fallback
        self.number = 0
        self.measured = False
        self.latest: dict[str, float] = {}
        self._last: int | None = None  # the last step that was measured
        self._paths: dict[str, None] = {}  # all that were ever heard, so that a layer keeps its name
        self._history: deque[_Row] = deque(maxlen=HISTORY)
        attach(model, Measuring((), False), fallback)  # says at once what is wrong with these

    @contextmanager
    def step(self) -> Iterator[Monitor]:
        """One step of training: its forward; its backward, too, where layers are checkpointed.

        A step that raises, or in which the model does not run, is not measured; the next one is in its place.

        Raises:
            AttentionBypassed: in a measured step: a layer that cannot be heard, or nothing heard at all.
            ArgumentError: in the first measured step: the model did not run in it.

        Example:
            >>> import torch
            >>> from headwise.nn import MultiHeadAttention
            >>> model = MultiHeadAttention(8, 2)
            >>> monitor = Monitor(model, every=2)
            >>> for _ in range(3):
            ...     with monitor.step():
            ...         output, _ = model(torch.randn(1, 5, 8))
            ...     print(monitor.measured)
            True
            False
            True
        """
        self.measured = False
        number = self.number
        self.number += 1
        if not self._is_due(number):
            yield self
            return
        measuring = Measuring(self.statistics, self.dead is not None)
        with attach(self.model, measuring, self.fallback) as attachment:
            before = attachment.forward.number
            yield self
            ran = attachment.forward.number - before
        self._check(measuring, ran)
        if ran:
            self._take(number, measuring.read())

    def _is_due(self, number: int) -> bool:
        """Whether none was measured since the last multiple of `every`, or since training began again."""
        last = self._last
        return last is None or number <= last or number // self.every > last // self.every

    def _check(self, measuring: Measuring, ran: int) -> None:
        if not ran and self._last is None:
            raise ArgumentError(
                f"step must have the model run in it: {type(self.model).__name__} ran 0 times; put its "
                "forward inside `with monitor.step()`"
            )
        if ran and not measuring.layers and self.fallback != "skip":
            raise AttentionBypassed(
                f"model must have attention that can be heard: {type(self.model).__name__} ran {ran} times "
                "and none was; is there softmax attention in it?"
            )

    def _take(self, number: int, found: dict[str, list[Values]]) -> None:
        self._paths |= dict.fromkeys(found)
        names = names_of(list(self._paths))
        self.latest = _flat({names[path]: heads for path, heads in found.items()}, self.statistics, self.dead)
        before = self._history[-1].names if self._history else ()
        kept = tuple(self.latest)
        self._history.append(
            _Row(number, before if before == kept else kept, array("d", self.latest.values()))
        )
        self._last, self.measured = number, True

    @property
    def summary(self) -> dict[str, float]:
        """Of the latest numbers, those over all heads."""
        return {
            name: value for name, value in self.latest.items() if not name.startswith(("heads/", "layers/"))
        }

    @property
    def history(self) -> list[tuple[int, dict[str, float]]]:
        """(step, its numbers) of the last 1,000 measured steps."""
        return [(row.step, dict(zip(row.names, row.values, strict=True))) for row in self._history]

    @property
    def dead_heads(self) -> list[tuple[Layer, int]]:
        """The heads that were dead in the last measured step, as `headwise.prune` takes them.

        Example:
            >>> import torch
            >>> from headwise.nn import MultiHeadAttention
            >>> model = MultiHeadAttention(8, 4)
            >>> model.v_proj.weight.data[2:4] = 0                      # the second head's values
            >>> monitor = Monitor(model)
            >>> with monitor.step():
            ...     output, _ = model(torch.randn(1, 5, 8))
            >>> monitor.dead_heads
            [(0, 1)]
        """
        at = ((_place(name), value) for name, value in self.latest.items() if name.startswith("heads/"))
        return [
            (layer, head)
            for (layer, head, name), value in at
            if name == OUTPUT and self.dead is not None and value <= self.dead
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """A row a head and measured step: step, layer, head, and its numbers.

        Raises:
            ArgumentError: nothing was measured yet.
            ImportError: pandas is not installed.
        """
        if not self._history:
            raise ArgumentError(
                "monitor must have measured a step: 0 were; run the model inside `with monitor.step()`"
            )
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ImportError(
                "to_pandas needs pandas; install with: pip install pandas", name="pandas"
            ) from error
        rows: dict[tuple[int, Layer, int], dict[str, float]] = {}
        for step, numbers in self.history:
            for key, value in numbers.items():
                if key.startswith("heads/"):
                    layer, head, name = _place(key)
                    rows.setdefault((step, layer, head), {})[name] = value
        return pandas.DataFrame(
            [{"step": step, "layer": layer, "head": head, **row} for (step, layer, head), row in rows.items()]
        )

    def __repr__(self) -> str:
        return (
            f"Monitor({type(self.model).__name__}, every={self.every}, {len(self._history)} steps measured)"
        )


class _Row(NamedTuple):
    """One measured step, small: names are shared from step to step."""

    step: int
    names: tuple[str, ...]
    values: array[float]


def _flat(layers: dict[Layer, list[Values]], names: Sequence[str], dead: float | None) -> dict[str, float]:
    """What is logged: over all heads, layer by layer, head by head."""
    for heads in layers.values():
        _share(heads)
    flat: dict[str, float] = {}
    for name in (*names, OUTPUT):
        values = [head[name] for heads in layers.values() for head in heads if name in head]
        for how in ("min",) if name == OUTPUT else SUMMARIES.get(name, ("mean",)):
            if values:
                flat[f"{name}/{how}"] = _reduced(how, values)
    said = {layer: [head[OUTPUT] for head in heads if OUTPUT in head] for layer, heads in layers.items()}
    if dead is not None and any(said.values()):
        count = {layer: sum(share <= dead for share in shares) for layer, shares in said.items() if shares}
        flat["dead"] = float(sum(count.values()))
        flat |= {f"layers/{layer}/dead": float(number) for layer, number in count.items()}
    for layer, heads in layers.items():
        for number, head in enumerate(heads):
            flat |= {f"heads/{layer}/{number}/{name}": value for name, value in head.items()}
    return flat


def _share(heads: list[Values]) -> None:
    """Output norms by their mean over the layer; 0 where nobody says anything."""
    norms = [head[OUTPUT] for head in heads if OUTPUT in head]
    mean = math.fsum(norms) / len(norms) if norms else 0.0
    for head in heads:
        if OUTPUT in head:
            head[OUTPUT] = head[OUTPUT] / mean if mean else 0.0


def _reduced(how: str, values: list[float]) -> float:
    if any(map(math.isnan, values)):
        return math.nan  # which min and max would lose or keep as the order has it
    if how == "mean":
        return math.fsum(values) / len(values)
    return min(values) if how == "min" else max(values)


def _place(key: str) -> tuple[Layer, int, str]:
    """(layer, head, statistic) of a key "heads/<layer>/<head>/<statistic>"."""
    layer, head, name = key.removeprefix("heads/").rsplit("/", 2)
    return int(layer) if layer.isdigit() else layer, int(head), name
