import math
import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    """Labml style: inputs are [seq_len, batch_size, d_model].

    mask has shape [seq_len_q, seq_len_k, batch_size] and mask[i, j, b] says whether
    for batch b query i may see key j.
    """

    def __init__(self, heads, d_model, dropout_prob=0.1, bias=True):
        super().__init__()
        self.d_k = d_model // heads
        self.heads = heads
        self.query = nn.Linear(d_model, d_model, bias=bias)
        self.key = nn.Linear(d_model, d_model, bias=bias)
        self.value = nn.Linear(d_model, d_model, bias=True)
        self.softmax = nn.Softmax(dim=1)
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout_prob)
        self.scale = 1 / math.sqrt(self.d_k)

    def heads_of(self, layer, x):
        return layer(x).view(*x.shape[:-1], self.heads, self.d_k)

    def forward(self, *, query, key, value, mask=None):
        seq_len, batch_size, _ = query.shape
        if mask is not None:
            mask = mask.unsqueeze(-1)
        query = self.heads_of(self.query, query)
        key = self.heads_of(self.key, key)
        value = self.heads_of(self.value, value)
        scores = torch.einsum("ibhd,jbhd->ijbh", query, key) * self.scale
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        attn = self.dropout(self.softmax(scores))
        x = torch.einsum("ijbh,jbhd->ibhd", attn, value)
        return self.output(x.reshape(seq_len, batch_size, -1))
