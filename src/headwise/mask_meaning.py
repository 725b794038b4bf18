"""Read the masks that users pass, and refuse those whose values suggest another meaning.

A tensor may be a mask with True = hidden, or padding, or of another shape. Where its values show that, an
error is raised, with the code for each possible meaning.

A fact about a mask is used again only if the tensor provably holds the same bytes (`fact`). A tensor does not
record every write: `.data`, numpy and DLPack aliases, shared memory, a broadcast between processes and
everything under `inference_mode` count no version, and an address or an id may later be that of another
tensor. So a fact is stored with a private copy of the bytes, and a call that uses it first compares the two.
On a CPU that takes a hundredth of the forward it saves; on other devices, where reading values stops the
device, nothing is stored and nothing is read. A copy is freed together with the memory of the tensor, or by
`clear_copies`.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, SupportsIndex, TypeVar

import torch
from torch import Tensor

from .errors import MaskError
from .mask_rules import can_read, dtype_name

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch has no `min` for these dtypes


def as_integers(value: Tensor | Sequence[int] | None) -> Tensor:
    """Return the value as a tensor; a list becomes one in CPU memory, which calls move to their device."""
    return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")


def _is_integer(tensor: Tensor) -> bool:
    dtype = tensor.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def as_padding(value: Tensor | Sequence[int], name: str) -> Tensor:
    """Return lengths int [B], or real positions bool [B, length], after checks."""
    lengths = as_integers(value)
    if lengths.dtype == torch.bool and lengths.ndim == 2:
        return lengths
    if lengths.dtype in UNSIGNED:
        lengths = lengths.long()
    if not (_is_integer(lengths) and lengths.ndim == 1):
        raise MaskError(
            f"{name} must be integers [B] or bool [B, length]: got {dtype_name(lengths)}"
            f"{list(lengths.shape)}; convert a mask of 0 and 1 with mask.bool()"
        )
    if can_read(lengths) and lengths.numel() and int(lengths.min()) < 0:
        raise MaskError(f"{name} must not be negative: got {int(lengths.min())}; use 0 for no tokens")
    return lengths


def as_ids(value: Tensor | Sequence[int], name: str) -> Tensor:
    """Return document ids as labels, int [B or 1, length, 1]."""
    ids = as_integers(value)
    if not _is_integer(ids) or ids.ndim not in (1, 2):
        raise MaskError(
            f"document {name} must be integers [S] or [B, S]: got {dtype_name(ids)}{list(ids.shape)}; "
            "number the documents 0, 1, 2, ..."
        )
    return ids.unsqueeze(2) if ids.ndim == 2 else ids.view(1, ids.shape[0], 1)  # [B or 1, S, 1]


def whole_number(number: object, name: str) -> int:
    """Return a count of keys as an int, or raise `MaskError`."""
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        raise MaskError(f"{name} must be a whole number: got {number!r}; give a number of keys, e.g. 256")
    return operator.index(number)


def as_allowed(value: Tensor) -> Tensor:
    """Return a dense mask as bool, 4-D."""
    if isinstance(value, (str, bool)):  # the name of a rule, or a value of causal=
        raise MaskError(
            f"mask must be a Mask or a tensor: got {value!r}; for a causal mask use headwise.Mask.causal() "
            "or causal=True; None hides nothing"
        )
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
            _check_binary(value)
        value = value != 0
    return value[(None,) * (4 - value.ndim)]


def _check_binary(value: Tensor) -> None:
    strange = value[(value != 0) & (value != 1)]
    if strange.numel():
        raise MaskError(
            f"mask must hold 0 and 1 only: found {strange[0].item():g}; 1 = may attend; pass numbers to be "
            "added to the scores as bias="
        )
    if value.is_floating_point() and not value.any():
        raise MaskError(
            f"float mask must not be all zeros: got {list(value.shape)}, which would hide every key; for an "
            "additive mask that hides nothing use mask=None; to hide everything use a bool mask"
        )


def check_meaning(mask: Tensor, allowed: Tensor, may_be_padding: bool) -> None:
    """Raise `MaskError` where a mask tensor reads as if True meant hidden, or as padding.

    Call it only where reading values is free. `Mask.dense(mask)` is never checked.

    Args:
        mask: the tensor of the user; `allowed` is the same as `as_allowed` reads it.
        may_be_padding: whether its rows might be sequences as well as queries.
    """
    _, _, T, S = shape = allowed.shape
    if 0 in shape:
        return
    # The first bool rules out most masks; `as_strided` reads it in one operation, [0, 0, 0, 0] in four.
    # With one query the opposite of causal hides all keys, which a mask may do.
    opposite = 1 < T <= S and not allowed.as_strided((), ()) and _is_opposite_of_causal(allowed)
    lengths = _lengths_in_rows(allowed[0, 0]) if may_be_padding and not opposite else None
    if not opposite and lengths is None:
        return
    shown = f"{dtype_name(mask)}{list(mask.shape)}"
    real, turned = ("mask", "~mask") if mask.dtype == torch.bool else ("mask.bool()", "~mask.bool()")
    if lengths is None:
        raise MaskError(
            f"mask must be True where a query may attend: got {shown}, a causal mask with True = hidden, as "
            f"in torch; pass {turned} or Mask.causal(), or Mask.dense(mask) if queries see only later keys"
        )
    some = ", ".join(map(str, lengths[:4])) + (", .." if len(lengths) > 4 else "")
    raise MaskError(
        f"mask must be [T, S] if it has two dimensions: got {shown}, whose rows look like padded sequences "
        f"({some} keys), not like queries; pass Mask.padding({real}) for one row per sequence "
        f"({turned} if True = padding), or Mask.dense(mask) for one row per query"
    )


def _is_opposite_of_causal(allowed: Tensor) -> bool:
    """Return True if a dense mask is `~causal`, or that with padding shown in some sequences."""
    beside = allowed[:, :, -1:]  # the keys that the last query sees: in torch's masks, padding
    padded = beside.any(-1)
    if padded.all() or (allowed.shape[1] > 1 and padded.any()):
        return False
    T, S = allowed.shape[2:]
    future = torch.ones(T, S, dtype=torch.bool, device=allowed.device).triu(S - T + 1)
    return torch.equal(allowed, future | beside)


def _lengths_in_rows(rows: Tensor) -> list[int] | None:
    """Return the number of keys in each row, where rows [T, S] read as padding and not as queries; else None.

    Rows read as padding if all begin at the first key and some row is shorter than an earlier one, or all end
    at the last key and some row is longer than an earlier one. Other rows are those of causal masks,
    prefixes, blocks and bands. Rows without a key are ignored.
    """
    counts, S = rows.sum(-1, keepdim=True), rows.shape[1]
    lengths: list[int] = counts.flatten().tolist()
    filled = [length for length in lengths if length]
    spots = torch.arange(S, device=rows.device)
    if filled != sorted(filled) and torch.equal(rows, spots < counts):
        return lengths
    if filled != sorted(filled, reverse=True) and torch.equal(rows, spots >= S - counts):
        return lengths
    return None


# Stored facts about masks


Fact = TypeVar("Fact")
Owner = weakref.ref[torch.UntypedStorage]
Entry = tuple[Tensor, dict[str, Any], Owner]  # bytes, facts by name, and a reference whose death frees them

ROOM = 2**27  # bytes of copies in all; the least recently used is freed first
LARGEST = ROOM // 2  # a larger tensor is read anew in every call

_facts: OrderedDict[Hashable, Entry] = OrderedDict()  # by place
_bytes_kept = 0  # bytes at most: copies freed with their owner are subtracted when space is needed
_lock = threading.Lock()


def clear_copies() -> None:
    """Free all private copies of masks; the next calls read their masks again."""
    global _bytes_kept
    with _lock:
        _facts.clear()
        _bytes_kept = 0


@torch.no_grad()
def fact(tensor: Tensor, question: str, find: Callable[[Tensor], Fact]) -> Fact:
    """Return `find(tensor)`, or the stored result if the tensor holds the same bytes as then.

    Args:
        tensor: in CPU memory, where reading is free (`can_read`).
        question: a name for `find`; one name, one function.
        find: reads values alone, never the identity of its argument. Its result is shared by later calls:
            it must not be written to.
    """
    once = _without_repeats(tensor.detach())
    if once.nbytes > LARGEST or not once.numel():
        return find(tensor)
    # The place is only a key: its entry counts if the bytes are the same.
    place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    with _lock:
        entry = _facts.get(place)
        if entry is not None:
            _facts.move_to_end(place)
    if entry is None or not _same(once, entry[0]):
        entry = _keep(place, once.clone(memory_format=torch.contiguous_format), tensor.untyped_storage())
    copy, answers, _ = entry
    if question not in answers:  # of the copy: another thread may write to the tensor meanwhile
        answers[question] = find(copy.expand(tensor.shape))
    result: Fact = answers[question]
    return result


def _keep(place: Hashable, copy: Tensor, storage: torch.UntypedStorage) -> Entry:
    global _bytes_kept
    # The callback may run at any moment, also while the lock is held, so it is one atomic operation.
    owner = weakref.ref(storage, partial(_drop, place))
    new: Entry = (copy, {}, owner)
    with _lock:
        _facts.pop(place, None)
        _facts[place] = new
        _bytes_kept += copy.nbytes
        if _bytes_kept > ROOM:
            _bytes_kept = sum(entry[0].nbytes for entry in tuple(_facts.values()))
        while _bytes_kept > ROOM:
            _bytes_kept -= _facts.popitem(last=False)[1][0].nbytes
    return new


def _drop(place: Hashable, owner: Owner, drop: Callable[..., object] = _facts.pop) -> None:
    drop(place, None)


def _without_repeats(tensor: Tensor) -> Tensor:
    """Return the tensor without the repeats of expanded dimensions."""
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _same(tensor: Tensor, copy: Tensor) -> bool:
    """Return True if two tensors of one shape hold the same bytes, NaN included; takes little memory."""
    if tensor.is_contiguous():
        tensor, copy = (x.reshape(-1).view(torch.uint8) for x in (tensor, copy))
        aligned = len(tensor) // 8 * 8
        if not torch.equal(tensor[aligned:], copy[aligned:]):
            return False
        tensor, copy = tensor[:aligned], copy[:aligned]
    many = max(1, 8 // tensor.element_size())
    in_words = tensor.shape[-1] % many == 0 and tensor.storage_offset() % many == 0
    if tensor.stride(-1) != 1:
        return torch.equal(tensor, copy)  # with a NaN they differ, and the tensor is read again
    words = torch.int64 if in_words and all(n % many == 0 for n in tensor.stride()[:-1]) else torch.uint8
    return torch.equal(tensor.view(words), copy.view(words))
