"""What a process leaves: its descendants, its folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress


def descendants_of(*ancestors: int) -> list[int]:
    """Their children, the children of those, and so on; nearest first."""
    children: dict[int, list[int]] = {}
    for number, parent in _parents():
        children.setdefault(parent, []).append(number)
    found = list(ancestors)
    for number in found:  # grows while it is walked
        found += children.get(number, [])
    return found[len(ancestors) :]


def _parents() -> list[tuple[int, int]]:
    """(process, its parent) for every process in sight that has not ended."""
    found = []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    # The name, in brackets, may hold anything.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                    if state not in (b"Z", b"X"):
                        found.append((int(name), int(parent)))
    return found


def sweep(ancestor: int, seconds: float = 3.0) -> None:
    """End all descendants and reap those that come to the caller, until there are none."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        left = descendants_of(ancestor)
        for number in left:
            with suppress(OSError):
                os.kill(number, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            return
        time.sleep(0.005)


def remove(folder: str | os.PathLike[str]) -> None:
    """A folder with all in it, also where the learner's file took rights away from folders."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        return
    with suppress(RecursionError):
        for here, folders, _ in os.walk(folder):
            for each in folders:
                inside = os.path.join(here, each)
                if not os.path.islink(inside):
                    with suppress(OSError):
                        os.chmod(inside, 0o700)
    # Python's own gives up at folders a thousand deep.
    subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
