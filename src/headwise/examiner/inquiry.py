"""`understand`, `examine` and `judge`: a whole attention or a single step, whichever it is.

The rooms below do not know of this: `examine/` and `judging.py` see wholes, `steps/` single steps, which may
hold wholes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .evidence import Evidence
from .examine.call import Caller
from .examine.examination import begun, known, understand_whole
from .examine.surroundings import CAUGHT, files_of, problem_of, surroundings, undisturbed
from .judging import judge_whole
from .report import Report
from .source.unwritten import unwritten
from .steps import bound, examine_step, judge_step, owner_of, step_of, told_as, whole_of

if TYPE_CHECKING:
    from .diagnose import Diagnosis


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
    """The evidence, and what calls the code, where it could be called."""
    obj = whole_of(obj)
    given = known(owner_of(obj), arguments)
    evidence = begun(obj, source, path)
    step = step_of(obj, evidence.name, source)
    if step is None:
        return understand_whole(obj, source, path, roles, embed_dim, num_heads, given, bound)
    with surroundings():
        try:
            examine_step(obj, step, evidence, arguments, embed_dim=embed_dim, num_heads=num_heads)
        except CAUGHT as error:  # ours or theirs, the report says what there is
            evidence.problems.append(problem_of(error, "call", files_of(obj)))
    return evidence, None


@undisturbed()
def judge(evidence: Evidence, diagnosis: Diagnosis | None = None) -> Report:
    """The verdict; `diagnosis`: where it has been made already."""
    if evidence.step is not None:
        report = judge_step(evidence)
    else:
        report = told_as(evidence, judge_whole(evidence, diagnosis))
    if report.verdict == "not judged":
        _tell_what_is_left(report, evidence)
    return report


def _tell_what_is_left(report: Report, evidence: Evidence) -> None:
    """Where nothing was judged because a part of it is not written yet, that is all there is to say."""
    met = [*report.explained, *evidence.tried, *(f"{one.kind}: {one.message}" for one in report.problems)]
    if not any("NotImplementedError" in words for words in met):
        return
    whole = evidence.name.partition(".")[0]
    left = [one for one in unwritten(evidence.source or "") if one.name.partition(".")[0] == whole]
    if left:
        first = left[0]
        report.summary = f"Line {first.line}: {first.name} is still to be written."
        report.problems, report.explained, report.tried = [], [report.summary], []
        report.counsel, report.counsel_for_files = [], []
