"""The heads that a user chooses, (layer, head) pairs, and the block in which they are changed or read.

Letters: B batch, T query_len, H num_heads, Dv value_dim; n heads chosen.
"""

from __future__ import annotations

import operator
import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Protocol, SupportsIndex, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, AttentionBypassed
from ..heads.layer_names import ByLayer, GivenByLayer, Layer, names_of, path_in_words, resolve
from .active import LayerCall, Listener
from .adapters import attach
from .model_structure import Structure, structure_of

Value = TypeVar("Value")
Inside = TypeVar("Inside", covariant=True)  # what `with` binds to its target


class Named(Protocol):
    """A head as `Heads.find`, `Importance.ranking` and others return it. It may also have a `path`."""

    @property
    def layer(self) -> Layer: ...

    @property
    def head(self) -> int: ...


# (layer, head) pairs, or layer -> heads; a head of None means all heads of that layer.
Heads = Iterable[tuple[Layer, int | None] | Named] | GivenByLayer[Iterable[int] | None]

# Changes a call, from the heads chosen in it, int [n], and the output of all heads [B, H, T, Dv]
Change = Callable[[LayerCall, Tensor, Tensor], Tensor | None]


def layer_names(model: nn.Module) -> dict[str, Layer]:
    """Return the names of a model's layers by path: numbers if it has one stack of layers, else paths."""
    return names_of(structure_of(model).places)


def base_of(path: str) -> str:
    """Return a path without its visit number: "layer.attention" for "layer.attention#2"."""
    return path.partition("#")[0]


def _visit(path: str) -> str:
    """Return a path with its visit number, which `LayerCall.path` omits for the first visit."""
    return path if "#" in path else f"{path}#0"


class ChosenHeads:
    """The heads a user means, as `headwise.ablate` takes them; `everything`: all heads of all layers.

    A layer that runs several times in one forward (shared weights) is meant every time; "path#1" means its
    second visit alone, "path#0" its first.

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
        self.everything = everything
        self._chosen: dict[str, set[int] | None] = {}  # by path, perhaps with a visit; None: all heads
        for layer, head in _pairs(heads):
            path = _path_of(structure, layer)
            numbers = self._chosen.setdefault(path, set())
            if head is None:
                self._chosen[path] = None
            elif numbers is not None:
                numbers.add(head)

    @property
    def paths(self) -> list[str]:
        """The layers' paths without visit numbers."""
        return list(dict.fromkeys(map(base_of, self._chosen)))

    @property
    def visited(self) -> list[str]:
        """The paths that name a single visit."""
        return [path for path in self._chosen if "#" in path]

    def absent(self, called: Collection[str]) -> list[str]:
        """Return the chosen paths that are not among the paths, with visits, of the calls that were heard."""
        present = {*map(base_of, called), *map(_visit, called)}
        return [path for path in self._chosen if path not in present]

    def at(self, path: str, num_heads: int) -> list[int]:
        """Return the heads chosen in a layer, sorted; `path` is a `LayerCall.path`.

        Raises:
            ArgumentError: a head that this layer does not have.
        """
        numbers: set[int] = set(range(num_heads)) if self.everything else set()
        for name in (base_of(path), _visit(path)):
            heads = self._chosen.get(name, ())
            numbers |= set(range(num_heads) if heads is None else heads)
        for head in numbers:
            check_head(head, num_heads, path)
        return sorted(numbers)


def _path_of(structure: Structure, layer: Layer) -> str:
    """Return a layer's path, with "#visit" if a single visit is meant.

    Any module may be named by its full path: a module that calls torch's function through a helper is heard
    even though it does not look like attention.
    """
    visit = ""
    if isinstance(layer, str) and "#" in layer:
        layer, _, number = layer.rpartition("#")
        if not number.isdigit():
            raise ArgumentError(
                f"layer must end in #<run>, counted from 0: got {f'{layer}#{number}'!r}; for example "
                f"'{layer}#1'"
            )
        visit = f"#{int(number)}"
    elif hasattr(layer, "__index__") and not isinstance(layer, bool):
        layer = operator.index(layer)  # also integers of numpy and torch
    is_module = isinstance(layer, str) and layer in structure.paths.values()
    return f"{layer if is_module else resolve(layer, structure.places)}{visit}"


def by_path(
    model: nn.Module,
    mapping: GivenByLayer[Value],
    argument: str,
    chosen: ChosenHeads | None = None,
    maker: str = "",
) -> dict[str, Value]:
    """Return the values of a mapping by path, with "#visit" if a single visit is meant; see `of_visit`.

    Error messages name the `argument` and the function that makes it, `maker`. The mapping must contain every
    layer of the `chosen` heads.
    """
    if not isinstance(mapping, Mapping):
        raise ArgumentError(
            f"{argument} must be a mapping from layers to tensors: got {type(mapping).__name__}; for example "
            "{5: ...}"
        )
    structure = structure_of(model)
    values: dict[str, Value] = {}
    by_name: Mapping[Layer, Value] = mapping  # type: ignore[assignment]  # keys of any type
    # if there is one layer, several numbers are those of its visits
    in_visits = len(structure.places) == 1 and len(by_name) > 1
    for layer in mapping.paths if isinstance(mapping, ByLayer) else by_name:
        is_visit = in_visits and isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0
        try:
            path = _path_of(structure, f"{structure.places[0]}#{layer}" if is_visit else layer)
        except ArgumentError as error:
            raise ArgumentError(f"in {argument}, {error}") from None
        if path in values:
            raise ArgumentError(
                f"{argument} must name a layer only once: got {layer!r}, {path}, again; leave one out"
            )
        values[path] = by_name[layer]
    present = set(map(base_of, values))
    for path in () if chosen is None else chosen.paths:
        if path not in present:
            raise ArgumentError(
                f"{argument} must hold every layer: {path_in_words(path)} is missing; compute them with "
                f"{maker}"
            )
    return values


def of_visit(values: Mapping[str, Value], path: str, argument: str, maker: str) -> Value:
    """Return the value for a call, whose path is a `LayerCall.path`: that of its visit, or of its layer."""
    value = values.get(_visit(path), values.get(base_of(path)))
    if value is None:
        raise ArgumentError(
            f"{argument} must hold every run of a layer: {path_in_words(path)} is missing; compute them with "
            f"{maker}"
        )
    return value


def check_head(head: int, num_heads: int, path: str) -> None:
    """Raise `ArgumentError` unless a layer has this head."""
    if not 0 <= head < num_heads:
        raise ArgumentError(
            f"head must be one of 0 to {num_heads - 1}: got {head} in {path or 'the model itself'}, "
            f"which has {num_heads} heads; "
            "None means all of them"
        )


def _pairs(heads: object) -> Iterable[tuple[Layer, int | None]]:
    """Yield (layer, head) of every chosen head; a head of None means all heads of the layer."""
    if isinstance(heads, Mapping):
        for layer, chosen in heads.items():
            yield from ((layer, _head(head)) for head in ([None] if chosen is None else chosen))
        return
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        raise ArgumentError(f"heads must be (layer, head) pairs: got {heads!r}; for example [(5, 3), (6, 9)]")
    for pair in heads:
        if hasattr(pair, "layer") and hasattr(pair, "head"):
            path = getattr(pair, "path", None)  # unambiguous, unlike a layer number
            pair = (pair.layer if path is None else path, pair.head)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentError(
                f"heads must be (layer, head) pairs: got {pair!r} among them; for example [(5, 3), (6, 9)]"
            )
        yield pair[0], _head(pair[1])


def _head(head: SupportsIndex | None) -> int | None:
    """Return the number of a head as int; None stays None."""
    if head is None:
        return None
    try:
        number = operator.index(head)
    except TypeError:
        number = -1
    if isinstance(head, bool) or number < 0:
        raise ArgumentError(f"head must be a whole number of at least 0: got {head!r}; None means all heads")
    return number


def check_count(count: object, argument: str, advice: str, least: int = 1) -> None:
    """Raise `ArgumentError` unless a count is a whole number of at least `least`."""
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ArgumentError(f"{argument} must be a whole number of at least {least}: got {count!r}; {advice}")


# The block


def outputs_of(call: LayerCall) -> Tensor:
    """Return the heads' output of a call, [B, H, T, Dv].

    Raises:
        AttentionBypassed: only the weights of this layer can be read.
    """
    if call.output is None:
        raise AttentionBypassed(
            f"heads must have outputs that can be changed: in {path_in_words(call.path)} only the weights "
            f"{list(call.weights.shape)} can be read (fallback='eager'); leave this layer out"
        )
    return call.output


def check_any(
    model: nn.Module, ran: int, calls: Collection[object], fallback: str | None, elsewhere: bool = False
) -> None:
    """Raise `AttentionBypassed` if a model ran and no layer was heard, unless that is allowed.

    elsewhere: the model called another one that is watched as well, or a layer ran on an empty batch.
    """
    if ran and not calls and not elsewhere and fallback != "skip":
        raise AttentionBypassed(
            f"model must have attention that headwise can intercept: {type(model).__name__} ran {ran} times "
            "without any; check that it has softmax attention"
        )


class ChosenListening(AbstractContextManager[Inside]):
    """A block in which a listener hears the chosen heads, and may change them.

    It may be entered several times, also nested, and together with others: each hears the output as the
    listeners before it left it.
    """

    def __init__(self, model: nn.Module, chosen: ChosenHeads, fallback: str | None) -> None:
        self.model, self.chosen, self.fallback = model, chosen, fallback
        attach(model, _Listener(chosen, lambda *_: None), fallback)  # checks the arguments
        self._entered: list[AbstractContextManager[None]] = []
        self._unused = True

    def __del__(self) -> None:
        if getattr(self, "_unused", False) and not sys.is_finalizing():
            warnings.warn(
                f"nothing was done to heads of {', '.join(self.chosen.paths) or 'the model'}: ablate, patch "
                "and collect act inside a block; write with headwise.ablate(model, heads): model(x)",
                RuntimeWarning,
                stacklevel=2,
            )

    @abstractmethod
    def begin(self) -> tuple[Change, Inside]:
        """Return the function to call for every call, and the object that `with` binds."""

    def __enter__(self) -> Inside:
        self._unused = False
        change, inside = self.begin()
        block = self._listening(_Listener(self.chosen, change))
        block.__enter__()
        self._entered.append(block)
        return inside

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.pop().__exit__(kind, error, trace)

    @contextmanager
    def _listening(self, listener: _Listener) -> Iterator[None]:
        """Attach a listener; raise at the end if one of the chosen layers was not heard."""
        with attach(self.model, listener, self.fallback) as attachment:
            before = attachment.forward.number
            yield
            missed = [path for path in self.chosen.paths if path in attachment.bypassed]
            ran = attachment.forward.number - before
        if missed:
            raise AttentionBypassed(
                f"heads must be in layers that headwise can intercept: {', '.join(missed)} compute their own "
                f"weights, so fallback={self.fallback!r} ignored them; remove these layers from `heads`"
            )
        if self.chosen.everything:
            check_any(self.model, ran, listener.called_paths, self.fallback, attachment.elsewhere)
        silent = self.chosen.absent(listener.called_paths) if ran else []
        if silent:
            absent = ", ".join(path or "the model itself" for path in silent)
            raise ArgumentError(
                f"heads must be in layers that run: the model ran, but {absent} never ran; "
                "remove these layers from `heads`"
            )


class Changing(ChosenListening["Changing"]):
    """A block in which `change` is applied to the chosen heads."""

    def __init__(self, model: nn.Module, chosen: ChosenHeads, change: Change, fallback: str | None) -> None:
        super().__init__(model, chosen, fallback)
        self.change = change

    def begin(self) -> tuple[Change, Changing]:
        return self.change, self


class _Listener(Listener):
    """Applies a change to the chosen heads of every call."""

    def __init__(self, chosen: ChosenHeads, change: Change) -> None:
        self.chosen, self.change = chosen, change
        self.called_paths: set[str] = set()  # paths, with visits

    def hear(self, call: LayerCall) -> Tensor | None:
        self.called_paths.add(call.path)
        heads = self.chosen.at(call.path, call.num_heads)
        if not heads:
            return None
        output = outputs_of(call)
        return self.change(call, torch.tensor(heads, device=output.device), output)
