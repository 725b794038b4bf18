import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, mask=None, fast=False):
        """mask: (B, T), 1 for tokens and 0 for padding"""
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        if fast:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            att = q @ k.transpose(-2, -1) / math.sqrt(C // self.n_heads)
            if mask is not None:
                att = att.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
            y = F.softmax(att, -1) @ v
        return self.out(y.transpose(1, 2).reshape(B, T, C))
