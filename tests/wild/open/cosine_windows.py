"""Attention within square windows of a picture: cosines of queries and keys, a bias for each step between pixels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class WindowCosineAttention(nn.Module):
    """x: [windows, pixels of a window, width]."""

    def __init__(self, width: int, window_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.log_scale = nn.Parameter(torch.full((num_heads, 1, 1), 2.0))
        self.to_qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.steps = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, num_heads, bias=False))
        places = torch.cartesian_prod(torch.arange(window_size), torch.arange(window_size))
        apart = places[:, None] - places[None, :]
        self.register_buffer("apart", apart.to(torch.get_default_dtype()) / window_size, persistent=False)
        side = 2 * window_size - 1
        index = (apart[..., 0] + window_size - 1) * side + apart[..., 1] + window_size - 1
        self.register_buffer("index", index, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        cosines = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        bias = 8 * torch.sigmoid(self.steps(self.apart)).view(x.shape[1], x.shape[1], self.num_heads)
        scores = cosines * self.log_scale.clamp(max=4.6).exp() + bias.permute(2, 0, 1)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
