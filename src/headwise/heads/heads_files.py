"""Files of heads in safetensors format: numbers as tensors, maps as q and k, the rest as JSON in the header.

A map is stored as named tensors and plain numbers and restored exactly: q, k, the log-sum-exp and the rules,
linear in the length. Only maps of given weights store the matrix.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import budget
from ..engines.scores import Scores
from ..engines.walk import GivenWeights
from ..errors import ArgumentError, needed
from ..indexing import positions_of
from ..map import AttentionMap, make
from ..whole_files import whole_file
from .layer import Unheard
from .record import Marks, Record

if TYPE_CHECKING:
    from .collection import Heads

JsonDict = dict[str, Any]  # a JSON object
Layout = dict[str, list[int]]  # "shape", and "order": the dimensions in memory order


FORMAT = "headwise-heads-3"  # 2: scores of patterns were means over all queries
MARKS = ("ids", "special", "punctuation", "unknown")
NUMBERS = ("rows", "counts", "pairs", "large")  # of a record, by name
UNHEARD = ("path", "kind", "softmaxes", "why")  # names of the fields of `Unheard` in a file


def save(heads: Heads, path: str | os.PathLike[str], *, maps: bool = True) -> None:
    """Write heads to a file, whole or not at all; see `Heads.save`."""
    with needed("safetensors", "saving heads needs safetensors"):
        import safetensors.torch
    with needed("safetensors", "saving heads needs safetensors"):
        import numpy  # noqa: F401 - safetensors needs it to save, but does not require it
    if maps:
        _check_budget([call for layer in heads.values() for call in layer.calls])
    tensors: dict[str, Tensor] = {}
    store = TensorStore(tensors)
    layers: list[JsonDict] = []
    for layer in heads.values():
        calls: list[JsonDict] = []
        for call in layer.calls:
            call.measure_patterns()
            key = f"{len(layers)}.{len(calls)}."
            tensors |= {key + name: x.cpu().contiguous().clone() for name, x in _tensors(call).items()}
            entry: JsonDict = {"shape": list(call.shape), "kind": call.kind, "forward": call.forward}
            entry["reach"] = call.reach
            if maps and call.map is not None:
                entry["map"] = store.add(key + "map.", call.map)
            calls.append(entry)
        layers.append({"path": layer.path, "layer": layer.layer, "calls": calls})
    header = {"format": FORMAT, "layers": layers, "tokens": heads.tokens, "title": heads.title}
    header["unheard"] = [dict(zip(UNHEARD, astuple(layer), strict=True)) for layer in heads.unheard]
    with whole_file(Path(path), "path") as file:
        file.write_bytes(safetensors.torch.save(tensors, metadata={"headwise": json.dumps(header)}))


def fill(heads: Heads, path: str | os.PathLike[str]) -> None:
    """Fill empty heads from a file that `save` wrote, in main memory; see `load_heads`."""
    with needed("safetensors", "saving heads needs safetensors"):
        import safetensors
    file_path = Path(path)
    if not file_path.is_file():
        raise ArgumentError(
            f"path must be a file that exists: there is no {str(file_path)!r}; create one with heads.save"
        )
    try:
        with safetensors.safe_open(file_path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("headwise", "{}"))
            if header.get("format") != FORMAT:
                raise ArgumentError(
                    f"path must be a file written by heads.save: the format of {str(file_path)!r} is "
                    f"{header.get('format')!r}, not {FORMAT!r}; save it again"
                )
            heads.tokens, heads.title = header["tokens"], header["title"]
            unheard = header.get("unheard", [])  # older files have none
            heads.unheard = [Unheard(*(layer[name] for name in UNHEARD)) for layer in unheard]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        tensors_of: dict[str, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            layer_at, call_at, tensor_name = name.split(".", 2)
            tensors_of.setdefault(f"{layer_at}.{call_at}", {})[tensor_name] = value
        for layer_number, layer in enumerate(header["layers"]):
            for call_number, call in enumerate(layer["calls"]):
                record = _record(call, tensors_of.get(f"{layer_number}.{call_number}", {}))
                if "map" in call:
                    record.map = TensorStore(tensors).load(call["map"])
                heads.add(layer["path"], record, layer=layer["layer"])
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"path must be a safetensors file: {str(file_path)!r}: {error}; create one with heads.save"
        ) from error


class TensorStore:
    """The tensors of maps by name. A tensor that several maps share, such as a mask, is stored once."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self._stored: dict[
            tuple[object, ...], tuple[str, Tensor]
        ] = {}  # tensors are kept alive, for their memory may be reused

    def add(self, key: str, map: AttentionMap) -> JsonDict:
        """Store a map's tensors; return its numbers, and the name and memory layout of each tensor."""
        tensors, numbers = pack(map)
        places: dict[str, tuple[str, Layout]] = {}
        for name, value in tensors.items():
            same = (value.data_ptr(), value.dtype, value.device, value.shape, value.stride())
            if same not in self._stored:
                self._stored[same] = key + name, value
                self.tensors[key + name] = _packed(value)
            places[name] = self._stored[same][0], _layout(value)
        return {"numbers": numbers, "tensors": places}

    def load(self, entry: JsonDict) -> AttentionMap:
        """Return the map that `add` stored."""
        tensors = {}
        for name, (stored_name, layout) in entry["tensors"].items():
            order = layout["order"]
            in_order = self.tensors[stored_name].permute([order.index(dim) for dim in range(len(order))])
            tensors[name] = in_order.expand(layout["shape"])
        return unpack(tensors, entry["numbers"])


def _check_budget(calls: list[Record]) -> None:
    """Check that the dense weights of all given maps fit the memory budget."""
    scores = [call.map.parts()[0] for call in calls if call.map is not None]
    matrices = [part.weights for part in scores if isinstance(part, GivenWeights)]
    if matrices:
        budget.check(
            sum(weights.nbytes for weights in matrices),
            torch.device("cpu"),
            f"weights of {len(matrices)} maps, the last {list(matrices[-1].shape)},",
            "save without maps: heads.save(path, maps=False)",
        )


def _tensors(call: Record) -> dict[str, Tensor]:
    """Return the tensors of a record by name, without its map."""
    tensors = {f"{kind}.{name}": value for kind in NUMBERS for name, value in getattr(call, kind).items()}
    if call.marks is not None:
        marks = ((name, getattr(call.marks, name)) for name in MARKS)
        tensors |= {name: value for name, value in marks if value is not None}
    return tensors


def _record(call: JsonDict, tensors: dict[str, Tensor]) -> Record:
    """Return the record of a call, without its map."""
    B, H, T, S = call["shape"]
    record = Record((B, H, T, S), call["kind"], call["forward"], reach=call["reach"])
    record._has_patterns = True  # they were measured before it was saved
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind in NUMBERS:
            getattr(record, kind)[rest] = value
    if "ids" in tensors:
        record.marks = Marks(*(tensors.get(name) for name in MARKS))  # type: ignore[arg-type]
    return record


# A map as tensors and numbers


def pack(map: AttentionMap) -> tuple[dict[str, Tensor], JsonDict]:
    """Return the tensors of a map and its numbers, by name; raises if q, k or a rule was written to since."""
    scores, _, columns = map.parts()
    parts = scores.parts() | {"lse": map.lse}
    if columns is not None:
        parts["columns"] = positions_of(columns, scores.shape[3], torch.device("cpu"))
    tensors = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in parts.items() if not isinstance(value, Tensor | None)}
    return tensors, numbers


def unpack(tensors: dict[str, Tensor], numbers: JsonDict) -> AttentionMap:
    """Make a map from its tensors and numbers."""
    parts = {**tensors, **numbers}
    kind = GivenWeights if "weights" in parts else Scores
    return make(kind.from_parts(parts), parts["lse"], parts.get("columns"))


def _layout(x: Tensor) -> Layout:
    """Return the memory layout of a tensor; products of another layout would be rounded differently."""
    steps = x.stride()
    return {"shape": list(x.shape), "order": sorted(range(x.ndim), key=lambda dim: -steps[dim])}


def _packed(x: Tensor) -> Tensor:
    """Copy a tensor to main memory in its memory order; expanded dimensions have size 1."""
    order = _layout(x)["order"]
    for dim, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and step == 0:
            x = x.narrow(dim, 0, 1)
    return x.detach().permute(order).cpu().contiguous().clone()
