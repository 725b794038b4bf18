import math
import torch
import torch.nn as nn


class RelSelfAttention(nn.Module):
    """Self-attention over sequences of frames.

    mask: (batch, time, time), True where a query may attend to a key
    """

    def __init__(self, d_model, heads):
        super().__init__()
        self.h = heads
        self.dk = d_model // heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.o = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        # x: (time, batch, d_model)
        T, B, E = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.reshape(T, B * self.h, self.dk).transpose(0, 1) for t in (q, k, v))
        s = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.dk)
        if mask is not None:
            # (batch, time, time) -> (batch * heads, time, time)
            m = mask.repeat_interleave(self.h, dim=0)
            s = s.masked_fill(~m, float("-inf"))
        # weights: (batch, time, time) for every head
        y = torch.bmm(s.softmax(-1), v).transpose(0, 1).reshape(T, B, E)
        return self.o(y)
