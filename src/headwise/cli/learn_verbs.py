"""`headwise learn`: the course. Lists lessons, writes and checks exercises, asks questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..course.lesson import computed, deck, lesson, lessons
from ..course.study import FOLDER, Study
from ..errors import ArgumentError, HeadwiseError
from .check_verb import saves, template_of_checks
from .terminal import console_of, option, progress_line

if TYPE_CHECKING:
    from rich.console import Console

    from ..course.lesson import Question
    from ..course.rendering import Shown
    from ..course.study import Outcome, Task
    from ..examiner.marking.template import Template

learn = typer.Typer(name="learn", rich_markup_mode=None, invoke_without_command=True)

Folder = Annotated[
    Path,
    typer.Option(
        "--folder",
        envvar="HEADWISE_COURSE",
        help="Folder of your exercises and progress.",
        show_default=True,
    ),
]
Number = Annotated[int, typer.Argument(metavar="N", help="The number of the lesson.")]
Which = Annotated[
    str | None,
    typer.Argument(
        metavar="N",
        help="Number of the lesson, or repair_07; by default the last started.",
        show_default=False,
    ),
]
Trust = Annotated[bool, typer.Option("--trust", help="Run the file even without a sandbox.")]


@learn.callback()
def overview(context: typer.Context, folder: Folder = Path(FOLDER)) -> None:
    """Learn multi-head attention, lesson by lesson.

    Without a command: list the lessons and your progress.

    Read a lesson with `read N`, or as a notebook with `notebook N`. `start N` writes its exercise into your
    folder, `check` examines your code, `hint` helps, and `solution` shows ours once yours is right. Your
    files are never overwritten.

    Example: headwise learn start 1
    """
    if context.invoked_subcommand is not None:
        context.default_map = {
            context.invoked_subcommand: {"folder": folder}
        }  # accepts --folder before the command
        return
    from rich.table import Table

    from ..course.exercises import PLANTS

    study = Study(folder)
    console = console_of("learn")
    table = Table("", "", "lesson", "idea", "min", box=None, header_style="dim", pad_edge=False)
    for entry in lessons():
        done = study.progress.exercises.get(entry.file_name)
        mark = "✓" if done is not None and done.solved else "…" if done is not None else " "
        table.add_row(_fitting(console, mark), str(entry.number), entry.title, entry.idea, str(entry.minutes))
    console.print(table)
    solved = sum(study.progress.solved(entry.file_name) for entry in lessons())
    repaired = sum(
        done.solved for name, done in study.progress.exercises.items() if name.startswith("repair")
    )
    console.print()
    _say(
        console,
        f"{solved} of {len(lessons())} exercises solved, {repaired} of {len(PLANTS)} repairs. "
        + _next(study, study.next_lesson()),
    )


def _next(study: Study, task: Task | None) -> str:
    if task is None:
        return "All exercises are solved. Next: headwise learn quiz, questions as in job interviews."
    if not task.which.isdigit():
        return f"Next: headwise learn repair{_in_folder(study)}"
    verb = "check" if task.path.exists() else "start"
    read = f" (read the lesson first: headwise learn read {task.which})" if verb == "start" else ""
    return f"Next: headwise learn {verb} {task.which}{_in_folder(study)}{read}"


@learn.command()
def read(
    number: Number,
    run: Annotated[bool, typer.Option(help="Run the code and show what it prints.")] = True,
) -> None:
    """Read a lesson in the terminal: text, code and output. Its pictures are in the notebook.

    Example: headwise learn read 3
    """

    chosen = lesson(number)
    outputs = {}
    if run:
        with progress_line(f"Running lesson {number}"):
            from ..course.rendering import run_lesson

            outputs = run_lesson(chosen)
    console = console_of("learn")
    _markdown(console, f"# {chosen.number}. {chosen.title}\n\n*{chosen.idea}*")
    for index, cell in enumerate(chosen.cells):
        console.print()
        if cell.kind == "markdown":
            _markdown(console, cell.text)
        elif cell.kind == "code":
            _code(console, cell.text, outputs.get(index))
        elif cell.kind == "exercise":
            _say(console, f"Exercise: headwise learn start {number}")
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
def notebook(number: Number, folder: Folder = Path(FOLDER)) -> None:
    """Write a lesson into your folder as a notebook for Jupyter or Colab.

    Example: headwise learn notebook 3
    """
    from ..course.rendering import notebook as to_notebook

    chosen = lesson(number)
    path = folder / f"{chosen.number:02}_{chosen.name}.ipynb"
    _echo_written(path, Study(folder).write_new(path, to_notebook(chosen)))


def _echo_written(path: Path, is_new: bool) -> None:
    typer.echo(f"Wrote {path}" if is_new else f"{path} exists already and was not changed")


@learn.command()
def start(number: Number, folder: Folder = Path(FOLDER)) -> None:
    """Write the exercise of a lesson into your folder.

    Example: headwise learn start 3
    """
    study = Study(folder)
    _begin(study, study.task(str(number)))


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
    folder: Folder = Path(FOLDER),
) -> None:
    """Write code with one mistake into your folder: find it and repair it.

    Example: headwise learn repair
    """
    study = Study(folder)
    _begin(study, study.next_repair() if number is None else study.task(f"repair {number}"))


def _begin(study: Study, task: Task) -> None:
    _echo_written(task.path, study.start(task))
    name = task.exercise.name
    goal = f"Write {name}" if task.exercise.kind == "write" else f"{name} has one mistake: find and repair it"
    typer.echo(f"{task.title}. {goal}. Then: headwise learn check {task.which}{_in_folder(study)}")


@learn.command()
def check(
    which: Which = None,
    watch: Annotated[bool, typer.Option("--watch", help="Check again whenever the file is saved.")] = False,
    answer: Annotated[bool, typer.Option("--answer", help="Name the mistake instead of hints.")] = False,
    folder: Folder = Path(FOLDER),
    trust: Trust = False,
) -> None:
    """Check your code. Exit code 0: right; 1: not right yet.

    A mistake is described by a hint; headwise learn hint gives the next one.

    Example: headwise learn check 3 --watch
    """
    study = Study(folder)
    task = study.task(which)
    console = console_of("learn")

    def attempt(template: Template | None) -> Outcome:
        with progress_line(f"Checking {task.path}"):
            return study.check(task, template, trust)

    with template_of_checks() as template:
        if not watch:
            outcome = attempt(template)
            _show(console, study, task, outcome, _last_hint(study, task, outcome, answer))
            raise typer.Exit(0 if outcome.ok else 1)
        for _ in saves(task.path):
            console.clear()
            try:
                outcome = attempt(template)
            except HeadwiseError as mistake:  # the next save may repair this, too
                typer.echo(f"headwise: {mistake}", err=True)
                continue
            _show(console, study, task, outcome, _last_hint(study, task, outcome, answer))
            if outcome.ok:
                raise typer.Exit(0)
            _say(console, f"Save {task.path} to check it again; Ctrl-C stops.")


def _last_hint(study: Study, task: Task, outcome: Outcome, answer: bool) -> int | None:
    return None if answer or outcome.report is None or outcome.ok else study.hint(task, at_least=1)


def _show(console: Console, study: Study, task: Task, outcome: Outcome, hint: int | None) -> None:
    """Print the outcome of a check; `hint` is the number of the last hint to show, None for the answer."""
    from ..examiner.report_formats import print_to

    arguments = f"{task.which}{_in_folder(study)}"
    if outcome.unwritten:
        _say(console, f"{task.title}: still to be written:")
        for part in outcome.unwritten:
            _say(console, f"  line {part.line}, {part.name}" + (f": {part.task}" if part.task else ""))
    elif outcome.problem is not None:
        _say(console, outcome.problem)
    elif outcome.ok:
        assert outcome.report is not None
        _say(console, f"✓ {outcome.report.summary}. Well done!")
        _say(
            console,
            f"{task.title} is solved. Our solution: headwise learn solution {arguments}",
        )
        _say(console, _next(study, study.after(task)))
    elif outcome.differences:
        _say(console, f"{task.exercise.name} is correct, but it does not do what this exercise asks for:")
        for difference in outcome.differences:
            _say(console, f"  {difference}")
    else:
        assert outcome.report is not None
        has_hints = bool(outcome.report.faults)  # exceptions and unnamed mistakes have no hints
        print_to(console, outcome.report, hint if has_hints else None)
        if has_hints and hint is not None:
            console.print()
            more = "headwise learn hint" if hint < 3 else "the answer: headwise learn check --answer"
            _say(console, f"More help: {more} {arguments}")


def _in_folder(study: Study) -> str:
    """Return the --folder option for a command, "" for the default folder."""
    return "" if study.folder == Path(FOLDER) else f" --folder {study.folder}"


@learn.command()
def hint(which: Which = None, folder: Folder = Path(FOLDER), trust: Trust = False) -> None:
    """Give the next hint, up to three. Each says more than the one before.

    Example: headwise learn hint 3
    """
    study = Study(folder)
    task = study.task(which)
    with template_of_checks() as template, progress_line(f"Checking {task.path}"):
        outcome = study.check(task, template, trust, counts=False)
    _show(console_of("learn"), study, task, outcome, study.hint(task))


@learn.command()
def solution(
    which: Which = None,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Show it although your code is not right yet.")
    ] = False,
    folder: Folder = Path(FOLDER),
) -> None:
    """Show our solution, once your code is right.

    Example: headwise learn solution 3
    """
    study = Study(folder)
    task = study.task(which)
    if not give_up and not study.progress.solved(task.key):
        raise ArgumentError(
            f"exercise must be solved before its solution is shown: {task.which} is not solved; use "
            f"headwise learn hint {task.which}, or add --give-up"
        )
    typer.echo(task.exercise.solution, nl=False)


@learn.command()
def reset(which: Which = None, folder: Folder = Path(FOLDER)) -> None:
    """Start an exercise again. Your file is renamed, not deleted.

    Example: headwise learn reset 3
    """
    study = Study(folder)
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
    folder: Folder = Path(FOLDER),
) -> None:
    """Ask questions as in job interviews.

    Think of your answer, press Enter, compare; then type y if you knew it, or n. q quits. The numbers of an
    answer are computed when it is shown.

    Example: headwise learn quiz --level easy
    """
    study = Study(folder)
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
        if reply in ("q", None):
            break
        answered += 1
        correct += reply == "y"
        study.progress.questions[question.text] = reply == "y"
        study.progress.save()
    console.print()
    _say(console, f"You knew {correct} of {answered}.")


def _answer(console: Console, question: Question) -> None:
    _markdown(console, question.answer)
    if "cell" in question.answer and not question.check:
        _say(console, f"(The cell is in lesson {question.lesson}: headwise learn read {question.lesson})")
    if question.check:
        printed = computed(question).rstrip()
        if printed:
            _markdown(console, f"Computed now:\n```text\n{printed}\n```")


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


def _say(console: Console, text: str) -> None:
    from rich.text import Text

    console.print(Text(_fitting(console, text)))


def _fitting(console: Console, text: str) -> str:
    from ..examiner.report_formats.sentences import fitting

    return fitting(text, console.encoding)
