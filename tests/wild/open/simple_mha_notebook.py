import torch
import torch.nn as nn
import torch.nn.functional as F


def attention(q, k, v, mask=None):
    d_k = q.size(-1)
    scores = torch.matmul(q, k.transpose(-2, -1)) / d_k ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    weights = F.softmax(scores, dim=-1)
    return torch.matmul(weights, v), weights


class MultiHeadAttention(nn.Module):
    """Splits the embedding in `num_heads` parts, attends in each of them, and mixes
    the results with a linear layer."""

    def __init__(self, embed_dim, num_heads, dropout=0.1):
        super().__init__()
        assert embed_dim % num_heads == 0, "embed_dim must be divisible by num_heads"
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.fc_out = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        batch, length, _ = x.shape
        return x.view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, query, key, value, mask=None):
        batch = query.shape[0]
        q = self.split(query)
        k = self.split(key)
        v = self.split(value)
        out, _ = attention(q, k, v, mask)
        out = out.transpose(1, 2).contiguous().view(batch, -1, self.embed_dim)
        return self.dropout(self.fc_out(out))


if __name__ == "__main__":
    m = MultiHeadAttention(32, 4)
    x = torch.rand(2, 7, 32)
    print(m(x, x, x).shape)
