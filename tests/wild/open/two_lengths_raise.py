"""Cross-attention of a translator that gives the keys as many rows as there are queries."""

import torch
from torch import Tensor, nn


class SourceAttention(nn.Module):
    """Words of the decoder look at the words of the encoder."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.w_q = nn.Linear(width, width)
        self.w_k = nn.Linear(width, width)
        self.w_v = nn.Linear(width, width)
        self.w_o = nn.Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, words, width = query.shape
        q = self.w_q(query).view(batch, words, self.num_heads, -1).transpose(1, 2)
        k = self.w_k(key).view(batch, words, self.num_heads, width // self.num_heads).transpose(1, 2)
        v = self.w_v(value).view(batch, words, self.num_heads, width // self.num_heads).transpose(1, 2)
        weights = torch.softmax(q @ k.mT * k.shape[-1] ** -0.5, dim=-1)
        return self.w_o((weights @ v).transpose(1, 2).reshape(batch, words, width))
