import math
import torch
import torch.nn as nn


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout=0.1):
        super().__init__()
        self.heads = heads
        self.drop = nn.Dropout(dropout)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        b, t, e = x.shape
        x = self.drop(x)
        q, k, v = (f(x).view(b, -1, self.heads, e // self.heads).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.mT / math.sqrt(q.shape[-1])
        return self.o((self.drop(s.softmax(-1)) @ v).transpose(1, 2).reshape(b, t, e))
