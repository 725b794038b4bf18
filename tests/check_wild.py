"""How the examiner fares with code that nobody here wrote: `make check-wild DIR=tests/wild/open`.

DIR holds files and a table of what is to be said of each, `expected.csv`:

    file      its name
    verdict   right, or wrong
    fault     of a wrong one: keys of the catalogue; alternatives are separated by |, two at once by " + ";
              `raises`: it is enough to say where it raises
    why       for people

Exit code 0: every file is as expected; 1: not all are; 2: there is no table, or it does not fit the folder.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from headwise.errors import ArgumentError
from headwise.examiner import check_file
from headwise.examiner.marking.template import Template
from headwise.examiner.report import Report
from headwise.examiner.steps import FAULTS

RAISES = "raises"


class TableError(Exception):
    """A table that says nothing of a file, or of one that is not there."""


@dataclass
class Expected:
    """One line of the table."""

    file: str
    right: bool
    faults: list[set[str]] = field(default_factory=list)  # each of these would be a true answer


@dataclass
class Judged:
    """One file, what was said of it, and whether that is true."""

    file: str
    right: bool  # what it is
    verdict: str  # what it was called: "right", "wrong", "not judged"
    keys: list[str]  # faults it was accused of
    true_keys: int  # of those
    named: bool  # a wrong one, and its faults are these
    summary: str
    seconds: float

    @property
    def as_expected(self) -> bool:
        return self.verdict == "right" if self.right else self.named

    @property
    def accusations(self) -> int:
        """A verdict of "wrong" without a name is one, too."""
        return max(len(self.keys), int(self.verdict == "wrong"))

    @property
    def true_accusations(self) -> int:
        return 0 if self.right else self.true_keys if self.keys else int(self.verdict == "wrong")


def expected_in(folder: Path) -> list[Expected]:
    """The table of a folder.

    Raises:
        TableError: there is none, a verdict is neither right nor wrong, or it names other files.
    """
    table = folder / "expected.csv"
    if not table.is_file():
        raise TableError(f"there is no {table}")
    with table.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        if row["verdict"] not in ("right", "wrong") or (row["verdict"] == "wrong" and not row["fault"]):
            raise TableError(f"{row['file']} is {row['verdict']!r} with fault {row['fault']!r}")
    listed = {path.name for path in folder.iterdir() if path.suffix in (".py", ".ipynb")}
    apart = listed ^ {row["file"] for row in rows}
    if apart:
        raise TableError(f"the table and the folder differ in {', '.join(sorted(apart))}")
    return [
        Expected(
            row["file"],
            row["verdict"] == "right",
            [{key.strip() for key in keys.split(" + ")} for keys in row["fault"].split("|") if keys.strip()],
        )
        for row in rows
    ]


def judge_all(folder: Path, expected: Iterable[Expected], template: Template) -> list[Judged]:
    """Check every file, as `headwise check` does; a process with torch in it serves them all."""
    judged = []
    for row in expected:
        start = time.perf_counter()
        try:
            report: Report | ArgumentError = check_file(folder / row.file, template=template)
        except ArgumentError as refused:
            report = refused
        judged.append(verdict_on(row, report, time.perf_counter() - start))
    return judged


def verdict_on(expected: Expected, report: Report | ArgumentError, seconds: float) -> Judged:
    """What was said, against what is true."""
    if isinstance(report, ArgumentError):
        return Judged(expected.file, expected.right, "not judged", [], 0, False, str(report), seconds)
    keys = [named.key for named in report.faults]
    true = set[str]().union(*expected.faults)
    named = report.verdict == "wrong" and any(set(keys) == each for each in expected.faults)
    if {RAISES} in expected.faults and report.verdict == "wrong" and not keys:
        named = any(problem.line is not None for problem in report.problems)
    true_keys = sum(key in true for key in keys)
    return Judged(
        expected.file, expected.right, report.verdict, keys, true_keys, named, report.summary, seconds
    )


def score(judged: Sequence[Judged]) -> list[str]:
    """In words, a line per number, and one per file that is not as expected."""
    right, wrong = (
        [verdict for verdict in judged if verdict.right],
        [verdict for verdict in judged if not verdict.right],
    )
    took = sorted(verdict.seconds for verdict in judged)

    def of(name: str, good: int, among: int) -> str:
        return f"{name:18} {good:3} of {among:3}" + (f"  {100 * good / among:5.1f}%" if among else "")

    lines = [
        of("right passed", sum(verdict.verdict == "right" for verdict in right), len(right)),
        of("wrong named", sum(verdict.named for verdict in wrong), len(wrong)),
        of("wrong caught", sum(verdict.verdict == "wrong" for verdict in wrong), len(wrong)),
        of(
            "accusations true",
            sum(verdict.true_accusations for verdict in judged),
            sum(verdict.accusations for verdict in judged),
        ),
        of("right not judged", sum(verdict.verdict == "not judged" for verdict in right), len(right)),
        of("wrong not judged", sum(verdict.verdict == "not judged" for verdict in wrong), len(wrong)),
        f"{'seconds a file':18} median {statistics.median(took):.1f}, "
        f"p90 {took[min(len(took) - 1, int(0.9 * len(took)))]:.1f}, worst {took[-1]:.1f}",
    ]
    for verdict in judged:
        if not verdict.as_expected:
            kind = "right" if verdict.right else "wrong"
            called = ", ".join(verdict.keys) or verdict.summary
            lines.append(f"  {verdict.file} ({kind}) -> {verdict.verdict}: {called[:150]}")
    return lines


def unknown_keys(expected: Iterable[Expected]) -> list[str]:
    """Faults of the table that the catalogue does not have."""
    return sorted(set[str]().union(*(each for row in expected for each in row.faults)) - {*FAULTS, RAISES})


def main() -> int:
    """Print the score; 1 where a file is not as expected, 2 where nothing could be scored."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was said of each file")
    arguments = parser.parse_args()
    try:
        expected = expected_in(arguments.folder)
    except TableError as error:
        sys.stderr.write(f"check-wild: {error}\n")
        return 2
    torch.set_num_threads(1)
    with Template() as template:
        judged = judge_all(arguments.folder, expected, template)
    sys.stdout.write("\n".join(score(judged)) + "\n")
    if unknown := unknown_keys(expected):
        sys.stdout.write(f"  the table names faults that the catalogue has not: {', '.join(unknown)}\n")
    if arguments.json is not None:
        rows = [asdict(verdict) | {"as_expected": verdict.as_expected} for verdict in judged]
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    return int(not all(verdict.as_expected for verdict in judged))


if __name__ == "__main__":
    sys.exit(main())
