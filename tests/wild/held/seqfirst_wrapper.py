from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class AttentionSpec:
    model_dim: int = 64
    n_heads: int = 4
    kv_dim: int | None = None
    dropout: float = 0.0
    causal: bool = False


class AttentionResult(NamedTuple):
    out: Tensor
    weights: Tensor | None


class Attention(nn.Module):
    """Thin layer over :class:`torch.nn.MultiheadAttention`.

    Our code base works batch-first and says which tokens are *valid*; torch's class (in the version that
    we pin) works time-first and says which are to be *ignored*.  This is the only place that knows both.
    """

    def __init__(self, spec: AttentionSpec = AttentionSpec()):
        super().__init__()
        self.spec = spec
        kv = spec.kv_dim or spec.model_dim
        self._mha = nn.MultiheadAttention(
            spec.model_dim, spec.n_heads, dropout=spec.dropout, kdim=kv, vdim=kv, batch_first=False
        )

    @staticmethod
    def _future(n_q: int, n_k: int, device) -> Tensor:
        # the last query sees every key
        i = torch.arange(n_q, device=device)[:, None] + (n_k - n_q)
        return torch.arange(n_k, device=device)[None, :] > i

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        valid: Tensor | None = None,
        need_weights: bool = False,
    ) -> AttentionResult:
        context = x if context is None else context
        q, kv = x.transpose(0, 1), context.transpose(0, 1)
        out, weights = self._mha(
            q,
            kv,
            kv,
            key_padding_mask=None if valid is None else ~valid.bool(),
            attn_mask=self._future(q.size(0), kv.size(0), x.device) if self.spec.causal else None,
            need_weights=need_weights,
            average_attn_weights=False,
        )
        return AttentionResult(out.transpose(0, 1), weights)
