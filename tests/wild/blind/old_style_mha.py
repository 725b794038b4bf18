import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Variable


class MultiHeadAttn(nn.Module):
    def __init__(self, n_head, d_model, d_head, dropout=0.1, bias=False):
        super(MultiHeadAttn, self).__init__()
        self.n_head = n_head
        self.d_model = d_model
        self.d_head = d_head

        self.q_net = nn.Linear(d_model, n_head * d_head, bias=bias)
        self.kv_net = nn.Linear(d_model, 2 * n_head * d_head, bias=bias)
        self.drop = nn.Dropout(dropout)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=bias)
        self.scale = 1 / (d_head ** 0.5)

    def forward(self, h, memory=None, pad=None):
        # h : bsz x qlen x d_model, pad : bsz x klen with 1 where there is nothing
        c = h if memory is None else memory
        head_q = self.q_net(h)
        head_k, head_v = torch.chunk(self.kv_net(c), 2, -1)

        head_q = head_q.view(h.size(0), h.size(1), self.n_head, self.d_head).permute(0, 2, 1, 3)
        head_k = head_k.contiguous().view(c.size(0), c.size(1), self.n_head, self.d_head).permute(0, 2, 1, 3)
        head_v = head_v.contiguous().view(c.size(0), c.size(1), self.n_head, self.d_head).permute(0, 2, 1, 3)

        # bsz x n_head x qlen x klen
        attn_score = torch.matmul(head_q, head_k.permute(0, 1, 3, 2))
        attn_score.mul_(self.scale)
        if pad is not None:
            attn_score = attn_score.masked_fill(pad.bool()[:, None, None, :], -1e20)

        attn_prob = F.softmax(attn_score)
        attn_prob = self.drop(attn_prob)

        attn_vec = torch.matmul(attn_prob, head_v)
        attn_vec = attn_vec.permute(0, 2, 1, 3).contiguous()
        attn_vec = attn_vec.view(h.size(0), h.size(1), self.n_head * self.d_head)
        return self.o_net(attn_vec)
