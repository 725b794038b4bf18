import math

import torch
from torch import nn


class T5Attention(nn.Module):
    """T5: no biases, a learned relative position bias, and no 1/sqrt(d) factor
    (it is folded into the initialisation of q)."""

    def __init__(self, d_model, d_kv, num_heads, num_buckets=32, max_distance=128, bidirectional=True, dropout=0.0):
        super().__init__()
        self.d_model, self.d_kv, self.n_heads = d_model, d_kv, num_heads
        self.inner_dim = num_heads * d_kv
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.q = nn.Linear(d_model, self.inner_dim, bias=False)
        self.k = nn.Linear(d_model, self.inner_dim, bias=False)
        self.v = nn.Linear(d_model, self.inner_dim, bias=False)
        self.o = nn.Linear(self.inner_dim, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)
        self.dropout = nn.Dropout(dropout)
        self.q.weight.data.normal_(mean=0.0, std=(d_model * d_kv) ** -0.5)
        self.k.weight.data.normal_(mean=0.0, std=d_model ** -0.5)
        self.v.weight.data.normal_(mean=0.0, std=d_model ** -0.5)
        self.o.weight.data.normal_(mean=0.0, std=self.inner_dim ** -0.5)

    def _bucket(self, relative_position):
        num_buckets, ret = self.num_buckets, 0
        if self.bidirectional:
            num_buckets //= 2
            ret = (relative_position > 0).long() * num_buckets
            n = relative_position.abs()
        else:
            n = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = num_buckets // 2
        is_small = n < max_exact
        large = max_exact + (
            torch.log(n.clamp(min=1).float() / max_exact)
            / math.log(self.max_distance / max_exact)
            * (num_buckets - max_exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return ret + torch.where(is_small, n, large)

    def compute_bias(self, qlen, klen, device):
        ctx = torch.arange(qlen, device=device)[:, None]
        mem = torch.arange(klen, device=device)[None, :]
        values = self.relative_attention_bias(self._bucket(mem - ctx))
        return values.permute(2, 0, 1).unsqueeze(0)  # 1, heads, q, k

    def forward(self, hidden_states, mask=None):
        b, n, _ = hidden_states.shape

        def shape(s):
            return s.view(b, -1, self.n_heads, self.d_kv).transpose(1, 2)

        q, k, v = shape(self.q(hidden_states)), shape(self.k(hidden_states)), shape(self.v(hidden_states))
        scores = torch.matmul(q, k.transpose(3, 2))
        scores = scores + self.compute_bias(n, n, scores.device)
        if mask is not None:  # (b, n), 1 for words, 0 for pads
            scores = scores + (1.0 - mask[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
        weights = self.dropout(torch.softmax(scores.float(), dim=-1).type_as(scores))
        out = torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, -1, self.inner_dim)
        return self.o(out)
