import torch
import torch.nn as nn


class SingleHead(nn.Module):
    def __init__(self, embed_size, head_size):
        super().__init__()
        self.K = nn.Linear(embed_size, head_size, bias=False)
        self.Q = nn.Linear(embed_size, head_size, bias=False)
        self.V = nn.Linear(embed_size, head_size, bias=False)
        self.sm = nn.Softmax(dim=2)

    def forward(self, x):
        k, q, v = self.K(x), self.Q(x), self.V(x)
        a = torch.bmm(q, k.permute(0, 2, 1)) / (q.size(2) ** 0.5)
        return torch.bmm(self.sm(a), v)


class MultiHead(nn.Module):
    def __init__(self, embed_size, num_heads):
        super().__init__()
        self.embed_size = embed_size
        self.num_heads = num_heads
        self.head_size = embed_size // num_heads
        self.heads = []
        for i in range(num_heads):
            self.heads.append(SingleHead(embed_size, self.head_size))
        self.linear = nn.Linear(num_heads * self.head_size, embed_size)

    def forward(self, x):
        outs = []
        for head in self.heads:
            outs.append(head(x))
        out = torch.cat(outs, dim=-1)
        return out


class Block(nn.Module):
    def __init__(self, embed_size, num_heads):
        super().__init__()
        self.mh = MultiHead(embed_size, num_heads)
        self.ff = nn.Sequential(nn.Linear(embed_size, 4 * embed_size), nn.ReLU(), nn.Linear(4 * embed_size, embed_size))
        self.n1 = nn.LayerNorm(embed_size)
        self.n2 = nn.LayerNorm(embed_size)

    def forward(self, x):
        x = self.n1(x + self.mh(x))
        return self.n2(x + self.ff(x))
