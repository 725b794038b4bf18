import torch
import torch.nn.functional as F
from torch import nn


class FastSelfAttention(nn.Module):
    """Ported to the fused kernel of torch 2. Separate q and kv projections,
    since we sometimes load the kv weights from another checkpoint."""

    def __init__(self, embed_dim: int, num_heads: int = 8, *, causal: bool = False, dropout: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.causal = causal
        self.dropout = dropout
        self.q = nn.Linear(embed_dim, embed_dim)
        self.kv = nn.Linear(embed_dim, 2 * embed_dim)
        self.o = nn.Linear(embed_dim, embed_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, s, e = x.shape
        q = self.q(x) * self.scaling
        k, v = self.kv(x).tensor_split(2, dim=-1)

        q = q.reshape(n, s, self.num_heads, self.head_dim).movedim(2, 1)
        k = k.reshape(n, s, self.num_heads, self.head_dim).movedim(2, 1)
        v = v.reshape(n, s, self.num_heads, self.head_dim).movedim(2, 1)

        out = F.scaled_dot_product_attention(
            q, k, v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        return self.o(out.movedim(1, 2).reshape(n, s, e))
