import torch


class Dense(torch.nn.Linear):
    pass


class MultiHeadAttention(torch.nn.Module):
    """ Keras-like multi head attention layer.

    model_dim -- Dimension of the model
    num_heads -- Number of heads
    """
    def __init__(self, model_dim=64, num_heads=4, rate=0.1):
        super().__init__()
        if model_dim % num_heads != 0:
            raise ValueError('model_dim has to be a multiple of num_heads')
        self.model_dim = model_dim
        self.num_heads = num_heads
        self.depth = model_dim // num_heads
        self.dense = Dense(model_dim, model_dim)
        self.final = Dense(model_dim, model_dim)
        self.dropout = torch.nn.Dropout(rate)

    def split_heads(self, x):
        x = torch.reshape(x, (x.shape[0], -1, self.num_heads, self.depth))
        return torch.permute(x, (0, 2, 1, 3))

    def scaled_dot_product_attention(self, q, k, v, mask):
        matmul_qk = torch.matmul(q, torch.transpose(k, -1, -2))
        scaled_attention_logits = matmul_qk / torch.sqrt(torch.tensor(float(self.model_dim)))
        # mask has 1 where the logits are to be hidden
        if mask is not None:
            scaled_attention_logits = scaled_attention_logits + (mask * -1e9)
        attention_weights = torch.softmax(scaled_attention_logits, dim=-1)
        return torch.matmul(self.dropout(attention_weights), v), attention_weights

    def forward(self, v, k, q, mask=None):
        q = self.split_heads(self.dense(q))
        k = self.split_heads(self.dense(k))
        v = self.split_heads(self.dense(v))
        scaled_attention, attention_weights = self.scaled_dot_product_attention(q, k, v, mask)
        scaled_attention = torch.permute(scaled_attention, (0, 2, 1, 3))
        concat_attention = torch.reshape(scaled_attention, (scaled_attention.shape[0], -1, self.model_dim))
        return self.final(concat_attention), attention_weights
