"""Changes that several attachments may want at once: made for the first, undone after the last.

Attachments end in any order and in any thread, so what one has changed must not be put back while another
still needs it. They may end in garbage collection as well, which comes at any moment, also in the middle of
a change: what it has to do then waits until the change is made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

__all__ = ["Undo", "hold", "turns", "undo_all"]

Undo = Callable[[], None]


class _Turns(AbstractContextManager[None]):
    """One change at a time, in all threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._waiting: deque[Undo] = deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        try:
            if self._depth == 1:
                self._catch_up()
        finally:
            self._depth -= 1
            self._lock.release()
        if self._waiting:  # came between the last look and the release
            self._try()

    def later(self, undo: Undo) -> None:
        """Do this as soon as no change is in the making: at once, or by whoever is making one."""
        self._waiting.append(undo)
        self._try()

    def _try(self) -> None:
        if self._lock.acquire(blocking=False):
            try:
                if not self._depth:  # else this thread is in the middle of a change
                    with self:
                        pass
            finally:
                self._lock.release()

    def _catch_up(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


turns = _Turns()
_held: dict[Hashable, tuple[Undo, list[int]]] = {}  # what is changed -> how to undo it, and for how many


def hold(what: Hashable, change: Callable[[], Undo]) -> Undo:
    """Make a change unless it is made already; returns how to let go of it, once."""
    with turns:
        if what not in _held:
            _held[what] = change(), [0]
        undo, count = _held[what]
        count[0] += 1
    gone = False

    def let_go() -> None:
        nonlocal gone
        with turns:
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
        for undo_last in reversed(undos):
            undo_last()

    return undo
