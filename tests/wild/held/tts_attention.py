import math

import torch
from torch import nn
from torch.nn import functional as F


def sequence_mask(length, max_length=None):
    if max_length is None:
        max_length = length.max()
    x = torch.arange(max_length, dtype=length.dtype, device=length.device)
    return x.unsqueeze(0) < length.unsqueeze(1)


class ConvAttention(nn.Module):
    """Attention of the text encoder. Everything is [batch, channels, time], as in the rest of the TTS model.

    attn_mask: [batch, 1, t_target, t_source], 1 where attention is allowed, 0 at padding.
    """

    def __init__(self, channels, n_heads, out_channels=None, p_dropout=0.0):
        super().__init__()
        assert channels % n_heads == 0
        self.channels = channels
        self.n_heads = n_heads
        self.k_channels = channels // n_heads
        self.attn = None  # for plotting only

        self.conv_q = nn.Conv1d(channels, channels, 1)
        self.conv_k = nn.Conv1d(channels, channels, 1)
        self.conv_v = nn.Conv1d(channels, channels, 1)
        self.conv_o = nn.Conv1d(channels, out_channels or channels, 1)
        self.drop = nn.Dropout(p_dropout)
        for conv in (self.conv_q, self.conv_k, self.conv_v):
            nn.init.xavier_uniform_(conv.weight)

    def forward(self, x, c, attn_mask=None):
        q = self.conv_q(x)
        k = self.conv_k(c)
        v = self.conv_v(c)
        y, self.attn = self.attention(q, k, v, mask=attn_mask)
        return self.conv_o(y)

    def attention(self, query, key, value, mask=None):
        b, d, t_s, t_t = (*key.size(), query.size(2))
        query = query.view(b, self.n_heads, self.k_channels, t_t).transpose(2, 3)
        key = key.view(b, self.n_heads, self.k_channels, t_s)          # stays [.., d, t]
        value = value.view(b, self.n_heads, self.k_channels, t_s).transpose(2, 3)

        scores = torch.matmul(query / math.sqrt(self.k_channels), key)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e4)
        p_attn = self.drop(F.softmax(scores, dim=-1))
        output = torch.matmul(p_attn, value)                            # [b, h, t_t, d]
        output = output.transpose(2, 3).contiguous().view(b, d, t_t)
        return output, p_attn


class FFTBlock(nn.Module):
    def __init__(self, channels, n_heads, filter_channels, p_dropout=0.1):
        super().__init__()
        self.attn = ConvAttention(channels, n_heads, p_dropout=p_dropout)
        self.conv1 = nn.Conv1d(channels, filter_channels, 3, padding=1)
        self.conv2 = nn.Conv1d(filter_channels, channels, 3, padding=1)

    def forward(self, x, lengths):
        x_mask = sequence_mask(lengths, x.size(2)).unsqueeze(1).to(x.dtype)
        attn_mask = x_mask.unsqueeze(2) * x_mask.unsqueeze(-1)
        x = x + self.attn(x, x, attn_mask)
        return (x + self.conv2(F.relu(self.conv1(x * x_mask)))) * x_mask
