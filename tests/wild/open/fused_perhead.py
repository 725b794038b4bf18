import torch
from torch import nn


class FusedAttention(nn.Module):
    # weight layout as in Megatron / NeoX checkpoints: [q_0 k_0 v_0 | q_1 k_1 v_1 | ...]
    def __init__(self, hidden: int, heads: int, causal: bool = False):
        super().__init__()
        self.hidden, self.heads, self.causal = hidden, heads, causal
        self.hd = hidden // heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.norm_factor = self.hd ** 0.5

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        b, s, _ = hidden_states.shape
        mixed = self.query_key_value(hidden_states)
        mixed = mixed.view(b, s, self.heads, 3 * self.hd)
        q, k, v = mixed.chunk(3, dim=-1)
        q = q.permute(0, 2, 1, 3)          # b, heads, s, hd
        k = k.permute(0, 2, 3, 1)          # b, heads, hd, s
        v = v.permute(0, 2, 1, 3)

        scores = torch.matmul(q, k) / self.norm_factor
        if self.causal:
            future = torch.ones(s, s, device=scores.device, dtype=torch.bool).triu(diagonal=1)
            scores.masked_fill_(future, torch.finfo(scores.dtype).min)
        probs = torch.nn.functional.softmax(scores, dim=-1)

        context = torch.matmul(probs, v).contiguous()
        context = context.view(b, s, self.hidden)
        return self.dense(context)
