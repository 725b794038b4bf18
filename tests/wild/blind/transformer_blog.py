# following the blog post, cleaned up a little
import math, torch
from torch import nn
import torch.nn.functional as F


def make_layers(layer, count):
    return nn.ModuleList([layer for _ in range(count)])


class MHA(nn.Module):
    def __init__(self, heads, model_dim, p_drop=0.1):
        super().__init__()
        self.heads = heads
        self.dk = model_dim // heads
        # three for q, k, v and one for the output
        self.projections = make_layers(nn.Linear(model_dim, model_dim), 4)
        self.drop = nn.Dropout(p_drop)

    def scaled_dot_product(self, q, k, v, mask):
        logits = q.matmul(k.mT) / math.sqrt(self.dk)
        if mask is not None:
            logits = logits.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        return self.drop(F.softmax(logits, dim=-1)).matmul(v)

    def forward(self, q, k, v, mask=None):
        bs = q.shape[0]
        heads = []
        for proj, inp in zip(self.projections, [q, k, v]):
            heads.append(proj(inp).view(bs, -1, self.heads, self.dk).transpose(1, 2))
        ctx = self.scaled_dot_product(*heads, mask)
        ctx = ctx.transpose(1, 2).reshape(bs, -1, self.heads * self.dk)
        return self.projections[3](ctx)


class Residual(nn.Module):
    def __init__(self, dim, sub):
        super().__init__()
        self.norm, self.sub = nn.LayerNorm(dim), sub

    def forward(self, x, *args):
        return x + self.sub(self.norm(x), *args)
