import torch
from torch import nn


class AttentionHead(nn.Module):
    def __init__(self, emb_size, head_size):
        super().__init__()
        self.q = nn.Linear(emb_size, head_size, bias=False)
        self.k = nn.Linear(emb_size, head_size, bias=False)
        self.v = nn.Linear(emb_size, head_size, bias=False)
        self.factor = head_size ** 0.5

    def forward(self, tokens, allowed=None):
        affinity = torch.bmm(self.q(tokens), self.k(tokens).permute(0, 2, 1)).div(self.factor)
        if allowed is not None:
            affinity = affinity.masked_fill(allowed.logical_not(), -1e9)
        return torch.bmm(affinity.softmax(dim=2), self.v(tokens))


class Attention(nn.Module):
    """
    Parameters
    ----------
    emb_size : int
        Width of the token vectors.
    num_heads : int
        How many heads; must divide ``emb_size``.

    Shapes
    ------
    tokens : (batch, time, emb_size)
    allowed : (batch, time, time) or None, True/1 where looking is allowed
    """

    def __init__(self, emb_size: int, num_heads: int):
        super().__init__()
        if emb_size % num_heads:
            raise ValueError(f"{emb_size=} is not divisible by {num_heads=}")
        self.heads = [AttentionHead(emb_size, emb_size // num_heads) for _ in range(num_heads)]
        self.unify = nn.Linear(emb_size, emb_size)

    def forward(self, tokens, allowed=None):
        results = []
        for head in self.heads:
            results.append(head(tokens, allowed))
        return self.unify(torch.cat(results, dim=-1))


class Classifier(nn.Module):
    def __init__(self, vocab, emb_size, num_heads, num_classes):
        super().__init__()
        self.emb = nn.Embedding(vocab, emb_size)
        self.att = Attention(emb_size, num_heads)
        self.norm = nn.LayerNorm(emb_size)
        self.out = nn.Linear(emb_size, num_classes)

    def forward(self, ids):
        x = self.emb(ids)
        x = self.norm(x + self.att(x))
        return self.out(x.mean(dim=1))
