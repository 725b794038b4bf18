"""The classes whose weights we know where to find: headwise's own, torch's, and ours that is torch's.

Letters: B batch, T query_len, S key_len, E d_model, H num_heads, Hk num_kv_heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ArgumentError, ShapeError
from ...nn import MultiHeadAttention
from ...nn.options import in_use
from ..recipe import Given, Step, Weights


def is_known(module: object) -> bool:
    """Whether `weights_of` knows this class."""
    return isinstance(module, MultiHeadAttention | nn.MultiheadAttention)


def weights_of(module: nn.Module) -> tuple[Weights, int]:
    """The four projections in float64, and num_heads.

    Heads that share keys and values get a copy each, so that every head has its own rows:
    [Hk * D, E] -> [H * D, E].

    Raises:
        ArgumentError: another class; an option that has no step in the recipe; a replaced projection.
        ShapeError: keys or values of another width than the queries.
    """
    if isinstance(module, MultiHeadAttention):
        return _of_ours(module)
    if isinstance(module, nn.MultiheadAttention):
        return _of_torchs(module)
    raise ArgumentError(
        f"module must be headwise's or torch's multi-head attention: got {type(module).__name__}; "
        "for a class of your own, headwise explain FILE finds the weights"
    )


def _of_ours(module: MultiHeadAttention) -> tuple[Weights, int]:
    _check_widths(module.d_model, module.kdim, module.vdim)
    unknown = [name for name in ("softcap", "sinks") if getattr(module, name) is not None]
    for name in (*unknown, *in_use(module)):
        raise ArgumentError(f"module must not use {name}: its steps are not drawn yet; explain it without")
    layers = [module.q_proj, module.k_proj, module.v_proj, module.out_proj]
    for layer in layers:
        if not isinstance(layer, nn.Linear):
            raise ArgumentError(
                f"projections must be nn.Linear: got {type(layer).__name__}; merge it into one first"
            )
    q, k, v, o = (layer.weight for layer in layers)
    q_bias, k_bias, v_bias, o_bias = (
        layer.weight.new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias
        for layer in layers
    )
    shared = module.num_heads // module.num_kv_heads

    def for_every_head(x: Tensor, width: int) -> Tensor:
        rows = x.unflatten(0, (module.num_kv_heads, width))  # [Hk, D, ...]
        return rows.repeat_interleave(shared, 0).flatten(0, 1)  # [H * D, ...]

    D, Dv = module.head_dim, module.value_dim
    held = (
        q, for_every_head(k, D), for_every_head(v, Dv), o,
        q_bias, for_every_head(k_bias, D), for_every_head(v_bias, Dv), o_bias,
    )  # fmt: skip
    return Weights(*map(_as_numbers, held)), module.num_heads


def _of_torchs(module: nn.MultiheadAttention) -> tuple[Weights, int]:
    _check_widths(module.embed_dim, module.kdim, module.vdim)
    for name, there in (("add_bias_kv", module.bias_k is not None), ("add_zero_attn", module.add_zero_attn)):
        if there:
            raise ArgumentError(
                f"module must not append keys: it has {name}=True, which has no step; explain one without"
            )
    weight, bias, out = module.in_proj_weight, module.in_proj_bias, module.out_proj
    nothing = weight.new_zeros(3 * module.embed_dim) if bias is None else bias
    o_bias = weight.new_zeros(module.embed_dim) if out.bias is None else out.bias
    held = (*weight.chunk(3), out.weight, *nothing.chunk(3), o_bias)
    return Weights(*map(_as_numbers, held)), module.num_heads


def _check_widths(width: int, kdim: int, vdim: int) -> None:
    if not width == kdim == vdim:
        raise ShapeError(
            f"module must take queries, keys and values of one width: {width}, kdim={kdim}, vdim={vdim}; "
            "explain one without kdim and vdim"
        )


def _as_numbers(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float64)


def own_steps(module: nn.Module, scale: float) -> dict[str, Step]:
    """Where this module's rules are not the recipe's: its scale, and what a query that sees nothing gets."""
    steps: dict[str, Step] = {}
    if isinstance(module, MultiHeadAttention) and module.scale is not None:

        def scaled(state: Any) -> None:
            state.scaled = state.scores * scale

        steps["scale"] = scaled
    if isinstance(module, MultiHeadAttention) or getattr(module, "empty_rows", "nan") == "zero":

        def nothing_where_nothing_is_seen(state: Any) -> None:
            seen = (state.hidden > -torch.inf).any(-1, keepdim=True)
            state.p = torch.softmax(state.hidden, -1).masked_fill(~seen, 0.0)

        steps["softmax"] = nothing_where_nothing_is_seen
    return steps


@torch.no_grad()
def own_numbers(module: nn.Module, given: Given) -> dict[str, Tensor]:
    """What the module itself says, in its own dtype and as if in evaluation: `p` [B, H, T, S], `output`.

    Args:
        given: batch first, float64; cast to the module's dtype here.
    """
    weight = next(module.parameters())
    query, key, value = (x.to(weight.device, weight.dtype) for x in given[:3])
    if given.key is given.query and given.value is given.query:
        key = value = query
    mask = None if given.mask is None else given.mask.to(weight.device)  # [B, T, S]
    training, module.training = module.training, False  # no dropout; its parts keep their own mode
    try:
        if isinstance(module, MultiHeadAttention):
            output, weights = module(query, key, value, None if mask is None else mask[:, None])
            p = weights.dense()
        else:
            assert isinstance(module, nn.MultiheadAttention)
            hidden = None if mask is None else ~mask.repeat_interleave(module.num_heads, 0)  # [B * H, T, S]
            q, k, v = (x if module.batch_first else x.transpose(0, 1) for x in (query, key, value))
            output, p = module(q, k, v, attn_mask=hidden, average_attn_weights=False)
            output = output if module.batch_first else output.transpose(0, 1)
    finally:
        module.training = training
    return {"p": p.detach().cpu(), "output": output.detach().cpu()}
