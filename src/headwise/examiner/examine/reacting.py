"""Which outputs react to which inputs: what a mask really hides, seen from outside."""

from __future__ import annotations

import torch
from torch import Tensor

from .calling import Caller
from .encoding import Way

__all__ = ["NOTHING", "inputs_for", "reactions"]

NOTHING = 1e-9  # of the size of the output: a smaller reaction is none


def inputs_for(
    caller: Caller, T: int, S: int, seed: int = 1, B: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, T, E], key and value [B, S, E], as different as the code allows."""
    sizes, plan = caller.subject.sizes, caller.plan
    dice = torch.Generator().manual_seed(seed)
    B = B or sizes.B

    def normal(length: int) -> Tensor:
        return torch.randn(B, length, sizes.E, generator=dice, dtype=torch.float64)

    query = normal(T)
    if plan.self_only:
        return query, query, query
    key = normal(S)
    return query, key, key if plan.memory_only else normal(S)


def reactions(
    caller: Caller,
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None = None,
    ways: tuple[Way, ...] | None = None,
    of: str = "both",
) -> Tensor:
    """How much the output of query t changes when key s does, float [B, T, S]; NaN where it is NaN.

    of: "key", "value" or "both". Where one input is queries and keys at once, the diagonal says nothing.
    """
    query, key, value = inputs
    B, T, S = len(query), query.shape[1], key.shape[1]
    base = caller.call(*inputs, mask, ways=ways).output.detach()
    found = torch.zeros(B, T, S, dtype=torch.float64)
    dice = torch.Generator().manual_seed(77)
    push = torch.randn(key.shape, generator=dice, dtype=torch.float64)
    for s in range(S):
        step = torch.zeros_like(key)
        step[:, s] = push[:, s]
        moved = _moved(query, key, value, step, caller, of)
        output = caller.call(*moved, mask, ways=ways).output.detach()
        found[:, :, s] = (output - base).abs().amax(-1)
    return found / base.nan_to_num(0).abs().max().clamp_min(1e-30)


def _moved(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, caller: Caller, of: str
) -> tuple[Tensor, Tensor, Tensor]:
    if caller.plan.self_only:
        x = query + step
        return x, x, x
    if caller.plan.memory_only:
        memory = key + step
        return query, memory, memory
    return query, key + step if of != "value" else key, value + step if of != "key" else value
