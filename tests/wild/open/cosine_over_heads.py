import torch
import torch.nn as nn
import torch.nn.functional as F


class CosineAttention(nn.Module):
    """Attention with normalised queries and keys and a learned temperature (Swin v2)."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(num_heads, 1, 1)))

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q = F.normalize(q, dim=1)
        k = F.normalize(k, dim=1)
        attn = q @ k.transpose(-2, -1) * self.logit_scale.clamp(max=4.6).exp()
        attn = attn.softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))
