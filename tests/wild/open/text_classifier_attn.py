import torch
import torch.nn as nn
import torch.nn.functional as F


class Embedding(nn.Module):
    def __init__(self, vocab_size, embed_dim, max_len):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, embed_dim)
        self.pos = nn.Embedding(max_len, embed_dim)

    def forward(self, x):
        return self.tok(x) + self.pos(torch.arange(x.size(1), device=x.device))


class MultiHeadAttention(nn.Module):
    """
    embed_dim: dimension of the embedding
    n_heads: number of heads
    max_len: longest sequence the model will see (shorter ones are fine)
    """

    def __init__(self, embed_dim, n_heads, max_len=100):
        super().__init__()
        self.embed_dim = embed_dim
        self.n_heads = n_heads
        self.max_len = max_len
        self.single_head_dim = int(embed_dim / n_heads)
        self.query_matrix = nn.Linear(embed_dim, embed_dim, bias=False)
        self.key_matrix = nn.Linear(embed_dim, embed_dim, bias=False)
        self.value_matrix = nn.Linear(embed_dim, embed_dim, bias=False)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, key, query, value, mask=None):
        k = self.key_matrix(key).view(-1, self.max_len, self.n_heads, self.single_head_dim)
        q = self.query_matrix(query).view(-1, self.max_len, self.n_heads, self.single_head_dim)
        v = self.value_matrix(value).view(-1, self.max_len, self.n_heads, self.single_head_dim)

        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)

        product = torch.matmul(q, k.transpose(-1, -2)) / self.single_head_dim ** 0.5
        if mask is not None:
            product = product.masked_fill(mask == 0, float("-1e20"))
        scores = F.softmax(product, dim=-1)
        scores = torch.matmul(scores, v)

        concat = scores.transpose(1, 2).contiguous().view(-1, self.max_len, self.embed_dim)
        return self.out(concat)
