import torch
from torch import nn


class CrossAttentionFusion(nn.Module):
    """Cross-attention between two feature maps of the same scene."""

    def __init__(self, dim, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Conv2d(dim, dim, 1)
        self.kv = nn.Conv2d(dim, 2 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, query_map, context_map):
        """query_map, context_map: feature maps of one grid, [B, C, H, W]."""
        B, C, H, W = query_map.shape
        split = (B, self.num_heads, C // self.num_heads, H * W)
        q = self.q(query_map).reshape(split).transpose(-2, -1)
        k, v = self.kv(context_map).chunk(2, dim=1)
        k, v = k.reshape(split).transpose(-2, -1), v.reshape(split).transpose(-2, -1)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        out = (attn @ v).transpose(-2, -1).reshape(B, C, H, W)
        return self.proj(out)
