# functional style: the module only owns the parameters
import torch
import torch.nn.functional as F
from torch.nn import Module, Parameter, init


def multihead_attention(x, w_in, b_in, w_out, b_out, n_heads, p_drop, bias=None):
    n, t, c = x.shape
    q, k, v = F.linear(x, w_in, b_in).tensor_split(3, dim=-1)
    q, k, v = [z.reshape(n, t, n_heads, c // n_heads).swapaxes(1, 2) for z in (q, k, v)]
    logits = torch.matmul(q, k.swapaxes(-1, -2)).mul((c // n_heads) ** -0.5)
    if bias is not None:
        logits = logits + bias
    weights = F.dropout(F.softmax(logits, dim=-1), p=p_drop)
    mixed = torch.matmul(weights, v).swapaxes(1, 2).reshape(n, t, c)
    return F.linear(mixed, w_out, b_out)


class Attention(Module):
    def __init__(self, width, n_heads, p_drop=0.1):
        super().__init__()
        self.n_heads = n_heads
        self.p_drop = p_drop
        self.w_in = Parameter(torch.empty(3 * width, width))
        self.b_in = Parameter(torch.zeros(3 * width))
        self.w_out = Parameter(torch.empty(width, width))
        self.b_out = Parameter(torch.zeros(width))
        init.xavier_uniform_(self.w_in)
        init.xavier_uniform_(self.w_out)

    def forward(self, x, bias=None):
        """bias: float tensor added to the logits, broadcastable to (n, n_heads, t, t)"""
        return multihead_attention(
            x, self.w_in, self.b_in, self.w_out, self.b_out, self.n_heads, self.p_drop, bias
        )
