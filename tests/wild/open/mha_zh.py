import math
import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    """多头注意力机制

    参数:
        d_model: 词向量维度
        h: 头数
    """

    def __init__(self, d_model, h, dropout=0.1):
        super(MultiHeadAttention, self).__init__()
        assert d_model % h == 0
        self.d_model = d_model
        self.h = h
        self.d_k = d_model // h
        self.dropout = nn.Dropout(dropout)

    def attention(self, Q, K, V, mask):
        # 缩放点积
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            # mask 为 0 的位置被屏蔽
            scores = scores.masked_fill(mask == 0, -1e9)
        p_attn = torch.softmax(scores, dim=-1)
        p_attn = self.dropout(p_attn)
        return torch.matmul(p_attn, V)

    def forward(self, Q, K, V, mask=None):
        batch = Q.size(0)
        # 线性变换
        W_Q = nn.Linear(self.d_model, self.d_model, device=Q.device)
        W_K = nn.Linear(self.d_model, self.d_model, device=Q.device)
        W_V = nn.Linear(self.d_model, self.d_model, device=Q.device)
        q = W_Q(Q).view(batch, -1, self.h, self.d_k).transpose(1, 2)
        k = W_K(K).view(batch, -1, self.h, self.d_k).transpose(1, 2)
        v = W_V(V).view(batch, -1, self.h, self.d_k).transpose(1, 2)

        x = self.attention(q, k, v, mask)
        # 拼接各个头
        x = x.transpose(1, 2).contiguous().view(batch, -1, self.d_model)
        out = nn.Linear(self.d_model, self.d_model, device=Q.device)
        return out(x)
