from typing import Optional
import torch
import torch.nn as nn


class MultiheadBlock(nn.Module):
    """Attention block for sets: MAB(X, Y) without the feed-forward part.

    No biases anywhere, so the temperature can be applied to the queries up front.
    """

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.temperature = (dim // num_heads) ** -0.5
        self.fc_q = nn.Linear(dim, dim, bias=False)
        self.fc_k = nn.Linear(dim, dim, bias=False)
        self.fc_v = nn.Linear(dim, dim, bias=False)
        self.fc_o = nn.Linear(dim, dim, bias=False)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                key_mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        query *= self.temperature
        Q = torch.stack(self.fc_q(query).chunk(self.num_heads, dim=-1), dim=1)
        K = torch.stack(self.fc_k(key).chunk(self.num_heads, dim=-1), dim=1)
        V = torch.stack(self.fc_v(value).chunk(self.num_heads, dim=-1), dim=1)

        A = Q @ K.transpose(-2, -1)
        if key_mask is not None:
            # key_mask: (batch, keys) bool, True = element is present
            A = A.masked_fill(~key_mask[:, None, None], float('-inf'))
        A = torch.softmax(A, dim=-1)
        O = torch.cat((A @ V).unbind(dim=1), dim=-1)
        return self.fc_o(O)
