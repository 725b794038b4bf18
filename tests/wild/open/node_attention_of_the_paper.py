import math
import torch
import torch.nn as nn

class SelfAttention(nn.Module):
    """Multi-head attention after Vaswani et al., "Attention Is All You Need"."""

    def __init__(self, dim, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)

    def split(self, x):
        B, T, E = x.shape
        return x.view(B, T, self.num_heads, E // self.num_heads).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        weights = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)
