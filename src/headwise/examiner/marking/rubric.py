"""A rubric: what right code is worth, and what each mistake takes away."""

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
from .conditions import KEY

SINGLE = ("full", "floor", "fault", "unnamed", "crash")
TABLES = ("faults", "steps")
BESIDE, BLOCK = "beside", "block"  # of faults that are seen beside the numbers; of a Transformer block
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
    """The points of one submission; None: it was not judged, and a person decides."""

    points: float | None
    full: float
    lost: list[tuple[str, float]] = field(default_factory=list)  # for what, and how many

    def __str__(self) -> str:
        return f"{'?' if self.points is None else format(self.points, 'g')} of {self.full:g}"


@dataclass(frozen=True)
class Rubric:
    """Points, as a file in TOML says.

    Args:
        full: for code that is right.
        floor: the fewest that judged code gets.
        faults: what a fault takes away, by its key.
        steps: what a fault takes away that `faults` does not name, by the step it is in.
        fault: what any other fault takes away; None: all.
        unnamed: what is taken away where code is wrong and no fault is named; None: all.
        crash: what is taken away where code stops at a line of its own; None: all.
    """

    full: float = 10.0
    floor: float = 0.0
    fault: float | None = None
    unnamed: float | None = None
    crash: float | None = None
    faults: Mapping[str, float] = field(default_factory=dict)
    steps: Mapping[str, float] = field(default_factory=dict)

    def mark(self, report: Report) -> Mark:
        """The points for one report: full marks less what each of its faults takes away, once each."""
        if report.verdict == "not judged":
            return Mark(None, self.full)
        if report.ok:
            return Mark(self.full, self.full)
        if report.faults:
            lost = [(key, self._of_fault(key)) for key in dict.fromkeys(each.key for each in report.faults)]
        elif report.problems:
            lost = [("it stops before its end", self._or_all(self.crash))]
        else:
            lost = [("its numbers are others", self._or_all(self.unnamed))]
        return Mark(max(self.floor, self.full - sum(points for _, points in lost)), self.full, lost)

    def _of_fault(self, key: str) -> float:
        if key in self.faults:
            return self.faults[key]
        step = step_of(key)
        return self.steps[step] if step in self.steps else self._or_all(self.fault)

    def _or_all(self, points: float | None) -> float:
        return self.full if points is None else points


def step_of(key: str) -> str:
    """The step a fault is in."""
    return STEP_OF.get(key) or (FAULTS[key].step if key in FAULTS else "") or BESIDE


def read_rubric(path: str | os.PathLike[str]) -> Rubric:
    """The rubric in a file.

    Raises:
        ArgumentError: no such file, no TOML, or an entry that says nothing, each with the line it is on.
    """
    try:
        text = Path(path).read_text("utf-8")
        entries = tomllib.loads(text)
    except OSError as error:
        raise ArgumentError(
            f"rubric must be a file that can be read: {path}: {error.strerror}; name another"
        ) from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"rubric must be in UTF-8: {path}: {error.reason}; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"rubric must be TOML: {path}: {error}; write e.g. full = 10") from error
    return _Reader(Path(path).name, text).read(entries)


class _Reader:
    """Refuses what is no rubric, and says on which line that is."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.lines = name, text.splitlines()

    def read(self, entries: dict[str, Any]) -> Rubric:
        for key, value in entries.items():
            if key not in (*SINGLE, *TABLES):
                self._refuse("must have entries with a meaning", key, key, nearest(key, [*SINGLE, *TABLES]))
            if key in TABLES and not isinstance(value, dict):
                self._refuse(
                    f"must give {key} a table", key, f"{key} = {value!r}", f"write [{key}] on a line"
                )
        single = {key: self._points(key, value) for key, value in entries.items() if key in SINGLE}
        faults = self._table(entries.get("faults", {}), [*FAULTS, KEY], "fault")
        steps = self._table(entries.get("steps", {}), STEPS, "step")
        rubric = Rubric(**single, faults=faults, steps=steps)
        if rubric.floor > rubric.full:
            got = f"floor = {rubric.floor:g}, full = {rubric.full:g}"
            self._refuse("must have a floor below its full mark", "floor", got, "exchange them")
        return rubric

    def _table(self, entries: dict[str, Any], known: Sequence[str], kind: str) -> dict[str, float]:
        for key in entries:
            if key not in known:
                self._refuse(f"must name a {kind}", key, repr(key), nearest(key, known))
        return {key: self._points(key, value) for key, value in entries.items()}

    def _points(self, key: str, value: object) -> float:
        wrong = isinstance(value, bool) or not isinstance(value, int | float)
        if wrong or not 0 <= value < math.inf:  # type: ignore[operator]
            self._refuse("must give points from 0 on", key, f"{key} = {value!r}", "write a number, e.g. 2.5")
        return float(value)  # type: ignore[arg-type]

    def _refuse(self, rule: str, key: str, got: str, advice: str) -> NoReturn:
        raise ArgumentError(f"rubric {rule}: got {got} ({self._place(key)}); {advice}")

    def _place(self, key: str) -> str:
        spelled = rf"\s*\[?\s*[\"']?{re.escape(key)}[\"']?\s*[\]=.]"
        for number, line in enumerate(self.lines, 1):
            if re.match(spelled, line):
                return f"{self.name}, line {number}"
        return self.name
