"""`Judge`: what can be said of one file before it runs, what its code is asked, and the report.

It is never in the process that the file runs in: on Linux it is a copy of the template, as that process is,
and `RemoteJudge` speaks for it to the process that was asked.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import socket
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

from ...errors import ArgumentError, HeadwiseError
from ..dispatch import judge
from ..evidence import Evidence, packed, unpacked
from ..exceptions import explain
from ..report import Named, Problem, Report
from ..sandbox.verdicts import HEADER, LONGEST_MESSAGE, Outcome, hidden
from ..source.likely_classes import (
    SENTENCE,
    Cells,
    broken_cell,
    candidates,
    likeliest,
    other_framework,
)
from ..source.names import Undefined, settings_under_main, undefined_names
from ..steps import FAULTS
from .conditions import Refusal, conditions_of
from .secrets import Secrets

if TYPE_CHECKING:
    from ..sandbox.verdicts import Answer

Question = dict[str, Any]  # inputs, mask, numbers for parameters: what `learner.answers` reads
ONE_AT_A_TIME = threading.Lock()  # where a thread judges, and not a process of its own


class Conversation:
    """What the process inside says, and what it is asked then.

    Args:
        reach: paths that the file could read.
        questions: drawn once the evidence is here; what the code answers to them is in the outcome.
    """

    def __init__(
        self, reach: list[str], questions: Callable[[Evidence], list[Question]] = lambda evidence: []
    ) -> None:
        self.reach, self.questions = reach, questions
        self.outcome = Outcome()
        self.ended = False  # it said all there was to say
        self._asked = 0

    def reply(self, text: bytes, numbers: bytes) -> bytes:
        """To evidence, questions; to answers, nothing."""
        try:
            return self._reply(json.loads(text), numbers)
        except Exception as error:  # whoever wrote it may have written anything
            message = f"what came back is no evidence ({type(error).__name__}: {error})"
            self.outcome.problem = Problem("limits", "result", message[:LONGEST_MESSAGE])
            self.outcome.evidence, self.ended = None, True
            return b""

    def _reply(self, said: Any, numbers: bytes) -> bytes:
        outcome = self.outcome
        if self._asked:
            self.ended = True
            outcome.answers = _answers(said, bytearray(numbers), self._asked)
            return b""
        if self.ended or outcome.evidence is not None:
            raise ValueError("more than was asked for")
        if "problem" in said:
            self.ended = True
            outcome.problem = hidden(_problem(said["problem"]), str(said["filename"]), self.reach)
            return b""
        outcome.evidence = Evidence.read(said["evidence"], numbers)
        drawn = self.questions(outcome.evidence)
        self._asked = len(drawn)
        self.ended = not drawn
        if not drawn:
            return b""
        held = bytearray()
        message = json.dumps([packed(one, held) for one in drawn]).encode()
        return HEADER.pack(len(message), len(held)) + message + bytes(held)


def _answers(said: Any, numbers: bytearray, count: int) -> list[Answer]:
    if not isinstance(said, list) or len(said) != count:
        raise ValueError(f"{count} answers were due")
    found: list[Answer] = []
    for one in said:
        if "problem" in one:
            found.append(_problem(one["problem"]))
            continue
        output, chosen = unpacked(one["output"], numbers), one["mask"]
        if not isinstance(output, Tensor):
            raise TypeError("an answer is a tensor")
        found.append((output, chosen if isinstance(chosen, int) else -1))
    return found


def _problem(written: dict[str, object]) -> Problem:
    line = written["line"]
    return Problem(
        str(written["stage"])[:40],
        str(written["kind"])[:200],
        str(written["message"])[:LONGEST_MESSAGE],
        line if isinstance(line, int) else None,
    )


class Judge(Conversation):
    """Of one class or function of a file.

    Args:
        path: of the file, as the report is to say it.
        name: which class or function; None: the one that looks most like multi-head attention.
        source: the text of the file.
        cells: of a notebook.
        num_heads: as the caller asked for; None: whatever suits.
        reach: paths that the file could read.
    """

    def __init__(
        self, path: str, name: str | None, source: str, cells: Cells, num_heads: int | None, reach: list[str]
    ) -> None:
        super().__init__(reach, self._questions)
        self.path, self.name, self.source, self.cells = Path(path), name, source, cells
        self.num_heads = num_heads

    def before_running(self) -> Report | str:
        """A report where none of it is to be run; else the name of what is to be examined.

        Raises:
            ArgumentError: the file cannot be read as Python; nothing in it looks like attention.
        """
        report = before_running(self.path, self.name, self.source, self.cells)
        if report is not None:
            return report
        if self.name is None:
            self.name = likeliest(self.path, self.source)
        self._secrets = Secrets(conditions_of(self.source, self.name), self.num_heads)
        return self.name

    def _questions(self, evidence: Evidence) -> list[Question]:
        return self._secrets.questions(evidence)

    def heard(self, text: bytes, numbers: bytes) -> tuple[bytes, bool]:
        """The reply, and whether that was all there was to say."""
        return self.reply(text, numbers), self.ended

    def report(self, end: Problem | None) -> Report:
        """The verdict, once the process has ended.

        Args:
            end: what it ended by, where that was no end of its own.

        Raises:
            ArgumentError: no such name in the file.
        """
        outcome = self.outcome
        problem = end or outcome.problem
        if problem is not None and problem.kind == ArgumentError.__name__:
            raise ArgumentError(problem.message)  # no such name
        evidence = outcome.evidence or self._nothing()
        evidence.source, evidence.path = self.source, str(self.path)  # ours, not what came back
        if problem is not None:
            evidence.problems.append(problem)
        try:
            with ONE_AT_A_TIME:
                report = judge(evidence)
                refusal = self._secrets.verdict(evidence, outcome.answers) if report.ok else None
        except Exception as error:
            # an honest examination brings back what fits together; what the code wrote itself need not
            evidence = self._nothing()
            message = f"what came back does not fit together: {error}"
            evidence.problems.append(Problem("limits", "result", message))
            return judge(evidence)
        if refusal is not None:
            _refuse(report, refusal)
        elif outcome.evidence is not None and problem is not None and not report.faults:
            report.judged = False  # it was examined, and ended while it was asked again
        return report

    def _nothing(self) -> Evidence:
        return Evidence(str(self.name), "class", path=str(self.path), source=self.source)


def _refuse(report: Report, refusal: Refusal) -> None:
    """Right by what it brought back, and not by what it answered then."""
    report.ok, report.judged = False, refusal.wrong
    report.problems.append(Problem("call", refusal.kind, refusal.words))
    report.explained.append(refusal.words)
    report.summary = refusal.words


def before_running(path: Path, name: str | None, source: str, cells: Cells) -> Report | None:
    """What can be said without running it: it is no Python, or uses names that nothing defines.

    Raises:
        ArgumentError: it cannot be read as Python.
    """
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
    """Return True if an undefined name of a notebook is within the definition that is to be checked."""
    wanted = (name or "").partition(".")[0]
    checked = [each for each in candidates(source) if not wanted or each.name == wanted][:1]
    return any(each.first_line <= missing.line <= each.last_line for each in checked)


def serve(talk: int) -> NoReturn:
    """In a copy of the template: the judge of one file, for as long as there is somebody to ask it."""
    with socket.socket(fileno=talk) as wire, wire.makefile("rwb") as stream:
        one = Judge(*pickle.load(stream))
        while True:
            try:
                what, given = pickle.load(stream)
            except (EOFError, ConnectionError):
                os._exit(0)
            try:
                answer: object = getattr(one, what)(*given)
            except Exception as error:
                if not isinstance(error, HeadwiseError):  # ours: where it happened is not to be seen there
                    error.add_note(traceback.format_exc())
                answer = error
            pickle.dump(answer, stream)
            stream.flush()
