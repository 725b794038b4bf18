"""Attention of a segmentation model whose keys come from a smaller picture."""

import math

import torch
from torch import Tensor, nn


class ReducedAttention(nn.Module):
    """x: [batch, pixels, width], of a square picture; keys and values from one that is `sr_ratio` times smaller."""

    def __init__(self, embed_dim: int, num_heads: int = 8, sr_ratio: int = 2):
        super().__init__()
        self.num_heads, self.sr_ratio = num_heads, sr_ratio
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key_value = nn.Linear(embed_dim, 2 * embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim)
        if sr_ratio > 1:
            self.smaller = nn.Conv2d(embed_dim, embed_dim, sr_ratio, stride=sr_ratio)

    def forward(self, x: Tensor) -> Tensor:
        batch, pixels, width = x.shape
        memory = x
        if self.sr_ratio > 1:
            side = int(math.sqrt(pixels))
            memory = self.smaller(x.transpose(1, 2).reshape(batch, width, side, side)).flatten(2).transpose(1, 2)
        q = self.query(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k, v = self.key_value(memory).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.mT / math.sqrt(self.num_heads), dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, pixels, width))
