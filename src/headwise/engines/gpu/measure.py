"""Statistics and a picture in as few walks as they need: over rows, over keys, a glance around each query."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from . import near as around
from . import picture as pictures
from . import rows as by_row
from .heads import of_heads
from .received import received
from .request import Prepared, Request
from .rows import Picture

__all__ = ["NAMES", "Measured", "measure", "pooled"]

NAMES = (
    *(name for name in by_row.NAMES if name != "mass"),
    *around.NAMES,
)  # row statistics that have a kernel


class Measured(NamedTuple):
    """What was asked for."""

    rows: dict[str, Tensor]  # [B, H], or [B, H, T] a query
    received: Tensor | None  # [B, H, S]
    picture: Tensor | None  # [B, H, rows, columns]


def measure(
    prepared: Prepared,
    kinds: Mapping[str, tuple[int | None, bool]],
    per_query: bool,
    reach: int,
    keys: bool,
    cells: tuple[int, int] | None,
) -> Measured:
    """Row statistics by name, each with (offset, whether a head's value is the largest).

    Args:
        kinds: the row statistics wanted.
        per_query: [B, H, T] instead of [B, H].
        reach: how near counts as local.
        keys: whether `received` is wanted.
        cells: rows and columns of the picture, if one is wanted.
    """
    walked = tuple(name for name in kinds if name in by_row.NAMES)
    glanced = tuple(name for name in kinds if name in around.NAMES)
    picture = None if cells is None else Picture(*cells)
    if glanced or keys or picture is not None:  # what is walked divides by a row's mass itself
        prepared = by_row.settled(prepared)
    request = Request(prepared, "rows")
    fits = picture is not None and by_row.wide(request, picture)
    out = prepared.empty(len(walked) + len(glanced), *prepared.shape[:3])
    found = None
    if walked or fits:
        _, found = by_row.rows(request, walked, picture if fits else None, not per_query, out)
    if glanced:
        around.near(prepared, glanced, reach, out[len(walked) :])
    if picture is not None and not fits:
        found = pictures.narrow(prepared, picture)
    names = walked + glanced
    if names and not per_query:
        out = of_heads(prepared, out, [kinds[name] for name in names])
    return Measured(dict(zip(names, out, strict=True)), received(prepared) if keys else None, found)


def pooled(prepared: Prepared, cells: tuple[int, int]) -> Tensor:
    """[B, H, rows, columns]: the true mass of each cell."""
    found = measure(prepared, {}, per_query=True, reach=0, keys=False, cells=cells).picture
    assert found is not None
    return found
