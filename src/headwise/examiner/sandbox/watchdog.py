"""Watch the sandboxed process: its time, memory, processes, files and output."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..marking.template import Copy
from .confine.limits import PROCESSES, descendants_of, memory_of, processor_time, share_of, waited
from .verdicts import HEADER

INTERVAL = 0.05
START_SECONDS = 120.0  # importing torch from a cold disk
PATIENCE = 3.0  # seconds for a process to report its line
STARVED = 30.0  # times `seconds`: the most time waiting for a processor that is not counted
OUTPUT_BYTES = 32 * 2**10  # kept from the beginning, and from the end
FOLDER_BYTES = 1 * 2**30
FOLDER_FILES = 10_000
MESSAGE_BYTES = 256 * 2**20


class Watch:
    """Follows a copy of the template until it ends, and kills it if it exceeds a limit.

    Args:
        copy: the copy of the template, in a session of its own.
        output, status, talk: our ends of its pipes: for its output, for reports of the processes outside the
            sandbox, and for messages from and to the confined process.
        folder: the only folder that it can write to.
        reply: returns the answer to a message: bytes to send, or b"" for none.
    """

    def __init__(
        self,
        copy: Copy,
        output: int,
        status: int,
        talk: int,
        folder: Path,
        seconds: float,
        memory: int,
        reply: Callable[[bytes, bytes], bytes] = lambda text, numbers: b"",
    ) -> None:
        self.process, self.folder, self.reply = copy, folder, reply
        self.seconds, self.memory = seconds, memory
        self.facts: dict[str, Any] = {}
        self.killed_for: str | None = None
        self.started: float | None = None  # when the learner's file began to run
        self.took = 0.0
        self._own_delay = 0.0  # seconds in which this process did not read: the other may have waited for it
        self._used_before = 0.0  # seconds of processor time when the learner's file began
        self.printed = 0
        self._head, self._tail = bytearray(), bytearray()
        self._output, self._status, self._talk, self._pending = output, status, talk, b""
        self._heard, self._unsent = bytearray(), b""

    def follow(self) -> None:
        """Follow the process until it has ended and nothing of it is left."""
        begun = time.monotonic()
        look_at = last = begun
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self._output, selectors.EVENT_READ, self._take_output)
            selector.register(self._status, selectors.EVENT_READ, self._take_status)
            selector.register(self._talk, selectors.EVENT_READ, self._converse)
            try:
                while (selector.get_map() or self.process.poll() is None) and self.killed_for is None:
                    self._once(INTERVAL if selector.get_map() else 0.002)
                    now = time.monotonic()
                    if self.started is not None:
                        self._own_delay += max(now - last - INTERVAL, 0.0)
                    last = now
                    if self.process.failure:  # the template ended, and with it all that it started
                        break
                    if self.started is None:
                        if now - begun > START_SECONDS:
                            self.killed_for = "timeout"
                    elif now >= look_at:
                        self.killed_for = self._too_much(now - self.started)
                        cost = time.monotonic() - now  # a machine may have thousands of processes
                        look_at = now + max(INTERVAL, min(10 * cost, 0.5))
            finally:
                if self.started is not None:
                    self.took = time.monotonic() - self.started
                if self.killed_for in ("timeout", "memory"):
                    self._ask_where()
                self._end()
            while selector.get_map() and self._once(1.0):  # what was still in the pipes
                pass

    def _once(self, seconds: float) -> bool:
        """Handle what can be read within this time; return True if there was anything."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fd)
        return bool(ready)

    def _converse(self) -> bool:
        """Read messages and send answers in pieces, without blocking; return False at the end."""
        try:
            if self._unsent:
                self._unsent = self._unsent[os.write(self._talk, self._unsent[: 2**18]) :]
                if not self._unsent:
                    self._selector.modify(self._talk, selectors.EVENT_READ, self._converse)
                return True
            piece = os.read(self._talk, 2**18)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._heard += piece
        if len(self._heard) < HEADER.size:
            return bool(piece)
        text, numbers = HEADER.unpack_from(self._heard)
        whole = HEADER.size + text + numbers
        if whole > MESSAGE_BYTES:
            self.killed_for = "result"
            return False
        if len(self._heard) >= whole:
            at = HEADER.size + text
            text_part, blob = bytes(self._heard[HEADER.size : at]), bytes(self._heard[at:whole])
            del self._heard[:whole]
            self._unsent = self.reply(text_part, blob)
            if self._unsent:
                self._selector.modify(self._talk, selectors.EVENT_WRITE, self._converse)
            else:  # no more questions: the process may end
                with suppress(OSError), socket.socket(fileno=os.dup(self._talk)) as wire:
                    wire.shutdown(socket.SHUT_WR)
        return bool(piece)

    @property
    def output(self) -> str:
        """The printed output; if it is long, its beginning and end."""
        left_out = self.printed - len(self._head) - len(self._tail)
        middle = f"\n... {left_out} bytes left out ...\n" if left_out else ""
        head, tail = (
            bytes(self._head).decode("utf-8", "replace"),
            bytes(self._tail).decode("utf-8", "replace"),
        )
        return head + middle + tail

    def _take_output(self) -> bool:
        piece = os.read(self._output, 2**16)
        self.printed += len(piece)
        room = OUTPUT_BYTES - len(self._head)
        self._head += piece[:room]
        self._tail += piece[max(room, 0) :]
        del self._tail[:-OUTPUT_BYTES]
        return bool(piece)

    def _take_status(self) -> bool:
        piece = os.read(self._status, 2**12)
        *lines, self._pending = (self._pending + piece).split(b"\n")
        for line in lines:
            self.facts |= json.loads(line)
        if "ready" in self.facts and self.started is None:
            self.started = time.monotonic()
            self._used_before = sum(map(processor_time, self._family()))
        return bool(piece)

    def _family(self) -> list[int]:
        """Return the confined process, and then all processes that it started."""
        keeper = self.facts.get("keeper")
        if isinstance(keeper, int):
            return descendants_of(keeper)
        number = self.process.pid
        return [] if number is None else [number, *descendants_of(number)]

    def _too_much(self, elapsed: float) -> str | None:
        """Return the name of the limit that is exceeded after `elapsed` seconds, or None."""
        family = self._family()
        crowd = len(family) > PROCESSES // 2
        if len(family) > PROCESSES or (crowd and elapsed > self.seconds):
            return "processes"
        if elapsed > self.seconds and self._is_late(family, elapsed):
            return "timeout"
        if self._used(family) > self.memory:
            return "processes" if crowd else "memory"
        return "files" if _too_large(self.folder) else None

    def _is_late(self, family: list[int], elapsed: float) -> bool:
        """Return True if its processor time, or its time asleep or at a disk, exceeds the limit."""
        working = max(sum(map(processor_time, family)) - self._used_before, 0.0)
        asleep = elapsed - working - self._starved(family) - min(self._own_delay, STARVED * self.seconds)
        return working > self.seconds or asleep > self.seconds

    def _used(self, family: list[int]) -> int:
        """Return the bytes in use beyond those of torch and headwise before the learner's file ran."""
        before = self.facts.get("memory", 0)
        used = sum(map(memory_of, family)) - before
        if used > self.memory and len(family) > 1:  # count pages that the copies share only once
            used = sum(map(share_of, family)) - before
        return used

    def _starved(self, family: list[int]) -> float:
        """Return the seconds it waited for a processor: they do not count against the learner."""
        lost = waited(family[0]) - self.facts.get("waited", 0.0) if family else 0.0
        return min(max(lost, 0.0), STARVED * self.seconds)

    def _ask_where(self) -> None:
        """Make the confined process report its current line and end, unless it ignores the signal."""
        family = self._family()
        if self.started is None or not family:
            return
        with suppress(OSError):
            os.kill(family[0], signal.SIGXCPU)
        until = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < until:
            if self._used(self._family()) > 2 * self.memory + 2**29:  # it keeps allocating
                return
            time.sleep(0.01)

    def _end(self) -> None:
        """Kill all processes that are left; in a process namespace, killing the keeper kills all."""
        keeper = self.facts.get("keeper")
        if self.killed_for is None:  # it ended by itself, or is about to
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
        if self.process.poll() is None and isinstance(keeper, int):
            if self.facts.get("own_processes"):
                _kill(keeper)
            else:
                for number in descendants_of(keeper):
                    _kill(number)
        try:
            self.process.wait(5.0 if isinstance(keeper, int) else 0.0)
        except subprocess.TimeoutExpired:
            first = self.process.pid
            for number in [*descendants_of(first), first] if first is not None else []:
                _kill(number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5.0)


def _kill(number: int) -> None:
    with suppress(OSError):
        os.kill(number, signal.SIGKILL)


def _too_large(folder: Path) -> bool:
    size = count = 0
    try:
        for parent, _, files in os.walk(folder):
            count += 1 + len(files)
            for name in files:
                with suppress(OSError):
                    size += os.lstat(os.path.join(parent, name)).st_blocks * 512
            if size > FOLDER_BYTES or count > FOLDER_FILES:
                return True
    except RecursionError:  # folders nested too deep
        return True
    return False
