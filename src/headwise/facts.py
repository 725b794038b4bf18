"""What was found out about a tensor, used again only where the tensor is proved to be what it was.

Nothing a tensor carries tells that it was written to: `.data`, numpy and DLPack aliases, shared memory, a
broadcast between processes and everything under `inference_mode` count no version, and an address or an id is
somebody else's tomorrow. So an answer is kept beside a private copy of the bytes it was found in, and a call
that wants it compares the two first. On a CPU that is a hundredth of the forward it saves; elsewhere, where
looking at values stops the device, nothing is kept and nothing is read. A copy is freed together with
the memory that it was made of, or by `clear_copies`.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

Found = TypeVar("Found")
Owner = weakref.ref[torch.UntypedStorage]
Kept = tuple[Tensor, dict[str, Any], Owner]  # bytes, answers by name, and what frees them when it is gone

ROOM = 2**27  # bytes of copies in all; the one that was not asked for the longest goes first
LARGEST = ROOM // 2  # a larger tensor is read anew in every call

_kept: OrderedDict[Hashable, Kept] = OrderedDict()  # by place
_taken = 0  # bytes at most: what was freed with its owner is subtracted when room is needed
_lock = threading.Lock()


def clear_copies() -> None:
    """Free all private copies of masks; the next calls read their masks anew."""
    global _taken
    with _lock:
        _kept.clear()
        _taken = 0


@torch.no_grad()
def fact(tensor: Tensor, question: str, find: Callable[[Tensor], Found]) -> Found:
    """`find(tensor)`, or what it returned before if the tensor holds the same bytes now.

    Args:
        tensor: in CPU memory, where reading is free (`headwise.mask_rules.can_read`).
        question: a name for `find`; one name, one function.
        find: looks at values alone, never at the identity of what it is given. What it returns is shared by
            later calls: it must not be written to.
    """
    once = _without_repeats(tensor.detach())
    if once.nbytes > LARGEST or not once.numel():
        return find(tensor)
    # Only a place to look: what is found there counts if its bytes are the same.
    place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    with _lock:
        kept = _kept.get(place)
        if kept is not None:
            _kept.move_to_end(place)
    if kept is None or not _same(once, kept[0]):
        kept = _keep(place, once.clone(memory_format=torch.contiguous_format), tensor.untyped_storage())
    copy, answers, _ = kept
    if question not in answers:  # of the copy, so that the answer is of these bytes whoever writes meanwhile
        answers[question] = find(copy.expand(tensor.shape))
    answer: Found = answers[question]
    return answer


def _keep(place: Hashable, copy: Tensor, storage: torch.UntypedStorage) -> Kept:
    global _taken
    # May run at any moment, also while the lock is held: one operation, which needs no lock.
    owner = weakref.ref(storage, partial(_drop, place))
    new: Kept = (copy, {}, owner)
    with _lock:
        _kept.pop(place, None)
        _kept[place] = new
        _taken += copy.nbytes
        if _taken > ROOM:
            _taken = sum(kept[0].nbytes for kept in tuple(_kept.values()))
        while _taken > ROOM:
            _taken -= _kept.popitem(last=False)[1][0].nbytes
    return new


def _drop(place: Hashable, owner: Owner, drop: Callable[..., object] = _kept.pop) -> None:
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
        whole = len(tensor) // 8 * 8
        if not torch.equal(tensor[whole:], copy[whole:]):
            return False
        tensor, copy = tensor[:whole], copy[:whole]
    many = max(1, 8 // tensor.element_size())
    in_words = tensor.shape[-1] % many == 0 and tensor.storage_offset() % many == 0
    if tensor.stride(-1) != 1:
        return torch.equal(tensor, copy)  # where there is a NaN: read it again
    words = torch.int64 if in_words and all(n % many == 0 for n in tensor.stride()[:-1]) else torch.uint8
    return torch.equal(tensor.view(words), copy.view(words))
