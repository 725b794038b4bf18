"""Planted faults, style three: nn.Parameter weights and einsum or matmul, called forward(q, k, v, mask=None).

Two right modules to change a step of: `PerHead` keeps [H, E, D] weights, `Matrices` keeps [E, E] weights,
input first. The mask is boolean [B, T, S]; True means "may attend".
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812

from . import rotary


class PerHead(nn.Module):
    """A right one. mask: bool [B, T, S], True where a query may look at a key."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) / math.sqrt(d_model))
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) / math.sqrt(d_model))
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) / math.sqrt(d_model))
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) / math.sqrt(d_model))
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)

    def out(self, z):
        return torch.einsum("bthd,hde->bte", z, self.W_O) + self.b_O

    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bshd", v, self.W_V) + self.b_V
        z = torch.einsum("bhts,bshd->bthd", self.pattern(q, k, mask), v)
        return self.out(z)


class CausalPerHead(PerHead):
    """The right one for the causal faults: hides the future by itself."""

    def hidden(self, T, S, device):
        return torch.arange(S, device=device)[None, :] > torch.arange(T, device=device)[:, None]

    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        scores = scores.masked_fill(self.hidden(q.shape[1], k.shape[1], q.device), -torch.inf)
        return scores.softmax(dim=-1)

    def forward(self, q, k, v):
        return super().forward(q, k, v)


class Matrices(nn.Module):
    """Another right one. mask: bool [B, T, S], True where a query may look at a key."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Parameter(torch.empty(d_model, d_model))
        self.W_k = nn.Parameter(torch.empty(d_model, d_model))
        self.W_v = nn.Parameter(torch.empty(d_model, d_model))
        self.W_o = nn.Parameter(torch.empty(d_model, d_model))
        self.b_q = nn.Parameter(torch.zeros(d_model))
        self.b_k = nn.Parameter(torch.zeros(d_model))
        self.b_v = nn.Parameter(torch.zeros(d_model))
        self.b_o = nn.Parameter(torch.zeros(d_model))
        for weight in (self.W_q, self.W_k, self.W_v, self.W_o):
            nn.init.xavier_uniform_(weight)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.d_k).transpose(1, 2)

    def weights(self, q, k, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)  # [B, H, T, S]
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1).logical_not(), -torch.inf)
        return torch.softmax(scores, dim=-1)

    def merge(self, z):
        return z.transpose(1, 2).reshape(z.size(0), z.size(2), self.d_model)

    def forward(self, q, k, v, mask=None):
        q = self.split(torch.matmul(q, self.W_q) + self.b_q)
        k = self.split(torch.matmul(k, self.W_k) + self.b_k)
        v = self.split(torch.matmul(v, self.W_v) + self.b_v)
        z = torch.matmul(self.weights(q, k, mask), v)
        return torch.matmul(self.merge(z), self.W_o) + self.b_o


# Scale


class ScaleByDModel(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.d_model = d_model
        d_head = d_model // n_heads
        self.w_q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.w_k = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.w_v = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.w_o = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_k = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_v = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_o = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        q = torch.einsum("btm,hmd->bhtd", q, self.w_q) + self.b_q[:, None]
        k = torch.einsum("bsm,hmd->bhsd", k, self.w_k) + self.b_k[:, None]
        v = torch.einsum("bsm,hmd->bhsd", v, self.w_v) + self.b_v[:, None]
        logits = torch.einsum("bhtd,bhsd->bhts", q, k) / self.d_model**0.5
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None], -torch.inf)
        o = torch.einsum("bhts,bhsd->bhtd", logits.softmax(-1), v)
        return torch.einsum("bhtd,hdm->btm", o, self.w_o) + self.b_o


class NoScale(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bqe,heo->bqho", q, self.W_Q) + self.b_Q
        k = torch.einsum("bke,heo->bkho", k, self.W_K) + self.b_K
        v = torch.einsum("bke,heo->bkho", v, self.W_V) + self.b_V
        attn_scores = torch.einsum("bqho,bkho->bhqk", q, k)
        if mask is not None:
            attn_scores.masked_fill_(~mask.unsqueeze(1), float("-inf"))
        probs = attn_scores.softmax(-1)
        z = torch.einsum("bhqk,bkho->bqho", probs, v)
        return torch.einsum("bqho,hoe->bqe", z, self.W_O) + self.b_O


class ScaleByDk(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / self.d_head
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)


class MultiplyBySqrtDk(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) * self.d_head**0.5
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)


class ConstantScale(PerHead):
    def pattern(self, q, k, mask):
        scores = 0.3 * torch.einsum("bthd,bshd->bhts", q, k)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)


class ScaleBySqrtH(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-2])
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)


class ScaleBySqrtT(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(k.shape[1])
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)


class ScaleAfterSoftmax(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1) / math.sqrt(self.d_head)


class ScaledTwice(PerHead):
    def pattern(self, q, k, mask):
        q, k = q / math.sqrt(self.d_head), k / math.sqrt(self.d_head)
        scores = torch.einsum("bthd,bshd->bhts", q, k)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)


# Splitting and merging


class SplitByView(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_query = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.W_key = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.W_value = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.W_out = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.bias_q = nn.Parameter(torch.zeros(d_model))
        self.bias_k = nn.Parameter(torch.zeros(d_model))
        self.bias_v = nn.Parameter(torch.zeros(d_model))
        self.bias_o = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        b, t, e = q.shape
        d = e // self.num_heads
        q = (q @ self.W_query + self.bias_q).reshape(b, self.num_heads, -1, d)
        k = (k @ self.W_key + self.bias_k).reshape(b, self.num_heads, -1, d)
        v = (v @ self.W_value + self.bias_v).reshape(b, self.num_heads, -1, d)
        s = q @ k.transpose(-2, -1) / math.sqrt(d)
        if mask is not None:
            s = s.masked_fill(~mask[:, None], float("-inf"))
        o = torch.softmax(s, dim=-1) @ v
        return o.transpose(1, 2).reshape(b, t, e) @ self.W_out + self.bias_o


class MergeWithoutTranspose(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        d = d_model // num_heads
        self.W_q = nn.Parameter(torch.randn(num_heads, d_model, d) * d_model**-0.5)
        self.W_k = nn.Parameter(torch.randn(num_heads, d_model, d) * d_model**-0.5)
        self.W_v = nn.Parameter(torch.randn(num_heads, d_model, d) * d_model**-0.5)
        self.W_o = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.b_q = nn.Parameter(torch.zeros(num_heads, 1, d))
        self.b_k = nn.Parameter(torch.zeros(num_heads, 1, d))
        self.b_v = nn.Parameter(torch.zeros(num_heads, 1, d))
        self.b_o = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        B, T, E = q.shape
        Q = q.unsqueeze(1) @ self.W_q + self.b_q  # [B, H, T, D]
        K = k.unsqueeze(1) @ self.W_k + self.b_k
        V = v.unsqueeze(1) @ self.W_v + self.b_v
        A = Q @ K.transpose(-1, -2) / Q.shape[-1] ** 0.5
        if mask is not None:
            A = A.masked_fill(~mask.unsqueeze(1), float("-inf"))
        Z = A.softmax(-1) @ V
        Z = Z.view(B, T, E)
        return Z @ self.W_o + self.b_o


class MergeWithWrongTranspose(Matrices):
    def merge(self, z):
        return z.transpose(2, 3).reshape(z.size(0), z.size(2), self.d_model)


class MergeInterleaved(Matrices):
    def merge(self, z):
        return torch.einsum("bhtd->btdh", z).reshape(z.size(0), z.size(2), self.d_model)


class ViewAfterTranspose(Matrices):
    def merge(self, z):
        return z.transpose(1, 2).view(z.size(0), z.size(2), self.d_model)


class AttentionAcrossHeads(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bte,hed->bthd", k, self.W_K) + self.b_K
        v = torch.einsum("bte,hed->bthd", v, self.W_V) + self.b_V
        scores = torch.einsum("bthd,btgd->bthg", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        z = torch.einsum("bthg,btgd->bthd", scores.softmax(dim=-1), v)
        return torch.einsum("bthd,hde->bte", z, self.W_O) + self.b_O


class HeadsInterleaved(Matrices):
    def split(self, x):
        return torch.einsum("btdh->bhtd", x.reshape(x.size(0), x.size(1), self.d_k, self.num_heads))


class HeadsReversed(PerHead):
    def out(self, z):
        return torch.einsum("bthd,hde->bte", z.flip(2), self.W_O) + self.b_O


class FirstHeadForAll(PerHead):
    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bshd", v, self.W_V) + self.b_V
        pattern = self.pattern(q, k, mask)[:, 0]
        return self.out(torch.einsum("bts,bshd->bthd", pattern, v))


class SingleHead(Matrices):
    def forward(self, q, k, v, mask=None):
        q = torch.matmul(q, self.W_q) + self.b_q
        k = torch.matmul(k, self.W_k) + self.b_k
        v = torch.matmul(v, self.W_v) + self.b_v
        scores = torch.einsum("bte,bse->bts", q, k) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        z = torch.einsum("bts,bse->bte", scores.softmax(-1), v)
        return torch.matmul(z, self.W_o) + self.b_o


class SingleHeadOwnScale(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.W_q = nn.Parameter(torch.randn(d_model, d_model) * 0.2)
        self.W_k = nn.Parameter(torch.randn(d_model, d_model) * 0.2)
        self.W_v = nn.Parameter(torch.randn(d_model, d_model) * 0.2)
        self.W_o = nn.Parameter(torch.randn(d_model, d_model) * 0.2)
        self.b_q = nn.Parameter(torch.zeros(d_model))
        self.b_k = nn.Parameter(torch.zeros(d_model))
        self.b_v = nn.Parameter(torch.zeros(d_model))
        self.b_o = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        q, k, v = q @ self.W_q + self.b_q, k @ self.W_k + self.b_k, v @ self.W_v + self.b_v
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v @ self.W_o + self.b_o


class HardCodedHeads(Matrices):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads=8)


# Softmax


class SoftmaxOverQueries(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h = num_heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * d_model, d_model) * d_model**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * d_model))
        self.out_proj_weight = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.out_proj_bias = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        B, T, E = q.shape
        D = E // self.h
        wq, wk, wv = self.in_proj_weight.chunk(3)
        bq, bk, bv = self.in_proj_bias.chunk(3)
        q = (q @ wq.T + bq).view(B, -1, self.h, D)
        k = (k @ wk.T + bk).view(B, -1, self.h, D)
        v = (v @ wv.T + bv).view(B, -1, self.h, D)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        weights = torch.softmax(scores, dim=-2)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v).reshape(B, T, E)
        return out @ self.out_proj_weight.T + self.out_proj_bias


class SoftmaxOverHeads(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=1)


class SoftmaxWithoutDim(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return F.softmax(scores)


class SoftmaxOverBatch(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=0)


class SoftmaxOverHeadsAndKeys(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bths", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, :, None], scores, -torch.inf)
        return scores.flatten(2).softmax(dim=-1).view_as(scores).transpose(1, 2)


class SoftmaxOverTheWholeMap(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return torch.exp(scores - scores.logsumexp(dim=(-2, -1), keepdim=True))


class SoftmaxTwice(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)

    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bshd", v, self.W_V) + self.b_V
        attn = torch.softmax(self.pattern(q, k, mask), dim=-1)
        return self.out(torch.einsum("bhts,bshd->bthd", attn, v))


class Sigmoid(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.sigmoid()


class ExpWithoutSum(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.exp()


class LogSoftmax(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.log_softmax(dim=-1)


class NoSoftmax(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, 0.0)
        return scores


class DivideBySum(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, 0.0)
        return scores / scores.sum(dim=-1, keepdim=True)


# Causal


class CausalMaskForgotten(PerHead):
    def forward(self, q, k, v, is_causal=False):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bshd", v, self.W_V) + self.b_V
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        z = torch.einsum("bhts,bshd->bthd", scores.softmax(dim=-1), v)
        return self.out(z)


class CausalHidesItself(CausalPerHead):
    def hidden(self, T, S, device):
        return torch.arange(S, device=device)[None, :] >= torch.arange(T, device=device)[:, None]


class CausalShowsTheNext(CausalPerHead):
    def hidden(self, T, S, device):
        return torch.arange(S, device=device)[None, :] > torch.arange(T, device=device)[:, None] + 1


class CausalFlipped(CausalPerHead):
    def hidden(self, T, S, device):
        return torch.arange(S, device=device)[None, :] < torch.arange(T, device=device)[:, None]


class CausalInverted(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, 1, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, 1, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, 1, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v):
        q = torch.einsum("bte,hed->bhtd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bhsd", k, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bhsd", v, self.W_V) + self.b_V
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=future)
        return torch.einsum("bhtd,hde->bte", z, self.W_O) + self.b_O


class CausalBottomRight(CausalPerHead):
    def hidden(self, T, S, device):
        return torch.arange(S, device=device)[None, :] > torch.arange(S - T, S, device=device)[:, None]


# Masks


class MaskIgnored(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bshd", v, self.W_V) + self.b_V
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores.masked_fill(~mask[:, None], float("-inf"))
        z = torch.einsum("bhts,bshd->bthd", scores.softmax(dim=-1), v)
        return torch.einsum("bthd,hde->bte", z, self.W_O) + self.b_O


class MaskInverted(PerHead):
    """mask: bool [B, T, S], True where a query may attend."""

    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], -torch.inf, scores)
        return scores.softmax(dim=-1)


class MaskAdded(PerHead):
    """mask: bool [B, T, S], True where a query may attend."""

    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores + mask[:, None].int()
        return scores.softmax(dim=-1)


class MaskAfterSoftmax(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.W_k = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.W_v = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.W_o = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.b_q = nn.Parameter(torch.zeros(d_model))
        self.b_k = nn.Parameter(torch.zeros(d_model))
        self.b_v = nn.Parameter(torch.zeros(d_model))
        self.b_o = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        B, T, E = q.shape
        Q = (q @ self.W_q + self.b_q).view(B, T, self.num_heads, -1)
        K = (k @ self.W_k + self.b_k).view(B, k.shape[1], self.num_heads, -1)
        V = (v @ self.W_v + self.b_v).view(B, v.shape[1], self.num_heads, -1)
        weights = torch.softmax(torch.einsum("bihd,bjhd->bhij", Q, K) / math.sqrt(Q.shape[-1]), dim=-1)
        if mask is not None:
            weights = weights * mask.unsqueeze(1)
        context = torch.einsum("bhij,bjhd->bihd", weights, V)
        return context.reshape(B, T, E) @ self.W_o + self.b_o


class FillWithZero(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, 0.0)
        return scores.softmax(dim=-1)


class FillWithAlmostZero(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], 1e-9)
        return scores.softmax(dim=-1)


class ScoresTimesMask(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.einsum("bhts,bts->bhts", scores, mask.to(scores.dtype))
        return scores.softmax(dim=-1)


class MaskMakesNaN(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores + (1 - mask[:, None].to(scores.dtype)) * -torch.inf
        return scores.softmax(dim=-1)


class PaddingBecomesNaN(PerHead):
    """mask: bool [B, T], True where there is a token."""

    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            both = torch.einsum("bt,bs->bts", mask.float(), mask.float())
            scores = scores.masked_fill(both[:, None] == 0, -torch.inf)
        return scores.softmax(dim=-1)


class WeightsScaled(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1) / self.W_Q.shape[0]


class SameHeadForAll(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)[:, [-1] * q.shape[2]]


class FillTooSmall(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, -1e5)
        return scores.softmax(dim=-1)


class OverflowInHalf(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        return scores.softmax(dim=-1)


class MaskOnQueries(PerHead):
    """mask: bool [B, T, S], True where a query may attend."""

    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask.transpose(1, 2)[:, None], scores, -torch.inf)
        return scores.softmax(dim=-1)


class MaskRepeatedInWrongOrder(nn.Module):
    """mask: bool [B, T, S], True = may attend."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.W_k = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.W_v = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.W_o = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.b_q = nn.Parameter(torch.zeros(d_model))
        self.b_k = nn.Parameter(torch.zeros(d_model))
        self.b_v = nn.Parameter(torch.zeros(d_model))
        self.b_o = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        B, T, E = q.shape
        H = self.num_heads
        q = (q @ self.W_q + self.b_q).unflatten(2, (H, -1)).transpose(1, 2).flatten(0, 1)  # [B*H, T, D]
        k = (k @ self.W_k + self.b_k).unflatten(2, (H, -1)).transpose(1, 2).flatten(0, 1)
        v = (v @ self.W_v + self.b_v).unflatten(2, (H, -1)).transpose(1, 2).flatten(0, 1)
        scores = torch.einsum("ntd,nsd->nts", q, k) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask.repeat(H, 1, 1), -torch.inf)
        z = torch.einsum("nts,nsd->ntd", scores.softmax(-1), v)
        z = z.unflatten(0, (B, H)).transpose(1, 2).reshape(B, T, E)
        return z @ self.W_o + self.b_o


class FirstSamplesMaskForAll(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[0], scores, -torch.inf)
        return scores.softmax(dim=-1)


class PaddingMaskBroadcast(PerHead):
    """mask: bool [B, S], True for a token, False for padding."""

    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask, scores, -torch.inf)
        return scores.softmax(dim=-1)


class MaskPlus1e9(PerHead):
    """mask: bool [B, T, S], True where a query may attend."""

    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores - (mask[:, None].to(scores.dtype) - 1) * 1e9
        return scores.softmax(dim=-1)


class MaskOnFirstHeadOnly(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            everywhere = torch.ones_like(scores, dtype=torch.bool)
            everywhere[:, 0] = mask
            scores = torch.where(everywhere, scores, -torch.inf)
        return scores.softmax(dim=-1)


class MaskModified(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            mask ^= True
            scores = scores.masked_fill(mask[:, None], -torch.inf)
        return scores.softmax(dim=-1)


# Projections and wiring


class NoOutputProjection(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bhtd", q, self.W_Q) + self.b_Q[:, None]
        k = torch.einsum("bse,hed->bhsd", k, self.W_K) + self.b_K[:, None]
        v = torch.einsum("bse,hed->bhsd", v, self.W_V) + self.b_V[:, None]
        scores = q @ k.mT / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        return torch.einsum("bhts,bhsd->bthd", scores.softmax(-1), v).flatten(2)


class HeadsAveraged(PerHead):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.W_O = nn.Parameter(torch.randn(self.d_head, d_model) / math.sqrt(d_model))

    def out(self, z):
        return torch.einsum("btd,de->bte", z.mean(dim=2), self.W_O) + self.b_O


class HeadsSummed(PerHead):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.W_O = nn.Parameter(torch.randn(self.d_head, d_model) / math.sqrt(d_model))

    def out(self, z):
        return torch.einsum("bthd,de->bte", z, self.W_O) + self.b_O


class SameProjectionForEveryHead(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.n_heads, self.d_head = n_heads, d_head
        self.W_q = nn.Parameter(torch.randn(d_head, d_head) * d_head**-0.5)
        self.W_k = nn.Parameter(torch.randn(d_head, d_head) * d_head**-0.5)
        self.W_v = nn.Parameter(torch.randn(d_head, d_head) * d_head**-0.5)
        self.W_o = nn.Parameter(torch.randn(d_model, d_model) * d_model**-0.5)
        self.b_q = nn.Parameter(torch.zeros(d_head))
        self.b_k = nn.Parameter(torch.zeros(d_head))
        self.b_v = nn.Parameter(torch.zeros(d_head))
        self.b_o = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        q, k, v = (x.unflatten(-1, (self.n_heads, self.d_head)) for x in (q, k, v))  # [B, T, H, D]
        q = torch.einsum("bthd,dc->bthc", q, self.W_q) + self.b_q
        k = torch.einsum("bshd,dc->bshc", k, self.W_k) + self.b_k
        v = torch.einsum("bshd,dc->bshc", v, self.W_v) + self.b_v
        scores = torch.einsum("bthc,bshc->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        z = torch.einsum("bhts,bshc->bthc", scores.softmax(dim=-1), v)
        return z.flatten(2) @ self.W_o + self.b_o


class SharedProjection(Matrices):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        del self.W_k, self.W_v, self.b_k, self.b_v

    def forward(self, q, k, v, mask=None):
        q, k, v = (self.split(torch.matmul(x, self.W_q) + self.b_q) for x in (q, k, v))
        z = torch.matmul(self.weights(q, k, mask), v)
        return torch.matmul(self.merge(z), self.W_o) + self.b_o


class KeysThroughWq(PerHead):
    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", k, self.W_Q) + self.b_Q
        v = torch.einsum("bse,hed->bshd", v, self.W_V) + self.b_V
        return self.out(torch.einsum("bhts,bshd->bthd", self.pattern(q, k, mask), v))


class ValuesThroughWk(PerHead):
    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bshd", v, self.W_K) + self.b_K
        return self.out(torch.einsum("bhts,bshd->bthd", self.pattern(q, k, mask), v))


class NoQAndKProjection(Matrices):
    def forward(self, q, k, v, mask=None):
        q = self.split(q)
        k = self.split(k)
        v = self.split(torch.matmul(v, self.W_v) + self.b_v)
        z = torch.matmul(self.weights(q, k, mask), v)
        return torch.matmul(self.merge(z), self.W_o) + self.b_o


class NoVProjection(Matrices):
    def forward(self, q, k, v, mask=None):
        q = self.split(torch.matmul(q, self.W_q) + self.b_q)
        k = self.split(torch.matmul(k, self.W_k) + self.b_k)
        z = torch.matmul(self.weights(q, k, mask), self.split(v))
        return torch.matmul(self.merge(z), self.W_o) + self.b_o


class KeysAndValuesSwapped(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.d_head = d_head
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v, mask=None):
        Q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        K = torch.einsum("bse,hed->bshd", v, self.W_K) + self.b_K
        V = torch.einsum("bse,hed->bshd", k, self.W_V) + self.b_V
        scores = torch.einsum("bthd,bshd->bhts", Q, K) / math.sqrt(self.d_head)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        z = torch.einsum("bhts,bshd->bthd", scores.softmax(dim=-1), V)
        return torch.einsum("bthd,hde->bte", z, self.W_O) + self.b_O


class QueriesAndKeysSwapped(PerHead):
    def forward(self, q, k, v, mask=None):
        return super().forward(k, q, v, mask)


class ValueFromKey(PerHead):
    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        v = torch.einsum("bse,hed->bshd", k, self.W_V) + self.b_V
        k = torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K
        return self.out(torch.einsum("bhts,bshd->bthd", self.pattern(q, k, mask), v))


class SelfAttentionOnly(PerHead):
    def forward(self, q, k, v, mask=None):
        x = q
        q = torch.einsum("bte,hed->bthd", x, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", x, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bshd", x, self.W_V) + self.b_V
        return self.out(torch.einsum("bhts,bshd->bthd", self.pattern(q, k, mask), v))


class InProjection(nn.Module):
    """A right one with torch's own parameters. mask: bool [B, T, S], True = may attend."""

    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def project(self, q, k, v):
        w, b, E = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        return q @ w[:E].T + b[:E], k @ w[E : 2 * E].T + b[E : 2 * E], v @ w[2 * E :].T + b[2 * E :]

    def forward(self, q, k, v, mask=None):
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in self.project(q, k, v))  # [B, T, H, D]
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], float("-inf"))
        return self.out_proj(torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2))


class FusedOrderKqv(InProjection):
    def project(self, q, k, v):
        w_k, w_q, w_v = self.in_proj_weight.chunk(3)
        b_k, b_q, b_v = self.in_proj_bias.chunk(3)
        return q @ w_q.T + b_q, k @ w_k.T + b_k, v @ w_v.T + b_v


class FusedOrderVkq(InProjection):
    def project(self, q, k, v):
        w_v, w_k, w_q = self.in_proj_weight.chunk(3)
        b_v, b_k, b_q = self.in_proj_bias.chunk(3)
        return q @ w_q.T + b_q, k @ w_k.T + b_k, v @ w_v.T + b_v


class WeightNotTransposed(InProjection):
    def project(self, q, k, v):
        w, b, E = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        return q @ w[:E] + b[:E], k @ w[E : 2 * E] + b[E : 2 * E], v @ w[2 * E :] + b[2 * E :]


class OutputProjectionTwice(Matrices):
    def forward(self, q, k, v, mask=None):
        out = super().forward(q, k, v, mask)
        return torch.matmul(out, self.W_o) + self.b_o


class WeightsTransposedBeforeV(PerHead):
    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bshd", v, self.W_V) + self.b_V
        return self.out(torch.einsum("bhst,bshd->bthd", self.pattern(q, k, mask), v))


class WrongLayout(nn.Module):
    """q, k, v: [batch, time, d_model]."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        d_head = d_model // n_heads
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.2)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.2)
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))

    def forward(self, q, k, v):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bte,hed->bthd", k, self.W_K) + self.b_K
        v = torch.einsum("bte,hed->bthd", v, self.W_V) + self.b_V
        scores = torch.einsum("tbhd,sbhd->bhts", q, k) / math.sqrt(q.shape[-1])
        z = torch.einsum("bhts,sbhd->tbhd", scores.softmax(dim=-1), v)
        return torch.einsum("bthd,hde->bte", z, self.W_O) + self.b_O


# Extra or missing pieces


class DropoutInEval(PerHead):
    def __init__(self, d_model, n_heads, p=0.1):
        super().__init__(d_model, n_heads)
        self.p = p

    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q
        k = torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K
        v = torch.einsum("bse,hed->bshd", v, self.W_V) + self.b_V
        pattern = nn.Dropout(self.p)(self.pattern(q, k, mask))
        return self.out(torch.einsum("bhts,bshd->bthd", pattern, v))


class ResidualAdded(PerHead):
    def forward(self, q, k, v, mask=None):
        return super().forward(q, k, v, mask) + q


class LayerNormAdded(PerHead):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.ln = nn.LayerNorm(d_model)

    def out(self, z):
        return self.ln(torch.einsum("bthd,hde->bte", z, self.W_O) + self.b_O)


class LayerNormBefore(PerHead):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.ln = nn.LayerNorm(d_model)

    def forward(self, q, k, v, mask=None):
        q, k, v = self.ln(q), self.ln(k), self.ln(v)
        return super().forward(q, k, v, mask)


class ResidualAndLayerNorm(Matrices):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        self.layer_norm = nn.LayerNorm(d_model)

    def forward(self, q, k, v, mask=None):
        return self.layer_norm(q + super().forward(q, k, v, mask))


class ReluAdded(PerHead):
    def out(self, z):
        return (torch.einsum("bthd,hde->bte", z, self.W_O) + self.b_O).relu()


class ReluOnProjections(PerHead):
    def forward(self, q, k, v, mask=None):
        q = torch.relu(torch.einsum("bte,hed->bthd", q, self.W_Q) + self.b_Q)
        k = torch.relu(torch.einsum("bse,hed->bshd", k, self.W_K) + self.b_K)
        v = torch.relu(torch.einsum("bse,hed->bshd", v, self.W_V) + self.b_V)
        return self.out(torch.einsum("bhts,bshd->bthd", self.pattern(q, k, mask), v))


class HeadsInAList(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        d = d_model // num_heads
        self.d = d
        self.W_q = [nn.Parameter(torch.randn(d_model, d) * 0.2) for _ in range(num_heads)]
        self.W_k = [nn.Parameter(torch.randn(d_model, d) * 0.2) for _ in range(num_heads)]
        self.W_v = [nn.Parameter(torch.randn(d_model, d) * 0.2) for _ in range(num_heads)]
        self.W_o = nn.Parameter(torch.randn(d_model, d_model) * 0.2)

    def forward(self, q, k, v, mask=None):
        outs = []
        for w_q, w_k, w_v in zip(self.W_q, self.W_k, self.W_v, strict=True):
            scores = torch.einsum("btd,bsd->bts", q @ w_q, k @ w_k) / math.sqrt(self.d)
            if mask is not None:
                scores = scores.masked_fill(~mask, float("-inf"))
            outs.append(scores.softmax(dim=-1) @ (v @ w_v))
        return torch.cat(outs, dim=-1) @ self.W_o


class NoInBiasUsed(PerHead):
    def forward(self, q, k, v, mask=None):
        q = torch.einsum("bte,hed->bthd", q, self.W_Q)
        k = torch.einsum("bse,hed->bshd", k, self.W_K)
        v = torch.einsum("bse,hed->bshd", v, self.W_V)
        return self.out(torch.einsum("bhts,bshd->bthd", self.pattern(q, k, mask), v))


class NoOutBiasUsed(PerHead):
    def out(self, z):
        return torch.einsum("bthd,hde->bte", z, self.W_O)


class NoQBias(Matrices):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        del self.b_q

    def forward(self, q, k, v, mask=None):
        q = self.split(torch.matmul(q, self.W_q))
        k = self.split(torch.matmul(k, self.W_k) + self.b_k)
        v = self.split(torch.matmul(v, self.W_v) + self.b_v)
        z = torch.matmul(self.weights(q, k, mask), v)
        return torch.matmul(self.merge(z), self.W_o) + self.b_o


class NoVBias(Matrices):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        del self.b_v

    def forward(self, q, k, v, mask=None):
        q = self.split(torch.matmul(q, self.W_q) + self.b_q)
        k = self.split(torch.matmul(k, self.W_k) + self.b_k)
        v = self.split(torch.matmul(v, self.W_v))
        z = torch.matmul(self.weights(q, k, mask), v)
        return torch.matmul(self.merge(z), self.W_o) + self.b_o


class NoKeyBias(Matrices):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        del self.b_k

    def forward(self, q, k, v, mask=None):
        q = self.split(torch.matmul(q, self.W_q) + self.b_q)
        k = self.split(torch.matmul(k, self.W_k))
        v = self.split(torch.matmul(v, self.W_v) + self.b_v)
        z = torch.matmul(self.weights(q, k, mask), v)
        return torch.matmul(self.merge(z), self.W_o) + self.b_o


class InputModified(PerHead):
    def forward(self, q, k, v, mask=None):
        out = super().forward(q, k, v, mask)
        v -= v.mean(dim=1, keepdim=True)
        return out


# Rows in which every key is hidden


class EmptyRowUniform(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is not None:
            scores = torch.where(mask[:, None], scores, torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1)


class EmptyRowZero(PerHead):
    def pattern(self, q, k, mask):
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.d_head)
        if mask is None:
            return scores.softmax(dim=-1)
        scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return scores.softmax(dim=-1).masked_fill(~mask[:, None], 0.0)


NOT_POSSIBLE: dict[str, str] = {}

FAULTS = [
    ("scale by d_model", ScaleByDModel, "divides by sqrt(E)"),
    ("no scale", NoScale, "the product goes straight into softmax"),
    ("scale by d_k", ScaleByDk, "the root is forgotten"),
    ("multiply by sqrt d_k", MultiplyBySqrtDk, "times where it should be divided by"),
    ("constant scale", ConstantScale, "0.3 whatever the width of a head"),
    ("scale by sqrt H", ScaleBySqrtH, "shape[-2] of [B, T, H, D] is H"),
    ("scale by sqrt T", ScaleBySqrtT, "shape[1] is the number of keys"),
    ("scale after softmax", ScaleAfterSoftmax, "weights, not scores, are divided by sqrt(D)"),
    ("scaled twice", ScaledTwice, "q and k both divided by sqrt(D); the numbers of scale by d_k"),
    ("split by view", SplitByView, "reshape(B, H, -1, D) cuts across positions"),
    ("merge without transpose", MergeWithoutTranspose, "[B, H, T, D] viewed as [B, T, E]"),
    ("merge with wrong transpose", MergeWithWrongTranspose, "transpose(2, 3) then reshape"),
    ("merge interleaved", MergeInterleaved, "[B, T, D, H]: the features of the heads alternate"),
    ("view after transpose", ViewAfterTranspose, "raises RuntimeError: no contiguous()"),
    ("attention across heads", AttentionAcrossHeads, "the same t in q and k: [H, H] weights"),
    ("heads interleaved", HeadsInterleaved, "[D, H]: head h takes every H-th feature"),
    ("heads reversed", HeadsReversed, "flip(2) before W_O"),
    ("same head for all", SameHeadForAll, "the index is -1 for every head"),
    ("padding becomes NaN", PaddingBecomesNaN, "the padding mask hides rows as well as columns"),
    ("mask makes NaN", MaskMakesNaN, "0 * -inf is NaN"),
    ("weights scaled after softmax", WeightsScaled, "a mean over heads after the softmax"),
    *rotary.EINSUM,
    ("first head for all", FirstHeadForAll, "the pattern of head 0 weighs every head's values"),
    ("single head", SingleHead, "never split, divided by sqrt(E / H)"),
    ("single head with its own scale", SingleHeadOwnScale, "never split, divided by sqrt(E)"),
    ("hard-coded heads", HardCodedHeads, "8 heads whatever was asked for"),
    ("softmax over queries", SoftmaxOverQueries, "dim=-2; torch's parameter names"),
    ("softmax over heads", SoftmaxOverHeads, "dim=1"),
    ("softmax without a dim", SoftmaxWithoutDim, "torch warns and takes dim 1, the heads"),
    ("softmax over batch", SoftmaxOverBatch, "dim=0"),
    ("softmax over heads and keys", SoftmaxOverHeadsAndKeys, "the heads of one query share a sum of 1"),
    ("softmax over the whole map", SoftmaxOverTheWholeMap, "all queries and keys of a head share a sum of 1"),
    ("softmax twice", SoftmaxTwice, "once in pattern, once in forward"),
    ("sigmoid", Sigmoid, "each key by itself"),
    ("exp without sum", ExpWithoutSum, "not normalised"),
    ("log softmax", LogSoftmax, "logarithms used as weights"),
    ("no softmax", NoSoftmax, "scores used as weights"),
    ("divide by sum", DivideBySum, "scores divided by their sum, no exp"),
    ("causal mask forgotten", CausalMaskForgotten, "is_causal is never read"),
    ("causal hides itself", CausalHidesItself, ">= where > is meant: row 0 is nan"),
    ("causal shows the next", CausalShowsTheNext, "one too far"),
    ("causal flipped", CausalFlipped, "< where > is meant: hides the past"),
    ("causal inverted", CausalInverted, "torch's function reads True as: may attend"),
    ("causal bottom-right", CausalBottomRight, "a convention: parts from top-left for T ≠ S only"),
    ("mask ignored", MaskIgnored, "the result of masked_fill is thrown away"),
    ("mask inverted", MaskInverted, "hides where the mask is True"),
    ("mask added", MaskAdded, "0 and 1 added to the scores"),
    ("mask after softmax", MaskAfterSoftmax, "weights times mask: rows no longer sum to 1"),
    ("fill with zero", FillWithZero, "score 0 is a score like any other"),
    ("fill with almost zero", FillWithAlmostZero, "1e-9 for -1e9; the numbers of fill with zero"),
    ("scores times mask", ScoresTimesMask, "the numbers of fill with zero"),
    ("fill too small", FillTooSmall, "-1e5 leaks where scores are large"),
    ("overflow in half", OverflowInHalf, "-1e9 does not fit float16: raises there, right elsewhere"),
    ("mask on queries", MaskOnQueries, "the mask is transposed: crashes for T ≠ S"),
    ("mask repeated in wrong order", MaskRepeatedInWrongOrder, "repeat, not repeat_interleave"),
    ("first sample's mask for all", FirstSamplesMaskForAll, "mask[0] broadcasts"),
    ("padding mask broadcast", PaddingMaskBroadcast, "[B, S] against [B, H, T, S]: raises unless B = T or 1"),
    ("mask plus 1e9", MaskPlus1e9, "the sign is lost"),
    ("mask on first head only", MaskOnFirstHeadOnly, "the other heads see everything"),
    ("mask modified", MaskModified, "right at first; the caller's mask is flipped in place"),
    ("no output projection", NoOutputProjection, "W_O and b_O exist, unused"),
    ("heads averaged", HeadsAveraged, "mean over heads, then [D, E]"),
    ("heads summed", HeadsSummed, "W_O without a head axis: einsum sums the heads"),
    ("same projection for every head", SameProjectionForEveryHead, "split first, then one [D, D] weight"),
    ("shared projection", SharedProjection, "one weight for q, k and v"),
    ("keys through w_q", KeysThroughWq, "W_K exists and is never used"),
    ("values through w_k", ValuesThroughWk, "W_V exists and is never used"),
    ("no q and k projection", NoQAndKProjection, "the inputs are split as they are"),
    ("no v projection", NoVProjection, "W_v exists and is never used"),
    ("keys and values swapped", KeysAndValuesSwapped, "K from v, V from k"),
    ("queries and keys swapped", QueriesAndKeysSwapped, "the output has the keys' length"),
    ("value from key", ValueFromKey, "W_V is fed the key"),
    ("self-attention only", SelfAttentionOnly, "k and v are never read"),
    ("fused order k q v", FusedOrderKqv, "against torch's order of in_proj_weight"),
    ("fused order v k q", FusedOrderVkq, "against torch's order of in_proj_weight"),
    ("weight not transposed", WeightNotTransposed, "x @ the thirds of in_proj_weight"),
    ("output projection twice", OutputProjectionTwice, "W_o applied to its own output"),
    ("weights transposed before v", WeightsTransposedBeforeV, "s and t mixed up: crashes for T ≠ S"),
    ("wrong layout", WrongLayout, "letters of a sequence-first tensor: attends over the samples"),
    ("dropout in eval", DropoutInEval, "nn.Dropout made in forward is always in training"),
    ("residual added", ResidualAdded, "output + q"),
    ("layer norm added", LayerNormAdded, "of the output"),
    ("layer norm before", LayerNormBefore, "of the inputs"),
    ("residual and layer norm", ResidualAndLayerNorm, "norm(q + output)"),
    ("relu added", ReluAdded, "of the output"),
    ("relu on projections", ReluOnProjections, "of q, k and v"),
    ("heads in a list", HeadsInAList, "right numbers; what the lists hold are no parameters; no biases"),
    ("no in bias used", NoInBiasUsed, "the three biases exist and are never added"),
    ("no out bias used", NoOutBiasUsed, "b_O exists and is never added"),
    ("no q bias", NoQBias, "k and v have theirs"),
    ("no v bias", NoVBias, "q and k have theirs"),
    ("no key bias", NoKeyBias, "equal: softmax does not see it"),
    ("input modified", InputModified, "right numbers, but v is centred in place"),
    ("empty row uniform", EmptyRowUniform, "no fault by itself: a row with no key takes the mean of all"),
    ("empty row zero", EmptyRowZero, "no fault by itself: a row with no key gives zeros"),
    ("empty row nan", PerHead, "no fault by itself: a row with no key gives nan"),
]
