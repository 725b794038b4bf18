"""Causal self-attention with rotary embeddings (half-split layout, as in NeoX)."""
import math
from typing import Optional

import torch
from torch import nn


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class RotarySelfAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, max_seq_len: int = 2048, rope_theta: float = 10000.0):
        super().__init__()
        if dim % n_heads:
            raise ValueError(f"dim={dim} is not a multiple of n_heads={n_heads}")
        self.n_heads = n_heads
        self.head_dim = dim // n_heads
        assert self.head_dim % 2 == 0, "rotary needs an even head size"
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

        inv_freq = 1.0 / (rope_theta ** (torch.arange(0, self.head_dim, 2).float() / self.head_dim))
        pos = torch.arange(max_seq_len).float()
        angles = torch.outer(pos, inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos_cached", angles.cos(), persistent=False)
        self.register_buffer("sin_cached", angles.sin(), persistent=False)

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        # x: (bs, heads, seq, head_dim); rotation happens in fp32 whatever the weights are
        seq = x.shape[-2]
        xf = x.float()
        out = xf * self.cos_cached[:seq].float() + rotate_half(xf) * self.sin_cached[:seq].float()
        return out.type_as(x)

    def forward(self, x: torch.Tensor, attention_mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        """attention_mask: (bs, seq), 1 for real tokens and 0 for padding on the right."""
        bs, seq, _ = x.shape
        q, k, v = (
            w(x).view(bs, seq, self.n_heads, self.head_dim).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = self._rope(q), self._rope(k)

        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        allowed = torch.ones(seq, seq, dtype=torch.bool, device=x.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = scores.float().softmax(dim=-1).type_as(v)
        y = (probs @ v).transpose(1, 2).reshape(bs, seq, -1)
        return self.wo(y)
