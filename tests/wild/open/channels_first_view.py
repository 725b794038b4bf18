"""Attention between the places of a signal, channels first."""

import torch
from torch import Tensor, nn


class SignalAttention(nn.Module):
    """x: [batch, channels, places]."""

    def __init__(self, channels: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.project = nn.Linear(channels, 3 * channels)
        self.output = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, places = x.shape
        tokens = x.permute(0, 2, 1)
        q, k, v = self.project(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.mT * (channels // self.num_heads) ** -0.5, dim=-1)
        mixed = (weights @ v).transpose(1, 2).view(batch, places, channels)
        return self.output(mixed).permute(0, 2, 1)
