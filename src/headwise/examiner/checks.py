"""`check` and `check_file`: examine, diagnose, report."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, HeadwiseError
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
    """Check whether a class, module or function computes multi-head attention, and name its mistake if not.

    The code runs in this process with all its rights; for code of others use `check_file` or `headwise check
    FILE`. It is called about a hundred times, so anything that it prints appears that often. The state of
    random number generators is restored.

    Args:
        obj: a class, an `nn.Module`, or a function of q, k, v.
        roles: a mapping from "q", "k", "v", "o" to names of parameters, if headwise cannot find the
            projections.
        d_model, num_heads: sizes for building the class, if the default sizes do not work.
        arguments: a mapping from names to values of other arguments of the constructor ("config.n_head" is a
            field of its configuration), or of parameters of the function that are no tensors.

    Raises:
        ArgumentError: obj is not a class, a module or a function, or does not have these arguments.

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
    """Return the text and the path of the file that defines obj; None where there is none."""
    from .source.parsed import find_source

    owner = obj if inspect.isclass(obj) or inspect.isroutine(obj) else type(obj)
    try:
        path = inspect.getsourcefile(owner)
        lines, _ = find_source(owner)
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
    """Check a file, in a separate sandboxed process.

    A file is right only if it is also right for weights and inputs that are drawn in this process after the
    examination, so code that tampers with the examination does not pass. Gradients, dropout and the state
    dict are judged from the examination alone.

    Args:
        path: a Python file, or a notebook (`.ipynb`), whose code cells are run in order.
        name: the class or function; None for those that look most like multi-head attention. If one of them
            is wrong, the file is wrong.
        seconds, memory: limits, in seconds of processor time and in bytes.
        trust: run the file even if this system has no sandbox.
        d_model, num_heads, roles: as in `check`.
        arguments: as in `check`; the values are literals.
        template: a running `Template` to use for many files; None starts one for this file.

    Raises:
        ArgumentError: there is no such file or name, or there is no sandbox and trust is False.
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
            shared_options: dict[str, Any] = {"d_model": d_model, "num_heads": num_heads, **limits}
            checks = [lambda each: check_file(path, each, roles=roles, arguments=arguments, **shared_options)]
            if roles or arguments:  # they may fit the likeliest class only
                checks.append(lambda each: check_file(path, each, **shared_options))
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
    """Return the report of a judge process on the file, or on the text `changed` in its place."""
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
    """Check the file with the repairs of its faults; a repair that does not pass is not shown.

    If the process for the repaired file cannot start, the verdict stays and the report says so.
    """
    from .source.likely_classes import package_root
    from .source.repairs import repaired

    undefined = any(named.key == "undefined name" for named in report.faults)
    if report.verdict != "wrong" or not report.faults or undefined or limits["template"] is None:
        return
    if cells.first_lines or package_root(path, source) is not None:
        return
    text = source
    for named in sorted(
        report.faults, key=lambda named: -(named.line or 0)
    ):  # from the end, so that line numbers stay valid
        changed = repaired(text, named.line, named.repair)
        named.tried, text = changed is not None, changed or text
    passed = False
    if text != source:
        try:
            passed = _judged(path, report.name, text, cells, options, arguments, limits, text).ok
        except (HeadwiseError, OSError) as error:
            report.not_judged.append(f"the repair was not tried: {error}")
            for named in report.faults:
                named.tried = None if named.tried else False
            return
    for named in report.faults:
        named.tried = named.tried and passed


def _judge_of(
    template: Template | None, path: Path, name: str | None, source: str, cells: Cells, num_heads: int | None
) -> AbstractContextManager[Judge | RemoteJudge]:
    """Return a judge in a copy of the template, or in this process if copies are not available."""
    from .sandbox.run import reach_of

    about = str(path), name, source, cells, num_heads, reach_of(path.resolve(), template)
    if template is not None and template.copies:
        from .marking.template import RemoteJudge

        return RemoteJudge(template, *about)
    from .marking.judge import Judge

    return nullcontext(Judge(*about))
