"""Multi-head attention without a single nn.Module. Weights act from the right: y = x @ W."""
from math import sqrt

import torch


def softmax(z, axis=-1):
    e = torch.exp(z - z.max(dim=axis, keepdim=True).values)
    return e / e.sum(dim=axis, keepdim=True)


def split_heads(x, h):
    *lead, n, d = x.shape
    return x.reshape(*lead, n, h, d // h).swapaxes(-2, -3)


def join_heads(x):
    x = x.swapaxes(-2, -3)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def multi_head_attention(x_q, x_kv, w_q, w_k, w_v, w_o, num_heads, mask=None):
    """
    x_q  : (..., n, d)
    x_kv : (..., m, d)
    w_*  : (d, d)
    mask : bool, broadcastable to (..., n, m); True means "not allowed"
    """
    q = split_heads(x_q @ w_q, num_heads)
    k = split_heads(x_kv @ w_k, num_heads)
    v = split_heads(x_kv @ w_v, num_heads)
    logits = (q @ k.swapaxes(-1, -2)) / sqrt(q.shape[-1])
    if mask is not None:
        logits = torch.where(mask.unsqueeze(-3), torch.full_like(logits, -1e30), logits)
    return join_heads(softmax(logits) @ v) @ w_o


def init_weights(d, generator=None):
    return [torch.randn(d, d, generator=generator) / sqrt(d) for _ in range(4)]


def demo():
    ws = init_weights(16)
    x = torch.randn(2, 5, 16)
    print(multi_head_attention(x, x, *ws, num_heads=4).shape)


if __name__ == "__main__":
    demo()
