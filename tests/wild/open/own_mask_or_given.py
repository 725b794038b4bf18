"""A mask that is given takes the place of the causal one: whoever gives it says all of it."""

import torch.nn.functional as F
from torch import Tensor, nn


class ChunkAttention(nn.Module):
    """Attention of a decoder; causal unless `mask`, bool [batch, 1, length, length], says who sees whom."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.to_qkv(x).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))
