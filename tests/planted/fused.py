"""Planted faults, style two: one nn.Linear makes q, k and v, called forward(x, mask=None).

The mask is boolean and broadcasts to [B, H, T, T]; True means "may attend". A few modules take a padding mask
[B, T] instead and say so.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812

from . import rotary


class Fused(nn.Module):
    """The right one. mask: bool, broadcasts to [B, H, T, T], True where a query may look at a key."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.dim = dim
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def project(self, x):
        B, T, _ = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)  # three of [B, H, T, D]

    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale  # [B, H, T, T]
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.softmax(dim=-1) @ v

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)  # [B, T, E]

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        return self.proj(self.merge(self.weigh(q, k, v, mask)))


class CausalFused(nn.Module):
    """The right one for the causal faults: a buffer of the longest length, cut to the length at hand."""

    def __init__(self, n_embd, n_head, block_size=64):
        super().__init__()
        self.n_embd = n_embd
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("allowed", self.build(block_size), persistent=False)

    def build(self, n):
        return torch.tril(torch.ones(n, n)).bool()

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(~self.allowed[:T, :T], float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


# Scale


class ScaleByDModel(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads = heads
        self.scale = dim**-0.5
        self.to_qkv = nn.Linear(dim, dim * 3)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q, k, v = (t.reshape(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        if mask is not None:
            dots = dots.masked_fill(~mask, float("-inf"))
        attn = dots.softmax(dim=-1)
        out = torch.matmul(attn, v).transpose(1, 2).reshape(b, n, d)
        return self.to_out(out)


class NoScale(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, mask=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)
        att = q @ k.transpose(-2, -1)
        if mask is not None:
            att = att.masked_fill(mask.logical_not(), float("-inf"))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class ScaleByDk(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) / self.head_dim
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.softmax(dim=-1) @ v


class MultiplyBySqrtDk(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.scale = self.head_dim**0.5


class ConstantScale(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.scale = 0.125


class ScaleBySqrtH(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.scale = num_heads**-0.5


class ScaleBySqrtT(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[2])
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.softmax(dim=-1) @ v


class ScaleAfterSoftmax(Fused):
    def weigh(self, q, k, v, mask):
        attn = q @ k.transpose(-2, -1)
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.softmax(dim=-1) * self.scale @ v


class ScaledTwice(Fused):
    def weigh(self, q, k, v, mask):
        q = q * self.scale
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.softmax(dim=-1) @ v


# Splitting and merging


class SplitByView(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(d_model, 3 * d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        B, T, E = x.shape
        D = E // self.num_heads
        q, k, v = self.qkv_proj(x).chunk(3, dim=-1)
        q = q.reshape(B, self.num_heads, T, D)
        k = k.reshape(B, self.num_heads, T, D)
        v = v.reshape(B, self.num_heads, T, D)
        logits = q @ k.mT / math.sqrt(D)
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        values = logits.softmax(-1) @ v
        values = values.permute(0, 2, 1, 3).reshape(B, T, E)
        return self.o_proj(values)


class MergeWithoutTranspose(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, mask=None):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x.contiguous().view(B, T, E)
        return self.out(x)


class MergeWithWrongTranspose(Fused):
    def merge(self, x):
        B, H, T, D = x.shape
        return x.transpose(2, 3).reshape(B, T, H * D)


class MergeInterleaved(Fused):
    def merge(self, x):
        return x.permute(0, 2, 3, 1).flatten(2)


class ViewAfterTranspose(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, mask=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).chunk(3, dim=-1)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)
        att = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            att = att.masked_fill(~mask, float("-inf"))
        y = att.softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).view(B, T, C))


class AttentionAcrossHeads(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 1, 3, 4)
        attn = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).reshape(B, T, C))


class HeadsInterleaved(Fused):
    def project(self, x):
        B, T, _ = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.head_dim, self.num_heads)
        return qkv.permute(2, 0, 4, 1, 3).unbind(0)


class HeadsReversed(Fused):
    def merge(self, x):
        return x.flip(1).transpose(1, 2).flatten(2)


class FirstHeadForAll(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.softmax(dim=-1)[:, 0].unsqueeze(1) @ v


class SingleHead(nn.Module):
    """mask: bool [B, 1, T, T], True = may attend."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.head_dim = d_model // num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(~mask.squeeze(1), float("-inf"))
        return self.out(scores.softmax(dim=-1) @ v)


class SingleHeadOwnScale(Fused):
    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        return self.proj(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1))


class HardCodedHeads(Fused):
    def __init__(self, dim, num_heads=8):
        super().__init__(dim, 8)


# Softmax


class SoftmaxOverQueries(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).permute(0, 2, 1, 3) for t in self.to_qkv(x).chunk(3, dim=-1))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        if mask is not None:
            sim = sim.masked_fill(~mask, float("-inf"))
        attn = sim.softmax(dim=-2)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(out.permute(0, 2, 1, 3).reshape(b, n, d))


class SoftmaxOverHeads(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return torch.softmax(attn, 1) @ v


class SoftmaxWithoutDim(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return F.softmax(attn) @ v


class SoftmaxOverBatch(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return torch.softmax(attn, 0) @ v


class SoftmaxOverHeadsAndKeys(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        e = attn.exp()
        return e / e.sum(dim=(1, 3), keepdim=True) @ v


class SoftmaxOverTheWholeMap(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        e = attn.exp()
        return e / e.sum(dim=(-2, -1), keepdim=True) @ v


class SoftmaxTwice(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.softmax(dim=-1).softmax(dim=-1) @ v


class Sigmoid(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.sigmoid() @ v


class ExpWithoutSum(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.exp() @ v


class LogSoftmax(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.log_softmax(dim=-1) @ v


class NoSoftmax(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, 0)
        return attn @ v


class DivideBySum(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, 0)
        attn = attn / attn.sum(-1, keepdim=True)
        return attn @ v


# Causal


class CausalMaskForgotten(nn.Module):
    def __init__(self, n_embd, n_head, block_size=64):
        super().__init__()
        self.n_embd = n_embd
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.register_buffer("causal_mask", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class CausalHidesItself(CausalFused):
    def build(self, n):
        return torch.tril(torch.ones(n, n), diagonal=-1).bool()


class CausalShowsTheNext(CausalFused):
    def build(self, n):
        return torch.tril(torch.ones(n, n), diagonal=1).bool()


class CausalFlipped(CausalFused):
    def build(self, n):
        return torch.triu(torch.ones(n, n)).bool()


class CausalInverted(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_heads, E // self.n_heads).permute(2, 0, 3, 1, 4)
        mask = torch.triu(torch.ones(T, T, dtype=torch.bool, device=x.device), diagonal=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, E))


# Masks


class MaskIgnored(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(B, T, C))


class MaskInverted(Fused):
    """mask: bool, True where a query may attend."""

    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(mask, float("-inf"))
        return attn.softmax(dim=-1) @ v


class MaskAdded(Fused):
    """mask: bool, True where a query may attend."""

    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn + mask
        return attn.softmax(dim=-1) @ v


class MaskAfterSoftmax(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, mask=None):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att, dim=-1)
        if mask is not None:
            att = att * mask
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class FillWithZero(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = torch.where(mask, attn, torch.zeros_like(attn))
        return attn.softmax(dim=-1) @ v


class FillWithAlmostZero(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, -1e-9)
        return attn.softmax(dim=-1) @ v


class ScoresTimesMask(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn * mask
        return attn.softmax(dim=-1) @ v


class MaskMakesNaN(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn + torch.logical_not(mask) * -math.inf
        return attn.softmax(dim=-1) @ v


class PaddingBecomesNaN(Fused):
    """mask: bool [B, T], True where there is a token."""

    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            allowed = mask.unsqueeze(1) & mask.unsqueeze(2)  # [B, T, T]
            attn = attn.masked_fill(~allowed.unsqueeze(1), float("-inf"))
        return attn.softmax(dim=-1) @ v


class WeightsScaled(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        attn = attn.softmax(dim=-1) / k.shape[-2]
        return attn @ v


class SameHeadForAll(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.softmax(dim=-1) @ v[:, :1]


class FillTooSmall(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, -10000.0)
        return attn.softmax(dim=-1) @ v


class OverflowInHalf(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, -1e20)
        return attn.softmax(dim=-1) @ v


class MaskOnQueries(Fused):
    """mask: bool [B, T], True for a token, False for padding."""

    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask[:, None, :, None], torch.finfo(attn.dtype).min)
        return attn.softmax(dim=-1) @ v


class MaskRepeatedInWrongOrder(nn.Module):
    """mask: bool [B, T, T], True = may attend."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        B, T, E = x.shape
        H, D = self.num_heads, self.head_dim
        q, k, v = (
            t.reshape(B, T, H, D).transpose(1, 2).reshape(B * H, T, D) for t in self.qkv(x).chunk(3, dim=-1)
        )
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(D)
        if mask is not None:
            scores = scores.masked_fill(~torch.cat([mask] * H), float("-inf"))
        y = torch.bmm(scores.softmax(-1), v)
        return self.out(y.view(B, H, T, D).transpose(1, 2).reshape(B, T, E))


class FirstSamplesMaskForAll(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask[:1], float("-inf"))
        return attn.softmax(dim=-1) @ v


class PaddingMaskBroadcast(Fused):
    """mask: bool [B, T], True for a token, False for padding."""

    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return attn.softmax(dim=-1) @ v


class MaskPlus1e9(Fused):
    """mask: bool, True where a query may attend."""

    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn + 1e9 * (~mask).to(attn.dtype)
        return attn.softmax(dim=-1) @ v


class MaskOnFirstHeadOnly(Fused):
    """mask: bool [B, 1, T, T], True where a query may attend."""

    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = torch.cat([attn[:, :1].masked_fill(~mask, float("-inf")), attn[:, 1:]], dim=1)
        return attn.softmax(dim=-1) @ v


class MaskModified(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            mask.bitwise_not_()
            attn = attn.masked_fill(mask, float("-inf"))
        return attn.softmax(dim=-1) @ v


# Projections and wiring


class NoOutputProjection(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        qkv = self.qkv(x).view(B, T, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = q @ k.transpose(-2, -1) / self.head_dim**0.5
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        x = attn.softmax(dim=-1) @ v
        return x.transpose(1, 2).reshape(B, T, C)


class HeadsAveraged(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.proj = nn.Linear(self.head_dim, dim)

    def merge(self, x):
        return x.mean(1)


class HeadsSummed(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.proj = nn.Linear(self.head_dim, dim)

    def merge(self, x):
        return x.sum(1)


class SameProjectionForEveryHead(nn.Module):
    def __init__(self, emb, heads):
        super().__init__()
        self.heads = heads
        s = emb // heads
        self.qkv = nn.Linear(s, 3 * s)
        self.unifyheads = nn.Linear(emb, emb)

    def forward(self, x, mask=None):
        b, t, e = x.size()
        q, k, v = self.qkv(x.view(b, t, self.heads, e // self.heads)).chunk(3, dim=-1)  # [b, t, h, s]
        dot = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(e // self.heads)
        if mask is not None:
            dot = dot.masked_fill(~mask, float("-inf"))
        out = torch.einsum("bhts,bshd->bthd", dot.softmax(dim=-1), v)
        return self.unifyheads(out.reshape(b, t, e))


class SharedProjection(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.qkv = nn.Linear(dim, dim)

    def project(self, x):
        B, T, _ = x.shape
        shared = self.qkv(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        return shared, shared, shared


class KeysThroughWq(Fused):
    def forward(self, x, mask=None):
        qkv = self.project(x)
        q, k, v = qkv[0], qkv[0], qkv[2]
        return self.proj(self.merge(self.weigh(q, k, v, mask)))


class ValuesThroughWk(Fused):
    def forward(self, x, mask=None):
        qkv = self.project(x)
        q, k, v = qkv[0], qkv[1], qkv[1]
        return self.proj(self.merge(self.weigh(q, k, v, mask)))


class NoQAndKProjection(Fused):
    def forward(self, x, mask=None):
        B, T, _ = x.shape
        _, _, v = self.project(x)
        q = k = x.view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        return self.proj(self.merge(self.weigh(q, k, v, mask)))


class NoVProjection(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qk = nn.Linear(d_model, 2 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        B, T, E = x.shape
        q, k = self.qk(x).chunk(2, dim=-1)
        q, k, v = (t.view(B, T, self.num_heads, -1).transpose(1, 2) for t in (q, k, x))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, E))


class FusedOrderKqv(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(n_embd, 3 * n_embd)
        self.proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        k, q, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(B, T, self.n_head, -1).transpose(1, 2)
        k = k.view(B, T, self.n_head, -1).transpose(1, 2)
        v = v.view(B, T, self.n_head, -1).transpose(1, 2)
        att = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if mask is not None:
            att = att.masked_fill(~mask, float("-inf"))
        y = att.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class FusedOrderVkq(Fused):
    def forward(self, x, mask=None):
        v, k, q = self.project(x)
        return self.proj(self.merge(self.weigh(q, k, v, mask)))


class WeightNotTransposed(Fused):
    def project(self, x):
        B, T, _ = x.shape
        weights, biases = self.qkv.weight.chunk(3), self.qkv.bias.chunk(3)
        return tuple(
            (x @ w + b).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
            for w, b in zip(weights, biases, strict=True)
        )


class OutputProjectionTwice(Fused):
    def merge(self, x):
        return self.proj(x.transpose(1, 2).flatten(2))


class WeightsTransposedBeforeV(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, float("-inf"))
        return torch.einsum("bhij,bhid->bhjd", attn.softmax(dim=-1), v)


class WrongLayout(nn.Module):
    """x: [batch, time, dim]."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        batch, time, dim = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.num_heads, dim // self.num_heads)
        q, k, v = qkv.permute(2, 1, 3, 0, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.proj(y.permute(2, 0, 1, 3).reshape(batch, time, dim))


# Extra or missing pieces


class DropoutInEval(nn.Module):
    def __init__(self, n_embd, n_head, dropout=0.1):
        super().__init__()
        self.n_head = n_head
        self.dropout = dropout
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class ResidualAdded(Fused):
    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        return x + self.proj(self.merge(self.weigh(q, k, v, mask)))


class LayerNormAdded(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        return self.norm(self.proj(self.merge(self.weigh(q, k, v, mask))))


class LayerNormBefore(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, n, d = x.shape
        x = self.norm(x)
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
        dots = q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5
        if mask is not None:
            dots = dots.masked_fill(~mask, float("-inf"))
        out = dots.softmax(dim=-1) @ v
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


class ResidualAndLayerNorm(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mask=None):
        return self.norm(x + super().forward(x, mask))


class ReluAdded(Fused):
    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        return torch.relu(self.proj(self.merge(self.weigh(q, k, v, mask))))


class ReluOnProjections(Fused):
    def project(self, x):
        B, T, _ = x.shape
        qkv = F.relu(self.qkv(x)).reshape(B, T, 3, self.num_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)


class HeadsInAList(nn.Module):
    """mask: bool [B, 1, T, T], True = may attend."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_head = d_model // num_heads
        self.heads = [nn.Linear(d_model, 3 * self.d_head) for _ in range(num_heads)]
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        outs = []
        for head in self.heads:
            q, k, v = head(x).chunk(3, dim=-1)
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_head)
            if mask is not None:
                scores = scores.masked_fill(~mask[:, 0], float("-inf"))
            outs.append(scores.softmax(-1) @ v)
        return self.proj(torch.cat(outs, -1))


class NoInBiasUsed(Fused):
    def project(self, x):
        B, T, _ = x.shape
        qkv = F.linear(x, self.qkv.weight).reshape(B, T, 3, self.num_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)


class NoOutBiasUsed(Fused):
    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        return F.linear(self.merge(self.weigh(q, k, v, mask)), self.proj.weight)


class NoQBias(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.k_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))

    def project(self, x):
        B, T, _ = x.shape
        bias = torch.cat([torch.zeros_like(self.k_bias), self.k_bias, self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias).reshape(B, T, 3, self.num_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)


class NoVBias(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.k_bias = nn.Parameter(torch.zeros(dim))

    def project(self, x):
        B, T, _ = x.shape
        bias = torch.cat([self.q_bias, self.k_bias, torch.zeros_like(self.q_bias)])
        qkv = F.linear(x, self.qkv.weight, bias).reshape(B, T, 3, self.num_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)


class NoKeyBias(Fused):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))

    def project(self, x):
        B, T, _ = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias).reshape(B, T, 3, self.num_heads, self.head_dim)
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)


class InputModified(Fused):
    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        return x.copy_(self.proj(self.merge(self.weigh(q, k, v, mask))))


# Rows in which every key is hidden


class EmptyRowUniform(Fused):
    def weigh(self, q, k, v, mask):
        attn = (q @ k.transpose(-2, -1)) * self.scale
        if mask is not None:
            attn = attn.masked_fill(~mask, torch.finfo(attn.dtype).min)
        return attn.softmax(dim=-1) @ v


class EmptyRowZero(Fused):
    def weigh(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


SELF_ONLY = "q, k and v come from one x: the same function"

NOT_POSSIBLE = {
    "rotation with mixed pairs": "a complex number holds both channels of a pair",
    "keys and values swapped": SELF_ONLY,
    "queries and keys swapped": SELF_ONLY,
    "value from key": SELF_ONLY,
    "self-attention only": SELF_ONLY,
    "causal bottom-right": "T = S always: both corners are the same",
}

FAULTS = [
    ("scale by d_model", ScaleByDModel, "dim ** -0.5 where (dim // heads) ** -0.5 is meant"),
    ("no scale", NoScale, "the product goes straight into softmax"),
    ("scale by d_k", ScaleByDk, "the root is forgotten"),
    ("multiply by sqrt d_k", MultiplyBySqrtDk, "the exponent's sign, in __init__"),
    ("constant scale", ConstantScale, "0.125, copied from a model with D = 64"),
    ("scale by sqrt H", ScaleBySqrtH, "num_heads for head_dim, in __init__"),
    ("scale by sqrt T", ScaleBySqrtT, "shape[2] is the number of keys"),
    ("scale after softmax", ScaleAfterSoftmax, "weights, not scores, are scaled"),
    ("scaled twice", ScaledTwice, "q first, then the scores; the numbers of scale by d_k"),
    ("split by view", SplitByView, "reshape(B, H, T, D) cuts across positions"),
    ("merge without transpose", MergeWithoutTranspose, "[B, H, T, D] viewed as [B, T, E]"),
    ("merge with wrong transpose", MergeWithWrongTranspose, "transpose(2, 3) then reshape"),
    ("merge interleaved", MergeInterleaved, "[B, T, D, H]: the features of the heads alternate"),
    ("view after transpose", ViewAfterTranspose, "raises RuntimeError: no contiguous()"),
    ("attention across heads", AttentionAcrossHeads, "the permute leaves heads behind time"),
    ("heads interleaved", HeadsInterleaved, "[3, D, H]: head h takes every H-th feature"),
    ("heads reversed", HeadsReversed, "flip(1) before merging"),
    ("same head for all", SameHeadForAll, "every head mixes the values of the first"),
    ("padding becomes NaN", PaddingBecomesNaN, "the padding mask hides rows as well as columns"),
    ("mask makes NaN", MaskMakesNaN, "False * -inf is NaN"),
    ("weights scaled after softmax", WeightsScaled, "a mean over the keys after the softmax"),
    *rotary.FUSED,
    ("first head for all", FirstHeadForAll, "the weights of head 0 weigh every head's values"),
    ("single head", SingleHead, "never split, divided by sqrt(E / H)"),
    ("single head with its own scale", SingleHeadOwnScale, "never split, divided by sqrt(E)"),
    ("hard-coded heads", HardCodedHeads, "8 heads whatever was asked for"),
    ("softmax over queries", SoftmaxOverQueries, "dim=-2"),
    ("softmax over heads", SoftmaxOverHeads, "dim 1"),
    ("softmax without a dim", SoftmaxWithoutDim, "torch warns and takes dim 1, the heads"),
    ("softmax over batch", SoftmaxOverBatch, "dim 0"),
    ("softmax over heads and keys", SoftmaxOverHeadsAndKeys, "the heads of one query share a sum of 1"),
    ("softmax over the whole map", SoftmaxOverTheWholeMap, "all queries and keys of a head share a sum of 1"),
    ("softmax twice", SoftmaxTwice, "applied to the weights again"),
    ("sigmoid", Sigmoid, "each key by itself"),
    ("exp without sum", ExpWithoutSum, "not normalised"),
    ("log softmax", LogSoftmax, "logarithms used as weights"),
    ("no softmax", NoSoftmax, "scores used as weights"),
    ("divide by sum", DivideBySum, "scores divided by their sum, no exp"),
    ("causal mask forgotten", CausalMaskForgotten, "a buffer causal_mask that forward never reads"),
    ("causal hides itself", CausalHidesItself, "tril(-1): row 0 is nan"),
    ("causal shows the next", CausalShowsTheNext, "tril(1)"),
    ("causal flipped", CausalFlipped, "triu where tril is meant"),
    ("causal inverted", CausalInverted, "torch's function reads True as: may attend"),
    ("mask ignored", MaskIgnored, "not handed on to torch's function"),
    ("mask inverted", MaskInverted, "hides where the mask is True"),
    ("mask added", MaskAdded, "a boolean added to the scores"),
    ("mask after softmax", MaskAfterSoftmax, "weights times mask: rows no longer sum to 1"),
    ("fill with zero", FillWithZero, "score 0 is a score like any other"),
    ("fill with almost zero", FillWithAlmostZero, "-1e-9 for -1e9; the numbers of fill with zero"),
    ("scores times mask", ScoresTimesMask, "the numbers of fill with zero"),
    ("fill too small", FillTooSmall, "-1e4 leaks where scores are large"),
    ("overflow in half", OverflowInHalf, "-1e20 does not fit float16: raises there, right elsewhere"),
    ("mask on queries", MaskOnQueries, "a [B, T] mask laid along the queries"),
    ("mask repeated in wrong order", MaskRepeatedInWrongOrder, "cat([mask] * H), not repeat_interleave"),
    ("first sample's mask for all", FirstSamplesMaskForAll, "mask[:1] broadcasts"),
    ("padding mask broadcast", PaddingMaskBroadcast, "[B, T] against [B, H, T, T]: raises unless B = T or 1"),
    ("mask plus 1e9", MaskPlus1e9, "the sign is lost"),
    ("mask on first head only", MaskOnFirstHeadOnly, "the other heads see everything"),
    ("mask modified", MaskModified, "right at first; the caller's mask is flipped in place"),
    ("no output projection", NoOutputProjection, "there is no second layer at all"),
    ("heads averaged", HeadsAveraged, "mean over heads, then [E, D]"),
    ("heads summed", HeadsSummed, "sum over heads, then [E, D]"),
    ("same projection for every head", SameProjectionForEveryHead, "split first, then one [3 D, D] layer"),
    ("shared projection", SharedProjection, "one [E, E] layer is q, k and v"),
    ("keys through w_q", KeysThroughWq, "qkv[0] twice"),
    ("values through w_k", ValuesThroughWk, "qkv[1] twice"),
    ("no q and k projection", NoQAndKProjection, "x itself is split; two thirds of the layer are unused"),
    ("no v projection", NoVProjection, "the layer is [2 E, E]; x itself is weighed"),
    ("fused order k q v", FusedOrderKqv, "wrong for weights carried over; equal with weights of its own"),
    ("fused order v k q", FusedOrderVkq, "wrong for weights carried over; equal with weights of its own"),
    ("weight not transposed", WeightNotTransposed, "x @ the thirds of an nn.Linear's weight"),
    ("output projection twice", OutputProjectionTwice, "proj in merge and again in forward"),
    ("weights transposed before v", WeightsTransposedBeforeV, "i and j mixed up in the einsum"),
    ("wrong layout", WrongLayout, "permuted so that it attends over the samples"),
    ("dropout in eval", DropoutInEval, "dropout_p handed over in eval too"),
    ("residual added", ResidualAdded, "x + output"),
    ("layer norm added", LayerNormAdded, "of the output"),
    ("layer norm before", LayerNormBefore, "of x"),
    ("residual and layer norm", ResidualAndLayerNorm, "norm(x + output)"),
    ("relu added", ReluAdded, "of the output"),
    ("relu on projections", ReluOnProjections, "of q, k and v"),
    ("heads in a list", HeadsInAList, "right numbers; the layers of the list are no parameters"),
    ("no in bias used", NoInBiasUsed, "the bias exists and is never added"),
    ("no out bias used", NoOutBiasUsed, "the bias exists and is never added"),
    ("no q bias", NoQBias, "k_bias and v_bias exist"),
    ("no v bias", NoVBias, "q_bias and k_bias exist"),
    ("no key bias", NoKeyBias, "equal: softmax does not see it"),
    ("input modified", InputModified, "right numbers, written over x"),
    ("empty row uniform", EmptyRowUniform, "no fault by itself: a row with no key takes the mean of all"),
    ("empty row zero", EmptyRowZero, "no fault by itself: a row with no key gives zeros"),
    ("empty row nan", Fused, "no fault by itself: a row with no key gives nan"),
]
