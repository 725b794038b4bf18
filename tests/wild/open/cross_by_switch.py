import math
import torch
import torch.nn as nn


class Attention(nn.Module):
    """Self-attention, or with is_cross cross-attention, whose mask is memory_mask."""

    def __init__(self, dim, heads, is_cross=False):
        super().__init__()
        self.heads, self.is_cross = heads, is_cross
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, memory=None, mask=None, memory_mask=None):
        source = memory if self.is_cross and memory is not None else x
        used = memory_mask if self.is_cross else mask
        b, t, e = x.shape
        q, k, v = (f(y).view(b, -1, self.heads, e // self.heads).transpose(1, 2)
                   for f, y in ((self.q, x), (self.k, source), (self.v, source)))
        s = q @ k.mT / math.sqrt(q.shape[-1])
        if used is not None:
            s = s.masked_fill(used[:, None, None] == 0, -1e9)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).reshape(b, t, e))
