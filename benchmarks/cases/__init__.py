"""All cases, in the order in which they run; importing this package registers them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from ..registry import CASES, Case
from . import (
    adopted_models,
    attention,
    drop_in,
    generated_tokens,
    maps,
    masks,
    modules,
    monitors,
    ragged_batches,
    second_pass,
    tiny_calls,
    training,
    watched_families,
    watched_models,
)

__all__ = [
    "adopted_models",
    "attention",
    "choose",
    "drop_in",
    "every",
    "generated_tokens",
    "maps",
    "masks",
    "modules",
    "monitors",
    "ragged_batches",
    "second_pass",
    "tiny_calls",
    "training",
    "watched_families",
    "watched_models",
]


def every() -> list[Case]:
    """Return all cases, in the order of their definition."""
    return list(CASES.values())


def choose(pattern: str | None = None, device: str | None = None) -> list[Case]:
    """Return the cases of a device whose name matches a pattern (`window*`), or contains a plain word."""
    chosen: Iterable[Case] = every()
    if pattern is not None:
        shape = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
        chosen = (case for case in chosen if fnmatch.fnmatchcase(case.name, shape))
    return [case for case in chosen if device is None or device in case.devices]
