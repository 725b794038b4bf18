"""Running another body, or other numbers, through the plain probe."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .calling import Caller
from .encoding import express
from .mask_probes import padding_mask
from .probing import causal_mask
from .reacting import inputs_for

__all__ = ["SAME", "cast", "plain", "run_body", "share_off", "some_mask"]

SAME = 1e-9


def share_off(found: Tensor, wanted: Tensor) -> float:
    """The largest difference as a share of the largest number."""
    if found.shape != wanted.shape:
        return float("inf")
    off = (found.double() - wanted.double()).abs().max() / wanted.abs().max().clamp_min(1e-30)
    return float(off.nan_to_num(torch.inf))


def plain(caller: Caller) -> tuple[Tensor, Tensor, Tensor]:
    length = caller.subject.sizes.long
    return inputs_for(caller, length, length, seed=100)


def run_body(caller: Caller, body: object, seed: int = 0, calm: bool = False) -> Tensor:
    """The plain probe through another body."""
    other = replace(caller, subject=replace(caller.subject, body=body, calm=calm))
    with torch.no_grad():
        return other.call(*plain(caller), seed=seed).output.detach()


def some_mask(caller: Caller) -> Tensor | None:
    """bool [B, T, S] that can be said and leaves no row empty."""
    B, L = caller.subject.sizes.B, caller.subject.sizes.long
    if caller.plan.layout == "one sequence":
        return None
    for mask in (padding_mask(B, L, L), causal_mask(B, L, L), padding_mask(B, L, L, same=True)):
        if caller.ways and express(caller.ways, mask, caller.subject.sizes.H) is not None:
            return mask
    return None


def cast(inputs: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """In another dtype; what was one tensor stays one."""
    made = {id(one): one.to(dtype) for one in inputs}
    query, key, value = (made[id(one)] for one in inputs)
    return query, key, value
