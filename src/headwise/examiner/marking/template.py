"""`Template`: starts the process that imports torch once and is copied twice for each file.

One copy runs the file in a sandbox, and the other judges it. This module does not need torch.
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
FORKS = sys.platform == "linux"  # on other systems a copy of a process with torch in it is not reliable
PATIENCE = 10.0  # seconds to wait for the template to end


def import_roots() -> list[str]:
    """Return the folders that headwise, torch and other packages are imported from."""
    torch = importlib.util.find_spec("torch")
    folders = [str(PACKAGE.parent)]
    folders += [str(Path(torch.origin).resolve().parents[1])] if torch is not None and torch.origin else []
    folders += [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return [each for each in dict.fromkeys(folders) if os.path.isdir(each)]


class Template:
    """A context manager for the template process; at its end all it started, and its folder, are removed.

    Args:
        bare: whether to leave torch out, to find which protections are available.
        copies: whether to copy the process; if False, a new process imports torch for each file.

    Raises:
        BackendUnavailable: files cannot be run on this system.
    """

    def __init__(self, *, bare: bool = False, copies: bool = FORKS) -> None:
        if os.name != "posix":
            raise BackendUnavailable(
                f"files cannot be checked on {sys.platform}: it has no sandbox; use hw.check(class)"
            )
        self.bare, self.copies = bare, copies
        self.output = ""  # the end of the output of a template that ended
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
        """End the template process and all that it started; it cannot start again."""
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
                start_new_session=True,  # Ctrl-C goes to this process only, which stops the template
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
        flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]  # copies never write bytecode
        started = [sys.executable, *flags, str(HOST), mode, control]
        return [*started, str(self._lock), str(self.folder), *import_roots()]

    def _end(self) -> None:
        self._hear()
        if not self._ready and self._process is not None:  # still importing: it has started nothing
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
        """Create a folder for one request in that of the template."""
        with self._guard:
            self._requests += 1
            folder = self.folder / str(self._requests)
        folder.mkdir()
        for each in ("work", "result", "root"):
            (folder / each).mkdir()
        return folder

    def copy(self, folder: Path, output: int, status: int, talk: int) -> Copy:
        """Start a copy that works on the request in `folder`, with these ends of pipes."""
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
        """Start a copy that judges one file (`marking.judge.serve`), and return the socket to it."""
        ours, theirs = socket.socketpair()
        with theirs, self._guard:
            self._send({}, [theirs.fileno()])
        return ours

    def _send(self, request: dict[str, Any], ends: list[int]) -> None:
        if self._stopped:
            raise BackendUnavailable("a file cannot be checked: the template was stopped; make a new one")
        if not self.alive():
            self._end()
            self._start()
        if "number" in request:
            self._facts[request["number"]] = {}
        assert self._control is not None
        with suppress(OSError):  # it has ended, which `facts` and the other ends of pipes show
            socket.send_fds(self._control, [json.dumps(request).encode()], ends)

    def alive(self) -> bool:
        """Return True if the template process runs."""
        return self._process is not None and self._process.poll() is None

    def facts(self, number: int) -> dict[str, Any]:
        """Return what the template reported about a request so far; "ended" is the exit code of its copy."""
        with self._guard:
            self._hear()
            return self._facts[number]

    def _hear(self) -> None:
        while self._control is not None:
            try:
                message = self._control.recv(2**16)
            except BlockingIOError:
                break
            except OSError:
                message = b""
            if not message:
                self.output = self.last_words()
                self._is_over("the template process ended")
                break
            fact = json.loads(message)
            self._ready = self._ready or "ready" in fact
            if "number" in fact:
                self._facts.setdefault(fact["number"], {}).update(fact)

    def last_words(self) -> str:
        """Return the end of what the template and its judges printed, such as why one of them ended."""
        with suppress(OSError):
            return (self.folder / "words.txt").read_text("utf-8", "replace")[-1000:].strip()
        return ""

    def _is_over(self, reason: str) -> None:
        """Mark all requests as ended, and close the control socket, which ends the template."""
        for fact in self._facts.values():
            if "ended" not in fact:
                fact |= {"ended": -9, "failure": reason}
        if self._control is not None:
            self._control.close()
            self._control = None


class Copy:
    """A copy of the template, with the interface of `subprocess.Popen`."""

    def __init__(self, template: Template, number: int, process: subprocess.Popen[bytes] | None) -> None:
        self.template, self.number, self.process = template, number, process

    @property
    def pid(self) -> int | None:
        """The process id; None before the copy has started."""
        if self.process is not None:
            return self.process.pid
        return self.template.facts(self.number).get("process")

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the copy runs."""
        if self.process is not None:
            return self.process.returncode
        return self.template.facts(self.number).get("ended")

    @property
    def failure(self) -> str:
        """The reason why the copy could not run to its end; "" if it could."""
        return "" if self.process is not None else str(self.template.facts(self.number).get("failure", ""))

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended it; None while it runs."""
        return self.process.poll() if self.process is not None else self.returncode

    def wait(self, timeout: float) -> int:
        """Wait for the exit code.

        Raises:
            TimeoutExpired: the copy still runs.
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
    """A `Judge` (marking/judge.py) that runs in a copy of the template.

    Args:
        template: that is copied for the judge.
        about: the arguments of `Judge`.

    Attributes:
        outcome: how the file ended; the evidence stays in the process of the judge.
        ended: whether the file's process has sent everything.

    Raises:
        BackendUnavailable: by each method, if the process of the judge has ended.
    """

    def __init__(self, template: Template, *about: object) -> None:
        self.outcome, self.ended, self._template = Outcome(), False, template
        with template.judge() as wire:
            self._stream = wire.makefile("rwb")
        self._send(about)

    def __enter__(self) -> RemoteJudge:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # data that was not sent yet
            self._stream.close()

    def before_running(self) -> Report | str:
        """Return a report if the file need not be run, else the name of what is to be examined."""
        return self._ask("before_running")

    def reply(self, text: bytes, numbers: bytes) -> bytes:
        """Return the questions in reply to evidence, and b"" in reply to answers."""
        answer: bytes
        answer, self.ended = self._ask("heard", text, numbers)
        return answer

    def report(self, end: Problem | None) -> Report:
        """Return the report, after the file's process has ended."""
        return self._ask("report", end)

    def _ask(self, method: str, *arguments: object) -> Any:
        self._send((method, arguments))
        try:
            answer = pickle.load(self._stream)  # safe: the judge's process runs no code of the file
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._gone() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self, message: object) -> None:
        try:
            pickle.dump(message, self._stream)
            self._stream.flush()
        except OSError:
            raise self._gone() from None

    def _gone(self) -> BackendUnavailable:
        return BackendUnavailable(
            f"a file cannot be judged: the judging process ended {self._template.last_words()}".strip()
        )


def _environment(home: Path) -> dict[str, str]:
    """Return an environment with nothing of the caller's but the paths of libraries."""
    libraries = {
        name: os.environ[name] for name in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") if name in os.environ
    }
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return libraries | one_thread | {
        "PATH": "/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home), "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0",
    }  # fmt: skip


def _sweep() -> None:
    """Remove the folders of killed runs: those whose locks no process holds."""
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
        except OSError:  # its owner still runs
            continue
        else:
            remove(folder)
        finally:
            os.close(held)
