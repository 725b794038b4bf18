import torch, math
import torch.nn as nn
import torch.nn.functional as F

class SelfAttention(nn.Module):
    def __init__(self, emb, heads=8, mask=False):
        """
        :param emb: embedding dimension
        :param heads: number of heads
        :param mask: default for the causal flag of forward()
        """
        super().__init__()
        assert emb % heads == 0
        self.emb, self.heads, self.mask = emb, heads, mask
        self.tokeys    = nn.Linear(emb, emb, bias=False)
        self.toqueries = nn.Linear(emb, emb, bias=False)
        self.tovalues  = nn.Linear(emb, emb, bias=False)
        self.unifyheads = nn.Linear(emb, emb)

    def forward(self, x, mask=None):
        """mask=True: position i only sees positions <= i.  mask=False: sees everything."""
        if mask is None:
            mask = self.mask
        b, t, e = x.size()
        h = self.heads
        s = e // h

        keys    = self.tokeys(x).view(b, t, h, s)
        queries = self.toqueries(x).view(b, t, h, s)
        values  = self.tovalues(x).view(b, t, h, s)

        # fold heads into the batch dimension
        keys    = keys.transpose(1, 2).contiguous().view(b * h, t, s)
        queries = queries.transpose(1, 2).contiguous().view(b * h, t, s)
        values  = values.transpose(1, 2).contiguous().view(b * h, t, s)

        # instead of dividing the dot products, we scale both sides
        queries = queries / (s ** (1/4))
        keys    = keys / (s ** (1/4))

        dot = torch.bmm(queries, keys.transpose(1, 2))
        assert dot.size() == (b*h, t, t)

        if mask:
            i, j = torch.triu_indices(t, t, offset=1, device=x.device)
            dot[..., i, j] = float('-inf')

        dot = F.softmax(dot, dim=2)
        out = torch.bmm(dot, values).view(b, h, t, s)
        out = out.transpose(1, 2).contiguous().view(b, t, s * h)
        return self.unifyheads(out)

class TransformerBlock(nn.Module):
    def __init__(self, emb, heads, mask, ff_hidden_mult=4, dropout=0.0):
        super().__init__()
        self.attention = SelfAttention(emb, heads=heads, mask=mask)
        self.norm1, self.norm2 = nn.LayerNorm(emb), nn.LayerNorm(emb)
        self.ff = nn.Sequential(nn.Linear(emb, ff_hidden_mult * emb), nn.ReLU(), nn.Linear(ff_hidden_mult * emb, emb))
        self.do = nn.Dropout(dropout)

    def forward(self, x):
        x = self.do(self.norm1(self.attention(x) + x))
        return self.do(self.norm2(self.ff(x) + x))
