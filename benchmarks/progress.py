"""Progress: a bar if rich is installed and stderr is a terminal, else plain lines."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any


class Progress(AbstractContextManager["Progress"]):
    """Plain lines on standard error; results go to standard output."""

    def case(self, name: str, number: int, of: int) -> None:
        """Show that a case begins."""
        print(f"[{number}/{of}] {name}", file=sys.stderr, flush=True)

    def turn(self, done: int, of: int) -> None:
        """Show that a turn of the case is done."""

    def say(self, text: str) -> None:
        """Show a result."""
        print(text, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class _Bar(Progress):
    """A bar that is drawn between samples, because a drawing thread would disturb the timing."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._cases = self._turns = None

    def __enter__(self) -> _Bar:
        self._bar.start()
        self._cases = self._bar.add_task("cases", total=None)
        self._turns = self._bar.add_task("", total=None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def case(self, name: str, number: int, of: int) -> None:
        self._bar.update(self._cases, total=of, completed=number - 1)
        self._bar.reset(self._turns, total=None, description=name)
        self._bar.refresh()

    def turn(self, done: int, of: int) -> None:
        self._bar.update(self._turns, total=of, completed=done, refresh=True)

    def say(self, text: str) -> None:
        if sys.stdout.isatty():  # above the bar, which stands on the same screen
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            super().say(text)


def best() -> Progress:
    """Return a bar if it can be drawn, else plain lines."""
    if not sys.stderr.isatty():
        return Progress()
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars
    except ImportError:
        return Progress()
    columns = (TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    screen = Console(stderr=True)
    return _Bar(Bars(*columns, console=screen, transient=True, auto_refresh=False, redirect_stdout=False))
