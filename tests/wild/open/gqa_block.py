from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F


def repeat_kv(x: torch.Tensor, n_rep: int) -> torch.Tensor:
    """(bs, n_kv, len, d) -> (bs, n_kv * n_rep, len, d), same as repeat_interleave(x, n_rep, dim=1)"""
    if n_rep == 1:
        return x
    bs, n_kv, slen, d = x.shape
    return x[:, :, None].expand(bs, n_kv, n_rep, slen, d).reshape(bs, n_kv * n_rep, slen, d)


class GroupedQueryAttention(nn.Module):
    def __init__(self, hidden_size: int, num_attention_heads: int, num_key_value_heads: int | None = None,
                 attention_bias: bool = False, attention_dropout: float = 0.0):
        super().__init__()
        num_key_value_heads = num_key_value_heads or num_attention_heads
        assert num_attention_heads % num_key_value_heads == 0
        self.num_heads = num_attention_heads
        self.num_kv_heads = num_key_value_heads
        self.groups = num_attention_heads // num_key_value_heads
        self.head_dim = hidden_size // num_attention_heads
        self.attention_dropout = attention_dropout
        self.q_proj = nn.Linear(hidden_size, self.num_heads * self.head_dim, bias=attention_bias)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=attention_bias)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * self.head_dim, bias=attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden_size, bias=attention_bias)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
                is_causal: bool = False) -> torch.Tensor:
        """attention_mask: boolean, broadcastable to (bs, heads, len, len), True = take part."""
        bsz, q_len, _ = hidden_states.shape
        q = self.q_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_proj(hidden_states).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(hidden_states).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        k, v = repeat_kv(k, self.groups), repeat_kv(v, self.groups)

        if is_causal:
            causal = torch.ones(q_len, q_len, dtype=torch.bool, device=q.device).tril()
            attention_mask = causal if attention_mask is None else attention_mask & causal

        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        return self.o_proj(out.transpose(1, 2).reshape(bsz, q_len, -1))
