import math
import torch
import torch.nn as nn


class CausalAttention(nn.Module):
    def __init__(self, d_model, num_heads, causal=False):
        super().__init__()
        self.num_heads = num_heads
        self.d_head = d_model // num_heads
        self.causal = causal
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.wo = nn.Linear(d_model, d_model)

    def forward(self, x, key_padding_mask=None):
        """key_padding_mask: [batch, time], True at padding."""
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, self.num_heads, self.d_head).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        s = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
        mask = None
        if key_padding_mask is not None:
            mask = key_padding_mask[:, None, None, :]
        if self.causal:
            mask = torch.triu(torch.ones(t, t, dtype=torch.bool, device=x.device), 1)
        if mask is not None:
            s = s.masked_fill(mask, float("-inf"))
        return self.wo((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, -1))
