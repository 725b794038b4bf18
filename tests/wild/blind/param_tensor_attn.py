import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHeadCausalAttention(nn.Module):
    def __init__(self, n_embed, n_heads, max_len=256):
        super().__init__()
        d_head = n_embed // n_heads
        self.d_head = d_head
        self.Wq = nn.Parameter(torch.randn(n_heads, n_embed, d_head) * n_embed ** -0.5)
        self.Wk = nn.Parameter(torch.randn(n_heads, n_embed, d_head) * n_embed ** -0.5)
        self.Wv = nn.Parameter(torch.randn(n_heads, n_embed, d_head) * n_embed ** -0.5)
        self.Wo = nn.Parameter(torch.randn(n_heads, d_head, n_embed) * n_embed ** -0.5)
        # each position looks at itself and at what came before
        self.register_buffer("causal", torch.tril(torch.ones(max_len, max_len), diagonal=1).bool())

    def forward(self, x):
        # x: b t e ; weights: h e d
        t = x.shape[1]
        q = torch.einsum('bte,hed->bhtd', x, self.Wq)
        k = torch.einsum('bte,hed->bhtd', x, self.Wk)
        v = torch.einsum('bte,hed->bhtd', x, self.Wv)
        scores = torch.einsum('bhtd,bhsd->bhts', q, k) / self.d_head ** 0.5
        scores = scores.masked_fill(~self.causal[:t, :t], float('-inf'))
        weights = F.softmax(scores, -1)
        return torch.einsum('bhts,bhsd,hde->bte', weights, v, self.Wo)
