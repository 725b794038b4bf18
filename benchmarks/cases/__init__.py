"""The cases, in the order they are run. Importing this fills the list."""

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
    """All cases, in the order they were written."""
    return list(CASES.values())


def choose(pattern: str | None = None, device: str | None = None) -> list[Case]:
    """Cases whose name fits a pattern (`window*`; a plain word fits anywhere) and that run on a device."""
    chosen: Iterable[Case] = every()
    if pattern is not None:
        shape = pattern if any(sign in pattern for sign in "*?[") else f"*{pattern}*"
        chosen = (case for case in chosen if fnmatch.fnmatchcase(case.name, shape))
    return [case for case in chosen if device is None or device in case.devices]
