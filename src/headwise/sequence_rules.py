"""The rules that follow from the sequences themselves: padding, which queries count, and documents.

Each is an entry of `Mask.RULES`; beside it stands how its tensors are read from what users give, whether they
fit, how two are joined, and what is found out about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .errors import MaskError
from .indexing import Index, fits, within
from .mask_rules import (
    Changes,
    Fields,
    Rule,
    Shape,
    Span,
    Value,
    can_read,
    cannot_join,
    is_traced,
    kind,
    size_of,
)

if TYPE_CHECKING:
    from .masks import Mask

__all__ = [
    "Counted",
    "Documents",
    "Padding",
    "as_ids",
    "as_integers",
    "as_padding",
    "document_ends",
    "real_keys",
]

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch knows them, but finds no smallest among them


# Padding


class Padding(Rule["Mask"]):
    """Only real keys."""

    fields: ClassVar[Fields] = {"keys": "BS"}
    is_padding = is_countable = True
    is_made = False

    def join(self, a: Mask, b: Mask) -> Changes:
        return {"keys": join_padding(a.keys, b.keys, "lengths")}

    def negated(self, mask: Mask) -> Changes | None:
        assert mask.keys is not None
        return {"keys": ~mask.keys} if mask.keys.ndim == 2 else None  # where lengths end nobody knows yet

    def check(self, mask: Mask, shape: Shape) -> None:
        assert mask.keys is not None
        check_padding(mask.keys, shape[0], shape[3], "lengths")

    def tile(self, mask: Mask, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        keys = mask.keys
        assert keys is not None
        real = keys[:, columns] if keys.ndim == 2 else spots < keys[:, None]
        return real[:, None, None, :]  # [B, 1, 1, s]

    def cut(self, mask: Mask, keys: slice) -> Changes:
        assert mask.keys is not None
        if mask.keys.ndim == 2:
            return super().cut(mask, keys)
        return {"keys": (mask.keys - keys.start).clamp(0, size_of(keys))}

    def span(self, mask: Mask, ends: Span, rows: Index, keys: Span) -> Span:
        assert mask.keys is not None
        return within(mask._real_keys, *keys) if can_read(mask.keys) else keys

    def added_shape(self, mask: Mask, shape: Shape) -> tuple[int, ...]:
        return shape[0], 1, 1, shape[3]

    def for_kernels(self, mask: Mask) -> dict[str, Value | None]:
        keys = mask.keys
        assert keys is not None
        if keys.ndim == 2:
            return {"keys": keys.contiguous()}
        known = keys.dtype in (torch.int64, torch.int32)
        return {"lengths": keys.contiguous() if known else keys.to(torch.int32)}

    def is_listed(self, mask: Mask) -> bool:
        return mask.keys is not None and mask.keys.ndim == 2  # lengths are where a walk ends


class Counted(Rule["Mask"]):
    """Which queries count in means; it hides nothing."""

    fields: ClassVar[Fields] = {"queries": "BT"}
    hides = False

    def join(self, a: Mask, b: Mask) -> Changes:
        return {"queries": join_padding(a.queries, b.queries, "query_lengths")}

    def check(self, mask: Mask, shape: Shape) -> None:
        assert mask.queries is not None
        check_padding(mask.queries, shape[0], shape[2], "query_lengths")

    def spell_out(self, held: Changes, query_len: int, key_len: int) -> None:
        queries = held["queries"]
        if queries.ndim == 1:
            held["queries"] = torch.arange(query_len, device=queries.device) < queries[:, None]


def as_integers(value: Tensor | Sequence[int] | None) -> Tensor:
    """The same as a tensor. A list is on no device: in CPU memory, from where calls take it to their own."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def _is_integer(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def as_padding(value: Tensor | Sequence[int], name: str) -> Tensor:
    """Lengths int [B], or real positions bool [B, length]."""
    lengths = as_integers(value)
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


def join_padding(a: Tensor | None, b: Tensor | None, name: str) -> Tensor | None:
    """What is real under both."""
    if a is None or b is None:
        return b if a is None else a
    shared = min(a.ndim, b.ndim)
    if a.shape[:shared] != b.shape[:shared]:
        raise cannot_join(name, a.shape, b.shape)
    if a.ndim == b.ndim:
        return torch.minimum(a, b) if a.ndim == 1 else a & b
    lengths, real = (a, b) if a.ndim == 1 else (b, a)
    return real & (torch.arange(real.shape[-1], device=real.device) < lengths[:, None])


def real_keys(mask: Mask) -> Tensor:
    """The keys that are real in some sequence, in order."""
    assert mask.keys is not None
    if mask.keys.ndim == 1:
        return torch.arange(int(mask.keys.max()), device="cpu")
    return mask.keys.any(0).nonzero().squeeze(-1)


# Documents


class Documents(Rule["Mask"]):
    """Only keys with the query's own labels."""

    fields: ClassVar[Fields] = {"key_ids": "bS", "query_ids": "bT"}
    is_countable = is_narrow = True

    def join(self, a: Mask, b: Mask) -> Changes:
        keys, queries = join_ids((a.key_ids, a.query_ids), (b.key_ids, b.query_ids))
        return {"key_ids": keys, "query_ids": queries}

    def check(self, mask: Mask, shape: Shape) -> None:
        batch, _, query_len, key_len = shape
        for value, length, name in ((mask.key_ids, key_len, "ids"), (mask.query_ids, query_len, "query_ids")):
            if value is not None and (not fits(value.shape[0], batch) or value.shape[1] != length):
                raise MaskError(
                    f"document {name} must cover the sequence: {list(value.shape[:2])} for batch {batch}, "
                    f"length {length}; give one id a position"
                )
        if mask.query_ids is None and query_len > key_len:
            raise MaskError(
                f"document query_ids must be given when there are more queries than keys: {query_len} > "
                f"{key_len}; pass Mask.documents(ids, query_ids)"
            )

    def spell_out(self, held: Changes, query_len: int, key_len: int) -> None:
        if "query_ids" in held:
            return
        keys = held["key_ids"]
        compared = not (torch.compiler.is_compiling() or is_traced())  # a graph may be for other lengths
        held["query_ids"] = keys if compared and query_len == key_len else keys[:, key_len - query_len :]

    def placed(self, mask: Mask, at: Tensor) -> Changes:
        assert mask.key_ids is not None
        if mask.query_ids is not None:
            return {}
        first, last, S = int(at.min()), int(at.max()), mask.key_ids.shape[1]
        if first < 0 or last >= S:
            raise MaskError(
                f"document query_ids must be given for queries outside the keys: positions {first} to {last} "
                f"of {S} keys; pass Mask.documents(ids, query_ids)"
            )
        return {"query_ids": mask.key_ids[:, at.to(mask.key_ids.device)]}

    def tile(self, mask: Mask, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        assert mask.key_ids is not None and mask.query_ids is not None, "bind the mask first"
        same = mask.query_ids[:, rows, None] == mask.key_ids[:, None, columns]  # [B|1, t, s, N]
        return same.all(-1)[:, None]

    def span(self, mask: Mask, ends: Span, rows: Index, keys: Span) -> Span:
        assert mask.key_ids is not None
        if not can_read(mask.key_ids):
            return keys
        first, beyond = mask._document_ends
        return max(keys[0], int(first[rows].min())), min(keys[1], int(beyond[rows].max()))

    def added_shape(self, mask: Mask, shape: Shape) -> tuple[int, ...]:
        assert mask.key_ids is not None and mask.query_ids is not None, "bind the mask first"
        return max(mask.key_ids.shape[0], mask.query_ids.shape[0]), 1, *shape[2:]

    def for_kernels(self, mask: Mask) -> dict[str, Value | None]:
        assert mask.key_ids is not None and mask.query_ids is not None, "bind the mask first"
        batch = max(mask.key_ids.shape[0], mask.query_ids.shape[0])  # either may be one for all
        keys, queries = (
            ids.to(torch.int64).transpose(1, 2).expand(batch, -1, -1).contiguous()
            for ids in (mask.key_ids, mask.query_ids)
        )
        return {"key_ids": keys, "query_ids": queries, "ids_batch": int(batch > 1)}


def as_ids(value: Tensor | Sequence[int], name: str) -> Tensor:
    """Document ids as labels, int [B or 1, length, 1]."""
    ids = as_integers(value)
    if not _is_integer(ids) or ids.ndim not in (1, 2):
        raise MaskError(
            f"document {name} must be integers [S] or [B, S]: got {kind(ids)}{list(ids.shape)}; "
            "number the documents 0, 1, 2, ..."
        )
    return ids.unsqueeze(2) if ids.ndim == 2 else ids.view(1, ids.shape[0], 1)  # [B or 1, S, 1]


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
        raise cannot_join(name, a.shape[:2], b.shape[:2])
    return torch.cat([ids.expand(batch, -1, -1) for ids in (a, b)], dim=-1)


def document_ends(mask: Mask) -> tuple[Tensor, Tensor]:
    """For each query, the first key of its document and the one beyond the last, in any sequence: [T].

    By the first label alone, so it may reach too far, never too short.
    """
    assert mask.key_ids is not None and mask.query_ids is not None, "bind the mask first"
    labels, S = mask.key_ids[..., 0], mask.key_ids.shape[1]
    names, place = torch.unique(labels, return_inverse=True)
    spots = torch.arange(S, device="cpu").expand_as(place).flatten()
    first = torch.full((len(names) + 1,), S, device="cpu")  # the last entry: no such document
    beyond = torch.zeros(len(names) + 1, dtype=torch.int64, device="cpu")
    first.scatter_reduce_(0, place.flatten(), spots, "amin")
    beyond.scatter_reduce_(0, place.flatten(), spots + 1, "amax")
    mine = mask.query_ids[..., 0].contiguous()  # [B or 1, T]
    document = torch.searchsorted(names, mine).clamp(max=len(names) - 1)
    document = torch.where(names[document] == mine, document, len(names))
    return first[document].amin(0), beyond[document].amax(0)
