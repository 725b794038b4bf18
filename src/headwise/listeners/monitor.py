"""`Monitor`: how the heads of a model fare while it is trained, as plain numbers every so many steps.

    step    0  measured: attached, heard, summed over all its calls where the model is, read once, detached
    step    1  nothing is attached
    ...
    step  100  measured

What is watched for, and who saw it go wrong first:

    entropy     falls to 0 as attention collapses onto one key  Zhai 2023
    max_logit   grows without bound before a loss diverges      Dehghani 2023; Wortsman 2023
    first       rises as a head comes to rest on the first key  Xiao 2024
    output      falls to 0 as a head says less and less: dead   Sandoval-Segura 2025

Letters: B batch, T query_len, H num_heads, Dv value_dim.
"""

from __future__ import annotations

import math
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..engines.statistics import ROW_STATISTICS
from ..errors import ArgumentError, nearest, needed
from ..heads.layer_names import Layer
from ..heads.record import fetched
from ..map import AttentionMap
from .active import Call, in_backward
from .chosen_heads import base_of
from .head_outputs import check_any
from .model_door import attach

if TYPE_CHECKING:
    import pandas

__all__ = ["OUTPUT", "Measuring", "Monitor", "Values"]


OUTPUT = "output"  # the mean norm of a head's output

Values = dict[str, float]  # of one head, by statistic


HISTORY = 1000  # measured steps that are kept
PATIENCE = 3  # steps to be measured in a row in which the model may do without running
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
            mean output norm, divided by its layer's mean. A layer goes by its number in the model, or by its
            path where there are several stacks; one that runs several times in a forward also as "<path>#1",
            "<path>#2", with numbers for each visit, and "dead" counts a head where it is dead in all.

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
        self._missed = 0  # steps in a row that were to be measured, and in which the model did not run
        self._warned = False
        self._dead_heads: list[tuple[Layer, int]] = []
        self._history: deque[_Row] = deque(maxlen=HISTORY)
        attach(model, Measuring((), False), fallback)  # says at once what is wrong with these

    @contextmanager
    def step(self) -> Iterator[Monitor]:
        """One step of training: its forward; its backward, too, where layers are checkpointed.

        A step that raises, or in which the model does not run, is not measured; the next one is in its place.
        Three of the latter in a row give a warning, once.

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
        if not ran:
            self._miss()
            return
        self._missed = 0
        check_any(self.model, ran, measuring.layers, self.fallback, attachment.elsewhere)
        self._take(number, measuring.read(), attachment.name_of)

    def _is_due(self, number: int) -> bool:
        """Whether none was measured since the last multiple of `every`, or since training began again."""
        last = self._last
        return last is None or number <= last or number // self.every > last // self.every

    def _miss(self) -> None:
        if self._last is None:
            raise ArgumentError(
                f"step must have the model run in it: {type(self.model).__name__} ran 0 times; put its "
                "forward inside `with monitor.step()`"
            )
        self._missed += 1
        if self._missed >= PATIENCE and not self._warned:
            self._warned = True
            warnings.warn(
                f"monitor must have its model run in its steps: {type(self.model).__name__} ran 0 times in "
                f"{PATIENCE} to be measured since step {self._last}; put its forward inside `with "
                "monitor.step()`, or make a new monitor where another model took its place",
                stacklevel=4,  # past contextlib, where the block ends
            )

    def _take(self, number: int, measured: dict[str, list[Values]], name_of: Callable[[str], Layer]) -> None:
        for heads in measured.values():
            _share(heads)
        self._dead_heads = [] if self.dead is None else _dead(measured, self.dead, name_of)
        layers = {name_of(path): heads for path, heads in measured.items()}
        numbers = _flat(layers, self.statistics, self.dead, len(self._dead_heads))
        before = self._history[-1].keys if self._history else ()
        kept = tuple(numbers)
        row = _Row(number, before if before == kept else kept, array("d", numbers.values()))
        self._history.append(row)
        self.latest = row.written()
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
        return [(row.step, row.written()) for row in self._history]

    @property
    def dead_heads(self) -> list[tuple[Layer, int]]:
        """The heads that were dead in the last measured step, as `headwise.prune` takes them.

        In a layer that runs several times in a forward, those that were dead each time.

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
        return list(self._dead_heads)

    def to_pandas(self) -> pandas.DataFrame:
        """A row per head and measured step: step, layer, head, and its numbers.

        Raises:
            ArgumentError: nothing was measured yet.
            PackageMissing: pandas is not installed.
        """
        if not self._history:
            raise ArgumentError(
                "monitor must have measured a step: 0 were; run the model inside `with monitor.step()`"
            )
        with needed("pandas", "to_pandas needs pandas"):
            import pandas
        rows: dict[tuple[int, Layer, int], dict[str, float]] = {}
        for row in self._history:
            for (layer, head, name), value in zip(row.keys, row.values, strict=True):
                if layer is not None and head is not None:
                    rows.setdefault((row.step, layer, head), {})[name] = value
        return pandas.DataFrame(
            [{"step": step, "layer": layer, "head": head, **row} for (step, layer, head), row in rows.items()]
        )

    def __repr__(self) -> str:
        return (
            f"Monitor({type(self.model).__name__}, every={self.every}, {len(self._history)} steps measured)"
        )


# What is logged


class _Key(NamedTuple):
    """What a number is of: a head, a layer, or neither, where it is over all heads."""

    layer: Layer | None
    head: int | None
    name: str

    def written(self) -> str:
        if self.layer is None:
            return self.name
        return (
            f"layers/{self.layer}/{self.name}"
            if self.head is None
            else f"heads/{self.layer}/{self.head}/{self.name}"
        )


class _Row(NamedTuple):
    """One measured step, small: keys are shared from step to step."""

    step: int
    keys: tuple[_Key, ...]
    values: array[float]

    def written(self) -> dict[str, float]:
        return {key.written(): value for key, value in zip(self.keys, self.values, strict=True)}


def _dead(
    measured: Mapping[str, list[Values]], dead: float, name_of: Callable[[str], Layer]
) -> list[tuple[Layer, int]]:
    """The heads whose share is at most `dead` in every visit of their layer."""
    alive: dict[tuple[Layer, int], bool] = {}
    for path, heads in measured.items():
        layer = name_of(base_of(path))
        for number, head in enumerate(heads):
            if OUTPUT in head:
                alive[layer, number] = alive.get((layer, number), False) or not head[OUTPUT] <= dead
    return [at for at, lives in alive.items() if not lives]


def _flat(
    layers: Mapping[Layer, list[Values]], names: Sequence[str], dead: float | None, dead_heads: int
) -> dict[_Key, float]:
    """What is logged: over all heads, layer by layer, head by head."""
    flat: dict[_Key, float] = {}
    for name in (*names, OUTPUT):
        values = [head[name] for heads in layers.values() for head in heads if name in head]
        for how in ("min",) if name == OUTPUT else SUMMARIES.get(name, ("mean",)):
            if values:
                flat[_Key(None, None, f"{name}/{how}")] = _reduced(how, values)
    said = {layer: [head[OUTPUT] for head in heads if OUTPUT in head] for layer, heads in layers.items()}
    if dead is not None and any(said.values()):
        count = {layer: sum(share <= dead for share in shares) for layer, shares in said.items() if shares}
        flat[_Key(None, None, "dead")] = float(dead_heads)
        flat |= {_Key(layer, None, "dead"): float(number) for layer, number in count.items()}
    for layer, heads in layers.items():
        for number, head in enumerate(heads):
            flat |= {_Key(layer, number, name): value for name, value in head.items()}
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


# One measured step


class Measuring:
    """A listener for one step.

    Args:
        names: row statistics.
        outputs: whether to measure the norm of what heads say, too.

    Attributes:
        layers: path -> statistic -> [2, H]: the sum over queries, or their largest, and how many they are.
    """

    def __init__(self, names: Sequence[str], outputs: bool) -> None:
        self.names, self.outputs = tuple(names), outputs
        self.layers: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def hear(self, call: Call) -> None:
        """Add one call to what was heard before."""
        if in_backward():
            return
        layer = self.layers.setdefault(call.path, {})
        weights = call.weights.detach()
        scored = call.value is not None  # else only weights are to be had, without the scores behind them
        names = tuple(name for name in self.names if scored or name != "max_logit")
        measured = dict(weights.statistics(*names)) if names else {}  # [B, H] each
        counts = _counts(weights, names)
        for name, values in measured.items():
            count = counts[ROW_STATISTICS[name].offset].sum(-1).to(values.dtype)  # [B, H]
            largest = ROW_STATISTICS[name].largest
            value = values.amax(0) if largest else torch.where(count > 0, values * count, 0).sum(0)
            layer[name] = _joined(layer.get(name), torch.stack([value, count.sum(0)]), largest)
        if self.outputs and call.output is not None:
            precise = torch.promote_types(call.output.dtype, torch.float32)
            norms = torch.linalg.vector_norm(call.output.detach(), dim=-1, dtype=precise)  # [B, H, T]
            counting = counts[None]
            both = torch.stack(
                [norms.masked_fill(~counting, 0).sum((0, 2)), counting.sum((0, 2)).to(precise)]
            )
            layer[OUTPUT] = _joined(layer.get(OUTPUT), both)

    def read(self) -> dict[str, list[Values]]:
        """path -> head -> statistic -> value; what had no query to be measured at is left out."""
        sums = [(path, name, two) for path, layer in self.layers.items() for name, two in layer.items()]
        values_of: dict[str, list[Values]] = {path: [] for path in self.layers}
        for (path, name, _), (values, counts) in zip(sums, fetched([two for _, _, two in sums]), strict=True):
            heads = values_of[path]
            heads += [{} for _ in range(len(values) - len(heads))]
            for head, value, count in zip(heads, values.tolist(), counts.tolist(), strict=True):
                if count:
                    largest = name != OUTPUT and ROW_STATISTICS[name].largest
                    head[name] = value if largest else value / count
        return values_of


def _counts(weights: AttentionMap, names: Iterable[str]) -> dict[int | None, Tensor]:
    """Which queries count, by where a statistic looks for a key: bool [B, H, T] each."""
    like = {None: "entropy"} | {ROW_STATISTICS[name].offset: name for name in names}
    return {offset: weights.counted_queries(name) for offset, name in like.items()}


def _joined(known: Tensor | None, new: Tensor, largest: bool = False) -> Tensor:
    """Two calls as one, [2, H]."""
    if known is None:
        return new
    return torch.stack([torch.maximum(known[0], new[0]), known[1] + new[1]]) if largest else known + new
