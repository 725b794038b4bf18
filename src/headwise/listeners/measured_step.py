"""One measured step of training: the listener of a `Monitor`, the numbers that are logged, and alarms.

An alarm is raised when a number passes a threshold, and again only after it was well back:

    entropy     more than half of a layer's heads attend to one key each   Zhai 2023
    max_logit   a head's largest score has grown out of bounds             Dehghani 2023; Wortsman 2023
    dead        the output of a head is tiny beside those of its layer     Sandoval-Segura 2025

The entropy alarm is raised for layers, since one head that attends to one key is normal: of the 72 heads of
all-MiniLM-L6-v2 one has 0.0004 of the largest entropy; half of the heads of a layer never had less than 0.07.

Letters: B batch, T query_len, H num_heads, Dv value_dim.
"""

from __future__ import annotations

import math
import sys
import warnings
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from ..engines.statistics import ROW_STATISTICS
from ..errors import ArgumentError, HeadsAlarm
from ..heads.layer_names import Layer
from ..heads.record import fetched
from ..map import AttentionMap
from .ablation import even_scores
from .active import LayerCall, Listener, in_backward
from .chosen_heads import base_of

OUTPUT = "output"  # the mean norm of a head's output
ENTROPY_SHARE = "entropy_share"  # of the entropy that even attention to the same keys has

Values = dict[str, float]  # of one head, by statistic

MAX_ALARMS = 1000  # stored by a monitor
BACK = 1.25  # factor from its threshold at which a number may raise the next alarm

Reading = tuple[Layer, int | None, float]  # of a head of a layer, or of the layer

SUMMARIES = {"entropy": ("min", "mean"), "max_logit": ("max",), OUTPUT: ("min",)}  # others: the mean


# While the model runs


class Measuring(Listener):
    """Measures row statistics of one step.

    outputs: also the norms of the heads' outputs. shares: also the share of the largest possible entropy.
    """

    def __init__(self, names: Sequence[str], outputs: bool, shares: bool = False) -> None:
        self.names, self.outputs, self.shares = tuple(names), outputs, shares
        # path -> statistic -> [2, H]: the sum or maximum over queries, and their number; of the share of
        # entropy, the sum of entropies, and the sum of those of even attention
        self.layers: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def hear(self, call: LayerCall) -> None:
        """Add one call to the sums."""
        if in_backward():
            return
        layer = self.layers.setdefault(call.path, {})
        weights = call.weights.detach()
        scored = call.value is not None  # a call without values has weights only, and no scores
        names = tuple(name for name in self.names if scored or name != "max_logit")
        measured = dict(weights.statistics(*names)) if names else {}  # [B, H] each
        counts = _counts(weights, names)
        for name, values in measured.items():
            count = counts[ROW_STATISTICS[name].offset].sum(-1).to(values.dtype)  # [B, H]
            largest = ROW_STATISTICS[name].largest
            value = values.amax(0) if largest else torch.where(count > 0, values * count, 0).sum(0)
            layer[name] = _joined(layer.get(name), torch.stack([value, count.sum(0)]), largest)
            if name == "entropy" and self.shares:
                even = _even_entropy(call).to(value.dtype).expand_as(counts[None])  # [B, H, T]
                even = even.masked_fill(~counts[None], 0).sum((0, 2))
                layer[ENTROPY_SHARE] = _joined(layer.get(ENTROPY_SHARE), torch.stack([value, even]))
        if self.outputs and call.output is not None:
            precise = torch.promote_types(call.output.dtype, torch.float32)
            norms = torch.linalg.vector_norm(call.output.detach(), dim=-1, dtype=precise)  # [B, H, T]
            total = norms.masked_fill(~counts[None], 0).sum((0, 2))
            both = torch.stack([total, counts[None].sum((0, 2)).to(precise)])
            layer[OUTPUT] = _joined(layer.get(OUTPUT), both)

    def read(self) -> dict[str, list[Values]]:
        """Return path -> head -> statistic -> value, without statistics that no query counted for."""
        sums = [(path, name, two) for path, layer in self.layers.items() for name, two in layer.items()]
        values_of: dict[str, list[Values]] = {path: [] for path in self.layers}
        for (path, name, _), (values, counts) in zip(sums, fetched([two for _, _, two in sums]), strict=True):
            heads = values_of[path]
            heads += [{} for _ in range(len(values) - len(heads))]
            for head, value, count in zip(heads, values.tolist(), counts.tolist(), strict=True):
                if count:
                    largest = name in ROW_STATISTICS and ROW_STATISTICS[name].largest
                    head[name] = value if largest else value / count
        return values_of


def _even_entropy(call: LayerCall) -> Tensor:
    """Return the entropy of each query if it attends evenly to all visible keys and sinks, [B, H or 1, T].

    It is log n for n keys, the log-sum-exp of n zeros. A query with one key has entropy 0 in any case.
    """
    weights = call.weights
    if call.value is None:  # weights only: a key is visible if any head looks at it
        return (weights.dense() > 0).any(1, keepdim=True).sum(-1).to(torch.float32).log()
    rules = (weights.mask.allowed, weights.bias)
    by_head = any(rule is not None and rule.shape[1] > 1 for rule in rules) or weights.relative is not None
    heads = torch.arange(call.num_heads if by_head else 1, device=call.value.device)
    q, k, mask = even_scores(call, heads)
    even = AttentionMap(q, k, mask=mask).lse
    return even if weights.sinks is None else even.exp().add(1).log()


def _counts(weights: AttentionMap, names: Iterable[str]) -> dict[int | None, Tensor]:
    """Return which queries count by the key offset that a statistic looks at: bool [B, H, T] each."""
    names_by_offset = {None: "entropy"} | {ROW_STATISTICS[name].offset: name for name in names}
    return {offset: weights.counted_queries(name) for offset, name in names_by_offset.items()}


def _joined(previous: Tensor | None, new: Tensor, largest: bool = False) -> Tensor:
    """Return the sums or maxima of two calls, [2, H]."""
    if previous is None:
        return new
    return (
        torch.stack([torch.maximum(previous[0], new[0]), previous[1] + new[1]]) if largest else previous + new
    )


# Logged numbers


class Key(NamedTuple):
    """Name of a number: of a head, of a layer, or of all heads."""

    layer: Layer | None
    head: int | None
    name: str

    def written(self) -> str:
        if self.layer is None:
            return self.name
        layer = f"layers/{self.layer}" if self.head is None else f"heads/{self.layer}/{self.head}"
        return f"{layer}/{self.name}"


class Row(NamedTuple):
    """The numbers of one measured step; consecutive steps share their keys to save memory."""

    step: int
    keys: tuple[Key, ...]
    values: array[float]

    def written(self) -> dict[str, float]:
        return {key.written(): value for key, value in zip(self.keys, self.values, strict=True)}


def largest_norms(
    measured: Mapping[str, list[Values]], name_of: Callable[[str], Layer]
) -> dict[tuple[Layer, int], float]:
    """Return each head's output norm as a share of its layer's mean, the largest over the layer's visits."""
    norms: dict[tuple[Layer, int], float] = {}
    for path, heads in measured.items():
        layer = name_of(base_of(path))
        for number, head in enumerate(heads):
            if OUTPUT in head:
                largest = norms.get((layer, number), 0.0)
                norms[layer, number] = (
                    largest if math.isnan(largest) or head[OUTPUT] <= largest else head[OUTPUT]
                )
    return norms


def layer_medians(layers: Mapping[Layer, list[Values]], name: str) -> dict[Layer, float]:
    """Return by layer the value that more than half of its heads do not exceed; NaN if any value is."""
    medians: dict[Layer, float] = {}
    for layer, heads in layers.items():
        values = sorted(head[name] for head in heads if name in head)
        if values:
            medians[layer] = math.nan if any(map(math.isnan, values)) else values[len(values) // 2]
    return medians


def logged_numbers(
    layers: Mapping[Layer, list[Values]],
    names: Sequence[str],
    dead: float | None,
    dead_heads: int,
    alarms: int | None,
) -> dict[Key, float]:
    """Return the numbers to log: over all heads, by layer, and by head."""
    numbers: dict[Key, float] = {}
    for name in (*names, ENTROPY_SHARE, OUTPUT):
        values = [head[name] for heads in layers.values() for head in heads if name in head]
        for reduction in SUMMARIES.get(name, ("mean",)):
            if values:
                numbers[Key(None, None, f"{name}/{reduction}")] = _reduced(reduction, values)
    shares_of = {layer: [head[OUTPUT] for head in heads if OUTPUT in head] for layer, heads in layers.items()}
    if dead is not None and any(shares_of.values()):
        dead_counts = {
            layer: sum(share <= dead for share in shares) for layer, shares in shares_of.items() if shares
        }
        numbers[Key(None, None, "dead")] = float(dead_heads)
        numbers |= {Key(layer, None, "dead"): float(number) for layer, number in dead_counts.items()}
    if alarms is not None:
        numbers[Key(None, None, "alarms")] = float(alarms)
    medians = layer_medians(layers, ENTROPY_SHARE)
    numbers |= {Key(layer, None, ENTROPY_SHARE): value for layer, value in medians.items()}
    for layer, heads in layers.items():
        for number, head in enumerate(heads):
            numbers |= {Key(layer, number, name): value for name, value in head.items()}
    return numbers


def divide_by_layer_mean(heads: list[Values]) -> None:
    """Divide output norms by their mean over the layer, in place; 0 if all are 0."""
    norms = [head[OUTPUT] for head in heads if OUTPUT in head]
    mean = math.fsum(norms) / len(norms) if norms else 0.0
    for head in heads:
        if OUTPUT in head:
            head[OUTPUT] = head[OUTPUT] / mean if mean else 0.0


def _reduced(reduction: str, values: list[float]) -> float:
    """Return the mean, minimum or maximum of values; NaN if any value is."""
    if any(map(math.isnan, values)):
        return math.nan  # min and max of NaN depend on the order
    if reduction == "mean":
        return math.fsum(values) / len(values)
    return min(values) if reduction == "min" else max(values)


Owner = TypeVar("Owner")


class Step(ContextDecorator, AbstractContextManager[Owner]):
    """The block of a step. It warns if it is never entered, for it reads like an optimizer's `step()`."""

    def __init__(self, monitor: Owner, begin: Callable[[], AbstractContextManager[Owner]]) -> None:
        self._monitor, self._begin = monitor, begin
        self._entered: list[AbstractContextManager[Owner]] = []
        self._unused = True

    def __enter__(self) -> Owner:
        self._unused = False
        block = self._begin()
        monitor = block.__enter__()
        self._entered.append(block)
        return monitor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._entered.pop().__exit__(kind, error, trace)

    def __del__(self) -> None:
        if self.__dict__.get("_unused") and not sys.is_finalizing():
            warnings.warn(
                "nothing was measured by monitor.step(): it must be entered as a block; write with "
                "monitor.step(): loss = model(x)",
                RuntimeWarning,
                stacklevel=2,
            )

    if not TYPE_CHECKING:  # explains what to use instead to callers who use the block as the monitor

        def __getattr__(self, name: str) -> NoReturn:
            message = f"step() has no attribute {name!r}"
            if not name.startswith("_") and hasattr(self._monitor, name):
                message += (
                    ": it is an attribute of the monitor; write with monitor.step(): model(x), then "
                    f"monitor.{name}"
                )
                self._unused = False  # the error explains it
            raise AttributeError(message)


# Alarms


@dataclass(frozen=True)
class Alarms:
    """Thresholds at which a `headwise.Monitor` raises an alarm: a warning, and a call of its `on_alarm`.

        monitor = hw.Monitor(model, alarms=hw.Alarms(max_logit=100), on_alarm=page_me)

    A number past its threshold raises one alarm. It can raise the next alarm only after it has been within
    the threshold by a factor of more than 1.25, so a number close to the threshold does not raise an alarm at
    every step. NaN counts as past the threshold, except for dead heads. If several heads raise alarms at one
    step, there is one warning, which names the worst head; `on_alarm` is called once per alarm.

    Args:
        entropy: entropy collapse: an alarm if more than half of a layer's heads have less than this share of
            the largest entropy, log n for the n keys that a query may attend to; None: no such alarm. The
            share is 1 for uniform attention and nearly 1 for heads with random weights. One of several heads
            with very low entropy raises no alarm; see the monitor's number "entropy/min" for it.
        max_logit: logit growth: an alarm if a head's largest score is above this; None: no such alarm. The
            default is three times the largest score measured in a healthy model (82, in all-MiniLM-L6-v2).
        dead: whether dead heads raise an alarm. The argument `dead` of `Monitor` defines when a head is dead.

    Raises:
        ArgumentError: thresholds out of their range; no alarm at all.

    Example:
        >>> Alarms(max_logit=None, dead=False)
        Alarms(entropy=0.02, max_logit=None, dead=False)

    Zhai 2023 (arXiv 2303.06296); Dehghani 2023; Wortsman 2023, section 3.1; Sandoval-Segura 2025.
    """

    entropy: float | None = 0.02
    max_logit: float | None = 250.0
    dead: bool = True

    def __post_init__(self) -> None:
        if self.entropy is not None and not (_is_number(self.entropy) and 0 < self.entropy < 1):
            raise ArgumentError(
                f"entropy must be a share of the largest entropy, between 0 and 1: got {self.entropy!r}; "
                "0.02 means almost a single key, None turns this alarm off"
            )
        if self.max_logit is not None and not (_is_number(self.max_logit) and self.max_logit > 0):
            raise ArgumentError(
                f"max_logit must be above 0: got {self.max_logit!r}; 250 is more than healthy models "
                "reach, None turns this alarm off"
            )
        if not isinstance(self.dead, bool):
            raise ArgumentError(
                f"dead must be True or False: got {self.dead!r}; the threshold is Monitor(dead=...)"
            )
        if self.entropy is None and self.max_logit is None and not self.dead:
            raise ArgumentError(
                "alarms must include at least one: got None for entropy and max_logit, and dead=False; "
                "leave alarms out"
            )

    @property
    def statistics(self) -> tuple[str, ...]:
        """The row statistics that the alarms need."""
        wanted = {"entropy": self.entropy, "max_logit": self.max_logit}
        return tuple(name for name, threshold in wanted.items() if threshold is not None)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Alarm:
    """One number that went past its threshold; `str` of it is a sentence."""

    step: int
    layer: Layer
    head: int | None  # None: more than half of the layer's heads
    kind: str  # "entropy", "max_logit" or "dead"
    value: float
    threshold: float

    def __str__(self) -> str:
        sentence, advice = SENTENCES[self.kind]
        layer = "the model" if self.layer == "" else f"layer {self.layer}"  # the model is one layer
        place = layer if self.head is None else f"head {self.head} of {layer}"
        return f"{sentence.format(place, self.value, self.threshold)}, at step {self.step}; {advice}"


SENTENCES = {
    "entropy": (
        "attention in {} has collapsed: more than half of its heads have at most {:.3g} of the largest "
        "entropy (threshold {:g})",
        "lower the learning rate, or normalise queries and keys",
    ),
    "max_logit": (
        "{} has very large scores: its largest logit is {:.4g} (threshold {:g})",
        "lower the learning rate, normalise queries and keys, or cap them with softcap",
    ),
    "dead": (
        "{} has almost no output: its norm is {:.3g} times the layer's mean norm (threshold {:g})",
        "check its part of W_V, or remove it with headwise.prune",
    ),
}

OnAlarm = Callable[[Alarm], object]


class AlarmState:
    """The alarms that are active, and those that were raised; `dead` is the threshold of dead heads."""

    def __init__(self, alarms: Alarms, dead: float | None) -> None:
        if alarms.dead and dead is None:
            raise ArgumentError(
                "dead must be a number if alarms report dead heads: got dead=None with "
                "Alarms(dead=True); give a threshold, or Alarms(dead=False)"
            )
        self.thresholds = {
            "entropy": alarms.entropy,
            "max_logit": alarms.max_logit,
            "dead": dead if alarms.dead else None,
        }
        self.active: set[tuple[str, Layer, int | None]] = set()
        self.raised: deque[Alarm] = deque(maxlen=MAX_ALARMS)

    def hear(self, step: int, readings: Mapping[str, Sequence[Reading]]) -> list[Alarm]:
        """Return the alarms that these numbers raise, by kind, the worst first."""
        new: list[Alarm] = []
        for kind, values in readings.items():
            threshold = self.thresholds[kind]
            if threshold is None:
                continue
            sign = 1 if kind == "max_logit" else -1  # the larger the worse
            raised = []
            for layer, head, value in values:
                place = (kind, layer, head)
                if place in self.active:
                    if sign * value < sign * threshold * BACK**-sign:
                        self.active.remove(place)
                elif _is_past(kind, value, threshold):
                    self.active.add(place)
                    raised.append(Alarm(step, layer, head, kind, value, threshold))
            new += sorted(raised, key=lambda alarm: (alarm.value == alarm.value, -sign * alarm.value))
        self.raised += new
        return new


def _is_past(kind: str, value: float, threshold: float) -> bool:
    """Return True if a number is past its threshold; NaN is, except for dead heads."""
    if kind == "dead":
        return value <= threshold
    return not (value <= threshold if kind == "max_logit" else value >= threshold)


def warn_of(alarms: list[Alarm], stacklevel: int) -> None:
    """Give one warning for each kind of alarm, of the worst."""
    for kind in dict.fromkeys(alarm.kind for alarm in alarms):
        worst, *rest = (alarm for alarm in alarms if alarm.kind == kind)
        unit = "layer" if worst.head is None else "head"
        more = f"; {len(rest)} more {unit}{'' if len(rest) == 1 else 's'}: see monitor.raised"
        warnings.warn(f"{worst}{more if rest else ''}", HeadsAlarm, stacklevel=stacklevel + 1)
