"""Files that are written in full or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident

from .errors import ArgumentError

half_written: set[Path] = set()  # files being written now: code that ends the process must delete them first


def place_for(
    out: str | os.PathLike[str],
    endings: tuple[str, ...],
    wording: str,
    example: str,
    argument: str = "out",
) -> Path:
    """Return the resolved path of a file to write.

    Args:
        endings: allowed for its name, in lower case; wording: the same in words.
        example: a name to try.
        argument: its name in messages.

    Raises:
        ArgumentError: another ending; a folder that does not exist or cannot be written to; a folder of that
            name.
    """
    place = Path(out).resolve()
    if place.suffix.lower() not in endings:
        raise ArgumentError(f"{argument} must end in {wording}: got {str(out)!r}; try {example}")
    if not place.parent.is_dir():
        raise ArgumentError(
            f"{argument} must be in an existing folder: {str(place.parent)!r} does not exist; create it first"
        )
    if place.is_dir():
        raise ArgumentError(f"{argument} must be a file: {str(out)!r} is a folder; choose another name")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise ArgumentError(
            f"{argument} must be writable: no permission to write to {str(place.parent)!r}; choose another "
            "folder"
        )
    return place


def name_once(half: Path, place: Path) -> bool:
    """Give a finished file its name, and return True; return False if a file has that name already."""
    try:
        os.link(half, place)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if place.exists():
            return False
        half.replace(place)
    return True


@contextmanager
def whole_file(place: Path, argument: str = "out") -> Iterator[Path]:
    """Yield a file beside `place` to write to; it is renamed at the end, and deleted after an error.

    Raises:
        ArgumentError: it cannot be written, naming the argument.
    """
    half = place.with_name(f".{place.name}.{os.getpid()}-{get_ident()}.part")  # threads write the same, too
    half_written.add(half)
    try:
        yield half
        half.replace(place)
    except OSError as error:
        raise ArgumentError(
            f"{argument} must be writable: {place}: {error.strerror}; choose another folder"
        ) from error
    finally:
        half.unlink(missing_ok=True)
        half_written.discard(half)
