"""
CS homework 3, problem 2: implement multi-head attention.
"""
import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, emb_dim, num_heads):
        super().__init__()
        self.emb_dim = emb_dim
        self.num_heads = num_heads
        self.head_dim = emb_dim // num_heads

        self.q_linear = nn.Linear(emb_dim, emb_dim)
        self.k_linear = nn.Linear(emb_dim, emb_dim)
        self.v_linear = nn.Linear(emb_dim, emb_dim)
        self.out_linear = nn.Linear(emb_dim, emb_dim)

    def forward(self, x, mask=None):
        """
        Inputs:
          x: (batch_size, seq_len, emb_dim)
          mask: (batch_size, seq_len), 1 for tokens, 0 for padding
        Returns:
          (batch_size, seq_len, emb_dim)
        """
        batch_size, seq_len, _ = x.shape

        # TODO(student): project and split into heads
        Q = self.q_linear(x).view(batch_size, self.num_heads, seq_len, self.head_dim)
        K = self.k_linear(x).view(batch_size, self.num_heads, seq_len, self.head_dim)
        V = self.v_linear(x).view(batch_size, self.num_heads, seq_len, self.head_dim)

        # TODO(student): scaled dot product
        energy = torch.einsum("bhqd,bhkd->bhqk", Q, K) / self.head_dim ** 0.5
        if mask is not None:
            energy = energy.masked_fill(mask[:, None, None, :] == 0, float("-1e20"))
        attention = torch.softmax(energy, dim=-1)

        # TODO(student): combine heads
        out = torch.einsum("bhqk,bhkd->bhqd", attention, V)
        out = out.reshape(batch_size, seq_len, self.emb_dim)
        return self.out_linear(out)
