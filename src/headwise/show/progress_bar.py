"""How far something long is: a bar on a terminal, with rich; else a line now and then, on stderr."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Bar"]

LINES = 30.0  # seconds between two


class Bar:
    """Things that are done, of how many, how fast, and how long it will take.

    with Bar("Surveying", "documents") as bar:
        bar.tell(1, 2000)
    """

    def __init__(self, words: str, things: str) -> None:
        self.words, self.things = words, things
        self._bar: Progress | None = None
        self._before: int | None = None  # done when it began
        self._began = self._told = monotonic()

    def tell(self, done: int, total: int) -> None:
        """So many are done."""
        now = monotonic()
        if self._before is None:
            self._before, self._began = done, now
            self._bar = _drawn(self.words, self.things, done, total)
        rate = (done - self._before) / max(now - self._began, 1e-9)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, rate=f"{rate:,.3g} {self.things}/s")
        elif now - self._told > LINES and rate:
            self._told = now
            left = _time((total - done) / rate)
            said = f"{done:,} of {total:,} {self.things}, {rate:,.3g} a second, {left} left"
            sys.stderr.write(f"{self.words}: {said}\n")
            sys.stderr.flush()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _time(seconds: float) -> str:
    """Hours, minutes and seconds.

    Example:
        >>> _time(3725)
        '1:02:05'
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _drawn(words: str, things: str, done: int, total: int) -> Progress | None:
    """A bar that has begun; None where there is nobody to see it or nothing to draw it."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ModuleNotFoundError:
        return None
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
    )
    bar.add_task(words, total=total, completed=done, rate=f"0 {things}/s")
    bar.start()
    return bar
