from functools import partial
import torch
import torch.nn as nn
import torch.nn.functional as F


def heads(x, n):
    return torch.stack(x.chunk(n, dim=-1), dim=-3)       # ... n, t, d


def unheads(x):
    return torch.cat(x.unbind(dim=-3), dim=-1)


def attention(xq, xkv, w_in, b_in, w_out, b_out, n_heads, p, attn_bias=None):
    """
    xq (..., T, E), xkv (..., S, E)
    w_in (3E, E), b_in (3E), w_out (E, E), b_out (E)
    attn_bias: broadcast to (..., n_heads, T, S), added to the logits
    p: dropout probability
    """
    E = xq.shape[-1]
    wq, wk, wv = w_in.split(E)
    bq, bk, bv = b_in.split(E)
    split = partial(heads, n=n_heads)
    q, k, v = split(F.linear(xq, wq, bq)), split(F.linear(xkv, wk, bk)), split(F.linear(xkv, wv, bv))
    logits = q @ k.mT / (E // n_heads) ** 0.5
    if attn_bias is not None:
        logits = logits + attn_bias
    probs = F.dropout(logits.softmax(-1), p)
    return F.linear(unheads(probs @ v), w_out, b_out)


class MultiHead(nn.Module):
    def __init__(self, embed, n_heads, p=0.1):
        super().__init__()
        assert not embed % n_heads
        self.n_heads, self.p = n_heads, p
        self.w_in = nn.Parameter(torch.empty(3 * embed, embed))
        self.b_in = nn.Parameter(torch.zeros(3 * embed))
        self.w_out = nn.Parameter(torch.empty(embed, embed))
        self.b_out = nn.Parameter(torch.zeros(embed))
        self.reset()

    def reset(self):
        nn.init.xavier_uniform_(self.w_in)
        nn.init.xavier_uniform_(self.w_out)

    def forward(self, x, memory=None, attn_bias=None):
        return attention(
            x, x if memory is None else memory,
            self.w_in, self.b_in, self.w_out, self.b_out,
            self.n_heads, self.p, attn_bias,
        )

    def extra_repr(self):
        return f"n_heads={self.n_heads}, p={self.p}"
