"""A file with several classes of attention: each of them is judged, and one verdict is made of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentError
from .report import Other, Report
from .source.likely_classes import Candidate, Cells, plausible, source_of

ENDED = ("import", "timeout")  # what ends a file for every class of it


@dataclass
class Several:
    """What of a file is judged, the likeliest first, and what else looks like attention."""

    judged: list[Candidate]
    beside: list[Candidate]
    cells: Cells

    def check_each(self, *checks: Callable[[str], Report]) -> Report:
        """The report on the file: of the first class that is wrong, else of the likeliest one.

        Args:
            checks: ways to check a class by its name. The likeliest is checked the first way, and each of the
                others the first way by which it can be judged.

        Raises:
            ArgumentError: the likeliest cannot be checked the first way.
        """
        reports = [checks[0](self.judged[0].name)]
        refused: list[Other] = []
        for one in self.judged[1:]:
            report, why = None, "the file ended before it"
            if not any(problem.stage in ENDED or problem.kind in ENDED for problem in reports[-1].problems):
                report, why = _first_judged(one.name, checks)
            if report is None:
                refused.append(self._other(one, "not judged", why))
            else:
                reports.append(report)
        told = next((one for one in reports if one.verdict == "wrong"), reports[0])
        told.others = [
            Other(one.name, one.line, one.cell, one.verdict, one.summary)
            for one in reports
            if one is not told
        ]
        told.others += [*refused, *(self._other(one) for one in self.beside)]
        told.seconds = sum(one.seconds for one in reports)
        return told

    def _other(self, one: Candidate, verdict: str = "", summary: str = "") -> Other:
        cell, line = None, one.first_line
        if self.cells.first_lines:
            cell, line = self.cells.place(line)
        return Other(one.name, line, cell, verdict, summary)


def _first_judged(name: str, checks: Sequence[Callable[[str], Report]]) -> tuple[Report | None, str]:
    """The first report that judges a class, else the last one; None, and why, where every check refuses."""
    report, why = None, ""
    for check in checks:
        try:
            report = check(name)
        except ArgumentError as error:
            why = str(error)
        if report is not None and report.verdict != "not judged":
            break
    return report, why


def each_judged(path: Path, source: str) -> Several | None:
    """None where there is one to judge and nothing beside it, or nothing to judge."""
    judged, beside = plausible(source)
    return Several(judged, beside, source_of(path)[1]) if judged and len(judged) + len(beside) > 1 else None
