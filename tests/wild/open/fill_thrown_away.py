"""Attention over time steps, length first."""

import torch
from torch import Tensor, nn


class TimeAttention(nn.Module):
    """Inputs are time x batch x channel; allowed: bool [batch, time, time], False where nothing may be seen."""

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.layers = nn.ModuleList([nn.Linear(embed_dim, embed_dim) for _ in range(4)])

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        tgt_len, bsz, embed_dim = query.size()
        q, k, v = (
            layer(x).transpose(0, 1).reshape(bsz, -1, self.num_heads, embed_dim // self.num_heads).transpose(1, 2)
            for layer, x in zip(self.layers, (query, key, value))
        )
        scores = q @ k.transpose(-2, -1) * (embed_dim // self.num_heads) ** -0.5
        if attn_mask is not None:
            scores.masked_fill(attn_mask.unsqueeze(1) == False, float("-inf"))  # noqa: E712
        mixed = torch.softmax(scores, dim=-1) @ v
        return self.layers[-1](mixed.transpose(1, 2).reshape(bsz, tgt_len, embed_dim).transpose(0, 1))
