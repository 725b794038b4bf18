import torch
from torch import nn, einsum
from einops import rearrange


def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


class LocalAttention(nn.Module):
    """causal attention restricted to the last `window_size` tokens (itself included)"""
    def __init__(self, dim, *, heads = 8, dim_head = None, window_size = 128, dropout = 0.):
        super().__init__()
        dim_head = default(dim_head, dim // heads)
        inner_dim = dim_head * heads
        self.heads = heads
        self.window_size = window_size
        self.scale = dim_head ** -0.5

        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias = False)
        self.to_out = nn.Linear(inner_dim, dim, bias = False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask = None):
        """mask - (b, n) bool, True = token is real"""
        n, device, h = x.shape[-2], x.device, self.heads

        qkv = self.to_qkv(x).chunk(3, dim = -1)
        q, k, v = map(lambda t: rearrange(t, 'b n (h d) -> b h n d', h = h), qkv)

        sim = einsum('b h i d, b h j d -> b h i j', q, k) * self.scale

        i = torch.arange(n, device = device)
        dist = rearrange(i, 'i -> i 1') - rearrange(i, 'j -> 1 j')
        banned = (dist < 0) | (dist >= self.window_size)

        max_neg_value = -torch.finfo(sim.dtype).max
        sim = sim.masked_fill(banned, max_neg_value)
        if exists(mask):
            sim = sim.masked_fill(~rearrange(mask, 'b j -> b 1 1 j'), max_neg_value)

        attn = sim.softmax(dim = -1)
        attn = self.dropout(attn)

        out = einsum('b h i j, b h j d -> b h i d', attn, v)
        out = rearrange(out, 'b h n d -> b n (h d)')
        return self.to_out(out)
