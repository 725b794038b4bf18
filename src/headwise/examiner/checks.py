"""`check` and `check_file`: examine, diagnose, report."""

from __future__ import annotations

import ast
import inspect
import os
import time
from pathlib import Path

from ..arguments import told
from ..errors import ArgumentError, renamed
from .evidence import Evidence, Problem
from .faults import FAULTS
from .report import Named, Report

__all__ = ["check", "check_file"]


@renamed(embed_dim="d_model")
def check(
    obj: object,
    *,
    roles: dict[str, str] | None = None,
    d_model: int | None = None,
    num_heads: int | None = None,
) -> Report:
    """Whether a class, a module or a function is multi-head attention, and if not, which mistake it makes.

    The code runs here, in this process, with all its rights: for files of others there is `check_file`, and
    `headwise check FILE`. It is called some hundred times, and what it prints is printed each time: that
    cannot be held back for one thread alone. Generators of random numbers are put back.

    Args:
        obj: a class, an `nn.Module`, or a function of q, k, v.
        roles: where headwise cannot find the projections itself: "q", "k", "v", "o" -> the parameter's name.
        d_model, num_heads: to build a class with, where the usual ones do not suit it.

    Raises:
        ArgumentError: something that is none of these.

    Example:
        >>> import torch
        >>> from headwise.examiner import check
        >>> check(torch.nn.MultiheadAttention).ok
        True
    """
    if not callable(obj):
        raise ArgumentError(
            f"obj must be a class, a module or a function: got {told(obj)}; pass the class itself"
        )
    from .examine import examine
    from .judging import judge

    start = time.perf_counter()
    source, path = _source_of(obj)
    report = judge(
        examine(obj, source=source, path=path, roles=roles, embed_dim=d_model, num_heads=num_heads)
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


@renamed(embed_dim="d_model")
def check_file(
    path: str | os.PathLike[str],
    name: str | None = None,
    *,
    seconds: float = 60.0,
    memory: int = 4 * 2**30,
    trust: bool = False,
    d_model: int | None = None,
    num_heads: int | None = None,
) -> Report:
    """The same for a file, which is run in a process of its own, fenced in.

    Args:
        path: a file of Python source.
        name: which class or function; None: the one that looks most like multi-head attention.
        seconds, memory: the most it may take: seconds, bytes.
        trust: run it even where the system offers no fences.
        d_model, num_heads: as in `check`.

    Raises:
        ArgumentError: no such file or name; no fences and no trust.
    """
    from .judging import judge
    from .sandbox import run_file

    start, path = time.perf_counter(), Path(path)
    source = _read(path)
    report = _before_running(path, name, source)
    if report is None:
        if name is None:
            name = _likeliest(path, source)
        options = {"embed_dim": d_model, "num_heads": num_heads}
        outcome = run_file(path.resolve(), name, seconds=seconds, memory=memory, trust=trust, options=options)
        if outcome.problem is not None and outcome.problem.kind == ArgumentError.__name__:
            raise ArgumentError(outcome.problem.message)  # no such name
        evidence = outcome.evidence or Evidence(name, "class", path=str(path), source=source)
        evidence.source, evidence.path = source, str(path)  # ours, not what came back
        if outcome.problem is not None:
            evidence.problems.append(outcome.problem)
        try:
            report = judge(evidence)
        except Exception as error:
            # an honest examination brings back what fits together; what the code wrote itself need not
            forged = Problem("limits", "result", f"what came back does not fit together: {error}")
            report = judge(Evidence(name, "class", path=str(path), source=source, problems=[forged]))
        report.protections = outcome.protections
    report.seconds = time.perf_counter() - start
    return report


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ArgumentError(f"file must be readable: {path}: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"file must be Python source in UTF-8: {path}; save it as UTF-8") from error


def _likeliest(path: Path, source: str) -> str:
    from .source import candidates

    found = candidates(source)
    if not found:
        raise ArgumentError(
            f"file must define attention to check: nothing in {path} looks like it; "
            "name the class or function, FILE:NAME"
        )
    return found[0].name


def _before_running(path: Path, name: str | None, source: str) -> Report | None:
    """What can be said without running it: it is no Python, or uses names that nothing defines."""
    from .exceptions import explain
    from .source import undefined_names

    try:
        ast.parse(source)
    except (RecursionError, MemoryError, ValueError):  # nested too deep, or with a NUL in it
        raise ArgumentError(f"file must be Python source that can be read: {path} is not; check it") from None
    except SyntaxError as error:
        problem = Problem("import", "SyntaxError", error.msg, error.lineno)
        report = Report(name or path.stem, ok=False, summary="", path=str(path), problems=[problem])
        report.explained = [explain(problem, source)]
        report.summary = report.explained[0]
        return report
    missing = undefined_names(source)
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
