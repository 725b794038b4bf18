"""The learner's exceptions become problems, at the learner's own line."""

from __future__ import annotations

import traceback
import types

from ..evidence import Problem

__all__ = ["CAUGHT", "Unreadable", "files_of", "problem_of"]

CAUGHT = (Exception, SystemExit)


class Unreadable(Exception):
    """What came back is not an attention's answer: no tensor, or none of the right shape."""


def files_of(obj: object) -> frozenset[str]:
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
