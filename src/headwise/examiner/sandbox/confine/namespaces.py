"""Namespaces: a network without a wire, processes that see only each other, a root folder almost empty."""

from __future__ import annotations

import os
from collections.abc import Iterable

from . import linux

MOUNTS, CGROUPS, HOSTNAME, IPC, USERS, PROCESSES, NETWORK = (
    1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)
)  # fmt: skip
Spaces = int  # those entered, together

# Tried in turn: some systems allow a few only.
ATTEMPTS: tuple[Spaces, ...] = (
    USERS | NETWORK | PROCESSES | MOUNTS | IPC | HOSTNAME | CGROUPS,
    USERS | NETWORK | PROCESSES | MOUNTS | IPC,
    USERS | NETWORK | IPC,
    USERS | NETWORK,
)


def enter() -> Spaces:
    """Into new namespaces, as many as the system grants.

    The process itself stays where it was among processes: its next child is the first of the new ones.

    Raises:
        OSError: it grants none.
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
    """A new / at the folder `root` with only these paths in it, under their own names, and /proc.

    Sockets of other programs (containers, desktops, databases) are files too, and Landlock lets anyone
    connect to them: here they do not exist.

    Raises:
        OSError: it did not work; the old / stays.
    """
    linux.mount("none", "/", None, linux.RECURSIVE | linux.PRIVATE)
    linux.mount("none", root, "tmpfs", linux.NO_SUID | linux.NO_DEVICES, "mode=755,size=1m")
    for path in readable:
        _place(root, path)
    # All is read-only from here on but what is mounted later: places for that must exist before.
    later = [(path, _make_room(root, path)) for path in (*devices, *writable) if os.path.exists(path)]
    process_files = _make_folder(root + "/proc")
    try:
        linux.mount(
            "proc", process_files, "proc", linux.READ_ONLY | linux.NO_SUID | linux.NO_DEVICES | linux.NO_EXEC
        )
    except OSError:  # containers hide parts of theirs, and then a new one is refused
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
    """An empty file or folder to mount on."""
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
