import torch
import torch.nn as nn


def to_windows(x, M):
    B, H, W, C = x.shape
    x = x.reshape(B, H // M, M, W // M, M, C)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, M * M, C)


def from_windows(w, M, H, W):
    B = w.shape[0] // ((H // M) * (W // M))
    x = w.reshape(B, H // M, W // M, M, M, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, -1)


class WindowMSA(nn.Module):
    """Attention inside non-overlapping MxM windows of a feature map, with a learned bias for every
    relative offset (dy, dx). Input and output are (B, H*W, C), H and W are multiples of M."""

    def __init__(self, dim, num_heads=4, window=4, qkv_bias=True, qk_scale=None, attn_drop=0., proj_drop=0.):
        super().__init__()
        self.M = window
        self.num_heads = num_heads
        head_dim = dim // num_heads
        self.scale = qk_scale or head_dim ** -0.5

        self.rel_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, num_heads))
        nn.init.trunc_normal_(self.rel_table, std=.02)
        yx = torch.cartesian_prod(torch.arange(window), torch.arange(window))   # N, 2
        d = yx[:, None, :] - yx[None, :, :] + (window - 1)                      # N, N, 2
        self.register_buffer("rel_index", d[..., 0] * (2 * window - 1) + d[..., 1], persistent=False)

        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x, H, W):
        B, L, C = x.shape
        assert L == H * W, "input feature has wrong size"
        assert H % self.M == 0 and W % self.M == 0
        x = to_windows(x.view(B, H, W, C), self.M)
        Bw, N, _ = x.shape

        qkv = self.qkv(x).reshape(Bw, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.rel_table[self.rel_index.view(-1)].view(N, N, -1).permute(2, 0, 1)
        attn = attn + bias.unsqueeze(0)
        attn = self.attn_drop(attn.softmax(dim=-1))

        x = (attn @ v).transpose(1, 2).reshape(Bw, N, C)
        x = from_windows(x, self.M, H, W).reshape(B, L, C)
        return self.proj_drop(self.proj(x))
