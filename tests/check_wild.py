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
class Met:
    """One file, what was said of it, and whether that is true."""

    file: str
    right: bool  # what it is
    verdict: str  # what it was called: "right", "wrong", "not judged"
    keys: list[str]  # faults it was accused of
    true_keys: int  # of those
    named: bool  # a wrong one, and its faults are these
    said: str
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
    there = {path.name for path in folder.iterdir() if path.suffix in (".py", ".ipynb")}
    apart = there ^ {row["file"] for row in rows}
    if apart:
        raise TableError(f"the table and the folder differ in {', '.join(sorted(apart))}")
    return [
        Expected(
            row["file"],
            row["verdict"] == "right",
            [{key.strip() for key in one.split(" + ")} for one in row["fault"].split("|") if one.strip()],
        )
        for row in rows
    ]


def meet(folder: Path, expected: Iterable[Expected], template: Template) -> list[Met]:
    """Check every file, as `headwise check` does; a process with torch in it serves them all."""
    met = []
    for one in expected:
        start = time.perf_counter()
        try:
            report: Report | ArgumentError = check_file(folder / one.file, template=template)
        except ArgumentError as refused:
            report = refused
        met.append(verdict_on(one, report, time.perf_counter() - start))
    return met


def verdict_on(one: Expected, report: Report | ArgumentError, seconds: float) -> Met:
    """What was said, against what is true."""
    if isinstance(report, ArgumentError):
        return Met(one.file, one.right, "not judged", [], 0, False, str(report), seconds)
    keys = [named.key for named in report.faults]
    true = set[str]().union(*one.faults)
    named = report.verdict == "wrong" and any(set(keys) == each for each in one.faults)
    if {RAISES} in one.faults and report.verdict == "wrong" and not keys:
        named = any(problem.line is not None for problem in report.problems)
    true_keys = sum(key in true for key in keys)
    return Met(one.file, one.right, report.verdict, keys, true_keys, named, report.summary, seconds)


def score(met: Sequence[Met]) -> list[str]:
    """In words, a line per number, and one per file that is not as expected."""
    right, wrong = [one for one in met if one.right], [one for one in met if not one.right]
    took = sorted(one.seconds for one in met)

    def of(name: str, good: int, among: int) -> str:
        return f"{name:18} {good:3} of {among:3}" + (f"  {100 * good / among:5.1f}%" if among else "")

    lines = [
        of("right passed", sum(one.verdict == "right" for one in right), len(right)),
        of("wrong named", sum(one.named for one in wrong), len(wrong)),
        of("wrong caught", sum(one.verdict == "wrong" for one in wrong), len(wrong)),
        of("accusations true", sum(one.true_accusations for one in met), sum(one.accusations for one in met)),
        of("right not judged", sum(one.verdict == "not judged" for one in right), len(right)),
        of("wrong not judged", sum(one.verdict == "not judged" for one in wrong), len(wrong)),
        f"{'seconds a file':18} median {statistics.median(took):.1f}, "
        f"p90 {took[min(len(took) - 1, int(0.9 * len(took)))]:.1f}, worst {took[-1]:.1f}",
    ]
    for one in met:
        if not one.as_expected:
            kind = "right" if one.right else "wrong"
            called = ", ".join(one.keys) or one.said
            lines.append(f"  {one.file} ({kind}) -> {one.verdict}: {called[:150]}")
    return lines


def unknown_keys(expected: Iterable[Expected]) -> list[str]:
    """Faults of the table that the catalogue does not have."""
    return sorted(set[str]().union(*(each for one in expected for each in one.faults)) - {*FAULTS, RAISES})


def main() -> int:
    """Print the score; 1 where a file is not as expected, 2 where nothing could be scored."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was said of each file")
    asked = parser.parse_args()
    try:
        expected = expected_in(asked.folder)
    except TableError as error:
        sys.stderr.write(f"check-wild: {error}\n")
        return 2
    torch.set_num_threads(1)
    with Template() as template:
        met = meet(asked.folder, expected, template)
    sys.stdout.write("\n".join(score(met)) + "\n")
    if unknown := unknown_keys(expected):
        sys.stdout.write(f"  the table names faults that the catalogue has not: {', '.join(unknown)}\n")
    if asked.json is not None:
        rows = [asdict(one) | {"as_expected": one.as_expected} for one in met]
        asked.json.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    return int(not all(one.as_expected for one in met))


if __name__ == "__main__":
    sys.exit(main())
