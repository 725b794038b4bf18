from einops import rearrange, repeat
from torch import nn, einsum
import torch


def exists(val):
    return val is not None


def default(val, d):
    if exists(val):
        return val
    return d() if callable(d) else d


class CrossAttention(nn.Module):
    """UNet cross attention; queries are processed in slices of `slice_size` to save memory"""

    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0., slice_size=16):
        super().__init__()
        inner_dim = dim_head * heads
        context_dim = default(context_dim, query_dim)

        self.scale = dim_head ** -0.5
        self.heads = heads
        self.slice_size = slice_size

        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)

        self.to_out = nn.Sequential(
            nn.Linear(inner_dim, query_dim),
            nn.Dropout(dropout)
        )

    def forward(self, x, context=None, mask=None):
        h = self.heads

        q = self.to_q(x)
        context = default(context, x)
        k = self.to_k(context)
        v = self.to_v(context)

        q, k, v = map(lambda t: rearrange(t, 'b n (h d) -> (b h) n d', h=h), (q, k, v))

        if exists(mask):
            mask = rearrange(mask, 'b ... -> b (...)')
            mask = repeat(mask.bool(), 'b j -> (b h) () j', h=h)

        out = []
        for start in range(0, q.shape[1], self.slice_size):
            end = min(start + self.slice_size, q.shape[1])
            sim = einsum('b i d, b j d -> b i j', q[:, start:end], k) * self.scale
            if exists(mask):
                max_neg_value = -torch.finfo(sim.dtype).max
                sim.masked_fill_(~mask, max_neg_value)
            # attention, what we cannot get enough of
            attn = sim.softmax(dim=-1)
            out.append(einsum('b i j, b j d -> b i d', attn, v))
            del sim, attn
        out = torch.cat(out, dim=1)

        out = rearrange(out, '(b h) n d -> b n (h d)', h=h)
        return self.to_out(out)
