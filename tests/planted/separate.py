"""Planted faults, style one: four nn.Linear layers, called forward(query, key, value, mask=None).

The mask is [B, T, S]; 1 or True means "may attend", 0 hides. Written as learners write: half of the modules
stand alone with names of their own, the others change one step of `Separate`.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812

from . import rotary


class Separate(nn.Module):
    """The right one. mask: [B, T, S], 1 where a query may look at a key."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        assert d_model % num_heads == 0
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x):
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.d_k).transpose(1, 2)  # [B, H, T, D]

    def combine_heads(self, x):
        B, H, T, D = x.shape
        return x.transpose(1, 2).contiguous().view(B, T, H * D)  # [B, T, E]

    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)  # [B, H, T, S]
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class CausalSeparate(Separate):
    """The right one for the causal faults: hides the future by itself."""

    def hidden(self, T, S, device):
        return torch.triu(torch.ones(T, S, device=device), diagonal=1).bool()

    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        scores = scores.masked_fill(self.hidden(q.size(-2), k.size(-2), q.device), float("-inf"))
        return scores.softmax(dim=-1) @ v

    def forward(self, query, key, value):
        return super().forward(query, key, value)


# Scale


class ScaleByDModel(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, _ = query.shape
        S = key.shape[1]
        q = self.q_proj(query).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(key).view(B, S, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(value).view(B, S, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_model)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out = torch.matmul(weights, v).transpose(1, 2).reshape(B, T, self.d_model)
        return self.out_proj(out)


class NoScale(nn.Module):
    def __init__(self, embed_dim, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(embed_dim, embed_dim)
        self.key = nn.Linear(embed_dim, embed_dim)
        self.value = nn.Linear(embed_dim, embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, query, key, value, mask=None):
        batch = query.size(0)

        def heads(x):
            return x.view(batch, x.size(1), self.heads, -1).transpose(1, 2)

        q, k, v = heads(self.query(query)), heads(self.key(key)), heads(self.value(value))
        energy = torch.matmul(q, k.transpose(2, 3))
        if mask is not None:
            energy = energy.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        attention = F.softmax(energy, dim=3)
        context = torch.matmul(attention, v)
        context = context.transpose(1, 2).contiguous().view(batch, query.size(1), -1)
        return self.out(context)


class ScaleByDk(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / self.d_k
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class MultiplyBySqrtDk(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) * math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class ConstantScale(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / 8  # sqrt(64)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class ScaleBySqrtH(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(1))
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class ScaleBySqrtT(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-2))
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class ScaleAfterSoftmax(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        weights = scores.softmax(dim=-1) / math.sqrt(self.d_k)
        return weights @ v


class ScaledTwice(Separate):
    def attention(self, q, k, v, mask=None):
        q = q / math.sqrt(self.d_k)
        if mask is not None:
            mask = mask.unsqueeze(1).bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


# Splitting and merging


class SplitByView(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model)
        self.w_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, E = query.size()
        S = key.size(1)
        q = self.w_q(query).view(B, self.n_heads, T, self.d_head)
        k = self.w_k(key).view(B, self.n_heads, S, self.d_head)
        v = self.w_v(value).view(B, self.n_heads, S, self.d_head)
        scores = (q @ k.transpose(-1, -2)) * self.d_head**-0.5
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -torch.inf)
        out = scores.softmax(-1) @ v
        return self.w_o(out.transpose(1, 2).reshape(B, T, E))


class MergeWithoutTranspose(nn.Module):
    def __init__(self, d_model, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.fc_q = nn.Linear(d_model, d_model)
        self.fc_k = nn.Linear(d_model, d_model)
        self.fc_v = nn.Linear(d_model, d_model)
        self.fc_o = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        B, T, E = query.shape
        Q = self.fc_q(query).view(B, -1, self.num_heads, self.d_k).permute(0, 2, 1, 3)
        K = self.fc_k(key).view(B, -1, self.num_heads, self.d_k).permute(0, 2, 1, 3)
        V = self.fc_v(value).view(B, -1, self.num_heads, self.d_k).permute(0, 2, 1, 3)
        energy = torch.matmul(Q, K.permute(0, 1, 3, 2)) / math.sqrt(self.d_k)
        if mask is not None:
            energy = energy.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        attention = torch.softmax(energy, dim=-1)
        x = torch.matmul(self.dropout(attention), V)
        x = x.reshape(B, T, E)
        return self.fc_o(x)


class MergeWithWrongTranspose(Separate):
    def combine_heads(self, x):
        B, H, T, D = x.shape
        return x.transpose(2, 3).reshape(B, T, H * D)


class MergeInterleaved(Separate):
    def combine_heads(self, x):
        B, H, T, D = x.shape
        return x.permute(0, 2, 3, 1).reshape(B, T, H * D)


class ViewAfterTranspose(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, _ = query.shape
        q = self.W_q(query).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        k = self.W_k(key).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        v = self.W_v(value).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        out = scores.softmax(dim=-1) @ v
        out = out.transpose(1, 2).view(B, T, self.d_model)
        return self.W_o(out)


class AttentionAcrossHeads(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.d = d_model // num_heads
        self.to_q = nn.Linear(d_model, d_model)
        self.to_k = nn.Linear(d_model, d_model)
        self.to_v = nn.Linear(d_model, d_model)
        self.to_out = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        b, t, e = query.shape
        q = self.to_q(query).view(b, t, self.h, self.d)
        k = self.to_k(key).view(b, -1, self.h, self.d)
        v = self.to_v(value).view(b, -1, self.h, self.d)
        scores = q @ k.transpose(-2, -1) / self.d**0.5
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        out = scores.softmax(-1) @ v
        return self.to_out(out.reshape(b, t, e))


class HeadsInterleaved(Separate):
    def split_heads(self, x):
        B, T, _ = x.shape
        return x.view(B, T, self.d_k, self.num_heads).permute(0, 3, 1, 2)


class HeadsReversed(Separate):
    def combine_heads(self, x):
        return torch.cat([x[:, h] for h in range(self.num_heads - 1, -1, -1)], dim=-1)


class FirstHeadForAll(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q[:, :1] @ k[:, :1].transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class SameHeadForAll(Separate):
    def attention(self, q, k, v, mask=None):
        for head in range(self.num_heads):
            scores = q[:, head] @ k[:, head].transpose(-2, -1) / math.sqrt(self.d_k)
            if mask is not None:
                scores = scores.masked_fill(mask == 0, float("-inf"))
            out = scores.softmax(dim=-1) @ v[:, head]
        return torch.stack([out] * self.num_heads, dim=1)


class SingleHead(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.W_q(query), self.W_k(key), self.W_v(value)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.W_o(scores.softmax(dim=-1) @ v)


class SingleHeadOwnScale(SingleHead):
    def forward(self, query, key, value, mask=None):
        q, k, v = self.W_q(query), self.W_k(key), self.W_v(value)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.W_o(scores.softmax(dim=-1) @ v)


class HardCodedHeads(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, _ = query.shape
        q = self.W_q(query).view(B, -1, 8, self.d_model // 8).transpose(1, 2)
        k = self.W_k(key).view(B, -1, 8, self.d_model // 8).transpose(1, 2)
        v = self.W_v(value).view(B, -1, 8, self.d_model // 8).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        out = scores.softmax(dim=-1) @ v
        return self.W_o(out.transpose(1, 2).reshape(B, T, self.d_model))


# Softmax


class SoftmaxOverQueries(nn.Module):
    def __init__(self, embed_size, heads):
        super().__init__()
        self.heads = heads
        self.head_dim = embed_size // heads
        self.queries = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.values = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, query, key, value, mask=None):
        N = query.shape[0]
        q = self.queries(query).reshape(N, -1, self.heads, self.head_dim)
        k = self.keys(key).reshape(N, -1, self.heads, self.head_dim)
        v = self.values(value).reshape(N, -1, self.heads, self.head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k) / self.head_dim**0.5
        if mask is not None:
            energy = energy.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        attention = torch.softmax(energy, dim=2)
        out = torch.einsum("nhqk,nkhd->nqhd", attention, v).reshape(N, query.shape[1], -1)
        return self.fc_out(out)


class SoftmaxOverHeads(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=1) @ v


class SoftmaxWithoutDim(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return nn.Softmax()(scores) @ v


class SoftmaxOverBatch(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return F.softmax(scores, dim=0) @ v


class SoftmaxOverHeadsAndKeys(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        B, H, T, S = scores.shape
        weights = scores.transpose(1, 2).reshape(B, T, H * S).softmax(dim=-1)
        return weights.view(B, T, H, S).transpose(1, 2) @ v


class SoftmaxOverTheWholeMap(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.flatten(2).softmax(dim=-1).view_as(scores) @ v


class SoftmaxTwice(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        return F.softmax(weights, dim=-1) @ v


class Sigmoid(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return torch.sigmoid(scores) @ v


class ExpWithoutSum(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return torch.exp(scores) @ v


class LogSoftmax(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return F.log_softmax(scores, dim=-1) @ v


class NoSoftmax(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 0)
        return scores @ v


class DivideBySum(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 0)
        return (scores / scores.sum(dim=-1, keepdim=True)) @ v


# Causal


class CausalMaskForgotten(Separate):
    def forward(self, query, key, value, causal=False):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if causal:
            scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        return self.W_o(self.combine_heads(scores.softmax(dim=-1) @ v))


class CausalHidesItself(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.W_query = nn.Linear(d_model, d_model)
        self.W_key = nn.Linear(d_model, d_model)
        self.W_value = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value):
        b, t, e = query.shape
        s = key.shape[1]
        q = self.W_query(query).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.W_key(key).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.W_value(value).view(b, s, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.mT / self.head_dim**0.5
        future = torch.triu(torch.ones(t, s, device=query.device), diagonal=0).bool()
        scores = scores.masked_fill(future, float("-inf"))
        out = scores.softmax(dim=-1) @ v
        return self.out_proj(out.transpose(1, 2).reshape(b, t, e))


class CausalShowsTheNext(CausalSeparate):
    def hidden(self, T, S, device):
        return torch.triu(torch.ones(T, S, device=device), diagonal=2).bool()


class CausalFlipped(CausalSeparate):
    def hidden(self, T, S, device):
        return torch.tril(torch.ones(T, S, device=device), diagonal=-1).bool()


class CausalInverted(CausalSeparate):
    def attention(self, q, k, v, mask=None):
        future = torch.triu(torch.ones(q.size(-2), k.size(-2), device=q.device), diagonal=1).bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=future)


class CausalBottomRight(CausalSeparate):
    def hidden(self, T, S, device):
        return torch.triu(torch.ones(T, S, device=device), diagonal=S - T + 1).bool()


# Masks


class MaskIgnored(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.depth = d_model // num_heads
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.dense = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        batch = query.size(0)
        q = self.wq(query).reshape(batch, -1, self.num_heads, self.depth).transpose(1, 2)
        k = self.wk(key).reshape(batch, -1, self.num_heads, self.depth).transpose(1, 2)
        v = self.wv(value).reshape(batch, -1, self.num_heads, self.depth).transpose(1, 2)
        logits = q @ k.transpose(-1, -2) / math.sqrt(self.depth)
        weights = logits.softmax(dim=-1)
        out = (weights @ v).transpose(1, 2).flatten(2)
        return self.dense(out)


class MaskInverted(Separate):
    def attention(self, q, k, v, mask=None):
        """mask: [B, T, S], True where a query may attend."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 1, float("-inf"))
        return scores.softmax(dim=-1) @ v


class MaskAdded(Separate):
    def attention(self, q, k, v, mask=None):
        """mask: [B, T, S], True where a query may attend."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores + mask.unsqueeze(1).to(scores.dtype)
        return scores.softmax(dim=-1) @ v


class MaskAfterSoftmax(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.n = num_heads
        self.d = d_model // num_heads
        self.Q = nn.Linear(d_model, d_model)
        self.K = nn.Linear(d_model, d_model)
        self.V = nn.Linear(d_model, d_model)
        self.O = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, E = query.shape
        q = self.Q(query).view(B, T, self.n, self.d).transpose(1, 2)
        k = self.K(key).view(B, -1, self.n, self.d).transpose(1, 2)
        v = self.V(value).view(B, -1, self.n, self.d).transpose(1, 2)
        attn = torch.softmax(q @ k.transpose(-2, -1) / self.d**0.5, dim=-1)
        if mask is not None:
            attn = attn.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        y = attn @ v
        return self.O(y.transpose(1, 2).reshape(B, T, E))


class FillWithZero(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 0)
        return scores.softmax(dim=-1) @ v


class FillWithAlmostZero(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 1e-9)
        return scores.softmax(dim=-1) @ v


class ScoresTimesMask(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores * mask.unsqueeze(1)
        return scores.softmax(dim=-1) @ v


class MaskMakesNaN(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores + (1.0 - mask.unsqueeze(1).float()) * float("-inf")
        return scores.softmax(dim=-1) @ v


class PaddingBecomesNaN(Separate):
    """mask: [B, T], 1 where there is a token."""

    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            both = mask[:, None, None, :] * mask[:, None, :, None]
            scores = scores.masked_fill(both == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class WeightsScaled(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        attn = scores.softmax(dim=-1)
        attn = attn / math.sqrt(self.d_k)
        return attn @ v


class FillTooSmall(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e4)
        return scores.softmax(dim=-1) @ v


class OverflowInHalf(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_k = d_model // num_heads
        self.h = num_heads
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])

    def forward(self, query, key, value, mask=None):
        nbatches = query.size(0)
        q, k, v = (
            layer(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for layer, x in zip(self.linears[:3], (query, key, value), strict=True)
        )
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        x = torch.matmul(scores.softmax(dim=-1), v)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[3](x)


class MaskOnQueries(Separate):
    def attention(self, q, k, v, mask=None):
        """mask: [B, S], 0 where a key is padding."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, :, None] == 0, torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1) @ v


class MaskRepeatedInWrongOrder(nn.Module):
    """Folds the heads into the batch. mask: [B, T, S], True = may attend."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_size = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def fold(self, x):
        B, T, _ = x.shape
        x = x.reshape(B, T, self.num_heads, self.head_size).permute(0, 2, 1, 3)
        return x.reshape(B * self.num_heads, T, self.head_size)

    def forward(self, query, key, value, mask=None):
        B, T, E = query.shape
        q, k, v = self.fold(self.W_q(query)), self.fold(self.W_k(key)), self.fold(self.W_v(value))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(self.head_size)  # [B*H, T, S]
        if mask is not None:
            mask = mask.repeat(self.num_heads, 1, 1)
            scores = scores.masked_fill(mask == 0, float("-inf"))
        out = torch.bmm(scores.softmax(dim=-1), v)
        out = out.reshape(B, self.num_heads, T, self.head_size).permute(0, 2, 1, 3)
        return self.W_o(out.reshape(B, T, E))


class FirstSamplesMaskForAll(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask[0] == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class PaddingMaskBroadcast(Separate):
    def attention(self, q, k, v, mask=None):
        """mask: [B, S], 0 where a key is padding."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class MaskPlus1e9(Separate):
    def attention(self, q, k, v, mask=None):
        """mask: [B, T, S], 1 where a query may attend."""
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores + (1.0 - mask.unsqueeze(1).to(scores.dtype)) * 1e9
        return scores.softmax(dim=-1) @ v


class MaskOnFirstHeadOnly(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores[:, 0] = scores[:, 0].masked_fill(mask == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class MaskModified(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.logical_not_().unsqueeze(1).bool(), float("-inf"))
        return scores.softmax(dim=-1) @ v


# Projections and wiring


class NoOutputProjection(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.linear_q = nn.Linear(d_model, d_model)
        self.linear_k = nn.Linear(d_model, d_model)
        self.linear_v = nn.Linear(d_model, d_model)
        self.linear_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, E = query.shape
        q = self.linear_q(query).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        k = self.linear_k(key).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        v = self.linear_v(value).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        attn = scores.softmax(dim=-1)
        context = attn @ v
        return context.transpose(1, 2).contiguous().view(B, T, E), attn


class HeadsAveraged(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_o = nn.Linear(self.d_k, d_model)

    def combine_heads(self, x):
        return x.mean(dim=1)  # [B, T, D]


class HeadsSummed(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_o = nn.Linear(self.d_k, d_model)

    def combine_heads(self, x):
        return x.sum(dim=1)  # [B, T, D]


class SameProjectionForEveryHead(nn.Module):
    def __init__(self, embed_size, heads):
        super().__init__()
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads
        self.queries = nn.Linear(self.head_dim, self.head_dim)
        self.keys = nn.Linear(self.head_dim, self.head_dim)
        self.values = nn.Linear(self.head_dim, self.head_dim)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, query, key, value, mask=None):
        N, T, _ = query.shape
        S = key.shape[1]
        q = self.queries(query.reshape(N, T, self.heads, self.head_dim))
        k = self.keys(key.reshape(N, S, self.heads, self.head_dim))
        v = self.values(value.reshape(N, S, self.heads, self.head_dim))
        energy = torch.einsum("nqhd,nkhd->nhqk", q, k) / math.sqrt(self.head_dim)
        if mask is not None:
            energy = energy.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        attention = torch.softmax(energy, dim=3)
        out = torch.einsum("nhqk,nkhd->nqhd", attention, v)
        return self.fc_out(out.reshape(N, T, self.embed_size))


class SharedProjection(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        del self.W_k, self.W_v

    def forward(self, query, key, value, mask=None):
        q, k, v = (self.split_heads(self.W_q(x)) for x in (query, key, value))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class KeysThroughWq(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_q(key))
        v = self.split_heads(self.W_v(value))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class ValuesThroughWk(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_k(value))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class NoQAndKProjection(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        del self.W_q, self.W_k

    def forward(self, query, key, value, mask=None):
        q = self.split_heads(query)
        k = self.split_heads(key)
        v = self.split_heads(self.W_v(value))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class NoVProjection(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(value)
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class KeysAndValuesSwapped(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, _ = query.shape
        q = self.q_linear(query).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        k = self.k_linear(value).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        v = self.v_linear(key).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        out = scores.softmax(dim=-1) @ v
        return self.out(out.transpose(1, 2).reshape(B, T, self.d_model))


class QueriesAndKeysSwapped(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(key))
        k = self.split_heads(self.W_k(query))
        v = self.split_heads(self.W_v(value))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class ValueFromKey(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(key))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class SelfAttentionOnly(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(query))
        v = self.split_heads(self.W_v(query))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class WeightNotTransposed(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(query @ self.W_q.weight + self.W_q.bias)
        k = self.split_heads(key @ self.W_k.weight + self.W_k.bias)
        v = self.split_heads(value @ self.W_v.weight + self.W_v.bias)
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class OutputProjectionTwice(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        out = self.W_o(self.combine_heads(self.attention(q, k, v, mask)))
        return self.W_o(out)


class WeightsTransposedBeforeV(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        weights = scores.softmax(dim=-1)
        return weights.transpose(-2, -1) @ v


class WrongLayout(nn.Module):
    """query, key, value: [batch, time, d_model]."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value):
        batch, time, d_model = query.shape
        q = self.W_q(query).view(batch, -1, self.num_heads, self.d_k).transpose(0, 2)
        k = self.W_k(key).view(batch, -1, self.num_heads, self.d_k).transpose(0, 2)
        v = self.W_v(value).view(batch, -1, self.num_heads, self.d_k).transpose(0, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        out = scores.softmax(dim=-1) @ v
        out = out.transpose(0, 2).reshape(batch, time, d_model)
        return self.W_o(out)


# Extra or missing pieces


class DropoutInEval(nn.Module):
    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.dropout = dropout
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        B, T, E = query.shape
        q = self.W_q(query).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        k = self.W_k(key).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        v = self.W_v(value).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        weights = F.dropout(scores.softmax(dim=-1), self.dropout)
        out = weights @ v
        return self.W_o(out.transpose(1, 2).reshape(B, T, E))


class ResidualAdded(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        return query + self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class LayerNormAdded(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, query, key, value, mask=None):
        return self.layer_norm(super().forward(query, key, value, mask))


class LayerNormBefore(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.norm = nn.LayerNorm(d_model)

    def forward(self, query, key, value, mask=None):
        return super().forward(self.norm(query), self.norm(key), self.norm(value), mask)


class ResidualAndLayerNorm(nn.Module):
    def __init__(self, d_model, n_head):
        super().__init__()
        self.n_head = n_head
        self.d_k = d_model // n_head
        self.w_qs = nn.Linear(d_model, n_head * self.d_k)
        self.w_ks = nn.Linear(d_model, n_head * self.d_k)
        self.w_vs = nn.Linear(d_model, n_head * self.d_k)
        self.fc = nn.Linear(n_head * self.d_k, d_model)
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, query, key, value, mask=None):
        residual = query
        q = self.w_qs(query).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)
        k = self.w_ks(key).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)
        v = self.w_vs(value).unflatten(-1, (self.n_head, self.d_k)).transpose(1, 2)
        attn = torch.matmul(q / self.d_k**0.5, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        attn = attn.softmax(dim=-1)
        out = self.fc(torch.matmul(attn, v).transpose(1, 2).flatten(2))
        return self.layer_norm(out + residual), attn


class ReluAdded(Separate):
    def forward(self, query, key, value, mask=None):
        return F.relu(super().forward(query, key, value, mask))


class ReluOnProjections(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(F.relu(self.W_q(query)))
        k = self.split_heads(F.relu(self.W_k(key)))
        v = self.split_heads(F.relu(self.W_v(value)))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class HeadsInAList(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        d_head = d_model // num_heads
        self.d_head = d_head
        self.q_heads = [nn.Linear(d_model, d_head) for _ in range(num_heads)]
        self.k_heads = [nn.Linear(d_model, d_head) for _ in range(num_heads)]
        self.v_heads = [nn.Linear(d_model, d_head) for _ in range(num_heads)]
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value, mask=None):
        outs = []
        for to_q, to_k, to_v in zip(self.q_heads, self.k_heads, self.v_heads, strict=True):
            scores = to_q(query) @ to_k(key).transpose(-2, -1) / math.sqrt(self.d_head)
            if mask is not None:
                scores = scores.masked_fill(mask == 0, float("-inf"))
            outs.append(scores.softmax(dim=-1) @ to_v(value))
        return self.W_o(torch.cat(outs, dim=-1))


class NoInBiasUsed(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(query @ self.W_q.weight.T)
        k = self.split_heads(key @ self.W_k.weight.T)
        v = self.split_heads(value @ self.W_v.weight.T)
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class NoOutBiasUsed(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        return self.combine_heads(self.attention(q, k, v, mask)) @ self.W_o.weight.T


class NoQBias(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_q = nn.Linear(d_model, d_model, bias=False)


class NoVBias(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_v = nn.Linear(d_model, d_model, bias=False)


class NoKeyBias(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.W_k = nn.Linear(d_model, d_model, bias=False)


class InputModified(Separate):
    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.W_q(query))
        k = self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        out = self.W_o(self.combine_heads(self.attention(q, k, v, mask)))
        query[:] = out  # the same memory again
        return query


# Rows in which every key is hidden


class EmptyRowUniform(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = torch.where(mask.unsqueeze(1) == 0, torch.finfo(scores.dtype).min, scores)
        return scores.softmax(dim=-1) @ v


class EmptyRowZero(Separate):
    def attention(self, q, k, v, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1).bool()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


NOT_POSSIBLE = {
    "fused order k q v": "there is no fused layer whose order could be mistaken",
    "fused order v k q": "there is no fused layer whose order could be mistaken",
}

FAULTS = [
    ("scale by d_model", ScaleByDModel, "divides by sqrt(E)"),
    ("no scale", NoScale, "the product goes straight into softmax"),
    ("scale by d_k", ScaleByDk, "the root is forgotten"),
    ("multiply by sqrt d_k", MultiplyBySqrtDk, "times where it should be divided by"),
    ("constant scale", ConstantScale, "divides by 8, copied from a model with D = 64"),
    ("scale by sqrt H", ScaleBySqrtH, "size(1) after the transpose is H"),
    ("scale by sqrt T", ScaleBySqrtT, "size(-2) is the number of queries"),
    ("scale after softmax", ScaleAfterSoftmax, "weights, not scores, are divided by sqrt(D)"),
    (
        "scaled twice",
        ScaledTwice,
        "before and once more inside torch's function; the numbers of scale by d_k",
    ),
    ("split by view", SplitByView, "view(B, H, T, D) cuts across positions"),
    ("merge without transpose", MergeWithoutTranspose, "[B, H, T, D] reshaped to [B, T, E]"),
    ("merge with wrong transpose", MergeWithWrongTranspose, "transpose(2, 3) then reshape"),
    ("merge interleaved", MergeInterleaved, "[B, T, D, H]: the features of the heads alternate"),
    ("view after transpose", ViewAfterTranspose, "raises RuntimeError: no contiguous()"),
    ("attention across heads", AttentionAcrossHeads, "no transpose: [H, H] weights at every position"),
    ("heads interleaved", HeadsInterleaved, "view(B, T, D, H): head h takes every H-th feature"),
    ("heads reversed", HeadsReversed, "concatenated from the last to the first"),
    ("same head for all", SameHeadForAll, "the loop keeps its last result alone"),
    ("padding becomes NaN", PaddingBecomesNaN, "the padding mask hides rows as well as columns"),
    ("mask makes NaN", MaskMakesNaN, "0 * -inf is NaN"),
    ("weights scaled after softmax", WeightsScaled, "divided by sqrt(D) before and after the softmax"),
    *rotary.SEPARATE,
    ("first head for all", FirstHeadForAll, "the weights of head 0 weigh every head's values"),
    ("single head", SingleHead, "never split, divided by sqrt(E / H)"),
    ("single head with its own scale", SingleHeadOwnScale, "never split, divided by sqrt(E)"),
    ("hard-coded heads", HardCodedHeads, "8 heads whatever was asked for"),
    ("softmax over queries", SoftmaxOverQueries, "dim=2 of [B, H, T, S]"),
    ("softmax over heads", SoftmaxOverHeads, "dim=1"),
    ("softmax without a dim", SoftmaxWithoutDim, "torch warns and takes dim 1, the heads"),
    ("softmax over batch", SoftmaxOverBatch, "dim=0"),
    ("softmax over heads and keys", SoftmaxOverHeadsAndKeys, "the heads of one query share a sum of 1"),
    ("softmax over the whole map", SoftmaxOverTheWholeMap, "all queries and keys of a head share a sum of 1"),
    ("softmax twice", SoftmaxTwice, "applied to the weights again"),
    ("sigmoid", Sigmoid, "each key by itself"),
    ("exp without sum", ExpWithoutSum, "not normalised"),
    ("log softmax", LogSoftmax, "logarithms used as weights"),
    ("no softmax", NoSoftmax, "scores used as weights"),
    ("divide by sum", DivideBySum, "scores divided by their sum, no exp"),
    ("causal mask forgotten", CausalMaskForgotten, "the result of masked_fill is thrown away"),
    ("causal hides itself", CausalHidesItself, "diagonal=0: row 0 is nan"),
    ("causal shows the next", CausalShowsTheNext, "diagonal=2"),
    ("causal flipped", CausalFlipped, "hides the past"),
    ("causal inverted", CausalInverted, "torch's function reads True as: may attend"),
    ("causal bottom-right", CausalBottomRight, "a convention: parts from top-left for T ≠ S only"),
    ("mask ignored", MaskIgnored, "the argument is never used"),
    ("mask inverted", MaskInverted, "hides where the mask is 1"),
    ("mask added", MaskAdded, "0 and 1 added to the scores"),
    ("mask after softmax", MaskAfterSoftmax, "the rows no longer sum to 1"),
    ("fill with zero", FillWithZero, "score 0 is a score like any other"),
    ("fill with almost zero", FillWithAlmostZero, "1e-9 for -1e9; the numbers of fill with zero"),
    ("scores times mask", ScoresTimesMask, "the numbers of fill with zero"),
    ("fill too small", FillTooSmall, "-1e4 leaks where scores are large"),
    ("overflow in half", OverflowInHalf, "-1e9 does not fit float16: raises there, right elsewhere"),
    ("mask on queries", MaskOnQueries, "a [B, S] mask laid along the queries"),
    ("mask repeated in wrong order", MaskRepeatedInWrongOrder, "repeat, not repeat_interleave"),
    ("first sample's mask for all", FirstSamplesMaskForAll, "mask[0] broadcasts"),
    ("padding mask broadcast", PaddingMaskBroadcast, "[B, S] against [B, H, T, S]: raises unless B = T or 1"),
    ("mask plus 1e9", MaskPlus1e9, "the sign is lost"),
    ("mask on first head only", MaskOnFirstHeadOnly, "the other heads see everything"),
    ("mask modified", MaskModified, "right at first; the caller's mask is flipped in place"),
    ("no output projection", NoOutputProjection, "linear_o exists, unused; returns the weights too"),
    ("heads averaged", HeadsAveraged, "mean over heads, then [E, D]"),
    ("heads summed", HeadsSummed, "sum over heads, then [E, D]"),
    ("same projection for every head", SameProjectionForEveryHead, "split first, then one [D, D] layer"),
    ("shared projection", SharedProjection, "one layer for q, k and v"),
    ("keys through w_q", KeysThroughWq, "W_k exists and is never called"),
    ("values through w_k", ValuesThroughWk, "W_v exists and is never called"),
    ("no q and k projection", NoQAndKProjection, "the inputs are split as they are"),
    ("no v projection", NoVProjection, "W_v exists and is never called"),
    ("keys and values swapped", KeysAndValuesSwapped, "k from value, v from key"),
    ("queries and keys swapped", QueriesAndKeysSwapped, "the output has the keys' length"),
    ("value from key", ValueFromKey, "W_v is fed the key"),
    ("self-attention only", SelfAttentionOnly, "key and value are never read"),
    ("weight not transposed", WeightNotTransposed, "x @ weight of an nn.Linear"),
    ("output projection twice", OutputProjectionTwice, "W_o applied to its own output"),
    ("weights transposed before v", WeightsTransposedBeforeV, "crashes for T ≠ S"),
    ("wrong layout", WrongLayout, "transpose(0, 2): attends over the samples"),
    ("dropout in eval", DropoutInEval, "F.dropout without training=self.training"),
    ("residual added", ResidualAdded, "query + output"),
    ("layer norm added", LayerNormAdded, "of the output"),
    ("layer norm before", LayerNormBefore, "of the inputs"),
    ("residual and layer norm", ResidualAndLayerNorm, "norm(query + output), returns the weights too"),
    ("relu added", ReluAdded, "of the output"),
    ("relu on projections", ReluOnProjections, "of q, k and v"),
    ("heads in a list", HeadsInAList, "right numbers; the layers of the list are no parameters"),
    ("no in bias used", NoInBiasUsed, "the three biases exist and are never added"),
    ("no out bias used", NoOutBiasUsed, "the bias exists and is never added"),
    ("no q bias", NoQBias, "k and v have theirs"),
    ("no v bias", NoVBias, "q and k have theirs"),
    ("no key bias", NoKeyBias, "equal: softmax does not see it"),
    ("input modified", InputModified, "right numbers, written over the query"),
    ("empty row uniform", EmptyRowUniform, "no fault by itself: a row with no key takes the mean of all"),
    ("empty row zero", EmptyRowZero, "no fault by itself: a row with no key gives zeros"),
    ("empty row nan", Separate, "no fault by itself: a row with no key gives nan"),
]
