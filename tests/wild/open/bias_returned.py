"""An encoder layer that hands its bias by position to the layers after it."""

import torch
from torch import Tensor, nn


class BucketAttention(nn.Module):
    """Attention with a learned number for each distance, beside unscaled scores; returns (output, bias)."""

    def __init__(self, d_model: int, num_heads: int, reach: int = 64):
        super().__init__()
        self.num_heads, self.reach = num_heads, reach
        self.q = nn.Linear(d_model, d_model, bias=False)
        self.k = nn.Linear(d_model, d_model, bias=False)
        self.v = nn.Linear(d_model, d_model, bias=False)
        self.o = nn.Linear(d_model, d_model, bias=False)
        self.by_distance = nn.Embedding(2 * reach + 1, num_heads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[1])
        steps = (places[None, :] - places[:, None]).clamp(-self.reach, self.reach) + self.reach
        bias = self.by_distance(steps).permute(2, 0, 1)[None]  # [1, heads, length, length]
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = (q @ k.mT + bias).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).flatten(2)), bias
