import torch
from torch import nn, Tensor

# hyperparameters
n_heads = 6
d_model = 48
block_size = 64
dropout = 0.2
# ------------


class AttentionSublayer(nn.Module):
    """x + Attn(LN(x)), autoregressive."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.proj = nn.Linear(d_model, d_model)
        self.attn_drop = nn.Dropout(dropout)
        self.resid_drop = nn.Dropout(dropout)
        self.register_buffer('tril', torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm(x)).split(d_model, dim=-1)
        hs = C // n_heads
        q = q.view(B, T, n_heads, hs).transpose(1, 2)
        k = k.view(B, T, n_heads, hs).transpose(1, 2)
        v = v.view(B, T, n_heads, hs).transpose(1, 2)

        wei = q @ k.transpose(-2, -1) * hs ** -0.5   # (B, nh, T, T)
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float('-inf'))
        wei = wei.softmax(dim=-1)
        wei = self.attn_drop(wei)

        out = (wei @ v).transpose(1, 2).contiguous().view(B, T, C)
        return x + self.resid_drop(self.proj(out))


class FeedForwardSublayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.net = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model), nn.Dropout(dropout))

    def forward(self, x):
        return x + self.net(self.norm(x))
