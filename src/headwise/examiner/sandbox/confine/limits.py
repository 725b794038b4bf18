"""What a process may use, set by itself and never to be raised again; and what it leaves behind."""

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
    """Files, processes, core dumps.

    Args:
        own_users: in a user namespace, where only the processes in it are counted.
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
    """The kernel holds no real root to a number of processes; the effective user, who opens files, stays."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setresuid(NOBODY, -1, -1)


def first_to_go() -> None:
    """Where the machine's memory ends after all, the system ends this process and its children first."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def limit_memory(most: int) -> None:
    """What could never be used is refused at once; what is used is watched from outside.

    The kernel counts what is reserved, and a library that finds no room for an arena at its first product
    ends the process: so there is room for that, beyond what was reserved up to now.
    """
    import resource

    address_space, data = _reserved()
    _lower(resource.RLIMIT_AS, address_space + most + RESERVED)
    _lower(resource.RLIMIT_DATA, data + most + RESERVED)


def memory_of(process: int | str) -> int:
    """Bytes in use, of its own, not of files; 0 where the system does not say."""
    return _lines(f"/proc/{process}/status", ("RssAnon:", "RssShmem:"))


def share_of(process: int | str) -> int:
    """The same, with pages shared by n processes counted as 1 / n each."""
    return _lines(f"/proc/{process}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:"))


def _lines(path: str, starts: tuple[str, ...]) -> int:
    with suppress(OSError), open(path) as file:
        return sum(int(line.split()[1]) * 1024 for line in file if line.startswith(starts))
    return 0


def waited(process: int | str) -> float:
    """Seconds in which it could have run and others did; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def processor_time(process: int | str) -> float:
    """Seconds of processor time, with that of children that ended; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{process}/stat", "rb") as file:
        # After the name, in brackets: state, parent, ..; the 12th to 15th are ticks of its own and theirs.
        ticks = file.read().rpartition(b")")[2].split()[11:15]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def limit_time(seconds: float) -> None:
    """So many seconds of processor time from now; the clock on the wall is watched from outside."""
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


def descendants_of(*ancestors: int) -> list[int]:
    """Their children, the children of those, and so on; nearest first."""
    children: dict[int, list[int]] = {}
    for number, parent in _parents():
        children.setdefault(parent, []).append(number)
    descendants = list(ancestors)
    for number in descendants:  # grows while it is walked
        descendants += children.get(number, [])
    return descendants[len(ancestors) :]


def _parents() -> list[tuple[int, int]]:
    """(process, its parent) for every process in sight that has not ended."""
    pairs = []
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    # The name, in brackets, may hold anything.
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                    if state not in (b"Z", b"X"):
                        pairs.append((int(name), int(parent)))
    return pairs


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
        for parent, folders, _ in os.walk(folder):
            for each in folders:
                inside = os.path.join(parent, each)
                if not os.path.islink(inside):
                    with suppress(OSError):
                        os.chmod(inside, 0o700)
    # Python's own gives up at folders a thousand deep.
    subprocess.run(["rm", "-rf", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
