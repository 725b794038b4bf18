"""GPT block on top of torch 2's fused kernels."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class CausalSelfAttention(nn.Module):

    def __init__(self, config):
        super().__init__()
        assert config["n_embd"] % config["n_head"] == 0
        self.n_head = config["n_head"]
        self.n_embd = config["n_embd"]
        self.dropout = config.get("dropout", 0.0)
        # key, query, value projections for all heads, but in a batch
        self.c_attn = nn.Linear(self.n_embd, 3 * self.n_embd, bias=config.get("bias", True))
        self.c_proj = nn.Linear(self.n_embd, self.n_embd, bias=config.get("bias", True))
        self.resid_dropout = nn.Dropout(self.dropout)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = [
            y.reshape(B, T, self.n_head, C // self.n_head).transpose(1, 2)
            for y in self.c_attn(x).split(self.n_embd, dim=2)
        ]
        y = F.scaled_dot_product_attention(
            q, k, v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.training,
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GPTBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config["n_embd"])
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config["n_embd"])
        self.mlp = nn.Sequential(
            nn.Linear(config["n_embd"], 4 * config["n_embd"]),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * config["n_embd"], config["n_embd"]),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        x = x + self.mlp(self.ln_2(x))
        return x
