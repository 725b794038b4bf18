"""Attention by torch's class as one step of autograd, on a GPU: with weights and padding or without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ... import budget
from ..one_step import Parameters, Step, chosen, run
from ..packing import OUT_PROJ, PLAIN, is_untouched, ordinary, parameters_of
from .rules import Rules

__all__ = ["fits", "in_one_step"]


def fits(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there are two projections at most and they will go through: masks may be looked at before."""
    weight, E = module.in_proj_weight, module.embed_dim
    return (
        key is value
        and query.dim() == 3
        and module._qkv_same_embed_dim
        and weight is not None
        and tuple(weight.shape) == (3 * E, E)
        and all(
            x.shape[-1] == E and x.dtype is weight.dtype and x.device == weight.device for x in (query, key)
        )
    )


def in_one_step(
    module: nn.MultiheadAttention,
    x: Tensor,
    memory: Tensor,
    rules: Rules,
    need_weights: bool,
    average: bool,
    zero: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """(output, weights) of x [N, L, E] or [L, N, E] attending to memory; None: not a call for this.

    Args:
        x, memory: that fit; they may be one and the same.
        rules: without keys that the module appends.
        zero: a query that sees nothing gets 0; else, as in torch, NaN where weights are wanted.
    """
    held: dict[str, Any] = module.__dict__  # past nn.Module.__getattr__, which is slow
    if held["training"] and held["dropout"]:
        return None
    if rules.hidden is not None or rules.bias is not None or not x.numel() or not memory.numel():
        return None
    if not _is_worth_it(x) or not ordinary(x):
        return None
    if _is_limited(need_weights):
        return None
    out_proj = held["_modules"]["out_proj"]
    theirs = parameters_of(out_proj, "weight", "bias") if is_untouched(out_proj, OUT_PROJ) else None
    theirs = theirs or [None, None]
    apart = theirs[0] is None
    weight: Any = module.in_proj_weight  # not always a parameter: it may be pruned, parametrised, a replica's
    parameters = Parameters(weight, module.in_proj_bias, *theirs)
    for one in parameters:
        if one is not None and (type(one) not in PLAIN or one.dtype is not x.dtype or one.device != x.device):
            return None
    first, H = 0 if held["batch_first"] else 1, held["num_heads"]
    other = None if memory is x else memory
    kernel = chosen(x, other, H, first, rules.causal, rules.padding)
    if kernel is None:
        return None
    step = Step(H, first, rules.causal, torch.nan if need_weights and not zero else 0.0, kernel)
    wanted = ("mean" if average else "heads") if need_weights else None
    y, weights = run(x, other, parameters, rules.padding, step, wanted)
    return out_proj(y) if apart else y, weights


def _is_worth_it(x: Tensor) -> bool:
    """Whether the steps between the kernels matter: a CPU is as fast either way."""
    return x.is_cuda


def _is_limited(need_weights: bool) -> bool:
    """Whether somebody has set a limit that weights must be held against."""
    return need_weights and not budget.surely_fits(0)
