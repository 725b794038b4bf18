"""Whole models of torch's beside themselves after `hw.adopt`: nothing may get slower.

With gelu: the kinks of relu would make a difference of one rounding a difference of whole gradients.

Letters: B batch, H num_heads, L length, E width, N layers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

from ..registry import OURS, Arm, Case, Pinned, Prepared, Sizes, Values, register

UNADOPTED = "unadopted"


class Block(nn.Module):
    """A layer of a vision transformer as torchvision builds it: norm first, weights not asked for."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


def adopted(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, kind: str, masks: str, training: bool
) -> Prepared:
    """A model of some `kind` and its adopted copy on the same input.

    masks: "padded", "causal", both joined by " and ", or "".
    """
    B, H, L, E, N = (sizes[letter] for letter in "BHLEN")
    x = torch.randn(B, L, E).to(device, dtype)
    lengths = torch.linspace(L / 4, L, B).round().long()
    padding = (torch.arange(L) >= lengths[:, None]).to(device) if "padded" in masks else None
    hidden = torch.ones(L, L, dtype=torch.bool, device=device).triu(1) if "causal" in masks else None
    real = 1.0 if padding is None else ~padding[..., None]
    pull = torch.randn(B, L, E).to(device, dtype)

    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")  # torch's, of itself
    model, run = _model(kind, E, H, N, padding, hidden)
    model.to(device, dtype).train(training).requires_grad_(training)
    ours = copy.deepcopy(model)
    hw.adopt(ours)

    def arm(model: nn.Module, x: Tensor) -> Arm:
        if not training:
            return Pinned(lambda: [run(model, x)], torch.inference_mode)
        parameters = [*model.parameters()]

        def both_ways() -> list[Tensor]:
            output = run(model, x) * real
            return [output.detach(), *torch.autograd.grad(output, parameters, pull.to(output.dtype))]

        return both_ways

    def part(result: list[Tensor]) -> Values:
        return {"output": result[0] * real} | {f"gradient {i}": grad for i, grad in enumerate(result[1:])}

    def truth() -> Values:
        exact, before = copy.deepcopy(model).double(), torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return part(arm(exact, x.double())())
        finally:
            torch.backends.mha.set_fastpath_enabled(before)

    return Prepared({OURS: arm(ours, x), UNADOPTED: arm(model, x)}, truth, part)


def _model(
    kind: str, E: int, H: int, N: int, padding: Tensor | None, hidden: Tensor | None
) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    model: nn.Module
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(E, H, 4 * E, dropout=0.0, activation="gelu", batch_first=True)
        model = nn.TransformerEncoder(layer, N)
        arguments: dict[str, Any] = {"mask": hidden, "src_key_padding_mask": padding}
        return model, lambda model, x: model(x, **arguments)
    if kind == "transformer":
        model = nn.Transformer(E, H, N, N, 4 * E, dropout=0.0, activation="gelu", batch_first=True)
        arguments = {"tgt_mask": hidden, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return model, lambda model, x: model(x, x, **arguments)
    model = nn.Sequential(*(Block(E, H) for _ in range(N)))
    return model, lambda model, x: model(x)


SIZES = {"B": 4, "H": 8, "L": 256, "E": 512, "N": 2}
MODELS = (
    ("encoder", "nn.TransformerEncoder", "padded"),
    ("encoder", "nn.TransformerEncoder", "causal"),
    ("encoder", "nn.TransformerEncoder", "padded and causal"),
    ("transformer", "nn.Transformer", "padded and causal"),
    ("vit", "a vision transformer", ""),
)
for kind, words, masks in MODELS:
    for training in (False, True):
        name = ["adopt", kind, *masks.split(" and "), "training" if training else "inference"]
        mask_words = f", {masks}" if masks else ""
        register(
            Case(
                "_".join(filter(None, name)),
                f"{words}{mask_words}{', forward and backward' if training else ''}, adopted",
                partial(adopted, kind=kind, masks=masks, training=training),
                SIZES,
                tiny={"B": 2, "H": 2, "L": 21, "E": 32, "N": 2},
                on_cuda={"B": 16, "L": 512},
                peer=UNADOPTED,
                target=1.03,
                factor=3.0 if training else 2.0,
            )
        )
