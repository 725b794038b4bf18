"""Names of layers: module paths, and numbers if a model has one stack of layers.

The path of a layer is that of its module ("encoder.layer.3.attention.self"). Paths that differ only in
numbers form a stack; in a model with one stack, layers are named by number. A layer that runs several times
in one forward is "path", "path#1", "path#2"; if it is the only layer, these are the layers of its stack.

`ByLayer` is the type of all results by layer, which either name of a layer can index. `HeadChoice` parses
command lines: layers as "2", "0,2", "0-2", "-1" or a module path; heads as "3", in every chosen layer, or
"2.3", layer and head as tables print them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, overload

import torch

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .collection import Heads

Layer = int | str  # how users name a layer
Value = TypeVar("Value")
Default = TypeVar("Default")

# What callers may pass: keys of Mapping are invariant, so a dict by numbers is not a Mapping by Layer.
GivenByLayer = Mapping[int, Value] | Mapping[str, Value] | Mapping[Layer, Value]

NUMBER = re.compile(r"(?:(?<![^.])|(?<=_))\d+(?![^.#])")  # in "layers.3.attn" and in "layers.layer_3.attn"


def stack_of(path: str) -> str:
    """Return the stack that a place belongs to.

    Example:
        >>> stack_of("encoder.layer.3.attention.self")
        'encoder.layer.*.attention.self'
    """
    return NUMBER.sub("*", path)


def stacks(paths: Iterable[str]) -> dict[str, dict[int, str]]:
    """Return the places by stack and number: the number in the path, else the rank in the stack.

    Example:
        >>> stacks(["layers.4.attn", "layers.12.attn", "head"])
        {'layers.*.attn': {4: 'layers.4.attn', 12: 'layers.12.attn'}, 'head': {0: 'head'}}
        >>> stacks(["shared.attn", "shared.attn#1", "shared.attn#2"])
        {'shared.attn': {0: 'shared.attn', 1: 'shared.attn#1', 2: 'shared.attn#2'}}
    """
    paths = list(paths)
    layers = {path.partition("#")[0] for path in paths}
    if len(layers) == 1 and len(paths) > 1:  # one layer, visited again and again
        return {layers.pop(): {int(path.partition("#")[2] or 0): path for path in paths}}
    grouped: dict[str, list[str]] = {}
    for path in paths:
        grouped.setdefault(stack_of(path), []).append(path)
    return {stack: dict(zip(_numbers(members), members, strict=True)) for stack, members in grouped.items()}


def _numbers(members: Sequence[str]) -> list[int]:
    """Return the numbers of the members of one stack."""
    columns = list(zip(*([int(n) for n in NUMBER.findall(path)] for path in members), strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    if len(varying) == 1 and len(set(varying[0])) == len(members):
        return list(varying[0])
    if len(members) == 1 and len(columns) == 1:
        return [columns[0][0]]
    return list(range(len(members)))


def resolve(layer: Layer, paths: Sequence[str]) -> str:
    """Return the path a user means by a number or a path.

    Raises:
        ArgumentError: no such layer; a number where there are several stacks.
    """
    if isinstance(layer, str):
        if layer in paths:
            return layer
        if layer.endswith("#0") and layer[:-2] in paths:  # the first visit of a layer that runs again
            return layer[:-2]
        ending = [path for path in paths if path.endswith(f".{layer}")]
        if len(ending) == 1:
            return ending[0]
        raise ArgumentError(f"layer must be an attention layer: got {layer!r}; {_some(paths)}")
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise ArgumentError(f"layer must be a number or a module path: got {layer!r}; {_some(paths)}")
    by_stack = stacks(paths)
    if len(by_stack) > 1:
        example = next(iter(next(iter(by_stack.values())).values()))
        raise ArgumentError(
            f"layer must be a module path if a model has several stacks: got {layer} for "
            f"{', '.join(by_stack)}; for example {example!r}"
        )
    numbered = next(iter(by_stack.values()), {})
    if layer < 0 and numbered:
        layer = {rank - len(numbered): number for rank, number in enumerate(numbered)}.get(layer, layer)
    if layer not in numbered:
        raise ArgumentError(f"layer must be {_span(numbered)}: got {layer}; {_some(paths)}")
    return numbered[layer]


def _span(numbers: Iterable[int]) -> str:
    """Return "one of" the numbers as text, as a range where possible, or the only number."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    if ordered and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"one of {ordered[0]} to {ordered[-1]}"
    return f"one of {', '.join(map(str, ordered))}" if ordered else "a layer that was measured"


def _some(paths: Sequence[str]) -> str:
    """Return some of the paths as text, for error messages."""
    if not paths:
        return "run the model inside the watch block first, and check that it has attention"
    shown = ", ".join(map(path_in_words, paths[:4]))
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return f"there {'is' if len(paths) == 1 else 'are'} {shown}{more}"


def path_in_words(path: str) -> str:
    """Return a module path for a sentence; that of the model itself is empty, and gets a name.

    Example:
        >>> path_in_words("layers.0.attn"), path_in_words(""), path_in_words("#1")
        ('layers.0.attn', 'the model itself', 'the model itself#1')
    """
    return path if path and path[0] != "#" else f"the model itself{path}"


def names_of(paths: Sequence[str]) -> dict[str, Layer]:
    """Return the name of each path: a number if the model has one stack, else the path itself.

    Example:
        >>> names_of(["h.0.attn", "h.1.attn"])
        {'h.0.attn': 0, 'h.1.attn': 1}
    """
    by_stack = stacks(paths)
    if len(by_stack) != 1:
        return {path: path for path in paths}
    return {path: number for number, path in next(iter(by_stack.values())).items()}


class ByLayer(Mapping[Layer, Value]):
    """Something of every layer. A layer goes by its number, where there is one stack, and by its path always.

    Iterating gives what layers go by; numbers are those of the model, whatever ran. `headwise.ablate` and
    `patch` take it, and a `dict(...)` of it, as well.

    Args:
        values: by path.
        names: what the places of the model go by, `names_of` them; None: these are all there are.

    Example:
        >>> found = ByLayer({"h.0.attn": "a", "h.1.attn": "b"})
        >>> list(found), found[1], found[-1], found["h.0.attn"]
        ([0, 1], 'b', 'b', 'a')
        >>> found.path_of(1), found.name_of("h.1.attn"), 2 in found
        ('h.1.attn', 1, False)
    """

    def __init__(self, values: Mapping[str, Value], names: Mapping[str, Layer] | None = None) -> None:
        self._values: dict[str, Value] = {}
        self._names: dict[str, Layer] = dict(names_of(list(values)) if names is None else names)
        for path, value in values.items():
            self._set(path, value)

    def _set(self, path: str, value: Value) -> None:
        """Set a value while the mapping is being filled. Visits of a layer change the names of all layers."""
        if path not in self._values and "#" in path:
            self._names = names_of(list(dict.fromkeys([*self._names, *self._values, path])))
        self._values[path] = value

    @property
    def paths(self) -> list[str]:
        """The layers' module paths, in the order in which they first ran."""
        return list(self._values)

    def name_of(self, path: str) -> Layer:
        """Return the name of the layer at a path: its number in a model of one stack, else the path."""
        return self._names.get(path, path)

    def path_of(self, layer: Layer) -> str:
        """Return the module path of a layer.

        Raises:
            ArgumentError: no such layer; one that did not run; a number where there are several stacks.
        """
        if isinstance(layer, str):
            return resolve(layer, self.paths)
        if not isinstance(layer, bool):
            for path in self._values:
                if self.name_of(path) == layer:
                    return path
        path = resolve(layer, list(self._names) or self.paths)
        if path not in self._values:
            raise ArgumentError(
                f"layer must be one that ran: got {layer} ({path}), which did not run; {_some(self.paths)}"
            )
        return path

    def __getitem__(self, layer: Layer) -> Value:
        """Return the value of a layer, by number or path; -1 is the model's last.

        Raises:
            ArgumentError: no such layer; one that did not run; a number where there are several stacks.
        """
        return self._values[self.path_of(layer)]

    @overload
    def get(self, layer: Layer) -> Value | None: ...

    @overload
    def get(self, layer: Layer, default: Value | Default) -> Value | Default: ...

    def get(self, layer: Layer, default: object = None) -> object:
        """Return the value of a layer, or the default where there is no such layer."""
        try:
            return self[layer]
        except (ArgumentError, IndexError):
            return default

    def __iter__(self) -> Iterator[Layer]:
        return map(self.name_of, self._values)

    def values(self) -> ValuesView[Value]:
        """Return the value of every layer, in the order in which they first ran."""
        return self._values.values()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, layer: object) -> bool:
        try:
            self[layer]  # type: ignore[index]  # raises for anything that is not a layer
        except (ArgumentError, IndexError):
            return False
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


torch.serialization.add_safe_globals([ByLayer])  # names and tensors: safe to load


# Heads as written on a command line


INTEGER = re.compile(r"-?[0-9]{1,9}")
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
        places = tuple(_layer_choice(part) for text in layers for part in _parts(text, "layer"))
        numbers = tuple(_head_choice(part) for text in heads for part in _parts(text, "head"))
        for layer, first, _ in numbers:
            if places and layer is not None:
                raise ArgumentError(
                    f"head must be a number without a layer if layers are chosen: got '{layer}.{first}'; "
                    "leave out the layers, or write only the head"
                )
        return cls(places, numbers)

    def __bool__(self) -> bool:
        return bool(self.layers or self.heads)

    def among(self, heads: Heads) -> list[tuple[Layer, int]]:
        """Return the chosen (layer, head) pairs in the order of the model; all pairs if none is named.

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


def _parts(text: str, argument: str) -> list[str]:
    """Split a list with commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ArgumentError(f"{argument} must not be empty between commas: got {text!r}; try 0,2")
    return parts


def _layer_choice(part: str) -> Layer | Span:
    """Parse a layer or a range of layers."""
    if INTEGER.fullmatch(part):
        return int(part)
    if RANGE.fullmatch(part):
        return _range(part, "layer")
    if part.startswith("-"):
        raise ArgumentError(
            f"layer must be a number, a range or a module path: got {part!r}; 0 is the first, -1 the last"
        )
    return part


def _head_choice(part: str) -> tuple[Layer | None, int, int]:
    """Parse a head or a range of heads, perhaps with its layer."""
    place, _, number = part.rpartition(".")
    layer = _layer_choice(place) if place else None
    if RANGE.fullmatch(number):
        first, last = _range(number, "head")
    elif re.fullmatch("[0-9]{1,9}", number):
        first = last = int(number)
    else:
        raise ArgumentError(f"head must be a number, or layer.head: got {part!r}; try 3, 0-3 or 2.3")
    if isinstance(layer, tuple):
        raise ArgumentError(
            f"head must be of one layer: got {part!r}; choose the layers {place} and the head {number}"
        )
    return layer, first, last


def _range(part: str, argument: str) -> Span:
    """Parse a range of numbers."""
    first, last = map(int, part.split("-"))
    if last < first:
        raise ArgumentError(f"{argument} must be an ascending range: got {part!r}; try {last}-{first}")
    return first, last


def _paths(layer: Layer | Span, heads: Heads) -> list[str]:
    """Return the paths of a layer, or of the layers within a range, whose ends must be layers."""
    if not isinstance(layer, tuple):
        return [heads.path_of(layer)]
    numbered = {heads.name_of(path): path for path in heads.paths}
    sorted_numbers = sorted(number for number in numbered if isinstance(number, int))
    for end in layer:
        if not sorted_numbers or not sorted_numbers[0] <= end <= sorted_numbers[-1]:
            heads.path_of(end)  # raises, with the layers there are
    return [numbered[number] for number in sorted_numbers if layer[0] <= number <= layer[1]]
