"""What a mask of torch's says, where it may be read: on a CPU, by proof in every call (`facts.py`).

On a GPU, while compiling or exporting, and in tensors that learn, nothing is read: the mask is taken as it
is, on a GPU also as `is_causal` says.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...facts import fact
from ...mask_rules import can_read

__all__ = ["LOW", "LOWEST", "Content", "content_of", "has_low_rows", "read"]

LOWEST = -1e29  # finite numbers below this hide a key as well as this one, and no kernel takes it for -inf
LOW = -32.0  # a row that has nothing above this has a log-sum-exp that is too rough to get weights from


class Content(NamedTuple):
    """What a 2-D or 3-D mask holds."""

    nothing: bool  # it hides nothing and adds nothing
    causal: bool  # key j is hidden from query i where j > i, and nothing else
    low: bool  # finite numbers below LOW
    low_rows: bool  # a query for which there is nothing else


def content_of(mask: Tensor) -> Content | None:
    """What it holds; None where it must not be read."""
    return fact(mask, "content", read) if _may_read(mask) else None


def _may_read(mask: Tensor) -> bool:
    return (
        type(mask) in (Tensor, nn.Parameter)
        and not mask.requires_grad
        and can_read(mask)
        and torch._C._get_tracing_state() is None
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
