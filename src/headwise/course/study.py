"""A learner's folder: writing exercises into it, checking them, and the learner's progress.

No file of the learner is ever overwritten. The progress is one file of the folder, replaced as a whole.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ArgumentError
from ..whole_files import name_once, whole_file
from .exercises import PLANTS, Exercise, exercise_of, file_text, repair_of
from .lesson import HINTS, lesson, lessons

if TYPE_CHECKING:
    from ..examiner.marking.template import Template
    from ..examiner.report import Report
    from ..examiner.source.unwritten import Unwritten

__all__ = [
    "FILE",
    "FOLDER",
    "VARIABLE",
    "Outcome",
    "Study",
    "Task",
    "course_folder",
    "default_folder",
    "read_progress",
    "static_problem",
]

FOLDER = "headwise-course"
VARIABLE = "HEADWISE_COURSE"  # of the environment: a folder to use instead
LEVELS_UP = 3  # a course is also used from folders inside it, up to this depth
FILE, VERSION = "progress.json", 2  # 2: with the number of written hints


# The folder


def default_folder() -> Path:
    """Return the learner's folder if no other is named: that of HEADWISE_COURSE, or `course_folder()`."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else course_folder()


def course_folder() -> Path:
    """Return the folder of the course around here, as a path from the current folder.

    That is the nearest with a file of progress: the current folder, its `headwise-course`, or a folder above,
    up to three levels. If there is none: `headwise-course`, which need not exist.
    """
    try:
        current = Path.cwd()
    except OSError:  # it was deleted
        return Path(FOLDER)
    for folder in (current, current / FOLDER, *current.parents[:LEVELS_UP]):
        if _is_course(folder):
            return Path(os.path.relpath(folder, current))
    return Path(FOLDER)


def _is_course(folder: Path) -> bool:
    """Return True if the folder has a file of progress that the course wrote."""
    path = folder / FILE
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError:
        return False
    except ValueError:
        return folder.name == FOLDER  # a damaged file: reading it says so
    return _is_progress(content)


def _is_progress(content: Any) -> bool:
    """Return True for the content of a file of progress; other programs have files of that name, too."""
    if not isinstance(content, dict) or type(content.get("version")) is not int:
        return False
    if content["version"] > 1:
        return content.get("course") == "headwise"
    exercises = content.get("exercises")
    return (
        content.keys() == {"version", "current", "exercises", "questions"}
        and isinstance(exercises, dict)
        and all(re.fullmatch(r"(\d\d|repair)_\w+\.py", name) for name in exercises)
    )


# Progress


@dataclass
class Done:
    """The progress of one exercise."""

    tries: int = 0
    hints: int = 0  # the number of the last hint shown for this mistake
    written: int = 0  # the number of the last hint of the lesson shown
    solved: bool = False
    mistake: str = ""  # of the last try; each mistake starts again at the first hint


@dataclass
class Progress:
    """The progress of a learner in one folder, by the names of the exercises' files."""

    folder: Path
    exercises: dict[str, Done] = field(default_factory=dict)
    questions: dict[str, bool] = field(default_factory=dict)  # question -> knew it last time
    current: str = ""  # the exercise last started

    def of(self, file_name: str) -> Done:
        """Return the progress of an exercise; create it on first use."""
        return self.exercises.setdefault(file_name, Done())

    def solved(self, file_name: str) -> bool:
        """Return True if the exercise was solved."""
        return file_name in self.exercises and self.exercises[file_name].solved

    def save(self) -> None:
        """Replace the file of progress as a whole: a killed process leaves the old file."""
        content = {
            "course": "headwise",
            "version": VERSION,
            "current": self.current,
            "exercises": {name: asdict(done) for name, done in sorted(self.exercises.items())},
            "questions": self.questions,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self.folder / FILE, "folder") as new_file:
            new_file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def read_progress(folder: Path) -> Progress:
    """Return the progress of a folder; without its file, nothing is done yet."""
    path = folder / FILE
    try:
        content = json.loads(path.read_text("utf-8"))
        if content["version"] > VERSION:
            raise ArgumentError(
                f"progress must be of version 1 to {VERSION}: {path} has {content['version']}; "
                "update headwise"
            )
        exercises = {str(name): Done(**done) for name, done in content["exercises"].items()}
        questions = {str(text): bool(knew) for text, knew in content["questions"].items()}
        return Progress(folder, exercises, questions, str(content["current"]))
    except FileNotFoundError:
        return Progress(folder)
    except NotADirectoryError as error:
        raise ArgumentError(
            f"folder must be a folder: {folder} is a file; choose another with --folder"
        ) from error
    except ArgumentError:  # a ValueError itself
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"progress must be readable: {path}: {error}; move the file to start again"
        ) from error


# Tasks


@dataclass(frozen=True)
class Task:
    """An exercise, its file in the learner's folder, and its name on the command line."""

    title: str
    which: str  # "3", "repair_07"
    path: Path
    exercise: Exercise

    @property
    def key(self) -> str:
        """The name of the exercise in the file of progress."""
        return self.path.name

    @property
    def is_repair(self) -> bool:
        """True if there is a mistake to find and repair."""
        return self.exercise.kind == "repair"

    @property
    def start_command(self) -> str:
        """What writes the exercise into the folder: "start 3", "repair 7"."""
        if not self.is_repair:
            return f"start {self.which}"
        return f"repair {int(self.which.removeprefix('repair_'))}"


@dataclass(frozen=True)
class Difference:
    """A difference between right code and what its exercise asks for; either side may be unknown."""

    expected: str = ""
    actual: str = ""
    about: Literal["inputs", "output", ""] = ""  # whose layout differs, if that is the difference

    def __str__(self) -> str:
        sides = (("the exercise", self.expected), ("your code", self.actual))
        return "; ".join(f"{name}: {words}" for name, words in sides if words)


@dataclass(frozen=True)
class Outcome:
    """The result of one try: the parts still to be written, a problem found without running, or a report."""

    unwritten: list[Unwritten]
    report: Report | None
    problem: str | None = None
    differences: tuple[Difference, ...] = ()  # between right code and what the exercise asks for

    @property
    def ok(self) -> bool:
        """True if the code is right and does what the exercise asks for."""
        return self.report is not None and self.report.ok and not self.differences

    @property
    def mistake(self) -> str:
        """A name for the mistake: hints are counted for each name."""
        if self.report is None or self.ok:
            return ""
        return " + ".join(fault.key for fault in self.report.faults) or self.report.summary


class Study:
    """One folder and the learner's progress in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.progress: Progress = read_progress(folder)

    def task(self, which: str | None = None) -> Task:
        """Return the task by the number of its lesson, "repair 7" or its file; by default the last one."""
        if which is None:
            which = self.progress.current
            if not which:
                raise ArgumentError(
                    "lesson must be given: no exercise was started yet; run "
                    f"{self.command('start')}, or name a lesson"
                )
        path = Path(which.strip())
        if path.suffix == ".py" and path.name != str(path) and path.parent.resolve() != self.folder.resolve():
            raise ArgumentError(
                f"file must be in the folder of the course: {path} is not in {self.folder}; "
                f"use --folder {shlex.quote(str(path.parent))}"
            )
        name = path.name if path.suffix == ".py" else which.strip()
        match = re.fullmatch(r"(?:(repair)[ _]?)?0*(\d+)(?:_\w+)?(?:\.py)?", name)
        if match is None:
            raise ArgumentError(f"lesson must be a number: got {which!r}; see headwise learn")
        number = int(match[2])
        if not match[1]:
            chosen = lesson(number)
            title = f"Lesson {number}: {chosen.title}"
            return Task(title, str(number), self.folder / chosen.file_name, exercise_of(chosen))
        if not 1 <= number <= len(PLANTS):
            raise ArgumentError(f"repair must be 1 to {len(PLANTS)}: got {number}; try headwise learn repair")
        name, exercise = f"repair_{number:02}", repair_of(list(PLANTS)[number - 1])
        return Task(f"Repair {number}", name, self.folder / f"{name}.py", exercise)

    def next_repair(self) -> Task:
        """Return the first repair that is not solved; the first one if all are solved."""
        repairs = [self.task(f"repair {number}") for number in range(1, len(PLANTS) + 1)]
        return next((task for task in repairs if not self.progress.solved(task.key)), repairs[0])

    def after(self, task: Task) -> Task | None:
        """Return the next unsolved lesson, or repair after a repair; None if all lessons are solved."""
        if task.is_repair:
            return self.next_repair()
        return self.next_lesson(int(task.which)) or self.next_lesson()

    def next_lesson(self, after: int = -1) -> Task | None:
        """Return the first unsolved exercise of the lessons above `after`; None if there is none."""
        for entry in lessons():
            if entry.has_exercise and entry.number > after and not self.progress.solved(entry.file_name):
                return self.task(str(entry.number))
        return None

    def current(self) -> Task | None:
        """Return the exercise last started if it is not solved; None if there is none."""
        current = self.progress.current
        if not current or self.progress.solved(current):
            return None
        try:
            return self.task(current)
        except ArgumentError:  # an exercise of another version of headwise
            return None

    def following(self) -> Task | None:
        """Return the exercise to continue with; None if all are solved.

        That is the current exercise, or else the next unsolved one of a lesson.
        """
        current = self.current()
        if current is not None:
            return current
        match = re.match(r"\d\d", self.progress.current)
        after = int(match[0]) if match else -1
        return self.next_lesson(after) or self.next_lesson()

    def command(self, verb: str) -> str:
        """Return a command of the course to type, with --folder if it is needed here."""
        option = "" if self.folder == default_folder() else f" --folder {shlex.quote(str(self.folder))}"
        return f"headwise learn {verb}{option}"

    def start(self, task: Task) -> bool:
        """Write the exercise into the folder, unless its file exists. Return True if it was written."""
        is_new = self.write_new(
            task.path, file_text(task.exercise, task.title, f"headwise learn check {task.which}")
        )
        self.progress.of(task.key)
        self.progress.current = task.key
        self.progress.save()
        return is_new

    def write_new(self, path: Path, text: str) -> bool:
        """Write a new file into the folder. Return False if a file of this name exists."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return _write_new(path, text)
        except OSError as error:
            raise ArgumentError(
                f"folder must be writable: {self.folder}: {error.strerror}; choose another with --folder"
            ) from error

    def check(
        self, task: Task, template: Template | None = None, trust: bool = False, counts: bool = True
    ) -> Outcome:
        """Check an exercise. If `counts`, add one to the number of its tries, unless parts are missing."""
        if not task.path.is_file():
            raise ArgumentError(
                f"exercise must be started: {task.path} does not exist; "
                f"run {self.command(task.start_command)}"
            )
        done = self.progress.of(task.key)
        self.progress.current = task.key
        from ..examiner.source.unwritten import unwritten

        source = task.path.read_text("utf-8", errors="replace")
        parts, problem = unwritten(source), static_problem(source, task.exercise)
        done.tries += counts and not parts
        if parts or problem is not None:
            outcome = Outcome(parts, None, None if parts else problem)
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
            expected = check_file(solution, name, template=template, trust=trust)
        return Outcome([], report, None, tuple(_differences(report, expected)))

    def is_unwritten(self, task: Task) -> bool:
        """Return True if the exercise has no file yet, or its file still has parts to write."""
        from ..examiner.source.unwritten import unwritten

        if not task.path.is_file():
            return True
        return bool(unwritten(task.path.read_text("utf-8", errors="replace")))

    def written_hint(self, task: Task) -> list[str]:
        """Return the names of the lesson's hints to show, of HINTS: the next; after the last, all of them."""
        done = self.progress.of(task.key)
        names = [*HINTS][done.written : done.written + 1] or [*HINTS]
        done.written = min(len(HINTS), done.written + 1)
        self.progress.current = task.key
        self.progress.save()
        return names

    def hint(self, task: Task, at_least: int | None = None) -> int:
        """Return the number of the next hint for a mistake, 3 at most; with `at_least`, of the last one."""
        done = self.progress.of(task.key)
        done.hints = min(3, done.hints + 1) if at_least is None else max(done.hints, at_least)
        self.progress.save()
        return done.hints

    def reset(self, task: Task) -> Path | None:
        """Start an exercise again. Return the new name of the learner's file, if there was one."""
        moved_to = None
        if task.path.exists():
            paths = (task.path.with_suffix(f".before-{number}.py") for number in itertools.count(1))
            moved_to = next(path for path in paths if not path.exists())
            task.path.rename(moved_to)
        self.progress.exercises.pop(task.key, None)
        self.start(task)
        return moved_to


def _write_new(path: Path, text: str) -> bool:
    """Write a complete file, unless one of this name exists. Return True if it was written."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, "utf-8")
        return name_once(part, path)
    finally:
        part.unlink(missing_ok=True)


# Whether code does what its exercise asks for
#
# The examiner finds out how code is called and what its mask means, and judges it by these conventions. An
# exercise asks for the conventions that the examiner finds in its solution.


def static_problem(source: str, exercise: Exercise) -> str | None:
    """Return a problem that can be found without running the code, in one sentence; None if there is none.

    The class or function is missing, returns nothing, or calls a function that it has to replace.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None  # the examiner reports the line
    definitions = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    subject = next((node for node in definitions if node.name == exercise.name), None)
    if subject is None:
        names = ", ".join(node.name for node in definitions) or "no class or function"
        return f"The exercise asks for {exercise.name}, but the file has {names}: keep the name."
    function = subject
    if isinstance(subject, ast.ClassDef):
        methods = [
            node for node in subject.body if isinstance(node, ast.FunctionDef) and node.name == "forward"
        ]
        if not methods:
            return f"{exercise.name} has no method forward."
        function = methods[0]
    if not any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(function)):
        return f"{exercise.name} returns nothing: add a return statement."
    called = {_name_of(node) for node in ast.walk(subject) if isinstance(node, ast.Call)}
    forbidden = sorted(called & set(exercise.without))
    if forbidden:
        return f"This exercise must be solved without {forbidden[0]}."
    if _returns_tuple(function) and not _returns_tuple(ast.parse(exercise.solution), exercise.name):
        return (
            f"{exercise.name} returns a tuple, but the exercise asks for a single tensor: return only that."
        )
    return None


def _returns_tuple(tree: ast.AST, name: str | None = None) -> bool:
    """Return True if a return statement of a function has several values; `name` is in a module."""
    if name is not None:
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        subject = next(node for node in nodes if node.name == name)
        methods = [node for node in subject.body if getattr(node, "name", "") == "forward"]
        tree = methods[0] if isinstance(subject, ast.ClassDef) else subject
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    return any(
        (isinstance(child, ast.Return) and isinstance(child.value, ast.Tuple) and len(child.value.elts) > 1)
        or _returns_tuple(child)
        for child in ast.iter_child_nodes(tree)
        if not isinstance(child, inner)
    )


def _name_of(call: ast.Call) -> str:
    """Return the last part of the name of the called function."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


_LAYOUTS: dict[Literal["inputs", "output"], str] = {
    "inputs": r"(?:its |it takes )((?:inputs|one sequence).*)",
    "output": r"it (returns \[.*)",
}


def _differences(report: Report, expected: Report) -> list[Difference]:
    """Return the differences between right code and the solution."""
    words, expected_words = ([*each.conventions.words, *each.designs] for each in (report, expected))
    missing = [word for word in expected_words if word not in words]
    added = [word for word in words if word not in expected_words]
    differences = []
    for about, form in _LAYOUTS.items():
        asked_for, actual = (
            ", ".join(match[1] for word in phrases if (match := re.fullmatch(form, word)))
            for phrases in (missing, added)
        )
        if asked_for or actual:
            other = actual or ("inputs of another shape" if about == "inputs" else "")
            asked_for, other = (layout.replace("inputs are ", "inputs ") for layout in (asked_for, other))
            differences.append(Difference(asked_for, other, about))
    is_layout = re.compile("|".join(_LAYOUTS.values())).fullmatch
    differences += [Difference(expected=word) for word in missing if not is_layout(word)]
    differences += [Difference(actual=word) for word in added if not is_layout(word)]
    summary, expected_summary = (_formula(each) for each in (report, expected))
    if summary != expected_summary and not differences:
        differences.append(Difference(expected_summary, summary))
    if expected.conventions.returns_weights != report.conventions.returns_weights:
        sides = "only the output", "a tuple, the output and the weights"
        differences.append(Difference(*(sides if report.conventions.returns_weights else sides[::-1])))
    probes = [probe for probe in expected.errors if probe not in report.errors]
    if probes and report.designs == expected.designs:  # other designs are tried with other inputs
        differences.append(Difference(actual=f"cannot be called with: {', '.join(probes)}"))
    expected_remarks = {remark.key for remark in expected.remarks}
    differences += [
        Difference(actual=remark.title) for remark in report.remarks if remark.key not in expected_remarks
    ]
    return differences


def _formula(report: Report) -> str:
    """Return the summary without the name and the size of the rounding errors."""
    summary = re.sub(r", to (?:the last digit|[\d.e+-]+)$| \(largest difference [^()]*\)", "", report.summary)
    return summary.removeprefix(f"{report.name} ")
