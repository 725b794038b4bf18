import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads, d_k, d_v):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_k
        self.d_v = d_v
        self.W_q = nn.Linear(d_model, num_heads * d_k)
        self.W_k = nn.Linear(d_model, num_heads * d_k)
        self.W_v = nn.Linear(d_model, num_heads * d_v)
        self.W_o = nn.Linear(num_heads * d_v, d_model)

    def split(self, x):
        B, T, E = x.shape
        return x.view(B, T, self.num_heads, -1).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out = weights @ v
        B, H, T, D = out.shape
        return self.W_o(out.transpose(1, 2).reshape(B, T, H * D))
