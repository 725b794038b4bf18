"""Writing pictures: the whole file or none of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..whole_files import place_for, whole_file

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
    with whole_file(place) as half, half.open("wb") as file:
        figure.savefig(file, format=place.suffix[1:].lower())
    return place


def check_path(out: str | os.PathLike[str]) -> Path:
    """Where a picture may be written, links followed; raises `ArgumentError` as `save` does."""
    return place_for(out, FORMATS, ", ".join(FORMATS), "heads.png")
