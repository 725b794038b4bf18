# Port of a TensorFlow 1.x multihead_attention() to PyTorch
import torch
import torch.nn as nn


class MultiheadAttention(nn.Module):
    def __init__(self, num_units, num_heads=8, dropout_rate=0.0):
        super().__init__()
        self.num_units = num_units
        self.num_heads = num_heads
        self.Q_proj = nn.Linear(num_units, num_units)
        self.K_proj = nn.Linear(num_units, num_units)
        self.V_proj = nn.Linear(num_units, num_units)
        self.O_proj = nn.Linear(num_units, num_units)
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, queries, keys, values, key_masks=None, causality=False):
        '''
        queries: [N, T_q, C]
        keys, values: [N, T_k, C]
        key_masks: [N, T_k], 1 for real tokens, 0 for padding
        causality: whether units that reference the future are masked
        '''
        Q = self.Q_proj(queries)
        K = self.K_proj(keys)
        V = self.V_proj(values)

        # Split and concat
        Q_ = torch.cat(torch.chunk(Q, self.num_heads, dim=2), dim=0)  # (h*N, T_q, C/h)
        K_ = torch.cat(torch.chunk(K, self.num_heads, dim=2), dim=0)  # (h*N, T_k, C/h)
        V_ = torch.cat(torch.chunk(V, self.num_heads, dim=2), dim=0)  # (h*N, T_k, C/h)

        # Multiplication
        outputs = torch.bmm(Q_, K_.permute(0, 2, 1))  # (h*N, T_q, T_k)

        # Scale
        outputs = outputs / (K_.size(-1) ** 0.5)

        # Key Masking
        if key_masks is not None:
            masks = key_masks.bool().unsqueeze(1)                          # (N, 1, T_k)
            masks = masks.repeat_interleave(self.num_heads, dim=0)         # (h*N, 1, T_k)
            masks = masks.expand(-1, queries.size(1), -1)                  # (h*N, T_q, T_k)
            outputs = outputs.masked_fill(~masks, -2 ** 32 + 1)

        # Causality = Future blinding
        if causality:
            tril = torch.ones_like(outputs[0]).tril().bool()
            outputs = outputs.masked_fill(~tril, -2 ** 32 + 1)

        # Activation
        outputs = torch.softmax(outputs, dim=-1)
        outputs = self.dropout(outputs)

        # Weighted sum
        outputs = torch.bmm(outputs, V_)  # (h*N, T_q, C/h)

        # Restore shape
        outputs = torch.cat(torch.chunk(outputs, self.num_heads, dim=0), dim=2)  # (N, T_q, C)
        return self.O_proj(outputs)
