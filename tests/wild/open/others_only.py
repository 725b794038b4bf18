import math
import torch
import torch.nn as nn


class SetAttention(nn.Module):
    """Lookalike attention; no item sees itself (LSA of ViT for small datasets)."""

    def __init__(self, dim, num_heads=8, mask_diagonal=True):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.mask_diagonal = mask_diagonal
        self.qkv = nn.Linear(dim, dim * 3, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        """mask: [B, N] bool, True for items that exist."""
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        dots = q @ k.transpose(-2, -1) * self.scale
        hidden = torch.zeros(B, 1, N, N, dtype=torch.bool, device=x.device)
        if self.mask_diagonal:
            hidden = hidden | torch.eye(N, dtype=torch.bool, device=x.device)
        if mask is not None:
            hidden = hidden | ~mask[:, None, None, :]
        attn = dots.masked_fill(hidden, -1e9).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))
