"""Every error headwise raises, in one form: `<argument> <rule>: <the numbers>; <what to do>`.

Each class also derives from the built-in exception a caller would have expected, so `except ValueError`
keeps working.
"""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import wraps
from types import FunctionType
from typing import ParamSpec, TypeVar, cast

__all__ = [
    "ArgumentError",
    "AttentionBypassed",
    "BackendUnavailable",
    "BudgetExceeded",
    "HeadsAlarm",
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


class HeadsAlarm(HeadwiseError, UserWarning):
    """A warning of `headwise.Monitor`: heads in training went past a threshold of its alarms."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """The end of an error about an unknown name: the choices, and the likeliest one meant."""
    choices = list(choices)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}choose from {', '.join(choices)}"


Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def renamed(**words: str) -> Callable[[Callable[Given, Answer]], Callable[Given, Answer]]:
    """Keywords of a function that go by their old names as well, for one version: `@renamed(old="new")`.

    Whoever uses an old one is told which line of theirs to change; type checkers and `help` know the new ones
    alone.

    Raises:
        ArgumentError: in the call: an old keyword beside its new one.
    """

    def decorate(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
        order = list(inspect.signature(function).parameters)
        place = {new: order.index(new) for new in words.values()}
        name = getattr(function, "__qualname__", "").removesuffix(".__init__")

        def translate(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            for old, new in words.items():
                if old not in kwargs:
                    continue
                if new in kwargs or place[new] < len(args):
                    already = kwargs[new] if new in kwargs else args[place[new]]
                    raise ArgumentError(
                        f"{new} must be given once: got {new}={already!r} and {old}={kwargs[old]!r}; {old} "
                        "is its old name, leave it out"
                    )
                warnings.warn(
                    f"{old}= is called {new}= now: write {name}(..., {new}={kwargs[old]!r}); the next "
                    f"version knows {old}= no more",
                    DeprecationWarning,
                    stacklevel=3,
                )
                kwargs[new] = kwargs.pop(old)

        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            if not words.keys().isdisjoint(kwargs):
                translate(args, kwargs)
            return function(*args, **kwargs)

        # With the globals of the module it stands in: doctest tells by them whose examples are whose.
        home = cast(FunctionType, inspect.unwrap(function)).__globals__
        at_home = FunctionType(call.__code__, home, closure=call.__closure__)
        return cast("Callable[Given, Answer]", wraps(function)(at_home))

    return decorate
