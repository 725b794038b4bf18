"""hw.MultiHeadAttention beside the same module by hand, and beside torch.nn.MultiheadAttention.

By hand means: one product for q, k and v, scaled_dot_product_attention, one product for the output; no
checks, no map, nothing else. All arms have the same weights. Inference runs in inference mode, as served
models do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import headwise as hw

from ..registry import OURS, Arm, Case, Prepared, Sizes, register
from .self_attention import SelfAttention, merge, split

BY_HAND = "by hand, SDPA"
TORCH = "nn.MultiheadAttention"


class ByHand(nn.Module):
    """A fast module without options, as users write it by hand."""

    def __init__(self, theirs: nn.MultiheadAttention, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = theirs.num_heads, causal
        self.qkv_weight, self.qkv_bias = theirs.in_proj_weight, theirs.in_proj_bias
        self.out_weight, self.out_bias = theirs.out_proj.weight, theirs.out_proj.bias

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = split(x, self.qkv_weight, self.qkv_bias, self.num_heads)
        heads = sdpa(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return merge(heads, self.out_weight, self.out_bias)


def by_hand_on(problem: SelfAttention, by_hand: ByHand) -> Callable[[], tuple[Tensor, None]]:
    """Return the arm of the module by hand; its dense mask is created beforehand."""
    dense = problem.real[:, None, None] if problem.padded else None  # [B, 1, 1, L]
    if problem.hidden is not None and not (problem.causal and dense is None):
        dense = ~problem.hidden if dense is None else dense & ~problem.hidden
    return lambda: (by_hand(problem.x, dense), None)


def module(sizes: Sizes, device: torch.device, dtype: torch.dtype, **options: Any) -> Prepared:
    """`SelfAttention` with these options, of ours, torch's class and the module by hand."""
    problem = SelfAttention(sizes, device, dtype, **options)
    ours = hw.MultiHeadAttention.from_torch(problem.theirs)
    ours.causal = problem.causal
    by_hand = ByHand(problem.theirs, problem.causal)
    problem.prepare(problem.theirs, ours, by_hand)
    mask = hw.Mask.padding(problem.real) if problem.padded else None
    run_by_hand = by_hand_on(problem, by_hand)

    def run_ours() -> tuple[Tensor, Tensor | None]:
        output, map = ours(problem.x, mask=mask)
        looked = {None: lambda: None, "mean": map.mean_heads, "heads": map.dense}
        return output, looked[problem.weights]()

    apart = [
        getattr(ours, f"{letter}_proj").get_parameter(end) for end in ("weight", "bias") for letter in "qkv"
    ]
    arms: dict[str, Arm] = {
        OURS: problem.arm(run_ours, [*apart, *ours.out_proj.parameters()]),
        TORCH: problem.arm(problem.torch_call(problem.theirs), problem.packed),
    }
    if problem.weights is None:
        arms[BY_HAND] = problem.arm(run_by_hand, problem.packed)
    return Prepared(arms, problem.truth, problem.part)


# name -> words, sizes, causal, how near the module by hand it should come
MODELS = {
    "course": ("a course's example", {"B": 2, "H": 8, "L": 10, "E": 512}, False, 1.25),
    "bert_base": ("BERT-base", {"B": 4, "H": 12, "L": 512, "E": 768}, False, 1.08),
    "gpt2": ("GPT-2, causal", {"B": 1, "H": 12, "L": 1024, "E": 768}, True, 1.08),
    "long": ("causal", {"B": 1, "H": 8, "L": 4096, "E": 512}, True, 1.08),
}
TINY = {"B": 2, "H": 2, "L": 21, "E": 32}
for model, (words, sizes, causal, target) in MODELS.items():
    setup = partial(module, causal=causal)
    case = partial(Case, sizes=sizes, tiny=TINY, devices=("cpu",))
    beside_torch = partial(case, peer=TORCH, target=1.0)
    every_head, padded = partial(setup, weights="heads"), partial(setup, padded=True)
    title = f"module, {words}"
    gpt2, bert = model == "gpt2", model == "bert_base"
    register(case(f"module_{model}", title, setup, peer=BY_HAND, target=target, headline=gpt2))
    register(
        beside_torch(f"class_{model}_heads", f"{title}, weights of every head", every_head, headline=gpt2)
    )
    if model != "course":
        register(beside_torch(f"class_{model}_padded", f"{title}, padded", padded, headline=bert))

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "class_full": ("module, full", {}),
    "class_causal": ("module, causal", {"causal": True}),
    "class_padded": ("module, padded", {"padded": True}),
    "class_mean_causal": ("module, causal, mean weights", {"causal": True, "weights": "mean"}),
    "class_heads_causal": ("module, causal, weights of every head", {"causal": True, "weights": "heads"}),
    "class_train_full": ("module, forward and backward", {"training": True}),
    "class_train_causal": ("module, causal, forward and backward", {"training": True, "causal": True}),
}
for name, (words, options) in KINDS.items():
    register(
        Case(
            name,
            words,
            partial(module, **options),
            {"B": 4, "H": 8, "L": 512, "E": 512},
            tiny=TINY,
            on_cuda={"B": 8, "H": 12, "L": 1024, "E": 768},
            peer=TORCH,
            factor=3.0 if "training" in options else 2.0,
            headline=name in ("class_causal", "class_train_causal"),
        )
    )
