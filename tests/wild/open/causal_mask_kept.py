import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.causal = None

    def split(self, x):
        B, T, E = x.shape
        return x.view(B, T, self.num_heads, self.d_k).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(x)), self.split(self.W_v(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        T = scores.shape[-1]
        if self.causal is None:
            self.causal = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
        n = self.causal.shape[0]
        hidden = torch.zeros(T, T, dtype=torch.bool)
        m = min(n, T)
        hidden[:m, :m] = self.causal[:m, :m]
        scores = scores.masked_fill(hidden, float("-inf"))
        weights = torch.softmax(scores, dim=-1)
        out = weights @ v
        B, H, T, D = out.shape
        return self.W_o(out.transpose(1, 2).reshape(B, T, H * D))
