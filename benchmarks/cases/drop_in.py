"""hw.nn.MultiheadAttention beside torch's class, with the same calls.

Five models x the ways to ask x inference and training. Padding comes as key_padding_mask; causality as the
float mask that torch makes with the hint, as is usual, and without it, and as a bool mask with the hint.
Where no weights are asked for, the module by hand stands beside.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import headwise as hw

from ..registry import OURS, Case, Prepared, Sizes, register
from .modules import BY_HAND, TORCH, ByHand, by_hand_on
from .self_attention import SelfAttention


def drop_in(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, by_hand: bool = False, **options: Any
) -> Prepared:
    """`SelfAttention` with these options, of torch's class and of ours with the same weights.

    by_hand: the module by hand beside them, where no weights are asked for.
    """
    problem = SelfAttention(sizes, device, dtype, **options)
    ours = hw.nn.MultiheadAttention(problem.theirs.embed_dim, problem.H, batch_first=True, device="meta")
    ours.load_state_dict(problem.theirs.state_dict(), assign=True)
    problem.prepare(problem.theirs, ours)
    mine = [ours.in_proj_weight, ours.in_proj_bias, ours.out_proj.weight, ours.out_proj.bias]
    arms = {
        OURS: problem.arm(problem.torch_call(ours, hinted=True), mine),
        TORCH: problem.arm(problem.torch_call(problem.theirs, hinted=True), problem.packed),
    }
    if by_hand:
        hand = ByHand(problem.theirs, problem.causal)
        arms[BY_HAND] = problem.arm(by_hand_on(problem, hand), problem.packed)
    return Prepared(arms, problem.truth, problem.part, problem.gradients_without_weights)


# name -> words, sizes on a CPU, sizes on a GPU, causal
MODELS: dict[str, tuple[str, Sizes, Sizes, bool]] = {
    "bert_base": ("BERT-base", {"B": 4, "H": 12, "L": 512, "E": 768}, {"B": 32}, False),
    "gpt2_small": ("GPT-2 small, causal", {"B": 1, "H": 12, "L": 1024, "E": 768}, {"B": 8}, True),
    "gpt2_large": ("GPT-2 large, causal", {"B": 1, "H": 20, "L": 1024, "E": 1280}, {"B": 8}, True),
    "gpt3": (
        "GPT-3 layer, causal", {"B": 1, "H": 16, "L": 512, "E": 2048}, {"H": 96, "L": 2048, "E": 12288}, True,
    ),
    "long": ("long, causal", {"B": 1, "H": 8, "L": 2048, "E": 512}, {"H": 32, "L": 16384, "E": 4096}, True),
}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "float": ("float mask, is_causal=True", {"square": True}),
    "unhinted": ("float mask, is_causal=False", {"square": True, "hint": False}),
    "plain": ("no weights", {}),
    "padded": ("padded", {"padded": True}),
    "mean": ("mean weights", {"weights": "mean"}),
    "heads": ("weights of every head", {"weights": "heads"}),
}
TINY = {"B": 2, "H": 2, "L": 21, "E": 32}
for model, (words, sizes, on_cuda, causal) in MODELS.items():
    for way, (variant, options) in VARIANTS.items():
        for training in (False, True) if causal or not options.get("square") else ():
            register(
                Case(
                    f"drop_in_{model}_{way}_{'training' if training else 'inference'}",
                    f"torch's class, {words}, {variant}{', forward and backward' if training else ''}",
                    partial(
                        drop_in, causal=causal, training=training, by_hand="weights" not in options, **options
                    ),
                    sizes,
                    tiny=TINY,
                    on_cuda=on_cuda,
                    peer=TORCH,
                    target=1 / 0.97,
                    factor=3.0 if training else 2.0,
                    memory=model == "long",
                )
            )
