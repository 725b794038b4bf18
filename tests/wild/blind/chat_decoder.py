from dataclasses import dataclass
from typing import Optional, Tuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

KV = Tuple[Tensor, Tensor]


@dataclass
class DecoderConfig:
    d_model: int = 64
    n_heads: int = 4
    attn_dropout: float = 0.0


class DecoderSelfAttention(nn.Module):
    """Causal self-attention with an optional key/value cache.

    Prefill with the whole prompt, then feed the new tokens along with the cache
    that the previous call returned.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        d = config.d_model
        self.Wqkv = nn.Linear(d, 3 * d, bias=False)
        self.Wo = nn.Linear(d, d, bias=False)

    def heads(self, t: Tensor) -> Tensor:
        return t.view(t.size(0), t.size(1), self.config.n_heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, kv_cache: Optional[KV] = None) -> Tuple[Tensor, KV]:
        q, k, v = (self.heads(t) for t in self.Wqkv(x).chunk(3, -1))
        if kv_cache is not None:
            k = torch.cat([kv_cache[0], k], dim=-2)
            v = torch.cat([kv_cache[1], v], dim=-2)
        p = self.config.attn_dropout if self.training else 0.0
        y = sdpa(q, k, v, is_causal=True, dropout_p=p)
        y = y.transpose(1, 2).flatten(2)
        return self.Wo(y), (k, v)
