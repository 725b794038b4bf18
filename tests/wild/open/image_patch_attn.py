"""Внимание для ViT (курсовая)."""
import torch
import torch.nn as nn


class PatchEmbed(nn.Module):
    def __init__(self, img_size=32, patch=4, in_ch=3, dim=64):
        super().__init__()
        self.n = (img_size // patch) ** 2
        self.proj = nn.Conv2d(in_ch, dim, patch, patch)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class MHSA(nn.Module):
    """x: (B, N, dim) -> (B, N, dim)"""

    def __init__(self, dim=64, num_heads=4, qkv_bias=True, drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        B, N, C = x.shape
        # (3, B, голов, N, размер головы)
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        # матрица внимания, по строкам сумма равна единице
        attn = torch.matmul(q * self.scale, k.transpose(-1, -2))
        attn = self.drop(attn.softmax(dim=-1))
        # взвешенная сумма значений
        out = torch.matmul(attn.transpose(-1, -2), v)
        out = out.permute(0, 2, 1, 3).reshape(B, N, C)
        return self.proj(out)


class ViTBlock(nn.Module):
    def __init__(self, dim=64, num_heads=4, mlp_ratio=4):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = MHSA(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_ratio * dim), nn.GELU(), nn.Linear(mlp_ratio * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x
