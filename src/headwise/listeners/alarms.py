"""Alarms of a `Monitor`: what is past a threshold, told once, until it is well back.

    entropy     more than half of a layer's heads look at one key each     Zhai 2023
    max_logit   a head's largest score has grown out of bounds             Dehghani 2023; Wortsman 2023
    dead        a head says next to nothing beside those of its layer      Sandoval-Segura 2025

Why entropy by the layer: one head that looks at one key is no collapse. Of the 72 heads of all-MiniLM-L6-v2
one has 0.0004 of the largest entropy, and does its work; half of a layer's had never less than 0.07.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import ArgumentError, HeadsAlarm
from ..heads.layer_names import Layer

__all__ = ["Alarm", "Alarms", "Bells", "OnAlarm", "tell"]

KEPT = 1000  # alarms
BACK = 1.25  # how far behind its threshold a number must be for the next alarm

Reading = tuple[Layer, int | None, float]  # of a head of a layer, or of the layer


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


class Bells:
    """Which alarms ring now, and which were raised.

    Args:
        alarms: when.
        dead: the threshold of dead heads.
    """

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
        self.ringing: set[tuple[str, Layer, int | None]] = set()
        self.raised: deque[Alarm] = deque(maxlen=KEPT)

    def hear(self, step: int, readings: dict[str, Iterable[Reading]]) -> list[Alarm]:
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
                if at in self.ringing:
                    if sign * value < sign * threshold * BACK**-sign:
                        self.ringing.remove(at)
                elif _is_past(kind, value, threshold):
                    self.ringing.add(at)
                    raised.append(Alarm(step, layer, head, kind, value, threshold))
            new += sorted(raised, key=lambda alarm: (alarm.value == alarm.value, -sign * alarm.value))
        self.raised += new
        return new


def _is_past(kind: str, value: float, threshold: float) -> bool:
    """Whether a number is past its threshold; those that are none are, but for heads that may be alive."""
    if kind == "dead":
        return value <= threshold
    return not (value <= threshold if kind == "max_logit" else value >= threshold)


def tell(alarms: list[Alarm], stacklevel: int) -> None:
    """One warning for each kind, of the worst."""
    for kind in dict.fromkeys(alarm.kind for alarm in alarms):
        worst, *others = (alarm for alarm in alarms if alarm.kind == kind)
        what = "layer" if worst.head is None else "head"
        more = f"; {len(others)} more {what}{'' if len(others) == 1 else 's'} alike: monitor.raised"
        warnings.warn(f"{worst}{more if others else ''}", HeadsAlarm, stacklevel=stacklevel + 1)
