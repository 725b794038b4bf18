"""Modules for the tests of `MultiHeadAttention`, and when two results are the same.

Sizes: E 30 = H 5 * D 6, B 3, T 7, S 11. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise import MultiHeadAttention
from judge import assert_judged, largest

E, H, B, T, S = 30, 5, 3, 7, 11
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def module(d_model: int = E, num_heads: int = H, **options: Any) -> MultiHeadAttention:
    """One with random biases too: those it begins with are 0 and would hide mistakes."""
    made = MultiHeadAttention(d_model, num_heads, **{"dtype": torch.float64, **options})
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            bound = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 1.0
            parameter.copy_(normal(20 + i, *parameter.shape) * bound)
    return made


def packed(mha: MultiHeadAttention) -> bool:
    """Whether the next call would run q, k and v as one product."""
    layers: Sequence[nn.Module] = (mha.q_proj, mha.k_proj, mha.v_proj)
    return mha._packed is not None and mha._packed.holds(layers)


def assert_same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    """Equal in float64, up to the roundings of sums of numbers of this size."""
    assert len(actual) == len(expected)
    size = max(largest(x) for x in expected if x is not None)
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert (mine is None) == (theirs is None), f"{i}: one of them is None"
        if mine is not None and theirs is not None:
            assert_judged(mine, theirs, theirs, dtype=torch.float64, size=size, name=str(i))
