"""hw.MultiHeadAttention beside the same module by hand, and beside torch.nn.MultiheadAttention.

By hand means: one product for q, k and v, scaled_dot_product_attention, one product for the output; no
checks, no map, nothing else. All arms have the same weights. Inference runs in inference mode, as served
models do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.functional import scaled_dot_product_attention as sdpa

import headwise as hw

from .. import problem as problems
from ..problem import Problem
from ..registry import OURS, Arm, Case, Pinned, Prepared, Sizes, Values, register

BY_HAND = "by hand, SDPA"
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


class ByHand(nn.Module):
    """What someone writes who wants speed and nothing else."""

    def __init__(self, theirs: nn.MultiheadAttention, causal: bool) -> None:
        super().__init__()
        self.num_heads, self.causal = theirs.num_heads, causal
        self.qkv_weight, self.qkv_bias = theirs.in_proj_weight, theirs.in_proj_bias
        self.out_weight, self.out_bias = theirs.out_proj.weight, theirs.out_proj.bias

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = split(x, self.qkv_weight, self.qkv_bias, self.num_heads)
        heads = sdpa(q, k, v, attn_mask=mask, is_causal=self.causal and mask is None)
        return merge(heads, self.out_weight, self.out_bias)


def module(
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    causal: bool = False,
    padded: bool = False,
    weights: str | None = None,
    training: bool = False,
) -> Prepared:
    """Self-attention of x [B, L, E].

    Args:
        padded: sequences of different lengths, half of the places on average.
        weights: "mean" over heads or those of all "heads", looked at after the call.
    """
    B, L, E, H = (sizes[letter] for letter in "BLEH")
    theirs = nn.MultiheadAttention(E, H, batch_first=True, device=device, dtype=dtype)
    nn.init.normal_(theirs.in_proj_bias)
    ours = hw.MultiHeadAttention.from_torch(theirs)
    ours.causal = causal
    by_hand = ByHand(theirs, causal)
    for one in (theirs, ours, by_hand):
        one.train(training).requires_grad_(training)
    x = torch.randn(B, L, E).to(device, dtype).requires_grad_(training)
    grad = torch.randn(B, L, E).to(device, dtype)
    lengths = torch.linspace(1, L, B).round().long().to(device)
    real = torch.arange(L, device=device) < lengths[:, None]  # [B, L]
    hidden = torch.ones(L, L, dtype=torch.bool, device=device).triu(1) if causal else None
    if padded:
        grad = grad * real[..., None]  # what padded queries say goes nowhere

    mask = hw.Mask.padding(real) if padded else None
    dense = real[:, None, None] if padded else None  # [B, 1, 1, L]
    if dense is not None and hidden is not None:
        dense = dense & ~hidden

    def run_ours() -> tuple[Tensor, Tensor | None]:
        output, map = ours(x, mask=mask)
        looked = {None: lambda: None, "mean": map.mean_heads, "heads": map.dense}
        return output, looked[weights]()

    def run_theirs() -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = theirs(
            x, x, x, key_padding_mask=~real if padded else None, need_weights=weights is not None,
            attn_mask=hidden, is_causal=causal and not padded, average_attn_weights=weights == "mean",
        )  # fmt: skip
        return found

    def run_by_hand() -> tuple[Tensor, None]:
        return by_hand(x, dense), None

    def arm(run: Any, parameters: list[Tensor]) -> Arm:
        if not training:
            return Pinned(run, torch.inference_mode)

        def both_ways() -> tuple[Any, ...]:
            output, looked = run()
            return output.detach(), looked, *torch.autograd.grad(output, (x, *parameters), grad)

        return both_ways

    packed = [theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj.weight, theirs.out_proj.bias]
    apart = [getattr(ours, f"{one}_proj").get_parameter(end) for end in ("weight", "bias") for one in "qkv"]
    arms: dict[str, Arm] = {
        OURS: arm(run_ours, [*apart, *ours.out_proj.parameters()]),
        TORCH: arm(run_theirs, packed),
    }
    if weights is None:
        arms[BY_HAND] = arm(run_by_hand, packed)

    rows = torch.arange(L, device=device)
    if not training and L > 64:
        rows = torch.linspace(0, L - 1, 64, dtype=torch.float64, device=device).round().long()

    def real_rows(values: Tensor) -> Tensor:
        """Some rows of [B, .., L, *], nothing where they are padding."""
        some = values[..., rows, :]
        return some * real[:, rows].view(B, *[1] * (some.ndim - 3), len(rows), 1) if padded else some

    def named(output: Tensor, looked: Tensor | None, grads: list[Tensor]) -> Values:
        values = {"output": real_rows(output)}
        if looked is not None:
            values["weights"] = real_rows(looked)
        if len(grads) == 9:  # each projection by itself
            grads = [grads[0], torch.cat(grads[1:4]), torch.cat(grads[4:7]), *grads[7:]]
        names = ("dx", "d_in_weight", "d_in_bias", "d_out_weight", "d_out_bias")
        return values | dict(zip(names, grads, strict=False))

    def part(found: tuple[Any, ...]) -> Values:
        output, looked, *grads = found
        return named(output, looked, grads)

    def truth() -> Values:
        exact = [p.detach().double().requires_grad_(training) for p in packed]
        x64 = x.detach().double().requires_grad_(training)
        seen = [problems.causal] * causal + [problems.padding(lengths)] * padded
        problem = Problem(*split(x64, exact[0], exact[1], H), seen=problems.all_of(*seen) if seen else None)
        output = merge(problem.output(rows), exact[2], exact[3])
        values = {"output": output.detach()}
        if weights is not None:
            p = problem.weights(rows)[1]
            values["weights"] = p.mean(1) if weights == "mean" else p
        if padded:
            for name, value in values.items():
                values[name] = value * real[:, rows].view(B, *[1] * (value.ndim - 3), len(rows), 1)
        if training:
            grads = torch.autograd.grad(output, (x64, *exact), grad.double())
            values |= named(output, None, list(grads)) | {"output": values["output"]}
        return values

    return Prepared(arms, truth, part)


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
    told = f"module, {words}"
    gpt2, bert = model == "gpt2", model == "bert_base"
    register(case(f"module_{model}", told, setup, peer=BY_HAND, target=target, headline=gpt2))
    register(beside_torch(f"class_{model}", told, setup, headline=gpt2))
    register(
        beside_torch(f"class_{model}_heads", f"{told}, weights of every head", every_head, headline=gpt2)
    )
    if model != "course":
        register(beside_torch(f"class_{model}_padded", f"{told}, padded", padded, headline=bert))

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
