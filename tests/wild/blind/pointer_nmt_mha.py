import torch
import torch.nn as nn


class DotAttention(nn.Module):
    def __init__(self, temper, p=0.1):
        super().__init__()
        self.temper = temper
        self.dropout = nn.Dropout(p)
        self.softmax = nn.Softmax(dim=2)

    def forward(self, q, k, v, attn_mask=None):
        attn = torch.bmm(q, k.transpose(1, 2)) / self.temper
        if attn_mask is not None:
            attn = attn.masked_fill(attn_mask, -1e18)
        attn = self.softmax(attn)
        return torch.bmm(self.dropout(attn), v), attn


class MultiHeadedAttn(nn.Module):
    """heads are folded in the batch dimension so that a single bmm does it all"""

    def __init__(self, n_head, d_model, dropout=0.1):
        super().__init__()
        assert d_model % n_head == 0
        self.n_head, self.d_head = n_head, d_model // n_head
        self.linear_q = nn.Linear(d_model, d_model)
        self.linear_k = nn.Linear(d_model, d_model)
        self.linear_v = nn.Linear(d_model, d_model)
        self.linear_o = nn.Linear(d_model, d_model)
        self.attention = DotAttention(self.d_head ** 0.5, dropout)

    def fold(self, x):
        b, l, d = x.size()
        x = x.view(b, l, self.n_head, self.d_head).permute(0, 2, 1, 3).contiguous()
        return x.view(b * self.n_head, l, self.d_head)

    def unfold(self, x):
        bh, l, d = x.size()
        x = x.view(bh // self.n_head, self.n_head, l, d).permute(0, 2, 1, 3).contiguous()
        return x.view(bh // self.n_head, l, self.n_head * d)

    def forward(self, q, k, v, attn_mask=None):
        # attn_mask: b x len_q x len_k, True = blocked
        if attn_mask is not None:
            attn_mask = attn_mask.bool().repeat(self.n_head, 1, 1)
        out, attn = self.attention(
            self.fold(self.linear_q(q)),
            self.fold(self.linear_k(k)),
            self.fold(self.linear_v(v)),
            attn_mask=attn_mask,
        )
        return self.linear_o(self.unfold(out)), attn
