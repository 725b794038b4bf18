import torch
import torch.nn as nn
import torch.nn.functional as F


class TemporalAttention(nn.Module):
    def __init__(self, hidden_dim, heads=4, drop=0.1):
        super().__init__()
        assert hidden_dim % heads == 0
        self.h = heads
        self.qkv = nn.Linear(hidden_dim, hidden_dim * 3)
        self.fc = nn.Linear(hidden_dim, hidden_dim)
        self.drop = drop

    def forward(self, feats):
        """feats: (batch, frames, hidden)"""
        b, t, c = feats.shape
        q, k, v = self.qkv(feats).chunk(3, dim=-1)
        # split the heads
        q = q.view(b, t, self.h, c // self.h)
        k = k.view(b, t, self.h, c // self.h)
        v = v.view(b, t, self.h, c // self.h)
        # flash attention when available
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop)
        y = y.reshape(b, t, c)
        return self.fc(y)


class TemporalBlock(nn.Module):
    def __init__(self, hidden_dim, heads=4, drop=0.1):
        super().__init__()
        self.ln1 = nn.LayerNorm(hidden_dim)
        self.attn = TemporalAttention(hidden_dim, heads, drop)
        self.ln2 = nn.LayerNorm(hidden_dim)
        self.ff = nn.Sequential(
            nn.Linear(hidden_dim, 4 * hidden_dim), nn.GELU(), nn.Linear(4 * hidden_dim, hidden_dim)
        )

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.ff(self.ln2(x))
