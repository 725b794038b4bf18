"""Two attention modules that should compute the same: one with matmul, one with einsum."""
import math
import torch
from torch import nn


class MatmulAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.dh = heads, dim // heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q = self.q_proj(x).view(b, n, self.heads, self.dh).transpose(1, 2)
        k = self.k_proj(x).view(b, n, self.heads, self.dh).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.heads, self.dh).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.dh)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        w = scores.softmax(-1)
        return self.out_proj((w @ v).transpose(1, 2).reshape(b, n, d))


class EinsumAttention(nn.Module):
    """The same as MatmulAttention, written with einsum."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.dh = heads, dim // heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q = self.q_proj(x).view(b, n, self.heads, self.dh)
        k = self.k_proj(x).view(b, n, self.heads, self.dh)
        v = self.v_proj(x).view(b, n, self.heads, self.dh)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(self.dh)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        w = scores.softmax(-1)
        out = torch.einsum("bhij,bihd->bihd", w, v)
        return self.out_proj(out.reshape(b, n, d))
