"""A map as named tensors and plain numbers, and back: what a file can hold, and exactly the map that it was.

A map of q and k is packed as q, k, its log-sum-exp and its rules, linear in the length; only weights that
someone gave are a matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engines.flat import FLAT, flatten, restore
from ..engines.given import GivenWeights
from ..indexing import positions_of
from ..map import AttentionMap, make
from ..masks import BoundMask

__all__ = ["Layout", "dense_bytes", "layout_of", "pack", "packed", "unpack", "unpacked"]

Layout = dict[str, list[int]]  # "shape", and "order": the dimensions as they lie in memory

NAMES = tuple(argument.split()[-1] for argument in FLAT.split(","))
RULES = ("left", "right", "keys", "queries", "key_ids", "query_ids", "allowed")  # of `Mask`, in its order


def dense_bytes(map: AttentionMap | None) -> int:
    """How many bytes of a packed map are a matrix of weights."""
    if map is None or not isinstance(map._scores, GivenWeights):
        return 0
    return map._scores.weights.nbytes


def pack(map: AttentionMap) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a map and its numbers, by name.

    Raises:
        ArgumentError: q, k or a rule was written to since the map was made.
    """
    map._check_unchanged()
    scores = map._scores
    if isinstance(scores, GivenWeights):
        parts: dict[str, Any] = {name: getattr(scores.mask, name) for name in RULES}
        parts |= {"weights": scores.weights, "positions": scores.positions}
    else:
        parts = dict(zip(NAMES, flatten(scores), strict=True))
    parts["lse"] = map.lse
    if map._columns is not None:
        parts["columns"] = positions_of(map._columns, scores.shape[3], torch.device("cpu"))
    tensors = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in parts.items() if not isinstance(value, Tensor | None)}
    return tensors, numbers


def unpack(tensors: dict[str, Tensor], numbers: dict[str, Any]) -> AttentionMap:
    """The map those are of."""
    parts = {**tensors, **numbers}
    lse, columns = parts["lse"], parts.get("columns")
    if "weights" in parts:
        mask = BoundMask(*(parts.get(name) for name in RULES))
        return make(GivenWeights(parts["weights"], mask, parts.get("positions")), lse, columns)
    return make(restore(*(parts.get(name) for name in NAMES)), lse, columns)  # type: ignore[arg-type]


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
