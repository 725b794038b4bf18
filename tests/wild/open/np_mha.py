import numpy as np


def softmax(z, axis=-1):
    z = z - np.max(z, axis=axis, keepdims=True)
    e = np.exp(z)
    return e / np.sum(e, axis=axis, keepdims=True)


class MultiHeadAttention:
    """Multi-head attention in NumPy (forward pass only).

    Parameters
    ----------
    d_model : int
    num_heads : int
    rng : numpy.random.Generator or None
    """

    def __init__(self, d_model, num_heads, rng=None):
        if d_model % num_heads != 0:
            raise ValueError("d_model must be divisible by num_heads")
        rng = np.random.default_rng(0) if rng is None else rng
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        s = 1.0 / np.sqrt(d_model)
        self.W_Q = rng.normal(0, s, (d_model, d_model))
        self.W_K = rng.normal(0, s, (d_model, d_model))
        self.W_V = rng.normal(0, s, (d_model, d_model))
        self.W_O = rng.normal(0, s, (d_model, d_model))
        self.b_Q = np.zeros(d_model)
        self.b_K = np.zeros(d_model)
        self.b_V = np.zeros(d_model)
        self.b_O = np.zeros(d_model)

    def split_heads(self, x):
        b, t, _ = x.shape
        return x.reshape(b, t, self.num_heads, self.d_k).transpose(0, 2, 1, 3)

    def combine_heads(self, x):
        b, h, t, d = x.shape
        return x.transpose(0, 2, 1, 3).reshape(b, t, h * d)

    def forward(self, Q, K, V, mask=None):
        """mask: array broadcastable to (batch, heads, len_q, len_k); 0 where attention is forbidden."""
        q = self.split_heads(np.dot(Q, self.W_Q) + self.b_Q)
        k = self.split_heads(np.dot(K, self.W_K) + self.b_K)
        v = self.split_heads(np.dot(V, self.W_V) + self.b_V)

        scores = np.matmul(q, k.transpose(0, 1, 3, 2)) / np.sqrt(self.d_k)
        if mask is not None:
            scores = np.where(mask == 0, -1e9, scores)
        weights = softmax(scores, axis=-1)
        context = self.combine_heads(np.matmul(weights, v))
        return np.dot(context, self.W_O) + self.b_O, weights

    def __call__(self, Q, K, V, mask=None):
        return self.forward(Q, K, V, mask)


def causal_mask(n):
    return np.tril(np.ones((n, n)))[None, None]
