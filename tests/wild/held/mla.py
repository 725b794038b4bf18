# Multi-head latent attention (DeepSeek-V2, section 2.1), training path, no absorb trick, no cache.
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class MLAConfig:
    hidden_size: int = 64
    num_heads: int = 4
    q_lora_rank: int = 24
    kv_lora_rank: int = 16
    nope_dim: int = 16
    rope_dim: int = 8
    v_dim: int = 16
    theta: float = 10000.0


class RMSNorm(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.g = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g


def rope(x, theta):
    """x: (B, T, H, R); rotates the two halves (GPT-NeoX order)."""
    T, R = x.shape[1], x.shape[-1]
    inv = theta ** (-torch.arange(0, R, 2, device=x.device, dtype=torch.float32) / R)
    ang = torch.arange(T, device=x.device, dtype=torch.float32)[:, None] * inv[None]
    cos, sin = ang.cos()[None, :, None], ang.sin()[None, :, None]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).type_as(x)


class LatentAttention(nn.Module):

    def __init__(self, cfg: MLAConfig):
        super().__init__()
        self.cfg = cfg
        H, qk = cfg.num_heads, cfg.nope_dim + cfg.rope_dim
        self.q_down = nn.Linear(cfg.hidden_size, cfg.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(cfg.q_lora_rank)
        self.q_up = nn.Linear(cfg.q_lora_rank, H * qk, bias=False)
        self.kv_down = nn.Linear(cfg.hidden_size, cfg.kv_lora_rank + cfg.rope_dim, bias=False)
        self.kv_norm = RMSNorm(cfg.kv_lora_rank)
        self.kv_up = nn.Linear(cfg.kv_lora_rank, H * (cfg.nope_dim + cfg.v_dim), bias=False)
        self.o = nn.Linear(H * cfg.v_dim, cfg.hidden_size, bias=False)
        self.scale = qk ** -0.5

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        c = self.cfg
        B, T, _ = h.shape
        q = self.q_up(self.q_norm(self.q_down(h))).view(B, T, c.num_heads, -1)
        q_c, q_r = q.split([c.nope_dim, c.rope_dim], dim=-1)

        lat, k_r = self.kv_down(h).split([c.kv_lora_rank, c.rope_dim], dim=-1)
        kv = self.kv_up(self.kv_norm(lat)).view(B, T, c.num_heads, -1)
        k_c, v = kv.split([c.nope_dim, c.v_dim], dim=-1)

        q_r = rope(q_r, c.theta)
        k_r = rope(k_r.unsqueeze(2), c.theta)             # one rotary key for all heads

        logits = torch.einsum("bthd,bshd->bhts", q_c, k_c)
        logits = logits + torch.einsum("bthr,bsr->bhts", q_r, k_r.squeeze(2))
        future = torch.ones(T, T, dtype=torch.bool, device=h.device).triu(1)
        logits = (logits * self.scale).masked_fill(future, float("-inf"))
        p = F.softmax(logits, dim=-1, dtype=torch.float32).to(v.dtype)
        out = torch.einsum("bhts,bshd->bthd", p, v)
        return self.o(out.flatten(2))
