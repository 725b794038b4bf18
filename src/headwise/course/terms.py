"""Whether code does what its exercise asks: right in some other way is not solved.

The examiner finds out which way code wants to be called and what it means by a mask, and judges it within
that. An exercise says so itself: what it asks is what the examiner finds out about its solution.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from .lesson import Exercise

if TYPE_CHECKING:
    from ..examiner.report import Report

__all__ = ["at_a_glance", "otherwise"]


def at_a_glance(source: str, exercise: Exercise) -> str | None:
    """What can be seen without running it, in one sentence: it is not there, returns nothing, or leaves to
    another what it is to do itself; None where nothing is, or it cannot be read.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None  # the examiner says where
    named = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    asked = next((node for node in named if node.name == exercise.name), None)
    if asked is None:
        there = ", ".join(node.name for node in named) or "nothing of the kind"
        return f"The exercise asks for {exercise.name}, and the file has {there}: keep the name."
    function = asked
    if isinstance(asked, ast.ClassDef):
        methods = [one for one in asked.body if isinstance(one, ast.FunctionDef) and one.name == "forward"]
        if not methods:
            return f"{exercise.name} has no method forward."
        function = methods[0]
    if not any(isinstance(one, ast.Return) and one.value is not None for one in ast.walk(function)):
        return f"{exercise.name} returns nothing: the last line lacks a return."
    used = {_called(one) for one in ast.walk(asked) if isinstance(one, ast.Call)}
    taken = sorted(used & set(exercise.without))
    if taken:
        return f"This one is to be written without {taken[0]}."
    return None


def _called(call: ast.Call) -> str:
    """The last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def otherwise(mine: Report, ours: Report) -> list[str]:
    """In which ways code that is right is not what the solution is; nothing where it is."""
    said = []
    if _what(mine) != _what(ours):
        said.append(f"asked: {_what(ours)}; yours: {_what(mine)}")
    asked, found = _words(ours), _words(mine)
    said += [f"asked: {words}" for words in asked if words not in found]
    said += [f"yours: {words}" for words in found if words not in asked]
    if ours.conventions.returns_weights != mine.conventions.returns_weights:
        said.append(f"asked: weights are {'' if ours.conventions.returns_weights else 'not '}returned, too")
    lacking = [probe for probe in ours.errors if probe not in mine.errors]
    if lacking:
        said.append(f"asked: it can be called with all of these: {', '.join(lacking)}; yours cannot")
    known = {one.key for one in ours.remarks}
    said += [f"{one.title[0].upper()}{one.title[1:]}" for one in mine.remarks if one.key not in known]
    return said


def _what(report: Report) -> str:
    """What it is, without how exactly it was met."""
    return re.sub(r", to (?:the last digit|[\d.e+-]+)$", "", report.summary)


def _words(report: Report) -> list[str]:
    return [*report.conventions.words, *report.designs]
