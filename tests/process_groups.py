"""Groups of processes on this machine: n ranks of `torch.distributed` over gloo, each runs one function.

Processes are forked from one that has torch and headwise loaded, so that a rank starts in a moment. They find
each other through a file, not through a port: suites that run side by side never meet.
"""

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

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["torch.distributed", "torch.distributed.tensor", "headwise"])


def run_ranks(ranks: int, work: Callable[..., Any], *arguments: Any, within: float = 120.0) -> list[Any]:
    """What `work(*arguments)` returned on each rank of a fresh group, in the order of ranks.

    `work` is a function at the top of a module. What it raises is raised here, with its rank and traceback;
    a group that is not done within so many seconds is killed and reported as hanging.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(ranks):
            here, there = _PROCESSES.Pipe(duplex=False)
            place = (rank, ranks, f"file://{Path(folder) / 'meeting'}")
            process = _PROCESSES.Process(target=_one_rank, args=(place, there, work, arguments), daemon=True)
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        try:
            return _answers(ends, time.monotonic() + within)
        finally:
            for process in processes:
                process.kill()
                process.join()


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


def _one_rank(
    place: tuple[int, int, str], end: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    rank, ranks, meeting = place
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    try:
        answer: tuple[Any, str] = (work(*arguments), "")
    except BaseException:
        answer = (None, traceback.format_exc())
    end.send(answer)
    # Nobody leaves before all have answered: others would fail of that, and not of what went wrong.
    end.close()
    if not answer[1]:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
