"""`explain_file`: a class or function in a file, examined in a process of its own, then explained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ArgumentError
from .. import recipe
from ..designs import steps_of
from ..evidence import Evidence
from ..recipe import State
from .composition import best_call, explain_evidence
from .explanation import Explanation

if TYPE_CHECKING:
    from ..diagnose import Made

SECONDS, MEMORY = 60.0, 4 * 2**30  # the most it may take


def explain_file(path: Path, name: str | None = None, *, trust: bool = False) -> Explanation:
    """Every step in the numbers of a learner's code, with the fault that was found in it, if any.

    Args:
        name: which class or function; None: the one that looks most like multi-head attention.
        trust: run it even where the system offers no fences.

    Raises:
        ArgumentError: no such file or name; no fences and no trust; nothing that could be explained.
    """
    from ..checks import _before_running
    from ..diagnose import diagnose
    from ..inquiry import judge
    from ..sandbox.run import run_file
    from ..source import likeliest, source_of
    from ..source.notebooks import told_by_cell

    source, cells = source_of(path)
    report = _before_running(path, name, source, cells)
    if report is not None:
        raise ArgumentError(
            f"file must run to be explained: {report.summary}; see headwise check {path.name}"
        )
    chosen = likeliest(path, source) if name is None else name
    outcome = run_file(path.resolve(), chosen, seconds=SECONDS, memory=MEMORY, trust=trust, options={})
    evidence = outcome.evidence
    if evidence is not None and evidence.step is not None:
        raise ArgumentError(
            f"name must be a whole attention to be explained: {chosen} is one step of it ({evidence.step}); "
            f"see headwise check {path.name}:{chosen}"
        )
    if (
        evidence is None
        or evidence.weights is None
        or not any(call.output is not None for call in evidence.calls)
    ):
        problems = [outcome.problem, *(evidence.problems if evidence is not None else [])]
        why = next((one.message for one in problems if one is not None), "it gave no numbers")
        raise ArgumentError(
            f"{chosen} must run and have weights to be explained: {why}; see headwise check {path.name}"
        )
    evidence.source, evidence.path = source, str(path)
    diagnosis = diagnose(evidence)
    theirs = _theirs(evidence, diagnosis.faults)  # before the judgement, for which some are a design
    report = judge(evidence, diagnosis)
    told_by_cell(report, cells)
    return explain_evidence(evidence, theirs, report=report)


def _theirs(evidence: Evidence, faults: tuple[Made, ...] | None) -> State | None:
    """The recipe with the fault that explains the learner's numbers, on the first probe where it shows."""
    from ..diagnose import first_difference

    assert evidence.weights is not None
    if faults is None:
        return None
    parted = first_difference(evidence, faults)
    call = best_call(evidence, None if parted is None else parted[0])
    assert call is not None, "the caller looked for one"
    wrong = {**steps_of(evidence.designs)}
    wrong |= {name: step for made in faults for name, step in made.steps.items()}
    return recipe.run(call.given, evidence.weights, evidence.num_heads, wrong)
