"""Right modules in the styles and naming schemes that learners use: none of them has a fault.

E = 24 and H = 4 wherever a module must be built; `arguments` are those of its constructor.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812

from . import rotary


class Right(NamedTuple):
    """A right module: `make(**arguments)` builds it; a function has no arguments and is `make` itself."""

    style: str
    make: Callable[..., Any]
    arguments: dict[str, Any]
    note: str

    def build(self) -> Callable[..., Any]:
        return self.make(**self.arguments) if isinstance(self.make, type) else self.make


class FourLinears(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.h = h
        self.d_k = d_model // h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))
        self.attn = None
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        n = query.size(0)
        query, key, value = [
            lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        self.attn = self.dropout(scores.softmax(dim=-1))
        x = torch.matmul(self.attn, value).transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        return self.linears[-1](x)


class Config:
    def __init__(self, n_embd=24, n_head=4, block_size=32, dropout=0.1, bias=True):
        self.n_embd = n_embd
        self.n_head = n_head
        self.block_size = block_size
        self.dropout = dropout
        self.bias = bias


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        assert config.n_embd % config.n_head == 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        ones = torch.ones(config.block_size, config.block_size)
        self.register_buffer("bias", torch.tril(ones)[None, None])

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.reshape(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, -1))
        att = q @ k.transpose(-2, -1) * k.size(-1) ** -0.5
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(att.softmax(-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class EncoderAttention(nn.Module):
    """attention_mask: added to the scores, 0 for a token and a large negative number for padding."""

    def __init__(self, hidden_size, num_attention_heads, attention_probs_dropout_prob=0.1):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.attention_head_size = hidden_size // num_attention_heads
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(attention_probs_dropout_prob)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        q = self.transpose_for_scores(self.query(hidden_states))
        k = self.transpose_for_scores(self.key(hidden_states))
        v = self.transpose_for_scores(self.value(hidden_states))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = self.dropout(nn.functional.softmax(scores, dim=-1))
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        out = self.dense(context.view(*hidden_states.shape))
        return (out, probs) if output_attentions else (out,)


class FusedSplit(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_embd, self.n_head = n_embd, n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, mask=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))
        if mask is not None:
            att = att.masked_fill(mask == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Head(nn.Module):
    def __init__(self, n_embd, head_size, block_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        T = x.shape[1]
        k, q = self.key(x), self.query(x)
        wei = q @ k.mT * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return wei.softmax(dim=-1) @ self.value(x)


class HeadsSideBySide(nn.Module):
    def __init__(self, n_embd, num_heads, block_size=32):
        super().__init__()
        self.heads = nn.ModuleList(Head(n_embd, n_embd // num_heads, block_size) for _ in range(num_heads))
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class HeadAxisParameters(nn.Module):
    def __init__(self, d_model, n_heads, d_head):
        super().__init__()
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_K = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_V = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_O = nn.Parameter(torch.empty(n_heads, d_head, d_model))
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))
        for w in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(w, std=0.2)

    def forward(self, x):
        q, k, v = (
            torch.einsum("bpm,hmd->bphd", x, w) + b
            for w, b in ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V))
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.d_head**0.5
        after = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        pattern = scores.masked_fill(after, -torch.inf).softmax(-1)
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O) + self.b_O


class ValuesKeysQuery(nn.Module):
    def __init__(self, embed_size, heads):
        super().__init__()
        self.embed_size, self.heads = embed_size, heads
        self.head_dim = embed_size // heads
        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query, mask):
        N, Q, _ = query.shape
        values = self.values(values).reshape(N, -1, self.heads, self.head_dim)
        keys = self.keys(keys).reshape(N, -1, self.heads, self.head_dim)
        queries = self.queries(query).reshape(N, Q, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", queries, keys)
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))
        attention = torch.softmax(energy / self.head_dim**0.5, dim=3)
        out = torch.einsum("nhqk,nkhd->nqhd", attention, values).reshape(N, Q, self.embed_size)
        return self.fc_out(out)


class SequenceFirst(nn.Module):
    """query: [T, B, E], key and value: [S, B, E]; mask: [T, S, B], 1 = may attend."""

    def __init__(self, heads, d_model):
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)

    def forward(self, *, query, key, value, mask=None):
        seq_len, batch, _ = query.shape
        q = self.query(query).view(seq_len, batch, self.heads, self.d_k)
        k = self.key(key).view(-1, batch, self.heads, self.d_k)
        v = self.value(value).view(-1, batch, self.heads, self.d_k)
        scores = torch.einsum("ibhd,jbhd->ijbh", q, k) * self.d_k**-0.5
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(-1) == 0, float("-inf"))
        x = torch.einsum("ijbh,jbhd->ibhd", scores.softmax(dim=1), v)
        return self.output(x.reshape(seq_len, batch, -1))


class AdditiveMask(nn.Module):
    """bias: float, broadcasts to [B, H, T, S], added to the scores."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, bias=None):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, x in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v))
        )
        scores = q @ k.mT / q.size(-1) ** 0.5
        if bias is not None:
            scores = scores + bias
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TorchFunction(nn.Module):
    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.wo = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, attn_mask=None, is_causal=False):
        B, T, E = query.shape
        q = self.wq(query).view(B, -1, self.num_heads, E // self.num_heads).transpose(1, 2)
        k = self.wk(key).view(B, -1, self.num_heads, E // self.num_heads).transpose(1, 2)
        v = self.wv(value).view(B, -1, self.num_heads, E // self.num_heads).transpose(1, 2)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p, is_causal=is_causal)
        return self.wo(y.transpose(1, 2).reshape(B, T, E))


class KeyPaddingMask(nn.Module):
    """key_padding_mask: bool [B, S], True where a key is padding."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.fc_q = nn.Linear(embed_dim, embed_dim)
        self.fc_k = nn.Linear(embed_dim, embed_dim)
        self.fc_v = nn.Linear(embed_dim, embed_dim)
        self.fc_o = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, key_padding_mask=None):
        B, T, E = query.shape
        q = self.fc_q(query).view(B, -1, self.num_heads, E // self.num_heads).transpose(1, 2)
        k = self.fc_k(key).view(B, -1, self.num_heads, E // self.num_heads).transpose(1, 2)
        v = self.fc_v(value).view(B, -1, self.num_heads, E // self.num_heads).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(E // self.num_heads)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        return self.fc_o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))


class Renormalised(nn.Module):
    """mask: [B, T, S], 1 = may attend. Applied after softmax, and the rows are made to sum to 1 again."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d_k = num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        B, T, E = q.shape
        q = self.W_q(q).view(B, -1, self.h, self.d_k).transpose(1, 2)
        k = self.W_k(k).view(B, -1, self.h, self.d_k).transpose(1, 2)
        v = self.W_v(v).view(B, -1, self.h, self.d_k).transpose(1, 2)
        w = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(self.d_k), dim=-1)
        if mask is not None:
            w = w * mask.unsqueeze(1)
            w = w / w.sum(dim=-1, keepdim=True)
        return self.W_o((w @ v).transpose(1, 2).reshape(B, T, E))


class QueriesScaledFirst(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.scaling = num_heads, (d_model // num_heads) ** -0.5
        self.linear_q = nn.Linear(d_model, d_model)
        self.linear_k = nn.Linear(d_model, d_model)
        self.linear_v = nn.Linear(d_model, d_model)
        self.linear_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, E = query.shape
        q = self.linear_q(query) * self.scaling
        q = q.view(B, T, self.num_heads, -1).transpose(1, 2)
        k = self.linear_k(key).view(B, key.size(1), self.num_heads, -1).permute(0, 2, 3, 1)
        v = self.linear_v(value).view(B, key.size(1), self.num_heads, -1).transpose(1, 2)
        attn = q @ k
        if mask is not None:
            attn = torch.where(mask[:, None].bool(), attn, torch.finfo(attn.dtype).min)
        return self.linear_o((attn.softmax(-1) @ v).transpose(1, 2).flatten(2))


class LastHeadFirst(nn.Module):
    """The heads are stacked from the last to the first, and laid back the same way."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.size = num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        def stack(x):
            return torch.stack(x.split(self.size, dim=-1)[::-1])  # [H, B, T, D]

        q, k, v = stack(self.W_q(query)), stack(self.W_k(key)), stack(self.W_v(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.size)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.W_o(torch.cat((scores.softmax(dim=-1) @ v).unbind(0)[::-1], dim=-1))


class NoBiases(nn.Module):
    """mask: bool [B, 1, T, S] or [T, S], True = may attend."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(d_model, d_model, bias=False)
        self.k_proj = nn.Linear(d_model, d_model, bias=False)
        self.v_proj = nn.Linear(d_model, d_model, bias=False)
        self.output_proj = nn.Linear(d_model, d_model, bias=False)

    def forward(self, q, k, v, mask=None):
        q = self.q_proj(q).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        k = self.k_proj(k).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        v = self.v_proj(v).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        scores = torch.einsum("...td,...sd->...ts", q, k) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = torch.where(mask, scores, float("-inf"))
        return self.output_proj((scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2))


class NoKeyBias(nn.Module):
    """As in a well-known speech model: no bias for the keys, and the scale shared between q and k."""

    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def forward(self, x, xa=None, mask=None):
        source = x if xa is None else xa
        q, k, v = self.query(x), self.key(source), self.value(source)
        scale = (q.shape[-1] // self.n_head) ** -0.25
        q = q.view(*q.shape[:2], self.n_head, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], self.n_head, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], self.n_head, -1).permute(0, 2, 1, 3)
        qk = q @ k
        if mask is not None:
            qk = qk + mask[: qk.shape[-2], : qk.shape[-1]]
        return self.out((qk.softmax(dim=-1) @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class FusedInterleaved(nn.Module):
    def __init__(self, input_dim, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv_proj = nn.Linear(input_dim, 3 * embed_dim)
        self.o_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None, return_attention=False):
        batch_size, seq_length, _ = x.size()
        qkv = self.qkv_proj(x).reshape(batch_size, seq_length, self.num_heads, 3 * self.head_dim)
        q, k, v = qkv.permute(0, 2, 1, 3).chunk(3, dim=-1)
        logits = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            logits = logits.masked_fill(mask == 0, -9e15)
        attention = F.softmax(logits, dim=-1)
        values = (attention @ v).permute(0, 2, 1, 3).reshape(batch_size, seq_length, self.embed_dim)
        o = self.o_proj(values)
        return (o, attention) if return_attention else o


class WidthsOfItsOwn(nn.Module):
    def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, q, k, v, mask=None):
        sz_b, len_q, len_k = q.size(0), q.size(1), k.size(1)
        q = self.w_qs(q).view(sz_b, len_q, self.n_head, self.d_k).transpose(1, 2)
        k = self.w_ks(k).view(sz_b, len_k, self.n_head, self.d_k).transpose(1, 2)
        v = self.w_vs(v).view(sz_b, len_k, self.n_head, self.d_v).transpose(1, 2)
        attn = torch.matmul(q / self.d_k**0.5, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        attn = self.dropout(F.softmax(attn, dim=-1))
        out = torch.matmul(attn, v).transpose(1, 2).contiguous().view(sz_b, len_q, -1)
        return self.dropout(self.fc(out)), attn


class LazyLayers(nn.Module):
    """mask: [B, T, S], 1 = may attend. Heads folded into the batch."""

    def __init__(self, num_hiddens, num_heads, bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_k = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_v = nn.LazyLinear(num_hiddens, bias=bias)
        self.W_o = nn.LazyLinear(num_hiddens, bias=bias)

    def fold(self, X):
        X = X.reshape(X.shape[0], X.shape[1], self.num_heads, -1).permute(0, 2, 1, 3)
        return X.reshape(-1, X.shape[2], X.shape[3])  # [B*H, T, D]

    def unfold(self, X):
        X = X.reshape(-1, self.num_heads, X.shape[1], X.shape[2]).permute(0, 2, 1, 3)
        return X.reshape(X.shape[0], X.shape[1], -1)  # [B, T, E]

    def forward(self, queries, keys, values, mask=None):
        q, k, v = self.fold(self.W_q(queries)), self.fold(self.W_k(keys)), self.fold(self.W_v(values))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(mask.repeat_interleave(self.num_heads, dim=0) == 0, float("-inf"))
        return self.W_o(self.unfold(torch.bmm(scores.softmax(dim=-1), v)))


class InProjWeight(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, query, key, value, attn_mask=None):
        q, k, v = (
            F.linear(x, w, b).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for x, w, b in zip(
                (query, key, value), self.in_proj_weight.chunk(3), self.in_proj_bias.chunk(3), strict=True
            )
        )
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class TorchsClassInside(nn.Module):
    """mask: bool [T, T], True = may attend."""

    def __init__(self, d_model, num_heads, dropout=0.0):
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, num_heads, dropout=dropout, batch_first=True)

    def forward(self, x, mask=None):
        if mask is not None:
            mask = ~mask
        out, _ = self.mha(x, x, x, attn_mask=mask, need_weights=False)
        return out


def multi_head_attention(q, k, v, w_q, w_k, w_v, w_o, num_heads):
    """q: [B, T, E], k and v: [B, S, E], weights [E, E] used as x @ w."""
    B, T, E = q.shape
    D = E // num_heads
    q = (q @ w_q).view(B, -1, num_heads, D).transpose(1, 2)
    k = (k @ w_k).view(B, -1, num_heads, D).transpose(1, 2)
    v = (v @ w_v).view(B, -1, num_heads, D).transpose(1, 2)
    scores = q @ k.transpose(-2, -1) / math.sqrt(D)
    out = scores.softmax(dim=-1) @ v
    return out.transpose(1, 2).reshape(B, T, E) @ w_o


class UnflattenAndMove(nn.Module):
    def __init__(self, dim, heads=8, dim_head=64):
        super().__init__()
        inner = heads * dim_head
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(0.1))

    def forward(self, x):
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).transpose(2, 3)
        attn = (q @ k.mT * self.scale).softmax(dim=-1)
        return self.to_out((attn @ v).movedim(1, 2).flatten(2))


class AveragedWeights(nn.Module):
    """mask: bool [B, T, S], True = may attend. Returns the weights too, averaged over the heads."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.W_Q = nn.Linear(d_model, d_model)
        self.W_K = nn.Linear(d_model, d_model)
        self.W_V = nn.Linear(d_model, d_model)
        self.W_O = nn.Linear(d_model, d_model)

    def forward(self, Q, K, V, mask=None):
        B, T, E = Q.shape
        q = self.W_Q(Q).view(B, -1, self.n_heads, E // self.n_heads).transpose(1, 2)
        k = self.W_K(K).view(B, -1, self.n_heads, E // self.n_heads).transpose(1, 2)
        v = self.W_V(V).view(B, -1, self.n_heads, E // self.n_heads).transpose(1, 2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(~mask.unsqueeze(1), float("-inf"))
        weights = scores.softmax(dim=-1)
        return self.W_O((weights @ v).transpose(1, 2).reshape(B, T, E)), weights.mean(dim=1)


class Scriptable(nn.Module):
    """mask: bool [B, T, S], True = hidden, as in torch."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.q = nn.Linear(d_model, d_model)
        self.k = nn.Linear(d_model, d_model)
        self.v = nn.Linear(d_model, d_model)
        self.o = nn.Linear(d_model, d_model)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Optional[torch.Tensor] = None,  # noqa: UP045
    ) -> torch.Tensor:
        B, T, E = query.shape
        q = self.q(query).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k(key).view(B, -1, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v(value).view(B, -1, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1), -math.inf)
        out = torch.matmul(torch.softmax(scores, dim=-1), v)
        return self.o(out.transpose(1, 2).reshape(B, T, E))


class ExtraKeywords(nn.Module):
    """attention_mask: [B, T], 1 for a token, 0 for padding."""

    def __init__(self, hidden_size, num_heads, layer_idx=0, **kwargs):
        super().__init__()
        self.num_heads, self.layer_idx = num_heads, layer_idx
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden_states, attention_mask=None, output_attentions=False, **kwargs):
        B, T, E = hidden_states.shape
        shape = (B, T, self.num_heads, E // self.num_heads)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) * shape[-1] ** -0.5
        if attention_mask is not None:
            hidden = (1.0 - attention_mask[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
            scores = scores + hidden
        weights = scores.softmax(dim=-1)
        out = self.out_proj((weights @ v).transpose(1, 2).reshape(B, T, E))
        return out, (weights if output_attentions else None)


class UnifiedHeads(nn.Module):
    """q and k are each divided by the fourth root of the head's width."""

    def __init__(self, emb, heads, mask=False):
        super().__init__()
        self.emb, self.heads, self.mask = emb, heads, mask
        self.tokeys = nn.Linear(emb, emb, bias=False)
        self.toqueries = nn.Linear(emb, emb, bias=False)
        self.tovalues = nn.Linear(emb, emb, bias=False)
        self.unifyheads = nn.Linear(emb, emb)

    def forward(self, x):
        b, t, e = x.size()
        h, s = self.heads, e // self.heads
        keys = self.tokeys(x).view(b, t, h, s).transpose(1, 2).reshape(b * h, t, s) / s**0.25
        queries = self.toqueries(x).view(b, t, h, s).transpose(1, 2).reshape(b * h, t, s) / s**0.25
        values = self.tovalues(x).view(b, t, h, s).transpose(1, 2).reshape(b * h, t, s)
        dot = torch.bmm(queries, keys.transpose(1, 2))
        if self.mask:
            i, j = torch.triu_indices(t, t, offset=1)
            dot[:, i, j] = float("-inf")
        out = torch.bmm(dot.softmax(dim=2), values).view(b, h, t, s)
        return self.unifyheads(out.transpose(1, 2).reshape(b, t, s * h))


class Core(nn.Module):
    def forward(self, query, key, value, mask=None, dropout=None):
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        p_attn = scores.softmax(dim=-1)
        if dropout is not None:
            p_attn = dropout(p_attn)
        return torch.matmul(p_attn, value), p_attn


class CoreApart(nn.Module):
    """mask: broadcasts to [B, H, T, S], 0 hides."""

    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.linear_layers = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(3)])
        self.output_linear = nn.Linear(d_model, d_model)
        self.attention = Core()
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        n = query.size(0)
        q = self.linear_layers[0](query).view(n, -1, self.h, self.d_k).transpose(1, 2)
        k = self.linear_layers[1](key).view(n, -1, self.h, self.d_k).transpose(1, 2)
        v = self.linear_layers[2](value).view(n, -1, self.h, self.d_k).transpose(1, 2)
        x, _ = self.attention(q, k, v, mask=mask, dropout=self.dropout)
        return self.output_linear(x.transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k))


class InOutMatrices(nn.Module):
    def __init__(self, d_in, d_out, num_heads):
        super().__init__()
        self.d_out, self.num_heads = d_out, num_heads
        self.W_query = nn.Parameter(torch.randn(d_in, d_out) / d_in**0.5)
        self.W_key = nn.Parameter(torch.randn(d_in, d_out) / d_in**0.5)
        self.W_value = nn.Parameter(torch.randn(d_in, d_out) / d_in**0.5)
        self.out_proj = nn.Linear(d_out, d_out)

    def forward(self, x):
        b, num_tokens, _ = x.shape
        keys = (x @ self.W_key).view(b, num_tokens, self.num_heads, -1).transpose(1, 2)
        queries = (x @ self.W_query).view(b, num_tokens, self.num_heads, -1).transpose(1, 2)
        values = (x @ self.W_value).view(b, num_tokens, self.num_heads, -1).transpose(1, 2)
        attn_scores = queries @ keys.transpose(2, 3)
        future = torch.ones(num_tokens, num_tokens, device=x.device).triu(diagonal=1).bool()
        attn_scores.masked_fill_(future, -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        context_vec = (attn_weights @ values).transpose(1, 2).contiguous().view(b, num_tokens, self.d_out)
        return self.out_proj(context_vec)


class CrossWithFusedKeysAndValues(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_kv = nn.Linear(dim, 2 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context=None):
        context = x if context is None else context
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.to_q(x), k, v))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        return self.to_out(out.transpose(1, 2).flatten(2))


class OneLayerPerHead(nn.Module):
    """mask: [B, T, S], 1 = may attend."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        d = d_model // num_heads
        self.num_heads = num_heads
        self.q_heads = nn.ModuleList(nn.Linear(d_model, d) for _ in range(num_heads))
        self.k_heads = nn.ModuleList(nn.Linear(d_model, d) for _ in range(num_heads))
        self.v_heads = nn.ModuleList(nn.Linear(d_model, d) for _ in range(num_heads))
        self.w_concat = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        outs = []
        for h in range(self.num_heads):
            qh, kh, vh = self.q_heads[h](q), self.k_heads[h](k), self.v_heads[h](v)
            s = qh @ kh.mT / math.sqrt(qh.size(-1))
            if mask is not None:
                s = s.masked_fill(mask == 0, float("-inf"))
            outs.append(s.softmax(-1) @ vh)
        return self.w_concat(torch.cat(outs, -1))


class SoftmaxByHand(nn.Module):
    """mask: bool [B, T, S], True = may attend. A query that may see nothing gets zeros."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.n, self.d = num_heads, d_model // num_heads
        self.Q = nn.Linear(d_model, d_model)
        self.K = nn.Linear(d_model, d_model)
        self.V = nn.Linear(d_model, d_model)
        self.W_out = nn.Linear(d_model, d_model)

    def forward(self, x_q, x_k, x_v, mask=None):
        B, T, E = x_q.shape
        q = self.Q(x_q).view(B, -1, self.n, self.d).transpose(1, 2)
        k = self.K(x_k).view(B, -1, self.n, self.d).transpose(1, 2)
        v = self.V(x_v).view(B, -1, self.n, self.d).transpose(1, 2)
        s = q @ k.mT * self.d**-0.5
        e = torch.exp(s - s.amax(dim=-1, keepdim=True))
        if mask is not None:
            e = e * mask[:, None]
        w = e / e.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(e.dtype).tiny)
        return self.W_out((w @ v).transpose(1, 2).reshape(B, T, E))


class InOutLayer(nn.Module):
    """A linear layer whose weight is [in, out], as some checkpoints keep it."""

    def __init__(self, n_out, n_in):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_in, n_out) * 0.2)
        self.bias = nn.Parameter(torch.zeros(n_out))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class InOutFused(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = InOutLayer(3 * n_embd, n_embd)
        self.c_proj = InOutLayer(n_embd, n_embd)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class QueriesOneByOne(nn.Module):
    """mask: bool [T, S], True = may attend. Never holds the whole map."""

    def __init__(self, model_dim, number_of_heads):
        super().__init__()
        self.number_of_heads = number_of_heads
        self.qkv_nets = nn.ModuleList([nn.Linear(model_dim, model_dim) for _ in range(3)])
        self.out_projection_net = nn.Linear(model_dim, model_dim)

    def forward(self, query, key, value, mask=None):
        q, k, v = (
            net(x).unflatten(-1, (self.number_of_heads, -1))
            for net, x in zip(self.qkv_nets, (query, key, value), strict=True)
        )
        rows = []
        for t in range(q.size(1)):
            s = (q[:, t, None] * k).sum(-1) / math.sqrt(q.size(-1))  # [B, S, H]
            if mask is not None:
                s = s.masked_fill(~mask[t, :, None], float("-inf"))
            rows.append((s.softmax(dim=1).unsqueeze(-1) * v).sum(dim=1).flatten(1))
        return self.out_projection_net(torch.stack(rows, dim=1))


class PaddingSquared(nn.Module):
    """mask: [B, T], 1 where there is a token; queries that are padding are hidden by a finite number, too."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, self.d_k).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / self.d_k**0.5
        if mask is not None:
            both = mask[:, None, None, :] * mask[:, None, :, None]
            scores = scores.masked_fill(both == 0, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E))


RIGHT = [
    Right("rotary, halves", rotary.RotarySeparate, {"d_model": 24, "num_heads": 4}, "rotate_half; a mask"),
    Right("padding squared", PaddingSquared, {"d_model": 24, "num_heads": 4}, "rows of padding are uniform"),
    Right("rotary, complex", rotary.RotaryFused, {"dim": 24, "heads": 4}, "causal; neighbours; a buffer"),
    Right("rotary, einsum", rotary.RotaryEinsum, {"d_model": 24, "n_heads": 4}, "base 500000"),
    Right(
        "four linears in a list", FourLinears, {"h": 4, "d_model": 24}, "-1e9: overflows in half, right else"
    ),
    Right("config and buffer", CausalSelfAttention, {"config": Config()}, "causal; a buffer named bias"),
    Right(
        "encoder", EncoderAttention, {"hidden_size": 24, "num_attention_heads": 4}, "additive; a tuple of one"
    ),
    Right("fused and split", FusedSplit, {"n_embd": 24, "n_head": 4}, "x and a mask, 0 hides"),
    Right(
        "heads side by side", HeadsSideBySide, {"n_embd": 24, "num_heads": 4}, "causal; one module per head"
    ),
    Right("head axis", HeadAxisParameters, {"d_model": 24, "n_heads": 4, "d_head": 6}, "causal; [H, E, D]"),
    Right("values keys query", ValuesKeysQuery, {"embed_size": 24, "heads": 4}, "mask has no default; -1e20"),
    Right("sequence first", SequenceFirst, {"heads": 4, "d_model": 24}, "keyword-only; mask [T, S, B]"),
    Right("additive mask", AdditiveMask, {"d_model": 24, "num_heads": 4}, "a float mask added to the scores"),
    Right(
        "torch's function", TorchFunction, {"d_model": 24, "num_heads": 4}, "is_causal; dropout in training"
    ),
    Right(
        "key padding mask", KeyPaddingMask, {"embed_dim": 24, "num_heads": 4}, "True = padding, as in torch"
    ),
    Right(
        "renormalised", Renormalised, {"d_model": 24, "num_heads": 4}, "different but equal: after softmax"
    ),
    Right("queries scaled first", QueriesScaledFirst, {"d_model": 24, "num_heads": 4}, "different but equal"),
    Right(
        "last head first",
        LastHeadFirst,
        {"d_model": 24, "num_heads": 4},
        "different but equal: order of heads",
    ),
    Right("no biases", NoBiases, {"d_model": 24, "num_heads": 4}, "any leading axes"),
    Right(
        "no key bias", NoKeyBias, {"n_state": 24, "n_head": 4}, "different but equal; additive [T, S] mask"
    ),
    Right("fused interleaved", FusedInterleaved, {"input_dim": 24, "embed_dim": 24, "num_heads": 4}, "-9e15"),
    Right(
        "widths", WidthsOfItsOwn, {"n_head": 4, "d_model": 24, "d_k": 6, "d_v": 6}, "returns the weights too"
    ),
    Right("lazy layers", LazyLayers, {"num_hiddens": 24, "num_heads": 4}, "no shapes before the first call"),
    Right("in_proj_weight", InProjWeight, {"embed_dim": 24, "num_heads": 4}, "torch's parameter names"),
    Right("torch's class inside", TorchsClassInside, {"d_model": 24, "num_heads": 4}, "polarity turned"),
    Right("function", multi_head_attention, {}, "weights are arguments"),
    Right(
        "unflatten and move", UnflattenAndMove, {"dim": 24, "heads": 4, "dim_head": 6}, "Sequential to_out"
    ),
    Right("averaged weights", AveragedWeights, {"d_model": 24, "n_heads": 4}, "returns weights.mean(1) too"),
    Right(
        "scriptable", Scriptable, {"d_model": 24, "num_heads": 4}, "True = hidden; torch.jit.script takes it"
    ),
    Right("extra keywords", ExtraKeywords, {"hidden_size": 24, "num_heads": 4}, "**kwargs; (out, None)"),
    Right("unified heads", UnifiedHeads, {"emb": 24, "heads": 4}, "different but equal: fourth roots"),
    Right(
        "unified heads, causal", UnifiedHeads, {"emb": 24, "heads": 4, "mask": True}, "a switch in __init__"
    ),
    Right("core apart", CoreApart, {"h": 4, "d_model": 24}, "attention is a module of its own; -1e9"),
    Right("in-out matrices", InOutMatrices, {"d_in": 24, "d_out": 24, "num_heads": 4}, "causal; [in, out]"),
    Right("cross", CrossWithFusedKeysAndValues, {"dim": 24, "heads": 4}, "x and context; k and v fused"),
    Right("one layer per head", OneLayerPerHead, {"d_model": 24, "num_heads": 4}, "three ModuleLists"),
    Right("softmax by hand", SoftmaxByHand, {"d_model": 24, "num_heads": 4}, "empty rows give zeros"),
    Right("in-out fused", InOutFused, {"n_embd": 24, "n_head": 4}, "causal; weights [E, 3 E]"),
    Right(
        "queries one by one", QueriesOneByOne, {"model_dim": 24, "number_of_heads": 4}, "a loop; order only"
    ),
]
