"""`Judge`: checks a file before it runs, sends hidden probes to its code, and makes the report.

It never runs in the process of the file. On Linux it runs in a copy of the template process, and
`RemoteJudge` passes calls on to it.
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
from .hidden_probes import HiddenProbes
from .requirements import Refusal, facts_of_source

if TYPE_CHECKING:
    from ..sandbox.verdicts import Answer

Question = dict[str, Any]  # inputs, mask, numbers for parameters: what `learner.answers` reads
ONE_AT_A_TIME = threading.Lock()  # if judges run as threads and not as processes


class Conversation:
    """The exchange with the process that runs the file: evidence, questions, answers.

    Args:
        reach: paths that the file could read.
        questions: returns the questions for the evidence; the answers are stored in the outcome.
    """

    def __init__(
        self, reach: list[str], questions: Callable[[Evidence], list[Question]] = lambda evidence: []
    ) -> None:
        self.reach, self.questions = reach, questions
        self.outcome = Outcome()
        self.ended = False  # the process has sent everything
        self._expected = 0  # answers

    def reply(self, text: bytes, numbers: bytes) -> bytes:
        """Return the questions in reply to evidence, and b"" in reply to answers."""
        try:
            return self._reply(json.loads(text), numbers)
        except Exception as error:  # the code can have sent anything
            message = f"the process of the file sent no valid evidence ({type(error).__name__}: {error})"
            self.outcome.problem = Problem("limits", "result", message[:LONGEST_MESSAGE])
            self.outcome.evidence, self.ended = None, True
            return b""

    def _reply(self, message: Any, numbers: bytes) -> bytes:
        outcome = self.outcome
        if self._expected:
            self.ended = True
            outcome.answers = _answers(message, bytearray(numbers), self._expected)
            return b""
        if self.ended or outcome.evidence is not None:
            raise ValueError("it sent a second message")
        if "problem" in message:
            self.ended = True
            outcome.problem = hidden(_problem(message["problem"]), str(message["filename"]), self.reach)
            return b""
        outcome.evidence = Evidence.read(message["evidence"], numbers)
        drawn = self.questions(outcome.evidence)
        self._expected = len(drawn)
        self.ended = not drawn
        if not drawn:
            return b""
        arrays = bytearray()
        text = json.dumps([packed(question, arrays) for question in drawn]).encode()
        return HEADER.pack(len(text), len(arrays)) + text + bytes(arrays)


def _answers(message: Any, numbers: bytearray, count: int) -> list[Answer]:
    if not isinstance(message, list) or len(message) != count:
        raise ValueError(f"{count} answers were expected")
    answers: list[Answer] = []
    for answer in message:
        if "problem" in answer:
            answers.append(_problem(answer["problem"]))
            continue
        output, chosen = unpacked(answer["output"], numbers), answer["mask"]
        if not isinstance(output, Tensor):
            raise TypeError("an answer must be a tensor")
        answers.append((output, chosen if isinstance(chosen, int) else -1))
    return answers


def _problem(written: dict[str, object]) -> Problem:
    line = written["line"]
    return Problem(
        str(written["stage"])[:40],
        str(written["kind"])[:200],
        str(written["message"])[:LONGEST_MESSAGE],
        line if isinstance(line, int) else None,
    )


class Judge(Conversation):
    """Judges one class or function of a file.

    Args:
        path: of the file, as the report shows it.
        name: of the class or function; None for the one that looks most like multi-head attention.
        source: the text of the file.
        cells: of a notebook.
        num_heads: that the caller requested, if any.
        reach: paths that the file could read.
    """

    def __init__(
        self, path: str, name: str | None, source: str, cells: Cells, num_heads: int | None, reach: list[str]
    ) -> None:
        super().__init__(reach, self._questions)
        self.path, self.name, self.source, self.cells = Path(path), name, source, cells
        self.num_heads = num_heads

    def before_running(self) -> Report | str:
        """Return a report if the file need not be run, else the name of what is to be examined.

        Raises:
            ArgumentError: the file cannot be read as Python, or nothing in it looks like attention.
        """
        report = before_running(self.path, self.name, self.source, self.cells)
        if report is not None:
            return report
        if self.name is None:
            self.name = likeliest(self.path, self.source)
        self._hidden_probes = HiddenProbes(facts_of_source(self.source, self.name), self.num_heads)
        return self.name

    def _questions(self, evidence: Evidence) -> list[Question]:
        return self._hidden_probes.questions(evidence)

    def heard(self, text: bytes, numbers: bytes) -> tuple[bytes, bool]:
        """Return the reply, and whether the process has sent everything."""
        return self.reply(text, numbers), self.ended

    def report(self, end: Problem | None) -> Report:
        """Return the report, after the process has ended.

        Args:
            end: the reason why the process was ended, if it was.

        Raises:
            ArgumentError: the file has no such name.
        """
        outcome = self.outcome
        problem = end or outcome.problem
        if problem is not None and problem.kind == ArgumentError.__name__:
            raise ArgumentError(problem.message)  # the file has no such name
        evidence = outcome.evidence or self._nothing()
        evidence.source, evidence.path = self.source, str(self.path)  # not what the process sent
        if problem is not None:
            evidence.problems.append(problem)
        try:
            with ONE_AT_A_TIME:
                report = judge(evidence)
                refusal = self._hidden_probes.verdict(evidence, outcome.answers) if report.ok else None
        except Exception as error:
            # the evidence of an examination is consistent; evidence that the code wrote itself may not be
            evidence = self._nothing()
            message = f"the evidence is not consistent: {error}"
            evidence.problems.append(Problem("limits", "result", message))
            return judge(evidence)
        if refusal is not None:
            _refuse(report, refusal)
        elif outcome.evidence is not None and problem is not None and not report.faults:
            report.judged = False  # it ended while it answered the hidden probes
        return report

    def _nothing(self) -> Evidence:
        return Evidence(str(self.name), "class", path=str(self.path), source=self.source)


def _refuse(report: Report, refusal: Refusal) -> None:
    """Change a report that is right by the evidence, but not by the answers to hidden probes."""
    report.ok, report.judged = False, refusal.wrong
    report.problems.append(Problem("call", refusal.kind, refusal.words))
    report.explained.append(refusal.words)
    report.summary = refusal.words


def before_running(path: Path, name: str | None, source: str, cells: Cells) -> Report | None:
    """Return a report if the file is not Python, uses another framework, or uses undefined names; else None.

    Raises:
        ArgumentError: the file cannot be read as Python.
    """
    try:
        if (broken := broken_cell(source, cells)) is not None:
            raise broken
        ast.parse(source)
    except (RecursionError, MemoryError, ValueError):  # nested too deep, or with a NUL in it
        raise ArgumentError(
            f"file must be Python that can be parsed: {path} is nested too deeply or has a NUL character; "
            "simplify it"
        ) from None
    except SyntaxError as error:
        problem = Problem("import", "SyntaxError", error.msg, error.lineno)
        report = Report(name or path.stem, ok=False, summary="", path=str(path), problems=[problem])
        report.explained = [explain(problem, source)]
        report.summary = report.explained[0]
        return report
    framework = other_framework(source, name)
    if framework is not None:
        words = SENTENCE.format(framework)
        name = name or next((candidate.name for candidate in candidates(source)), path.stem)
        return Report(name, ok=False, summary=words, path=str(path), judged=False)
    settings = settings_under_main(source)
    missing = [unknown for unknown in undefined_names(source) if unknown.name not in settings]
    if cells.first_lines:
        missing = [undefined for undefined in missing if _matters(undefined, name, source)]
    if not missing:
        return None
    report = Report(name or path.stem, ok=False, summary="", path=str(path))
    for undefined in missing:
        problem = Problem("import", "NameError", f"name '{undefined.name}' is not defined", undefined.line)
        report.problems.append(problem)
        report.explained.append(explain(problem, source))
        detail = f"found in line {undefined.line} before anything was run"
        named = Named.of(FAULTS["undefined name"], detail, undefined.line, undefined.text)
        named.title, named.repair = (
            f"{undefined.name} is used but never defined",
            undefined.suggestion or named.repair,
        )
        report.faults.append(named)
    names = ", ".join(dict.fromkeys(undefined.name for undefined in missing))
    report.summary = f"undefined name: {names}; nothing was run"
    return report


def _matters(missing: Undefined, name: str | None, source: str) -> bool:
    """Return True if an undefined name of a notebook is within the definition that is to be checked."""
    wanted = (name or "").partition(".")[0]
    checked = [each for each in candidates(source) if not wanted or each.name == wanted][:1]
    return any(each.first_line <= missing.line <= each.last_line for each in checked)


def serve(talk: int) -> NoReturn:
    """Judge one file in a copy of the template, until the other end closes the socket."""
    with socket.socket(fileno=talk) as wire, wire.makefile("rwb") as stream:
        judge_of_file = Judge(*pickle.load(stream))
        while True:
            try:
                method, arguments = pickle.load(stream)
            except (EOFError, ConnectionError):
                os._exit(0)
            try:
                answer: object = getattr(judge_of_file, method)(*arguments)
            except Exception as error:
                if not isinstance(
                    error, HeadwiseError
                ):  # a bug of headwise: add the traceback, which is lost otherwise
                    error.add_note(traceback.format_exc())
                answer = error
            pickle.dump(answer, stream)
            stream.flush()
