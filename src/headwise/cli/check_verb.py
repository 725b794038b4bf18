"""`headwise check` and `headwise explain`: a file of somebody's attention.

`check` says whether it is right, and which mistake it makes if not, again after every save if asked to;
`explain` shows every step in the file's own numbers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..errors import ArgumentError, HeadwiseError
from ..show.texts import plain
from .terminal import (
    complete_pages,
    complete_python_files,
    console_of,
    file_and_name,
    option,
    progress_line,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ..examiner.marking.rubric import Mark
    from ..examiner.marking.template import Template
    from ..examiner.report import Report


def check(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE[:NAME]|FOLDER",
            help="A Python file or a notebook, and a class or function in it; or folders of files.",
            show_default=False,
            autocompletion=complete_python_files,
        ),
    ],
    name: Annotated[
        str | None,
        option("--name", metavar="NAME", help="The class or function to check in files given without :NAME."),
    ] = None,
    hint: Annotated[
        int | None, option(min=1, max=3, help="Show hints up to this number instead of the answer.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, for graders; for several files one line each.")
    ] = False,
    csv: Annotated[Path | None, option("--csv", help="Also write the table to this file.")] = None,
    rubric: Annotated[
        Path | None, option("--rubric", metavar="FILE", help="Give points according to this TOML file.")
    ] = None,
    feedback: Annotated[
        Path | None,
        option(
            "--feedback",
            metavar="DIR",
            help="Write a Markdown file for each submission, and class.md, into this folder.",
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Check again whenever the file is saved.")] = False,
    jobs: Annotated[
        int | None, option(min=1, help="How many files to check at a time; default: the number of cores.")
    ] = None,
    seconds: Annotated[
        float | None,
        option(help="Limit of processor time; default: 60 for one file, 10 for each of several."),
    ] = None,
    memory: Annotated[str, typer.Option(help="Limit of memory.")] = "4 GiB",
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the code even if this system has no sandbox.")
    ] = False,
    require: Annotated[
        list[str] | None,
        option(
            "--require",
            metavar="WHAT=HOW",
            help="Requirement of the task: mask=true-attends|true-hides|added|lengths (meaning of the mask), "
            "causal=always|argument, weights=returned, heads=argument, d_model=argument, batch=first, "
            "designs=none (no variant, such as rotary positions).",
        ),
    ] = None,
    heads: Annotated[int | None, option(min=1, help="Build the class with this number of heads.")] = None,
    d_model: Annotated[int | None, option(min=1, help="Build the class with this d_model.")] = None,
    arg: Annotated[
        list[str] | None,
        option(
            "--arg",
            metavar="NAME=VALUE",
            help="Build the class with this argument; VALUE is a Python literal.",
        ),
    ] = None,
    role: Annotated[
        list[str] | None,
        option(
            "--role",
            metavar="q=PARAMETER",
            help="The parameter for q, k, v, o or qkv, for example q=W_q.weight.",
        ),
    ] = None,
) -> None:
    """Check attention code, and name its mistake if it has one.

    The code runs in a sandboxed process and is compared with torch's class with the same weights. Without
    NAME, the classes and functions that look most like multi-head attention are checked; if one of them is
    wrong, the file is wrong. Several files, or a folder, give one table and a summary of all files.

    For marking: if several files are checked, each can read only itself, the files it imports and, in a
    folder below FOLDER, the other files of that folder; symbolic links are refused. --rubric gives
    points, --feedback writes a file for each student (with hints up to --hint), and nearly identical
    files are listed with the share of their tokens that are equal.

    Exit code 0: right; 1: wrong; 2: not judged. For several files: 1 if any is wrong, else 2 if any was not
    judged, else 0.

    The verdict is based on outputs for weights and inputs that are drawn after the examination, so a file
    that tampers with the examination does not pass. A file that computes the right numbers in another way
    does pass. Conventions, variants, gradients, dropout and the state dict are not measured again: for
    these the verdict uses the results from the process that ran the file.

    Example: headwise check mha.py:MultiHeadAttention --hint 1

    Example: headwise check submissions/ --csv class.csv --require mask=true-attends

    Example: headwise check submissions/ --rubric rubric.toml --feedback feedback/ --hint 2
    """
    many = len(sources) > 1 or Path(sources[0]).expanduser().is_dir() or bool(rubric or feedback)
    if seconds is not None and not 0 < seconds < math.inf:
        raise ArgumentError(f"seconds must be a positive number: got {seconds:g}; try 60")
    if hint is not None and many and not (as_json or feedback):
        raise ArgumentError(
            f"hint must be used with --json or --feedback for several files: got --hint {hint} alone; "
            "add --feedback DIR"
        )
    if watch and many:
        raise ArgumentError(
            "watch must be used with one file, without --rubric and --feedback: got "
            f"{plain(' '.join(sources))}; name one file"
        )
    options = {
        "seconds": (SECONDS_OF_MANY if many else SECONDS) if seconds is None else seconds,
        "memory": _bytes(memory), "trust": trust, "d_model": d_model, "num_heads": heads,
        "roles": _roles(role), "arguments": _literals(arg),
    }  # fmt: skip
    words = tuple(require or ())
    if many:
        _check_many(
            sources, name, words, options, as_json=as_json, csv=csv, jobs=jobs, hint=hint, rubric=rubric,
            feedback=feedback,
        )  # fmt: skip
    else:
        path, own = file_and_name(sources[0])
        _check_one(
            sources[0], path, own or name, words, options, hint=hint, as_json=as_json, csv=csv, watch=watch
        )


SECONDS, SECONDS_OF_MANY = 60.0, 10.0


def _check_one(
    source: str, path: Path, name: str | None, words: tuple[str, ...], options: dict[str, Any], *,
    hint: int | None, as_json: bool, csv: Path | None, watch: bool,
) -> NoReturn:  # fmt: skip
    def verdict(template: Template | None) -> Report:
        with progress_line(f"Checking {plain(source)}, {options['seconds']:g} s at most"):
            from ..examiner import check_file
            from ..examiner.marking.requirements import hold_to, requirements_of

            required = requirements_of(words)
            report = check_file(path, name, template=template, **options)
            hold_to(report, required, path)
            return report

    with template_of_checks() as template:  # begins at once: importing torch is what takes long
        console = None if as_json else console_of("check")
        if not watch:
            try:
                report = verdict(template)
            except HeadwiseError as mistake:
                if not as_json:
                    raise
                from ..examiner.marking.submissions import not_checked

                report = not_checked(path, name, mistake)
            _show(report, console, hint)
            if csv is not None:
                _write_csv([report], csv)
            raise typer.Exit(report.exit_code)
        try:
            for _ in saves(path):
                if console is not None:
                    console.clear()
                try:
                    _show(verdict(template), console, hint, on_one_line=True)
                except HeadwiseError as mistake:  # a save may mend that, too
                    typer.echo(f"headwise: {plain(str(mistake))}", err=True)
                if console is not None:
                    _say_that_it_waits(console, source)
        except KeyboardInterrupt:
            typer.echo(err=True)  # the prompt goes under the ^C
            raise
    raise AssertionError("unreachable: saves() does not end")


def template_of_checks() -> AbstractContextManager[Template | None]:
    """Start the process that imports torch and runs files; None on systems that cannot run files."""
    from ..examiner.marking.template import Template

    return Template() if os.name == "posix" else nullcontext()


def _check_many(
    sources: list[str], name: str | None, words: tuple[str, ...], options: dict[str, Any], *,
    as_json: bool, csv: Path | None, jobs: int | None, hint: int | None, rubric: Path | None,
    feedback: Path | None,
) -> NoReturn:  # fmt: skip
    files: list[tuple[Path, str | None]] = []
    folders: list[Path] = []
    with template_of_checks() as template:
        console = None if as_json else console_of("check")
        for source in sources:
            folder = Path(source).expanduser()
            if folder.is_dir():
                from ..examiner.marking.submissions import collected

                files += [(file, name) for file in collected([folder])]
                folders.append(folder)
            else:
                path, own = file_and_name(source)
                files.append((path, own or name))
        with progress_line(f"Checking {len(files)} files", at_once=True) as progress:
            from ..examiner.marking.requirements import requirements_of
            from ..examiner.marking.rubric import read_rubric
            from ..examiner.marking.submissions import check_files, exit_code_of, json_line

            required = requirements_of(words)
            scheme = None if rubric is None else read_rubric(rubric)
            if feedback is not None:
                from ..examiner.marking.feedback import make_folder

                make_folder(feedback)
            reports, ready, marks = [], [], []

            def count(report: Report) -> None:
                ready.append(report)
                progress.count(len(ready), len(files))

            progress.count(0, len(files))
            for report in check_files(
                files, jobs=jobs, require=required, folders=folders, template=template, done=count, **options
            ):
                reports.append(report)
                marks += [] if scheme is None else [scheme.mark(report)]
                if as_json:
                    typer.echo(json_line(report, hint, marks[-1] if marks else None))
    if csv is not None:
        _write_csv(reports, csv, marks)
    if feedback is not None:
        from ..examiner.marking.feedback import write_feedback

        write_feedback(feedback, reports, marks or None, hint)
    if console is not None:
        _show_class(reports, marks, console)
    raise typer.Exit(exit_code_of(reports))


def _show_class(reports: list[Report], marks: list[Mark], console: Console) -> None:
    """Print the table, statistics of the class, similar files, and protections that this system lacks."""
    from ..examiner.marking.submissions import as_table, facts_in_words, in_numbers, missing_in_words

    console.print(as_table(reports, marks="utf" in console.encoding.lower(), points=marks))
    for title, lines in (
        ("", in_numbers(reports)),
        ("In common:", facts_in_words(reports)),
        ("This system lacks:", missing_in_words(reports)),
    ):
        if lines:
            console.print()
        if lines and title:
            console.print(title, markup=False)
        for line in lines:
            console.print(f"  {line}" if title else line, markup=False)


def _write_csv(reports: list[Report], path: Path, marks: Sequence[Mark] = ()) -> None:
    from ..examiner.marking.submissions import write_csv

    try:
        with open(path, "w", encoding="utf-8", newline="") as file:
            write_csv(reports, file, marks)
    except OSError as error:
        raise ArgumentError(
            f"csv must be a writable file: {path}: {error.strerror}; choose another"
        ) from error


def _roles(arguments: list[str] | None) -> dict[str, str] | None:
    roles: dict[str, str] = {}
    for argument in arguments or ():
        projection, _, parameter = argument.partition("=")
        if projection not in ("q", "k", "v", "o", "qkv") or not parameter:
            raise ArgumentError(
                f"role must be q, k, v, o or qkv, = and a parameter: got {argument!r}; try q=W_q.weight"
            )
        roles[projection] = parameter
    return roles or None


def _literals(arguments: list[str] | None) -> dict[str, object] | None:
    import ast

    literals: dict[str, object] = {}
    for argument in arguments or ():
        name, equals, value = argument.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError(f"arg must be NAME=VALUE: got {argument!r}; write --arg dropout=0.1")
        try:
            literals[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            if not value or not value.replace("_", "").replace("-", "").isalnum():
                raise ArgumentError(
                    f"arg must be a Python literal: got {argument!r}; write --arg {name}=0.1 or "
                    f"--arg {name}=\"'text'\""
                ) from None
            literals[name] = value  # a word without quotes, as shells take them away
    return literals or None


def _show(report: Report, console: Console | None, hint: int | None, on_one_line: bool = False) -> None:
    """Print a report in colour on a console, or as JSON without one."""
    from ..examiner.report_formats import as_json, print_to

    if console is None:
        typer.echo(as_json(report, indent=None if on_one_line else 2, hint=hint))
    else:
        print_to(console, report, hint)
        if hint is not None and report.verdict == "wrong":
            more = f"Use --hint {hint + 1} for more, or no" if hint < 3 else "Use no"
            console.print(f"\n{more} --hint for the full report.", markup=False)


def _say_that_it_waits(console: Console, source: str) -> None:
    from time import strftime

    from rich.text import Text

    from ..examiner.report_formats.sentences import fitting

    words = f"{strftime('%H:%M:%S')}: save {plain(source)} to check it again; Ctrl-C ends."
    console.print()
    console.print(Text(fitting(words, console.encoding), style="dim"))


def _bytes(size: str) -> int:
    from ..byte_sizes import parse

    try:
        return parse(size)
    except ArgumentError as error:
        raise ArgumentError(f'memory must be a size: got {size!r}; try "4 GiB"') from error


def explain(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]",
            help="A Python file, and a class or function in it.",
            autocompletion=complete_python_files,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.", autocompletion=complete_pages)] = Path(
        "explain.html"
    ),
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Print the steps instead of writing a page.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the file even if this system has no sandbox.")
    ] = False,
) -> None:
    """Show every step of attention in the numbers of your code.

    Writes a self-contained page with the expected numbers and yours, the first step where they differ, and
    how each number is computed. The file is run in a sandboxed process, as headwise check does.

    Example: headwise explain attention.py:MyAttention --out explain.html
    """
    path, name = file_and_name(file)

    from ..examiner.explanations import explain_file
    from ..examiner.explanations.page import EXAMPLE
    from ..show.offline_pages import check_page_path

    if not terminal:
        check_page_path(out, EXAMPLE)
    explanation = explain_file(path, name, trust=trust)
    if terminal:
        explanation.print()
        return
    explanation.to_html(out)
    typer.echo(explanation.verdict)
    typer.echo(f"Wrote {out}")


BETWEEN_LOOKS = 0.3  # seconds
TO_SETTLE = 0.05  # many editors empty a file before they fill it


def saves(path: Path) -> Iterator[None]:
    """Yield once at the start, then after every save, for ever.

    A save changes the time, size or inode of the file, so a new file that is renamed counts, too. While there
    is no file, this waits. A save while the caller is busy is noticed afterwards.
    """
    previous = None
    while True:
        now = _looks(path)
        if now is None or now == previous:
            sleep(BETWEEN_LOOKS)
            continue
        sleep(TO_SETTLE)
        if _looks(path) == now:
            previous = now
            yield


def _looks(path: Path) -> tuple[int, int, int] | None:
    """Return time, size and inode of the file, or None if there is none now."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
