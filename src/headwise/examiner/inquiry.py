"""What a file leaves to be written: exercises begin so."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .evidence import Evidence
from .examine.caller import Caller
from .examine.examination import begun, known, understand_whole
from .examine.surroundings import CAUGHT, files_of, problem_of, surroundings, undisturbed
from .judging import judge_whole
from .report import Report
from .source.parsed import tree_of
from .steps import bound, examine_step, judge_step, owner_of, step_of, whole_of
from .steps.wholes import told_as

if TYPE_CHECKING:
    from .diagnose import Diagnosis


@dataclass(frozen=True)
class Unwritten:
    """A function or method whose body is left to the learner."""

    name: str  # "MultiHeadAttention.forward"
    line: int
    task: str  # the first line of its docstring


def unwritten(source: str) -> list[Unwritten]:
    """What raises NotImplementedError, or has no body but `...` or `pass`; nothing in what cannot be read."""
    tree = tree_of(source)
    if tree is None:
        return []
    found: list[Unwritten] = []
    _look_into(tree, "", found)
    return found


def _look_into(node: ast.AST, inside: str, found: list[Unwritten]) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            _look_into(child, f"{inside}{child.name}.", found)
        elif isinstance(child, ast.FunctionDef):
            line = _left_open(child)
            if line is not None:
                told = (ast.get_docstring(child) or "").partition("\n")[0]
                found.append(Unwritten(f"{inside}{child.name}", line, told))


def _left_open(function: ast.FunctionDef) -> int | None:
    """The line that says it is not written."""
    body = [one for one in function.body if not _is_text(one)]
    for one in ast.walk(function):
        if isinstance(one, ast.Raise) and "NotImplementedError" in ast.unparse(one):
            return one.lineno
    bare = all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and one.value.value is ...)
        for one in body
    )
    return function.body[-1].lineno if bare else None


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


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
    given = known(owner_of(obj)[0] or obj, arguments)
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
    if not report.ok:
        _tell_what_is_left(report, evidence)
    return report


def _tell_what_is_left(report: Report, evidence: Evidence) -> None:
    """Where nothing was judged because a part of it is not written yet, that is all there is to say."""
    met = [*report.explained, *evidence.tried, *(f"{one.kind}: {one.message}" for one in report.problems)]
    if not any("NotImplementedError" in words or "returned None;" in words for words in met):
        return
    whole = evidence.name.partition(".")[0]
    left = [one for one in unwritten(evidence.source or "") if one.name.partition(".")[0] == whole]
    if left:
        first = left[0]
        report.judged, report.summary = False, f"Line {first.line}: {first.name} is still to be written."
        report.problems, report.explained, report.tried = [], [report.summary], []
        report.counsel, report.counsel_for_files = [], []
