"""Checks of arms: an arm with a wrong result is never timed.

The judge is float64. Ours may be off by at most twice what the peer is off by, and one rounding:

    error(ours) <= factor * (error(peer) + eps * max |truth|)

and every arm, the peer too, must agree with the truth to half the digits of its dtype: an error of at most
sqrt(eps) * max |truth|. So a peer that computes something else makes nobody look good.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .registry import Values


@dataclass(frozen=True)
class Checked:
    """A value of an arm beside the truth: its error, the error of the peer, and the limit."""

    arm: str
    value: str
    error: float
    peer_error: float
    allowed: float

    @property
    def ok(self) -> bool:
        """True if the error is within the limit; NaN is not."""
        return self.error <= self.allowed

    @property
    def share(self) -> float:
        """The error divided by its limit; infinite if the check failed."""
        if not self.ok:
            return math.inf
        return self.error / self.allowed if self.allowed else 0.0

    def __str__(self) -> str:
        return f"{self.arm}: {self.value} is off by {self.error:.2g}, allowed {self.allowed:.2g}"


def error(values: Tensor, truth: Tensor) -> float:
    """Return the largest difference; NaN or infinite if a value is not finite."""
    if values.shape != truth.shape:
        return float("inf")
    return float((values.detach().to(truth.dtype) - truth).abs().max())


def check(
    truth: Values,
    arms: dict[str, Values],
    ours: str,
    peer: str | None,
    dtype: torch.dtype,
    factor: float = 2.0,
    yardstick: Values | None = None,
) -> list[Checked]:
    """Compare every value of every arm with the truth.

    Args:
        arms: arm -> its values.
        peer: whose error is the measure; None, where nobody else computes these values: that of `yardstick`.
        yardstick: values by plain torch, all or some of them; beside a peer, the larger error counts.
    """
    measures = [
        measure for measure in (arms[peer] if peer is not None else None, yardstick) if measure is not None
    ]
    assert measures, "a case whose peer computes something else, or without one, needs a yardstick"
    results = []
    for arm, values in arms.items():
        for name, true in truth.items():
            size = float(true.abs().max())
            eps = torch.finfo(dtype).eps
            peer_error = max(
                (error(measure[name], true) for measure in measures if name in measure), default=float("inf")
            )
            allowed = eps**0.5 * size
            if arm == ours:
                allowed = min(allowed, factor * (peer_error + eps * size))
            mine = error(values[name], true) if name in values else float("inf")
            results.append(Checked(arm, name, mine, peer_error, allowed))
    return results


def closest(checked: Iterable[Checked]) -> dict[str, dict[str, Any]]:
    """Return the value of every arm that failed or came closest to its limit, for the report."""
    worst_of: dict[str, Checked] = {}
    for value in checked:
        if value.arm not in worst_of or value.share > worst_of[value.arm].share:
            worst_of[value.arm] = value
    return {
        arm: {"value": worst.value, "error": worst.error, "allowed": worst.allowed}
        for arm, worst in worst_of.items()
    }
