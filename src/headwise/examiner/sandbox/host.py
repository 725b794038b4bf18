"""The template: one process that imports torch and the examiner once, and two copies of itself for each file.

One runs the file, behind fences; the other judges it, and never runs any of it.

    python -I host.py MODE CONTROL LOCK FOLDER ROOT...

It is run by its path, and runs no code of a learner's, ever: that happens in the copies, behind fences.
Whoever started it holds the other end of CONTROL. When that end is gone, so is all this started, and FOLDER:
also after a kill that nothing could be done about there. LOCK says to others that FOLDER has an owner.

MODE: "many": a copy for each request; "bare": the same without torch, to see what fences there are; "alone":
one request, in this process, where copies of a process with torch in it are not to be trusted.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn

HERE = Path(__file__).resolve().parent


def package(name: str, folder: Path) -> ModuleType:
    """A package by its place: whatever else is called headwise or lies beside it is not looked at."""
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_examiner() -> None:
    """Torch on one thread, and all of headwise that an examination and a judgement need."""
    package("headwise", HERE.parents[1])  # before torch: then it imports nothing that is not asked for
    import torch

    torch.set_num_threads(1)
    with suppress(ImportError):
        import numpy.random  # what an examination would import itself, in each copy anew
    import torch.utils._device
    from headwise.examiner.desk import judge  # noqa: F401
    from headwise.examiner.sandbox import learner, verdicts, without_gpu  # noqa: F401


class Host:
    """Answers requests until nobody can ask any more."""

    def __init__(self, control: int, lock: int, folder: Path) -> None:
        self.control = socket.socket(fileno=control)
        self.lock, self.folder = lock, folder
        self.confine = package("headwise_confine", HERE / "confine")
        self.linux = sys.modules[f"{self.confine.__name__}.linux"]
        self.sweep = sys.modules[f"{self.confine.__name__}.limits"].sweep
        self.copies: dict[int, int | None] = {}  # process -> the request's number; None: a judge

    def serve(self, *, bare: bool) -> NoReturn:
        # What a copy left behind comes here and is ended; a copy ends with this process.
        self.linux.prctl(self.linux.SET_CHILD_SUBREAPER, 1)
        woken, waking = os.pipe()
        for end in (woken, waking):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        if not bare:
            gc.disable()  # of what is imported nothing is garbage
            load_examiner()
            gc.freeze()
            gc.enable()
        self._say({"ready": os.getpid()})
        while True:
            ready, _, _ = select.select([self.control.fileno(), woken], [], [])
            if woken in ready:
                with suppress(BlockingIOError):
                    os.read(woken, 4096)
                self._reap()
            if self.control.fileno() in ready:
                try:
                    said, ends, _, _ = socket.recv_fds(self.control, 2**16, 3)
                except ConnectionError:
                    said, ends = b"", []
                if not said:
                    self._leave()
                self._copy(json.loads(said), ends)

    def _say(self, fact: dict[str, object]) -> None:
        with suppress(OSError):  # nobody there: the next request says so
            self.control.send(json.dumps(fact).encode())

    def _copy(self, request: dict[str, object], ends: list[int]) -> None:
        number = request.get("number")
        assert number is None or isinstance(number, int)
        try:
            copy = os.fork()
        except OSError as error:
            if number is not None:
                self._say({"number": number, "ended": -1, "why": str(error)})
            copy = -1
        if copy == 0:
            try:
                if number is None:
                    self._become_judge(*ends)
                else:
                    self._become(Path(str(request["folder"])), *ends)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(70)
        for end in ends:
            os.close(end)
        if copy > 0:
            self.copies[copy] = number
            if number is not None:
                self._say({"number": number, "process": copy})

    def _become(self, folder: Path, output: int, status: int, talk: int) -> NoReturn:
        """In the copy: nothing of the template's but its code and its own three pipes."""
        os.dup2(output, 1)
        os.dup2(output, 2)
        self._leave_all_but(status, talk)
        _work(folder, status, talk, self.confine)

    def _become_judge(self, talk: int) -> NoReturn:
        """In the copy that judges: it never runs what the others run, and ends with this process."""
        self.linux.prctl(self.linux.SET_DEATH_SIGNAL, signal.SIGKILL)
        self.linux.prctl(self.linux.SET_DUMPABLE, 0)  # nobody looks into it
        self._leave_all_but(talk)
        from headwise.examiner.desk.judge import serve

        serve(talk)

    def _leave_all_but(self, *ends: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        self.control.detach()
        kept = sorted(ends)
        for low, high in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, min(high, 2**16))

    def _reap(self) -> None:
        while True:
            try:
                ended, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not ended:
                break
            number = self.copies.pop(ended, None)
            if number is not None:
                self._say({"number": number, "ended": os.waitstatus_to_exitcode(status)})
        self._end_strays()

    def _end_strays(self) -> None:
        """Processes that came here because the one that started them is gone."""
        with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
            for number in map(int, file.read().split()):
                if number not in self.copies:
                    with suppress(OSError):
                        os.kill(number, signal.SIGKILL)

    def _leave(self) -> NoReturn:
        """Nobody is there any more: nothing may stay."""
        signal.set_wakeup_fd(-1)
        for copy in self.copies:
            with suppress(OSError):
                os.kill(copy, signal.SIGKILL)
        self.sweep(os.getpid())
        sys.modules[f"{self.confine.__name__}.limits"].remove(self.folder)
        os._exit(0)


def _work(folder: Path, status: int, talk: int, confine: ModuleType) -> NoReturn:
    sys.dont_write_bytecode = True  # of what the learner's file imports
    spec = importlib.util.spec_from_file_location("headwise_child", HERE / "child.py")
    assert spec is not None and spec.loader is not None
    child = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(child)
    child.work(folder, status, talk, confine, load_examiner)
    os._exit(71)


def main(mode: str, control: str, lock: str, folder: str, *roots: str) -> NoReturn:
    sys.path += [each for each in roots if each not in sys.path]
    if mode == "alone":  # the three pipes are all it was given
        output, status, talk = (int(each) for each in control.split(","))
        os.dup2(output, 1)
        os.dup2(output, 2)
        _work(Path(folder), status, talk, package("headwise_confine", HERE / "confine"))
    Host(int(control), int(lock), Path(folder)).serve(bare=mode == "bare")


if __name__ == "__main__":
    main(*sys.argv[1:])
