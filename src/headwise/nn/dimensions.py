"""The initial weights of a `MultiHeadAttention`, and the line in its repr.

Sizes, and the line itself, are in presets.py, which needs no torch.

The first weights are those `torch.nn.MultiheadAttention` of the same sizes draws from the same seed. The
order is torch's: out_proj as every `nn.Linear`, then q, k and v uniformly in the bounds of Glorot 2010, taken
as one matrix where they have the same input and sizes and one by one where not; biases are 0. Sinks start at
0: one more key with an average score. Then what torch's class does not have: a gate as every `nn.Linear`;
norms start at 1, a bias by distance at 0.

Letters: H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim, E d_model.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .options import undrawn
from .presets import Sizes, line

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["Sizes", "in_use", "of", "reset", "undrawn"]


# First weights


@torch.no_grad()
def reset(module: MultiHeadAttention) -> None:
    """Draw new weights for all four projections."""
    sizes, out = module.sizes, module.out_proj
    out.reset_parameters()
    three = (module.q_proj, module.k_proj, module.v_proj)
    packed = module._packed
    if sizes.are_torchs and sizes.kdim == sizes.vdim == sizes.d_model:
        drawn: list[Tensor] = [layer.weight for layer in three]
        if packed is not None and packed.holds(three):
            drawn = [packed.weight]  # in one go: on a GPU three draws would be other numbers
        for weight in drawn:
            _glorot(weight, sizes.d_model, 3 * sizes.d_model)
    else:
        for layer in three:
            _glorot(layer.weight, layer.in_features, layer.out_features)
    for layer in (*three, out):
        if layer.bias is not None:
            layer.bias.zero_()
    if module.sinks is not None:
        module.sinks.zero_()
    for more in (module.gate_proj, module.q_norm, module.k_norm, module.relative_bias):
        draw = getattr(more, "reset_parameters", None)
        if callable(draw):  # of whatever may have been put in their place
            draw()


def _glorot(weight: Tensor, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(3.0) * math.sqrt(2.0 / (fan_in + fan_out))  # sqrt(6 / ..) rounds otherwise than torch
    nn.init.uniform_(weight, -bound, bound)


# The line in the repr


def of(module: MultiHeadAttention) -> str:
    """For example `8 heads of 64: [B, T, 512] -> [B, 8, T, 64] -> [B, T, 512], causal`."""
    options = {name: getattr(module, name) for name in ("window", "scale", "softcap")}
    sinks, others = module.sinks is not None, in_use(module).values()
    return line(module.sizes, module.causal, options, sinks, others, module.dropout)


def in_use(module: MultiHeadAttention) -> dict[str, str]:
    """Return the options that a module has and torch's class has not, by name, each as the repr shows it."""
    shown = {
        name: f"{name}={getattr(module, name)!r}" for name in ("rope", "qk_norm", "gate")
        if getattr(module, name) is not None
    }  # fmt: skip
    if module.alibi:
        shown["alibi"] = "alibi"
    if module.relative_bias is not None:
        shown["relative_bias"] = "relative_bias"
    return shown
