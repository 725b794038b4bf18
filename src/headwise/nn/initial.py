"""The first weights: those `torch.nn.MultiheadAttention` of the same sizes draws from the same seed.

The order is torch's: out_proj as every `nn.Linear`, then q, k and v uniformly in the bounds of Glorot 2010,
taken as one matrix where they have the same input and sizes and one by one where not; biases are 0. Without
biases out_proj keeps what `nn.Linear` drew. Sinks start at 0: one more key with an average score.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["reset"]


@torch.no_grad()
def reset(module: MultiHeadAttention) -> None:
    """Draw new weights for all four projections."""
    sizes, out = module.sizes, module.out_proj
    out.reset_parameters()
    three = (module.q_proj, module.k_proj, module.v_proj)
    together = sizes.are_torchs and sizes.kdim == sizes.vdim == sizes.d_model
    for layer in three:
        rows = 3 * layer.out_features if together else layer.out_features
        _glorot(layer.weight, layer.in_features, rows)
    for layer in (*three, out):
        if layer.bias is not None:
            layer.bias.zero_()
    if module.sinks is not None:
        module.sinks.zero_()


def _glorot(weight: Tensor, fan_in: int, fan_out: int) -> None:
    bound = math.sqrt(3.0) * math.sqrt(
        2.0 / (fan_in + fan_out)
    )  # in torch's order: sqrt(6 / ..) rounds otherwise
    nn.init.uniform_(weight, -bound, bound)
