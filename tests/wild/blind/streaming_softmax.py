"""Memory-lean multi-head attention: keys are visited in tiles, and the softmax is
accumulated on the way (running maximum, running denominator)."""
from __future__ import annotations

import torch
from torch import nn


def tiled_attention(q, k, v, keep=None, tile=16):
    # q: (..., Lq, d)   k, v: (..., Lk, d)   keep: broadcastable to (..., Lq, Lk), True = may look
    scale = q.shape[-1] ** -0.5
    run_max = q.new_full(q.shape[:-1] + (1,), -1e30)
    run_sum = q.new_zeros(q.shape[:-1] + (1,))
    acc = q.new_zeros(q.shape[:-1] + (v.shape[-1],))
    for a in range(0, k.shape[-2], tile):
        b = min(a + tile, k.shape[-2])
        s = torch.einsum("...id,...jd->...ij", q * scale, k[..., a:b, :])
        if keep is not None:
            s = s.masked_fill(~keep[..., a:b], float("-inf"))
        new_max = torch.maximum(run_max, s.amax(dim=-1, keepdim=True))
        p = torch.exp(s - new_max)
        fix = torch.exp(run_max - new_max)
        run_sum = run_sum * fix + p.sum(dim=-1, keepdim=True)
        acc = acc * fix + p @ v[..., a:b, :]
        run_max = new_max
    return acc / run_sum.clamp_min(1e-30)


class LeanMHA(nn.Module):
    def __init__(self, width: int, heads: int, tile: int = 16, causal: bool = False):
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} does not split into {heads} heads")
        self.heads, self.tile, self.causal = heads, tile, causal
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)

    def _split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def forward(self, x, context=None, context_keep=None):
        """context_keep: (batch, keys) bool, True where the key is a real token."""
        source = x if context is None else context
        q, k, v = self._split(self.to_q(x)), self._split(self.to_k(source)), self._split(self.to_v(source))
        keep = None
        if context_keep is not None:
            keep = context_keep[:, None, None, :].expand(-1, 1, x.shape[1], -1)
        if self.causal and context is None:
            n = x.shape[1]
            tri = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
            keep = tri if keep is None else keep & tri
        o = tiled_attention(q, k, v, keep, self.tile)
        return self.to_out(o.transpose(-2, -3).flatten(-2))
