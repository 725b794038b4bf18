import torch
from torch import nn


class MHA(nn.Module):
    """Listing 4.3 — multi-head attention with einsum."""

    def __init__(self, d: int, h: int):
        super().__init__()
        assert d % h == 0
        self.h = h
        self.dh = d // h
        self.wq = nn.Linear(d, d)
        self.wk = nn.Linear(d, d)
        self.wv = nn.Linear(d, d)
        self.wo = nn.Linear(d, d)

    def heads(self, x):
        # b = batch, t = time, h = head, e = head size
        return x.view(x.shape[0], x.shape[1], self.h, self.dh).permute(0, 2, 1, 3)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.heads(self.wq(query)), self.heads(self.wk(key)), self.heads(self.wv(value))
        # dot product of every query with every key
        dots = torch.einsum("bhqe,bhke−>bhqk", q, k)
        dots = dots / self.dh ** 0.5
        if mask is not None:
            dots = dots.masked_fill(mask.logical_not(), float("-inf"))
        a = dots.softmax(dim=-1)
        # mix the values
        y = torch.einsum("bhqk,bhke−>bhqe", a, v)
        y = y.permute(0, 2, 1, 3).reshape(query.shape[0], query.shape[1], -1)
        return self.wo(y)


def causal(n):
    return torch.ones(n, n).tril().bool()
