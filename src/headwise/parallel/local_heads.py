"""`LocalHeads`: the heads of a layer on this process, and the exchanges between ranks that share a layer.

Heads are sharded over ranks in order: of 8 heads on 4 ranks, rank 1 has heads 2 and 3. If there are fewer key
and value heads than ranks, several ranks have the same one.

    8 heads, 2 key heads, 4 ranks      rank     0     1     2     3
                                       heads   0 1   2 3   4 5   6 7
                                       keys     0     0     1     1

A call's mask and bias are given for all heads and cut to those of this rank. Each exchange is differentiable;
its backward is another exchange, so that second derivatives work, too:

    function            forward                                  backward
    copy_to_ranks       x, which every rank has                  sum of the ranks' gradients
    reduce_from_ranks   sum over ranks, used identically         the gradient unchanged
    sum_over_ranks      sum over ranks, used differently         sum of the ranks' gradients
    gather_from_ranks   all ranks' parts, concatenated           this rank's part
    part_of_rank        this rank's part of the whole            all ranks' parts, concatenated

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
        heads = f"head {last}" if self.count == 1 else f"heads {self.first} to {last}"
        return f"{heads} of {self.total}"

    @property
    def kv_first(self) -> int:
        """The index of the first key head on this rank."""
        return self.first * self.kv_total // self.total

    # The arguments of a call

    def mask(self, mask: Mask | Tensor | None, batch: int, query_len: int) -> Mask | Tensor | None:
        """Cut a mask for all heads to the heads of this rank."""
        if isinstance(mask, Tensor):
            if mask.ndim not in (3, 4) or mask.shape[-3] == 1:
                return mask
            mask = mask_of_call(mask, batch, query_len)  # checked before the cut, so that every rank raises
        if not isinstance(mask, Mask) or mask.allowed is None or mask.allowed.shape[1] == 1:
            return mask
        allowed = self._cut(mask.allowed, "mask")
        if (
            self.count == 1 and allowed.shape[2] == 1
        ):  # otherwise the mask of one head would be treated as padding
            if query_len > 1:
                allowed = allowed.expand(-1, -1, query_len, -1)
            elif mask.keys is None and allowed.shape[3] > 1:
                mask = replace(mask, keys=allowed.new_ones(batch, allowed.shape[3]))
        return replace(mask, allowed=allowed)

    def bias(self, bias: Bias | None) -> Bias | None:
        """Cut a bias for all heads to the heads of this rank; its gradient is collected from all ranks."""
        if isinstance(bias, tuple):
            return tuple(self._cut_bias(part) for part in bias)
        return None if bias is None else self._cut_bias(bias)

    def _cut_bias(self, bias: Tensor | Alibi | Relative) -> Tensor | Alibi | Relative:
        """Cut one bias to the heads of this rank."""
        if isinstance(bias, Alibi):
            return Alibi(self._of_heads(bias.slopes, "slopes"))
        if isinstance(bias, Relative):
            return Relative(self._of_heads(bias.values, "relative"))
        return self._cut(bias, "bias") if isinstance(bias, Tensor) else bias

    def _of_heads(self, values: Tensor, name: str) -> Tensor:
        """Return this rank's part of values [H, ..]."""
        if not values.ndim or values.shape[0] != self.total:
            raise ShapeError(
                f"{name} must have values for all {self.total} heads: got {list(values.shape)}; each rank "
                f"selects its own (here {self})"
            )
        return part_of_rank(values, 0, self.group)

    def _cut(self, x: Tensor, name: str) -> Tensor:
        """Return this rank's heads of x, which broadcasts to [B, H, T, S]."""
        if x.ndim < 3 or x.ndim > 4 or x.shape[-3] == 1:  # the same for all heads, or refused later
            return copy_to_ranks(x, self.group)
        if x.shape[-3] != self.total:
            raise ShapeError(
                f"{name} must broadcast to [B, H, T, S] of all {self.total} heads: got {list(x.shape)}; each "
                f"rank selects its own (here {self})"
            )
        return part_of_rank(x, x.ndim - 3, self.group)

    # All heads from those of each rank

    def gather(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather a tensor of this rank's heads into one of all heads, on every rank."""
        return gather_from_ranks(x, dim, self.group)

    def gather_kv(self, x: Tensor) -> Tensor:
        """Gather keys or values [B, Hk, S, ..]; key heads that several ranks have are taken once."""
        gathered = gather_from_ranks(x, 1, self.group)
        copies = gathered.shape[1] // self.kv_total
        return gathered if copies == 1 else gathered[:, ::copies]

    def gather_map(self, weights: AttentionMap) -> AttentionMap:
        """Gather the map of all heads, [B, H, T, S], on every rank."""
        scores, lse, columns = weights.as_made
        assert isinstance(scores, Scores), "weights that a model computed itself were refused before"
        scoring, mask = scores.scoring, scores.mask
        tensors = {
            name: gather_from_ranks(value, 0, self.group)
            for name, value in scoring.tensors.items()
            if name != "bias"
        }
        if scoring.bias is not None:
            tensors["bias"] = self._spread(scoring.bias)
        if tensors:
            scoring = replace(scoring, **tensors)  # type: ignore[arg-type]
        if mask.allowed is not None:
            mask = replace(mask, allowed=self._spread(mask.allowed))
        gathered = replace(
            scores, q=self.gather(scores.q), k=self.gather_kv(scores.k), mask=mask, scoring=scoring
        )
        return make(gathered, None if lse is None else self.gather(lse), columns)

    def _spread(self, x: Tensor) -> Tensor:
        """Gather x [B or 1, heads or 1, ..]; one that is the same for all heads is returned unchanged."""
        return gather_from_ranks(x, 1, self.group) if x.shape[1] == self.count else x

    def part(self, x: Tensor) -> Tensor:
        """Return this rank's part of the outputs of all heads, [B, H, T, Dv]."""
        return part_of_rank(x, 1, self.group)

    def agree(self, x: Tensor) -> Tensor:
        """Return the first rank's x, on every rank."""
        if self.group.size() > 1:
            with torch.inference_mode(x.is_inference()):
                x = x.clone()
                torch.distributed.broadcast(x, group=self.group, group_src=0)
        return x


# Exchanges between ranks


class _Exchange(torch.autograd.Function):
    """`forth(x)`, whose backward is `back`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, forth: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return forth(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def copy_to_ranks(x: Tensor, group: Group) -> Tensor:
    """Return x, which every rank uses for its own heads; the gradient is the sum over ranks."""
    if not (torch.is_grad_enabled() and x.requires_grad) or group.size() == 1:
        return x
    return _Exchange.apply(x, lambda x: x.view_as(x), lambda grad: reduce_from_ranks(grad, group))


def reduce_from_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks; all of them use it identically, so gradients are not summed."""
    if group.size() == 1:
        return x
    return _Exchange.apply(x, lambda x: _sum(x, group), lambda grad: copy_to_ranks(grad, group))


def sum_over_ranks(x: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks; each uses it differently, so gradients are summed."""
    if group.size() == 1:
        return x
    return _Exchange.apply(x, lambda x: _sum(x, group), lambda grad: sum_over_ranks(grad, group))


def gather_from_ranks(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return the parts of all ranks, concatenated along a dimension."""
    if group.size() == 1:
        return x
    return _Exchange.apply(x, lambda x: _gather(x, dim, group), lambda grad: part_of_rank(grad, dim, group))


def part_of_rank(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part of x, which every rank has: one of n equal parts along a dimension."""
    if group.size() == 1:
        return x
    return _Exchange.apply(
        x, lambda x: _part(x, dim, group), lambda grad: gather_from_ranks(grad, dim, group)
    )


def _sum(x: Tensor, group: Group) -> Tensor:
    """Return the sum over ranks, without gradient."""
    total = x.clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(total, group=group)
    return total


def _gather(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return the parts of all ranks, concatenated, without gradient."""
    sent = x.to(torch.uint8) if x.dtype == torch.bool else x
    first = sent.movedim(dim, 0).contiguous()
    parts = [torch.empty_like(first) for _ in range(group.size())]
    torch.distributed.all_gather(parts, first, group=group)
    return torch.cat(parts).movedim(0, dim).contiguous().to(x.dtype)


def _part(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part, without gradient."""
    count = x.shape[dim] // group.size()
    return x.narrow(dim, group.rank() * count, count).contiguous()
