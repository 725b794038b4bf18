"""Limits that a process sets for itself and cannot raise again, and removal of what it leaves behind."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress

FILE_BYTES = 256 * 2**20
OPEN_FILES = 256
PROCESSES = 64  # and threads
NOBODY = 65534
RESERVED = 8 * 2**30  # allocators and BLAS libraries reserve gigabytes that they never touch


def limit_the_rest(*, own_users: bool) -> None:
    """Limit files, processes and core dumps.

    Args:
        own_users: True in a user namespace, where only its own processes count.
    """
    import resource

    others = 0 if own_users else _processes_of_user()
    for resource_kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_NPROC, others + PROCESSES),
    ):
        _lower(resource_kind, most)


def be_counted() -> None:
    """Give up the real user id of root, for which the kernel limits no processes; keep the effective one."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setresuid(NOBODY, -1, -1)


def first_to_go() -> None:
    """Let the system kill this process and its children first if the machine runs out of memory."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def limit_memory(most: int) -> None:
    """Limit the address space; the watching process limits the memory in use.

    The kernel counts reserved memory, and a library that cannot reserve an arena at its first product ends
    the process, so the limit leaves room for that.
    """
    import resource

    address_space, data = _reserved()
    _lower(resource.RLIMIT_AS, address_space + most + RESERVED)
    _lower(resource.RLIMIT_DATA, data + most + RESERVED)


def memory_of(process: int | str) -> int:
    """Return the bytes of memory in use, without files; 0 if unknown."""
    return _lines(f"/proc/{process}/status", ("RssAnon:", "RssShmem:"))


def share_of(process: int | str) -> int:
    """Return the bytes of memory in use; a page shared by n processes counts as 1 / n."""
    return _lines(f"/proc/{process}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))


def _lines(path: str, starts: tuple[str, ...]) -> int:
    with suppress(OSError), open(path) as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(starts))
    return 0


def waited(process: int | str) -> float:
    """Return the seconds that the process waited for a processor; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def processor_time(process: int | str) -> float:
    """Return the seconds of processor time, with that of children that ended; 0 if unknown."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat", "rb") as file:
        # After the name in brackets: state, parent, ...; the 12th to 15th are ticks of it and its children.
        ticks = file.read().rpartition(b")")[2].split()[11:15]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def limit_time(seconds: float) -> None:
    """Limit the processor time from now; the watching process limits the elapsed time."""
    import resource

    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _lower(resource.RLIMIT_CPU, math.ceil(used + seconds) + 1, grace=3)  # SIGXCPU first, SIGKILL at the end


def _lower(resource_kind: int, most: int, grace: int = 0) -> None:
    import resource

    hard = resource.getrlimit(resource_kind)[1]
    last = most + grace if hard == resource.RLIM_INFINITY else min(most + grace, hard)
    with suppress(OSError, ValueError):  # macOS knows some of these by name only
        resource.setrlimit(resource_kind, (min(most, last), last))


def _reserved() -> tuple[int, int]:
    """Return the bytes of address space and of data."""
    try:
        with open("/proc/self/statm") as file:
            pages = [int(each) for each in file.read().split()]
    except OSError:
        return 32 * 2**30, 2 * 2**30
    size = os.sysconf("SC_PAGE_SIZE")
    return pages[0] * size, pages[5] * size


def _processes_of_user() -> int:
    """Return the number of threads of the user, which the limit counts as processes."""
    user, count = os.getuid(), 0
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError):
                    if os.stat(f"/proc/{name}").st_uid == user:
                        count += len(os.listdir(f"/proc/{name}/task"))
    return count


def descendants_of(*ancestors: int) -> list[int]:
    """Return the children of these processes, their children, and so on; nearest first."""
    children: dict[int, list[int]] = {}
    for number, parent in _parents():
        children.setdefault(parent, []).append(number)
    descendants = list(ancestors)
    for number in descendants:  # grows while it is walked
        descendants += children.get(number, [])
    return descendants[len(ancestors) :]


def _parents() -> list[tuple[int, int]]:
    """Return (process, parent) of every visible process that has not ended."""
    pairs = []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    # The name, in brackets, may contain any character.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                    if state not in (b"Z", b"X"):
                        pairs.append((int(name), int(parent)))
    return pairs


def sweep(ancestor: int, seconds: float = 3.0) -> None:
    """Kill all descendants, and reap those that become children of the caller, until there are none."""
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
    """Remove a folder and its content, even if the learner's file removed permissions of folders."""
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if not os.path.lexists(folder):
        return
    with suppress(RecursionError):
        for parent, folders, _ in os.walk(folder):
            for each in folders:
                inside = os.path.join(parent, each)
                if not os.path.islink(inside):
                    with suppress(OSError):
                        os.chmod(inside, 0o700)
    # shutil.rmtree fails for folders nested a thousand deep.
    subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
