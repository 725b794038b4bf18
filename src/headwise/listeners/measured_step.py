"""One step of training, measured: what a `Monitor` hears, what is logged of it, and when to warn.

An alarm tells what is past a threshold, once, until it is well back:

    entropy     more than half of a layer's heads look at one key each     Zhai 2023
    max_logit   a head's largest score has grown out of bounds             Dehghani 2023; Wortsman 2023
    dead        a head says next to nothing beside those of its layer      Sandoval-Segura 2025

Why entropy by the layer: one head that looks at one key is no collapse. Of the 72 heads of all-MiniLM-L6-v2
one has 0.0004 of the largest entropy, and does its work; half of a layer's had never less than 0.07.

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

KEPT = 1000  # alarms
BACK = 1.25  # how far behind its threshold a number must be for the next alarm

Reading = tuple[Layer, int | None, float]  # of a head of a layer, or of the layer

SUMMARIES = {"entropy": ("min", "mean"), "max_logit": ("max",), OUTPUT: ("min",)}  # others: the mean


# While the model runs


class Measuring(Listener):
    """A listener for one step: row statistics; with `outputs` the norms of what heads say, too; with `shares`
    the share of the largest possible entropy that they have."""

    def __init__(self, names: Sequence[str], outputs: bool, shares: bool = False) -> None:
        self.names, self.outputs, self.shares = tuple(names), outputs, shares
        # path -> statistic -> [2, H]: the sum over queries, or their largest, and how many they are; of
        # entropy's share, the sum of entropies, and of those that even attention would have
        self.layers: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def hear(self, call: LayerCall) -> None:
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
        """path -> head -> statistic -> value; what had no query to be measured at is left out."""
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
    """The entropy of each query that attends evenly to all it sees, a sink included, [B, H or 1, T].

    log n for n keys, the log-sum-exp of so many zeros. A query of one key has none, collapsed or not.
    """
    weights = call.weights
    if call.value is None:  # weights alone: a key is seen where any head looks at it
        return (weights.dense() > 0).any(1, keepdim=True).sum(-1).to(torch.float32).log()
    of_heads = (weights.mask.allowed, weights.bias)
    apart = any(rule is not None and rule.shape[1] > 1 for rule in of_heads) or weights.relative is not None
    heads = torch.arange(call.num_heads if apart else 1, device=call.value.device)
    q, k, mask = even_scores(call, heads)
    even = AttentionMap(q, k, mask=mask).lse
    return even if weights.sinks is None else even.exp().add(1).log()


def _counts(weights: AttentionMap, names: Iterable[str]) -> dict[int | None, Tensor]:
    """Which queries count, by where a statistic looks for a key: bool [B, H, T] each."""
    like = {None: "entropy"} | {ROW_STATISTICS[name].offset: name for name in names}
    return {offset: weights.counted_queries(name) for offset, name in like.items()}


def _joined(known: Tensor | None, new: Tensor, largest: bool = False) -> Tensor:
    """Two calls as one, [2, H]."""
    if known is None:
        return new
    return torch.stack([torch.maximum(known[0], new[0]), known[1] + new[1]]) if largest else known + new


# What is logged of it


class Key(NamedTuple):
    """What a number is of: a head, a layer, or neither, where it is over all heads."""

    layer: Layer | None
    head: int | None
    name: str

    def written(self) -> str:
        if self.layer is None:
            return self.name
        layer = f"layers/{self.layer}" if self.head is None else f"heads/{self.layer}/{self.head}"
        return f"{layer}/{self.name}"


class Row(NamedTuple):
    """One measured step, small: keys are shared from step to step."""

    step: int
    keys: tuple[Key, ...]
    values: array[float]

    def written(self) -> dict[str, float]:
        return {key.written(): value for key, value in zip(self.keys, self.values, strict=True)}


def largest_norms(
    measured: Mapping[str, list[Values]], name_of: Callable[[str], Layer]
) -> dict[tuple[Layer, int], float]:
    """The share of its layer's mean norm that each head says, in the visit in which it says most."""
    most: dict[tuple[Layer, int], float] = {}
    for path, heads in measured.items():
        layer = name_of(base_of(path))
        for number, head in enumerate(heads):
            if OUTPUT in head:
                said = most.get((layer, number), 0.0)
                most[layer, number] = said if math.isnan(said) or head[OUTPUT] <= said else head[OUTPUT]
    return most


def layer_medians(layers: Mapping[Layer, list[Values]], name: str) -> dict[Layer, float]:
    """By layer, the value that more than half of its heads do not exceed; NaN where any is."""
    medians: dict[Layer, float] = {}
    for layer, heads in layers.items():
        some = sorted(head[name] for head in heads if name in head)
        if some:
            medians[layer] = math.nan if any(map(math.isnan, some)) else some[len(some) // 2]
    return medians


def logged_numbers(
    layers: Mapping[Layer, list[Values]],
    names: Sequence[str],
    dead: float | None,
    dead_heads: int,
    alarms: int | None,
) -> dict[Key, float]:
    """What is logged: over all heads, layer by layer, head by head."""
    flat: dict[Key, float] = {}
    for name in (*names, ENTROPY_SHARE, OUTPUT):
        values = [head[name] for heads in layers.values() for head in heads if name in head]
        for how in SUMMARIES.get(name, ("mean",)):
            if values:
                flat[Key(None, None, f"{name}/{how}")] = _reduced(how, values)
    said = {layer: [head[OUTPUT] for head in heads if OUTPUT in head] for layer, heads in layers.items()}
    if dead is not None and any(said.values()):
        count = {layer: sum(share <= dead for share in shares) for layer, shares in said.items() if shares}
        flat[Key(None, None, "dead")] = float(dead_heads)
        flat |= {Key(layer, None, "dead"): float(number) for layer, number in count.items()}
    if alarms is not None:
        flat[Key(None, None, "alarms")] = float(alarms)
    medians = layer_medians(layers, ENTROPY_SHARE)
    flat |= {Key(layer, None, ENTROPY_SHARE): value for layer, value in medians.items()}
    for layer, heads in layers.items():
        for number, head in enumerate(heads):
            flat |= {Key(layer, number, name): value for name, value in head.items()}
    return flat


def divide_by_layer_mean(heads: list[Values]) -> None:
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


Owner = TypeVar("Owner")


class Step(ContextDecorator, AbstractContextManager[Owner]):
    """The block of a step, which is written as an optimizer's `step()` is: one never entered says so."""

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
                "nothing was measured by monitor.step(): it is a block and was never entered; write with "
                "monitor.step(): loss = model(x)",
                RuntimeWarning,
                stacklevel=2,
            )

    if not TYPE_CHECKING:  # to those who ask the block instead of the monitor

        def __getattr__(self, name: str) -> NoReturn:
            what = f"step() has no attribute {name!r}"
            if not name.startswith("_") and hasattr(self._monitor, name):
                what += f": it is the monitor's own; write with monitor.step(): model(x), then monitor.{name}"
                self._unused = False  # that is told of already
            raise AttributeError(what)


# When to warn of it


@dataclass(frozen=True)
class Alarms:
    """When a `headwise.Monitor` raises an alarm: a warning, and a call of its `on_alarm`.

        monitor = hw.Monitor(model, alarms=hw.Alarms(max_logit=100), on_alarm=page_me)

    What is past its threshold is told once. It is told again after it was back, by a quarter of the
    threshold: a number that dances on it makes no flood. Several heads at one step are one warning, which
    names the worst; `on_alarm` is called for each.

    Args:
        entropy: entropy collapse: the share of the largest entropy, log n over the n keys that a query sees,
            that more than half of a layer's heads fall short of; None: not looked for. Even attention has 1,
            heads of random weights have nearly that. A single head may well look at one key; "entropy/min" of
            the monitor's numbers shows it.
        max_logit: logit growth: what a head's largest score goes beyond; None: not looked for. Three times
            the largest that was met in a healthy model, 82 in all-MiniLM-L6-v2.
        dead: whether to tell of heads that are dead, as the monitor's own `dead` has it.

    Numbers that are no numbers (NaN) are past any threshold.

    Raises:
        ArgumentError: thresholds out of their range; nothing to look for.

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
                f"entropy must be a share of the largest, between 0 and 1: got {self.entropy!r}; 0.02 is "
                "next to one key, None looks for none"
            )
        if self.max_logit is not None and not (_is_number(self.max_logit) and self.max_logit > 0):
            raise ArgumentError(
                f"max_logit must be above 0: got {self.max_logit!r}; 250 is beyond healthy models, None "
                "looks for none"
            )
        if not isinstance(self.dead, bool):
            raise ArgumentError(
                f"dead must be True or False: got {self.dead!r}; the threshold is Monitor(dead=...)"
            )
        if self.entropy is None and self.max_logit is None and not self.dead:
            raise ArgumentError(
                "alarms must look for something: got None for entropy and max_logit, and dead=False; leave "
                "alarms out"
            )

    @property
    def statistics(self) -> tuple[str, ...]:
        """The row statistics that they look at."""
        wanted = {"entropy": self.entropy, "max_logit": self.max_logit}
        return tuple(name for name, threshold in wanted.items() if threshold is not None)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class Alarm:
    """One number that went past its threshold; `str` of it is a sentence."""

    step: int
    layer: Layer
    head: int | None  # None: more than half of the layer's
    kind: str  # "entropy", "max_logit" or "dead"
    value: float
    threshold: float

    def __str__(self) -> str:
        what, do = SENTENCES[self.kind]
        layer = "the model" if self.layer == "" else f"layer {self.layer}"  # which is one layer itself
        who = layer if self.head is None else f"head {self.head} of {layer}"
        return f"{who} {what.format(self.value, self.threshold)} at step {self.step}; {do}"


SENTENCES = {
    "entropy": (
        "must not collapse onto single keys: more than half of its heads have at most {:.3g} of the largest "
        "entropy, below {:g},",
        "lower the learning rate, or normalise queries and keys",
    ),
    "max_logit": (
        "must keep its scores in bounds: its largest logit is {:.4g}, above {:g},",
        "lower the learning rate, normalise queries and keys, or cap them with softcap",
    ),
    "dead": (
        "must say something: its output has {:.3g} of its layer's mean norm, at most {:g},",
        "look at what it has of W_V, or take it out with headwise.prune",
    ),
}

OnAlarm = Callable[[Alarm], object]


class AlarmState:
    """Which alarms ring now, and which were raised; `dead` is the threshold of dead heads."""

    def __init__(self, alarms: Alarms, dead: float | None) -> None:
        if alarms.dead and dead is None:
            raise ArgumentError(
                "dead must be a share where alarms look for dead heads: got dead=None beside "
                "Alarms(dead=True); give Alarms(dead=False)"
            )
        self.thresholds = {
            "entropy": alarms.entropy,
            "max_logit": alarms.max_logit,
            "dead": dead if alarms.dead else None,
        }
        self.active: set[tuple[str, Layer, int | None]] = set()
        self.raised: deque[Alarm] = deque(maxlen=KEPT)

    def hear(self, step: int, readings: Mapping[str, Sequence[Reading]]) -> list[Alarm]:
        """The alarms that these numbers raise, by kind the worst first."""
        new: list[Alarm] = []
        for kind, of_kind in readings.items():
            threshold = self.thresholds[kind]
            if threshold is None:
                continue
            sign = 1 if kind == "max_logit" else -1  # the larger the worse
            raised = []
            for layer, head, value in of_kind:
                at = (kind, layer, head)
                if at in self.active:
                    if sign * value < sign * threshold * BACK**-sign:
                        self.active.remove(at)
                elif _is_past(kind, value, threshold):
                    self.active.add(at)
                    raised.append(Alarm(step, layer, head, kind, value, threshold))
            new += sorted(raised, key=lambda alarm: (alarm.value == alarm.value, -sign * alarm.value))
        self.raised += new
        return new


def _is_past(kind: str, value: float, threshold: float) -> bool:
    """Whether a number is past its threshold; those that are none are, but for heads that may be alive."""
    if kind == "dead":
        return value <= threshold
    return not (value <= threshold if kind == "max_logit" else value >= threshold)


def warn_of(alarms: list[Alarm], stacklevel: int) -> None:
    """One warning for each kind, of the worst."""
    for kind in dict.fromkeys(alarm.kind for alarm in alarms):
        worst, *others = (alarm for alarm in alarms if alarm.kind == kind)
        what = "layer" if worst.head is None else "head"
        more = f"; {len(others)} more {what}{'' if len(others) == 1 else 's'} alike: monitor.raised"
        warnings.warn(f"{worst}{more if others else ''}", HeadsAlarm, stacklevel=stacklevel + 1)
