"""Indices: from what people write in brackets to one slice or index tensor per dimension, and taking them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import private_names as _private_names  # noqa: F401, checks that torch has them

Choice = int | slice | Sequence[int] | Tensor | None  # what people write for one dimension; None: all
Index = slice | Tensor  # one dimension's: a run of places, or their numbers


class Plan(NamedTuple):
    """A plan for map[index]: what to select, then what to drop and add."""

    indices: tuple[Choice, ...]
    squeeze: tuple[int | slice | None, ...]


def as_index(chosen: Any, size: int, name: str) -> Index:
    """Return a number, slice, range, list or tensor as a slice (step 1 or more) or an index tensor.

    Raises:
        IndexError: outside 0 .. size - 1 (negative numbers count from the end), or not an index.
    """
    if isinstance(chosen, slice):
        if chosen == slice(None):  # without looking at the size, which may not be known while compiling
            return chosen
        picked = range(size)[chosen]
        if picked == range(size):
            return slice(None)
        if picked.step > 0:
            return slice(picked.start, picked.stop, picked.step)
        return _numbers(picked)
    number = _as_number(chosen)
    if number is not None:
        place = _inside(number, size, name)
        return slice(place, place + 1, 1)
    if not hasattr(chosen, "__iter__"):
        raise IndexError(f"{name} must be a number, a slice or a list: got {chosen!r}; None takes all")
    spots = chosen.tolist() if hasattr(chosen, "tolist") else list(chosen)  # a tensor's, or numpy's
    if spots and all(isinstance(spot, bool) for spot in spots):
        if len(spots) != size:
            raise IndexError(f"{name} must have one bool per index: got {len(spots)} for {size}; use numbers")
        spots = [i for i, flag in enumerate(spots) if flag]
    numbers = [_as_number(spot) for spot in spots]
    if None in numbers:
        raise IndexError(
            f"{name} must be whole numbers in one dimension: got {spots[numbers.index(None)]!r}; "
            "use a list or a slice"
        )
    return _numbers([_inside(number, size, name) for number in numbers if number is not None])


def _as_number(value: object) -> int | None:
    """Return a whole number as int (also numpy's, also a tensor of one element); None for anything else."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.ndim or value.dtype == torch.bool)):
        return None
    return operator.index(value) if hasattr(value, "__index__") and not getattr(value, "ndim", 0) else None


def _numbers(spots: Sequence[int]) -> Tensor:
    return torch.tensor(list(spots), dtype=torch.int64, device="cpu")


def _inside(place: int, size: int, name: str) -> int:
    if not -size <= place < size:
        raise IndexError(f"{name} must lie inside the map: got {place} for size {size}; use 0 to {size - 1}")
    return place % size


def in_order(index: slice | Tensor, size: int) -> Sequence[int] | Tensor:
    """Return the positions an index selects, in order."""
    return range(size)[index] if isinstance(index, slice) else index


def compose(outer: slice | Tensor | None, inner: slice | Tensor, size: int) -> Index:
    """Return the index that applies `inner` to the result of `outer`."""
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
    """Return a plan for numbers, slices, new axes, one `...` and at most one list; None for other indices.

    Raises:
        IndexError: more indices than dimensions, or two ellipses.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    numbers = [_as_number(part) for part in parts]
    parts = [part if number is None else number for part, number in zip(parts, numbers, strict=True)]
    lists = [part for part in parts if not isinstance(part, (int, slice, type(...), type(None)))]
    if len(lists) > 1 or any(part is True or part is False for part in parts):
        return None
    if lists and (not _is_flat(lists[0]) or any(part is None for part in parts)):
        return None
    gaps = [i for i, part in enumerate(parts) if part is ...]
    if len(gaps) > 1:
        raise IndexError(f"index must have at most one ellipsis: got {len(gaps)}; write the others as :")
    used = sum(part is not None for part in parts) - len(gaps)
    if used > len(shape):
        raise IndexError(
            f"index must have at most one entry per dimension: got {used} for {len(shape)}; "
            "the dimensions are batch, head, query, key"
        )
    place = gaps[0] if gaps else len(parts)
    parts[place : place + len(gaps)] = [slice(None)] * (len(shape) - used)
    squeeze = tuple(0 if isinstance(p, int) else None if p is None else slice(None) for p in parts)
    return Plan(tuple(part for part in parts if part is not None), squeeze)


def _is_flat(part: object) -> bool:
    """Return True for a list or tensor of one dimension."""
    if isinstance(part, (list, tuple, range)):
        return all(_as_number(item) is not None or isinstance(item, bool) for item in part)
    return getattr(part, "ndim", 0) == 1 and getattr(part, "dtype", None) is not torch.uint8


def take(tensor: Tensor, index: tuple[Index | None, ...], ones_stay: bool = True) -> Tensor:
    """Index each dimension by a slice (a view), an index tensor, or None (unchanged).

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


def positions_of(index: Index, length: int, device: torch.device) -> Tensor:
    """Return the positions an index picks out of `length`, as int [n]."""
    if isinstance(index, slice):
        if isinstance(index.stop, Tensor):  # a length that torch.jit.trace records: it may be another later
            return torch.arange(length, device=device)[index]
        return torch.arange(*index.indices(length), device=device)
    spots: Tensor = index.to(device)
    return spots


def fits(size: int, wanted: int) -> bool:
    """Return True if a dimension broadcasts to another.

    Not `size in (1, wanted)`: while tracing, that is False for a known and an unknown size.
    """
    return size == 1 or size == wanted


def within(spots: Tensor, start: int, stop: int) -> tuple[int, int]:
    """Return the tightest [start, stop) around the sorted spots inside it; empty where there is none."""
    low, high = torch.searchsorted(spots, torch.tensor([start, stop], device="cpu")).tolist()
    return (int(spots[low]), int(spots[high - 1]) + 1) if low < high else (0, 0)
