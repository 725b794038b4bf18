"""The argument TEXT|FILE: a sentence, or a file that holds one."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import ArgumentError

__all__ = ["text_or_file"]

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
