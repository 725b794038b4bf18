from __future__ import annotations

import torch
from torch import nn


class SelfAttention(nn.Module):
    """A thin layer over nn.MultiheadAttention so that the rest of our code can keep its
    convention for masks (True = real token) and get a single tensor back."""

    def __init__(self, model_dim: int, n_heads: int, p: float = 0.0, is_decoder: bool = False):
        super().__init__()
        self.is_decoder = is_decoder
        self.mha = nn.MultiheadAttention(model_dim, n_heads, dropout=p, batch_first=True)

    def forward(self, tokens: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
        padding = None if valid is None else ~valid.bool()
        causal = None
        if self.is_decoder:
            length = tokens.shape[1]
            causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        out, _ = self.mha(
            tokens, tokens, tokens,
            key_padding_mask=padding,
            attn_mask=causal,
            need_weights=False,
        )
        return out


class FeedForward(nn.Sequential):
    def __init__(self, model_dim: int, mult: int = 4):
        super().__init__(nn.Linear(model_dim, mult * model_dim), nn.ReLU(), nn.Linear(mult * model_dim, model_dim))
