"""Noticing that a file was saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import sleep

__all__ = ["saves"]

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
