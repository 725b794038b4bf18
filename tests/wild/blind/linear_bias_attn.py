import math
import torch
import torch.nn as nn


def get_slopes(n_heads: int) -> torch.Tensor:
    """Head slopes of "Train Short, Test Long": a geometric sequence starting at 2^(-8/n)."""
    def pow2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(n_heads).is_integer():
        return torch.tensor(pow2(n_heads))
    closest = 2 ** math.floor(math.log2(n_heads))
    extra = pow2(2 * closest)[0::2][: n_heads - closest]
    return torch.tensor(pow2(closest) + extra)


class ALiBiMultiHeadAttention(nn.Module):
    """Causal self-attention with linear biases, no positional embedding needed."""

    def __init__(self, d_model: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.scale = math.sqrt(d_model // num_heads)
        self.kqv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("m", get_slopes(num_heads)[:, None, None])

    @staticmethod
    def relative_positions(seq_len: int, device=None) -> torch.Tensor:
        x = torch.arange(seq_len, device=device)[None, :]
        y = torch.arange(seq_len, device=device)[:, None]
        return x - y  # <= 0 for the past

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch_size, seq_len, d_model = x.shape
        key, query, value = self.kqv(x).chunk(3, dim=-1)
        key = key.view(batch_size, seq_len, self.num_heads, -1).permute(0, 2, 3, 1)
        query = query.view(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)
        value = value.view(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)

        bias = (self.m * self.relative_positions(seq_len, x.device)).unsqueeze(0)
        score = torch.matmul(query, key) / self.scale + bias

        future = torch.ones(seq_len, seq_len, device=x.device).tril() == 0
        score = score.masked_fill(future, float("-inf"))
        attn = torch.softmax(score, dim=-1)
        out = torch.matmul(attn, value).transpose(1, 2).reshape(batch_size, seq_len, -1)
        return self.dropout(self.out(out))
