"""Single steps of attention, each examined by itself: softmax, a split into heads, a mask, a block.

    single_steps  which step a function is; builds, asks and judges it
    questions ──► own_softmax, arrangements, mask_functions, score_functions, blocks ──► counterfactuals
    (runs code)   (what each step is asked, its right answers and its faults)            (reads numbers)
                  block_runs runs a block, block_faults says what can be wrong, blocks judges

The library of faults takes the steps' faults from here, so nothing that needs the library is imported before
it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..evidence import Evidence
    from ..report import Report

__all__ = ["bound", "examine_step", "judge_step", "owner_of", "step_of", "told_as", "whole_of"]


def step_of(obj: object, name: str, source: str | None = None) -> str | None:
    """Which single step this is; None: a whole attention."""
    from . import single_steps

    return single_steps.step_of(obj, name, source)


def examine_step(
    obj: object,
    step: str,
    evidence: Evidence,
    arguments: Mapping[str, object] | None = None,
    *,
    embed_dim: int | None = None,
    num_heads: int | None = None,
) -> None:
    """Ask it, and fill `Evidence.step` and `.asked`."""
    from . import single_steps

    single_steps.examine_step(obj, step, evidence, arguments, embed_dim=embed_dim, num_heads=num_heads)


def judge_step(evidence: Evidence) -> Report:
    """The verdict on a single step."""
    from . import single_steps

    return single_steps.judge_step(evidence)


def told_as(evidence: Evidence, report: Report) -> Report:
    """A report on a function without projections, or on one head, in words of its own."""
    from . import score_functions

    return score_functions.told_as(evidence, report)


def whole_of(obj: object) -> object:
    """The class, where its forward was named."""
    from . import single_steps

    return single_steps.whole_of(obj)


def owner_of(obj: object) -> object:
    """The class of a method that was taken from it: what is built with `arguments`; else the thing itself."""
    from . import single_steps

    return single_steps.owner_of(obj)[0] or obj


def bound(
    obj: object,
    evidence: Evidence,
    arguments: Mapping[str, object] | None,
    embed_dim: int | None,
    num_heads: int | None,
) -> object:
    """A method taken from its class, of an instance that is built here; inside `surroundings`."""
    from . import single_steps

    return single_steps.bound(obj, evidence, arguments, embed_dim, num_heads)
