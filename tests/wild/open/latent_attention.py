from dataclasses import dataclass
import math

import torch
import torch.nn as nn


@dataclass
class ModelArgs:
    dim: int = 256
    n_heads: int = 8
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_head_dim: int = 32
    v_head_dim: int = 32
    causal: bool = True
    norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    def __init__(self, n: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class MLA(nn.Module):
    """Multi-head latent attention (position-free part): keys and values are
    re-expanded from one small latent per token, which is all that a cache would hold."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.n_heads = args.n_heads
        self.qk_head_dim, self.v_head_dim = args.qk_head_dim, args.v_head_dim

        self.wq_a = nn.Linear(args.dim, args.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(args.q_lora_rank, args.norm_eps)
        self.wq_b = nn.Linear(args.q_lora_rank, args.n_heads * args.qk_head_dim, bias=False)

        self.wkv_a = nn.Linear(args.dim, args.kv_lora_rank, bias=False)
        self.kv_norm = RMSNorm(args.kv_lora_rank, args.norm_eps)
        self.wkv_b = nn.Linear(args.kv_lora_rank, args.n_heads * (args.qk_head_dim + args.v_head_dim), bias=False)

        self.wo = nn.Linear(args.n_heads * args.v_head_dim, args.dim, bias=False)
        self.softmax_scale = 1.0 / math.sqrt(args.qk_head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bsz, seqlen, _ = x.size()
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(bsz, seqlen, self.n_heads, self.qk_head_dim)
        kv = self.wkv_b(self.kv_norm(self.wkv_a(x)))
        kv = kv.view(bsz, seqlen, self.n_heads, self.qk_head_dim + self.v_head_dim)
        k, v = torch.split(kv, [self.qk_head_dim, self.v_head_dim], dim=-1)

        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        if self.args.causal:
            mask = torch.full((seqlen, seqlen), float("-inf"), device=x.device).triu_(1)
            scores = scores + mask.unsqueeze(1)          # (s, 1, t): heads sit between
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        out = torch.einsum("bsht,bthd->bshd", scores, v)
        return self.wo(out.flatten(2))
