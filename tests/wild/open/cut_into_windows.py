import torch
import torch.nn as nn


class WindowAttention(nn.Module):
    """x: [batch, windows_high, windows_wide, tokens, dim], already cut into windows."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, nh, nw, t, d = x.shape
        q, k, v = self.to_qkv(x).view(b, nh, nw, t, 3, self.heads, d // self.heads).permute(4, 0, 1, 2, 5, 3, 6)
        a = (q @ k.transpose(-1, -2) * self.scale).softmax(-1)
        return self.to_out((a @ v).transpose(3, 4).reshape(b, nh, nw, t, d))
