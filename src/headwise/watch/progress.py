"""A progress bar for what takes longer than a moment."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from time import monotonic
from typing import Any, TypeVar

__all__ = ["tracked"]

AFTER = 2.0  # seconds: what is quicker needs no bar

Item = TypeVar("Item")


def tracked(
    items: Iterable[Item], words: str, wanted: bool = True, total: int | None = None
) -> Iterator[Item]:
    """The items, with a bar on stderr once it is clear that all of them will take over two seconds.

    Only where somebody watches: nothing is written to a file or a pipe, or without rich.

    Args:
        words: what is being done.
        wanted: False: no bar.
        total: how many there are, where len() does not say.

    Example:
        >>> list(tracked([1, 2], "counting"))
        [1, 2]
    """
    total = len(items) if total is None and isinstance(items, Sized) else total
    bar, started = None, monotonic()
    try:
        for done, item in enumerate(items):
            if wanted and bar is None and done and _is_long(monotonic() - started, done, total):
                bar = _bar(words, total)
                wanted = bar is not None
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def _is_long(seconds: float, done: int, total: int | None) -> bool:
    return seconds > AFTER or (total is not None and seconds / done * total > AFTER)


def _bar(words: str, total: int | None) -> Any:
    """A bar that has begun; None where there is nobody to see it or nothing to draw it."""
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        return None
    bar = Progress(console=Console(stderr=True), transient=True)
    bar.add_task(words, total=total)
    bar.start()
    return bar
