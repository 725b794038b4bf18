"""The single rules a `Mask` is made of: reading them from what users give, checking, joining two."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .errors import MaskError

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch knows them, but finds no smallest among them


def can_read(tensor: Tensor) -> bool:
    """Whether looking at this tensor's values is free: in CPU memory, and real."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(tensor, FakeTensor)
        and not torch._C._are_functorch_transforms_active()
    )


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Two bool tensors joined; None hides nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def smaller(a: int | None, b: int | None) -> int | None:
    """The tighter of two bounds; None is no bound."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def kind(tensor: Tensor) -> str:
    """A tensor's dtype in one word."""
    return str(tensor.dtype).removeprefix("torch.")


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def whole_number(number: Any, name: str) -> int:
    """A count of keys, or `MaskError`."""
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise MaskError(f"{name} must be a whole number: got {number!r}; count keys, e.g. 256")
    return operator.index(number)


def as_padding(value: Tensor | Sequence[int], name: str) -> Tensor:
    """Lengths int [B], or real positions bool [B, length]."""
    lengths = torch.as_tensor(value)
    if lengths.dtype == torch.bool and lengths.ndim == 2:
        return lengths
    if lengths.dtype in UNSIGNED:
        lengths = lengths.long()
    if not (_is_integer(lengths) and lengths.ndim == 1):
        raise MaskError(
            f"{name} must be integers [B] or bool [B, length]: got {kind(lengths)}{list(lengths.shape)}; "
            "a 0/1 mask becomes bool with mask.bool()"
        )
    if can_read(lengths) and lengths.numel() and int(lengths.min()) < 0:
        raise MaskError(f"{name} must not be negative: got {int(lengths.min())}; use 0 for no tokens")
    return lengths


def check_padding(value: Tensor, batch: int, length: int, name: str) -> None:
    """Raise `MaskError` where padding does not fit batch and length."""
    want = [batch] if value.ndim == 1 else [batch, length]
    if list(value.shape) != want:
        raise MaskError(
            f"{name} must fit batch and length: {list(value.shape)} for {want}; "
            "give one length a sequence, or one bool a position"
        )
    if value.ndim == 1 and can_read(value) and value.numel() and int(value.max()) > length:
        raise MaskError(
            f"{name} must not go beyond the sequence: {int(value.max())} > {length}; cut or pad the input"
        )


def as_ids(value: Tensor | Sequence[int], name: str) -> Tensor:
    """Document ids as labels, int [B or 1, length, 1]."""
    ids = torch.as_tensor(value)
    if not _is_integer(ids) or ids.ndim not in (1, 2):
        raise MaskError(
            f"document {name} must be integers [S] or [B, S]: got {kind(ids)}{list(ids.shape)}; "
            "number the documents 0, 1, 2, ..."
        )
    return (ids if ids.ndim == 2 else ids[None])[..., None]  # [B or 1, S, 1]


def as_allowed(value: Tensor) -> Tensor:
    """A dense mask as bool, 4-D."""
    if not isinstance(value, Tensor):
        raise MaskError(
            f"mask must be a Mask or a tensor: got {type(value).__name__}; use torch.as_tensor(mask)"
        )
    if value.ndim > 4:
        raise MaskError(
            f"mask must broadcast to [B, H, T, S]: got {value.ndim} dimensions {list(value.shape)}; "
            "use at most four"
        )
    if value.dtype != torch.bool:
        if can_read(value) and value.numel():
            _check_zero_one(value)
        value = value != 0
    return value[(None,) * (4 - value.ndim)]


def _check_zero_one(value: Tensor) -> None:
    strange = value[(value != 0) & (value != 1)]
    if strange.numel():
        raise MaskError(
            f"mask must hold 0 and 1 only: found {strange[0].item():g}; True or 1 = may attend, and numbers "
            "to be added to the scores go in bias="
        )
    if value.is_floating_point() and not value.any():
        raise MaskError(
            f"mask must not be all zeros as float: {list(value.shape)}; read as 0/1 it would hide every key, "
            "and an additive mask that hides nothing is mask=None (use a bool mask to hide everything)"
        )


def join_padding(a: Tensor | None, b: Tensor | None, name: str) -> Tensor | None:
    """What is real under both."""
    if a is None or b is None:
        return b if a is None else a
    shared = min(a.ndim, b.ndim)
    if a.shape[:shared] != b.shape[:shared]:
        raise _cannot_join(name, a.shape, b.shape)
    if a.ndim == b.ndim:
        return torch.minimum(a, b) if a.ndim == 1 else a & b
    lengths, real = (a, b) if a.ndim == 1 else (b, a)
    return real & (torch.arange(real.shape[-1], device=real.device) < lengths[:, None])


def join_allowed(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """What both dense masks allow."""
    if a is not None and b is not None:
        pairs = zip(a.shape, b.shape, strict=True)
        if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
            raise _cannot_join("dense masks", a.shape, b.shape)
    return both(a, b)


Labels = tuple[Tensor | None, Tensor | None]  # of keys, of queries


def join_ids(a: Labels, b: Labels) -> Labels:
    """Labels that all must match, side by side."""
    (a_keys, a_queries), (b_keys, b_queries) = a, b
    if a_keys is None or b_keys is None:
        return b if a_keys is None else a
    if (a_queries is None) != (b_queries is None):
        raise MaskError(
            "document masks joined with & must both have query_ids or neither: got one; "
            "give query_ids to both"
        )
    keys = _stack(a_keys, b_keys, "document ids")
    if a_queries is None or b_queries is None:
        return keys, None
    return keys, _stack(a_queries, b_queries, "document query_ids")


def _stack(a: Tensor, b: Tensor, name: str) -> Tensor:
    batch = max(a.shape[0], b.shape[0])
    if a.shape[1] != b.shape[1] or {a.shape[0], b.shape[0]} - {1, batch}:
        raise _cannot_join(name, a.shape[:2], b.shape[:2])
    return torch.cat([ids.expand(batch, -1, -1) for ids in (a, b)], dim=-1)


def _cannot_join(name: str, a: torch.Size, b: torch.Size) -> MaskError:
    return MaskError(
        f"{name} joined with & must agree in size: {list(a)} and {list(b)}; make both for the same sequences"
    )
