"""`run_file`: a learner's file in a process of its own, fenced in, and what came back."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import ArgumentError, BackendUnavailable
from ..evidence import FACTS, NUMBERS, Evidence, Problem
from .outcome import Outcome
from .reach import import_roots, listable, readable
from .verdicts import LONGEST_MESSAGE, hidden, of_kill, of_status
from .watchdog import Watch

__all__ = ["protections_here", "run_file"]

CHILD = Path(__file__).with_name("child.py")
RESULT_BYTES = 256 * 2**20
WITHOUT: tuple[str, ...] = ()  # "namespaces", "root", "landlock": how the rest holds up alone, for tests


def run_file(
    path: Path,
    name: str | None = None,
    *,
    seconds: float = 60.0,
    memory: int = 4 * 2**30,
    trust: bool = False,
    options: dict[str, Any] | None = None,
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
        options: more arguments for `examine`.

    Raises:
        ArgumentError: no such file; or no protections, and no trust.
        BackendUnavailable: a system no file can be run on.
    """
    path = Path(os.path.abspath(path))
    try:
        source = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"path must be a file of Python in UTF-8: {path} ({error}); check it") from error
    folder = Path(tempfile.mkdtemp(prefix="headwise-check-")).resolve()
    try:
        watch = _start(folder, path, source, name, seconds, memory, trust, options or {})
        facts = watch.facts
        if facts.get("refused"):
            raise ArgumentError(
                f"trust must be given to run a file on this system: {'; '.join(facts['missing'])}; "
                "read the file, then pass trust=True or --trust"
            )
        if watch.started is None:
            raise BackendUnavailable(
                f"the process for checked files did not start: {watch.output.strip()[-1000:]}"
            )
        outcome = Outcome(
            None, None, facts["protections"], facts["missing"], watch.output, seconds=watch.took
        )
        if facts.get("left"):
            outcome.notes.append(f"processes it left running, ended with it: {facts['left']}")
        _take_result(folder / "result", path, watch, outcome)
        return outcome
    finally:
        _remove(folder)


@cache
def protections_here() -> tuple[list[str], list[str]]:
    """The protections a checked file would run behind here, and those that are missing, with the reason."""
    folder = Path(tempfile.mkdtemp(prefix="headwise-check-")).resolve()
    try:
        watch = _start(folder, None, "", None, 10.0, 2**30, False, {})
    finally:
        _remove(folder)
    if "protections" not in watch.facts:
        return [], [f"all: the process for checked files did not start: {watch.output.strip()[-1000:]}"]
    return watch.facts["protections"], watch.facts["missing"]


def _start(
    folder: Path, path: Path | None, source: str, name: str | None, seconds: float, memory: int, trust: bool,
    options: dict[str, object],
) -> Watch:  # fmt: skip
    """Start the other process and follow it to its end; `path` None: only to see what protects it."""
    if os.name != "posix":
        raise BackendUnavailable(
            f"a file cannot be fenced in on {sys.platform}: check the class itself, hw.check(obj)"
        )
    for each in ("work", "result", "root"):
        (folder / each).mkdir()
    reading, writing = os.pipe()
    request: dict[str, Any] = {
        "file": None if path is None else str(path),
        "name": name,
        "seconds": seconds,
        "memory": memory,
        "trust": trust,
        "options": options,
        "probe": path is None,
        "status": writing,
        "path": import_roots(),
        "fence": {
            "readable": readable(path, source),
            "listable": listable(path, source),
            "writable": [str(folder / "work"), str(folder / "result")],
            "root": str(folder / "root"),
            "without": list(WITHOUT),
        },
    }
    request["fence"]["readable"].append(str(folder / "request.json"))
    (folder / "request.json").write_text(json.dumps(request), "utf-8")
    marker = f"HEADWISE_CHECK={secrets.token_hex(16)}"
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-B", str(CHILD), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(folder / "work") | dict([marker.split("=")]),
            pass_fds=[writing],
            start_new_session=True,
            cwd=folder / "work",
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    with process, os.fdopen(reading, "rb", closefd=True):
        watch = Watch(process, reading, folder, marker, seconds, memory)
        watch.follow()
    return watch


def _environment(work: Path) -> dict[str, str]:
    """Nothing of the caller's but where libraries are: no tokens, no names."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return kept | one_thread | {
        "PATH": "/usr/bin:/bin", "HOME": str(work), "TMPDIR": str(work), "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0",
    }  # fmt: skip


def _take_result(result: Path, path: Path, watch: Watch, outcome: Outcome) -> None:
    """What the process left; by now there is nobody who could still change it."""
    line = _line_in(_read(result / "where.txt", 2**20), path)
    done = result / "done"
    if watch.killed_for is not None:
        outcome.problem = of_kill(watch.killed_for, seconds=watch.seconds, memory=watch.memory, line=line)
        return
    if done.is_symlink() or not done.is_dir():
        status = watch.facts.get("ended")
        if status is None and "keeper" not in watch.facts:  # no keeper: the process was the learner's own
            code = watch.process.returncode
            status = code << 8 if code >= 0 else -code
        outcome.problem = of_status(status, line, watch.memory, watch.output)
        return
    try:
        facts = json.loads(_read(done / "facts.json", 2**20))
        outcome.others = [str(each) for each in facts.get("others", ())]
        if "problem" in facts:
            reach = [*readable(path, ""), str(result.parent)]
            outcome.problem = hidden(_problem(facts["problem"]), str(facts["filename"]), reach)
            return
        for each in (FACTS, NUMBERS):
            _plain_file(done / each, RESULT_BYTES)
        outcome.evidence = Evidence.load(done)
    except Exception as error:  # whoever wrote it may have written anything
        message = f"what came back is no evidence ({type(error).__name__}: {error})"
        outcome.problem = Problem("limits", "result", message[:LONGEST_MESSAGE])


def _problem(written: dict[str, object]) -> Problem:
    line = written["line"]
    return Problem(
        str(written["stage"])[:40],
        str(written["kind"])[:200],
        str(written["message"])[:LONGEST_MESSAGE],
        line if isinstance(line, int) else None,
    )


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


def _remove(folder: Path) -> None:
    """Also where the learner's file took rights away from folders."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        with suppress(RecursionError):
            for here, folders, _ in os.walk(folder):
                for each in folders:
                    inside = os.path.join(here, each)
                    if not os.path.islink(inside):
                        with suppress(OSError):
                            os.chmod(inside, 0o700)
        # Python's own gives up at folders a thousand deep.
        subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
