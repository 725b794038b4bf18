"""What a mask of torch's says, read once for as long as the tensor lives unchanged.

Reading values on a GPU stops it for a moment, so it is done once a tensor: what was found is kept beside a
weak reference and the version of what was read. A part of a larger tensor (`mask[:L, :L]`, new in every call)
is known by the larger one and its place in it. Where values must not be looked at (while compiling or
exporting, while a graph is captured, in tensors without versions) nothing is read, and the mask is taken as
it is; so are masks on a GPU that come new in every call, once that has been noticed.

What counts no version (writing through `.data`, or to memory shared with numpy) goes unnoticed, as it does in
autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ...engines.plain import transforms_are_active

__all__ = ["LOW", "LOWEST", "Content", "content_of", "has_low_rows", "known", "read"]

LOWEST = -1e29  # finite numbers below this hide a key as well as this one, and no kernel takes it for -inf
LOW = -32.0  # a row that has nothing above this has a log-sum-exp that is too rough to get weights from
PATIENCE = 8  # masks on a GPU read for a single call, one after another, until new ones are no longer read


class Content(NamedTuple):
    """What a 2-D or 3-D mask holds."""

    nothing: bool  # it hides nothing and adds nothing
    causal: bool  # key j is hidden from query i where j > i, and nothing else
    low: bool  # finite numbers below LOW
    low_rows: bool  # a query for which there is nothing else


class _Known:
    """A tensor that was seen, and what was read of it and its parts, by their places in it."""

    __slots__ = ("contents", "tensor", "unused", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = ref(tensor, _forget(id(tensor))), tensor._version
        self.contents: dict[Any, Content | None] = {}  # None: seen, not read
        self.unused = tensor.is_cuda  # only a GPU is kept waiting by what is read in vain


known: dict[int, _Known] = {}
_wasted = 0  # masks on a GPU that served a single call, since one came again


def _forget(there: int) -> Callable[[Any], None]:
    def died(_: Any) -> None:
        _count(known.pop(there, None))

    return died


def _count(gone: _Known | None) -> None:
    global _wasted
    _wasted += gone is not None and gone.unused


def content_of(mask: Tensor) -> Content | None:
    """What it holds; None where it must not be read."""
    global _wasted
    if not _may_read(mask):
        return None
    owner = mask if mask._base is None else mask._base
    place = (mask.dtype, mask.shape, mask.stride(), mask.data_ptr())
    found = known.get(id(owner))
    if found is None or found.tensor() is not owner or found.version != owner._version:
        _count(found)
        found = known[id(owner)] = _Known(owner)
    elif place in found.contents:
        if found.unused:
            found.unused, _wasted = False, 0
        content = found.contents[place]
        if content is not None:
            return content
    if mask.is_cuda:
        tired = _wasted >= PATIENCE and place not in found.contents
        if tired or torch.cuda.is_current_stream_capturing():
            found.contents[place] = None  # read if it comes again
            return None
    content = found.contents[place] = read(mask)
    return content


def _may_read(mask: Tensor) -> bool:
    return (
        type(mask) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
        and not mask.requires_grad
        and not mask.is_inference()
        and mask.device.type in ("cpu", "cuda")
        and torch._C._get_tracing_state() is None
        and not transforms_are_active()
    )


@torch.no_grad()
def read(mask: Tensor) -> Content:
    """Look at the values."""
    if mask.dtype == torch.bool:
        hidden = mask
    else:
        hidden = mask == -torch.inf
        rest = mask.masked_fill(hidden, 0)
        if bool(rest.any()):
            low = bool((rest < LOW).any())
            return Content(nothing=False, causal=False, low=low, low_rows=low and has_low_rows(mask))
    if not bool(hidden.any()):
        return Content(nothing=True, causal=False, low=False, low_rows=False)
    L, S = mask.shape[-2:]
    causal = mask.dim() == 2 and torch.equal(hidden, hidden.new_ones(L, S).triu_(1))
    return Content(nothing=False, causal=causal, low=False, low_rows=False)


def has_low_rows(added: Tensor) -> bool:
    """Whether some query is left with finite numbers below LOW alone."""
    if not added.numel():
        return False
    highest = added.detach().amax(-1)
    return bool(((highest < LOW) & (highest > -torch.inf)).any())
