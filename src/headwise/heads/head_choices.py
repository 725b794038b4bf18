"""Heads as people write them on a command line: layers as "2", "0,2", "0-2", "-1" or a module's path; heads
as "3", in every layer that is chosen, or "2.3", layer and head as tables print them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ArgumentError
from .collection import Heads
from .layer_names import Layer

__all__ = ["HeadChoice"]

NUMBER = re.compile(r"-?[0-9]{1,9}")
RANGE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
Span = tuple[int, int]  # the first and the last


@dataclass(frozen=True)
class HeadChoice:
    """Which layers and heads are meant, read before there is a model that has them.

    Attributes:
        layers: numbers, paths and spans of numbers; none: every layer.
        heads: (layer or None for the chosen ones, the first, the last); none: every head.

    Example:
        >>> HeadChoice.of(["0-2"], ["3"])
        HeadChoice(layers=((0, 2),), heads=((None, 3, 3),))
        >>> HeadChoice.of(heads=["2.3,0.0-1"]).heads
        ((2, 3, 3), (0, 0, 1))
    """

    layers: tuple[Layer | Span, ...] = ()
    heads: tuple[tuple[Layer | None, int, int], ...] = ()

    @classmethod
    def of(cls, layers: Iterable[str] = (), heads: Iterable[str] = ()) -> HeadChoice:
        """Read what was written; each may be a list with commas.

        Raises:
            ArgumentError: neither a number nor a path; a range that goes down; heads of layers of their own
                beside layers.
        """
        places = tuple(_layer(part) for given in layers for part in _parts(given, "layer"))
        numbers = tuple(_head(part) for given in heads for part in _parts(given, "head"))
        for layer, first, _ in numbers:
            if places and layer is not None:
                raise ArgumentError(
                    f"head must be a number alone where layers are chosen: got '{layer}.{first}'; leave out "
                    "the layers, or write the head alone"
                )
        return cls(places, numbers)

    def __bool__(self) -> bool:
        return bool(self.layers or self.heads)

    def among(self, heads: Heads) -> list[tuple[Layer, int]]:
        """The (layer, head) pairs that are meant, in the order of the model; all of them where none is named.

        Raises:
            ArgumentError: nothing was watched; no such layer or head, with those there are.
        """
        heads.all()
        wanted: set[tuple[str, int]] = set()
        paths = heads.paths if not self.layers else [p for at in self.layers for p in _paths(at, heads)]
        for layer, first, last in self.heads or ((None, 0, None),):
            for path in paths if layer is None else [heads.path_of(layer)]:
                count = len(heads[path])
                if last is not None and last >= count:
                    raise ArgumentError(
                        f"head must be one of 0 to {count - 1}: got {last} in layer {heads.name_of(path)}, "
                        f"which has {count} heads; choose one of those"
                    )
                wanted.update((path, head) for head in range(first, count if last is None else last + 1))
        return [
            (heads.name_of(path), head)
            for path in heads.paths
            for head in range(len(heads[path]))
            if (path, head) in wanted
        ]


def _parts(given: str, argument: str) -> list[str]:
    parts = [part.strip() for part in given.split(",")]
    if not all(parts):
        raise ArgumentError(f"{argument} must be named between commas: got {given!r}; try 0,2")
    return parts


def _layer(part: str) -> Layer | Span:
    if NUMBER.fullmatch(part):
        return int(part)
    if RANGE.fullmatch(part):
        return _span(part, "layer")
    if part.startswith("-"):
        raise ArgumentError(
            f"layer must be a number, a range or a module path: got {part!r}; 0 is the first, -1 the last"
        )
    return part


def _head(part: str) -> tuple[Layer | None, int, int]:
    place, _, number = part.rpartition(".")
    layer = _layer(place) if place else None
    if RANGE.fullmatch(number):
        first, last = _span(number, "head")
    elif re.fullmatch("[0-9]{1,9}", number):
        first = last = int(number)
    else:
        raise ArgumentError(f"head must be a number, or layer.head: got {part!r}; try 3, 0-3 or 2.3")
    if isinstance(layer, tuple):
        raise ArgumentError(
            f"head must be of one layer: got {part!r}; choose the layers {place} and the head {number}"
        )
    return layer, first, last


def _span(part: str, argument: str) -> Span:
    first, last = map(int, part.split("-"))
    if last < first:
        raise ArgumentError(f"{argument} must be a range that goes up: got {part!r}; try {last}-{first}")
    return first, last


def _paths(layer: Layer | Span, heads: Heads) -> list[str]:
    """The layers that are meant; of a range those that there are, if its ends lie among them."""
    if not isinstance(layer, tuple):
        return [heads.path_of(layer)]
    numbered = {heads.name_of(path): path for path in heads.paths}
    known = sorted(number for number in numbered if isinstance(number, int))
    for end in layer:
        if not known or not known[0] <= end <= known[-1]:
            heads.path_of(end)  # says which there are
    return [numbered[number] for number in known if layer[0] <= number <= layer[1]]
