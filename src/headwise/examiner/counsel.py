"""What is the learner's doing, and what to do where nothing could be judged.

A crash is the learner's where it happened at a line of theirs, in their own terms: not where headwise made up
the arguments, where a package or a device is missing, or where a fence was in the way.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from .evidence import Evidence, Problem
from .report import Report
from .source import candidates
from .source.parsed import Definition, text_of, tree_of
from .source.under_main import names_under_main

OURS = {"guess", "roles", "shape"}  # arguments we made up; what we could not find, or not read
THEIRS = {
    "timeout",
    "exit",
    "segfault",
    "crash",
}  # of the limits: an endless loop, an end of their own making
HERE = re.compile(
    r"No module named|not compiled with CUDA|Found no NVIDIA driver|No CUDA GPUs|CUDA is not available"
    r"|Torch not compiled|MPS"
)
UNMERGED = re.compile(r"returned a tensor \[\d+, \d+, \d+, \d+\]")
UNDEFINED = re.compile(r"name '(\w+)' is not defined")
NO_FORWARD = re.compile(r"missing the required \"forward\"")
SIZES = re.compile(r"heads|width|d_model|embed|dim|divisible", re.IGNORECASE)


def is_theirs(problem: Problem, evidence: Evidence) -> bool:
    """Whether the code itself is to blame, whatever it had been called with."""
    if problem.stage == "limits":
        return problem.kind in THEIRS
    if NO_FORWARD.search(problem.message):
        return True
    if problem.kind == "shape" and evidence.kind == "class" and UNMERGED.search(problem.message):
        return True  # the heads are still apart
    if (name := UNDEFINED.match(problem.message)) and name[1] in names_under_main(evidence.source or ""):
        return False  # whoever runs the file has it
    if problem.kind in OURS or HERE.search(problem.message) or problem.line is None:
        return False
    return not (problem.stage in ("build", "call") and _is_refusal(problem, evidence.source))


def _is_refusal(problem: Problem, source: str | None) -> bool:
    """Whether a check of the code's own did not like what it was given."""
    return re.match(r"(assert|raise)\b", text_of(source or "", problem.line)) is not None


def advise(report: Report, evidence: Evidence) -> None:
    """What to pass, in Python and on the command line."""
    for words, for_files in _advice(report, evidence):
        report.counsel.append(words)
        report.counsel_for_files.append(for_files)


def _advice(report: Report, evidence: Evidence) -> list[tuple[str, str]]:
    problem = next((one for one in report.problems if not is_theirs(one, evidence)), None)
    file = "FILE" if evidence.path is None else Path(evidence.path).name
    command = f"headwise check {file}:{evidence.name}"
    said: list[tuple[str, str]] = []
    if problem is None or problem.stage == "limits" or problem.kind == "NotImplementedError":
        return said
    if package := re.search(r"No module named '(\w+)", problem.message):
        both = f"install what it imports, where headwise runs: pip install {package[1]}"
        return [(both, both)]
    if HERE.search(problem.message):
        both = "let the code run where its inputs are: x.device in place of .cuda() or a fixed device"
        return [(both, both)]
    if problem.kind == "roles":
        said.append(
            (
                'say which parameter is which: roles={"q": NAME, "k": NAME, "v": NAME, "o": NAME}',
                f"say which parameter is which: {command} --role q=NAME --role k=NAME --role v=NAME "
                "--role o=NAME",
            )
        )
    elif needed := _needed(evidence):
        example = needed[0]
        said.append(
            (
                f"say what to build it with: arguments={{{', '.join(f'{one!r}: ...' for one in needed)}}}",
                f"say what to build it with: {command} {' '.join(f'--arg {one}=VALUE' for one in needed)}"
                + (f" (a number, a word in quotes, True, None: --arg {example}=64)" if example else ""),
            )
        )
    said.append(
        (
            "where other sizes suit it: d_model=32, num_heads=4",
            f"where other sizes suit it: {command} --d-model 32 --heads 4",
        )
    )
    others = [one.name for one in candidates(evidence.source or "") if one.name != evidence.name][:4]
    if others:
        said.append(
            (
                f"where another class or function was meant, check that: {', '.join(others)}",
                f"where another class or function was meant: headwise check {file}:{others[0]}"
                + (f" (there are also {', '.join(others[1:])})" if others[1:] else ""),
            )
        )
    return said


def _needed(evidence: Evidence) -> list[str]:
    """The constructor's parameters without a default."""
    tree = tree_of(evidence.source or "")
    node = None if tree is None else _definition(tree, evidence.name)
    body = node.body if isinstance(node, ast.ClassDef) else []
    own = [one for one in body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    if not own:
        return []
    spec = own[0].args
    every = [one.arg for one in (*spec.posonlyargs, *spec.args)]
    required = every[: len(every) - len(spec.defaults)]
    required += [
        one.arg for one, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if default is None
    ]
    return [one for one in required if one not in ("self", "cls")]


def _definition(tree: ast.Module, name: str) -> Definition | None:
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return node
    return None
