"""What runs in a copy of the template: the fences first, then one file, then what is asked about it.

What this process can do, the learner's file can do: forge the evidence, too. That is testimony. What judges
is in another process, and draws weights and inputs of its own once this has said what it has to say.
"""

from __future__ import annotations

import ast
import faulthandler
import json
import os
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

HEADER = struct.Struct(">IQ")  # of a message: bytes of JSON, bytes of numbers


def work(
    folder: Path, status: int, talk: int, confine: ModuleType, load_examiner: Callable[[], None]
) -> NoReturn:
    """Never returns: the process ends with it."""
    request = json.loads((folder / "request.json").read_text("utf-8-sig"))

    def tell(fact: dict[str, object]) -> None:
        os.write(status, json.dumps(fact).encode() + b"\n")

    fence = confine.Fence(**request["fence"])
    standing = confine.enter(fence, tell)  # forks: what follows is in the confined process
    refused = not (standing.essential or request["trust"])
    tell({"protections": standing.protections, "missing": standing.missing, "refused": refused})
    if refused or request["probe"]:
        os._exit(0)
    work = folder / "work"
    os.chdir(work)
    os.environ |= {"HOME": str(work), "TMPDIR": str(work)}
    tempfile.tempdir = None
    if "headwise.examiner" not in sys.modules:
        load_examiner()
    _examine(request, folder / "result", confine, tell, status, talk, standing.essential)


def _examine(
    request: dict[str, Any], result: Path, confine: ModuleType, tell: Any, status: int, talk: int,
    confined: bool,
) -> NoReturn:  # fmt: skip
    # All of it before the learner's file runs: `examine` and what follows it here keep their own references
    # to what they need of torch, whatever that file replaces; what compares numbers is in another process.
    from headwise.examiner.examine.surroundings import silently
    from headwise.examiner.inquiry import understand
    from headwise.examiner.sandbox.learner import answers, choose, load, load_all_the_same
    from headwise.examiner.sandbox.packages_without_effect import has_no_effect
    from headwise.examiner.sandbox.verdicts import of_exception
    from headwise.examiner.sandbox.without_gpu import WORDS, OnCPU, asks_for_gpu, quieten
    from headwise.examiner.source.likely_classes import source_of
    from headwise.examiner.source.names import NOTE, set_as_under_main

    limits = sys.modules[f"{confine.__name__}.limits"]
    own, end, dumps, loads, pack, header = os.getpid(), os._exit, json.dumps, json.loads, HEADER.pack, HEADER
    if "arguments" in request["options"]:
        request["options"]["arguments"] = ast.literal_eval(request["options"]["arguments"])
    path, source = Path(request["file"]), source_of(Path(request["file"]))[0]
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

    where = open(result / "where.txt", "w")  # noqa: SIM115 - for as long as the process lives
    faulthandler.enable(where)
    # Whoever ends this process for its time or memory sends this first: it tells the line, and ends.
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
        lacking: ImportError | None = None
        stood_in: list[str] = []
        try:
            module = load(path, source)
        except ImportError as error:
            lacking = error
            try:
                module, stood_in = load_all_the_same(path, source)
            except Exception:
                raise error from None
        set_there = set_as_under_main(module, source)
        obj = choose(module, request["name"])
        if os.getpid() != own:
            end(1)
        stage = "call"
        with silently():  # this process is ours, and what is printed now has been printed before
            evidence, caller = understand(obj, source=source, path=str(path), **request["options"])
        if os.getpid() != own:
            end(1)
        if lacking is not None:
            met = any("StandIn" in one.message for one in evidence.problems)
            needed = met or not stood_in or not all(map(has_no_effect, stood_in))
            if needed and (evidence.weights is None or evidence.problems):  # it could not do without
                stage = "import"
                raise lacking
            names = ", ".join(dict.fromkeys(stood_in)) or str(lacking)
            evidence.conventions.words.append(f"not here, and not needed for this: {names}")
        if set_there:
            evidence.conventions.words.append(NOTE.format(names=", ".join(set_there)))
        if on_cpu is not None and on_cpu.met:
            evidence.conventions.words.append(WORDS)
        if caller is None:  # a single step
            caller = cast(Any, evidence.again)
        facts["evidence"], numbers = evidence.written()
    except BaseException as error:
        if os.getpid() != own:  # a copy the learner's file made of this process
            end(1)
        facts["problem"] = asdict(of_exception(error, path, stage, request["memory"], confined=confined))
        filename = getattr(error, "filename", None)
        facts["filename"] = filename if isinstance(filename, str) else ""
    with suppress(Exception):  # they may be the learner's by now
        sys.stdout.flush()
        sys.stderr.flush()
    say(facts, numbers)
    heard = hear() if caller is not None and "problem" not in facts else None
    if heard is not None and caller is not None and os.getpid() == own:
        with silently():
            say(*answers(caller, *heard))
    end(0)
