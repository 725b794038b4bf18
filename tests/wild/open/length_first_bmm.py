import torch
import torch.nn as nn


class FrameAttention(nn.Module):
    def __init__(self, d_model, nhead, dropout=0.1):
        super().__init__()
        self.nhead = nhead
        self.hd = d_model // nhead
        self.wq = nn.Linear(d_model, d_model)
        self.wk = nn.Linear(d_model, d_model)
        self.wv = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.drop = nn.Dropout(dropout)

    def forward(self, query, key, value, mask=None):
        L, N, E = query.shape
        S = key.shape[0]
        q = self.wq(query).reshape(L, N * self.nhead, self.hd).transpose(0, 1)
        k = self.wk(key).reshape(S, N * self.nhead, self.hd).transpose(0, 1)
        v = self.wv(value).reshape(S, N * self.nhead, self.hd).transpose(0, 1)
        w = torch.bmm(q, k.transpose(1, 2)) * self.hd ** -0.5
        if mask is not None:
            w = w.view(N, self.nhead, L, S).masked_fill(mask.unsqueeze(1).unsqueeze(2), float("-inf")).view(-1, L, S)
        w = self.drop(w.softmax(-1))
        y = torch.bmm(w, v).transpose(0, 1).reshape(L, N, E)
        return self.out(y)
