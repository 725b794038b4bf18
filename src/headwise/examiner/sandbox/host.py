"""The template: one process that imports torch and the examiner once, and two copies of itself for each file.

One copy runs the file in a sandbox; the other judges it and never runs code of the file.

    python -I host.py MODE CONTROL LOCK FOLDER ROOT...

The template is run by its path and never runs a learner's code: its copies do, in sandboxes. The process that
started it holds the other end of CONTROL. When that end closes, even after a SIGKILL, this process ends
all that it started and removes FOLDER. LOCK tells other processes that FOLDER is in use.

MODE: "many": a copy for each request; "bare": the same without torch, to find the available protections;
"alone": one request, in this process, on systems where a copy of a process with torch does not work.
"""

from __future__ import annotations

import ast
import faulthandler
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

FOLDER = Path(__file__).resolve().parent


def package(name: str, folder: Path) -> ModuleType:
    """Import a package from this folder, whatever other package of that name is installed."""
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_examiner() -> None:
    """Import torch, with one thread, and the modules that examinations and judgements need."""
    import torch
    import torch.utils._device

    torch.set_num_threads(1)
    with suppress(ImportError):
        import numpy.random  # noqa: F401 - else every copy would import it
    from headwise.examiner.marking import judge  # noqa: F401
    from headwise.examiner.sandbox import learner, verdicts  # noqa: F401


class Host:
    """Answers requests until the control socket is closed."""

    def __init__(self, control: int, lock: int, folder: Path) -> None:
        self.control = socket.socket(fileno=control)
        self.lock, self.folder = lock, folder
        self.copies: dict[int, int | None] = {}  # process -> the request's number; None: a judge

    def serve(self, *, bare: bool) -> NoReturn:
        from headwise.examiner.sandbox.confine import linux

        # Processes that a copy leaves behind become children of this one and are killed; a copy ends with it.
        linux.prctl(linux.SET_CHILD_SUBREAPER, 1)
        woken, waking = os.pipe()
        for end in (woken, waking):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        if not bare:
            gc.disable()  # imports leave no garbage
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
                    message, ends, _, _ = socket.recv_fds(self.control, 2**16, 3)
                except ConnectionError:
                    message, ends = b"", []
                if not message:
                    self._leave()
                self._copy(json.loads(message), ends)

    def _say(self, fact: dict[str, object]) -> None:
        with suppress(OSError):  # the other end is closed: the next read finds out
            self.control.send(json.dumps(fact).encode())

    def _copy(self, request: dict[str, object], ends: list[int]) -> None:
        number = request.get("number")
        assert number is None or isinstance(number, int)
        try:
            copy = os.fork()
        except OSError as error:
            if number is not None:
                self._say({"number": number, "ended": -1, "failure": str(error)})
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
        """In a copy: close everything but its own three pipes, and run the file."""
        os.dup2(output, 1)
        os.dup2(output, 2)
        self._leave_all_but(status, talk)
        run_one(folder, status, talk)

    def _become_judge(self, talk: int) -> NoReturn:
        """In the copy that judges: it never runs a learner's code, and ends with the template."""
        from headwise.examiner.marking.judge import serve
        from headwise.examiner.sandbox.confine import linux

        linux.prctl(linux.SET_DEATH_SIGNAL, signal.SIGKILL)
        linux.prctl(linux.SET_DUMPABLE, 0)  # others cannot trace it
        self._leave_all_but(talk)
        serve(talk)

    def _leave_all_but(self, *ends: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        self.control.detach()
        open_ends = sorted(ends)
        for low, high in zip([2, *open_ends], [*open_ends, os.sysconf("SC_OPEN_MAX")], strict=True):
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
        """Kill the children that are not copies: their parent ended."""
        with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
            for number in map(int, file.read().split()):
                if number not in self.copies:
                    with suppress(OSError):
                        os.kill(number, signal.SIGKILL)

    def _leave(self) -> NoReturn:
        """Kill all processes, remove the folder, and end."""
        from headwise.examiner.sandbox.confine import limits

        signal.set_wakeup_fd(-1)
        for copy in self.copies:
            with suppress(OSError):
                os.kill(copy, signal.SIGKILL)
        limits.sweep(os.getpid())
        limits.remove(self.folder)
        os._exit(0)


def run_one(folder: Path, status: int, talk: int) -> NoReturn:
    """Set up the sandbox, run one file, and answer questions about it.

    The learner's file can do all that this process can do, so it can forge the evidence. The judge is another
    process, and draws its own weights and inputs after this one has sent the evidence.
    """
    from headwise.examiner.sandbox import confine

    sys.dont_write_bytecode = True  # of what the learner's file imports
    request = json.loads((folder / "request.json").read_text("utf-8-sig"))

    def tell(fact: dict[str, object]) -> None:
        os.write(status, json.dumps(fact).encode() + b"\n")

    fence = confine.Fence(**request["fence"])
    standing = confine.enter(fence, tell)  # forks: the code below runs in the confined process
    refused = not (standing.essential or request["trust"])
    tell({"protections": standing.protections, "missing": standing.missing, "refused": refused})
    if refused or request["probe"]:
        os._exit(0)
    work = folder / "work"
    os.chdir(work)
    user = dict.fromkeys(("USER", "LOGNAME"), "learner")  # the user id has no name in the sandbox
    os.environ |= {"HOME": str(work), "TMPDIR": str(work), **user}
    tempfile.tempdir = None
    load_examiner()  # does nothing in a copy of the template
    _examine(request, folder / "result", tell, status, talk, standing.essential)


def _examine(
    request: dict[str, Any], result: Path, tell: Any, status: int, talk: int, confined: bool
) -> NoReturn:  # fmt: skip
    # Import everything before the learner's file runs: the functions here keep their own references to torch,
    # whatever that file replaces. The numbers are compared in another process.
    from headwise.examiner.dispatch import understand
    from headwise.examiner.examine.environment import without_output
    from headwise.examiner.sandbox.confine import limits
    from headwise.examiner.sandbox.learner import (
        Skipped,
        answers,
        choose,
        lacks_something,
        load,
        load_all_the_same,
        trains_while_loading,
    )
    from headwise.examiner.sandbox.stand_ins import WORDS, OnCPU, asks_for_gpu, has_no_effect, quieten
    from headwise.examiner.sandbox.verdicts import HEADER, of_exception
    from headwise.examiner.source.likely_classes import source_of
    from headwise.examiner.source.names import NOTE, set_as_under_main

    own, end, dumps, loads, pack, header = os.getpid(), os._exit, json.dumps, json.loads, HEADER.pack, HEADER
    if "arguments" in request["options"]:
        request["options"]["arguments"] = ast.literal_eval(request["options"]["arguments"])
    path, changed = Path(request["file"]), request["source"]
    source = source_of(path)[0] if changed is None else changed
    wire = socket.socket(fileno=talk)
    send, receive = wire.sendall, wire.recv

    def say(facts: object, numbers: bytes = b"") -> None:
        text = dumps(facts).encode()
        send(pack(len(text), len(numbers)) + text)
        send(numbers)

    def hear() -> tuple[Any, bytearray] | None:
        def exactly(count: int) -> bytearray:
            got = bytearray()
            while len(got) < count and (piece := receive(min(count - len(got), 2**20))):
                got += piece
            return got

        start = exactly(header.size)
        if len(start) < header.size:
            return None
        text, numbers = header.unpack(start)
        return loads(bytes(exactly(text))), exactly(numbers)

    where = open(result / "where.txt", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.enable(where)
    # Before a process is killed for its time or memory, it gets this signal: it writes its line, and ends.
    faulthandler.register(signal.SIGXCPU, where, chain=True)
    limits.limit_memory(request["memory"])
    limits.limit_time(request["seconds"])
    tell({"ready": True, "memory": limits.memory_of("self"), "waited": limits.waited("self")})
    os.close(status)

    stage = "import"
    caller: Any = None
    facts: dict[str, object] = {}
    numbers = b""
    on_cpu = OnCPU() if asks_for_gpu(source) else None
    if on_cpu is not None:
        quieten()
        on_cpu.__enter__()  # until this process ends
    try:
        lacking: BaseException | None = None
        stood_in: list[str] = []
        skipped: list[Skipped] = []
        try:
            if trains_while_loading(source):
                raise ImportError("it trains a model while it is imported")
            module = load(path, source, changed is not None)
        except (ImportError, OSError, SystemExit) as error:
            if request["name"] is None or not lacks_something(error, source):
                raise
            lacking = error
            try:
                module, stood_in, skipped = load_all_the_same(path, source)
            except Exception:
                raise error from None
        set_there = set_as_under_main(module, source)
        obj = choose(module, request["name"])
        if os.getpid() != own:
            end(1)
        stage = "call"
        with without_output():  # nothing new is printed by these calls
            evidence, caller = understand(obj, source=source, path=str(path), **request["options"])
        if os.getpid() != own:
            end(1)
        if lacking is not None:
            used_stand_in = any("StandIn" in problem.message for problem in evidence.problems)
            without = {f"name {name!r} is not defined" for statement in skipped for name in statement.names}
            undefined = (problem.message.partition(".")[0] for problem in evidence.problems)
            used_stand_in = used_stand_in or any(each in without for each in undefined)
            needed = used_stand_in or not (stood_in or skipped) or not all(map(has_no_effect, stood_in))
            if needed and (evidence.weights is None or evidence.problems):  # the missing part was needed
                stage = "import"
                raise lacking
            if stood_in or not skipped:
                names = ", ".join(dict.fromkeys(stood_in)) or str(lacking)
                evidence.conventions.words.append(
                    f"these packages are not installed, and the check does not need them: {names}"
                )
            if skipped:
                lines = ", ".join(f"line {each.line} ({type(each.error).__name__})" for each in skipped[:5])
                more = f" and {len(skipped) - 5} more" if len(skipped) > 5 else ""
                evidence.conventions.words.append(
                    f"these statements raised an exception during the import and were skipped: {lines}{more}"
                )
        if set_there:
            evidence.conventions.words.append(NOTE.format(names=", ".join(set_there)))
        if on_cpu is not None and on_cpu.used:
            evidence.conventions.words.append(WORDS)
        if caller is None:  # a single step
            caller = cast(Any, evidence.again)
        facts["evidence"], numbers = evidence.written()
    except BaseException as error:
        if os.getpid() != own:  # a fork that the learner's file made
            end(1)
        facts["problem"] = asdict(of_exception(error, path, stage, request["memory"], confined=confined))
        filename = getattr(error, "filename", None)
        facts["filename"] = filename if isinstance(filename, str) else ""
    with suppress(Exception):  # the learner's file may have replaced them
        sys.stdout.flush()
        sys.stderr.flush()
    say(facts, numbers)
    heard = hear() if caller is not None and "problem" not in facts else None
    if heard is not None and caller is not None and os.getpid() == own:
        with without_output():
            say(*answers(caller, *heard))
    end(0)


def main(mode: str, control: str, lock: str, folder: str, *roots: str) -> NoReturn:
    sys.path += [each for each in roots if each not in sys.path]
    package("headwise", FOLDER.parents[1])  # before torch, so that it imports nothing else
    if mode == "alone":  # `control` holds the three pipes
        output, status, talk = (int(each) for each in control.split(","))
        os.dup2(output, 1)
        os.dup2(output, 2)
        run_one(Path(folder), status, talk)
    Host(int(control), int(lock), Path(folder)).serve(bare=mode == "bare")


if __name__ == "__main__":
    main(*sys.argv[1:])
