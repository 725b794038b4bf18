"""Commands in copies of a process that has imported torch and headwise: a start of torch takes seconds.

For tests that start a command many times; how a command starts and ends by itself is tested elsewhere.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

from process_groups import PROCESSES


def started_warm(*arguments: str, message: Path, **environment: str) -> BaseProcess:
    """`headwise ARGUMENTS`, with all that it says going into a file."""
    process = PROCESSES.Process(target=_run, args=(arguments, str(message), environment))
    process.start()
    return process


def _run(arguments: tuple[str, ...], message: str, environment: dict[str, str]) -> None:
    import torch

    from headwise.cli import program

    torch.set_num_threads(1)
    os.environ.update(environment)
    file = os.open(message, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = ["headwise", *arguments]
    sys.exit(program())
