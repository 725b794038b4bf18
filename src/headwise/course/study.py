"""A learner's folder: exercises laid into it, checked, taken up again. Nothing in it is ever overwritten."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from .exercises import exercise_of, laid_out
from .lesson import Exercise, lesson, lessons
from .plants import PLANTS, repair_of
from .progress import Progress, read_progress
from .terms import at_a_glance, otherwise

if TYPE_CHECKING:
    from ..examiner.desk.template import Template
    from ..examiner.report import Report
    from ..examiner.source.unwritten import Unwritten

__all__ = ["FOLDER", "Outcome", "Study", "Task"]

FOLDER = "headwise-course"


@dataclass(frozen=True)
class Task:
    """An exercise, its place in the learner's folder, and how it is called on the command line."""

    title: str
    which: str  # "3", "repair_07"
    path: Path
    exercise: Exercise

    @property
    def key(self) -> str:
        """Its name in the file of progress."""
        return self.path.name


@dataclass(frozen=True)
class Outcome:
    """Of one try: what is still to be written, what was seen at a glance, or the verdict."""

    left: list[Unwritten]
    report: Report | None
    seen: str | None = None
    otherwise: tuple[str, ...] = ()  # right, and not what was asked

    @property
    def ok(self) -> bool:
        return self.report is not None and self.report.ok and not self.otherwise

    @property
    def mistake(self) -> str:
        """What tells it from others, for hints are counted by it."""
        if self.report is None or self.ok:
            return ""
        return " + ".join(one.key for one in self.report.faults) or self.report.summary


class Study:
    """One folder and what was done in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress: Progress = read_progress(folder)

    def task(self, which: str | None = None) -> Task:
        """By number of the lesson, as "repair 7", by the name of its file; the one last begun without any.

        Raises:
            ArgumentError: there is no such exercise, or none was begun.
        """
        if which is None:
            which = self.progress.current
            if not which:
                raise ArgumentError("lesson must be given: none was begun; headwise learn start 1")
        told = re.fullmatch(r"(?:(repair)[ _]?)?0*(\d+)(?:_\w+)?(?:\.py)?", which.strip())
        if told is None:
            raise ArgumentError(f"lesson must be a number: got {which!r}; headwise learn lists them")
        number = int(told[2])
        if told[1]:
            keys = list(PLANTS)
            if not 1 <= number <= len(keys):
                raise ArgumentError(
                    f"repair must be 1 to {len(keys)}: got {number}; try headwise learn repair"
                )
            exercise = repair_of(keys[number - 1])
            return Task(
                f"Repair {number}", f"repair_{number:02}", self.folder / f"repair_{number:02}.py", exercise
            )
        one = lesson(number)
        title = f"Lesson {number}: {one.title}"
        return Task(title, str(number), self.folder / one.file_name, exercise_of(one))

    def next_repair(self) -> Task:
        """The first that was not solved; the first of all where all were."""
        every = [self.task(f"repair {number}") for number in range(1, len(PLANTS) + 1)]
        return next((task for task in every if not self.progress.solved(task.key)), every[0])

    def start(self, task: Task) -> bool:
        """Lay it into the folder, where it is not there yet; whether it was laid.

        Raises:
            ArgumentError: the folder cannot be written to.
        """
        text = laid_out(task.exercise, task.title, f"headwise learn check {task.which}")
        laid = self.lay(task.path, text)
        self.progress.of(task.key)
        self.progress.current = task.key
        self.progress.save()
        return laid

    def lay(self, path: Path, text: str) -> bool:
        """Write a new file of the folder; False where there is one of that name.

        Raises:
            ArgumentError: the folder cannot be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return _laid(path, text)
        except OSError as error:
            raise ArgumentError(
                f"folder must be one to write to: {self.folder}: {error.strerror}; name another with --folder"
            ) from error

    def check(
        self, task: Task, template: Template | None = None, trust: bool = False, counts: bool = True
    ) -> Outcome:
        """One try; `counts`: as one.

        Raises:
            ArgumentError: the file is not there.
        """
        if not task.path.is_file():
            raise ArgumentError(
                f"exercise must be begun first: there is no {task.path}; headwise learn start {task.which}"
            )
        done = self.progress.of(task.key)
        done.tries += counts
        self.progress.current = task.key
        from ..examiner.source.unwritten import unwritten

        source = task.path.read_text("utf-8", errors="replace")
        left, seen = unwritten(source), at_a_glance(source, task.exercise)
        if left or seen is not None:
            outcome = Outcome(left, None, None if left else seen)
        else:
            outcome = self._examined(task, template, trust)
        done.solved = done.solved or outcome.ok
        if outcome.mistake != done.mistake:
            done.mistake, done.hints = outcome.mistake, 0
        self.progress.save()
        return outcome

    def _examined(self, task: Task, template: Template | None, trust: bool) -> Outcome:
        from ..examiner import check_file

        name = task.exercise.name
        report = check_file(task.path, name, template=template, trust=trust)
        if not report.ok:
            return Outcome([], report)
        with TemporaryDirectory() as folder:  # beside our solution, in the same words
            solution = Path(folder) / task.path.name
            solution.write_text(task.exercise.solution, "utf-8")
            ours = check_file(solution, name, template=template, trust=trust)
        return Outcome([], report, None, tuple(otherwise(report, ours)))

    def hint(self, task: Task, at_least: int | None = None) -> int:
        """The number of the next hint: 1, 2, 3, and 3 again; with `at_least`, of the last one, or that."""
        done = self.progress.of(task.key)
        done.hints = min(3, done.hints + 1) if at_least is None else max(done.hints, at_least)
        self.progress.save()
        return done.hints

    def reset(self, task: Task) -> Path | None:
        """Begin an exercise anew; where the learner's file was put, if there was one."""
        kept = None
        if task.path.exists():
            places = (task.path.with_suffix(f".before-{number}.py") for number in itertools.count(1))
            kept = next(place for place in places if not place.exists())
            task.path.rename(kept)
        self.progress.exercises.pop(task.key, None)
        self.start(task)
        return kept

    def after(self, task: Task) -> Task | None:
        """Behind a lesson the next that is not solved, None when all are; behind a repair another one."""
        if not task.which.isdigit():
            return self.next_repair()
        return self._unsolved(int(task.which)) or self.after_all()

    def after_all(self) -> Task | None:
        """The first lesson that was not solved."""
        return self._unsolved(0)

    def _unsolved(self, number: int) -> Task | None:
        for one in lessons():
            if one.number > number and not self.progress.solved(one.file_name):
                return self.task(str(one.number))
        return None


def _laid(path: Path, text: str) -> bool:
    """Written whole, and only where no file of that name is: a link to a finished file fails where one is."""
    half = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        half.write_text(text, "utf-8")
        os.link(half, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if path.exists():
            return False
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
    return True
