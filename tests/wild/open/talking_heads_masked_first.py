import torch
import torch.nn as nn


class TalkingHeadsAttention(nn.Module):
    """Shazeer et al. 2020: heads are mixed before and after the softmax."""

    def __init__(self, dim, heads):
        super().__init__()
        self.h = heads
        self.dk = dim // heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.mix_scores = nn.Linear(heads, heads, bias=False)
        self.mix_weights = nn.Linear(heads, heads, bias=False)

    def forward(self, x, mask=None):
        """mask: [batch, time] bool, True for real tokens."""
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, self.h, self.dk).transpose(1, 2) for f in (self.q, self.k, self.v))
        s = q @ k.transpose(-1, -2) * self.dk ** -0.5
        if mask is not None:
            s = s.masked_fill(~mask[:, None, None, :], -1e9)
        s = self.mix_scores(s.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        w = s.softmax(-1)
        w = self.mix_weights(w.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.o((w @ v).transpose(1, 2).reshape(b, t, d))
