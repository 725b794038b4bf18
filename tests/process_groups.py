"""Groups of processes on this machine: n ranks of `torch.distributed` over gloo, which run functions.

A group of n ranks is started once and kept for everything that n ranks run: a start takes longer than most
checks, since each process imports the tests. Processes are forked from one that has torch and headwise
loaded. They find each other through a file, not through a port: suites that run side by side never meet.
"""

import atexit
import multiprocessing
import multiprocessing.connection
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

PROCESSES = multiprocessing.get_context("forkserver")  # one server for all that a session starts so
PROCESSES.set_forkserver_preload(
    [
        "torch.distributed",
        "torch.distributed.tensor",
        "headwise",
        "headwise.cli.verbs",
        "pyarrow.parquet",
    ]
)

_groups: dict[int, "_Group"] = {}  # by the number of ranks


def run_ranks(ranks: int, work: Callable[..., Any], *arguments: Any, within: float = 120.0) -> list[Any]:
    """What `work(*arguments)` returned on each rank of a group, in the order of ranks.

    `work` is a function at the top of a module; it leaves the process as it found it, but for random numbers.
    What it raises is raised here, with its rank and traceback; a group that is not done within so many
    seconds is reported as hanging. In both cases the group is killed, and the next call starts another.
    """
    group = _groups[ranks] = _groups.get(ranks) or _Group(ranks)
    try:
        for end in group.ends:
            end.send((work, arguments))
        return _answers(group.ends, time.monotonic() + within)
    except BaseException:
        _groups.pop(ranks).kill()
        raise


class _Group:
    """Processes that wait for work, each one rank."""

    def __init__(self, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._processes, self.ends = [], []
        for rank in range(ranks):
            parent_end, child_end = PROCESSES.Pipe()
            place = (rank, ranks, f"file://{Path(self._folder.name) / 'meeting'}")
            process = PROCESSES.Process(target=_serve, args=(*place, child_end), daemon=True)
            process.start()
            child_end.close()
            self._processes.append(process)
            self.ends.append(parent_end)

    def kill(self) -> None:
        for process, end in zip(self._processes, self.ends, strict=True):
            process.kill()
            process.join()
            end.close()
        self._folder.cleanup()


@atexit.register
def _kill_all() -> None:
    for group in _groups.values():
        group.kill()


def _answers(ends: list[Connection], deadline: float) -> list[Any]:
    """One answer of each rank; the first that failed is raised; nobody waits for those that hang on it."""
    answers: dict[int, Any] = {}
    while len(answers) < len(ends):
        waiting = {end: rank for rank, end in enumerate(ends) if rank not in answers}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer in time")
        for end in ready:
            rank = waiting[end]
            try:
                answers[rank], failure = end.recv()
            except EOFError:
                failure = "the process ended without an answer"
            if failure:
                raise AssertionError(f"rank {rank} of {len(ends)}: {failure}")
    return [answers[rank] for rank in range(len(ends))]


def _serve(rank: int, ranks: int, meeting: str, end: Connection) -> None:
    """Run what is sent, as one rank of a group, until the connection is closed."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    while True:
        try:
            work, arguments = end.recv()
        except EOFError:
            return
        torch.manual_seed(0)  # the same on every rank, whatever ran before
        try:
            answer: tuple[Any, str] = (work(*arguments), "")
        except BaseException:
            answer = (None, traceback.format_exc())
        end.send(answer)
