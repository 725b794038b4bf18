import torch
from torch import nn


class CrossModalAttention(nn.Module):
    """Text attends to image features."""

    def __init__(self, text_dim, image_dim, hidden, heads):
        super().__init__()
        self.h = heads
        self.hd = hidden // heads
        self.q = nn.Linear(text_dim, hidden)
        self.kv = nn.Linear(image_dim, 2 * hidden)
        self.proj = nn.Linear(hidden, text_dim)
        self.scale = self.hd ** -0.5

    def forward(self, text, image):
        b, n, _ = text.shape
        q = self.q(text).reshape(b, n, self.h, self.hd).transpose(1, 2)
        k, v = self.kv(image).chunk(2, dim=-1)
        k = k.reshape(b, -1, self.h, self.hd).transpose(1, 2)
        v = v.reshape(b, -1, self.h, self.hd).transpose(1, 2)
        att = (q * self.scale) @ k.transpose(-1, -2)
        att = att.softmax(dim=-1)
        return self.proj((att @ v).transpose(1, 2).reshape(b, n, -1))
