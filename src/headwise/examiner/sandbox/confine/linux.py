"""System calls of Linux that Python 3.11 does not offer.

With Landlock, a process and its children can access only the files that were named.
"""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

# These numbers are equal on all architectures that torch supports.
MOUNT_SETATTR = 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

SET_DEATH_SIGNAL = 1
SET_DUMPABLE = 4
DROP_FROM_BOUNDING_SET = 24
SET_CHILD_SUBREAPER = 36
SET_NO_NEW_PRIVILEGES = 38

BIND = 0x1000
RECURSIVE = 0x4000
PRIVATE = 1 << 18
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC = 1, 2, 4, 8

_AT_FDCWD = -100  # paths are relative to the current directory
_AT_RECURSIVE = 0x8000
_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, operation: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")
    return result


def syscall(operation: str, number: int, *arguments: object) -> int:
    """Make a system call by number; integers are passed as 64 bits."""
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *wide), operation)


def unshare(flags: int) -> None:
    """Create new namespaces for this process."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def prctl(option: int, *values: int) -> int:
    """Change a setting of this process."""
    padded = [ctypes.c_ulong(each) for each in (*values, 0, 0, 0, 0)[:4]]
    return _checked(_libc.prctl(ctypes.c_int(option), *padded), "prctl")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2)."""
    kind_bytes = None if kind is None else kind.encode()
    options_bytes = None if options is None else options.encode()
    done = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), options_bytes
    )
    _checked(done, f"mount {target}")


def unmount(target: str) -> None:
    """Detach a mount now; it ends when no process uses it."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(_DETACH)), f"unmount {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace"))


def mount_read_only(target: str) -> None:
    """Make a mount and all mounts below it read-only (Linux 5.12)."""
    attributes = _MountAttributes(set=READ_ONLY | NO_SUID)
    syscall(
        "mount_setattr", MOUNT_SETATTR, _AT_FDCWD, ctypes.c_char_p(os.fsencode(target)), _AT_RECURSIVE,
        ctypes.byref(attributes), ctypes.sizeof(attributes),
    )  # fmt: skip


def pivot_root(new: str) -> None:
    """Make the mount `new` the root folder, and detach the old one."""
    number = PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: number unknown on {os.uname().machine}")
    os.chdir(new)
    current_folder = ctypes.c_char_p(b".")
    syscall("pivot_root", number, current_folder, current_folder)
    unmount(".")  # the old root, which now lies over the new one
    os.chdir("/")


def drop_capabilities(numbers: Iterable[int] = range(64)) -> None:
    """Drop all capabilities of root for good; the user id, and access to own files, stay."""
    for number in numbers:
        try:
            prctl(DROP_FROM_BOUNDING_SET, number)
        except OSError:  # unknown to this kernel, or no right to drop it, and then it is not held
            continue
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")


CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
BENEATH_PATH = 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = (1 << bit for bit in range(4))
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
FIRST_VERSION = (1 << 13) - 1
REFER, TRUNCATE, IOCTL = (1 << bit for bit in (13, 14, 15))  # versions 2, 3, 5
BIND_TCP_AND_CONNECT_TCP = 0b11  # version 4
ABSTRACT_SOCKETS_AND_SIGNALS = 0b11  # version 6

READING = EXECUTE | READ_FILE | READ_DIR
OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL


class _Ruleset(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("files", "network", "scoped"))


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def landlock_version() -> int:
    """Return the version of Landlock in the kernel.

    Raises:
        OSError: the kernel has no Landlock, or it is switched off.
    """
    return syscall("Landlock", CREATE_RULESET, None, 0, 1)


def restrict(
    readable: Iterable[str], listable: Iterable[str], writable: Iterable[str], devices: Iterable[str]
) -> int:
    """Restrict the calling thread with Landlock; call it before other threads start.

    Args:
        readable: files and folders, with all below them, that may be read and executed.
        listable: folders in which, and below which, names may be seen.
        writable: folders below which everything is allowed except device files.
        devices: files that may be read and written.

    Returns:
        The version of Landlock: from 4 on TCP is blocked too, from 6 on signals to other processes.

    Raises:
        OSError: a call failed; nothing is restricted.
    """
    number = landlock_version()
    handled = FIRST_VERSION
    for since, right in ((2, REFER), (3, TRUNCATE), (5, IOCTL)):
        handled |= right if number >= since else 0
    rules = _Ruleset(
        files=handled,
        network=BIND_TCP_AND_CONNECT_TCP if number >= 4 else 0,
        scoped=ABSTRACT_SOCKETS_AND_SIGNALS if number >= 6 else 0,
    )
    size = 24 if number >= 6 else 16 if number >= 4 else 8
    ruleset = syscall("Landlock", CREATE_RULESET, ctypes.byref(rules), size, 0)
    try:
        for path in readable:
            _allow(ruleset, path, READING & handled)
        for path in listable:
            _allow(ruleset, path, READ_DIR)
        for path in writable:
            _allow(ruleset, path, handled & ~(MAKE_CHAR | MAKE_BLOCK))
        for path in devices:
            _allow(ruleset, path, (READ_FILE | WRITE_FILE) & handled)
        syscall("Landlock", RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return number


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not there: nothing to allow
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= OF_A_FILE
        rule = _Beneath(allowed=rights, folder=opened)
        syscall(f"Landlock, {path}", ADD_RULE, ruleset, BENEATH_PATH, ctypes.byref(rule), 0)
    finally:
        os.close(opened)
