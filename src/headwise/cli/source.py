"""The argument FILE[:NAME]: Python source, and which class or function in it."""

from __future__ import annotations

import difflib
import os
from contextlib import suppress
from pathlib import Path

from ..errors import ArgumentError

__all__ = ["file_and_name"]


def file_and_name(argument: str) -> tuple[Path, str | None]:
    """The file, which exists, and the name behind the colon; None where there is no name.

    What exists as a whole is a file, whatever colons are in its name, such as that of a drive; else the last
    colon is the one before NAME.

    Raises:
        ArgumentError: standard input; no such file; a folder; a notebook; a name that Python does not allow.
    """
    if argument in ("-", ""):
        raise ArgumentError(
            f"FILE must be a file of Python source: got {argument!r}, and standard input is not read; "
            "save the code and name the file"
        )
    whole = _path(argument)
    if os.path.exists(whole):
        return _source(whole, argument), None
    front, _, name = argument.rpartition(":")
    file = _path(front)
    if not front or not os.path.exists(file):
        named = bool(front) and file.suffix == ".py"  # then only the part before the colon is the file's name
        raise _missing(file, front) if named else _missing(whole, argument)
    if not all(part.isidentifier() for part in name.split(".")):
        raise ArgumentError(
            f"NAME must be a class or function in {front!r}: got {name!r}; try {front}:MyAttention"
        )
    return _source(file, front), name


def _path(argument: str) -> Path:
    return Path(os.path.expanduser(argument))


def _source(file: Path, argument: str) -> Path:
    mistake = None
    if not file.is_file():
        mistake = "is a folder or a device; name a file of Python source"
    elif file.suffix == ".ipynb":
        mistake = "is a notebook; in it, call hw.check(YourClass)"
    if mistake is not None:
        raise ArgumentError(f"FILE must be a file of Python source: {argument!r} {mistake}")
    return file


def _missing(file: Path, argument: str) -> ArgumentError:
    there: list[str] = []
    with suppress(OSError, ValueError):
        there = [each.name for each in file.parent.glob("*.py")]
    close = difflib.get_close_matches(file.name, there, n=1)
    advice = f"did you mean {str(file.with_name(close[0]))!r}?" if close else "check the name"
    return ArgumentError(f"FILE must exist: there is no {argument!r}; {advice}")
