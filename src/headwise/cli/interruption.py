"""Ctrl-C in the process's own command line: at any moment it ends with 130, without a word.

Python turns Ctrl-C into a KeyboardInterrupt wherever it happens to be. In the middle of an import that is no
good place: extensions turn it into an ImportError, swallow it, or have it printed as "Exception ignored in".
There is nothing to tidy up then, so the process just ends. Everywhere else it is raised as usual, so that
files that are half written go, and terminals are put right. What else ends a process ends this one as ever,
half written files let go.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

__all__ = ["INTERRUPTED", "Interruption"]

INTERRUPTED = 130  # 128 + SIGINT, as shells count
AGAIN = 1.0  # seconds for what is tidied up: until then another Ctrl-C changes nothing
ENDED_BY = "SIGTERM", "SIGHUP"  # as timeout, a job queue and a closed window do
CURSOR = b"\x1b[?25h"  # comes back


class Interruption:
    """Hears Ctrl-C for the rest of the process, where Python would have heard it."""

    def __init__(self) -> None:
        self.pressed_at: float | None = None
        self.is_over = False  # all is done, Python itself is about to end
        for name in ENDED_BY:
            number = getattr(signal, name, None)  # not every system has them
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, tidy_and_end)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not in the background, or nohup
            signal.signal(signal.SIGINT, self._hear)
            self._usual = sys.unraisablehook
            sys.unraisablehook = self._unraisable

    @property
    def pressed(self) -> bool:
        """Return True if the user pressed Ctrl-C."""
        return self.pressed_at is not None

    def _hear(self, _: int, frame: FrameType | None) -> None:
        if self.is_over or may_just_end(frame):
            end()
        now = monotonic()
        if self.pressed_at is None or now - self.pressed_at > AGAIN:
            self.pressed_at = now
            raise KeyboardInterrupt

    def _unraisable(self, failed: sys.UnraisableHookArgs) -> None:
        """What is raised where nobody can catch it: a Ctrl-C is heard once more, where somebody can."""
        if issubclass(failed.exc_type, KeyboardInterrupt):
            self.pressed_at = None
            signal.raise_signal(signal.SIGINT)
        elif not self.pressed:
            self._usual(failed)


def may_just_end(frame: FrameType | None) -> bool:
    """Whether this is the middle of an import, and nothing is left behind by ending there."""
    files = sys.modules.get("headwise.whole_files")
    if files is not None and files.half_written:
        return False
    importing = False
    while frame is not None:
        file = frame.f_code.co_filename
        importing = importing or file.startswith("<frozen importlib")
        if "matplotlib" in file:  # has a lock in its cache of fonts, which it waits for the next time
            return False
        frame = frame.f_back
    return importing


def tidy_and_end(number: int, _: FrameType | None) -> None:
    """What ends a process at once ends this one as well, as soon as no half of a file is left."""
    files = sys.modules.get("headwise.whole_files")
    for half in tuple(files.half_written) if files is not None else ():
        with suppress(OSError):
            os.unlink(half)
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def end() -> None:
    """End the process."""
    try:
        if sys.stderr.isatty():
            hidden = "rich.live" in sys.modules
            os.write(sys.stderr.fileno(), b"\n" + (CURSOR if hidden else b""))  # the prompt goes under the ^C
        sys.stdout.flush()
    finally:
        os._exit(INTERRUPTED)
