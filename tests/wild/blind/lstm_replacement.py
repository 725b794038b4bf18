import torch
import torch.nn as nn


class AttentionLayer(nn.Module):
    """Drop-in for the bidirectional LSTM layer we had before.

    input:  (batch, seq_len, features)
    output: (batch, seq_len, features)
    """

    def __init__(self, features, nhead, dropout=0.0):
        super(AttentionLayer, self).__init__()
        self.features = features
        self.nhead = nhead
        self.attn = nn.MultiheadAttention(embed_dim=features, num_heads=nhead, dropout=dropout)

    def forward(self, x):
        # x has shape (batch, seq_len, features)
        attn_output, attn_weights = self.attn(x, x, x)
        return attn_output


# class OldLayer(nn.Module):
#     def __init__(self, features):
#         super().__init__()
#         self.lstm = nn.LSTM(features, features // 2, batch_first=True, bidirectional=True)
#
#     def forward(self, x):
#         return self.lstm(x)[0]


if __name__ == '__main__':
    layer = AttentionLayer(32, 4)
    batch = torch.rand(8, 20, 32)
    out = layer(batch)
    assert out.shape == (8, 20, 32)
    print('ok')
