"""Confine a process. Only the standard library is imported here.

Namespaces and Landlock apply to one thread and to what it starts later, so they are set before torch is
imported, which may start threads. The child process loads this package without the rest of headwise.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from . import limits, linux
from .limits import descendants_of, sweep

__all__ = ["Fence", "Standing", "enter"]


MOUNTS, CGROUPS, HOSTNAME, IPC, USERS, PROCESSES, NETWORK = (
    1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)
)  # fmt: skip
Spaces = int  # flags of the namespaces entered

# Tried in this order: some systems allow only a few.
ATTEMPTS: tuple[Spaces, ...] = (
    USERS | NETWORK | PROCESSES | MOUNTS | IPC | HOSTNAME | CGROUPS,
    USERS | NETWORK | PROCESSES | MOUNTS | IPC,
    USERS | NETWORK | IPC,
    USERS | NETWORK,
)


def _enter_namespaces() -> Spaces:
    """Enter new namespaces, as many as the system grants, and return them.

    The process stays in its old process namespace; its next child is the first process in the new one.

    Raises:
        OSError: the system grants no namespace.
    """
    user, group = os.geteuid(), os.getegid()
    refused: OSError | None = None
    for spaces in ATTEMPTS:
        try:
            linux.unshare(spaces)
        except OSError as error:
            refused = refused or error
            continue
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
        return spaces
    assert refused is not None
    raise refused


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def build_root(root: str, readable: Iterable[str], writable: Iterable[str], devices: Iterable[str]) -> None:
    """Make `root` the new /, with only these paths in it, under their own names, and /proc.

    Landlock does not stop connections to sockets of other programs (containers, desktops, databases), which
    are files. In the new / they do not exist.

    Raises:
        OSError: a mount failed; the old / stays.
    """
    linux.mount("none", "/", None, linux.RECURSIVE | linux.PRIVATE)
    linux.mount("none", root, "tmpfs", linux.NO_SUID | linux.NO_DEVICES, "mode=755,size=1m")
    for path in readable:
        _place(root, path)
    # Everything but later mounts becomes read-only below, so the mount points must exist before.
    later = [(path, _make_room(root, path)) for path in (*devices, *writable) if os.path.exists(path)]
    process_files = _make_folder(root + "/proc")
    try:
        linux.mount(
            "proc", process_files, "proc", linux.READ_ONLY | linux.NO_SUID | linux.NO_DEVICES | linux.NO_EXEC
        )
    except OSError:  # containers hide parts of /proc, and the kernel then refuses a new one
        linux.mount("/proc", process_files, None, linux.BIND | linux.RECURSIVE)
    linux.mount_read_only(root)
    for path, place in later:
        linux.mount(path, place, None, linux.BIND)
    linux.pivot_root(root)


def _place(root: str, path: str) -> None:
    if not os.path.lexists(path):
        return
    if os.path.islink(path):  # /lib -> usr/lib
        place = root + path
        _make_folder(os.path.dirname(place))
        if not os.path.lexists(place):
            os.symlink(os.readlink(path), place)
        return
    linux.mount(path, _make_room(root, path), None, linux.BIND | linux.RECURSIVE)


def _make_room(root: str, path: str) -> str:
    """Create an empty file or folder to mount on, and return its path."""
    place = root + path
    if os.path.isdir(path):
        return _make_folder(place)
    _make_folder(os.path.dirname(place))
    if not os.path.lexists(place):
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o644))
    return place


def _make_folder(place: str) -> str:
    os.makedirs(place, exist_ok=True)
    return place


DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))

Tell = Callable[[dict[str, object]], None]


@dataclass
class Fence:
    """The files that the confined process may access."""

    readable: list[str]
    listable: list[str]  # folders whose file names may be listed
    writable: list[str]
    root: str  # an empty folder for the new /
    without: list[str] = field(default_factory=list)  # protections that tests switch off


@dataclass
class Standing:
    """The protections that are active and missing, in words."""

    protections: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    essential: bool = False  # at least one of them blocks other files
    own_users: bool = False


def enter(fence: Fence, tell: Tell) -> Standing:
    """Return in the confined process only; `tell` gets the keeper's number and the confined one's end."""
    standing = Standing()
    if sys.platform != "linux":
        standing.missing.append(f"namespaces and Landlock: not available on {sys.platform}")
        _limits(standing)
        return standing
    linux.prctl(linux.SET_DEATH_SIGNAL, signal.SIGKILL)
    limits.first_to_go()
    limits.be_counted()
    spaces = _namespaces(fence, standing)
    keeper = os.fork()
    if keeper:
        tell({"keeper": keeper, "own_processes": bool(spaces & PROCESSES)})
        _let_go_of_output()
        os.waitpid(keeper, 0)
        os._exit(0)
    linux.prctl(linux.SET_DEATH_SIGNAL, signal.SIGKILL)
    own_root = _root(fence, spaces, standing)
    confined = os.fork()
    if confined:
        _keep(confined, tell, own_processes=bool(spaces & PROCESSES), own_root=own_root)
    _confine(fence, standing)
    return standing


def _keep(confined: int, tell: Tell, *, own_processes: bool, own_root: bool) -> None:
    """Reap processes until the confined one ends, then end all that it left. Does not return."""
    linux.prctl(linux.SET_DUMPABLE, 0)  # the confined process cannot trace this one
    if not own_processes:
        linux.prctl(linux.SET_CHILD_SUBREAPER, 1)
    _let_go_of_output()
    while True:
        ended, status = os.wait()
        if ended == confined:
            break
    # In a new process namespace with the old /proc, the process ids in /proc are not those of the keeper.
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


def _namespaces(fence: Fence, standing: Standing) -> Spaces:
    try:
        if "namespaces" in fence.without:
            raise OSError("left out")
        spaces = _enter_namespaces()
    except OSError as error:
        standing.missing.append(f"namespaces: the system does not grant them ({error.strerror or error})")
        return 0
    standing.own_users = True
    standing.protections.append("user namespace: no privileges")
    standing.protections.append("network namespace: no network, and no access to ports of this machine")
    if spaces & PROCESSES:
        standing.protections.append("process namespace: sees only its own processes, which end with it")
    else:
        standing.missing.append("process namespace: the system does not grant it")
    return spaces


def _root(fence: Fence, spaces: Spaces, standing: Standing) -> bool:
    try:
        if not spaces & MOUNTS or not spaces & PROCESSES or "root" in fence.without:
            raise OSError("no mount namespace")
        build_root(fence.root, fence.readable, fence.writable, DEVICES)
    except OSError as error:
        standing.missing.append(
            f"root folder of its own: {error.strerror or error}; rights and dates of files can be changed"
        )
        return False
    standing.essential = True
    standing.protections.append(
        "root folder of its own: only Python, the file's folder and a temporary folder are visible"
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
        number = linux.restrict([*fence.readable, "/proc"], fence.listable, fence.writable, DEVICES)
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
            "network namespace: Landlock blocks TCP only" if number >= 4 else "network namespace: no block"
        )
    _limits(standing)


def _limits(standing: Standing) -> None:
    try:
        limits.limit_the_rest(own_users=standing.own_users)
    except ImportError:
        standing.missing.append("limits on memory, files and processes: not available on this system")
        return
    standing.protections.append(
        f"limits: time, memory, {limits.FILE_BYTES >> 20} MiB a file, {limits.OPEN_FILES} open files, "
        f"{limits.PROCESSES} processes"
    )
