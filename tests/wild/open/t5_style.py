import math
import torch
from torch import nn


class T5LikeAttention(nn.Module):
    """Encoder self-attention in the manner of T5: bucketed relative position bias
    added to the logits, no 1/sqrt(d) (it is folded in the initialisation), no biases."""

    def __init__(self, d_model=512, d_kv=64, num_heads=8, num_buckets=32, max_distance=128, dropout_rate=0.1):
        super().__init__()
        self.d_model, self.d_kv, self.n_heads = d_model, d_kv, num_heads
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        inner = num_heads * d_kv
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, inner, bias=False)
        self.v = nn.Linear(d_model, inner, bias=False)
        self.o = nn.Linear(inner, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)
        self.dropout = dropout_rate
        nn.init.normal_(self.q.weight, std=(d_model * d_kv) ** -0.5)
        nn.init.normal_(self.k.weight, std=d_model ** -0.5)
        nn.init.normal_(self.v.weight, std=d_model ** -0.5)
        nn.init.normal_(self.o.weight, std=inner ** -0.5)
        nn.init.normal_(self.relative_attention_bias.weight, std=d_model ** -0.5)

    def _bucket(self, relative_position):
        num_buckets = self.num_buckets // 2
        ret = (relative_position > 0).long() * num_buckets
        n = relative_position.abs()
        max_exact = num_buckets // 2
        is_small = n < max_exact
        large = max_exact + (
            torch.log(n.float().clamp(min=1) / max_exact)
            / math.log(self.max_distance / max_exact)
            * (num_buckets - max_exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return ret + torch.where(is_small, n, large)

    def compute_bias(self, qlen, klen, device):
        context = torch.arange(qlen, device=device)[:, None]
        memory = torch.arange(klen, device=device)[None, :]
        values = self.relative_attention_bias(self._bucket(memory - context))  # q, k, heads
        return values.permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden_states, mask=None):
        """mask: (batch, seq) with 1 for tokens to attend to, 0 for padding"""
        bs, n, _ = hidden_states.shape

        def shape(x):
            return x.view(bs, n, self.n_heads, self.d_kv).transpose(1, 2)

        q, k, v = shape(self.q(hidden_states)), shape(self.k(hidden_states)), shape(self.v(hidden_states))
        scores = torch.einsum("bnqd,bnkd->bnqk", q, k)
        scores = scores + self.compute_bias(n, n, scores.device)
        if mask is not None:
            extended = (1.0 - mask[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
            scores = scores + extended
        weights = torch.softmax(scores.float(), dim=-1).type_as(scores)
        weights = nn.functional.dropout(weights, p=self.dropout, training=self.training)
        context = (weights @ v).transpose(1, 2).contiguous().view(bs, n, -1)
        return self.o(context)
