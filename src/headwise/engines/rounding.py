"""How well a log-sum-exp stands for its row: what rounding leaves of it, and whether it is this row's at all.

A float32 lse of 300 is rounded by up to 1.5e-5, and exp(s - lse) is off by as much; one of 1e9 by 32. So
rows whose lse is ROUGH are anchored anew, at their own largest score (`walk.py`).

A map keeps q, k and a dense mask themselves, not copies. Where they were overwritten in a way that nobody
counts, the lse is no longer their rows', and the weights made of them have a mass that is not 1 beyond
rounding. That is refused here, and never divided away.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..mask_rules import can_read
from .scores import Scores, Tiled

__all__ = ["FAR", "REACH", "ROUGH", "SOME", "check_mass", "check_rows", "evenly", "is_rough"]

ROUGH = 16.0  # from here on half a unit in the last place of a float32 is as much as softmax is off by
REACH = 2.0**8  # from here on, kernels' own ways of merging parts and of going back are too rough as well
FAR = 2.0**20  # from here on exp(s - lse) may be out of all range: dividing it by its sum comes too late
SLACK = 2.0**-14  # what is not worth a closer look
SOME = 8  # queries that stand for all where only a few keys of each are looked at


def is_rough(lse: Tensor, limit: float = ROUGH) -> bool:
    """Whether some row's lse is larger than `limit`; where it must not be read, it may well be."""
    if lse.dtype == torch.float64 or not lse.numel():
        return False
    if not can_read(lse):
        return True
    return float(torch.nan_to_num(lse, nan=0.0, posinf=0.0, neginf=0.0).abs().max()) > limit


def check_mass(scores: Tiled, rows: slice, lse: Tensor, mass: Tensor) -> None:
    """Raise unless the weights of a block of queries sum to 1: mass [B, H, t], a sink's share included.

    Raises:
        ArgumentError: they do not, by more than rounding.
    """
    if isinstance(scores, Scores) and can_read(lse):
        off = torch.where(torch.isneginf(lse) & (mass == 0), 0.0, mass.log())
        _check(scores, rows, lse, off)


def check_rows(scores: Tiled, rows: slice, lse: Tensor, now: Tensor) -> None:
    """Raise unless `now`, the lse of a block of queries worked out anew, is the one that is kept.

    Raises:
        ArgumentError: it is not, by more than rounding.
    """
    if isinstance(scores, Scores) and can_read(lse):
        off = torch.where(torch.isneginf(lse) & torch.isneginf(now), 0.0, now - lse)
        _check(scores, rows, lse, off)


def evenly(size: int) -> Tensor:
    """SOME of 0 .. size - 1, from the first to the last."""
    return torch.linspace(0, size - 1, min(SOME, size), dtype=torch.float64, device="cpu").round().long()


def _check(scores: Scores, rows: slice, lse: Tensor, off: Tensor) -> None:
    """`off` [B, H, t]: by how much the logarithm of a row's mass is off."""
    strange = off.abs() > SLACK  # a NaN speaks for itself
    if not bool(strange.any()):
        return
    strange &= (off.abs() > _bound(scores, rows, lse)) & ~torch.isposinf(lse)
    if not bool(strange.any()):
        return
    b, h, i = (int(n) for n in strange.nonzero()[0])
    raise ArgumentError(
        "q, k, mask and bias must not change while their map is in use: the weights of a query now sum to "
        f"{float(off[b, h, i].exp()):.6g}, not 1 (sequence {b}, head {h}, query {rows.start + i} of those "
        "looked at); pass q.clone() and k.clone(), or look before writing"
    )


def _bound(scores: Scores, rows: slice, lse: Tensor) -> Tensor:
    """What rounding may come to, [B, H, t]: of the products, of what is added to them, and of lse."""
    half = scores.given_dtype in (torch.float16, torch.bfloat16)
    unit = torch.finfo(torch.float64 if lse.dtype == torch.float64 else torch.float32).eps
    q, k = scores.q[:, :, rows].to(lse.dtype), scores.k.to(lse.dtype)
    longest = torch.nan_to_num(k.norm(dim=-1)).amax(-1).repeat_interleave(scores.group, dim=1)  # [B, H]
    products = q.norm(dim=-1) * longest[..., None] * abs(scores.scoring.scale) * (q.shape[-1] + 8)
    added = torch.zeros(())
    for value in scores.scoring.tensors.values():
        finite = torch.where(value > -1e29, value.detach().to(lse.dtype), 0.0)
        finite = torch.nan_to_num(finite, nan=0.0, posinf=0.0).abs().max()
        added = added + finite * (scores.shape[3] if value is scores.scoring.slopes else 1)
    of_lse = torch.nan_to_num(lse, neginf=0.0).abs()
    return 4 * unit * (products + added + of_lse) + (2.0**-8 if half else 0.0)
