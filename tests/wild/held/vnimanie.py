# Лабораторная работа №4. Трансформер с нуля.
import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHead(nn.Module):
    """Многоголовое внимание"""

    def __init__(self, d_model=64, h=4, dropout=0.1):
        super(MultiHead, self).__init__()
        assert d_model % h == 0
        self.d_model = d_model
        self.h = h
        self.d_k = d_model // h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for i in range(4)])
        self.dropout = nn.Dropout(dropout)
        self.weights = None  # веса для картинок

    def forward(self, query, key, value, mask=None):
        # mask: (batch, 1, len) или (batch, len, len), 0 - закрыто
        n = query.size(0)
        if mask is not None:
            mask = mask.unsqueeze(1)  # одна маска на все головы

        # 1) проекции и разбиение на головы
        q, k, v = [
            lin(t).view(n, -1, self.h, self.d_k).transpose(1, 2)
            for lin, t in zip(self.linears, (query, key, value))
        ]

        # 2) внимание
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_model)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        self.weights = F.softmax(scores, dim=-1)
        out = torch.matmul(self.dropout(self.weights), v)

        # 3) склеиваем головы обратно
        out = out.contiguous().view(n, -1, self.h * self.d_k)

        # 4) последняя проекция
        return self.linears[-1](out)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len=512):
        super(PositionalEncoding, self).__init__()
        pe = torch.zeros(max_len, d_model)
        pos = torch.arange(0, max_len).unsqueeze(1).float()
        div = torch.exp(torch.arange(0, d_model, 2).float() * -(math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(pos * div)
        pe[:, 1::2] = torch.cos(pos * div)
        self.register_buffer('pe', pe.unsqueeze(0))

    def forward(self, x):
        return x + self.pe[:, :x.size(1)]
