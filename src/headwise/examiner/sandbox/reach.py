"""What a checked file may read: Python and its packages, a few facts of the system, the file's own folder."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from ..desk.template import PACKAGE, import_roots
from .learner import package_root

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32",
    *(f"/etc/{name}" for name in ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "alternatives")),
    "/sys/devices/system/cpu", "/sys/devices/system/node",
)  # fmt: skip


def readable(file: Path | None, source: str) -> list[str]:
    """Paths, none of them below another."""
    found = [*SYSTEM, sys.prefix, sys.base_prefix, sys.exec_prefix, *sysconfig.get_paths().values()]
    # Not the folder headwise is imported from: that may be a checkout with much else in it.
    found += [str(PACKAGE), *(each for each in import_roots() if each != str(PACKAGE.parent))]
    found += os.environ.get("LD_LIBRARY_PATH", "").split(":")
    if file is not None:
        found += _of_learner(file, source)
    there = [os.path.abspath(each) for each in found if each and os.path.lexists(each)]
    # A path given through a link needs both ends.
    there += [os.path.realpath(each) for each in there if each not in SYSTEM]
    there = sorted({each for each in there if each != "/"})
    kept: list[str] = []
    for each in there:
        if not any(each.startswith(f"{above}/") for above in kept):
            kept.append(each)
    return kept


def listable(file: Path | None, source: str) -> list[str]:
    """The folder imports are looked for in first, where not all of it is readable."""
    return [] if file is None else [str(package_root(file, source) or file.parent)]


def _of_learner(file: Path, source: str) -> list[str]:
    """The folder; of a home or what lies above one, only the Python in it."""
    folder = package_root(file, source) or file.parent
    home = Path.home().resolve()
    if folder != home and folder not in home.parents and len(folder.parts) > 2:
        return [str(folder)]
    found = [file, *folder.glob("*.py")]
    found += [init.parent for init in folder.glob("*/__init__.py")]
    return [str(each) for each in found]
