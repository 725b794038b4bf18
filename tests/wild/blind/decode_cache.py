"""Attention for step by step decoding. `past` is the pair (keys, values) of what was seen so far."""
import torch
import torch.nn as nn


class CachedAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.hd = hidden // heads
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, hidden)
        self.v_proj = nn.Linear(hidden, hidden)
        self.o_proj = nn.Linear(hidden, hidden)

    def forward(self, x, past=None, use_cache=False):
        bs, new, _ = x.size()
        shp = (bs, new, self.heads, self.hd)
        q = self.q_proj(x).view(shp).permute(0, 2, 1, 3)
        k = self.k_proj(x).view(shp).permute(0, 2, 1, 3)
        v = self.v_proj(x).view(shp).permute(0, 2, 1, 3)

        offset = 0
        if past is not None:
            pk, pv = past
            offset = pk.size(2)
            k = torch.cat((pk, k), dim=2)
            v = torch.cat((pv, v), dim=2)
        total = offset + new

        w = torch.matmul(q, k.permute(0, 1, 3, 2)).div(self.hd ** .5)
        # query i sits at absolute position offset + i
        rows = torch.arange(offset, total, device=x.device).unsqueeze(1)
        cols = torch.arange(total, device=x.device).unsqueeze(0)
        w = w.masked_fill(cols > rows, -float('inf'))
        w = w.softmax(-1)

        y = torch.matmul(w, v).permute(0, 2, 1, 3).reshape(bs, new, -1)
        y = self.o_proj(y)
        if use_cache:
            return y, (k, v)
        return y


@torch.no_grad()
def step_by_step(layer, x):
    past, outs = None, []
    for i in range(x.size(1)):
        o, past = layer(x[:, i:i + 1], past=past, use_cache=True)
        outs.append(o)
    return torch.cat(outs, 1)
