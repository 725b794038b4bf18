"""A file with several classes of attention: each is judged, and their verdicts become one report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentError
from .report import Other, Report
from .source.likely_classes import Candidate, Cells, plausible, source_of

ENDED = ("import", "timeout")  # problems that stop a file before any of its classes


@dataclass
class SeveralClasses:
    """The classes of a file that are judged, the likeliest first, and others that look like attention."""

    judged: list[Candidate]
    beside: list[Candidate]
    cells: Cells

    def check_each(self, *checks: Callable[[str], Report]) -> Report:
        """Return the report of the first class that is wrong, else of the likeliest one.

        Args:
            checks: functions that check a class by its name. The first one is used for the likeliest class;
                for the others, the first one that can judge them.

        Raises:
            ArgumentError: the likeliest class cannot be checked by the first function.
        """
        reports = [checks[0](self.judged[0].name)]
        refused: list[Other] = []
        for candidate in self.judged[1:]:
            report, reason = None, "the file stopped before this class"
            if not any(problem.stage in ENDED or problem.kind in ENDED for problem in reports[-1].problems):
                report, reason = _first_judged(candidate.name, checks)
            if report is None:
                refused.append(self._other(candidate, "not judged", reason))
            else:
                reports.append(report)
        main = next((report for report in reports if report.verdict == "wrong"), reports[0])
        main.others = [
            Other(report.name, report.line, report.cell, report.verdict, report.summary)
            for report in reports
            if report is not main
        ]
        main.others += [*refused, *(self._other(candidate) for candidate in self.beside)]
        main.seconds = sum(report.seconds for report in reports)
        return main

    def _other(self, candidate: Candidate, verdict: str = "", summary: str = "") -> Other:
        cell, line = None, candidate.first_line
        if self.cells.first_lines:
            cell, line = self.cells.place(line)
        return Other(candidate.name, line, cell, verdict, summary)


def _first_judged(name: str, checks: Sequence[Callable[[str], Report]]) -> tuple[Report | None, str]:
    """Return the first report that judges a class, else the last; None and the reason if no check can."""
    report, reason = None, ""
    for check in checks:
        try:
            report = check(name)
        except ArgumentError as error:
            reason = str(error)
        if report is not None and report.verdict != "not judged":
            break
    return report, reason


def each_judged(path: Path, source: str) -> SeveralClasses | None:
    """Return the classes of a file to judge; None if at most one looks like attention."""
    judged, beside = plausible(source)
    return (
        SeveralClasses(judged, beside, source_of(path)[1])
        if judged and len(judged) + len(beside) > 1
        else None
    )
