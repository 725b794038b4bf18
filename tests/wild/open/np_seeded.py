"""Attention in NumPy whose weights are drawn from a generator that is handed in."""

import numpy as np


class SeededAttention:
    """Inputs are [batch, tokens, width], all of one length."""

    def __init__(self, width, num_heads, rng):
        self.num_heads = num_heads
        self.w_q = rng.randn(width, width)
        self.w_k = rng.randn(width, width)
        self.w_v = rng.randn(width, width)
        self.w_out = rng.randn(width, width)

    def __call__(self, q, k, v):
        batch, tokens, width = q.shape
        q, k, v = (
            (x @ w).reshape(batch, tokens, self.num_heads, -1).transpose(0, 2, 1, 3)
            for x, w in ((q, self.w_q), (k, self.w_k), (v, self.w_v))
        )
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(width // self.num_heads)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ v
        return mixed.transpose(0, 2, 1, 3).reshape(batch, tokens, width) @ self.w_out
