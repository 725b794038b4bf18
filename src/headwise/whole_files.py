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
        argument: what it is called, for messages.

    Raises:
        ArgumentError: another ending; no such folder, or one that nothing can be put into; a folder of that
            name.
    """
    place = Path(out).resolve()
    if place.suffix.lower() not in endings:
        raise ArgumentError(f"{argument} must end in {wording}: got {str(out)!r}; try {example}")
    if not place.parent.is_dir():
        raise ArgumentError(
            f"{argument} must go into an existing folder: there is no {str(place.parent)!r}; make it first"
        )
    if place.is_dir():
        raise ArgumentError(f"{argument} must be a file: {str(out)!r} is a folder; choose another name")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise ArgumentError(
            f"{argument} must be writable: nothing can be put into {str(place.parent)!r}; choose another "
            "place"
        )
    return place


def name_once(half: Path, place: Path) -> bool:
    """Give a finished file its name, unless there is one of that name: then return False."""
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
            f"{argument} must be writable: {place}: {error.strerror}; choose another place"
        ) from error
    finally:
        half.unlink(missing_ok=True)
        half_written.discard(half)
