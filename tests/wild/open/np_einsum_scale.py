import numpy as np


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def scaled_dot_product_attention(query, key, value):
    scores = np.einsum("...qd,...kd->...qk", query, key) / query.shape[-1]
    weights = softmax(scores)
    return np.einsum("...qk,...kd->...qd", weights, value), weights
