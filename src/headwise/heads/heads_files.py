"""Heads in one safetensors file: numbers as tensors, maps as q and k, the rest as JSON in its header.

A map as named tensors and plain numbers, and back: what a file can hold, and exactly the map that it was.

A map of q and k is packed as q, k, its log-sum-exp and its rules, linear in the length; only weights that
someone gave are a matrix.

Heads in a file: one safetensors file, numbers as tensors, the rest as JSON in its header.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import budget
from ..engines.given_weights import GivenWeights
from ..engines.scores import Scores
from ..errors import ArgumentError
from ..indexing import positions_of
from ..map import AttentionMap, make
from ..whole_files import whole_file
from .collection import Heads
from .record import Marks, Record

__all__ = ["Layout", "dense_bytes", "layout_of", "load", "pack", "packed", "save", "unpack", "unpacked"]


Layout = dict[str, list[int]]  # "shape", and "order": the dimensions as they lie in memory


def dense_bytes(map: AttentionMap | None) -> int:
    """How many bytes of a packed map are a matrix of weights."""
    scores = None if map is None else map.parts()[0]
    return scores.weights.nbytes if isinstance(scores, GivenWeights) else 0


def pack(map: AttentionMap) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a map and its numbers, by name.

    Raises:
        ArgumentError: q, k or a rule was written to since the map was made.
    """
    scores, _, columns = map.parts()
    parts = scores.parts() | {"lse": map.lse}
    if columns is not None:
        parts["columns"] = positions_of(columns, scores.shape[3], torch.device("cpu"))
    tensors = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in parts.items() if not isinstance(value, Tensor | None)}
    return tensors, numbers


def unpack(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> AttentionMap:
    """The map those are of."""
    parts = {**tensors, **numbers}
    lse, columns = parts["lse"], parts.get("columns")
    kind = GivenWeights if "weights" in parts else Scores
    return make(kind.from_parts(parts), lse, columns)


def layout_of(x: Tensor) -> Layout:
    """How a tensor lies in memory: products of tensors that lie otherwise are rounded otherwise."""
    steps = x.stride()
    return {"shape": list(x.shape), "order": sorted(range(x.ndim), key=lambda dim: -steps[dim])}


def packed(x: Tensor) -> Tensor:
    """The numbers of a tensor as they lie, in main memory; what is expanded (a mask over heads) once."""
    order = layout_of(x)["order"]
    for dim, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and step == 0:
            x = x.narrow(dim, 0, 1)
    return x.detach().permute(order).cpu().contiguous().clone()


def unpacked(x: Tensor, layout: Layout) -> Tensor:
    """The tensor that was packed."""
    order = layout["order"]
    return x.permute([order.index(dim) for dim in range(len(order))]).expand(layout["shape"])


FORMAT = "headwise-heads-3"  # 2: scores of patterns were means over all queries
MARKS = ("ids", "special", "punctuation", "unknown")


def save(heads: Heads, path: str | os.PathLike[str], *, maps: bool = True) -> None:
    """Write heads: all of it or, where anything goes wrong, nothing.

    Maps are saved as q, k and their rules, which grow with the length alone; what layers share, once. Only
    maps of weights that someone else computed are saved as weights.

    Args:
        maps: also the maps that were kept; without them numbers and pictures remain.

    Raises:
        ArgumentError: nothing was watched; a place that cannot be written to.
        BudgetExceeded: maps of given weights that would not fit.
        ImportError: safetensors is not installed.
    """
    to_bytes = _library("save")
    if not heads:
        raise ArgumentError("heads must not be empty: 0 layers; run the model inside the watch block")
    place = Path(path)
    if maps:
        _check_budget(heads)
    tensors: dict[str, Tensor] = {}
    shelf = Shelf(tensors)
    layers: list[dict[str, Any]] = []
    for layer in heads.values():
        calls: list[dict[str, Any]] = []
        for call in layer.calls:
            call.measure_patterns()
            key = f"{len(layers)}.{len(calls)}."
            tensors |= {
                key + name: value.cpu().contiguous().clone() for name, value in _tensors(call).items()
            }
            told: dict[str, Any] = {"shape": list(call.shape), "kind": call.kind, "forward": call.forward}
            told["reach"] = call.reach
            if maps and call.map is not None:
                told["map"] = shelf.put(key + "map.", call.map)
            calls.append(told)
        layers.append({"path": layer.path, "layer": layer.layer, "calls": calls})
    header = {"format": FORMAT, "layers": layers, "tokens": heads.tokens, "title": heads.title}
    with whole_file(place, "path") as half:
        half.write_bytes(to_bytes(tensors, metadata={"headwise": json.dumps(header)}))


def load(path: str | os.PathLike[str]) -> Heads:
    """Heads as they were saved, in main memory.

    Raises:
        ArgumentError: no such file, or not one of ours.
        ImportError: safetensors is not installed.

    Example:
        >>> import torch, headwise as hw
        >>> mha = hw.MultiHeadAttention(64, 4)
        >>> with hw.watch(mha) as heads:
        ...     output, _ = mha(torch.randn(2, 7, 64))
        >>> heads.save("heads.safetensors"); hw.load_heads("heads.safetensors")  # doctest: +SKIP
        Heads(1 layer, 4 heads)
    """
    open_file = _library("safe_open")
    place = Path(path)
    if not place.is_file():
        raise ArgumentError(
            f"path must be a file that exists: there is no {str(place)!r}; heads.save makes one"
        )
    try:
        with open_file(place, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("headwise", "{}"))
            if header.get("format") != FORMAT:
                raise ArgumentError(
                    f"path must be a file of heads.save: {str(place)!r} is {header.get('format')!r}, not "
                    f"{FORMAT!r}; save it again"
                )
            heads = Heads()
            heads.tokens, heads.title = header["tokens"], header["title"]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            mine: dict[str, dict[str, Tensor]] = {}
            for name, value in tensors.items():
                layer_at, call_at, rest = name.split(".", 2)
                mine.setdefault(f"{layer_at}.{call_at}", {})[rest] = value
            for at, layer in enumerate(header["layers"]):
                for number, call in enumerate(layer["calls"]):
                    record = _record(call, mine.get(f"{at}.{number}", {}))
                    if "map" in call:
                        record.map = Shelf(tensors).take(call["map"])
                    heads.add(layer["path"], record, layer=layer["layer"])
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"path must be a safetensors file: {str(place)!r}: {error}; heads.save makes one"
        ) from error
    return heads


class Shelf:
    """The tensors of maps by name. What several maps share, as layers do a mask, is there once."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._known: dict[tuple[Any, ...], tuple[str, Tensor]] = {}  # kept: memory given back may come again

    def put(self, key: str, map: AttentionMap) -> dict[str, Any]:
        """What to write down to find a map again: its numbers, and where each tensor is and how it lies."""
        tensors, numbers = pack(map)
        places: dict[str, tuple[str, Layout]] = {}
        for name, value in tensors.items():
            same = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride())
            if same not in self._known:
                self._known[same] = key + name, value
                self.tensors[key + name] = packed(value)
            places[name] = self._known[same][0], layout_of(value)
        return {"numbers": numbers, "tensors": places}

    def take(self, told: dict[str, Any]) -> AttentionMap:
        """The map that was put there."""
        found = {name: unpacked(self.tensors[at], layout) for name, (at, layout) in told["tensors"].items()}
        return unpack(found, told["numbers"])


def _check_budget(heads: Heads) -> None:
    """Maps of given weights are dense: all of them together must fit."""
    given = [call for layer in heads.values() for call in layer.calls if dense_bytes(call.map)]
    if given:
        budget.check(
            sum(dense_bytes(call.map) for call in given),
            torch.device("cpu"),
            f"weights of {len(given)} maps, the last {list(given[-1].shape)},",
            "save without maps: heads.save(path, maps=False)",
        )


def _tensors(call: Record) -> dict[str, Tensor]:
    found = {f"rows.{name}": value for name, value in call.rows.items()}
    found |= {f"counts.{name}": value for name, value in call.counts.items()}
    found |= {f"pairs.{name}": value for name, value in call.pairs.items()}
    found |= {f"large.{name}": value for name, value in call.large.items()}
    if call.marks is not None:
        marks = ((name, getattr(call.marks, name)) for name in MARKS)
        found |= {name: value for name, value in marks if value is not None}
    return found


def _record(call: dict[str, Any], tensors: dict[str, Tensor]) -> Record:
    B, H, T, S = call["shape"]
    record = Record((B, H, T, S), call["kind"], call["forward"], reach=call["reach"])
    record._has_patterns = True  # they were measured before it was saved
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if rest and kind != "map":
            getattr(record, kind)[rest] = value
    if "ids" in tensors:
        record.marks = Marks(*(tensors.get(name) for name in MARKS))  # type: ignore[arg-type]
    return record


def _library(name: str) -> Any:
    try:
        if name == "safe_open":
            from safetensors import safe_open

            return safe_open
        from safetensors.torch import save

        return save
    except ModuleNotFoundError as error:
        hint = 'saving heads needs safetensors; install with: pip install "headwise[watch]"'
        raise ImportError(hint, name="safetensors") from error
