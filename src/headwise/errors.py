"""Every error headwise raises, in one form: `<argument> <rule>: <the numbers>; <what to do>`.

Each class also derives from the built-in exception a caller would have expected, so `except ValueError`
keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "ArgumentError",
    "AttentionBypassed",
    "BackendUnavailable",
    "BudgetExceeded",
    "HeadwiseError",
    "MaskError",
    "ShapeError",
]


class HeadwiseError(Exception):
    """Anything headwise refuses to do."""


class ShapeError(HeadwiseError, ValueError):
    """Two sizes that must agree do not."""


class ArgumentError(HeadwiseError, ValueError):
    """A value, dtype or device that cannot be used here."""


class MaskError(HeadwiseError, ValueError):
    """A mask that cannot mean what it seems to mean."""


class BackendUnavailable(HeadwiseError, RuntimeError):
    """A backend asked for by name cannot run this call; nothing else was tried in its place."""


class AttentionBypassed(HeadwiseError, RuntimeError):
    """A model has attention that cannot be heard where it runs; the message names its layers."""


class BudgetExceeded(HeadwiseError, MemoryError):
    """A dense result would not fit the memory budget."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """The end of an error about an unknown name: the choices, and the likeliest one meant."""
    choices = list(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}choose from {', '.join(choices)}"
