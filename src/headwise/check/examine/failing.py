"""The learner's exceptions become problems, at the learner's own line; nothing they print is shown."""

from __future__ import annotations

import contextlib
import io
import traceback
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ..evidence import Problem

__all__ = ["Unreadable", "files_of", "problem_of", "quietly"]

CAUGHT = (Exception, SystemExit)


class Unreadable(Exception):
    """What came back is not an attention's answer: no tensor, or none of the right shape."""


class _Sink(io.TextIOBase):
    """Takes what is printed and keeps none of it."""

    def write(self, text: str) -> int:
        return len(text)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Float64 by default, no prints, no warnings, gradients on; everything as it was afterwards."""
    before = torch.get_default_dtype()
    sink = _Sink()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(sink),
        contextlib.redirect_stderr(sink),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
    ):
        warnings.simplefilter("ignore")
        torch.set_default_dtype(
            torch.float64
        )  # what the code makes along the way is as exact as what it is given
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def files_of(obj: Any) -> frozenset[str]:
    """The file names that tracebacks call the learner's code by."""
    owner = obj if isinstance(obj, type) or not hasattr(obj, "__class__") else type(obj)
    code = getattr(obj, "__code__", None)
    if isinstance(code, types.CodeType):
        return frozenset({code.co_filename})
    found = set()
    for one in getattr(owner, "__mro__", ()):
        if one.__module__.startswith(("torch", "builtins")) and one is not owner:
            continue
        for member in vars(one).values():
            function = getattr(member, "__func__", member)
            if isinstance(getattr(function, "__code__", None), types.CodeType):
                found.add(function.__code__.co_filename)
    return frozenset(found)


def problem_of(error: BaseException, stage: str, files: frozenset[str], probe: str | None = None) -> Problem:
    """The exception, with the last line of the learner's on its way."""
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename in files:
            line = frame.lineno
    message = str(error) or type(error).__name__
    kind = "shape" if isinstance(error, Unreadable) else type(error).__name__
    return Problem(stage, kind, message, line, probe)
