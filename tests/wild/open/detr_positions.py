import math

import torch
import torch.nn.functional as F
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split(self, x):
        B, T, _ = x.shape
        return x.view(B, T, self.num_heads, self.d_k).transpose(1, 2)

    def with_pos_embed(self, tensor, pos):
        return tensor if pos is None else tensor + pos

    def forward(self, hidden_states, position_embeddings):
        x = hidden_states
        v = self.split(self.W_v(x))
        T = x.shape[1]
        x0 = self.with_pos_embed(x, position_embeddings)
        q, k = self.split(self.W_q(x0)), self.split(self.W_k(x0))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        out = scores.softmax(-1) @ v
        return self.W_o(out.transpose(1, 2).flatten(2))
