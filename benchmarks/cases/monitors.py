"""A step of training with `Monitor` beside the same step without it.

Measured and not measured are timed apart. With `every=100`, one step in a hundred is measured and the others
have nothing attached, so the share of training time it takes is (ratio - 1) / 100: a ratio of 3 is 2%.

Letters: B batch, H num_heads, L length, E width, N layers, V vocabulary.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from headwise.listeners.monitor import Monitor

from ..registry import OURS, Arm, Case, Prepared, Sizes, Values, register

UNMONITORED, NOT_DUE = "unmonitored", "monitored, not measured"
NEVER_AGAIN = 10**9


class CausalSelfAttention(nn.Module):
    """GPT-2's, on torch's fused function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1)
        )
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.c_proj(y.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class SmallGPT2(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        H, L, E, N, V = (sizes[letter] for letter in "HLENV")
        self.wte, self.wpe = nn.Embedding(V, E), nn.Embedding(L, E)
        self.h = nn.ModuleList(Block(E, H) for _ in range(N))
        self.ln_f, self.lm_head = nn.LayerNorm(E), nn.Linear(E, V, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))[:, :-1].flatten(0, 1)
        return cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), tokens[:, 1:].flatten()
        )


def monitored(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Forward, backward and the optimizer's step, whose learning rate of 0 keeps every call the same."""
    model = SmallGPT2(sizes).to(device, dtype).train()
    tokens = torch.randint(sizes["V"], (sizes["B"], sizes["L"])).to(device)

    def arm(model: nn.Module, every: int | None) -> Arm:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        monitor = None if every is None else Monitor(model, every)

        def step() -> list[Tensor]:
            optimizer.zero_grad()
            if monitor is None:
                loss = model(tokens)
                loss.backward()
            else:
                with monitor.step():
                    loss = model(tokens)
                    loss.backward()
            optimizer.step()
            gradients = [x.grad for x in model.parameters() if x.grad is not None]
            return [loss.detach(), *gradients]

        if monitor is not None:
            step()
            assert monitor.measured and len(monitor.latest) > sizes["N"] * sizes["H"]
        return step

    def part(result: list[Tensor]) -> Values:
        return {"loss": result[0]} | {f"gradient {i}": grad for i, grad in enumerate(result[1:])}

    arms = {OURS: arm(model, 1), UNMONITORED: arm(model, None), NOT_DUE: arm(model, NEVER_AGAIN)}
    return Prepared(arms, lambda: part(arm(copy.deepcopy(model).double(), None)()), part)


register(
    Case(
        "monitor_training_step",
        "a step of training, measured by Monitor; at every=100 it takes (ratio - 1) / 100 of the time",
        monitored,
        {"B": 4, "H": 8, "L": 256, "E": 512, "N": 4, "V": 1000},
        tiny={"B": 2, "H": 2, "L": 19, "E": 32, "N": 2, "V": 31},
        on_cuda={"B": 8, "H": 12, "L": 1024, "E": 768, "N": 12, "V": 50304},
        peer=UNMONITORED,
        target=3.0,
        factor=3.0,
        notes=("with every=100, a ratio of 3 is 2% of training time",),
    )
)
