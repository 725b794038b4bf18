"""What verbs share: the arguments FILE[:NAME] and TEXT|FILE, and a sign of life while one waits."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

from ..errors import ArgumentError

__all__ = ["file_and_name", "sign_of_life", "text_or_file"]


# FILE[:NAME]


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
        there = [file_there.name for file_there in file.parent.glob("*.py")]
    close = difflib.get_close_matches(file.name, there, n=1)
    advice = f"did you mean {str(file.with_name(close[0]))!r}?" if close else "check the name"
    return ArgumentError(f"FILE must exist: there is no {argument!r}; {advice}")


# TEXT|FILE


MOST_BYTES = 1 << 20
LIKE_A_PATH = re.compile(r"[./~]\S*/\S*|\S*\w\.[A-Za-z]\w{0,4}")  # ./notes, story.txt; not 3.5


def text_or_file(argument: str) -> str:
    """The text itself, or what the file of that name holds.

    Raises:
        ArgumentError: a folder; a name without its file; a file that is unreadable, too large or not UTF-8.
    """
    if not os.path.exists(argument):
        if LIKE_A_PATH.fullmatch(argument):
            raise ArgumentError(
                f"TEXT|FILE must be a sentence or a file that exists: there is no {argument!r}; "
                "check the name, or write a whole sentence"
            )
        return argument
    file = Path(argument)
    if not file.is_file():
        raise ArgumentError(
            f"TEXT|FILE must be a sentence or a file: {argument!r} is a folder or a device; name a file in it"
        )
    try:
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise ArgumentError(f"FILE must be at most {MOST_BYTES} bytes: {argument!r} has {size}; cut it")
        text = file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ArgumentError(
            f"FILE must be readable: {argument!r}: {error.strerror}; check its permissions"
        ) from error
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"FILE must be text in UTF-8: {argument!r} is not, at byte {error.start}; convert it first"
        ) from error
    if "\0" in text:
        raise ArgumentError(
            f"FILE must be text in UTF-8: {argument!r} has a zero at character {text.index(chr(0))}; "
            "convert it first"
        )
    return text


# A sign of life


AFTER = 2.0  # seconds: what is quicker needs no sign


@contextmanager
def sign_of_life(words: str) -> Iterator[None]:
    """Words and the time so far on stderr, from the third second on; gone when it is over.

    Only where somebody watches: nothing is written to a file or a pipe, or without rich.
    """
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        yield
        return
    encoding = sys.stderr.encoding or "ascii"
    spinner = SpinnerColumn("line")  # in every encoding
    said = TextColumn("{task.description}", markup=False)
    progress = Progress(spinner, said, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
    progress.add_task(words.encode(encoding, "replace").decode(encoding), total=None)
    timer = Timer(AFTER, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be starting the display at this moment
        progress.stop()
