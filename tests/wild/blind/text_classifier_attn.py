from typing import NamedTuple, Optional

import torch
from torch import nn


class AttnConfig(NamedTuple):
    hidden: int = 64
    heads: int = 4
    dropout: float = 0.1


class MultiHeadSelfAttention(nn.Module):
    """Self-attention for the sentence encoder.

    Args:
        cfg: sizes
    Call:
        tokens: float [batch, time, hidden]
        attention_mask: int [batch, time]; 1 for a token, 0 for padding (as the tokenizer returns it)
    """

    def __init__(self, cfg: AttnConfig = AttnConfig()):
        super().__init__()
        self.cfg = cfg
        self.size_per_head = cfg.hidden // cfg.heads
        self.w_in = nn.Linear(cfg.hidden, cfg.hidden * 3)
        self.w_out = nn.Linear(cfg.hidden, cfg.hidden)
        self.softmax = nn.Softmax(-1)
        self.dropout = nn.Dropout(cfg.dropout)

    def forward(self, tokens: torch.Tensor, attention_mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        batch, time, hidden = tokens.size()
        fused = self.w_in(tokens).view(batch, time, self.cfg.heads, 3, self.size_per_head)
        query, key, value = [fused[:, :, :, i].transpose(1, 2) for i in range(3)]

        energy = torch.einsum("nhid,nhjd->nhij", query, key) / self.size_per_head ** 0.5
        if attention_mask is not None:
            # [batch, time] -> [batch, 1, time, 1] to broadcast over the scores
            extended = attention_mask.unsqueeze(1).unsqueeze(-1)
            energy = energy.masked_fill(extended == 0, -1e9)

        probs = self.dropout(self.softmax(energy))
        mixed = torch.einsum("nhij,nhjd->nihd", probs, value)
        return self.w_out(mixed.reshape(batch, time, hidden))
