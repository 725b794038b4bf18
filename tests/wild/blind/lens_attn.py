import torch as t
import torch.nn as nn
from dataclasses import dataclass
from torch import Tensor


@dataclass
class Config:
    d_model: int = 32
    n_heads: int = 4
    d_head: int = 8
    n_ctx: int = 64
    init_range: float = 0.02


class Attention(nn.Module):
    """Attention with one weight tensor per role, head index in front:
    W_Q, W_K, W_V are [n_heads, d_model, d_head], W_O is [n_heads, d_head, d_model]."""

    IGNORE: Tensor

    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.W_Q = nn.Parameter(t.empty((cfg.n_heads, cfg.d_model, cfg.d_head)))
        self.W_K = nn.Parameter(t.empty((cfg.n_heads, cfg.d_model, cfg.d_head)))
        self.W_V = nn.Parameter(t.empty((cfg.n_heads, cfg.d_model, cfg.d_head)))
        self.W_O = nn.Parameter(t.empty((cfg.n_heads, cfg.d_head, cfg.d_model)))
        self.b_Q = nn.Parameter(t.zeros((cfg.n_heads, cfg.d_head)))
        self.b_K = nn.Parameter(t.zeros((cfg.n_heads, cfg.d_head)))
        self.b_V = nn.Parameter(t.zeros((cfg.n_heads, cfg.d_head)))
        self.b_O = nn.Parameter(t.zeros((cfg.d_model)))
        for w in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(w, std=cfg.init_range)
        self.register_buffer("IGNORE", t.tensor(float("-inf"), dtype=t.float32))

    def forward(self, normalized_resid_pre: Tensor) -> Tensor:
        q = t.einsum("bpm,nmh->bpnh", normalized_resid_pre, self.W_Q) + self.b_Q
        k = t.einsum("bpm,nmh->bpnh", normalized_resid_pre, self.W_K) + self.b_K
        v = t.einsum("bpm,nmh->bpnh", normalized_resid_pre, self.W_V) + self.b_V

        attn_scores = t.einsum("bqnh,bknh->bnqk", q, k)
        attn_scores_masked = self.apply_causal_mask(attn_scores / self.cfg.d_head**0.5)
        attn_pattern = attn_scores_masked.softmax(-1)

        z = t.einsum("bknh,bnqk->bqnh", v, attn_pattern)
        return t.einsum("bqnh,nhm->bqm", z, self.W_O) + self.b_O

    def apply_causal_mask(self, attn_scores: Tensor) -> Tensor:
        all_ones = t.ones(attn_scores.size(-2), attn_scores.size(-1), device=attn_scores.device)
        mask = t.triu(all_ones, diagonal=1).bool()
        return attn_scores.masked_fill(mask, self.IGNORE)
