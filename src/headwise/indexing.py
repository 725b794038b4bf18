"""Indices: from what people write in brackets to one slice or index tensor a dimension, and taking them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Plan", "as_index", "compose", "in_order", "positions_of", "resolve", "take"]


class Plan(NamedTuple):
    """How to answer map[index]: what to select, then which dimensions of size 1 to drop."""

    indices: tuple[Any, ...]
    squeeze: tuple[Any, ...]


def as_index(chosen: Any, size: int, name: str) -> slice | Tensor:
    """A number, slice, range, list or tensor as a slice (step 1 or more) or an index tensor.

    Raises:
        IndexError: outside 0 .. size - 1 (negative numbers count from the end), or not an index.
    """
    if isinstance(chosen, slice):
        picked = range(size)[chosen]
        return slice(*chosen.indices(size)) if picked.step > 0 else _numbers(picked)
    if isinstance(chosen, int) and not isinstance(chosen, bool):
        place = _inside(chosen, size, name)
        return slice(place, place + 1, 1)
    spots = torch.as_tensor(chosen if isinstance(chosen, Tensor) else list(chosen))
    if spots.dtype == torch.bool and spots.ndim == 1:
        if len(spots) != size:
            raise IndexError(f"{name} must have one bool each: got {len(spots)} for {size}; use numbers")
        spots = spots.nonzero().squeeze(-1)
    if spots.is_floating_point() or spots.ndim != 1:
        raise IndexError(
            f"{name} must be whole numbers in one dimension: got {spots.dtype} {list(spots.shape)}; "
            "use a list or a slice"
        )
    return _numbers([_inside(int(i), size, name) for i in spots.tolist()])


def _numbers(spots: Sequence[int]) -> Tensor:
    return torch.tensor(list(spots), dtype=torch.int64)


def _inside(place: int, size: int, name: str) -> int:
    if not -size <= place < size:
        raise IndexError(f"{name} must lie inside the map: got {place} for size {size}; use 0 to {size - 1}")
    return place % size


def in_order(index: slice | Tensor, size: int) -> Sequence[int] | Tensor:
    """The positions an index picks out, one after the other."""
    return range(size)[index] if isinstance(index, slice) else index


def compose(outer: slice | Tensor | None, inner: slice | Tensor, size: int) -> slice | Tensor:
    """`inner` picked out of `outer`, as an index into the whole."""
    if outer is None:
        return inner
    spots = in_order(outer, size)
    if isinstance(spots, range):
        if isinstance(inner, slice):
            left = spots[inner]
            return slice(left.start, left.stop, left.step)
        spots = _numbers(spots)
    assert isinstance(spots, Tensor)
    return spots[inner]


def resolve(index: Any, shape: torch.Size) -> Plan | None:
    """A plan for numbers, slices, one `...` and at most one list a call; None: too much for that."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is None or isinstance(part, bool) for part in parts):
        return None
    lists = [part for part in parts if not isinstance(part, (int, slice, type(...)))]
    if len(lists) > 1 or any(torch.as_tensor(part).ndim != 1 for part in lists):
        return None
    gaps = [i for i, part in enumerate(parts) if part is ...]
    if len(gaps) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if len(parts) - len(gaps) > len(shape):
        raise IndexError(f"too many indices: got {len(parts)} for a map of {len(shape)} dimensions")
    place = gaps[0] if gaps else len(parts)
    missing = len(shape) - (len(parts) - len(gaps))
    parts[place : place + len(gaps)] = [slice(None)] * missing
    numbers = [i for i, part in enumerate(parts) if isinstance(part, int)]
    if lists and numbers:  # torch moves dimensions about then
        return None
    drop = tuple(0 if i in numbers else slice(None) for i in range(len(shape)))
    return Plan(tuple(parts), drop)


def take(tensor: Tensor, index: tuple[Any, ...], ones_stay: bool = True) -> Tensor:
    """Index dimensions one by one, each by a slice (a view), an index tensor, or None (left alone).

    With `ones_stay`, a dimension of size 1 broadcasts and is left alone, too.
    """
    for dim, chosen in enumerate(index):
        if chosen is None or (ones_stay and tensor.shape[dim] == 1):
            continue
        if isinstance(chosen, slice):
            tensor = tensor[(slice(None),) * dim + (chosen,)]
        else:
            tensor = tensor.index_select(dim, chosen.to(tensor.device))
    return tensor


def positions_of(index: Any, length: int, device: torch.device) -> Tensor:
    """The positions an index picks out of `length`, as int [n]."""
    if isinstance(index, slice):
        return torch.arange(*index.indices(length), device=device)
    spots: Tensor = index.to(device)
    return spots
