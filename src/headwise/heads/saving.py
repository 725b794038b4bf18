"""Heads in a file: one safetensors file, numbers as tensors, the rest as JSON in its header."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from .. import budget
from ..errors import ArgumentError
from ..map import AttentionMap
from ..masks import Mask
from .collection import Heads
from .record import Marks, Record

__all__ = ["load", "save"]

FORMAT = "headwise-heads-1"


def save(heads: Heads, path: str | os.PathLike[str]) -> None:
    """Write heads: all of it or, where anything goes wrong, nothing. Maps are saved as their weights.

    Raises:
        ArgumentError: nothing was watched; a place that cannot be written to.
        ImportError: safetensors is not installed.
    """
    to_bytes = _library("save")
    if not heads:
        raise ArgumentError("heads must not be empty: 0 layers; run the model inside the watch block")
    place = Path(path)
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for layer in heads.values():
        calls: list[dict[str, Any]] = []
        for call in layer.calls:
            call.measure_patterns()
            key = f"{len(layers)}.{len(calls)}."
            tensors |= {
                key + name: value.cpu().contiguous().clone() for name, value in _tensors(call).items()
            }
            calls.append({"shape": list(call.shape), "kind": call.kind, "forward": call.forward})
        layers.append({"path": layer.path, "calls": calls})
    header = {"format": FORMAT, "layers": layers, "tokens": heads.tokens, "title": heads.title}
    half = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        half.write_bytes(to_bytes(tensors, metadata={"headwise": json.dumps(header)}))
        half.replace(place)
    except OSError as error:
        raise ArgumentError(
            f"path must be writable: {place}: {error.strerror}; choose another place"
        ) from error
    finally:
        half.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Heads:
    """Heads as they were saved; maps come back as maps of their weights.

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
            names = list(file.keys())
            for at, layer in enumerate(header["layers"]):
                for number, call in enumerate(layer["calls"]):
                    key = f"{at}.{number}."
                    mine = {n.removeprefix(key): file.get_tensor(n) for n in names if n.startswith(key)}
                    heads.add(layer["path"], _record(call, mine))
    except ArgumentError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"path must be a safetensors file: {str(place)!r}: {error}; heads.save makes one"
        ) from error
    return heads


def _tensors(call: Record) -> dict[str, Tensor]:
    found = {f"rows.{name}": value for name, value in call.rows.items()}
    found |= {f"counts.{name}": value for name, value in call.counts.items()}
    found |= {f"pairs.{name}": value for name, value in call.pairs.items()}
    found |= {f"large.{name}": value for name, value in call.large.items()}
    if call.marks is not None:
        found["ids"] = call.marks.ids
    if call.map is not None and budget.surely_fits(call.map.numel() * call.map.dtype.itemsize):
        found["weights"] = call.map.dense()
        counted = call.map.mask.counted(call.shape[2])
        if counted is not None:
            found["counted"] = counted
    return found


def _record(call: dict[str, Any], tensors: dict[str, Tensor]) -> Record:
    B, H, T, S = call["shape"]
    record = Record((B, H, T, S), call["kind"], call["forward"], _has_patterns=True)
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if rest:
            getattr(record, kind)[rest] = value
    if "ids" in tensors:
        record.marks = Marks(tensors["ids"])
    if "weights" in tensors:
        counted = tensors.get("counted")
        mask = None if counted is None else Mask(queries=counted)
        record.map = AttentionMap.from_weights(tensors["weights"], mask)
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
