"""What ranks that share a layer's heads exchange, each exchange with its way back.

    entered     x, the same on every rank       <-- gradients summed       what goes into a rank's heads
    left        summed over ranks               <-- as it is               what comes out of all heads
    summed      summed over ranks               <-- gradients summed       a number of all heads, for each
    gathered    every rank's part, in order     <-- its own part           to look at all heads
    own_part    its own part of the whole       <-- every rank's part      and back to its own

Each is the way back of another, so that gradients of gradients flow as well.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Group", "entered", "gathered", "left", "own_part", "summed"]

Group = Any  # a torch.distributed.ProcessGroup, which some builds of torch do not have


def entered(x: Tensor, group: Group) -> Tensor:
    """The same x; its gradient is the sum over ranks, each of which has used it for heads of its own."""
    if not (torch.is_grad_enabled() and x.requires_grad) or group.size() == 1:
        return x
    return _Entered.apply(x, group)


def left(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, which all of them go on with alike."""
    return x if group.size() == 1 else _Left.apply(x, group)


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, which each of them uses in its own way."""
    return x if group.size() == 1 else _Summed.apply(x, group)


def gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    """The parts of all ranks one after another along a dimension, on every rank."""
    return x if group.size() == 1 else _Gathered.apply(x, dim, group)


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of x, which is the same on every rank: of n equal parts along a dimension."""
    return x if group.size() == 1 else _OwnPart.apply(x, dim, group)


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total


def _gather(x: Tensor, dim: int, group: Group) -> Tensor:
    sent = x.to(torch.uint8) if x.dtype == torch.bool else x
    first = sent.movedim(dim, 0).contiguous()
    parts = [torch.empty_like(first) for _ in range(group.size())]
    torch.distributed.all_gather(parts, first, group=group)
    return torch.cat(parts).movedim(0, dim).contiguous().to(x.dtype)


def _part(x: Tensor, dim: int, group: Group) -> Tensor:
    count = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * count, count).contiguous()


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Left.apply(grad, ctx.group), None


class _Left(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return entered(grad, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Summed.apply(grad, ctx.group), None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gather(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _OwnPart.apply(grad, ctx.dim, ctx.group), None, None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _part(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Gathered.apply(grad, ctx.dim, ctx.group), None, None
