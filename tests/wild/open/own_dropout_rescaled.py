import math
import torch
import torch.nn as nn


class DroppedAttention(nn.Module):
    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.h = num_heads
        self.d = d_model // num_heads
        self.p = dropout
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.wo = nn.Linear(d_model, d_model)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, self.h, self.d).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        w = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d), -1)
        if self.training and self.p > 0:
            keep = (torch.rand_like(w) > self.p).to(w.dtype)
            w = w * keep / (1 - self.p)
        return self.wo((w @ v).transpose(1, 2).reshape(b, t, -1))
