"""Landlock: from now on this process and its children may touch only the files named here."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

from .linux import syscall

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


def version() -> int:
    """Of the kernel's Landlock.

    Raises:
        OSError: there is none, or it is switched off.
    """
    return syscall("Landlock", CREATE_RULESET, None, 0, 1)


def restrict(
    readable: Iterable[str], listable: Iterable[str], writable: Iterable[str], devices: Iterable[str]
) -> int:
    """Fence in the calling thread: call it while there is only one.

    Args:
        readable: files and folders, with all below them, that may be read and executed.
        listable: folders in which, and below which, names may be seen.
        writable: folders below which anything may be done but making device files.
        devices: files that may be read and written.

    Returns:
        The version of Landlock: from 4 on TCP is shut as well, from 6 on signals to others are.

    Raises:
        OSError: it did not work; nothing is fenced in.
    """
    number = version()
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
