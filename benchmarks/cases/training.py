"""Forward and backward."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import headwise as hw

from .. import problem as problems
from .. import truths
from ..registry import OURS, Arm, Case, Prepared, Sizes, Values, register
from .attention import SDPA


def train(sizes: Sizes, device: torch.device, dtype: torch.dtype, causal: bool) -> Prepared:
    """Compare hw.attention and its gradients with scaled_dot_product_attention and its gradients."""
    problem = problems.make(sizes, device, dtype, problems.causal if causal else None)
    q, k, v = (x.requires_grad_() for x in problem.qkv)
    grad = torch.randn(q.shape).to(device, dtype)

    def both_ways(output: Tensor) -> tuple[Tensor, ...]:
        return output.detach(), *torch.autograd.grad(output, (q, k, v), grad)

    def part(result: tuple[Tensor, ...]) -> Values:
        return dict(zip(("output", "dq", "dk", "dv"), result, strict=True))

    arms: dict[str, Arm] = {
        OURS: lambda: both_ways(hw.attention(q, k, v, causal=causal)[0]),
        SDPA: lambda: both_ways(sdpa(q, k, v, is_causal=causal)),
    }
    return Prepared(arms, lambda: truths.gradients(problem, grad), part)


case = partial(Case, tiny={"H": 2, "L": 40, "D": 16}, peer=SDPA, target=1.05, factor=3.0)
for kind, is_causal in (("full", False), ("causal", True)):
    register(
        case(
            f"attention_train_{kind}_L1024",
            f"attention, {kind}, forward and backward",
            partial(train, causal=is_causal),
            {"B": 1, "H": 8, "L": 1024, "D": 64},
        )
    )
    register(
        case(
            f"cuda_attention_train_{kind}_L4096",
            f"attention, {kind}, forward and backward",
            partial(train, causal=is_causal),
            {"B": 1, "H": 32, "L": 4096, "D": 128},
            devices=("cuda",),
        )
    )
