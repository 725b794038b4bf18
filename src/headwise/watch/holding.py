"""Changes that several attachments may want at once: made for the first, undone after the last.

Attachments end in any order, so what one has changed must not be put back while another still needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable

__all__ = ["Undo", "hold", "undo_all"]

Undo = Callable[[], None]

_lock = threading.RLock()
_held: dict[Hashable, tuple[Undo, list[int]]] = {}  # what is changed -> how to undo it, and for how many


def hold(what: Hashable, change: Callable[[], Undo]) -> Undo:
    """Make a change unless it is made already; returns how to let go of it, once."""
    with _lock:
        if what not in _held:
            _held[what] = change(), [0]
        undo, count = _held[what]
        count[0] += 1
    gone = False

    def let_go() -> None:
        nonlocal gone
        with _lock:
            if gone:
                return
            gone = True
            count[0] -= 1
            if not count[0]:
                del _held[what]
                undo()

    return let_go


def undo_all(undos: list[Undo]) -> Undo:
    """Many as one, the last first."""

    def undo() -> None:
        for each in reversed(undos):
            each()

    return undo
