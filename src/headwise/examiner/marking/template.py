"""`Template`: the parent's end of the process that imports torch once and is copied for each file.

Twice for each: one copy runs the file, fenced in, and the other judges it. Nothing here needs torch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ...errors import BackendUnavailable
from ..report import Problem, Report
from ..sandbox.verdicts import Outcome

PACKAGE = Path(__file__).resolve().parents[2]
HOST = PACKAGE / "examiner" / "sandbox" / "host.py"
PREFIX, LOCK = "headwise-check-", "owner"
FORKS = sys.platform == "linux"  # elsewhere a copy of a process with torch in it is not to be trusted
PATIENCE = 10.0  # seconds for the template to end


def import_roots() -> list[str]:
    """Folders headwise, torch and other packages are imported from."""
    torch = importlib.util.find_spec("torch")
    found = [str(PACKAGE.parent)]
    found += [str(Path(torch.origin).resolve().parents[1])] if torch is not None and torch.origin else []
    found += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        found.append(site.getusersitepackages())
    return [each for each in dict.fromkeys(found) if os.path.isdir(each)]


class Template:
    """Starts with the `with`, and ends with it; with it, all that it started, and its folder.

    Args:
        bare: without torch, to see what fences there are.
        copies: False: a process of its own for each file, which imports torch anew.

    Raises:
        BackendUnavailable: a system no file can be run on.
    """

    def __init__(self, *, bare: bool = False, copies: bool = FORKS) -> None:
        if os.name != "posix":
            raise BackendUnavailable(
                f"a file cannot be fenced in on {sys.platform}: check the class itself, hw.check(obj)"
            )
        self.bare, self.copies = bare, copies
        self.output = ""  # the last words of a template that ended
        self._guard = threading.RLock()
        self._facts: dict[int, dict[str, Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._requests = 0
        self._ready = self._stopped = False

    def __enter__(self) -> Template:
        import fcntl

        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX)).resolve()
        self._lock = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if self.copies:
            self._start()
        _sweep()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        from ..sandbox.confine.limits import remove

        try:
            self.stop()
        finally:
            remove(self.folder)
            os.close(self._lock)

    def stop(self) -> None:
        """Ends it and all that it started; it starts nothing any more."""
        with self._guard:
            self._stopped = True
            self._end()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = open(self.folder / "words.txt", "wb")  # noqa: SIM115 - closed below
        try:
            self._process = subprocess.Popen(
                self._command("bare" if self.bare else "many", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                env=_environment(self.folder),
                pass_fds=[theirs.fileno(), self._lock],
                start_new_session=True,  # Ctrl-C is for us; we tell it
                cwd=self.folder,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            words.close()
        ours.setblocking(False)
        self._control, self._ready = ours, False

    def _command(self, mode: str, control: str) -> list[str]:
        flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]  # the copies that run files write none
        started = [sys.executable, *flags, str(HOST), mode, control]
        return [*started, str(self._lock), str(self.folder), *import_roots()]

    def _end(self) -> None:
        self._hear()
        if not self._ready and self._process is not None:  # still importing: there is nothing to clear up
            self._process.kill()
        self._is_over("it was stopped")
        if self._process is not None:
            try:
                self._process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def room(self) -> Path:
        """A folder for one request, in that of the template."""
        with self._guard:
            self._requests += 1
            folder = self.folder / str(self._requests)
        folder.mkdir()
        for each in ("work", "result", "root"):
            (folder / each).mkdir()
        return folder

    def copy(self, folder: Path, output: int, status: int, talk: int) -> Copy:
        """A copy at work on the request in `folder`, with these three ends of pipes."""
        number = int(folder.name)
        if not self.copies:
            command = self._command("alone", f"{output},{status},{talk}")
            command[command.index(str(self.folder))] = str(folder)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder / "work",
                env=_environment(folder / "work"), pass_fds=[output, status, talk], start_new_session=True,
            )  # fmt: skip
            return Copy(self, number, process)
        with self._guard:
            self._send({"number": number, "folder": str(folder)}, [output, status, talk])
        return Copy(self, number, None)

    def judge(self) -> socket.socket:
        """The wire to a copy that judges one file (`marking.judge.serve`)."""
        ours, theirs = socket.socketpair()
        with theirs, self._guard:
            self._send({}, [theirs.fileno()])
        return ours

    def _send(self, request: dict[str, Any], ends: list[int]) -> None:
        if self._stopped:
            raise BackendUnavailable("a file cannot be checked: the process for it was stopped")
        if not self.alive():
            self._end()
            self._start()
        if "number" in request:
            self._facts[request["number"]] = {}
        assert self._control is not None
        with suppress(OSError):  # it has ended: `facts` says so, and the other end of a wire
            socket.send_fds(self._control, [json.dumps(request).encode()], ends)

    def alive(self) -> bool:
        """Whether the template is there to be asked."""
        return self._process is not None and self._process.poll() is None

    def facts(self, number: int) -> dict[str, Any]:
        """What the template said of this request up to now; "ended" with the exit code when it is over."""
        with self._guard:
            self._hear()
            return self._facts[number]

    def _hear(self) -> None:
        while self._control is not None:
            try:
                said = self._control.recv(2**16)
            except BlockingIOError:
                break
            except OSError:
                said = b""
            if not said:
                self.output = self.last_words()
                self._is_over("the process that files are checked in ended")
                break
            fact = json.loads(said)
            self._ready = self._ready or "ready" in fact
            if "number" in fact:
                self._facts.setdefault(fact["number"], {}).update(fact)

    def last_words(self) -> str:
        """What it and its judges printed last: nothing, or why one of them ended."""
        with suppress(OSError):
            return (self.folder / "words.txt").read_text("utf-8", "replace")[-1000:].strip()
        return ""

    def _is_over(self, why: str) -> None:
        """Whatever was going on; it sees that nobody is here any more, and leaves."""
        for fact in self._facts.values():
            if "ended" not in fact:
                fact |= {"ended": -9, "why": why}
        if self._control is not None:
            self._control.close()
            self._control = None


class Copy:
    """One copy, as `subprocess.Popen` is: its number, whether it has ended, how."""

    def __init__(self, template: Template, number: int, process: subprocess.Popen[bytes] | None) -> None:
        self.template, self.number, self.process = template, number, process

    @property
    def pid(self) -> int | None:
        """None: it has not begun."""
        if self.process is not None:
            return self.process.pid
        return self.template.facts(self.number).get("process")

    @property
    def returncode(self) -> int | None:
        if self.process is not None:
            return self.process.returncode
        return self.template.facts(self.number).get("ended")

    @property
    def why(self) -> str:
        """Why there is none, in words; "" where there was one."""
        return "" if self.process is not None else str(self.template.facts(self.number).get("why", ""))

    def poll(self) -> int | None:
        """The exit code, minus the signal where one ended it; None while it runs."""
        return self.process.poll() if self.process is not None else self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code.

        Raises:
            TimeoutExpired: it runs on.
        """
        if self.process is not None:
            return self.process.wait(timeout)
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a copy of the template", timeout)
            time.sleep(0.002)
        return code


class RemoteJudge:
    """A `Judge` (marking/judge.py) that is a copy of the template, as it is seen from here.

    Args:
        template: of whose copies one is to be the judge.
        about: what a `Judge` is made with.

    Attributes:
        outcome: what is known here of how the file ended; the evidence stays with the judge.
        ended: whether the file's process said all there was to say.

    Raises:
        BackendUnavailable: by each of its methods, where the judge's process has ended.
    """

    def __init__(self, template: Template, *about: object) -> None:
        self.outcome, self.ended, self._template = Outcome(), False, template
        with template.judge() as wire:
            self._stream = wire.makefile("rwb")
        self._send(about)

    def __enter__(self) -> RemoteJudge:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # what was still to be sent
            self._stream.close()

    def before_running(self) -> Report | str:
        """A report where none of it is to be run; else the name of what is to be examined."""
        return self._ask("before_running")

    def reply(self, text: bytes, numbers: bytes) -> bytes:
        """To evidence, questions; to answers, nothing."""
        answer: bytes
        answer, self.ended = self._ask("heard", text, numbers)
        return answer

    def report(self, end: Problem | None) -> Report:
        """The verdict, once the file's process has ended."""
        return self._ask("report", end)

    def _ask(self, what: str, *given: object) -> Any:
        self._send((what, given))
        try:
            answer = pickle.load(self._stream)  # by a process like this one, which ran nothing of the file's
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._gone() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self, what: object) -> None:
        try:
            pickle.dump(what, self._stream)
            self._stream.flush()
        except OSError:
            raise self._gone() from None

    def _gone(self) -> BackendUnavailable:
        return BackendUnavailable(
            f"a file cannot be judged: the process that judges it ended {self._template.last_words()}".strip()
        )


def _environment(home: Path) -> dict[str, str]:
    """Nothing of the caller's but where libraries are: no tokens, no names."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return kept | one_thread | {
        "PATH": "/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0",
    }  # fmt: skip


def _sweep() -> None:
    """Folders of runs that were killed together with their templates: no owner holds their locks."""
    import fcntl

    from ..sandbox.confine.limits import remove

    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = folder / LOCK
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            held = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its owner is there
            continue
        else:
            remove(folder)
        finally:
            os.close(held)
