import torch
import torch.nn as nn


class MultiHeadSelfAttention(nn.Module):
    """Multi-head attention based on nn.MultiheadAttention.

    1. project q, k, v    2. scaled dot-product per head    3. concat    4. output projection
    """

    def __init__(self, d_model, nhead, dropout=0.1):
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, nhead, dropout=dropout, batch_first=True)
        # W^O of the paper
        self.w_o = nn.Linear(d_model, d_model)
        self._reset_parameters()

    def _reset_parameters(self):
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def forward(self, q, k, v, attn_mask=None, key_padding_mask=None):
        heads, weights = self.mha(q, k, v, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
        out = self.w_o(heads)
        return out, weights


class TransformerEncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward=512, dropout=0.1):
        super().__init__()
        self.self_attn = MultiHeadSelfAttention(d_model, nhead, dropout)
        self.ffn = nn.Sequential(nn.Linear(d_model, dim_feedforward), nn.ReLU(), nn.Linear(dim_feedforward, d_model))
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src, src_key_padding_mask=None):
        a, _ = self.self_attn(src, src, src, key_padding_mask=src_key_padding_mask)
        src = self.norm1(src + self.dropout(a))
        return self.norm2(src + self.dropout(self.ffn(src)))
