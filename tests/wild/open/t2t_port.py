import torch
import torch.nn as nn


def gen_bias_mask(max_length: int) -> torch.Tensor:
    """
    Upper triangle of -inf: added to the logits so that a position does not see later ones.
    """
    return torch.triu(torch.full((max_length, max_length), float("-inf")), diagonal=1)[None, None]


class MultiHeadAttention(nn.Module):
    """
    Multi-head attention as per https://arxiv.org/pdf/1706.03762.pdf
    Refer Figure 2
    """

    def __init__(self, input_depth: int, total_key_depth: int, total_value_depth: int,
                 output_depth: int = None, num_heads: int = 8,
                 bias_mask: torch.Tensor = None, dropout: float = 0.0):
        """
        Parameters:
            input_depth: Size of last dimension of input
            total_key_depth: Size of last dimension of keys. Must be divisible by num_heads
            total_value_depth: Size of last dimension of values. Must be divisible by num_heads
            output_depth: Size of last dimension of the final output (input_depth if None)
            num_heads: Number of attention heads
            bias_mask: Masking tensor to prevent connections to future elements
            dropout: Dropout probability (should be non-zero only during training)
        """
        super(MultiHeadAttention, self).__init__()
        if total_key_depth % num_heads != 0:
            raise ValueError("Key depth (%d) must be divisible by the number of "
                             "attention heads (%d)." % (total_key_depth, num_heads))
        if total_value_depth % num_heads != 0:
            raise ValueError("Value depth (%d) must be divisible by the number of "
                             "attention heads (%d)." % (total_value_depth, num_heads))
        if output_depth is None:
            output_depth = input_depth

        self.num_heads = num_heads
        self.query_scale = (total_key_depth // num_heads) ** -0.5
        self.bias_mask = bias_mask

        self.query_linear = nn.Linear(input_depth, total_key_depth, bias=False)
        self.key_linear = nn.Linear(input_depth, total_key_depth, bias=False)
        self.value_linear = nn.Linear(input_depth, total_value_depth, bias=False)
        self.output_linear = nn.Linear(total_value_depth, output_depth, bias=False)
        self.dropout = nn.Dropout(dropout)

    def _split_heads(self, x):
        """[batch, length, depth] -> [batch, heads, length, depth/heads]"""
        shape = x.shape
        return x.view(shape[0], shape[1], self.num_heads, shape[2] // self.num_heads).permute(0, 2, 1, 3)

    def _merge_heads(self, x):
        """[batch, heads, length, depth/heads] -> [batch, length, depth]"""
        shape = x.shape
        return x.permute(0, 2, 1, 3).contiguous().view(shape[0], shape[2], shape[3] * self.num_heads)

    def forward(self, queries, keys, values):
        queries = self._split_heads(self.query_linear(queries))
        keys = self._split_heads(self.key_linear(keys))
        values = self._split_heads(self.value_linear(values))

        queries = queries * self.query_scale
        logits = torch.matmul(queries, keys.permute(0, 1, 3, 2))
        if self.bias_mask is not None:
            logits = logits + self.bias_mask[:, :, :logits.shape[-2], :logits.shape[-1]].type_as(logits)

        weights = self.dropout(nn.functional.softmax(logits, dim=-1))
        contexts = self._merge_heads(torch.matmul(weights, values))
        return self.output_linear(contexts)
