"""Inputs of torch's class as heads; and on a GPU projections and attention as one step of autograd.

From torch's inputs to heads and back, without copies.

Batch or length may come first: a product over the last dimension does not mind, and heads are views of it.

Letters: N batch, L query_len, S key_len, E embed_dim, H num_heads, D head_dim.

Attention by torch's class as one step of autograd, on a GPU: with weights and padding or without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ... import budget
from ..one_step import Parameters, Step, chosen, run
from ..packed_weights import OUT_PROJ, PLAIN, is_untouched, ordinary, parameters_of
from .contract import check_widths
from .torch_masks import Rules

if TYPE_CHECKING:
    from .module import MultiheadAttention

__all__ = ["fits", "heads_of", "in_one_step", "linear", "thirds", "with_more_keys"]


Heads = tuple[Tensor, Tensor, Tensor]


def heads_of(module: MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, first: int) -> Heads:
    """q [N, H, L, D], k and v [N, H, S, D] from 3-D inputs; `first`: which dimension is the batch."""
    E, weight, bias = module.embed_dim, module.in_proj_weight, module.in_proj_bias
    if not module._qkv_same_embed_dim:
        weights: Any = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        check_widths((query, key, value), weights, bias)
        q, k, v = _three(query, key, value, weights, bias)
    elif weight is None:
        raise AssertionError("use_separate_proj_weight is False but in_proj_weight is None")
    elif key is not value:
        q, k, v = _three(query, key, value, weight.chunk(3), bias)
    elif query is key:
        return thirds(linear(query, weight, bias), module.num_heads, first)
    else:
        weights, biases = weight.split([E, 2 * E]), (None, None) if bias is None else bias.split([E, 2 * E])
        q = linear(query, weights[0], biases[0])
        k, v = _split(linear(key, weights[1], biases[1]), 2, E)
    H = module.num_heads
    return _by_head(q, H, first), _by_head(k, H, first), _by_head(v, H, first)


def thirds(joint: Tensor, H: int, first: int) -> Heads:
    """q, k and v from one product, [.., .., 3 E]."""
    q, k, v = _by_head(joint, 3 * H, first).chunk(3, 1)
    return q, k, v


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's, which takes a bias of another dtype only where it does not fuse it."""
    if bias is not None and bias.dtype != weight.dtype:
        return functional.linear(x, weight) + bias
    return functional.linear(x, weight, bias)


def _three(query: Tensor, key: Tensor, value: Tensor, weights: Any, bias: Tensor | None) -> Heads:
    biases: Any = (None, None, None) if bias is None else bias.chunk(3)
    q, k, v = (linear(*each) for each in zip((query, key, value), weights, biases, strict=True))
    return q, k, v


def _split(joint: Tensor, count: int, E: int) -> Any:
    """[.., count * E] -> count times [.., E], as views."""
    return joint.unflatten(-1, (count, E)).unbind(-2)


def _by_head(x: Tensor, H: int, first: int) -> Tensor:
    """[N, L, E] or [L, N, E] -> [N, H, L, D]"""
    x = x.unflatten(-1, (H, -1))
    return x.transpose(1, 2) if first == 0 else x.permute(1, 2, 0, 3)


def with_more_keys(module: MultiheadAttention, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v followed by the keys a module brings along: bias_k and bias_v, then zeros."""
    N, H, _, D = k.shape
    if module.bias_k is not None and module.bias_v is not None:
        k, v = (
            torch.cat([x, bias.view(1, H, 1, D).expand(N, -1, -1, -1)], 2)
            for x, bias in ((k, module.bias_k), (v, module.bias_v))
        )
    if module.add_zero_attn:
        nothing = k.new_zeros(N, H, 1, D)
        k, v = torch.cat([k, nothing], 2), torch.cat([v, nothing], 2)
    return k, v


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
