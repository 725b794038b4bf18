import torch
from torch import nn, Tensor
from typing import Optional


class DecoderSelfAttention(nn.Module):
    """Self-attention of the decoder.

    Args:
        model_dim: size of the token vectors
        num_heads: number of heads
        causal: whether a position is kept from looking at later positions
    """

    def __init__(self, model_dim: int, num_heads: int, causal: bool = True, dropout: float = 0.0):
        super().__init__()
        if model_dim % num_heads != 0:
            raise ValueError("model_dim must be divisible by num_heads")
        self.num_heads = num_heads
        self.head_dim = model_dim // num_heads
        self.causal = causal
        self.in_proj = nn.Linear(model_dim, 3 * model_dim)
        self.out_proj = nn.Linear(model_dim, model_dim)
        self.dropout = nn.Dropout(dropout)

    def build_mask(self, length: int, padding_mask: Optional[Tensor], device) -> Optional[Tensor]:
        mask = None
        if self.causal:
            mask = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
            mask = mask[None, None]
        if padding_mask is not None:
            mask = padding_mask[:, None, None, :].bool()
        return mask

    def forward(self, x: Tensor, padding_mask: Optional[Tensor] = None) -> Tensor:
        """
        x: (batch, length, model_dim)
        padding_mask: (batch, length), True for padded tokens
        """
        batch, length, dim = x.shape
        qkv = self.in_proj(x).view(batch, length, 3, self.num_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(dim=2))
        scores = torch.matmul(q, k.transpose(-1, -2)) * self.head_dim ** -0.5
        mask = self.build_mask(length, padding_mask, x.device)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        weights = self.dropout(scores.softmax(dim=-1))
        out = torch.matmul(weights, v).transpose(1, 2).reshape(batch, length, dim)
        return self.out_proj(out)
