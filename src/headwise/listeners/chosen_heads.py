"""Which heads a user means: (layer, head) pairs, read once and asked at every call."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol, SupportsIndex, TypeVar

from torch import nn

from ..errors import ArgumentError
from ..heads.layer_names import ByLayer, GivenByLayer, Layer, resolve
from .model_structure import structure_of

__all__ = ["ChosenHeads", "Heads", "base_of", "by_path", "check_head", "of_visit"]

Value = TypeVar("Value")


class Named(Protocol):
    """A head that was found: by `Heads.find`, `Importance.ranking`, ... It may have a `path`, too."""

    @property
    def layer(self) -> Layer: ...

    @property
    def head(self) -> int: ...


# (layer, head) pairs, or layer -> heads; a head of None means all heads of that layer.
Heads = Iterable[tuple[Layer, int | None] | Named] | GivenByLayer[Iterable[int] | None]


def base_of(path: str) -> str:
    """A place without the number of its visit.

    Example:
        >>> base_of("encoder.layer.attention#2")
        'encoder.layer.attention'
    """
    return path.partition("#")[0]


class ChosenHeads:
    """Heads by place and visit.

    A layer that runs several times in one forward (shared weights) is meant every time; "path#1" means its
    second visit alone, "path#0" its first.

    Args:
        heads: (layer, head) pairs; a layer is a number, where the model has one stack of layers, or a module
            path; a head of None means all of the layer. Or a mapping from layers to heads; or whatever
            has a layer and a head.
        everything: all heads of all layers are meant, whichever they turn out to be.

    Raises:
        ArgumentError: not pairs; an unknown layer, with those there are; a head that is no whole number.

    Example:
        >>> from headwise.nn import MultiHeadAttention
        >>> model = nn.Sequential(MultiHeadAttention(8, 4), MultiHeadAttention(8, 4))
        >>> chosen = ChosenHeads(model, [(0, 3), (0, 1), (1, None)])
        >>> chosen.at("0", 4), chosen.at("1", 4)
        ([1, 3], [0, 1, 2, 3])
    """

    def __init__(self, model: nn.Module, heads: Heads, everything: bool = False) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"model must be a torch.nn.Module: got {type(model).__name__}; pass the model itself"
            )
        structure = structure_of(model)
        modules = set(structure.paths.values())
        self.everything = everything
        self._chosen: dict[tuple[str, int | None], set[int] | None] = {}  # (place, visit) -> heads, None: all
        for layer, head in _pairs(heads):
            place = _place_and_visit(layer, structure.places, modules)
            known = self._chosen.setdefault(place, set())
            if head is None:
                self._chosen[place] = None
            elif known is not None:
                known.add(head)

    @property
    def paths(self) -> list[str]:
        """The places, without visits."""
        return list(dict.fromkeys(path for path, _ in self._chosen))

    @property
    def visited(self) -> list[str]:
        """Those named by a single visit."""
        return [f"{path}#{visit}" for path, visit in self._chosen if visit is not None]

    def absent(self, heard: Collection[str]) -> list[str]:
        """Those of which no call was heard, given the paths, with visits, of the calls that were."""
        places = {base_of(path) for path in heard}
        visits = {_visit_of(path) for path in heard}
        return [
            path if visit is None else f"{path}#{visit}"
            for path, visit in self._chosen
            if (path not in places if visit is None else (path, visit) not in visits)
        ]

    def at(self, path: str, num_heads: int) -> list[int]:
        """The heads chosen in a layer, sorted, as `Call.path` names it.

        Raises:
            ArgumentError: a head that this layer does not have.
        """
        base, visit = _visit_of(path)
        numbers: set[int] = set(range(num_heads)) if self.everything else set()
        for key in ((base, None), (base, visit)):
            if key in self._chosen:
                heads = self._chosen[key]
                numbers |= set(range(num_heads)) if heads is None else heads
        for head in numbers:
            check_head(head, num_heads, path)
        return sorted(numbers)


def _visit_of(path: str) -> tuple[str, int]:
    """A call's place, and which visit of it this is."""
    base, _, visit = path.partition("#")
    return base, int(visit or 0)


def by_path(model: nn.Module, given: GivenByLayer[Value], argument: str) -> dict[str, Value]:
    """What was given for some layers, by path, with "#visit" where one visit is meant; see `of_visit`.

    Args:
        given: by numbers or paths.
        argument: what it is called, for messages.

    Raises:
        ArgumentError: not a mapping; an unknown layer, with those there are; one that is named twice.
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"{argument} must be a mapping from layers to tensors: got {type(given).__name__}; for example "
            "{5: ...}"
        )
    structure = structure_of(model)
    modules = set(structure.paths.values())
    values: dict[str, Value] = {}
    by_name: Mapping[Layer, Value] = given  # type: ignore[assignment]  # of whatever keys
    # several numbers where there is one layer are those of its visits
    in_visits = len(structure.places) == 1 and len(by_name) > 1
    for layer in given.paths if isinstance(given, ByLayer) else by_name:
        is_visit = in_visits and isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
        named = f"{structure.places[0]}#{layer}" if is_visit else layer
        try:
            place, visit = _place_and_visit(named, structure.places, modules)
        except ArgumentError as error:
            raise ArgumentError(f"in {argument}, {error}") from None
        path = place if visit is None else f"{place}#{visit}"
        if path in values:
            raise ArgumentError(
                f"{argument} must hold a layer once: got {layer!r}, {path}, again; leave one out"
            )
        values[path] = by_name[layer]
    return values


def of_visit(given: Mapping[str, Value], path: str) -> Value | None:
    """What was given for a call, as `Call.path` names it: for this visit, or else for the layer."""
    base, visit = _visit_of(path)
    return given.get(f"{base}#{visit}", given.get(base))


def check_head(head: int, num_heads: int, path: str) -> None:
    """Raise `ArgumentError` unless a layer has this head."""
    if not 0 <= head < num_heads:
        raise ArgumentError(
            f"head must be one of 0 to {num_heads - 1}: got {head} in {path}, which has {num_heads} heads; "
            "None means all of them"
        )


def _pairs(heads: object) -> Iterable[tuple[Layer, int | None]]:
    if isinstance(heads, Mapping):
        for layer, some in heads.items():
            yield from ((layer, _head(head)) for head in ([None] if some is None else some))
        return
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        raise ArgumentError(f"heads must be (layer, head) pairs: got {heads!r}; for example [(5, 3), (6, 9)]")
    for pair in heads:
        if hasattr(pair, "layer") and hasattr(pair, "head"):
            path = getattr(pair, "path", None)  # which cannot mean another layer
            pair = (pair.layer if path is None else path, pair.head)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError(
                f"heads must be (layer, head) pairs: got {pair!r} among them; for example [(5, 3), (6, 9)]"
            )
        yield pair[0], _head(pair[1])


def _head(head: SupportsIndex | None) -> int | None:
    if head is None:
        return None
    try:
        number = operator.index(head)
    except TypeError:
        number = -1
    if isinstance(head, bool) or number < 0:
        raise ArgumentError(f"head must be a whole number of at least 0: got {head!r}; None means all heads")
    return number


def _place_and_visit(layer: Layer, places: list[str], modules: Collection[str]) -> tuple[str, int | None]:
    if isinstance(layer, str) and "#" in layer:
        base, _, visit = layer.rpartition("#")
        if not visit.isdigit():
            raise ArgumentError(
                f"layer must end in #<visit>, counted from 0: got {layer!r}; for example '{base}#1'"
            )
        return _place(base, places, modules), int(visit)
    if not isinstance(layer, str) and hasattr(layer, "__index__") and not isinstance(layer, bool):
        layer = operator.index(layer)  # also numpy's and torch's whole numbers
    return _place(layer, places, modules), None


def _place(layer: Layer, places: list[str], modules: Collection[str]) -> str:
    """The path of a layer, as `resolve` tells it, or that of any module of the model, in full.

    A module that calls torch's function through a helper is no likely place of attention, yet it is heard.
    """
    return layer if isinstance(layer, str) and layer in modules else resolve(layer, places)
