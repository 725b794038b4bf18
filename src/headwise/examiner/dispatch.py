"""Examine and judge code: a whole attention, or a single step of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .evidence import Evidence
from .examine.caller import Caller
from .examine.environment import CAUGHT, files_of, float64_environment, neutral_torch_state, problem_of
from .examine.examination import checked_arguments, examine_attention, new_evidence
from .report import Report
from .source.unwritten import unwritten
from .steps import bound, examine_step, judge_step, owner_of, step_of, whole_of
from .steps.blocks_and_scores import told_as
from .verdict import judge_whole

if TYPE_CHECKING:
    from .diagnosis import Diagnosis


def examine(
    obj: object,
    *,
    source: str | None = None,
    path: str | None = None,
    roles: dict[str, str] | None = None,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Evidence:
    """Build it, find how it wants to be called and where its projections are, and ask it the probes.

    Nothing the code raises is raised here: it becomes a `Problem`. Instances are examined on a deep copy.

    Args:
        obj: a class, an instance or a function.
        source: the text of the file it stands in.
        path: of that file.
        roles: "q", "k", "v", "o" -> the parameter's path, where it cannot be found.
        embed_dim: the width to build a class with.
        num_heads: the number of heads to build a class with.
        arguments: what to give the constructor, a field of its configuration ("config.n_head"), or a
            parameter of the function that takes no tensor: name -> value.

    Raises:
        ArgumentError: arguments names what is not there.
    """
    return understand(obj, source, path, roles, embed_dim, num_heads, arguments)[0]


def understand(
    obj: object,
    source: str | None = None,
    path: str | None = None,
    roles: dict[str, str] | None = None,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    arguments: Mapping[str, object] | None = None,
) -> tuple[Evidence, Caller | None]:
    """Return the evidence, and the `Caller` of the code (None where it could not be called)."""
    obj = whole_of(obj)
    constructor_arguments = checked_arguments(owner_of(obj)[0] or obj, arguments)
    evidence = new_evidence(obj, source, path)
    step = step_of(obj, evidence.name, source)
    if step is None:
        return examine_attention(obj, source, path, roles, embed_dim, num_heads, constructor_arguments, bound)
    with float64_environment():
        try:
            examine_step(obj, step, evidence, arguments, embed_dim=embed_dim, num_heads=num_heads)
        except CAUGHT as error:  # ours or theirs: the report says it
            evidence.problems.append(problem_of(error, "call", files_of(obj)))
    return evidence, None


@neutral_torch_state()
def judge(evidence: Evidence, diagnosis: Diagnosis | None = None) -> Report:
    """Return the report on the evidence. `diagnosis` is passed where it has been made already."""
    if evidence.step is not None:
        report = judge_step(evidence)
    else:
        report = told_as(evidence, judge_whole(evidence, diagnosis))
    if not report.ok:
        _report_unwritten(report, evidence)
    return report


def _report_unwritten(report: Report, evidence: Evidence) -> None:
    """Where the code stops at a part that is not written yet, report that and nothing else."""
    problems = [f"{problem.kind}: {problem.message}" for problem in report.problems]
    messages = [*report.explained, *evidence.tried, *problems]
    if not any("NotImplementedError" in message or "returned None;" in message for message in messages):
        return
    class_name = evidence.name.partition(".")[0]
    for function in unwritten(evidence.source or ""):
        if function.name.partition(".")[0] == class_name:
            report.judged = False
            report.summary = (
                f"Line {function.line}: {function.name} is still to be written; write it and check again."
            )
            report.problems, report.explained, report.tried = [], [report.summary], []
            report.counsel, report.counsel_for_files = [], []
            return
