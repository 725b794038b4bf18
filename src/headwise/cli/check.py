"""`headwise check`: whether a file's attention is right, and which mistake it makes if not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..check.report import Report


def check(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE[:NAME]", help="Python source, and a class or function in it.", show_default=False
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
    width: Annotated[
        int | None, typer.Option(min=1, help="Build it with this d_model.", show_default=False)
    ] = None,
) -> None:
    """Check your attention: is it right, and if not, which mistake is it?

    The code runs in a process of its own, fenced in, beside torch's class with the same weights. Without NAME
    it is the class or function that looks most like multi-head attention.

    Exit code 0: right; 1: something is wrong; 2: nothing was checked.

    Example: headwise check mha.py:MultiHeadAttention --hint 1
    """
    from ..check import check_file
    from ..errors import ArgumentError, HeadwiseError
    from .patience import sign_of_life
    from .source import file_and_name

    path, name = file_and_name(source)
    if not 0 < seconds < math.inf:
        raise ArgumentError(f"seconds must be a positive number: got {seconds:g}; try 60")
    if as_json and hint is not None:
        raise ArgumentError(
            f"json must go without a hint: got --hint {hint}; JSON always holds the whole answer"
        )
    most = _bytes(memory)
    console = None if as_json else _console()

    def verdict() -> Report:
        with sign_of_life(f"Checking {_plain(source)}, {seconds:g} s at most"):
            return check_file(
                path, name, seconds=seconds, memory=most, trust=trust, embed_dim=width, num_heads=heads
            )

    if not watch:
        report = verdict()
        _show(report, console, hint)
        raise typer.Exit(0 if report.ok else 1)

    from .saves import saves

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
    from ..check.showing import as_json, print_to

    if console is None:
        typer.echo(as_json(report, indent=None if on_one_line else 2))
    else:
        print_to(console, report, hint)


def _say_that_it_waits(console: Console, source: str) -> None:
    from time import strftime

    from rich.text import Text

    from ..check.showing.letters import fitting

    words = f"{strftime('%H:%M:%S')}: save {_plain(source)} to check it again; Ctrl-C ends."
    console.print()
    console.print(Text(fitting(words, console.encoding), style="dim"))


def _console() -> Console:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        hint = 'headwise check prints with rich; install with: pip install "headwise[cli]"'
        raise ImportError(hint, name="rich") from error
    return Console(highlight=False)


def _bytes(size: str) -> int:
    from ..budget import parse
    from ..errors import ArgumentError

    try:
        return parse(size)
    except ArgumentError as error:
        raise ArgumentError(f'memory must be a size: got {size!r}; use e.g. "4 GiB"') from error


def _plain(what: object) -> str:
    from ..show.labels import plain

    return plain(str(what))
