"""All fences together, and the three processes that put them up.

caller ── gate ── keeper ── confined          gate: enters namespaces, waits
                                              keeper: the first process of the new ones; when it ends,
                                                      the kernel ends all others with it
                                              confined: runs the learner's file
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from . import landlock, limits, linux, namespaces
from .sweep import descendants_of, sweep

DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))

Tell = Callable[[dict[str, object]], None]


@dataclass
class Fence:
    """What the confined process may touch."""

    readable: list[str]
    listable: list[str]  # folders whose names may be seen, not what is in the files
    writable: list[str]
    root: str  # an empty folder the new / is built at
    without: list[str] = field(default_factory=list)  # protections left out on purpose, by tests


@dataclass
class Standing:
    """Which protections are in force, in words."""

    protections: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    essential: bool = False  # at least one that keeps other files from it
    own_users: bool = False


def enter(fence: Fence, tell: Tell) -> Standing:
    """Returns in the confined process only; `tell` hears of the keeper's number and of the confined's end."""
    standing = Standing()
    if sys.platform != "linux":
        standing.missing.append(f"namespaces and Landlock: {sys.platform} has neither")
        _limits(standing)
        return standing
    linux.prctl(linux.SET_DEATH_SIGNAL, signal.SIGKILL)
    limits.first_to_go()
    limits.be_counted()
    spaces = _namespaces(fence, standing)
    keeper = os.fork()
    if keeper:
        tell({"keeper": keeper, "own_processes": bool(spaces & namespaces.PROCESSES)})
        _let_go_of_output()
        os.waitpid(keeper, 0)
        os._exit(0)
    linux.prctl(linux.SET_DEATH_SIGNAL, signal.SIGKILL)
    own_root = _root(fence, spaces, standing)
    confined = os.fork()
    if confined:
        _keep(confined, tell, own_processes=bool(spaces & namespaces.PROCESSES), own_root=own_root)
    _confine(fence, standing)
    return standing


def _keep(confined: int, tell: Tell, *, own_processes: bool, own_root: bool) -> None:
    """Reap whatever ends, until the confined process does; then nothing of it may stay. Does not return."""
    linux.prctl(linux.SET_DUMPABLE, 0)  # nobody in there looks into this process
    if not own_processes:
        linux.prctl(linux.SET_CHILD_SUBREAPER, 1)
    _let_go_of_output()
    while True:
        ended, status = os.wait()
        if ended == confined:
            break
    # Among processes of its own, but with the old /proc, the numbers there are not the keeper's.
    left = len(descendants_of(os.getpid())) if own_root or not own_processes else 0
    tell({"ended": status, "left": left})
    if not own_processes:
        sweep(os.getpid())
    os._exit(0)


def _let_go_of_output() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    os.close(nothing)


def _namespaces(fence: Fence, standing: Standing) -> namespaces.Spaces:
    try:
        if "namespaces" in fence.without:
            raise OSError("left out")
        spaces = namespaces.enter()
    except OSError as error:
        standing.missing.append(f"namespaces: the system does not grant them ({error.strerror or error})")
        return 0
    standing.own_users = True
    standing.protections.append("user namespace: none of your rights over the system")
    standing.protections.append("network namespace: no network, not even this machine's own")
    if spaces & namespaces.PROCESSES:
        standing.protections.append("process namespace: sees no other process, and leaves none behind")
    else:
        standing.missing.append("process namespace: the system does not grant it")
    return spaces


def _root(fence: Fence, spaces: namespaces.Spaces, standing: Standing) -> bool:
    try:
        if not spaces & namespaces.MOUNTS or not spaces & namespaces.PROCESSES or "root" in fence.without:
            raise OSError("no mount namespace")
        namespaces.build_root(fence.root, fence.readable, fence.writable, DEVICES)
    except OSError as error:
        standing.missing.append(
            f"a root folder of its own: {error.strerror or error}; rights and dates of files can be changed"
        )
        return False
    standing.essential = True
    standing.protections.append(
        "root folder of its own: Python, the file's folder and a temporary one are all there is"
    )
    return True


def _confine(fence: Fence, standing: Standing) -> None:
    linux.prctl(linux.SET_NO_NEW_PRIVILEGES, 1)
    if os.geteuid() == 0 or standing.own_users:
        with suppress(OSError):
            linux.drop_capabilities()
    try:
        if "landlock" in fence.without:
            raise OSError("left out")
        number = landlock.restrict([*fence.readable, "/proc"], fence.listable, fence.writable, DEVICES)
    except OSError as error:
        standing.missing.append(f"Landlock: the kernel does not offer it ({error.strerror or error})")
        number = 0
    else:
        standing.essential = True
        standing.protections.append(
            f"Landlock {number}: reads only Python and the file's folder, writes only to a temporary folder"
        )
    if not standing.own_users:
        standing.missing.append(
            "no network: TCP is shut by Landlock, the rest is open"
            if number >= 4
            else "no network: it is open"
        )
    _limits(standing)


def _limits(standing: Standing) -> None:
    try:
        limits.limit_the_rest(own_users=standing.own_users)
    except ImportError:
        standing.missing.append("limits on memory, files and processes: this system has none")
        return
    standing.protections.append(
        f"limits: time, memory, {limits.FILE_BYTES >> 20} MiB a file, {limits.OPEN_FILES} open files, "
        f"{limits.PROCESSES} processes"
    )
