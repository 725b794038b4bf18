# 仿照 BERT 的自注意力实现（学习笔记）
import math
from types import SimpleNamespace

import torch
from torch import nn


def default_config(**kw):
    base = dict(hidden_size=64, num_attention_heads=4, attention_probs_dropout_prob=0.1,
                hidden_dropout_prob=0.1, layer_norm_eps=1e-12)
    base.update(kw)
    return SimpleNamespace(**base)


class SelfAttention(nn.Module):
    """多头自注意力。注意：输出映射在 SelfOutput 里，这里只返回拼接后的各头结果。"""

    def __init__(self, config):
        super().__init__()
        if config.hidden_size % config.num_attention_heads != 0:
            raise ValueError("hidden_size 必须能被 num_attention_heads 整除")
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.all_head_size = self.num_attention_heads * self.attention_head_size

        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def split_heads(self, t):
        # [批, 长, 隐] -> [批, 头, 长, 头维]
        return t.view(*t.shape[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None, head_mask=None, output_attentions=False):
        """attention_mask 为加性掩码 [批, 1, 1, 长]：有效位置 0，填充位置 -10000。"""
        q = self.split_heads(self.query(hidden_states))
        k = self.split_heads(self.key(hidden_states))
        v = self.split_heads(self.value(hidden_states))

        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            scores = scores + attention_mask
        probs = nn.Softmax(dim=-1)(scores)
        probs = self.dropout(probs)
        if head_mask is not None:
            probs = probs * head_mask
        context = torch.matmul(probs, v)

        context = context.permute(0, 2, 1, 3).contiguous()
        context = context.view(*context.size()[:-2], self.all_head_size)
        return (context, probs) if output_attentions else (context,)


class SelfOutput(nn.Module):
    """线性映射 + 残差 + 层归一化"""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


def extend_mask(mask_01):
    # 1 表示真实词，0 表示填充
    return (1.0 - mask_01[:, None, None, :].float()) * -10000.0
