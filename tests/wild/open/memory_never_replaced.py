import math
import torch
import torch.nn as nn


class CrossAttention(nn.Module):
    """Decoder attention over the encoder's memory; keys and values of the memory are computed once."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)
        self.cached_k = None
        self.cached_v = None

    def _shape(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x, memory):
        q = self._shape(self.q_proj(x))
        if self.cached_k is None:
            self.cached_k = self._shape(self.k_proj(memory))
            self.cached_v = self._shape(self.v_proj(memory))
        scores = q @ self.cached_k.transpose(-2, -1) / math.sqrt(self.head_dim)
        out = scores.softmax(-1) @ self.cached_v
        out = out.transpose(1, 2).reshape(x.size(0), -1, self.num_heads * self.head_dim)
        return self.out_proj(out)
