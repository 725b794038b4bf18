"""Checking a file elsewhere: what came of it, as `run` says it."""

from __future__ import annotations

import errno
import os
import signal
import socket
import struct
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..report import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from ..evidence import Evidence

    Answer = tuple[Tensor, int] | Problem  # the output, and which of the masks offered it was for

HEADER = struct.Struct(">IQ")  # of a message: bytes of JSON, bytes of numbers


@dataclass
class Outcome:
    """Evidence, or the problem that kept it from being gathered; one of the two is there.

    Both, where it was the answers to what was asked then that did not come.
    """

    evidence: Evidence | None = None
    problem: Problem | None = None
    protections: list[str] = field(default_factory=list)  # in force while the file ran, in words
    missing: list[str] = field(default_factory=list)  # those this system does not offer, with the reason
    output: str = ""  # what the file printed: all of it, or the beginning and the end
    notes: list[str] = field(default_factory=list)  # what was noticed and is no problem
    answers: list[Answer] | None = None  # to what was asked once the evidence was here
    seconds: float = 0.0  # the learner's own, without importing torch


LONGEST_MESSAGE = 2000

_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_NETWORK = {errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}
_FORBIDDEN_WORDS = (
    "it tried to touch something it may not ({}): a checked file reads its own folder and Python, and writes "
    "to its temporary folder"
)
# What torch, the C library, OpenBLAS, OpenMP and C++ say when they get no memory.
_ALLOCATION = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "out of memory",
    "memory allocation still failed",
    "memory allocation failed",
    "memory exhausted",
    "bad_alloc",
)
LAST_WORDS = 1000
_CRASHES = {"SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"}


def of_exception(error: BaseException, path: Path, stage: str, memory: int, *, confined: bool) -> Problem:
    """What the learner's file raised.

    Args:
        stage: "import", or "call" once there was something to examine.
        memory: the bytes it may take.
        confined: behind the fences, where being refused a file is their doing.
    """
    try:
        said = str(error)
    except Exception:  # their exception, their __str__
        said = ""
    said = said[:LONGEST_MESSAGE]
    line = _line(error, path)
    if isinstance(error, MemoryError) or _about_memory(said):
        return _out_of_memory(memory, line, said or "MemoryError")
    limit = _limit_behind(error, said) if confined else None
    if limit is not None:
        kind, message = limit
        return Problem("limits", kind, message, line)
    kind = type(error).__name__
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        said = f"the file calls sys.exit({code}) while it is {_WHILE[stage]}"
    elif isinstance(error, KeyboardInterrupt):
        said = f"the file raises KeyboardInterrupt while it is {_WHILE[stage]}"
    return Problem(stage, kind, said[:LONGEST_MESSAGE], line)


_WHILE = {"import": "imported", "call": "examined"}


def _out_of_memory(memory: int, line: int | None, said: str = "") -> Problem:
    message = f"it ran out of the memory that headwise allows, {memory / 2**30:.3g} GiB beyond torch's own"
    said = f" ({said})" if said else ""
    return Problem("limits", "memory", f"{message}{said}; memory= or --memory raises that", line)


def _about_memory(said: str) -> bool:
    return any(words in said.lower() for words in _ALLOCATION)


def _limit_behind(error: BaseException, said: str) -> tuple[str, str] | None:
    """The limit the exception comes from, if from one: (kind, sentence)."""
    if isinstance(error, RuntimeError) and "can't start new thread" in said:
        return "processes", "it started more threads and processes than it may have"
    if not isinstance(error, OSError):
        return None
    if any(_about_network(each) for each in _behind(error)):
        return "network", f"it tried to reach the network, and there is none here ({said})"
    if isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN:
        return "processes", "it started more processes than it may have"
    if error.errno == errno.EFBIG:
        return "files", "it wrote a file larger than it may"
    if error.errno == errno.EMFILE:
        return "files", "it opened more files than it may"
    if error.errno in _FORBIDDEN:
        return "forbidden", _FORBIDDEN_WORDS.format(said)
    return None


def _behind(error: OSError) -> list[OSError]:
    """It and those it was made of: libraries wrap what a socket says."""
    found: list[OSError] = []
    following: list[object] = [error]
    while following and len(found) < 10:
        one = following.pop()
        if isinstance(one, OSError) and one not in found:
            found.append(one)
            following += [getattr(one, "reason", None), one.__cause__, one.__context__]
    return found


def _about_network(error: OSError) -> bool:
    if isinstance(error, socket.gaierror) or error.errno in _NO_NETWORK:
        return True
    if error.errno not in _FORBIDDEN or error.filename is not None or error.__traceback__ is None:
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]  # Landlock refuses as it refuses a file
    return last.filename == socket.__file__ or any(word in (last.line or "") for word in ("connect", "bind"))


def _line(error: BaseException, path: Path) -> int | None:
    """In the learner's file, the last of their lines on the way."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return lines[-1] if lines else None


def hidden(problem: Problem, filename: str, reach: list[str]) -> Problem:
    """A file that was not found there may be one that is here, out of its reach: then the verdict says so."""
    if problem.kind != "FileNotFoundError":
        return problem
    if not os.path.isabs(filename):
        problem.message += "; a checked file runs in an empty folder, and finds its own by __file__"
        return problem
    within = any(filename == each or filename.startswith(f"{each}/") for each in reach)
    if within or not (os.path.lexists(filename) or os.path.isdir(os.path.dirname(filename))):
        return problem
    return Problem("limits", "forbidden", _FORBIDDEN_WORDS.format(problem.message), problem.line)


def of_kill(reason: str, *, seconds: float, memory: int, line: int | None) -> Problem:
    """Why the watch ended it."""
    if reason == "memory":
        return _out_of_memory(memory, line)
    messages = {
        "timeout": f"it ran for more than {seconds:g} seconds and was ended; does a loop never end?",
        "processes": "it started more processes than it may have and was ended",
        "result": "what came back is no evidence: it wrote where only the examination may, and was ended",
        "files": "it wrote more to its temporary folder than it may and was ended",
    }
    return Problem("limits", reason, messages[reason], line)


def of_status(status: int | None, line: int | None, memory: int, output: str) -> Problem:
    """An end without a result; `status` as os.wait gives it.

    A library that gets no memory may end the process by its own hand: its last words say so, and then it was
    the limit's doing.
    """
    if status is None:
        return Problem("limits", "killed", "its process was ended from outside", line)
    number, code = status & 0x7F, status >> 8
    if (code or number == signal.SIGABRT) and _about_memory(output[-LAST_WORDS:]):
        return _out_of_memory(memory, line, output[-LAST_WORDS:].strip().rpartition("\n")[2])
    if not number:
        message = (
            f"its process ended with status {code} before it could be examined: "
            "the file or a library it uses calls exit"
        )
        return Problem("limits", "exit", message, line)
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGSEGV":
        message = "it crashed Python itself (segmentation fault): memory was touched that is not its own"
        return Problem("limits", "segfault", message, line)
    if name in _CRASHES:
        return Problem("limits", "crash", f"it crashed Python itself ({name})", line)
    if name in ("SIGXCPU", "SIGALRM"):
        return Problem("limits", "timeout", "it took more processor time than it may and was ended", line)
    if name == "SIGXFSZ":
        return Problem("limits", "files", "it wrote a file larger than it may and was ended", line)
    return Problem("limits", "killed", f"its process was ended by {name}", line)
