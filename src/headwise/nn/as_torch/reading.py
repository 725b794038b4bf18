"""What a mask of torch's says, read once for as long as the tensor lives unchanged.

Reading values on a GPU stops it for a moment, so it is done once a tensor: what was found is kept beside a
weak reference and the version of what was read. Where values must not be looked at (while compiling or
exporting, while a graph is captured, in tensors without versions) nothing is read, and the mask is taken as
it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from ...engines.plain import transforms_are_active

__all__ = ["LOWEST", "Content", "content_of"]

LOWEST = -1e29  # finite numbers below this hide a key as well as this one, and no kernel takes it for -inf


class Content(NamedTuple):
    """What a 2-D or 3-D mask holds."""

    nothing: bool  # it hides nothing and adds nothing
    causal: bool  # key j is hidden from query i where j > i, and nothing else
    low: bool  # finite numbers below LOWEST


class _Known(NamedTuple):
    tensor: Any  # a weak reference
    version: int
    content: Content


known: dict[int, _Known] = {}


def content_of(mask: Tensor) -> Content | None:
    """What it holds; None where it must not be read."""
    if not _may_read(mask):
        return None
    there = id(mask)
    found = known.get(there)
    if found is not None and found.tensor() is mask and found.version == mask._version:
        return found.content
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    content = _read(mask)
    known[there] = _Known(ref(mask, lambda _: known.pop(there, None)), mask._version, content)
    return content


def _may_read(mask: Tensor) -> bool:
    return (
        type(mask) is Tensor
        and not torch.compiler.is_compiling()
        and not mask.requires_grad
        and not mask.is_inference()
        and mask.device.type in ("cpu", "cuda")
        and torch._C._get_tracing_state() is None
        and not transforms_are_active()
    )


@torch.no_grad()
def _read(mask: Tensor) -> Content:
    hidden = mask if mask.dtype == torch.bool else mask == -torch.inf
    if mask.dtype == torch.bool:
        bare = True
        low = False
    else:
        lowest = mask.masked_fill(hidden, 0)
        bare, low = not bool(lowest.any()), bool((lowest < LOWEST).any())
    if not bare:
        return Content(nothing=False, causal=False, low=low)
    if not bool(hidden.any()):
        return Content(nothing=True, causal=False, low=False)
    L, S = mask.shape[-2:]
    causal = mask.dim() == 2 and torch.equal(hidden, hidden.new_ones(L, S).triu_(1))
    return Content(nothing=False, causal=causal, low=False)
