"""Writing pictures: the whole file or none of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check_path", "save"]

FORMATS = (".png", ".svg", ".pdf")


def save(figure: Figure, out: str | os.PathLike[str]) -> Path:
    """Write a figure: all of it or, where anything goes wrong, nothing. Returns where.

    Raises:
        ArgumentError: not a .png, .svg or .pdf; no such folder; a folder that cannot be written to.
    """
    place = check_path(out)
    half = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with half.open("wb") as file:
            figure.savefig(file, format=place.suffix[1:].lower())
        half.replace(place)
    except OSError as error:
        raise ArgumentError(
            f"out must be writable: {place}: {error.strerror}; choose another place"
        ) from error
    finally:
        half.unlink(missing_ok=True)
    return place


def check_path(out: str | os.PathLike[str]) -> Path:
    """Where a picture may be written, links followed; raises `ArgumentError` as `save` does."""
    place = Path(out).resolve()
    if place.suffix.lower() not in FORMATS:
        raise ArgumentError(f"out must end in {', '.join(FORMATS)}: got {str(out)!r}; try heads.png")
    if not place.parent.is_dir():
        raise ArgumentError(
            f"out must go into an existing folder: there is no {str(place.parent)!r}; make it first"
        )
    if place.is_dir():
        raise ArgumentError(f"out must be a file: {str(out)!r} is a folder; choose another name")
    return place
