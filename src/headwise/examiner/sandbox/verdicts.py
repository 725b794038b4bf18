"""The outcome of a checked file, and the sentences that say why its process ended."""

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
    """The evidence of a file, or the problem that prevented it.

    It has both if a problem occurred while the code answered the hidden probes.
    """

    evidence: Evidence | None = None
    problem: Problem | None = None
    protections: list[str] = field(default_factory=list)  # in force while the file ran
    missing: list[str] = field(default_factory=list)  # those this system lacks, with the reason
    output: str = ""  # what the file printed: all of it, or the beginning and the end
    notes: list[str] = field(default_factory=list)  # observations that are not problems
    answers: list[Answer] | None = None  # to the hidden probes
    seconds: float = 0.0  # without the import of torch


LONGEST_MESSAGE = 2000

_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_NO_NETWORK = {errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}
_FORBIDDEN_WORDS = (
    "it tried to access a file that it may not use ({}): a checked file can read its own folder and Python, "
    "and write to its temporary folder"
)
# words of torch, the C library, OpenBLAS, OpenMP and C++ if they get no memory
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
    """Return the problem for an exception of the learner's file.

    Args:
        error: that was raised.
        path: of the file.
        stage: "import", or "call" once the file was loaded.
        memory: the limit in bytes.
        confined: whether the file runs in a sandbox, which may have caused the exception.
    """
    try:
        message = str(error)
    except Exception:  # the learner's own __str__ raised
        message = ""
    message = message[:LONGEST_MESSAGE]
    line = _line(error, path)
    if isinstance(error, MemoryError) or _about_memory(message):
        return _out_of_memory(memory, line, message or "MemoryError")
    limit = _limit_behind(error, message) if confined else None
    if limit is not None:
        kind, message = limit
        return Problem("limits", kind, message, line)
    kind = type(error).__name__
    if isinstance(error, SystemExit):
        code = "" if error.code is None else repr(error.code)
        message = f"the file calls sys.exit({code}) while it is {_WHILE[stage]}"
    elif isinstance(error, KeyboardInterrupt):
        message = f"the file raises KeyboardInterrupt while it is {_WHILE[stage]}"
    return Problem(stage, kind, message[:LONGEST_MESSAGE], line)


_WHILE = {"import": "imported", "call": "examined"}


def _out_of_memory(memory: int, line: int | None, message: str = "") -> Problem:
    limit = f"it used more memory than the limit of {memory / 2**30:.3g} GiB (torch itself not counted)"
    message = f" ({message})" if message else ""
    return Problem("limits", "memory", f"{limit}{message}; raise the limit with memory= or --memory", line)


def _about_memory(message: str) -> bool:
    return any(words in message.lower() for words in _ALLOCATION)


def _limit_behind(error: BaseException, message: str) -> tuple[str, str] | None:
    """Return (kind, sentence) of the limit that caused the exception, or None."""
    if isinstance(error, RuntimeError) and "can't start new thread" in message:
        return "processes", "it started too many threads and processes"
    if not isinstance(error, OSError):
        return None
    if any(_about_network(each) for each in _behind(error)):
        return "network", f"it tried to use the network, which a checked file must not use ({message})"
    if isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN:
        return "processes", "it started too many processes"
    if error.errno == errno.EFBIG:
        return "files", "it wrote a file that is too large"
    if error.errno == errno.EMFILE:
        return "files", "it opened too many files"
    if error.errno in _FORBIDDEN:
        return "forbidden", _FORBIDDEN_WORDS.format(message)
    return None


def _behind(error: OSError) -> list[OSError]:
    """Return the error and its causes, because libraries wrap the errors of sockets."""
    errors: list[OSError] = []
    following: list[object] = [error]
    while following and len(errors) < 10:
        current = following.pop()
        if isinstance(current, OSError) and current not in errors:
            errors.append(current)
            following += [getattr(current, "reason", None), current.__cause__, current.__context__]
    return errors


def _about_network(error: OSError) -> bool:
    if isinstance(error, socket.gaierror) or error.errno in _NO_NETWORK:
        return True
    if error.errno not in _FORBIDDEN or error.filename is not None or error.__traceback__ is None:
        return False
    last = traceback.extract_tb(error.__traceback__)[
        -1
    ]  # Landlock raises the same errors for sockets and files
    return last.filename == socket.__file__ or any(word in (last.line or "") for word in ("connect", "bind"))


def _line(error: BaseException, path: Path) -> int | None:
    """Return the last line of the learner's file in the traceback."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return error.lineno
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)
    ]
    return lines[-1] if lines else None


def hidden(problem: Problem, filename: str, reach: list[str]) -> Problem:
    """Return the problem; if a file was not found because the sandbox hides it, say so."""
    if problem.kind != "FileNotFoundError":
        return problem
    if not os.path.isabs(filename):
        problem.message += "; a checked file runs in an empty folder: use __file__ to find files beside it"
        return problem
    within = any(filename == each or filename.startswith(f"{each}/") for each in reach)
    if within or not (os.path.lexists(filename) or os.path.isdir(os.path.dirname(filename))):
        return problem
    return Problem("limits", "forbidden", _FORBIDDEN_WORDS.format(problem.message), problem.line)


def of_kill(reason: str, *, seconds: float, memory: int, line: int | None) -> Problem:
    """Return the problem for a process that was ended by the watchdog."""
    if reason == "memory":
        return _out_of_memory(memory, line)
    messages = {
        "timeout": f"it ran for more than {seconds:g} seconds and was stopped; check for an endless loop",
        "processes": "it started too many processes and was stopped",
        "result": (
            "it sent no valid evidence and was stopped: the code wrote to the channel of the examination"
        ),
        "files": "it wrote too much to its temporary folder and was stopped",
    }
    return Problem("limits", reason, messages[reason], line)


def of_status(status: int | None, line: int | None, memory: int, output: str) -> Problem:
    """Return the problem for a process that ended without a result; `status` is that of os.wait.

    A library that gets no memory may end the process itself; the end of the output tells.
    """
    if status is None:
        return Problem("limits", "killed", "its process was ended by another process", line)
    number, code = status & 0x7F, status >> 8
    if (code or number == signal.SIGABRT) and _about_memory(output[-LAST_WORDS:]):
        return _out_of_memory(memory, line, output[-LAST_WORDS:].strip().rpartition("\n")[2])
    if not number:
        message = (
            f"its process ended with status {code} before it could be examined: the file, or a library it "
            "uses, calls exit"
        )
        return Problem("limits", "exit", message, line)
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGSEGV":
        message = "it crashed Python (segmentation fault): it accessed memory that is not allocated"
        return Problem("limits", "segfault", message, line)
    if name in _CRASHES:
        return Problem("limits", "crash", f"it crashed Python ({name})", line)
    if name in ("SIGXCPU", "SIGALRM"):
        return Problem("limits", "timeout", "it used too much processor time and was stopped", line)
    if name == "SIGXFSZ":
        return Problem("limits", "files", "it wrote a file that is too large and was stopped", line)
    return Problem("limits", "killed", f"its process was ended by {name}", line)
