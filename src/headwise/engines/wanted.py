"""Row statistics that will be asked for, said before a call: a first pass that can collects them on the way.

Whoever will ask says so for a while (`wanted`), or in the call itself (`attention(..., statistics=...)`).
What was collected travels with the map, a value per query; what was not is measured when it is asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor

__all__ = ["ON_THE_WAY", "Collected", "wanted", "wanted_now"]

ON_THE_WAY = ("entropy", "effective_keys", "confidence", "distance", "max_logit")  # what a row's sums tell


class _Here(threading.local):
    names: tuple[str, ...] = ()  # in every thread from the start: torch.compile guards whether it is there


_here = _Here()


class Collected(NamedTuple):
    """Row statistics of a call, by name: rows of one tensor [n, B, H, T]."""

    names: tuple[str, ...]
    rows: Tensor

    def row(self, name: str) -> Tensor:
        """One of them, [B, H, T]."""
        return self.rows[self.names.index(name)]

    def map(self, change: Callable[[Tensor], Tensor]) -> Collected:
        """The same statistics of other rows: moved, cut, chosen."""
        return Collected(self.names, change(self.rows))


class wanted(AbstractContextManager[None]):  # noqa: N801, reads as a verb
    """While it lasts, calls in this thread collect these row statistics where they can."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __enter__(self) -> None:
        self.before = wanted_now()
        _here.names = tuple(dict.fromkeys((*self.before, *self.names)))

    def __exit__(self, *_: object) -> None:
        _here.names = self.before


def wanted_now() -> tuple[str, ...]:
    """The names that someone has said will be asked for."""
    return _here.names
