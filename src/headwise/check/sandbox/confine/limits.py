"""Limits of one process, set by itself and never to be raised again."""

from __future__ import annotations

import math
import os
from contextlib import suppress

__all__ = [
    "FILE_BYTES",
    "OPEN_FILES",
    "PROCESSES",
    "be_counted",
    "first_to_go",
    "limit_memory",
    "limit_the_rest",
    "limit_time",
]

FILE_BYTES = 256 * 2**20
OPEN_FILES = 256
PROCESSES = 64  # and threads
NOBODY = 65534


def limit_the_rest(*, own_users: bool) -> None:
    """Files, processes, core dumps.

    Args:
        own_users: in a user namespace, where only the processes in it are counted.
    """
    import resource

    others = 0 if own_users else _processes_of_user()
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, others + PROCESSES),
    ):
        _lower(what, most)


def be_counted() -> None:
    """The kernel holds no real root to a number of processes; the effective user, who opens files, stays."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setresuid(NOBODY, -1, -1)


def first_to_go() -> None:
    """Where the machine's memory ends after all, the system ends this process and its children first."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def limit_memory(most: int) -> None:
    """So many bytes beyond those in use now: what torch's libraries take up differs from build to build."""
    import resource

    address_space, data = _in_use()
    _lower(resource.RLIMIT_AS, address_space + most)
    _lower(resource.RLIMIT_DATA, data + most)


def limit_time(seconds: float) -> None:
    """So many seconds of processor time from now; the clock on the wall is watched from outside."""
    import resource

    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _lower(resource.RLIMIT_CPU, math.ceil(used + seconds) + 1)


def _lower(what: int, most: int) -> None:
    import resource

    hard = resource.getrlimit(what)[1]
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    with suppress(OSError, ValueError):  # macOS knows some of these by name only
        resource.setrlimit(what, (most, most))


def _in_use() -> tuple[int, int]:
    """Bytes of address space, and of data."""
    try:
        with open("/proc/self/statm") as file:
            pages = [int(each) for each in file.read().split()]
    except OSError:
        return 32 * 2**30, 2 * 2**30
    size = os.sysconf("SC_PAGE_SIZE")
    return pages[0] * size, pages[5] * size


def _processes_of_user() -> int:
    """Threads counted as processes, as the limit counts them."""
    user, count = os.getuid(), 0
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError):
                    if os.stat(f"/proc/{name}").st_uid == user:
                        count += len(os.listdir(f"/proc/{name}/task"))
    return count
