"""hw.MultiHeadAttention told the lengths of its sequences, beside itself with a mask, by hand, and torch's.

Lengths from an eighth of the longest to all of it: 56% of the places hold a token. They are given as plain
numbers, as a data loader has them; masks lie ready on the device. Weights are there to be looked at, and
nobody looks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import headwise as hw

from ..registry import OURS, Arm, Case, Prepared, Sizes, register
from .modules import BY_HAND, TINY, TORCH, ByHand, by_hand_on
from .self_attention import SelfAttention

PADDED = "headwise, padded"


def ragged(sizes: Sizes, device: torch.device, dtype: torch.dtype, **options: Any) -> Prepared:
    """`SelfAttention` with these options, of ours in two ways and of torch's class."""
    problem = SelfAttention(sizes, device, dtype, padded=True, shortest=sizes["L"] // 8, **options)
    ours = hw.MultiHeadAttention.from_torch(problem.theirs)
    ours.causal = problem.causal
    by_hand = ByHand(problem.theirs, problem.causal)
    problem.prepare(problem.theirs, ours, by_hand)
    lengths, mask = problem.lengths.tolist(), hw.Mask.padding(problem.lengths)

    def packed() -> tuple[Tensor, None]:
        return ours(problem.x, lengths=lengths)[0], None

    def padded() -> tuple[Tensor, None]:
        return ours(problem.x, mask=mask)[0], None

    apart = [
        getattr(ours, f"{letter}_proj").get_parameter(end) for end in ("weight", "bias") for letter in "qkv"
    ]
    parameters = [*apart, *ours.out_proj.parameters()]
    arms: dict[str, Arm] = {
        OURS: problem.arm(packed, parameters),
        PADDED: problem.arm(padded, parameters),
        BY_HAND: problem.arm(by_hand_on(problem, by_hand), problem.packed),
        TORCH: problem.arm(problem.torch_call(problem.theirs), problem.packed),
    }
    return Prepared(arms, problem.truth, problem.part)


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ragged": ("module, sequences of different lengths", {}),
    "ragged_causal": ("module, causal, sequences of different lengths", {"causal": True}),
    "ragged_train": ("module, sequences of different lengths, forward and backward", {"training": True}),
}
for name, (words, options) in KINDS.items():
    case = partial(
        Case,
        setup=partial(ragged, **options),
        sizes={"B": 8, "H": 12, "L": 512, "E": 768},
        tiny=TINY,
        on_cuda={"B": 32},
        factor=3.0 if "training" in options else 2.0,
    )
    register(case(name, words, peer=PADDED, target=1 / 1.6))
