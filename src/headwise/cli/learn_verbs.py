"""`headwise learn`: the course. Lists lessons, writes and checks exercises, asks questions."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..course.lesson import HINTS, computed, deck, hint_title, lesson, lessons
from ..course.study import FOLDER, VARIABLE, Study, default_folder
from ..errors import ArgumentError, HeadwiseError, PackageMissing
from .check_verb import saves, template_of_checks
from .terminal import console_of, option, progress_line

if TYPE_CHECKING:
    from rich.console import Console

    from ..course.lesson import Lesson, Question
    from ..course.rendering import Shown
    from ..course.study import Difference, Outcome, Task

learn = typer.Typer(name="learn", rich_markup_mode=None, invoke_without_command=True)

FOLDER_HELP = f"Folder of your exercises and progress; by default {FOLDER}, also from inside it."
Folder = Annotated[Path | None, typer.Option("--folder", help=FOLDER_HELP, show_default=False)]
FolderOrVariable = Annotated[
    Path | None, typer.Option("--folder", envvar=VARIABLE, help=FOLDER_HELP, show_default=False)
]
Number = Annotated[int, typer.Argument(metavar="N", help="The number of the lesson.")]
Which = Annotated[
    str | None,
    typer.Argument(
        metavar="N",
        help="Number of the lesson, or repair_07, or the file; by default the last started.",
        show_default=False,
    ),
]
Trust = Annotated[bool, typer.Option("--trust", help="Run the file even without a sandbox.")]


@learn.callback()
def overview(context: typer.Context, folder: FolderOrVariable = None) -> None:
    """Learn multi-head attention, lesson by lesson.

    Without a command: list the lessons, where you are, and what is next.

    Read a lesson with `read N`, or as a notebook with `notebook N`. `start` writes the next exercise into
    your folder, `check` examines your code, `hint` helps, and `solution` shows ours once yours is right. Your
    files are never overwritten.

    Example: headwise learn start 1
    """
    if context.invoked_subcommand is not None:
        # accepts --folder before the command, too
        context.default_map = {} if folder is None else {context.invoked_subcommand: {"folder": folder}}
        return
    from rich.table import Table

    from ..course.exercises import PLANTS

    study = _study(folder)
    console = console_of("learn")
    following = study.following()
    table = Table("", "", "lesson", "idea", "min", box=None, header_style="dim", pad_edge=False)
    for entry in lessons():
        done = study.progress.exercises.get(entry.file_name)
        mark = "✓" if done is not None and done.solved else "…" if done is not None else " "
        is_current = following is not None and following.which == str(entry.number)
        table.add_row(
            _fitting(console, mark), str(entry.number), entry.title, entry.idea, str(entry.minutes),
            style="bold" if is_current else None,
        )  # fmt: skip
    console.print(table)
    exercises = [entry.file_name for entry in lessons() if entry.has_exercise]
    solved = sum(map(study.progress.solved, exercises))
    repaired = sum(
        done.solved for name, done in study.progress.exercises.items() if name.startswith("repair")
    )
    console.print()
    _say(console, f"{solved} of {len(exercises)} exercises solved, {repaired} of {len(PLANTS)} repairs.")
    for line in _position(study, following):
        _say(console, line, "bold")


def _study(folder: Path | None) -> Study:
    return Study(default_folder() if folder is None else folder)


def _position(study: Study, task: Task | None) -> list[str]:
    """Return where the learner is and what is next, in two lines."""
    if task is None:
        return ["You have solved all exercises.", _next(study, None)]
    if not study.progress.exercises:
        first = lessons()[0].number
        return [
            "You have not started yet.",
            f"Next: headwise learn read {first}; the first exercise: {study.command(task.start_command)}",
        ]
    if not task.path.exists():
        return [f"You are at {task.title}, not started yet.", _next(study, task)]
    tries = study.progress.of(task.key).tries
    state = f"{tries} {'check' if tries == 1 else 'checks'}, not solved yet" if tries else "not checked yet"
    return [f"You are at {task.title} ({task.path}): {state}.", _next(study, task)]


def _next(study: Study, task: Task | None) -> str:
    if task is None:
        return f"Next: {study.command('quiz')}, questions as in job interviews."
    if task.path.exists():
        done = study.progress.of(task.key)
        has_hints = done.tries if task.is_repair else done.written < len(HINTS)
        stuck = f" (a hint: {study.command(f'hint {task.which}')})" if has_hints else ""
        return f"Next: {study.command(f'check {task.which}')}{stuck}"
    read = "" if task.is_repair else f" (read the lesson first: headwise learn read {task.which})"
    return f"Next: {study.command(task.start_command)}{read}"


@learn.command()
def read(
    number: Number,
    run: Annotated[bool, typer.Option(help="Run the code and show what it prints.")] = True,
) -> None:
    """Read a lesson in the terminal: text, code and output. Its pictures are in the notebook.

    Example: headwise learn read 3
    """
    from ..course.rendering import page_note

    chosen = lesson(number)
    outputs = {}
    if run:
        with progress_line(f"Running lesson {number}"):
            from ..course.rendering import run_lesson

            outputs = run_lesson(chosen)
    console = console_of("learn")
    _markdown(console, f"# {chosen.number}. {chosen.title}\n\n*{chosen.idea}*")
    for index, cell in enumerate(chosen.cells):
        if cell.kind in ("slide", "hint", "solution", "try") or index in chosen.codes_of_questions:
            continue
        console.print()
        if cell.kind == "markdown":
            _markdown(console, cell.text)
        elif cell.kind == "code":
            _code(console, cell.text, outputs.get(index))
        elif cell.kind == "page":
            _markdown(console, page_note(cell))
        elif cell.kind == "exercise":
            _say(console, f"Exercise: headwise learn start {number}, hints: headwise learn hint {number}")
        elif cell.kind == "question":
            _markdown(console, f"**Question.** {cell.about}")
    console.print()
    _say(
        console, f"Answers: headwise learn quiz --lesson {number}. Pictures: headwise learn notebook {number}"
    )


def _code(console: Console, code: str, shown: Shown | None) -> None:
    """Print code and what it printed."""
    from rich.syntax import Syntax

    draws = shown is not None and shown.pictures and not shown.printed.strip()
    if draws and code.count("\n") > 6:
        _say(console, f"[{code.count(chr(10)) + 1} lines of code for a picture: see the notebook]")
        return
    console.print(Syntax(code, "python", background_color="default"), soft_wrap=True)
    if shown is not None and shown.printed.strip():
        console.print()
        console.print(shown.printed.rstrip(), markup=False, soft_wrap=True, style="dim")
    if shown is not None and shown.pictures:
        _say(console, "[a picture: see the notebook]")


@learn.command()
def notebook(number: Number, folder: Folder = None) -> None:
    """Write a lesson into your folder as a notebook for Jupyter or Colab.

    Example: headwise learn notebook 3
    """
    from ..course.rendering import notebook as to_notebook

    chosen = lesson(number)
    study = _study(folder)
    path = study.folder / f"{chosen.number:02}_{chosen.name}.ipynb"
    is_new = study.write_new(path, to_notebook(chosen))
    study.progress.save()  # marks the folder, for commands from inside it
    _echo_written(path, is_new)


def _echo_written(path: Path, is_new: bool) -> None:
    typer.echo(f"Wrote {path}" if is_new else f"{path} exists already and was not changed")


@learn.command()
def start(
    number: Annotated[
        str | None,
        typer.Argument(
            metavar="N",
            help="Number of the lesson; by default the next exercise that is not solved.",
            show_default=False,
        ),
    ] = None,
    folder: Folder = None,
) -> None:
    """Write the exercise of a lesson into your folder.

    Example: headwise learn start 3
    """
    study = _study(folder)
    if number is not None:
        if number.isdecimal() and not lesson(int(number)).has_exercise:
            typer.echo(f"Lesson {int(number)} has no exercise: headwise learn read {int(number)}", err=True)
            raise typer.Exit(2)
        _begin(study, study.task(number))
        return
    task = study.following()
    if task is None:
        typer.echo(f"All exercises are solved. {_next(study, None)}")
    elif not task.path.exists():
        _begin(study, task)
    else:
        typer.echo(f"{task.title} is started and not solved yet: {task.path}")
        typer.echo(_next(study, task))
        if task.is_repair and (following := study.next_lesson()) is not None:
            typer.echo(f"Or a lesson: {study.command(following.start_command)}")


@learn.command()
def repair(
    number: Annotated[
        int | None,
        typer.Argument(
            metavar="N",
            help="Number of the repair; by default the next unsolved.",
            show_default=False,
        ),
    ] = None,
    folder: Folder = None,
) -> None:
    """Write code with one mistake into your folder: find it and repair it.

    Example: headwise learn repair
    """
    study = _study(folder)
    _begin(study, study.next_repair() if number is None else study.task(f"repair {number}"))


def _begin(study: Study, task: Task) -> None:
    _echo_written(task.path, study.start(task))
    name = task.exercise.name
    goal = f"{name} has one mistake: find and repair it" if task.is_repair else f"Write {name}"
    typer.echo(f"{task.title}. {goal}. Then: {study.command(f'check {task.which}')}")
    if not task.is_repair:
        typer.echo(
            f"The lesson: headwise learn read {task.which}. A hint: {study.command(f'hint {task.which}')}"
        )
        if task.exercise.trial:
            python = "python" if os.name == "nt" else "python3"
            path = f'"{task.path}"' if " " in str(task.path) else str(task.path)
            typer.echo(f"To try your code: {python} {path}")


@learn.command()
def check(
    which: Which = None,
    watch: Annotated[bool, typer.Option("--watch", help="Check again whenever the file is saved.")] = False,
    answer: Annotated[bool, typer.Option("--answer", help="Name the mistake instead of hints.")] = False,
    folder: Folder = None,
    trust: Trust = False,
) -> None:
    """Check your code. Exit code 0: right; 1: not right yet.

    A mistake is described by a hint; headwise learn hint gives the next one.

    Example: headwise learn check 3 --watch
    """
    study = _study(folder)
    task = study.task(which)
    console = console_of("learn")

    def attempt() -> Outcome:
        with progress_line(f"Checking {task.path}"):
            outcome = study.check(task, template, trust)
        _show(console, study, task, outcome, _last_hint(study, task, outcome, answer))
        if task.exercise.hints and not (outcome.ok or _is_named(outcome)):
            if study.progress.of(task.key).written < len(HINTS):
                _say(console, f"A hint: {study.command(f'hint {task.which}')}")
            else:
                _say(console, f"The lesson: headwise learn read {task.which}")
        return outcome

    with template_of_checks() as template:
        if not watch:
            outcome = attempt()
            if outcome.ok:
                _offer(console, study, study.after(task))
            raise typer.Exit(0 if outcome.ok else 1)
        while True:
            for _ in saves(task.path):
                console.clear()
                try:
                    outcome = attempt()
                except HeadwiseError as mistake:  # the next save may repair this, too
                    typer.echo(f"headwise: {mistake}", err=True)
                    continue
                if outcome.ok:
                    break
                _say(console, f"Save {task.path} to check it again; Ctrl-C stops.")
            following = study.after(task)
            if not _offer(console, study, following) or following is None:
                raise typer.Exit(0)
            task = following


def _offer(console: Console, study: Study, task: Task | None) -> bool:
    """Offer the next exercise and return True if it was started. It asks only in a terminal."""
    if task is None or not _is_interactive():
        _say(console, _next(study, task))
        return False
    name = task.title.partition(":")[0].lower()
    reply = _entered(f"{'Continue' if task.path.exists() else 'Start'} {name} now? [Y/n] ")
    if reply not in ("", "y", "yes"):
        _say(console, _next(study, task))
        return False
    _begin(study, task)
    return True


def _is_interactive() -> bool:
    """Return True if a question can be asked: input and output are a terminal."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _last_hint(study: Study, task: Task, outcome: Outcome, answer: bool) -> int | None:
    return None if answer or outcome.report is None or outcome.ok else study.hint(task, at_least=1)


def _show(console: Console, study: Study, task: Task, outcome: Outcome, hint: int | None) -> None:
    """Print the outcome of a check; `hint` is the number of the last hint to show, None for the answer."""
    from ..examiner.report_formats import print_to

    if outcome.unwritten:
        _say(console, f"{task.title}: still to be written:")
        for part in outcome.unwritten:
            _say(console, f"  line {part.line}, {part.name}" + (f": {part.task}" if part.task else ""))
    elif outcome.problem is not None:
        _say(console, outcome.problem)
    elif outcome.ok:
        assert outcome.report is not None
        _say(console, f"✓ {outcome.report.summary}. Well done!")
        _say(console, f"{task.title} is solved. Our solution: {study.command(f'solution {task.which}')}")
    elif outcome.differences:
        _say_differences(console, task.exercise.name, outcome.differences)
    else:
        assert outcome.report is not None
        has_hints = _is_named(outcome)
        report = replace(outcome.report, protections=[], missing_protections=[])  # they are in headwise check
        print_to(console, report, hint if has_hints else None)
        if has_hints and hint is not None:
            console.print()
            answer = study.command(f"check --answer {task.which}")
            more = study.command(f"hint {task.which}") if hint < 3 else f"the answer: {answer}"
            _say(console, f"More help: {more}")


OUTSIDE = {
    "inputs": " It is right for other inputs than the exercise's",
    "output": " It is right, but for the layout of its output",
    "": "",
}
ADVICE = {
    "inputs": "Which axes are counted from the front? With more axes in front, dim=1, .T and transpose(1, 2) "
    "mean other axes: count from the end.",
    "output": "Compare the order of the axes with that of the exercise.",
}


def _say_differences(console: Console, name: str, differences: tuple[Difference, ...]) -> None:
    """Print what the exercise asks for and what the code does, with advice if a layout differs."""
    about = next((difference.about for difference in differences if difference.about), "")
    mark = f"✗ {name} does not yet do what the exercise asks for"
    _say(console, f"{mark}.{OUTSIDE[about]}:" if about else f"{mark}:")
    for difference in differences:
        for side, words in (("the exercise:", difference.expected), ("your code:", difference.actual)):
            if words:
                _say(console, f"  {side:13} {words}")
    if about:
        _say(console, ADVICE[about])


def _is_named(outcome: Outcome) -> bool:
    """Return True if the mistake has a name, and so hints; exceptions have none."""
    return not outcome.ok and outcome.report is not None and bool(outcome.report.faults)


@learn.command()
def hint(which: Which = None, folder: Folder = None, trust: Trust = False) -> None:
    """Give the next hint, up to three. Each says more than the one before.

    Before you write, and while parts are missing: the idea, the formula, the shape of the code. Once your
    code has a mistake that has a name, the hints are about that mistake.

    Example: headwise learn hint 3
    """
    study = _study(folder)
    task = study.task(which)
    console = console_of("learn")
    if task.is_repair and not study.progress.of(task.key).tries:
        mistake = f"{task.exercise.name} has one mistake"
        _say(console, f"{task.title}: {mistake}. Hints begin after the first check.")
        if not task.path.exists():
            _say(console, f"Write it into your folder: {study.command(task.start_command)}")
        _say(console, f"Then: {study.command(f'check {task.which}')}")
        return
    if not task.is_repair and study.is_unwritten(task):
        _written_hint(console, study, task)
        return
    with template_of_checks() as template, progress_line(f"Checking {task.path}"):
        outcome = study.check(task, template, trust, counts=False)
    is_named = _is_named(outcome)
    _show(console, study, task, outcome, study.hint(task) if is_named else None)
    if outcome.ok:
        _say(console, _next(study, study.after(task)))
    elif not is_named and task.exercise.hints:
        console.print()
        _written_hint(console, study, task)


def _written_hint(console: Console, study: Study, task: Task) -> None:
    """Print the next hint of the lesson, and what to do then."""
    names = study.written_hint(task)
    for name in names:
        _markdown(console, f"**{task.title}. {hint_title(name)}**")
        console.print()
        _markdown(console, task.exercise.hints[[*HINTS].index(name)])
        console.print()
    verb = f"check {task.which}" if task.path.exists() else task.start_command
    _say(console, f"Then: {study.command(verb)}")
    if names[-1] != [*HINTS][-1]:
        _say(console, f"More help: {study.command(f'hint {task.which}')}")
    else:
        give_up = study.command(f"solution --give-up {task.which}")
        _say(console, f"More help: headwise learn read {task.which}, or our solution: {give_up}")


@learn.command()
def solution(
    which: Which = None,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Show it although your code is not right yet.")
    ] = False,
    folder: Folder = None,
) -> None:
    """Show our solution, once your code is right.

    Example: headwise learn solution 3
    """
    study = _study(folder)
    task = study.task(which)
    if not give_up and not study.progress.solved(task.key):
        raise ArgumentError(
            f"exercise must be solved before its solution is shown: {task.which} is not solved; use "
            f"{study.command(f'hint {task.which}')}, or add --give-up"
        )
    typer.echo(task.exercise.solution, nl=False)


@learn.command()
def reset(which: Which = None, folder: Folder = None) -> None:
    """Start an exercise again. Your file is renamed, not deleted.

    Example: headwise learn reset 3
    """
    study = _study(folder)
    task = study.task(which)
    moved_to = study.reset(task)
    if moved_to is not None:
        typer.echo(f"Your file was renamed to {moved_to}; the exercise counts as not solved")
    typer.echo(f"Wrote {task.path}")


@learn.command()
def quiz(
    level: Annotated[str | None, option(help="easy, medium or hard; by default all.")] = None,
    lesson: Annotated[int | None, option(help="Only questions of this lesson.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also ask questions that you knew.")] = False,
    folder: Folder = None,
) -> None:
    """Ask questions as in job interviews.

    Think of your answer, press Enter, compare; then type y if you knew it, or n. q quits. The numbers of an
    answer are computed when it is shown.

    Example: headwise learn quiz --level easy
    """
    study = _study(folder)
    questions = [
        question
        for question in deck(level, lesson)
        if everything or not study.progress.questions.get(question.text, False)
    ]
    console = console_of("learn")
    if not questions:
        _say(console, "You knew all of these questions. To ask them again: --all.")
        return
    correct = answered = 0
    for number, question in enumerate(questions, 1):
        console.print()
        _markdown(console, f"**{number} of {len(questions)}, {question.level}.** {question.text}")
        if _entered("Enter shows the answer, q quits: ") in ("q", None):
            break
        _answer(console, question)
        reply = _entered("Did you know it? y or n, q quits: ")
        while reply not in ("y", "n", "q", None):
            reply = _entered("y, n or q: ")
        if reply in ("q", None):
            break
        answered += 1
        correct += reply == "y"
        study.progress.questions[question.text] = reply == "y"
        study.progress.save()
    console.print()
    _say(console, f"You knew {correct} of {answered}.")


@learn.command("help")
def show_help(
    context: typer.Context,
    verb: Annotated[
        str | None, typer.Argument(metavar="COMMAND", help="A command of the list.", show_default=False)
    ] = None,
) -> None:
    """Show this help, or the help of a command.

    Example: headwise learn help hint
    """
    group = context.parent
    assert group is not None
    if verb is None:
        typer.echo(group.get_help())
        return
    commands = getattr(group.command, "commands", {})
    if verb not in commands:
        raise ArgumentError(
            f"COMMAND must be a command of learn: got {verb!r}; choose from {', '.join(commands)}"
        )
    command = commands[verb]
    typer.echo(command.get_help(command.context_class(command, info_name=verb, parent=group)))


def _answer(console: Console, question: Question) -> None:
    _markdown(console, question.answer)
    if question.code:
        _markdown(console, f"```python\n{question.code}\n```")
        printed = _printed_in_its_lesson(question)
        if printed:
            _markdown(console, f"It prints:\n```text\n{printed}\n```")
    elif not question.check and any(f"{part} above" in question.answer for part in ("cell", "plot")):
        _say(console, f"(It is in lesson {question.lesson}: headwise learn read {question.lesson})")
    if question.check:
        printed = computed(question).rstrip()
        if printed:
            _markdown(console, f"Computed now:\n```text\n{printed}\n```")


def _printed_in_its_lesson(question: Question) -> str:
    """Run the lesson of a question and return what the question's code prints; "" without matplotlib."""
    chosen = lesson(question.lesson)
    index = next(i for i, cell in enumerate(chosen.cells) if cell.about == question.text) - 1
    try:
        with progress_line(f"Running lesson {chosen.number}"):
            return _outputs(chosen)[index].printed.rstrip()
    except PackageMissing:
        return ""


@cache
def _outputs(chosen: Lesson) -> dict[int, Shown]:
    from ..course.rendering import run_lesson

    return run_lesson(chosen)


def _entered(prompt: str) -> str | None:
    """Return the line typed, in lower case; None at the end of input."""
    typer.echo(prompt, nl=False)
    line = sys.stdin.readline()
    if not line:
        typer.echo()
        return None
    return line.strip().lower()


def _markdown(console: Console, text: str) -> None:
    from rich.markdown import Markdown

    from ..course.rendering import plain_formulas

    console.print(Markdown(plain_formulas(text)))


def _say(console: Console, text: str, style: str = "") -> None:
    from rich.text import Text

    console.print(Text(_fitting(console, text), style=style))


def _fitting(console: Console, text: str) -> str:
    from ..examiner.report_formats.sentences import fitting

    return fitting(text, console.encoding)
