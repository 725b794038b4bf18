import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


def dot_product_attention(Q, K, V, mask=None):
    """
    Q, K, V: (batch, heads, length, depth)
    mask:    (batch, 1, 1, length) or (1, 1, length, length), 1 = visible, 0 = hidden
    """
    scores = torch.matmul(Q, K.transpose(-1, -2))
    weights = F.softmax(scores, dim=-1)
    if mask is not None:
        weights = weights * mask
    return torch.matmul(weights, V), weights


class MultiHead(nn.Module):
    def __init__(self, depth_model=64, heads=4):
        super().__init__()
        self.heads = heads
        self.depth = depth_model // heads
        self.wq = nn.Linear(depth_model, depth_model)
        self.wk = nn.Linear(depth_model, depth_model)
        self.wv = nn.Linear(depth_model, depth_model)
        self.dense = nn.Linear(depth_model, depth_model)

    def split(self, x, batch_size):
        x = torch.reshape(x, (batch_size, -1, self.heads, self.depth))
        return torch.permute(x, (0, 2, 1, 3))

    def forward(self, v, k, q, mask=None):
        batch_size = q.shape[0]
        q = self.split(self.wq(q), batch_size)
        k = self.split(self.wk(k), batch_size)
        v = self.split(self.wv(v), batch_size)
        out, weights = dot_product_attention(q, k, v, mask)
        out = torch.permute(out, (0, 2, 1, 3))
        out = torch.reshape(out, (batch_size, -1, self.heads * self.depth))
        return self.dense(out), weights


def look_ahead(size):
    return torch.from_numpy(np.tril(np.ones((1, 1, size, size), dtype=np.float32)))
