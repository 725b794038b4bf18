# tiny LM, hyperparameters up here
import torch
import torch.nn as nn
from torch.nn import functional as F

N_EMBD = 64
N_HEAD = 4
DROPOUT = 0.0
PAD_ID = 0
# ------------


class MHA(nn.Module):
    """self attention for the encoder (causal=False) and the decoder (causal=True)"""

    def __init__(self, n_embd=N_EMBD, n_head=N_HEAD, causal=True):
        super().__init__()
        self.n_head = n_head
        self.hs = n_embd // n_head
        self.causal = causal
        self.proj_in = nn.Linear(n_embd, 3 * n_embd)
        self.proj_out = nn.Linear(n_embd, n_embd)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x, pad_mask=None):
        # pad_mask (B,T) True where the token is real
        B, T, C = x.shape
        q, k, v = self.proj_in(x).chunk(3, dim=-1)
        q = q.view(B, T, self.n_head, self.hs).transpose(1, 2)
        k = k.view(B, T, self.n_head, self.hs).transpose(1, 2)
        v = v.view(B, T, self.n_head, self.hs).transpose(1, 2)

        mask = None
        if self.causal:
            mask = torch.tril(torch.ones(T, T, dtype=torch.bool, device=x.device)).view(1, 1, T, T)
        if pad_mask is not None:
            mask = pad_mask.view(B, 1, 1, T).expand(B, 1, T, T)

        wei = q @ k.transpose(-2, -1) * self.hs ** -0.5
        if mask is not None:
            wei = wei.masked_fill(~mask, float('-inf'))
        wei = F.softmax(wei, dim=-1)
        wei = self.drop(wei)
        out = (wei @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.proj_out(out)


class Block(nn.Module):
    def __init__(self, n_embd=N_EMBD, n_head=N_HEAD):
        super().__init__()
        self.sa = MHA(n_embd, n_head)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, idx, x):
        x = x + self.sa(self.ln1(x), pad_mask=idx != PAD_ID)
        return x + self.mlp(self.ln2(x))
