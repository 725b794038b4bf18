"""Attention between the pixels of a picture, in a network that removes noise."""

import torch
from torch import Tensor, nn


class FarPixelAttention(nn.Module):
    """x: [batch, channels, height, width]."""

    def __init__(self, channels: int, num_heads: int = 4, groups: int = 8):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, 3, self.num_heads, -1, height * width).mT.unbind(1)
        weights = torch.softmax(q @ k.mT * channels ** -0.5, dim=-1)
        mixed = (weights @ v).mT.reshape(batch, channels, height, width)
        return x + self.proj(mixed)
