# Multi head attention from scratch -- no nn.Module, only tensors.
# I wanted to see every weight matrix with my own eyes.
import torch


class MultiHeadAttention:
    def __init__(self, embed_size, num_heads, seed=0):
        assert embed_size % num_heads == 0
        g = torch.Generator().manual_seed(seed)
        bound = embed_size ** -0.5

        def init(*shape):
            return ((torch.rand(*shape, generator=g) * 2 - 1) * bound).requires_grad_()

        self.h = num_heads
        self.d = embed_size // num_heads
        self.W_q = init(embed_size, embed_size)
        self.W_k = init(embed_size, embed_size)
        self.W_v = init(embed_size, embed_size)
        self.W_o = init(embed_size, embed_size)
        self.b_o = torch.zeros(embed_size, requires_grad=True)

    def parameters(self):
        return [self.W_q, self.W_k, self.W_v, self.W_o, self.b_o]

    def _split(self, t):
        b, n, _ = t.shape
        return t.reshape(b, n, self.h, self.d).transpose(1, 2)

    def forward(self, x, context=None, mask=None):
        """
        x       : (batch, n, embed)
        context : (batch, m, embed), defaults to x
        mask    : bool, broadcastable to (batch, heads, n, m), True = may look
        """
        if context is None:
            context = x
        q = self._split(x @ self.W_q)
        k = self._split(context @ self.W_k)
        v = self._split(context @ self.W_v)

        s = (q @ k.transpose(2, 3)) * self.d ** -0.5
        if mask is not None:
            s = torch.where(mask, s, torch.full_like(s, float("-inf")))
        s = s - s.max(dim=-1, keepdim=True).values.detach()
        e = torch.exp(s)
        a = e / e.sum(dim=-1, keepdim=True)

        out = (a @ v).transpose(1, 2).flatten(2)
        return out @ self.W_o + self.b_o

    __call__ = forward


if __name__ == "__main__":
    mha = MultiHeadAttention(16, 4)
    y = mha(torch.randn(2, 5, 16))
    y.sum().backward()
    print(y.shape, [p.grad.norm().item() for p in mha.parameters()])
