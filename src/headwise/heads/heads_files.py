"""Heads in one safetensors file: numbers as tensors, maps as q and k, the rest as JSON in its header.

A map becomes named tensors and plain numbers, and from them exactly the map that it was: q, k, its
log-sum-exp and its rules, linear in the length; only weights that someone gave are a matrix.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import budget
from ..engines.given_weights import GivenWeights
from ..engines.scores import Scores
from ..errors import ArgumentError, needed
from ..indexing import positions_of
from ..map import AttentionMap, make
from ..whole_files import whole_file
from .layer import LayerHeads, Unheard
from .record import Marks, Record

__all__ = [
    "Layout",
    "Saved",
    "dense_bytes",
    "layout_of",
    "load",
    "pack",
    "packed",
    "save",
    "unpack",
    "unpacked",
]


Told = dict[str, Any]  # what JSON holds
Layout = dict[str, list[int]]  # "shape", and "order": the dimensions as they lie in memory


FORMAT = "headwise-heads-3"  # 2: scores of patterns were means over all queries
MARKS = ("ids", "special", "punctuation", "unknown")


class Saved(NamedTuple):
    """All that a file holds: layers in the order in which they first ran, and what is said of all of them."""

    layers: list[LayerHeads]
    tokens: list[list[str]] | None = None
    title: str | None = None
    unheard: list[Unheard] = []  # noqa: RUF012 (nobody writes to it)


def save(heads: Saved, path: str | os.PathLike[str], *, maps: bool = True) -> None:
    """Write heads: all of it or, where anything goes wrong, nothing.

    Maps are saved as q, k and their rules, which grow with the length alone; what layers share, once. Only
    maps of weights that someone else computed are saved as weights.

    Args:
        maps: also the maps that were kept; without them numbers and pictures remain.

    Raises:
        ArgumentError: a place that cannot be written to.
        BudgetExceeded: maps of given weights that would not fit.
        PackageMissing: safetensors is not installed.
    """
    to_bytes = _library("save")
    place = Path(path)
    if maps:
        _check_budget(heads.layers)
    tensors: dict[str, Tensor] = {}
    shelf = Shelf(tensors)
    layers: list[Told] = []
    for layer in heads.layers:
        calls: list[Told] = []
        for call in layer.calls:
            call.measure_patterns()
            key = f"{len(layers)}.{len(calls)}."
            tensors |= {
                key + name: value.cpu().contiguous().clone() for name, value in _tensors(call).items()
            }
            told: Told = {"shape": list(call.shape), "kind": call.kind, "forward": call.forward}
            told["reach"] = call.reach
            if maps and call.map is not None:
                told["map"] = shelf.put(key + "map.", call.map)
            calls.append(told)
        layers.append({"path": layer.path, "layer": layer.layer, "calls": calls})
    header = {"format": FORMAT, "layers": layers, "tokens": heads.tokens, "title": heads.title}
    header["unheard"] = [asdict(layer) for layer in heads.unheard]
    with whole_file(place, "path") as half:
        half.write_bytes(to_bytes(tensors, metadata={"headwise": json.dumps(header)}))


def load(path: str | os.PathLike[str]) -> Saved:
    """What `save` has put there, in main memory.

    Raises:
        ArgumentError: no such file, or not one of ours.
        PackageMissing: safetensors is not installed.
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
            unheard = [Unheard(**layer) for layer in header.get("unheard", [])]  # older files have none
            heads = Saved([], header["tokens"], header["title"], unheard)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            mine: dict[str, dict[str, Tensor]] = {}
            for name, value in tensors.items():
                layer_at, call_at, rest = name.split(".", 2)
                mine.setdefault(f"{layer_at}.{call_at}", {})[rest] = value
            for at, told in enumerate(header["layers"]):
                layer = LayerHeads(told["path"], told["layer"])
                heads.layers.append(layer)
                for number, call in enumerate(told["calls"]):
                    record = _record(call, mine.get(f"{at}.{number}", {}))
                    if "map" in call:
                        record.map = Shelf(tensors).take(call["map"])
                    layer.calls.append(record)
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
        self._known: dict[tuple[object, ...], tuple[str, Tensor]] = {}  # kept: memory may come again

    def put(self, key: str, map: AttentionMap) -> Told:
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

    def take(self, told: Told) -> AttentionMap:
        """The map that was put there."""
        tensors = {name: unpacked(self.tensors[at], layout) for name, (at, layout) in told["tensors"].items()}
        return unpack(tensors, told["numbers"])


def _check_budget(layers: list[LayerHeads]) -> None:
    """Maps of given weights are dense: all of them together must fit."""
    given = [call for layer in layers for call in layer.calls if dense_bytes(call.map)]
    if given:
        budget.check(
            sum(dense_bytes(call.map) for call in given),
            torch.device("cpu"),
            f"weights of {len(given)} maps, the last {list(given[-1].shape)},",
            "save without maps: heads.save(path, maps=False)",
        )


def _tensors(call: Record) -> dict[str, Tensor]:
    tensors = {f"rows.{name}": value for name, value in call.rows.items()}
    tensors |= {f"counts.{name}": value for name, value in call.counts.items()}
    tensors |= {f"pairs.{name}": value for name, value in call.pairs.items()}
    tensors |= {f"large.{name}": value for name, value in call.large.items()}
    if call.marks is not None:
        marks = ((name, getattr(call.marks, name)) for name in MARKS)
        tensors |= {name: value for name, value in marks if value is not None}
    return tensors


def _record(call: Told, tensors: dict[str, Tensor]) -> Record:
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
    with needed("safetensors", "saving heads needs safetensors"):
        import safetensors.torch

        if name == "save":
            import numpy  # noqa: F401 - safetensors saves by it, and does not bring it
    return safetensors.safe_open if name == "safe_open" else safetensors.torch.save


# A map as tensors and numbers


def dense_bytes(map: AttentionMap | None) -> int:
    """How many bytes of a packed map are a matrix of weights."""
    scores = None if map is None else map.parts()[0]
    return scores.weights.nbytes if isinstance(scores, GivenWeights) else 0


def pack(map: AttentionMap) -> tuple[dict[str, Tensor], Told]:
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


def unpack(tensors: dict[str, Tensor], numbers: Told) -> AttentionMap:
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
