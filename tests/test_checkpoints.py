"""Maps out of `torch.utils.checkpoint`: their gradient is there, or a warning says that it is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headwise as hw

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
Q, K, V = torch.randn(3, 2, 4, 5, 7, generator=torch.Generator().manual_seed(1))


class Projected(torch.nn.Module):
    """A layer inside a checkpoint; asked for weights as a tensor or as a map."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mha = hw.MultiHeadAttention(16, 2)

    def forward(self, x: Tensor, as_tensor: bool = False) -> tuple[Tensor, Any]:
        output, weights = self.mha(x)
        return output, weights.dense() if as_tensor else weights


LOOKS = {
    "dense": lambda weights: weights.dense(),
    "one head": lambda weights: weights[0, 1],
    "mean": lambda weights: weights.mean_heads(),
    "statistics": lambda weights: weights.statistics().entropy,
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_map_out_of_a_reentrant_checkpoint_warns_that_its_gradient_is_lost(look: str) -> None:
    """torch records gradients of returned tensors alone; torch's own weights are one, and have a gradient."""
    x = X.clone().requires_grad_()
    _, weights = checkpoint(Projected(), x, use_reentrant=True)
    with pytest.warns(UserWarning, match=r"weights of a reentrant checkpoint .* pass use_reentrant=False"):
        assert not LOOKS[look](weights).requires_grad


@pytest.mark.parametrize("look", LOOKS)
def test_a_gradient_that_is_there_or_not_wanted_is_not_warned_of(look: str) -> None:
    x, layer = X.clone().requires_grad_(), Projected()
    with torch.no_grad():
        LOOKS[look](checkpoint(layer, x, use_reentrant=True)[1])
        ordinary = layer(x)[1]
    with torch.no_grad():
        LOOKS[look](ordinary)
    LOOKS[look](ordinary)
    assert LOOKS[look](checkpoint(layer, x, use_reentrant=False)[1]).requires_grad
    assert checkpoint(layer, x, True, use_reentrant=True)[1].requires_grad
    q, k, v = (part.clone().requires_grad_() for part in (Q, K, V))
    assert LOOKS[look](checkpoint(hw.attention, q, k, v, use_reentrant=True)[1]).requires_grad
