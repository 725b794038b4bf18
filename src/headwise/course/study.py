"""A learner's folder: exercises laid into it, checked, taken up again. Nothing in it is ever overwritten.

What was done is in one small file of the folder, which is written whole or not at all.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..whole_files import name_once, whole_file
from .exercises import PLANTS, Exercise, exercise_of, laid_out, repair_of
from .lesson import lesson, lessons

if TYPE_CHECKING:
    from ..examiner.marking.template import Template
    from ..examiner.report import Report
    from ..examiner.source.unwritten import Unwritten

__all__ = ["FILE", "FOLDER", "Outcome", "Study", "Task", "at_a_glance", "read_progress"]

FOLDER = "headwise-course"
FILE, VERSION = "progress.json", 1


# Progress


@dataclass
class Done:
    """What was done of one exercise."""

    tries: int = 0
    hints: int = 0  # the last one shown
    solved: bool = False
    mistake: str = ""  # of the last try: hints are counted for each


@dataclass
class Progress:
    """What a learner has done in one folder; exercises are known by the names of their files."""

    folder: Path
    exercises: dict[str, Done] = field(default_factory=dict)
    questions: dict[str, bool] = field(default_factory=dict)  # asked -> known when last asked
    current: str = ""  # the exercise last begun

    def of(self, file_name: str) -> Done:
        """What was done of an exercise; made on first use."""
        return self.exercises.setdefault(file_name, Done())

    def solved(self, file_name: str) -> bool:
        return file_name in self.exercises and self.exercises[file_name].solved

    def save(self) -> None:
        """Write it; a process killed meanwhile leaves what was there before."""
        content = {
            "version": VERSION,
            "current": self.current,
            "exercises": {name: asdict(done) for name, done in sorted(self.exercises.items())},
            "questions": self.questions,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self.folder / FILE, "folder") as half:
            half.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def read_progress(folder: Path) -> Progress:
    """What was done in this folder; nothing where there is none yet."""
    place = folder / FILE
    try:
        content = json.loads(place.read_text("utf-8"))
        if content["version"] > VERSION:
            raise ArgumentError(
                f"progress must be of version {VERSION}: {place} has {content['version']}; update headwise"
            )
        exercises = {str(name): Done(**done) for name, done in content["exercises"].items()}
        questions = {str(asked): bool(known) for asked, known in content["questions"].items()}
        return Progress(folder, exercises, questions, str(content["current"]))
    except FileNotFoundError:
        return Progress(folder)
    except NotADirectoryError as error:
        raise ArgumentError(
            f"folder must be a folder: {folder} is none; name another with --folder"
        ) from error
    except ArgumentError:  # a ValueError itself
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"progress must be readable: {place}: {error}; move the file away to begin anew"
        ) from error


# Tasks


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
    """The result of one try: what is still to be written, what was seen at a glance, or the verdict."""

    left: list[Unwritten]
    report: Report | None
    seen: str | None = None
    otherwise: tuple[str, ...] = ()  # how right code differs from what was asked

    @property
    def ok(self) -> bool:
        return self.report is not None and self.report.ok and not self.otherwise

    @property
    def mistake(self) -> str:
        """A name for the mistake, by which hints are counted."""
        if self.report is None or self.ok:
            return ""
        return " + ".join(fault.key for fault in self.report.faults) or self.report.summary


class Study:
    """One folder and what was done in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress: Progress = read_progress(folder)

    def task(self, which: str | None = None) -> Task:
        """Return the task by the number of its lesson, "repair 7" or its file; by default the last begun."""
        if which is None:
            which = self.progress.current
            if not which:
                raise ArgumentError("lesson must be given: none was begun; headwise learn start 1")
        found = re.fullmatch(r"(?:(repair)[ _]?)?0*(\d+)(?:_\w+)?(?:\.py)?", which.strip())
        if found is None:
            raise ArgumentError(f"lesson must be a number: got {which!r}; headwise learn lists them")
        number = int(found[2])
        if not found[1]:
            chosen = lesson(number)
            title = f"Lesson {number}: {chosen.title}"
            return Task(title, str(number), self.folder / chosen.file_name, exercise_of(chosen))
        if not 1 <= number <= len(PLANTS):
            raise ArgumentError(f"repair must be 1 to {len(PLANTS)}: got {number}; try headwise learn repair")
        name, exercise = f"repair_{number:02}", repair_of(list(PLANTS)[number - 1])
        return Task(f"Repair {number}", name, self.folder / f"{name}.py", exercise)

    def next_repair(self) -> Task:
        """The first that was not solved; the first of all where all were."""
        repairs = [self.task(f"repair {number}") for number in range(1, len(PLANTS) + 1)]
        return next((task for task in repairs if not self.progress.solved(task.key)), repairs[0])

    def after(self, task: Task) -> Task | None:
        """Behind a lesson the next that is not solved, None when all are; behind a repair another one."""
        if not task.which.isdigit():
            return self.next_repair()
        return self._unsolved(int(task.which)) or self.after_all()

    def after_all(self) -> Task | None:
        """The first lesson that was not solved."""
        return self._unsolved(0)

    def _unsolved(self, number: int) -> Task | None:
        for each in lessons():
            if each.number > number and not self.progress.solved(each.file_name):
                return self.task(str(each.number))
        return None

    def start(self, task: Task) -> bool:
        """Lay it into the folder, where it is not there yet. Return True if it was laid."""
        is_new = self.lay(
            task.path, laid_out(task.exercise, task.title, f"headwise learn check {task.which}")
        )
        self.progress.of(task.key)
        self.progress.current = task.key
        self.progress.save()
        return is_new

    def lay(self, path: Path, text: str) -> bool:
        """Write a new file of the folder; False where there is one of that name."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return _write_new(path, text)
        except OSError as error:
            raise ArgumentError(
                f"folder must be one to write to: {self.folder}: {error.strerror}; name another with --folder"
            ) from error

    def check(
        self, task: Task, template: Template | None = None, trust: bool = False, counts: bool = True
    ) -> Outcome:
        """Check an exercise. If `counts`, add one to the number of its tries."""
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
        with TemporaryDirectory() as folder:
            solution = Path(folder) / task.path.name
            solution.write_text(task.exercise.solution, "utf-8")
            ours = check_file(solution, name, template=template, trust=trust)
        return Outcome([], report, None, tuple(_differences(report, ours)))

    def hint(self, task: Task, at_least: int | None = None) -> int:
        """The number of the next hint: 1, 2, 3, and 3 again; with `at_least`, of the last one, or that."""
        done = self.progress.of(task.key)
        done.hints = min(3, done.hints + 1) if at_least is None else max(done.hints, at_least)
        self.progress.save()
        return done.hints

    def reset(self, task: Task) -> Path | None:
        """Begin an exercise anew. Return where the learner's file was put, if there was one."""
        kept = None
        if task.path.exists():
            places = (task.path.with_suffix(f".before-{number}.py") for number in itertools.count(1))
            kept = next(place for place in places if not place.exists())
            task.path.rename(kept)
        self.progress.exercises.pop(task.key, None)
        self.start(task)
        return kept


def _write_new(path: Path, text: str) -> bool:
    """Write a file whole, and only where there is none of that name; return True if it was written."""
    half = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        half.write_text(text, "utf-8")
        return name_once(half, path)
    finally:
        half.unlink(missing_ok=True)


# Whether code is what its exercise asks for
#
# The examiner finds out how code wants to be called and what it means by a mask, and judges it within that.
# What an exercise asks for is what the examiner finds out about its solution.


def at_a_glance(source: str, exercise: Exercise) -> str | None:
    """Return what can be seen without running code, in one sentence; None if there is nothing.

    The class or function is not there, returns nothing, or calls what it is to do itself.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None  # the examiner says where
    named = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    asked = next((node for node in named if node.name == exercise.name), None)
    if asked is None:
        names = ", ".join(node.name for node in named) or "nothing of the kind"
        return f"The exercise asks for {exercise.name}, and the file has {names}: keep the name."
    function = asked
    if isinstance(asked, ast.ClassDef):
        methods = [
            node for node in asked.body if isinstance(node, ast.FunctionDef) and node.name == "forward"
        ]
        if not methods:
            return f"{exercise.name} has no method forward."
        function = methods[0]
    if not any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function)):
        return f"{exercise.name} returns nothing: the last line lacks a return."
    called = {_name_of(node) for node in ast.walk(asked) if isinstance(node, ast.Call)}
    forbidden = sorted(called & set(exercise.without))
    return f"This one is to be written without {forbidden[0]}." if forbidden else None


def _name_of(call: ast.Call) -> str:
    """The last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _differences(mine: Report, ours: Report) -> list[str]:
    """Say in which ways right code differs from the solution."""
    what, found = (re.sub(r", to (?:the last digit|[\d.e+-]+)$", "", each.summary) for each in (ours, mine))
    said = [f"asked: {what}; yours: {found}"] if found != what else []
    asked, yours = ([*each.conventions.words, *each.designs] for each in (ours, mine))
    said += [f"asked: {words}" for words in asked if words not in yours]
    said += [f"yours: {words}" for words in yours if words not in asked]
    if ours.conventions.returns_weights != mine.conventions.returns_weights:
        said.append(f"asked: weights are {'' if ours.conventions.returns_weights else 'not '}returned, too")
    lacking = [probe for probe in ours.errors if probe not in mine.errors]
    if lacking:
        said.append(f"asked: it can be called with all of these: {', '.join(lacking)}; yours cannot")
    known = {remark.key for remark in ours.remarks}
    said += [f"{each.title[0].upper()}{each.title[1:]}" for each in mine.remarks if each.key not in known]
    return said
