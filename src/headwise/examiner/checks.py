"""`check` and `check_file`: examine, diagnose, report."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
from .report import Report

if TYPE_CHECKING:
    from .marking.judge import Judge
    from .marking.template import RemoteJudge, Template
    from .source.likely_classes import Cells


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
        from ..arguments import text_of

        raise ArgumentError(
            f"obj must be a class, a module or a function: got {text_of(obj)}; pass the class itself"
        )
    from .dispatch import examine, judge

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
    from .marking.template import FORKS, Template
    from .several_classes import each_judged
    from .source.likely_classes import line_of_name, number_by_cell, source_of

    start, path = time.perf_counter(), Path(path)
    source, cells = source_of(path)
    several = each_judged(path, source) if name is None else None
    with Template() if template is None and FORKS else nullcontext(template) as shared:
        limits: dict[str, Any] = {"seconds": seconds, "memory": memory, "trust": trust, "template": shared}
        if several is not None:
            alike: dict[str, Any] = {"d_model": d_model, "num_heads": num_heads, **limits}
            checks = [lambda one: check_file(path, one, roles=roles, arguments=arguments, **alike)]
            if roles or arguments:  # which may fit the likeliest class alone
                checks.append(lambda one: check_file(path, one, **alike))
            return several.check_each(*checks)
        options: dict[str, Any] = {"embed_dim": d_model, "num_heads": num_heads}
        if roles:
            options["roles"] = dict(roles)
        report = _judged(path, name, source, cells, options, arguments, limits)
        _try_repairs(report, path, source, cells, options, arguments, limits)
    report.line = line_of_name(source, report.name)
    number_by_cell(report, cells)
    report.on_command_line = True
    report.seconds = time.perf_counter() - start
    return report


def _judged(
    path: Path, name: str | None, source: str, cells: Cells, options: dict[str, Any],
    arguments: Mapping[str, object] | None, limits: dict[str, Any], changed: str | None = None,
) -> Report:  # fmt: skip
    """By another process than the one it is run in; changed: this text in place of the file's."""
    from .sandbox.run import run_file

    with _judge_of(limits["template"], path, name, source, cells, options["num_heads"]) as judge:
        begun = judge.before_running()
        if not isinstance(begun, str):
            return begun
        outcome = run_file(
            path.resolve(), begun, options=options, arguments=arguments, listener=judge, changed=changed,
            **limits,
        )  # fmt: skip
        report = judge.report(outcome.problem)
    report.protections, report.missing_protections = outcome.protections, outcome.missing
    return report


def _try_repairs(
    report: Report, path: Path, source: str, cells: Cells, options: dict[str, Any],
    arguments: Mapping[str, object] | None, limits: dict[str, Any],
) -> None:  # fmt: skip
    """Check the file with its faults' repairs in it: a repair that does not help is not shown."""
    from .source.likely_classes import package_root
    from .source.repairs import repaired

    undefined = any(named.key == "undefined name" for named in report.faults)
    if report.verdict != "wrong" or not report.faults or undefined or limits["template"] is None:
        return
    if cells.first_lines or package_root(path, source) is not None:
        return
    text = source
    for named in sorted(report.faults, key=lambda named: -(named.line or 0)):  # lines above keep their place
        changed = repaired(text, named.line, named.repair)
        named.tried, text = changed is not None, changed or text
    passed = False
    if text != source:
        again = _judged(path, report.name, text, cells, options, arguments, limits, text)
        passed = again.ok
    for named in report.faults:
        named.tried = named.tried and passed


def _judge_of(
    template: Template | None, path: Path, name: str | None, source: str, cells: Cells, num_heads: int | None
) -> AbstractContextManager[Judge | RemoteJudge]:
    """A copy of the template; where there are none, this process."""
    from .sandbox.run import reach_of

    about = str(path), name, source, cells, num_heads, reach_of(path.resolve(), template)
    if template is not None and template.copies:
        from .marking.template import RemoteJudge

        return RemoteJudge(template, *about)
    from .marking.judge import Judge

    return nullcontext(Judge(*about))
