import math
import torch
import torch.nn as nn


class AttentionWithBiases(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.d = d_model // num_heads
        self.w_q = nn.Parameter(torch.randn(d_model, d_model) / math.sqrt(d_model))
        self.w_k = nn.Parameter(torch.randn(d_model, d_model) / math.sqrt(d_model))
        self.w_v = nn.Parameter(torch.randn(d_model, d_model) / math.sqrt(d_model))
        self.w_o = nn.Parameter(torch.randn(d_model, d_model) / math.sqrt(d_model))
        self.b_q = nn.Parameter(torch.zeros(d_model))
        self.b_k = nn.Parameter(torch.zeros(d_model))
        self.b_v = nn.Parameter(torch.zeros(d_model))
        self.b_o = nn.Parameter(torch.zeros(d_model))

    def forward(self, x, mask=None):
        b, t, e = x.shape
        q = x @ self.w_q + self.b_q
        k = x @ self.w_k + self.b_v
        v = x @ self.w_v + self.b_k
        q, k, v = (z.view(b, t, self.h, self.d).transpose(1, 2) for z in (q, k, v))
        s = q @ k.mT / math.sqrt(self.d)
        if mask is not None:
            s = s.masked_fill(mask == 0, float("-inf"))
        return (s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, e) @ self.w_o + self.b_o
