"""A mask in the learner's own convention.

Ours: bool [B, T, S], True = may attend.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FULL", "PADDING", "SAME_FOR_ALL", "Way", "encode", "express"]

FULL = ("[B, 1, T, S]", "[B, T, S]", "[B*H, T, S]", "[B, H, T, S]", "[T, S, B]", "[T, S, B, 1]")
SAME_FOR_ALL = ("[T, S]", "[1, 1, T, S]", "[1, T, S]")
PADDING = ("[B, S]", "[B, 1, 1, S]", "[B, 1, S]", "[S]", "[S, B]")


@dataclass(frozen=True)
class Way:
    """How one argument takes a mask."""

    argument: str
    shape: str  # one of the above; "[B]" and "[B, T]" for lengths; "" for a switch
    kind: str = "bool"  # "bool", "0 and 1", "added", "lengths", "switch"
    true_attends: bool = True
    number: torch.dtype = torch.float64  # of the 0 and 1, or what is added
    hidden: float = -torch.inf  # what is added where it hides


def _shaped(mask: Tensor, shape: str, num_heads: int) -> Tensor | None:
    """bool [B, T, S] in this shape; None where the shape cannot say it."""
    B, T, S = mask.shape
    if shape in SAME_FOR_ALL or shape == "[S]":
        if not bool((mask == mask[:1]).all()):
            return None
        mask = mask[:1]
    if shape in PADDING:
        if not bool((mask == mask[:, :1]).all()):
            return None
        mask = mask[:, :1]
    return {
        "[B, 1, T, S]": lambda: mask[:, None],
        "[B, T, S]": lambda: mask,
        "[B, H, T, S]": lambda: mask[:, None].expand(B, num_heads, T, S).contiguous(),
        "[B*H, T, S]": lambda: mask.repeat_interleave(num_heads, 0),
        "[T, S, B]": lambda: mask.permute(1, 2, 0).contiguous(),
        "[T, S, B, 1]": lambda: mask.permute(1, 2, 0).contiguous()[..., None],
        "[T, S]": lambda: mask[0],
        "[1, 1, T, S]": lambda: mask[:, None],
        "[1, T, S]": lambda: mask,
        "[B, S]": lambda: mask[:, 0],
        "[S, B]": lambda: mask[:, 0].T.contiguous(),
        "[B, 1, 1, S]": lambda: mask[:, None],
        "[B, 1, S]": lambda: mask,
        "[S]": lambda: mask[0, 0],
    }[shape]()


def _lengths(mask: Tensor, shape: str) -> Tensor | None:
    """How many keys from the first each query may see; None for a mask with holes."""
    seen = mask.sum(-1)  # [B, T]
    prefix = torch.arange(mask.shape[-1]) < seen[..., None]  # [B, T, S]
    if not torch.equal(prefix, mask):
        return None
    if shape == "[B]":
        return seen[:, 0] if bool((seen == seen[:, :1]).all()) else None
    return seen


def encode(way: Way, mask: Tensor, num_heads: int) -> object:
    """A mask, bool [B, T, S], as this argument wants it; None where it cannot say it."""
    if way.kind == "switch":
        causal = torch.ones(mask.shape[1:], dtype=torch.bool).tril()
        if bool(mask.all()):
            return False
        return True if torch.equal(mask, causal.expand_as(mask)) else None
    if way.kind == "lengths":
        return _lengths(mask, way.shape)
    shaped = _shaped(mask, way.shape, num_heads)
    if shaped is None:
        return None
    if way.kind == "added":
        return torch.zeros(shaped.shape, dtype=way.number).masked_fill(~shaped, way.hidden)
    shaped = shaped if way.true_attends else ~shaped
    return shaped.clone() if way.kind == "bool" else shaped.to(way.number)


def express(ways: tuple[Way, ...], mask: Tensor, num_heads: int) -> dict[str, object] | None:
    """The arguments that say this mask; None where they cannot.

    A mask that is padding goes through the argument for padding where there is one; padding and a triangle
    through both.
    """
    for way in sorted(ways, key=lambda one: one.shape not in PADDING):
        value = encode(way, mask, num_heads)
        if value is not None:
            return {way.argument: value}
    if len(ways) == 2:
        every, keys = mask.any(0, keepdim=True).expand_as(mask), mask.any(1, keepdim=True).expand_as(mask)
        if torch.equal(every & keys, mask):
            padding, full = sorted(ways, key=lambda one: one.shape not in PADDING)
            pair = encode(padding, keys, num_heads), encode(full, every, num_heads)
            if pair[0] is not None and pair[1] is not None:
                return {padding.argument: pair[0], full.argument: pair[1]}
    return None
