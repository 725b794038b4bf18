"""Rubrics: the points for correct code, and the points that each mistake costs."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ...errors import ArgumentError, nearest
from ..recipe import RIGHT
from ..report import Report
from ..steps import FAULTS, blocks_and_scores, mask_functions, softmax_and_heads
from .requirements import KEY

SINGLE = ("full", "floor", "fault", "unnamed", "crash")
TABLES = ("faults", "steps")
BESIDE, BLOCK = "beside", "block"  # steps of faults beside the numbers, and of a Transformer block
STEPS = (*RIGHT, BLOCK, BESIDE)
OF_SINGLE_STEPS = (
    ("softmax", softmax_and_heads.SOFTMAX.faults),
    ("split", softmax_and_heads.SPLITTING.faults),
    ("merge", softmax_and_heads.MERGING.faults),
    ("hide", mask_functions.MASK.faults),
    (BLOCK, blocks_and_scores.FAULTS),
)
STEP_OF = {fault.key: step for step, faults in OF_SINGLE_STEPS for fault in faults}


@dataclass(frozen=True)
class Mark:
    """The points of one submission; None if it was not judged, and a person must decide."""

    points: float | None
    full: float
    lost: list[tuple[str, float]] = field(default_factory=list)  # (reason, points)

    def __str__(self) -> str:
        return f"{'?' if self.points is None else format(self.points, 'g')} of {self.full:g}"


@dataclass(frozen=True)
class Rubric:
    """The points of a rubric, read from a TOML file. Where points are None, all are lost.

    Args:
        full: points for correct code.
        floor: the fewest points of code that was judged.
        faults: points lost by a fault, by its key.
        steps: points lost by a fault that is not in `faults`, by its step.
        fault: points lost by any other fault.
        unnamed: points lost if the code is wrong and no fault is named.
        crash: points lost if the code raises an exception.
    """

    full: float = 10.0
    floor: float = 0.0
    fault: float | None = None
    unnamed: float | None = None
    crash: float | None = None
    faults: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)

    def mark(self, report: Report) -> Mark:
        """Return the points for a report: the full points less those lost by each of its faults."""
        if report.verdict == "not judged":
            return Mark(None, self.full)
        if report.ok:
            return Mark(self.full, self.full)
        if report.faults:
            lost = [(key, self._of_fault(key)) for key in dict.fromkeys(each.key for each in report.faults)]
        elif report.problems:
            lost = [("it raises an exception", self._or_all(self.crash))]
        else:
            lost = [("its output is wrong", self._or_all(self.unnamed))]
        return Mark(max(self.floor, self.full - sum(points for _, points in lost)), self.full, lost)

    def _of_fault(self, key: str) -> float:
        if key in self.faults:
            return self.faults[key]
        step = step_of(key)
        return self.steps[step] if step in self.steps else self._or_all(self.fault)

    def _or_all(self, points: float | None) -> float:
        return self.full if points is None else points


def step_of(key: str) -> str:
    """Return the step that a fault belongs to."""
    return STEP_OF.get(key) or (FAULTS[key].step if key in FAULTS else "") or BESIDE


def read_rubric(path: str | os.PathLike[str]) -> Rubric:
    """Return the rubric in a file.

    Raises:
        ArgumentError: the file cannot be read, is not TOML, or has an unknown entry; the line is named.
    """
    try:
        text = Path(path).read_text("utf-8")
        entries = tomllib.loads(text)
    except OSError as error:
        raise ArgumentError(
            f"rubric must be a readable file: {path}: {error.strerror}; check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"rubric must be in UTF-8: {path}: {error.reason}; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"rubric must be TOML: {path}: {error}; write lines as full = 10") from error
    return _Reader(Path(path).name, text).read(entries)


class _Reader:
    """Reads the entries of a rubric, and names the line of one that is not valid."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.lines = name, text.splitlines()

    def read(self, entries: dict[str, Any]) -> Rubric:
        for key, value in entries.items():
            if key not in (*SINGLE, *TABLES):
                self._refuse("must have known entries only", key, key, nearest(key, [*SINGLE, *TABLES]))
            if key in TABLES and not isinstance(value, dict):
                self._refuse(
                    f"must have a table {key}",
                    key,
                    f"{key} = {value!r}",
                    f"write [{key}] on a line of its own",
                )
        single = {key: self._points(key, value) for key, value in entries.items() if key in SINGLE}
        faults = self._table(entries.get("faults", {}), [*FAULTS, KEY], "fault")
        steps = self._table(entries.get("steps", {}), STEPS, "step")
        rubric = Rubric(**single, faults=faults, steps=steps)
        if rubric.floor > rubric.full:
            got = f"floor = {rubric.floor:g}, full = {rubric.full:g}"
            self._refuse("must have a floor of at most full", "floor", got, "exchange them")
        return rubric

    def _table(self, entries: dict[str, Any], names: Sequence[str], kind: str) -> dict[str, float]:
        for key in entries:
            if key not in names:
                self._refuse(f"must name a {kind}", key, repr(key), nearest(key, names))
        return {key: self._points(key, value) for key, value in entries.items()}

    def _points(self, key: str, value: object) -> float:
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not 0 <= value < math.inf:  # type: ignore[operator]
            self._refuse(
                "must have points of 0 or more", key, f"{key} = {value!r}", "write a number, such as 2.5"
            )
        return float(value)  # type: ignore[arg-type]

    def _refuse(self, rule: str, key: str, got: str, advice: str) -> NoReturn:
        raise ArgumentError(f"rubric {rule}: got {got} ({self._place(key)}); {advice}")

    def _place(self, key: str) -> str:
        spelled = rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[\]=.]"
        for number, line in enumerate(self.lines, 1):
            if re.match(spelled, line):
                return f"{self.name}, line {number}"
        return self.name
