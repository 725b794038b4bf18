"""Exceptions in plain words: what happened, in which of the learner's lines, why, and what to do."""

from __future__ import annotations

import re

from ..evidence import Problem
from .about import About, Said
from .of_python import OF_CALLS, OF_NAMES
from .of_torch import OF_SIZES, OF_TYPES

__all__ = ["explain"]

RULES = (*OF_SIZES, *OF_TYPES, *OF_NAMES, *OF_CALLS)
STAGES = {
    "import": "While the file was imported",
    "build": "While it was built",
    "call": "While it was called",
    "backward": "In the backward pass",
}


def explain(problem: Problem, source: str | None = None) -> str:
    """One problem, in a few sentences.

    Args:
        problem: what was raised, or what kept the code from running.
        source: the text of the learner's file, from which the line is quoted.

    Returns:
        "Line 41, `the line`: what happened and why. What to do." A message not known is quoted as it is.
    """
    about = About(problem, source)
    message = " ".join(problem.message.split())
    if not problem.kind[:1].isupper():  # no exception, but a limit or the like, in words already
        return f"{_where(about)}: {_ended(message or problem.kind)}"
    said = _said(about)
    if said is None:
        words = f"{problem.kind}: {message}" if message else problem.kind
        return f"{_where(about)}: {_ended(words)}"
    shapes = " and ".join(f"{name} is {shape}" for name, shape in [*about.shapes.items()][:4])
    here = f" Here {shapes}." if shapes else ""
    return f"{_where(about)}: {_ended(said.what)}{here} {_ended(said.do[0].upper() + said.do[1:])}"


def _ended(words: str) -> str:
    return words if words.endswith((".", "!", "?")) else f"{words}."


def _said(about: About) -> Said | None:
    problem = about.problem
    for rule in RULES:
        if rule.kind and not re.fullmatch(rule.kind, problem.kind):
            continue
        match = re.search(rule.message, problem.message, re.DOTALL)
        said = None if match is None else rule.said(match, about)
        if said is not None:
            return said
    return None


def _where(about: About) -> str:
    problem = about.problem
    if problem.line is not None:
        where = f"Line {problem.line}, `{about.text}`" if about.text else f"Line {problem.line}"
    else:
        where = STAGES.get(problem.stage, "While it ran")
    return where + (f" (probe: {problem.probe})" if problem.probe else "")
