import math
from typing import Optional

import torch
from torch import nn


class TokenMixer(nn.Module):
    """Multi-head self-attention used by every block of the encoder."""

    def __init__(self, channels: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        if channels % heads:
            raise ValueError("channels % heads != 0")
        self.channels = channels
        self.heads = heads
        self.theta = nn.Linear(channels, channels, bias=bias)
        self.phi = nn.Linear(channels, channels, bias=bias)
        self.out = nn.Linear(channels, channels, bias=bias)

    def _heads(self, t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(-1, (self.heads, -1)).movedim(-2, 1)

    def forward(self, x: torch.Tensor, pad: Optional[torch.Tensor] = None) -> torch.Tensor:
        """x is (batch, tokens, channels); pad is (batch, tokens), True at padding."""
        q = self._heads(self.theta(x))
        k = self._heads(self.phi(x))
        v = self._heads(x)
        logits = q @ k.mT / math.sqrt(self.channels // self.heads)
        if pad is not None:
            logits = logits.masked_fill(pad[:, None, None, :], -torch.inf)
        y = torch.softmax(logits, -1) @ v
        return self.out(y.movedim(1, -2).flatten(-2))


class Block(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.mix = TokenMixer(channels, heads)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x, pad=None):
        x = x + self.mix(self.n1(x), pad)
        return x + self.mlp(self.n2(x))
