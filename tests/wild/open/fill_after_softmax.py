"""Cross-attention of a captioning model: the regions of a picture are hidden where there are none."""

import torch
from torch import Tensor, nn


class RegionAttention(nn.Module):
    """mask: bool [batch, words, regions], True where a region may be seen."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.q_layer = nn.Linear(width, num_heads * width)
        self.k_layer = nn.Linear(width, num_heads * width)
        self.v_layer = nn.Linear(width, num_heads * width)
        self.out_layer = nn.Linear(num_heads * width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.q_layer(q)), self.split(self.k_layer(k)), self.split(self.v_layer(v))
        shares = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
        if mask is not None:
            shares = shares.masked_fill(~mask[:, None], -torch.inf)
        mixed = (shares @ v).transpose(1, 2).flatten(2)
        return self.out_layer(mixed)
