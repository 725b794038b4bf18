"""The command line as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import headwise

PROGRAM = [sys.executable, "-W", "error::UserWarning", "-m", "headwise"]


def environment(**more: str) -> dict[str, str]:
    root = str(Path(headwise.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", **more}


def started(*command: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
    """A command, with pipes for what it prints; nothing can be typed into it."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment(**env or {}), **(pipes | options))


def run(*command: str, stdin: str | None = None, cwd: Path | None = None, **env: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    done = subprocess.run(
        command, env=environment(**env), cwd=cwd, capture_output=True, timeout=100,
        encoding=env.get("PYTHONIOENCODING", "utf-8"),
        **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr
