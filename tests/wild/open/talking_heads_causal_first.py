import torch
import torch.nn as nn
from torch import einsum


class TalkingHeadsAttention(nn.Module):
    def __init__(self, dim, heads=8, causal=True):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.pre = nn.Parameter(torch.eye(heads) + 0.1 * torch.randn(heads, heads))

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, -1))
        dots = einsum("bhid,bhjd->bhij", q, k) * self.scale
        causal = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        dots = dots.masked_fill(causal, -1e9)
        dots = einsum("bhij,hg->bgij", dots, self.pre)
        attn = dots.softmax(dim=-1)
        out = einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.transpose(1, 2).reshape(b, n, -1))
