import math
import torch, torch.nn as nn

DEFAULTS = dict(n_embd=64, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0, bias=False)


def slopes(n):
    def pow2(m):
        start = 2 ** (-2 ** -(math.log2(m) - 3))
        return [start * start ** i for i in range(m)]
    if math.log2(n).is_integer():
        return pow2(n)
    c = 2 ** math.floor(math.log2(n))
    return pow2(c) + slopes(2 * c)[0::2][: n - c]


class Attn(nn.Module):
    # multi-query: h query heads, one shared key head, one shared value head; positions by ALiBi
    def __init__(self, config=None):
        super().__init__()
        cfg = {**DEFAULTS, **(config or {})}
        self.h, self.e = cfg["n_head"], cfg["n_embd"]
        assert self.e % self.h == 0
        self.d = self.e // self.h
        self.Wqkv = nn.Linear(self.e, self.e + 2 * self.d, bias=cfg["bias"])
        self.out_proj = nn.Linear(self.e, self.e, bias=cfg["bias"])
        self.p1, self.p2 = nn.Dropout(cfg["attn_pdrop"]), nn.Dropout(cfg["resid_pdrop"])
        self.register_buffer("m", torch.tensor(slopes(self.h)).view(1, self.h, 1, 1))

    def forward(self, x, attention_mask=None):
        """attention_mask: (b, t), 1 for tokens, 0 for padding on the right"""
        b, t, _ = x.shape
        q, k, v = self.Wqkv(x).split([self.e, self.d, self.d], dim=-1)
        # fold the heads into the query axis, the single key head serves all of them
        q = q.view(b, t, self.h, self.d).transpose(1, 2).reshape(b, self.h * t, self.d)
        s = torch.baddbmm(q.new_zeros(1), q, k.transpose(1, 2), beta=0.0, alpha=1 / math.sqrt(self.d))
        s = s.view(b, self.h, t, t)

        pos = torch.arange(t, device=x.device)
        dist = pos[None, :] - pos[:, None]                 # key minus query, <= 0 in the past
        s = s + self.m * dist
        keep = dist <= 0
        if attention_mask is not None:
            keep = keep & attention_mask[:, None, None, :].bool()
        s = s.masked_fill(~keep, torch.finfo(s.dtype).min)

        a = self.p1(torch.softmax(s.float(), dim=-1).type_as(v))
        y = torch.bmm(a.view(b, self.h * t, t), v).view(b, self.h, t, self.d)
        y = y.permute(0, 2, 1, 3).reshape(b, t, self.e)
        return self.p2(self.out_proj(y))
