"""`LocalHeads`: which heads of a layer this process holds, and what ranks that share heads exchange.

Heads lie over ranks in order: with 8 heads on 4 ranks, rank 1 holds heads 2 and 3. Where there are fewer key
and value heads than ranks, ranks that need the same one hold it each.

    8 heads, 2 key heads, 4 ranks      rank     0     1     2     3
                                       heads   0 1   2 3   4 5   6 7
                                       keys     0     0     1     1

What a call is given of all heads is cut to those that are here; what every head uses alike collects the
gradients of all ranks. Each exchange has its way back, which is another one, so that gradients of gradients
flow as well:

    entered     x, the same on every rank       <-- gradients summed       what goes into a rank's heads
    left        summed over ranks               <-- as it is               what comes out of all heads
    summed      summed over ranks               <-- gradients summed       a number of all heads, for each
    gathered    every rank's part, in order     <-- its own part           to look at all heads
    own_part    its own part of the whole       <-- every rank's part      and back to its own

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engines.scores import Scores
from ..errors import ShapeError
from ..map import AttentionMap, make
from ..masks import Mask, mask_of_call
from ..scoring import Alibi, Bias, Relative

__all__ = ["Group", "LocalHeads", "entered", "gathered", "left", "own_part", "summed"]

Group = Any  # a torch.distributed.ProcessGroup, which some builds of torch do not have


@dataclass(frozen=True, eq=False)
class LocalHeads:
    """The heads `first` to `first + count - 1` of `total`, and the key and value heads they use."""

    first: int
    count: int
    total: int
    kv_count: int
    kv_total: int
    group: Group  # of the ranks that share the layer

    def __deepcopy__(self, _: object) -> LocalHeads:
        return self  # a group of processes has no copy

    def __str__(self) -> str:
        last = self.first + self.count - 1
        here = f"head {last}" if self.count == 1 else f"heads {self.first} to {last}"
        return f"{here} of {self.total}"

    @property
    def kv_first(self) -> int:
        """The first key head that is here."""
        return self.first * self.kv_total // self.total

    # What a call is given

    def mask(self, mask: Mask | Tensor | None, batch: int, query_len: int) -> Mask | Tensor | None:
        """A mask of all heads, as it is for those that are here.

        Raises:
            ShapeError: one of another number of heads.
            MaskError: a tensor that is no mask.
        """
        if isinstance(mask, Tensor):
            if mask.ndim not in (3, 4) or mask.shape[-3] == 1:
                return mask
            mask = mask_of_call(mask, batch, query_len)  # all of it is looked at: every rank says the same
        if not isinstance(mask, Mask) or mask.allowed is None or mask.allowed.shape[1] == 1:
            return mask
        allowed = self._cut(mask.allowed, "mask")
        if self.count == 1 and allowed.shape[2] == 1:  # one head's rule reads as padding of all otherwise
            if query_len > 1:
                allowed = allowed.expand(-1, -1, query_len, -1)
            elif mask.keys is None and allowed.shape[3] > 1:
                mask = replace(mask, keys=allowed.new_ones(batch, allowed.shape[3]))
        return replace(mask, allowed=allowed)

    def bias(self, bias: Bias | None) -> Bias | None:
        """A bias of all heads, as it is for those that are here; gradients are those of all ranks.

        Raises:
            ShapeError: one of another number of heads.
        """
        if isinstance(bias, tuple):
            return tuple(self._one_bias(part) for part in bias)
        return None if bias is None else self._one_bias(bias)

    def _one_bias(self, bias: Tensor | Alibi | Relative) -> Tensor | Alibi | Relative:
        if isinstance(bias, Alibi):
            return Alibi(self._of_heads(bias.slopes, "slopes"))
        if isinstance(bias, Relative):
            return Relative(self._of_heads(bias.values, "relative"))
        return self._cut(bias, "bias") if isinstance(bias, Tensor) else bias

    def _of_heads(self, values: Tensor, name: str) -> Tensor:
        """Of numbers [H, ..] those of the heads that are here."""
        if not values.ndim or values.shape[0] != self.total:
            raise ShapeError(
                f"{name} must be those of all heads: {list(values.shape)} for {self.total} heads; give "
                f"{self.total}, of which {self} are cut out here"
            )
        return own_part(values, 0, self.group)

    def _cut(self, x: Tensor, name: str) -> Tensor:
        """Of x, broadcastable to [B, H, T, S], what is of the heads that are here."""
        if x.ndim < 3 or x.ndim > 4 or x.shape[-3] == 1:  # the same for all heads, or refused by others
            return entered(x, self.group)
        if x.shape[-3] != self.total:
            raise ShapeError(
                f"{name} must broadcast to [B, H, T, S] of all {self.total} heads: got {list(x.shape)}; of "
                f"these {self} are cut out here"
            )
        return own_part(x, x.ndim - 3, self.group)

    # What is looked at

    def whole(self, x: Tensor, dim: int = 1) -> Tensor:
        """Of numbers of the heads that are here those of all heads, on every rank."""
        return gathered(x, dim, self.group)

    def whole_kv(self, x: Tensor) -> Tensor:
        """The same of keys or values, [B, Hk, S, ..]; those that several ranks hold once."""
        every = gathered(x, 1, self.group)
        copies = every.shape[1] // self.kv_total
        return every if copies == 1 else every[:, ::copies]

    def whole_map(self, weights: AttentionMap) -> AttentionMap:
        """The map of all heads, [B, H, T, S], on every rank."""
        scores, lse, columns = weights.as_made
        assert isinstance(scores, Scores), "weights that a model computed itself are refused before"
        scoring, mask = scores.scoring, scores.mask
        own = {
            name: gathered(value, 0, self.group) for name, value in scoring.tensors.items() if name != "bias"
        }
        if scoring.bias is not None:
            own["bias"] = self._spread(scoring.bias)
        if own:
            scoring = replace(scoring, **own)  # type: ignore[arg-type]
        if mask.allowed is not None:
            mask = replace(mask, allowed=self._spread(mask.allowed))
        whole = replace(scores, q=self.whole(scores.q), k=self.whole_kv(scores.k), mask=mask, scoring=scoring)
        return make(whole, None if lse is None else self.whole(lse), columns)

    def _spread(self, x: Tensor) -> Tensor:
        """x [B or 1, heads or 1, ..] of all heads; of one head nobody knows whether it is for all of them."""
        return gathered(x, 1, self.group) if x.shape[1] == self.count else x

    def own(self, x: Tensor) -> Tensor:
        """Of what all heads say, [B, H, T, Dv], what those say that are here."""
        return own_part(x, 1, self.group)

    def agree(self, x: Tensor) -> Tensor:
        """x of the first of the ranks, on all of them."""
        if self.group.size() > 1:
            with torch.inference_mode(x.is_inference()):
                x = x.clone()
                torch.distributed.broadcast(x, group=self.group, group_src=0)
        return x


# What ranks exchange


class _Exchange(torch.autograd.Function):
    """`forth(x)`, whose gradient goes through `back`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def entered(x: Tensor, group: Group) -> Tensor:
    """The same x; its gradient is the sum over ranks, each of which has used it for heads of its own."""
    if not (torch.is_grad_enabled() and x.requires_grad) or group.size() == 1:
        return x
    return _Exchange.apply(x, lambda x: x.view_as(x), lambda grad: left(grad, group))


def left(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, which all of them go on with alike."""
    if group.size() == 1:
        return x
    return _Exchange.apply(x, lambda x: _sum(x, group), lambda grad: entered(grad, group))


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over ranks, which each of them uses in its own way."""
    if group.size() == 1:
        return x
    return _Exchange.apply(x, lambda x: _sum(x, group), lambda grad: summed(grad, group))


def gathered(x: Tensor, dim: int, group: Group) -> Tensor:
    """The parts of all ranks one after another along a dimension, on every rank."""
    if group.size() == 1:
        return x
    return _Exchange.apply(x, lambda x: _gather(x, dim, group), lambda grad: own_part(grad, dim, group))


def own_part(x: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's part of x, which is the same on every rank: of n equal parts along a dimension."""
    if group.size() == 1:
        return x
    return _Exchange.apply(x, lambda x: _part(x, dim, group), lambda grad: gathered(grad, dim, group))


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
