"""What a checked file may read: Python and its packages, a few facts of the system, the file's own folder."""

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
    """Paths, none of them below another."""
    found = [*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()]
    # Not the folder headwise is imported from: that may be a checkout with much else in it.
    found += [str(PACKAGE), *(each for each in import_roots() if each != str(PACKAGE.parent))]
    found += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if file is not None:
        found += _of_learner(file, source)
    there = [os.path.abspath(each) for each in found if each and os.path.lexists(each)]
    # A path given through a link needs both ends.
    there += [os.path.realpath(each) for each in there if each not in SYSTEM]
    there = sorted({each for each in there if each != "/"})
    kept: list[str] = []
    for each in there:
        if not any(each.startswith(f"{above}/") for above in kept):
            kept.append(each)
    return kept


def reach_of(path: Path, template: Template | None) -> list[str]:
    """What a file could read, for whoever hears that it found something missing."""
    return readable(path, "") + ([] if template is None else [str(template.folder)])


def listable(file: Path | None, source: str) -> list[str]:
    """The folder imports are looked for in first, where not all of it is readable."""
    return [] if file is None else [str(package_root(file, source) or file.parent)]


def _of_learner(file: Path, source: str) -> list[str]:
    """The folder; of a home or what lies above one, only the Python in it."""
    folder = package_root(file, source) or file.parent
    home = Path.home().resolve()
    if folder != home and folder not in home.parents and len(folder.parts) > 2:
        return [str(folder)]
    found = [file, *folder.glob("*.py")]
    found += [init.parent for init in folder.glob("*/__init__.py")]
    return [str(each) for each in found]


class Listener(Protocol):
    """Who hears what the process inside says: `judge.Conversation` here, `RemoteJudge` for one elsewhere."""

    outcome: Outcome
    ended: bool  # it said all there was to say

    def reply(self, text: bytes, numbers: bytes) -> bytes:
        """What it is asked then; b"": nothing."""


WITHOUT: tuple[str, ...] = ()  # "namespaces", "root", "landlock": how the rest holds up alone, for tests


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
    """Examine a class or function of a file of someone's, without letting it do harm.

    The process has no network, reads its own folder and Python, writes to a temporary folder that is removed
    afterwards, and is ended with all it started when it takes too much. What it printed, raised and computed
    comes back as text and tensors; nothing of that is executed here.

    Args:
        name: which class or function; None: the one that looks most like multi-head attention.
        seconds: the most it may take, not counting the import of torch.
        memory: bytes it may take, not counting torch's own.
        trust: run it even where neither namespaces nor Landlock keep it from other files.
        options: more arguments for `examine`, as JSON can hold them.
        arguments: literals of Python, for what is examined.
        template: the process to copy, which others may use at the same time; None: one of its own.
        listener: hears the evidence and asks; None: what was said is in the outcome, and nothing is asked.
        changed: run this text in place of what the file holds.

    Raises:
        ArgumentError: no such file.
        Unfenced: no protections, and no trust.
        BackendUnavailable: a system no file can be run on.
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
                f"trust must be given to run a file on this system: {'; '.join(facts['missing'])}; "
                "read the file, then pass trust=True or --trust"
            )
        if watch.started is None:
            words = watch.process.failure or watch.output.strip()[-1000:]
            raise BackendUnavailable(
                f"the process for checked files did not start: {words} {template.output}".strip()
            )
        outcome = listener.outcome
        if watch.process.failure and not listener.ended:
            raise BackendUnavailable(f"the file was not checked to its end: {watch.process.failure}")
        outcome.protections, outcome.missing = facts["protections"], facts["missing"]
        outcome.output, outcome.seconds = watch.output, watch.took
        if facts.get("left"):
            outcome.notes.append(f"processes it left running, ended with it: {facts['left']}")
        end = _end_of(folder / "result", path, watch, listener.ended)
        outcome.problem = end or outcome.problem
        return outcome
    finally:
        remove(folder)


@cache
def protections_here() -> tuple[list[str], list[str]]:
    """The protections a checked file would run behind here, and those that are missing, with the reason."""
    with Template(bare=True) as template:
        watch = _start(template, template.room(), None, "", None, 10.0, 2**30, False, {})
    if "protections" not in watch.facts:
        words = watch.process.failure or watch.output.strip()[-1000:]
        return [], [f"all: the process for checked files did not start: {words}"]
    return watch.facts["protections"], watch.facts["missing"]


def _start(
    template: Template, folder: Path, path: Path | None, source: str, name: str | None, seconds: float,
    memory: int, trust: bool, options: dict[str, object],
    reply: Callable[[bytes, bytes], bytes] = lambda text, numbers: b"", changed: str | None = None,
) -> Watch:  # fmt: skip
    """Start a copy and follow it to its end; `path` None: only to see what protects it."""
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
    with ExitStack() as kept, ExitStack() as handed_over:

        def pipe() -> tuple[int, int]:
            reading, writing = os.pipe()
            kept.callback(os.close, reading)
            handed_over.callback(os.close, writing)
            return reading, writing

        (output, printed), (status, told) = pipe(), pipe()
        ours, theirs = socket.socketpair()
        kept.callback(ours.close)
        handed_over.callback(theirs.close)
        ours.setblocking(False)
        copy = template.copy(folder, printed, told, theirs.fileno())
        handed_over.close()
        watch = Watch(copy, output, status, ours.fileno(), folder, seconds, memory, reply)
        watch.follow()
    return watch


class Unfenced(ArgumentError):
    """Nothing here keeps a file from harm."""


def _end_of(result: Path, path: Path, watch: Watch, ended: bool) -> Problem | None:
    """How it ended, where that was before it had said all; by now there is nobody who could change a file."""
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
    """
    Raises:
        ValueError: a link, a device, a file with two names, or one that is too large.
    """
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise ValueError(f"{path.name} is no plain file")
    if found.st_size > most:
        raise ValueError(f"{path.name} is too large: {found.st_size} bytes")


def _read(path: Path, most: int) -> str:
    """A small text file; "" where it is anything else."""
    try:
        _plain_file(path, most)
        return path.read_text("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _line_in(traces: str, path: Path) -> int | None:
    """The innermost line of the learner's file in what faulthandler wrote."""
    found = re.search(rf'File "{re.escape(str(path))}", line (\d{{1,9}})', traces)
    return int(found[1]) if found else None
