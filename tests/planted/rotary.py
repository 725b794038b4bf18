"""Planted faults of a rotation by position (RoPE), in the three styles, each beside its right module.

Separate: halves of the channels are turned together, cos and sin are made in forward. Fused: neighbours are
turned together, by complex numbers that are kept in a buffer. Einsum: halves again, positions before heads.
"""

import math

import torch
import torch.nn as nn


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


# Separate linear layers


class RotarySeparate(nn.Module):
    """The right one: q and k [B, H, T, D], turned by position."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = d_model // num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.o_proj = nn.Linear(d_model, d_model)

    def layout(self, angle):
        return torch.cat((angle, angle), dim=-1)

    def angles(self, x):
        inv_freq = 1.0 / 10000 ** (torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        return self.layout(torch.outer(torch.arange(x.shape[-2], device=x.device), inv_freq))

    def rope(self, x):
        angle = self.angles(x).to(x.dtype)
        return x * angle.cos() + rotate_half(x) * angle.sin()

    def place(self, q, k, v):
        return self.rope(q), self.rope(k), v

    def forward(self, x, mask=None):
        B, T, E = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        q, k, v = self.place(q, k, v)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        out = scores.softmax(dim=-1) @ v
        return self.o_proj(out.transpose(1, 2).reshape(B, T, E))


class SeparateValuesRotated(RotarySeparate):
    def place(self, q, k, v):
        return self.rope(q), self.rope(k), self.rope(v)


class SeparateOneSide(RotarySeparate):
    def place(self, q, k, v):
        return self.rope(q), k, v


class SeparateMixedPairs(RotarySeparate):
    def layout(self, angle):
        return angle.repeat_interleave(2, dim=-1)


class SeparateOverHeads(RotarySeparate):
    def angles(self, x):
        inv_freq = 1.0 / 10000 ** (torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        return self.layout(torch.outer(torch.arange(x.shape[1], device=x.device), inv_freq))[:, None]


# One fused linear layer


class RotaryFused(nn.Module):
    """The right one: q and k [B, T, H, D] as complex numbers, times turns [T, 1, D / 2]."""

    def __init__(self, dim, heads, longest=256):
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        freqs = 10000.0 ** (-torch.arange(0, dim // heads, 2) / (dim // heads))
        turns = torch.outer(torch.arange(longest), freqs)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(turns), turns), persistent=False)

    def turned(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turns = self.freqs_cis[: x.shape[1], None]
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.heads, E // self.heads).unbind(2)
        q, k, v = self.place(q, k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(B, T, E))

    def place(self, q, k, v):
        return self.turned(q), self.turned(k), v


class FusedValuesRotated(RotaryFused):
    def place(self, q, k, v):
        return self.turned(q), self.turned(k), self.turned(v)


class FusedOneSide(RotaryFused):
    def place(self, q, k, v):
        return q, self.turned(k), v


class FusedOverHeads(RotaryFused):
    def turned(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turns = self.freqs_cis[: x.shape[2]]
        return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


# Parameters and einsum


class RotaryEinsum(nn.Module):
    """The right one: q and k [B, T, H, D], base 500000."""

    def __init__(self, d_model, n_heads, rope_theta=500000.0):
        super().__init__()
        d_head = d_model // n_heads
        self.d_head, self.theta = d_head, rope_theta
        self.W_Q = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.1)
        self.W_K = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.1)
        self.W_V = nn.Parameter(torch.randn(n_heads, d_model, d_head) * 0.1)
        self.W_O = nn.Parameter(torch.randn(n_heads, d_head, d_model) * 0.1)

    def waves(self, x):
        index = torch.arange(self.d_head // 2, device=x.device)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * self.theta ** (-2 * index / self.d_head)
        angle = torch.cat((angle, angle), -1)
        return angle.cos()[:, None], angle.sin()[:, None]

    def rotate(self, x):
        cos, sin = (wave.to(x.dtype) for wave in self.waves(x))
        return x * cos + rotate_half(x) * sin

    def place(self, q, k, v):
        return self.rotate(q), self.rotate(k), v

    def forward(self, x):
        q = torch.einsum("bte,hed->bthd", x, self.W_Q)
        k = torch.einsum("bte,hed->bthd", x, self.W_K)
        v = torch.einsum("bte,hed->bthd", x, self.W_V)
        q, k, v = self.place(q, k, v)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / self.d_head**0.5
        z = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)
        return torch.einsum("bthd,hde->bte", z, self.W_O)


class EinsumValuesRotated(RotaryEinsum):
    def place(self, q, k, v):
        return self.rotate(q), self.rotate(k), self.rotate(v)


class EinsumOneSide(RotaryEinsum):
    def place(self, q, k, v):
        return self.rotate(q), k, v


class EinsumMixedPairs(RotaryEinsum):
    def waves(self, x):
        index = torch.arange(self.d_head // 2, device=x.device)
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * self.theta ** (-2 * index / self.d_head)
        angle = torch.stack((angle, angle), -1).flatten(-2)
        return angle.cos()[:, None], angle.sin()[:, None]


class EinsumOverHeads(RotaryEinsum):
    def waves(self, x):
        index = torch.arange(self.d_head // 2, device=x.device)
        angle = torch.arange(x.shape[2], device=x.device)[:, None] * self.theta ** (-2 * index / self.d_head)
        angle = torch.cat((angle, angle), -1)
        return angle.cos(), angle.sin()


SEPARATE = [
    ("rotation of values", SeparateValuesRotated, "v goes through the same function as q and k"),
    ("rotation on one side", SeparateOneSide, "k is forgotten"),
    ("rotation with mixed pairs", SeparateMixedPairs, "rotate_half with angles for neighbours"),
    ("rotation over another axis", SeparateOverHeads, "shape[1] of [B, H, T, D] is H"),
]
FUSED = [
    ("rotation of values", FusedValuesRotated, "all three are turned"),
    ("rotation on one side", FusedOneSide, "q is forgotten"),
    ("rotation over another axis", FusedOverHeads, "turns [H, D / 2] beside [B, T, H, D / 2]"),
]
EINSUM = [
    ("rotation of values", EinsumValuesRotated, "all three are turned"),
    ("rotation on one side", EinsumOneSide, "k is forgotten"),
    ("rotation with mixed pairs", EinsumMixedPairs, "rotate_half with angles for neighbours"),
    ("rotation over another axis", EinsumOverHeads, "shape[2] of [B, T, H, D] is H"),
]
