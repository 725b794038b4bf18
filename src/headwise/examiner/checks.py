"""`check` and `check_file`: examine, diagnose, report."""

from __future__ import annotations

import ast
import inspect
import os
import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import text_of
from ..errors import ArgumentError
from .evidence import Evidence, Problem
from .report import Named, Report
from .steps.single_steps import FAULTS

if TYPE_CHECKING:
    from .desk.conditions import Refusal
    from .desk.template import Template
    from .source.likely_classes import Cells
    from .source.names import Undefined

JUDGE = threading.Lock()  # many files are examined at once, and judged one by one


def check(
    obj: object,
    *,
    roles: dict[str, str] | None = None,
    d_model: int | None = None,
    num_heads: int | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Report:
    """Whether a class, a module or a function is multi-head attention, and if not, which mistake it makes.

    The code runs here, in this process, with all its rights: for files of others there is `check_file`, and
    `headwise check FILE`. It is called some hundred times, and what it prints is printed each time: that
    cannot be held back for one thread alone. Generators of random numbers are put back.

    Args:
        obj: a class, an `nn.Module`, or a function of q, k, v.
        roles: where headwise cannot find the projections itself: "q", "k", "v", "o" -> the parameter's name.
        d_model, num_heads: to build a class with, where the usual ones do not suit it.
        arguments: what else to give its constructor ("config.n_head" for a field of its configuration), or to
            parameters of the function that take no tensor: name -> value.

    Raises:
        ArgumentError: something that is none of these; arguments that it does not have.

    Example:
        >>> import torch
        >>> from headwise.examiner import check
        >>> check(torch.nn.MultiheadAttention).ok
        True
    """
    if not callable(obj):
        raise ArgumentError(
            f"obj must be a class, a module or a function: got {text_of(obj)}; pass the class itself"
        )
    from .inquiry import examine, judge

    start = time.perf_counter()
    source, path = _source_of(obj)
    report = judge(
        examine(
            obj,
            source=source,
            path=path,
            roles=roles,
            embed_dim=d_model,
            num_heads=num_heads,
            arguments=arguments,
        )
    )
    report.protections = ["none: it ran in this process"]
    report.seconds = time.perf_counter() - start
    return report


def _source_of(obj: object) -> tuple[str | None, str | None]:
    """The text of the file it stands in, and its path; None where there is none."""
    owner = obj if inspect.isclass(obj) or inspect.isroutine(obj) else type(obj)
    try:
        path = inspect.getsourcefile(owner)
        lines, _ = inspect.findsource(owner)
    except (OSError, TypeError):
        return None, None
    return "".join(lines), path


def check_file(
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    seconds: float = 60.0,
    memory: int = 4 * 2**30,
    trust: bool = False,
    d_model: int | None = None,
    num_heads: int | None = None,
    roles: dict[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
    template: Template | None = None,
) -> Report:
    """The same for a file, which is run in a process of its own, fenced in.

    It is right only if it also is with weights and inputs that are drawn here once its code was examined:
    what the code could do to the examination does not make it right. Gradients, dropout and what its state
    dict holds are taken as examined.

    Args:
        path: a file of Python source, or a notebook (`.ipynb`): its code cells in order.
        name: which class or function; None: the one that looks most like multi-head attention, and others
            that are attention as much as it is; one that is wrong makes the file wrong.
        seconds, memory: the most each may take: seconds, bytes.
        trust: run it even where the system offers no fences.
        d_model, num_heads, roles: as in `check`.
        arguments: for its constructor, or a function's parameters that are no tensors: literals.
        template: a `Template` that is running already, for many files; None: one for this file.

    Raises:
        ArgumentError: no such file or name; no fences and no trust.
    """
    from .desk.conditions import conditions_of
    from .desk.secrets import Secrets
    from .desk.template import Template
    from .inquiry import judge
    from .sandbox.run import run_file
    from .several import each_judged
    from .source.likely_classes import likeliest, line_of_name, source_of, told_by_cell

    start, path = time.perf_counter(), Path(path)
    source, cells = source_of(path)
    if name is None and (several := each_judged(path, source)) is not None:
        with Template() if template is None else nullcontext(template) as shared:
            alike: dict[str, Any] = {
                "seconds": seconds, "memory": memory, "trust": trust, "d_model": d_model,
                "num_heads": num_heads, "template": shared,
            }  # fmt: skip
            checks = [lambda one: check_file(path, one, roles=roles, arguments=arguments, **alike)]
            if roles or arguments:  # which may fit the likeliest class alone
                checks.append(lambda one: check_file(path, one, **alike))
            return several.check_each(*checks)
    report = _before_running(path, name, source, cells)
    if report is None:
        if name is None:
            name = likeliest(path, source)
        options: dict[str, Any] = {"embed_dim": d_model, "num_heads": num_heads}
        if roles:
            options["roles"] = dict(roles)
        secrets = Secrets(conditions_of(source, name), num_heads)
        outcome = run_file(
            path.resolve(), name, seconds=seconds, memory=memory, trust=trust, options=options,
            arguments=arguments, template=template, questions=secrets.questions,
        )  # fmt: skip
        if outcome.problem is not None and outcome.problem.kind == ArgumentError.__name__:
            raise ArgumentError(outcome.problem.message)  # no such name
        evidence = outcome.evidence or Evidence(name, "class", path=str(path), source=source)
        evidence.source, evidence.path = source, str(path)  # ours, not what came back
        if outcome.problem is not None:
            evidence.problems.append(outcome.problem)
        try:
            waiting = time.perf_counter()
            with JUDGE:
                start += time.perf_counter() - waiting  # for the judge, who is at another file
                report = judge(evidence)
                refusal = secrets.verdict(evidence, outcome.answers) if report.ok else None
        except Exception as error:
            # an honest examination brings back what fits together; what the code wrote itself need not
            forged = Problem("limits", "result", f"what came back does not fit together: {error}")
            report = judge(Evidence(name, "class", path=str(path), source=source, problems=[forged]))
            refusal = None
        if refusal is not None:
            _refuse(report, refusal)
        elif outcome.evidence is not None and outcome.problem is not None and not report.faults:
            report.judged = False  # it was examined, and ended while it was asked again
        report.protections = outcome.protections
    report.line = line_of_name(source, report.name)
    told_by_cell(report, cells)
    report.on_command_line = True
    report.seconds = time.perf_counter() - start
    return report


def _refuse(report: Report, refusal: Refusal) -> None:
    """Right by what it brought back, and not by what it answered then."""
    report.ok, report.judged = False, refusal.wrong
    report.problems.append(Problem("call", refusal.kind, refusal.words))
    report.explained.append(refusal.words)
    report.summary = refusal.words


def _before_running(path: Path, name: str | None, source: str, cells: Cells) -> Report | None:
    """What can be said without running it: it is no Python, or uses names that nothing defines."""
    from .exceptions import explain
    from .source.frameworks import SENTENCE, other_framework
    from .source.likely_classes import broken_cell, candidates
    from .source.names import undefined_names
    from .source.under_main import settings_under_main

    try:
        if (broken := broken_cell(source, cells)) is not None:
            raise broken
        ast.parse(source)
    except (RecursionError, MemoryError, ValueError):  # nested too deep, or with a NUL in it
        raise ArgumentError(f"file must be Python source that can be read: {path} is not; check it") from None
    except SyntaxError as error:
        problem = Problem("import", "SyntaxError", error.msg, error.lineno)
        report = Report(name or path.stem, ok=False, summary="", path=str(path), problems=[problem])
        report.explained = [explain(problem, source)]
        report.summary = report.explained[0]
        return report
    framework = other_framework(source, name)
    if framework is not None:
        words = SENTENCE.format(framework)
        name = name or next((one.name for one in candidates(source)), path.stem)
        return Report(name, ok=False, summary=words, path=str(path), judged=False)
    settings = settings_under_main(source)
    missing = [unknown for unknown in undefined_names(source) if unknown.name not in settings]
    if cells.first_lines:
        missing = [one for one in missing if _matters(one, name, source)]
    if not missing:
        return None
    report = Report(name or path.stem, ok=False, summary="", path=str(path))
    for one in missing:
        problem = Problem("import", "NameError", f"name '{one.name}' is not defined", one.line)
        report.problems.append(problem)
        report.explained.append(explain(problem, source))
        detail = f"found before running anything, in line {one.line}"
        named = Named.of(FAULTS["undefined name"], detail, one.line, one.text)
        named.title, named.repair = f"{one.name} is used but never defined", one.suggestion or named.repair
        report.faults.append(named)
    names = ", ".join(dict.fromkeys(one.name for one in missing))
    report.summary = f"undefined name: {names}; nothing was run"
    return report


def _matters(missing: Undefined, name: str | None, source: str) -> bool:
    """In a notebook, what other cells lack is no matter of the attention; and some names are always there."""
    from .source.likely_classes import GIVEN, candidates

    wanted = (name or "").partition(".")[0]
    found = [one for one in candidates(source) if not wanted or one.name == wanted][:1]
    inside = any(one.first_line <= missing.line <= one.last_line for one in found)
    return inside and missing.name not in GIVEN
