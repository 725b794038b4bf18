import torch
from torch import Tensor, nn
from typing import Optional, Tuple


class SpeechSelfAttention(nn.Module):
    """Self-attention over frames. Frames beyond ``num_frames[b]`` are padding and get no weight."""

    def __init__(self, feature_dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads: int = heads
        self.head_dim: int = feature_dim // heads
        assert self.head_dim * heads == feature_dim

        self.layer_norm = nn.LayerNorm(feature_dim)
        self.linear_q = nn.Linear(feature_dim, feature_dim)
        self.linear_k = nn.Linear(feature_dim, feature_dim, bias=False)  # a key bias cancels in the softmax
        self.linear_v = nn.Linear(feature_dim, feature_dim)
        self.linear_out = nn.Linear(feature_dim, feature_dim)
        self.dropout = nn.Dropout(dropout)
        self._pad_bias: Optional[Tensor] = None

    def _bias(self, num_frames: Tensor, t: int, dtype: torch.dtype) -> Tensor:
        # building it is slow on long utterances, so it is made once per length
        if self._pad_bias is None or self._pad_bias.size(-1) != t:
            frame = torch.arange(t, device=num_frames.device)
            pad = frame.unsqueeze(0) >= num_frames.unsqueeze(1)
            bias = torch.zeros(pad.shape, dtype=dtype, device=pad.device)
            self._pad_bias = bias.masked_fill_(pad, torch.finfo(dtype).min)[:, None, None, :]
        return self._pad_bias

    def _shape(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, self.head_dim)).movedim(-2, -3)

    def forward(self, frames: Tensor, num_frames: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        x = self.layer_norm(frames)
        q = self._shape(self.linear_q(x)) * self.head_dim ** -0.5
        k = self._shape(self.linear_k(x))
        v = self._shape(self.linear_v(x))

        logits = torch.matmul(q, k.transpose(-1, -2))
        if num_frames is not None:
            logits = logits + self._bias(num_frames, frames.size(1), logits.dtype)
        weights = torch.softmax(logits, dim=-1)
        mixed = torch.matmul(self.dropout(weights), v).movedim(-3, -2).flatten(-2)
        return frames + self.dropout(self.linear_out(mixed)), weights
