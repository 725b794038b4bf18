"""The few calls of Linux that Python 3.11 has no name for."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

# Numbers that are the same on every architecture Python's torch runs on.
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

_HERE = -100  # AT_FDCWD
_AT_RECURSIVE = 0x8000
_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """One system call by number; integers are passed as 64 bits."""
    wide = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *wide), what)


def unshare(flags: int) -> None:
    """New namespaces for this process."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def prctl(option: int, *values: int) -> int:
    """A setting of this process."""
    padded = [ctypes.c_ulong(each) for each in (*values, 0, 0, 0, 0)[:4]]
    return _checked(_libc.prctl(ctypes.c_int(option), *padded), "prctl")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    kind_bytes = None if kind is None else kind.encode()
    options_bytes = None if options is None else options.encode()
    done = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind_bytes, ctypes.c_ulong(flags), options_bytes
    )
    _checked(done, f"mount {target}")


def unmount(target: str) -> None:
    """Out of sight now, gone when nobody uses it."""
    _checked(_libc.umount2(os.fsencode(target), ctypes.c_int(_DETACH)), f"unmount {target}")


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace"))


def mount_read_only(target: str) -> None:
    """A mount and all mounts below it can be read only from now on (Linux 5.12)."""
    attributes = _MountAttributes(set=READ_ONLY | NO_SUID)
    syscall(
        "mount_setattr", MOUNT_SETATTR, _HERE, ctypes.c_char_p(os.fsencode(target)), _AT_RECURSIVE,
        ctypes.byref(attributes), ctypes.sizeof(attributes),
    )  # fmt: skip


def pivot_root(new: str) -> None:
    """`new`, a mount, becomes /; the old root is let go of."""
    number = PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: unknown on {os.uname().machine}")
    os.chdir(new)
    here = ctypes.c_char_p(b".")
    syscall("pivot_root", number, here, here)
    unmount(".")  # the old root, which now lies over the new one
    os.chdir("/")


def drop_capabilities(numbers: Iterable[int] = range(64)) -> None:
    """None of root's powers, now or after running a program; files are still opened as their owner."""
    for number in numbers:
        try:
            prctl(DROP_FROM_BOUNDING_SET, number)
        except OSError:  # no such capability in this kernel, or no right to drop: then none is held either
            continue
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")
