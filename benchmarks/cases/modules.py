"""torch.nn.MultiheadAttention beside the same module by hand: one product for q, k and v, then headwise.

What headwise's own modules must come near to, and what they are to be measured against.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

import headwise as hw

from .. import problem as problems
from ..problem import Problem
from ..registry import Arm, Case, Prepared, Sizes, Values, register

BY_HAND = "by hand on headwise"
TORCH = "nn.MultiheadAttention"


def split(x: Tensor, weight: Tensor, bias: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, each [B, H, L, D], from x [B, L, E] in one product."""
    B, L, E = x.shape
    packed = linear(x, weight, bias).view(B, L, 3, num_heads, E // num_heads)
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def merge(heads: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[B, L, E] from [B, H, L, D]."""
    B, H, L, D = heads.shape
    return linear(heads.transpose(1, 2).reshape(B, L, H * D), weight, bias)


def module(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, causal: bool, weights: bool, training: bool
) -> Prepared:
    """Self-attention of x [B, L, E]; with `weights`, their mean over heads, too."""
    B, L, E, H = (sizes[letter] for letter in "BLEH")
    theirs = torch.nn.MultiheadAttention(E, H, batch_first=True, device=device, dtype=dtype)
    torch.nn.init.normal_(theirs.in_proj_bias)
    theirs.train(training).requires_grad_(training)
    parameters = (theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj.weight, theirs.out_proj.bias)
    x = torch.randn(B, L, E).to(device, dtype).requires_grad_(training)
    grad = torch.randn(B, L, E).to(device, dtype)
    hidden = torch.ones(L, L, dtype=torch.bool, device=device).triu(1) if causal else None

    def by_torch() -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = theirs(
            x, x, x, need_weights=weights, attn_mask=hidden, is_causal=causal
        )
        return found

    def by_hand() -> tuple[Tensor, Tensor | None]:
        heads, map = hw.attention(*split(x, *parameters[:2], H), causal=causal)
        return merge(heads, *parameters[2:]), map.mean_heads() if weights else None

    def finish(found: tuple[Tensor, Tensor | None]) -> tuple[Any, ...]:
        if not training:
            return found
        return found[0].detach(), None, *torch.autograd.grad(found[0], (x, *parameters), grad)

    def part(found: tuple[Any, ...]) -> Values:
        names = ("output", "weights", "dx", "d_in_weight", "d_in_bias", "d_out_weight", "d_out_bias")
        named = zip(names, found, strict=False)
        return {name: value for name, value in named if value is not None}

    def truth() -> Values:
        exact = [p.detach().double().requires_grad_(training) for p in parameters]
        x64 = x.detach().double().requires_grad_(training)
        problem = Problem(*split(x64, exact[0], exact[1], H), seen=problems.causal if causal else None)
        whole = torch.arange(L, device=device)
        output = merge(problem.output(whole), exact[2], exact[3])
        mean = problem.weights(whole)[1].mean(1) if weights else None
        if not training:
            return part((output, mean))
        return part((output.detach(), mean, *torch.autograd.grad(output, (x64, *exact), grad.double())))

    arms: dict[str, Arm] = {BY_HAND: lambda: finish(by_hand()), TORCH: lambda: finish(by_torch())}
    return Prepared(arms, truth, part)


KINDS = {
    "module_full": ("self-attention module, full", False, False, False),
    "module_causal": ("self-attention module, causal", True, False, False),
    "module_weights": ("self-attention module, full, with mean weights", False, True, False),
    "module_weights_causal": ("self-attention module, causal, with mean weights", True, True, False),
    "module_train_full": ("self-attention module, full, forward and backward", False, False, True),
    "module_train_causal": ("self-attention module, causal, forward and backward", True, False, True),
}
for name, (words, causal, weights, training) in KINDS.items():
    register(
        Case(
            name,
            words,
            partial(module, causal=causal, weights=weights, training=training),
            {"B": 4, "H": 8, "L": 512, "E": 512},
            tiny={"B": 2, "H": 2, "L": 21, "E": 32},
            on_cuda={"B": 8, "H": 12, "L": 1024, "E": 768},
            ours=BY_HAND,
            peer=TORCH,
            factor=3.0 if training else 2.0,
            headline=name in ("module_causal", "module_weights_causal", "module_train_causal"),
        )
    )
