"""`headwise check` and `headwise explain`: a file of somebody's attention.

`check` says whether it is right, and which mistake it makes if not, again after every save if asked to;
`explain` shows every step in the file's own numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated

import typer

from .completion import pages, python_files

if TYPE_CHECKING:
    from rich.console import Console

    from ..examiner.report import Report

__all__ = ["check", "explain", "saves"]


def check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]",
            help="Python source, and a class or function in it.",
            show_default=False,
            autocompletion=python_files,
        ),
    ],
    hint: Annotated[
        int | None,
        typer.Option(min=1, max=3, help="Hints up to this one instead of the answer.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for graders.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Check again whenever the file is saved.")] = False,
    seconds: Annotated[float, typer.Option(help="The longest the code may run.")] = 60.0,
    memory: Annotated[str, typer.Option(help="The most memory it may take.")] = "4 GiB",
    trust: Annotated[
        bool, typer.Option("--trust", help="Run it even where this system cannot fence it in.")
    ] = False,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Build it with this many heads.", show_default=False)
    ] = None,
    d_model: Annotated[
        int | None, typer.Option(min=1, help="Build it with this d_model.", show_default=False)
    ] = None,
    width: Annotated[int | None, typer.Option(min=1, hidden=True)] = None,
) -> None:
    """Is your attention right, and if not, which mistake is it?

    The code runs in a process of its own, fenced in, beside torch's class with the same weights. Without NAME
    it is the class or function that looks most like multi-head attention.

    Exit code 0: right; 1: something is wrong; 2: nothing was checked.

    Example: headwise check mha.py:MultiHeadAttention --hint 1
    """
    from ..errors import ArgumentError, HeadwiseError
    from .terminal import file_and_name, sign_of_life

    path, name = file_and_name(source)
    if not 0 < seconds < math.inf:
        raise ArgumentError(f"seconds must be a positive number: got {seconds:g}; try 60")
    if as_json and hint is not None:
        raise ArgumentError(
            f"json must go without a hint: got --hint {hint}; JSON always holds the whole answer"
        )
    if width is not None:
        if d_model is not None:
            raise ArgumentError(
                f"d-model must be given once: got --d-model {d_model} and --width {width}; --width is its "
                "old name, leave it out"
            )
        typer.echo(f"headwise: --width is called --d-model now: write --d-model {width}", err=True)
        d_model = width
    most = _bytes(memory)
    console = None if as_json else _console()

    def verdict() -> Report:
        with sign_of_life(f"Checking {_plain(source)}, {seconds:g} s at most"):
            from ..examiner import check_file  # and torch with it, once all else is right

            return check_file(
                path, name, seconds=seconds, memory=most, trust=trust, d_model=d_model, num_heads=heads
            )

    if not watch:
        report = verdict()
        _show(report, console, hint)
        raise typer.Exit(0 if report.ok else 1)

    try:
        for _ in saves(path):
            if console is not None:
                console.clear()
            try:
                _show(verdict(), console, hint, on_one_line=True)
            except HeadwiseError as mistake:  # a save may mend that, too
                typer.echo(f"headwise: {_plain(mistake)}", err=True)
            if console is not None:
                _say_that_it_waits(console, source)
    except KeyboardInterrupt:
        typer.echo(err=True)  # the prompt goes under the ^C
        raise


def _show(report: Report, console: Console | None, hint: int | None, on_one_line: bool = False) -> None:
    """In colour on a console; as JSON without one."""
    from ..examiner.showing import as_json, print_to

    if console is None:
        typer.echo(as_json(report, indent=None if on_one_line else 2))
    else:
        print_to(console, report, hint)


def _say_that_it_waits(console: Console, source: str) -> None:
    from time import strftime

    from rich.text import Text

    from ..examiner.showing.letters import fitting

    words = f"{strftime('%H:%M:%S')}: save {_plain(source)} to check it again; Ctrl-C ends."
    console.print()
    console.print(Text(fitting(words, console.encoding), style="dim"))


def _console() -> Console:
    from ..errors import needed

    with needed("rich", "headwise check prints with rich"):
        from rich.console import Console
    return Console(highlight=False)


def _bytes(size: str) -> int:
    from ..byte_sizes import parse
    from ..errors import ArgumentError

    try:
        return parse(size)
    except ArgumentError as error:
        raise ArgumentError(f'memory must be a size: got {size!r}; use e.g. "4 GiB"') from error


def _plain(what: object) -> str:
    from ..show.texts import plain

    return plain(str(what))


def explain(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]",
            help="A Python file, and which class or function in it.",
            autocompletion=python_files,
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.", autocompletion=pages)] = Path(
        "explain.html"
    ),
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Print the steps instead of writing a page.")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the file even where nothing fences it in.")
    ] = False,
) -> None:
    """See every step of attention in your code's own numbers.

    Writes one page that needs nothing else: expected beside yours, the first step where they part, and the
    sum behind every number. The file is run in a process of its own, as headwise check runs it.

    Example: headwise explain attention.py:MyAttention --out explain.html
    """
    from .terminal import file_and_name

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


# Again after every save


BETWEEN_LOOKS = 0.3  # seconds
TO_SETTLE = 0.05  # many editors empty a file before they fill it


def saves(path: Path) -> Iterator[None]:
    """Once at the start, then once after every save, for ever.

    A save is another time, size or inode: editors that write a new file and rename it are seen, too, and the
    moment without a file is waited out. What is saved while the caller is busy is seen afterwards.
    """
    seen = None
    while True:
        now = _looks(path)
        if now is None or now == seen:
            sleep(BETWEEN_LOOKS)
            continue
        sleep(TO_SETTLE)
        if _looks(path) == now:
            seen = now
            yield


def _looks(path: Path) -> tuple[int, int, int] | None:
    """What tells two savings apart; None where there is no file at the moment."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
