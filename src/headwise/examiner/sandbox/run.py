"""Run a file in the sandbox. It can read Python, its packages, a few system files, and its own folder."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from ...errors import ArgumentError, BackendUnavailable
from ..marking.template import PACKAGE, Template, import_roots
from ..report import Problem
from ..source.likely_classes import candidates, package_root, source_of
from .confine.limits import remove
from .verdicts import Outcome, of_kill, of_status
from .watchdog import Watch

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    *(f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "alternatives")),
    "/sys/devices/system/cpu", "/sys/devices/system/node",
)  # fmt: skip


def readable(file: Path | None, source: str) -> list[str]:
    """Return the paths that a file may read, none of them below another."""
    paths = [*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()]
    # Not the folder that headwise is imported from: a checkout may have other files in it.
    paths += [str(PACKAGE), *(each for each in import_roots() if each != str(PACKAGE.parent))]
    paths += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if file is not None:
        paths += _of_learner(file, source)
    existing = [os.path.abspath(each) for each in paths if each and os.path.lexists(each)]
    # For a path through a link, the link and its target are needed.
    existing += [os.path.realpath(each) for each in existing if each not in SYSTEM]
    existing = sorted({each for each in existing if each != "/"})
    outermost: list[str] = []
    for each in existing:
        if not any(each.startswith(f"{above}/") for above in outermost):
            outermost.append(each)
    return outermost


def reach_of(path: Path, template: Template | None) -> list[str]:
    """Return the paths that a file could read, to explain a file that was not found."""
    return readable(path, "") + ([] if template is None else [str(template.folder)])


def listable(file: Path | None, source: str) -> list[str]:
    """Return the folder that is first on the import path, of which not all may be readable."""
    return [] if file is None else [str(package_root(file, source) or file.parent)]


def _of_learner(file: Path, source: str) -> list[str]:
    """Return the folder of the file; for a home folder or one above it, only its Python files."""
    folder = package_root(file, source) or file.parent
    home = Path.home().resolve()
    if folder != home and folder not in home.parents and len(folder.parts) > 2:
        return [str(folder)]
    files = [file, *folder.glob("*.py")]
    files += [init.parent for init in folder.glob("*/__init__.py")]
    return [str(each) for each in files]


class Listener(Protocol):
    """Receives the messages of the sandboxed process: `judge.Conversation` or `RemoteJudge`."""

    outcome: Outcome
    ended: bool  # the process has sent everything

    def reply(self, text: bytes, numbers: bytes) -> bytes:
        """Return the questions in reply to a message, or b""."""


WITHOUT: tuple[str, ...] = ()  # "namespaces", "root", "landlock": left out in tests of the other protections


def run_file(
    path: Path,
    name: str | None = None,
    *,
    seconds: float = 60.0,
    memory: int = 4 * 2**30,
    trust: bool = False,
    options: dict[str, Any] | None = None,
    arguments: Mapping[str, object] | None = None,
    template: Template | None = None,
    listener: Listener | None = None,
    changed: str | None = None,
) -> Outcome:
    """Examine a class or function of a file in a sandboxed process.

    The process has no network, can read its own folder and Python, writes to a temporary folder that is
    removed afterwards, and is ended with all it started if it exceeds a limit. What it printed, raised and
    computed is returned as text and tensors, and nothing of it is executed in this process.

    Args:
        path: of the file.
        name: of the class or function; None for the one that looks most like multi-head attention.
        seconds: the time limit, without the import of torch.
        memory: the limit in bytes, without the memory of torch.
        trust: run the file even if neither namespaces nor Landlock protect other files.
        options: more arguments of `examine`, in the types of JSON.
        arguments: more arguments of the class or function, as Python literals.
        template: the process to copy, which other threads may use too; None to start one.
        listener: receives the evidence and asks questions; None to ask none.
        changed: run this text instead of the content of the file.

    Raises:
        ArgumentError: there is no such file.
        Unfenced: there is no sandbox, and trust is False.
        BackendUnavailable: files cannot be run on this system.
    """
    path = Path(os.path.abspath(path))
    source, _ = source_of(path)
    if name is None:
        name = next((each.name for each in candidates(source)), None)
    if template is None:
        with Template() as own:
            return run_file(
                path, name, seconds=seconds, memory=memory, trust=trust, options=options,
                arguments=arguments, template=own, listener=listener, changed=changed,
            )  # fmt: skip
    options = dict(options or {})
    if arguments:  # JSON has fewer kinds of them
        options["arguments"] = repr(dict(arguments))
    if listener is None:
        from ..marking.judge import Conversation

        listener = Conversation(reach_of(path, template))
    folder = template.room()
    try:
        watch = _start(
            template, folder, path, source, name, seconds, memory, trust, options, listener.reply, changed
        )
        facts = watch.facts
        if facts.get("refused"):
            raise Unfenced(
                f"trust must be True to run a file without a sandbox: {'; '.join(facts['missing'])}; "
                "read the file, then pass trust=True or --trust"
            )
        if watch.started is None:
            words = watch.process.failure or watch.output.strip()[-1000:]
            raise BackendUnavailable(
                f"the sandboxed process did not start: {words} {template.output}".strip()
            )
        outcome = listener.outcome
        if watch.process.failure and not listener.ended:
            raise BackendUnavailable(f"the check did not finish: {watch.process.failure}")
        outcome.protections, outcome.missing = facts["protections"], facts["missing"]
        outcome.output, outcome.seconds = watch.output, watch.took
        if facts.get("left"):
            outcome.notes.append(f"processes that it left running were ended: {facts['left']}")
        end = _end_of(folder / "result", path, watch, listener.ended)
        outcome.problem = end or outcome.problem
        return outcome
    finally:
        remove(folder)


@cache
def protections_here() -> tuple[list[str], list[str]]:
    """Return the protections of checked files on this system, and the missing ones with the reason."""
    with Template(bare=True) as template:
        watch = _start(template, template.room(), None, "", None, 10.0, 2**30, False, {})
    if "protections" not in watch.facts:
        words = watch.process.failure or watch.output.strip()[-1000:]
        return [], [f"all: the sandboxed process did not start: {words}"]
    return watch.facts["protections"], watch.facts["missing"]


def _start(
    template: Template, folder: Path, path: Path | None, source: str, name: str | None, seconds: float,
    memory: int, trust: bool, options: dict[str, object],
    reply: Callable[[bytes, bytes], bytes] = lambda text, numbers: b"", changed: str | None = None,
) -> Watch:  # fmt: skip
    """Start a copy and follow it to its end; with `path` None it only reports its protections."""
    request: dict[str, Any] = {
        "file": None if path is None else str(path),
        "name": name,
        "seconds": seconds,
        "memory": memory,
        "trust": trust,
        "options": options,
        "probe": path is None,
        "source": changed,
        "fence": {
            "readable": readable(path, source),
            "listable": listable(path, source),
            "writable": [str(folder / "work"), str(folder / "result")],
            "root": str(folder / "root"),
            "without": list(WITHOUT),
        },
    }
    (folder / "request.json").write_text(json.dumps(request), "utf-8")
    with ExitStack() as own_ends, ExitStack() as handed_over:

        def pipe() -> tuple[int, int]:
            reading, writing = os.pipe()
            own_ends.callback(os.close, reading)
            handed_over.callback(os.close, writing)
            return reading, writing

        (output, printed), (status, report_end) = pipe(), pipe()
        ours, theirs = socket.socketpair()
        own_ends.callback(ours.close)
        handed_over.callback(theirs.close)
        ours.setblocking(False)
        copy = template.copy(folder, printed, report_end, theirs.fileno())
        handed_over.close()
        watch = Watch(copy, output, status, ours.fileno(), folder, seconds, memory, reply)
        watch.follow()
    return watch


class Unfenced(ArgumentError):
    """There is no sandbox on this system."""


def _end_of(result: Path, path: Path, watch: Watch, ended: bool) -> Problem | None:
    """Return the problem if the process ended too early. No process that could change files runs any more."""
    line = _line_in(_read(result / "where.txt", 2**20), path)
    if watch.killed_for is not None:
        return of_kill(watch.killed_for, seconds=watch.seconds, memory=watch.memory, line=line)
    if ended:
        return None
    status = watch.facts.get("ended")
    if status is None and "keeper" not in watch.facts:  # no keeper: the process was the learner's own
        code = watch.process.returncode
        status = None if code is None else code << 8 if code >= 0 else -code
    return of_status(status, line, watch.memory, watch.output)


def _plain_file(path: Path, most: int) -> None:
    """Refuse what is not a regular file.

    Raises:
        ValueError: a link, a device, a file with two names, or one that is too large.
    """
    state = path.lstat()
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
        raise ValueError(f"{path.name} is not a regular file")
    if state.st_size > most:
        raise ValueError(f"{path.name} is too large: {state.st_size} bytes")


def _read(path: Path, most: int) -> str:
    """Return the text of a small file; "" for anything else."""
    try:
        _plain_file(path, most)
        return path.read_text("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _line_in(traces: str, path: Path) -> int | None:
    """Return the innermost line of the learner's file in the output of faulthandler."""
    match = re.search(rf'File "{re.escape(str(path))}", line (\d{{1,9}})', traces)
    return int(match[1]) if match else None
