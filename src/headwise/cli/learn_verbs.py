"""`headwise learn`: the course. Lists lessons, lays out exercises, checks them, asks questions."""

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
        "--folder", envvar="HEADWISE_COURSE", help="Where your exercises and progress are.", show_default=True
    ),
]
Number = Annotated[int, typer.Argument(metavar="N", help="Which lesson.")]
Which = Annotated[
    str | None,
    typer.Argument(
        metavar="N", help="The lesson's number, or repair_07; the one last begun without.", show_default=False
    ),
]
Trust = Annotated[bool, typer.Option("--trust", help="Run the file even where nothing fences it in.")]


@learn.callback()
def overview(context: typer.Context, folder: Folder = Path(FOLDER)) -> None:
    """Learn multi-head attention, lesson by lesson.

    Lessons that run, exercises that are examined, questions with answers.

    Without a command: the lessons, and how far you are. A lesson is read with `read N` or worked through as a
    notebook; `start N` lays its exercise into your folder, `check` examines it, `hint` helps, `solution`
    comes after success. Nothing you wrote is ever overwritten.

    Example: headwise learn start 1
    """
    if context.invoked_subcommand is not None:
        context.default_map = {context.invoked_subcommand: {"folder": folder}}  # as if it stood behind it
        return
    from rich.table import Table

    from ..course.exercises import PLANTS

    study = Study(folder)
    console = console_of("learn")
    table = Table("", "", "lesson", "idea", "min", box=None, header_style="dim", pad_edge=False)
    for each in lessons():
        done = study.progress.exercises.get(each.file_name)
        mark = "✓" if done is not None and done.solved else "…" if done is not None else " "
        table.add_row(_fitting(console, mark), str(each.number), each.title, each.idea, str(each.minutes))
    console.print(table)
    solved = sum(study.progress.solved(each.file_name) for each in lessons())
    repaired = sum(
        done.solved for name, done in study.progress.exercises.items() if name.startswith("repair")
    )
    console.print()
    _say(
        console,
        f"{solved} of {len(lessons())} exercises solved, {repaired} of {len(PLANTS)} repairs. "
        + _next(study, study.after_all()),
    )


def _next(study: Study, task: Task | None) -> str:
    if task is None:
        return "Everything is solved: headwise learn quiz asks what interviews ask."
    if not task.which.isdigit():
        return f"Next: headwise learn repair{_in_folder(study)}"
    verb = "check" if task.path.exists() else "start"
    read = f" (first read it: headwise learn read {task.which})" if verb == "start" else ""
    return f"Next: headwise learn {verb} {task.which}{_in_folder(study)}{read}"


@learn.command()
def read(
    number: Number,
    run: Annotated[bool, typer.Option(help="Run the code and show what it prints.")] = True,
) -> None:
    """Read a lesson in the terminal: text, code, and what the code prints; pictures are in its notebook.

    Example: headwise learn read 3
    """

    chosen = lesson(number)
    shown = {}
    if run:
        with progress_line(f"Running lesson {number}"):
            from ..course.rendering import run_lesson

            shown = run_lesson(chosen)
    console = console_of("learn")
    _markdown(console, f"# {chosen.number}. {chosen.title}\n\n*{chosen.idea}*")
    for place, cell in enumerate(chosen.cells):
        console.print()
        if cell.kind == "markdown":
            _markdown(console, cell.text)
        elif cell.kind == "code":
            _code(console, cell.text, shown.get(place))
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
        _say(console, f"[{code.count(chr(10)) + 1} lines that draw a picture: see the notebook]")
        return
    console.print(Syntax(code, "python", background_color="default"), soft_wrap=True)
    if shown is not None and shown.printed.strip():
        console.print()
        console.print(shown.printed.rstrip(), markup=False, soft_wrap=True, style="dim")
    if shown is not None and shown.pictures:
        _say(console, "[a picture: see the notebook]")


@learn.command()
def notebook(number: Number, folder: Folder = Path(FOLDER)) -> None:
    """Lay a lesson into your folder as a notebook, for Jupyter or Colab.

    Example: headwise learn notebook 3
    """
    from ..course.rendering import notebook as written

    chosen = lesson(number)
    place = folder / f"{chosen.number:02}_{chosen.name}.ipynb"
    laid = Study(folder).lay(place, written(chosen))
    typer.echo(f"Wrote {place}" if laid else f"{place} is there already and stays as it is")


@learn.command()
def start(number: Number, folder: Folder = Path(FOLDER)) -> None:
    """Lay the exercise of a lesson into your folder.

    Example: headwise learn start 3
    """
    study = Study(folder)
    _begin(study, study.task(str(number)))


@learn.command()
def repair(
    number: Annotated[
        int | None, typer.Argument(metavar="N", help="Which; the next without.", show_default=False)
    ] = None,
    folder: Folder = Path(FOLDER),
) -> None:
    """Find one fault that was planted in right code, and repair it.

    Example: headwise learn repair
    """
    study = Study(folder)
    _begin(study, study.next_repair() if number is None else study.task(f"repair {number}"))


def _begin(study: Study, task: Task) -> None:
    laid = study.start(task)
    typer.echo(f"Wrote {task.path}" if laid else f"{task.path} is there already and stays as it is")
    name = task.exercise.name
    what = f"Write {name}" if task.exercise.kind == "write" else f"One thing in {name} is wrong: repair it"
    typer.echo(f"{task.title}. {what}. Then: headwise learn check {task.which}{_in_folder(study)}")


@learn.command()
def check(
    which: Which = None,
    watch: Annotated[bool, typer.Option("--watch", help="Check again whenever the file is saved.")] = False,
    answer: Annotated[bool, typer.Option("--answer", help="Name the mistake at once, no hints.")] = False,
    folder: Folder = Path(FOLDER),
    trust: Trust = False,
) -> None:
    """Examine your exercise. Exit code 0: right; 1: not yet.

    What is wrong is told as a hint; headwise learn hint tells more.

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
            _tell(console, study, task, outcome, _last_hint(study, task, outcome, answer))
            raise typer.Exit(0 if outcome.ok else 1)
        for _ in saves(task.path):
            console.clear()
            try:
                outcome = attempt(template)
            except HeadwiseError as mistake:  # a save may mend that, too
                typer.echo(f"headwise: {mistake}", err=True)
                continue
            _tell(console, study, task, outcome, _last_hint(study, task, outcome, answer))
            if outcome.ok:
                raise typer.Exit(0)
            _say(console, f"Save {task.path} to check it again; Ctrl-C ends.")


def _last_hint(study: Study, task: Task, outcome: Outcome, answer: bool) -> int | None:
    return None if answer or outcome.report is None or outcome.ok else study.hint(task, at_least=1)


def _tell(console: Console, study: Study, task: Task, outcome: Outcome, hint: int | None) -> None:
    """Print the outcome of a check; `hint` is the last hint to show, None for the answer."""
    from ..examiner.report_formats import print_to

    ask = f"{task.which}{_in_folder(study)}"
    if outcome.left:
        _say(console, f"{task.title}: still to be written:")
        for part in outcome.left:
            _say(console, f"  line {part.line}, {part.name}" + (f": {part.task}" if part.task else ""))
    elif outcome.seen is not None:
        _say(console, outcome.seen)
    elif outcome.ok:
        assert outcome.report is not None
        _say(console, f"✓ {outcome.report.summary}. Well done!")
        _say(console, f"{task.title} is solved. See ours: headwise learn solution {ask}")
        _say(console, _next(study, study.after(task)))
    elif outcome.otherwise:
        _say(console, f"{task.exercise.name} is right in a way of its own, and not what is asked:")
        for words in outcome.otherwise:
            _say(console, f"  {words}")
    else:
        assert outcome.report is not None
        laddered = bool(outcome.report.faults)  # a stop or unknown numbers have nothing to hold back
        print_to(console, outcome.report, hint if laddered else None)
        if laddered and hint is not None:
            console.print()
            more = "headwise learn hint" if hint < 3 else "the answer: headwise learn check --answer"
            _say(console, f"More help: {more} {ask}")


def _in_folder(study: Study) -> str:
    """Return the --folder option for commands, "" for the usual folder."""
    return "" if study.folder == Path(FOLDER) else f" --folder {study.folder}"


@learn.command()
def hint(which: Which = None, folder: Folder = Path(FOLDER), trust: Trust = False) -> None:
    """One more hint on what is wrong: up to three, each telling more.

    Example: headwise learn hint 3
    """
    study = Study(folder)
    task = study.task(which)
    with template_of_checks() as template, progress_line(f"Checking {task.path}"):
        outcome = study.check(task, template, trust, counts=False)
    _tell(console_of("learn"), study, task, outcome, study.hint(task))


@learn.command()
def solution(
    which: Which = None,
    give_up: Annotated[
        bool, typer.Option("--give-up", help="Show it although yours is not right yet.")
    ] = False,
    folder: Folder = Path(FOLDER),
) -> None:
    """Show our solution, once yours is right.

    Example: headwise learn solution 3
    """
    study = Study(folder)
    task = study.task(which)
    if not give_up and not study.progress.solved(task.key):
        raise ArgumentError(
            f"solution must come after success: {task.which} is not solved; headwise learn hint "
            f"{task.which}, or --give-up"
        )
    typer.echo(task.exercise.solution, nl=False)


@learn.command()
def reset(which: Which = None, folder: Folder = Path(FOLDER)) -> None:
    """Begin an exercise anew. Your file is kept under another name.

    Example: headwise learn reset 3
    """
    study = Study(folder)
    task = study.task(which)
    kept = study.reset(task)
    if kept is not None:
        typer.echo(f"Your file is {kept} now; the exercise counts as not solved")
    typer.echo(f"Wrote {task.path}")


@learn.command()
def quiz(
    level: Annotated[str | None, option(help="easy, medium or hard; all without.")] = None,
    lesson: Annotated[int | None, option(help="Only of this lesson.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what you knew already.")] = False,
    folder: Folder = Path(FOLDER),
) -> None:
    """Answer what interviews ask: think, press Enter, compare; y if you knew it. q ends.

    Numbers in an answer are computed there and then.

    Example: headwise learn quiz --level easy
    """
    study = Study(folder)
    questions = [
        question
        for question in deck(level, lesson)
        if everything or not study.progress.questions.get(question.asked, False)
    ]
    console = console_of("learn")
    if not questions:
        _say(console, "You knew them all. --all asks again.")
        return
    known = 0
    asked = 0
    for number, question in enumerate(questions, 1):
        console.print()
        _markdown(console, f"**{number} of {len(questions)}, {question.level}.** {question.asked}")
        if _entered("Enter shows the answer, q ends: ") in ("q", None):
            break
        _answer(console, question)
        said = _entered("Did you know it? y or n, q ends: ")
        if said in ("q", None):
            break
        asked += 1
        known += said == "y"
        study.progress.questions[question.asked] = said == "y"
        study.progress.save()
    console.print()
    _say(console, f"{known} of {asked} known.")


def _answer(console: Console, question: Question) -> None:
    _markdown(console, question.answer)
    if "cell" in question.answer and not question.check:
        _say(console, f"(The cell is one of lesson {question.lesson}: headwise learn read {question.lesson})")
    if question.check:
        printed = computed(question).rstrip()
        if printed:
            _markdown(console, f"Computed just now:\n```text\n{printed}\n```")


def _entered(words: str) -> str | None:
    """Return the line typed, in lower case; None at the end of input."""
    typer.echo(words, nl=False)
    line = sys.stdin.readline()
    if not line:
        typer.echo()
        return None
    return line.strip().lower()


def _markdown(console: Console, text: str) -> None:
    from rich.markdown import Markdown

    from ..course.rendering import plain_formulas

    console.print(Markdown(plain_formulas(text)))


def _say(console: Console, words: str) -> None:
    from rich.text import Text

    console.print(Text(_fitting(console, words)))


def _fitting(console: Console, words: str) -> str:
    from ..examiner.report_formats.sentences import fitting

    return fitting(words, console.encoding)
