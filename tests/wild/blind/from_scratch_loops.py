# Multi-head attention written out step by step, with no torch magic
import torch
import torch.nn as nn


class SlowMultiHeadAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.d = d
        self.h = h
        self.dk = d // h
        self.WQ = nn.ParameterList([nn.Parameter(torch.randn(d, self.dk) / d ** 0.5) for _ in range(h)])
        self.WK = nn.ParameterList([nn.Parameter(torch.randn(d, self.dk) / d ** 0.5) for _ in range(h)])
        self.WV = nn.ParameterList([nn.Parameter(torch.randn(d, self.dk) / d ** 0.5) for _ in range(h)])
        self.WO = nn.Parameter(torch.randn(h * self.dk, d) / d ** 0.5)

    def one_head(self, sentence, i):
        q = sentence @ self.WQ[i]
        k = sentence @ self.WK[i]
        v = sentence @ self.WV[i]
        scores = q @ k.T / self.dk ** 0.5          # words x words
        scores = scores - scores.max()             # so that exp does not overflow
        weights = torch.exp(scores)
        weights = weights / weights.sum(dim=1)     # rows sum to one
        return weights @ v

    def forward(self, x):
        batch_out = []
        for sentence in x:
            heads = []
            for i in range(self.h):
                heads.append(self.one_head(sentence, i))
            concat = torch.cat(heads, dim=1)
            batch_out.append(concat @ self.WO)
        return torch.stack(batch_out)
