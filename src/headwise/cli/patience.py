"""A sign of life while something takes its time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

__all__ = ["sign_of_life"]

AFTER = 2.0  # seconds: what is quicker needs no sign


@contextmanager
def sign_of_life(words: str) -> Iterator[None]:
    """Words and the time so far on stderr, from the third second on; gone when it is over.

    Only where somebody watches: nothing is written to a file or a pipe, or without rich.
    """
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        yield
        return
    encoding = sys.stderr.encoding or "ascii"
    spinner = SpinnerColumn("line")  # in every encoding
    said = TextColumn("{task.description}", markup=False)
    progress = Progress(spinner, said, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    progress.add_task(words.encode(encoding, "replace").decode(encoding), total=None)
    timer = Timer(AFTER, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be starting the display at this moment
        progress.stop()
