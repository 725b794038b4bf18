"""Two faults at once: all pairs of the ten commonest, in separate layers.

Called forward(query, key, value, mask=None); mask: [B, T, S], 1 where a query may look at a key.
"""

import math
from typing import NamedTuple

import torch
import torch.nn as nn


class Base(nn.Module):
    """The right one. mask: [B, T, S], 1 where a query may look at a key."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.view(x.size(0), -1, self.num_heads, self.d_k).transpose(1, 2)  # [B, H, T, D]

    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)  # [B, H, T, S]
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def merge(self, x):
        return x.transpose(1, 2).reshape(x.size(0), -1, self.d_model)  # [B, T, E]

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.W_o(self.merge(self.attend(q, k, v, mask)))


class NoScaleAndSplitByView(Base):
    def split(self, x):
        return x.reshape(x.shape[0], self.num_heads, -1, self.d_k)

    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class NoScaleAndMergeWithoutTranspose(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def merge(self, x):
        return x.reshape(x.size(0), x.size(2), self.d_model)


class NoScaleAndSoftmaxOverQueries(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-2) @ v


class NoScaleAndMaskIgnored(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1)
        return scores.softmax(dim=-1) @ v


class NoScaleAndMaskInverted(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 1, float("-inf"))
        return scores.softmax(dim=-1) @ v


class NoScaleAndMaskAfterSoftmax(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT)
        weights = torch.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return weights @ v


class NoScaleAndFillWithZero(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return scores.softmax(dim=-1) @ v


class NoScaleAndNoOutputProjection(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.merge(self.attend(q, k, v, mask))


class ScaleByDModelAndSplitByView(Base):
    def split(self, x):
        return x.reshape(x.shape[0], self.num_heads, -1, self.d_k)

    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_model)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class ScaleByDModelAndMergeWithoutTranspose(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_model)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def merge(self, x):
        return x.reshape(x.size(0), x.size(2), self.d_model)


class ScaleByDModelAndSoftmaxOverQueries(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_model)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-2) @ v


class ScaleByDModelAndMaskIgnored(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_model)
        return scores.softmax(dim=-1) @ v


class ScaleByDModelAndMaskInverted(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_model)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 1, float("-inf"))
        return scores.softmax(dim=-1) @ v


class ScaleByDModelAndMaskAfterSoftmax(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_model)
        weights = torch.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return weights @ v


class ScaleByDModelAndFillWithZero(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_model)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return scores.softmax(dim=-1) @ v


class ScaleByDModelAndNoOutputProjection(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_model)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.merge(self.attend(q, k, v, mask))


class SplitByViewAndMergeWithoutTranspose(Base):
    def split(self, x):
        return x.reshape(x.shape[0], self.num_heads, -1, self.d_k)

    def merge(self, x):
        B, H, T, D = x.shape
        return x.contiguous().view(B, T, H * D)


class SplitByViewAndSoftmaxOverQueries(Base):
    def split(self, x):
        return x.view(x.size(0), self.num_heads, x.size(1), self.d_k)

    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-2) @ v


class SplitByViewAndMaskIgnored(Base):
    def split(self, x):
        return x.reshape(x.shape[0], self.num_heads, -1, self.d_k)

    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        return scores.softmax(dim=-1) @ v


class SplitByViewAndMaskInverted(Base):
    def split(self, x):
        return x.view(x.size(0), self.num_heads, x.size(1), self.d_k)

    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 1, float("-inf"))
        return scores.softmax(dim=-1) @ v


class SplitByViewAndMaskAfterSoftmax(Base):
    def split(self, x):
        return x.reshape(x.shape[0], self.num_heads, -1, self.d_k)

    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        weights = torch.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return weights @ v


class SplitByViewAndFillWithZero(Base):
    def split(self, x):
        return x.view(x.size(0), self.num_heads, x.size(1), self.d_k)

    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return scores.softmax(dim=-1) @ v


class SplitByViewAndNoOutputProjection(Base):
    def split(self, x):
        return x.reshape(x.shape[0], self.num_heads, -1, self.d_k)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.merge(self.attend(q, k, v, mask))


class MergeWithoutTransposeAndSoftmaxOverQueries(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-2) @ v

    def merge(self, x):
        return x.reshape(x.size(0), x.size(2), self.d_model)


class MergeWithoutTransposeAndMaskIgnored(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        return scores.softmax(dim=-1) @ v

    def merge(self, x):
        B, H, T, D = x.shape
        return x.contiguous().view(B, T, H * D)


class MergeWithoutTransposeAndMaskInverted(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 1, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def merge(self, x):
        return x.reshape(x.size(0), x.size(2), self.d_model)


class MergeWithoutTransposeAndMaskAfterSoftmax(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        weights = torch.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return weights @ v

    def merge(self, x):
        B, H, T, D = x.shape
        return x.contiguous().view(B, T, H * D)


class MergeWithoutTransposeAndFillWithZero(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return scores.softmax(dim=-1) @ v

    def merge(self, x):
        return x.reshape(x.size(0), x.size(2), self.d_model)


class MergeWithoutTransposeAndNoOutputProjection(Base):
    def merge(self, x):
        B, H, T, D = x.shape
        return x.contiguous().view(B, T, H * D)

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.merge(self.attend(q, k, v, mask))


class SoftmaxOverQueriesAndMaskIgnored(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        return scores.softmax(dim=-2) @ v


class SoftmaxOverQueriesAndMaskInverted(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 1, float("-inf"))
        return scores.softmax(dim=-2) @ v


class SoftmaxOverQueriesAndMaskAfterSoftmax(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        weights = torch.softmax(scores, dim=-2)
        if mask is not None:
            weights = weights.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return weights @ v


class SoftmaxOverQueriesAndFillWithZero(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return scores.softmax(dim=-2) @ v


class SoftmaxOverQueriesAndNoOutputProjection(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-2) @ v

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.merge(self.attend(q, k, v, mask))


class MaskIgnoredAndNoOutputProjection(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        return scores.softmax(dim=-1) @ v

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.merge(self.attend(q, k, v, mask))


class MaskInvertedAndMaskAfterSoftmax(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        weights = torch.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights.masked_fill(mask.unsqueeze(1) == 1, 0.0)
        return weights @ v


class MaskInvertedAndFillWithZero(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 1, 0.0)
        return scores.softmax(dim=-1) @ v


class MaskInvertedAndNoOutputProjection(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 1, float("-inf"))
        return scores.softmax(dim=-1) @ v

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.merge(self.attend(q, k, v, mask))


class MaskAfterSoftmaxAndNoOutputProjection(Base):
    def attend(self, q, k, v, mask):
        scores = torch.matmul(q, k.mT) / math.sqrt(self.d_k)
        weights = torch.softmax(scores, dim=-1)
        if mask is not None:
            weights = weights.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return weights @ v

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.merge(self.attend(q, k, v, mask))


class FillWithZeroAndNoOutputProjection(Base):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, 0.0)
        return scores.softmax(dim=-1) @ v

    def forward(self, query, key, value, mask=None):
        q, k, v = self.split(self.W_q(query)), self.split(self.W_k(key)), self.split(self.W_v(value))
        return self.merge(self.attend(q, k, v, mask))


class Pair(NamedTuple):
    """Two faults, in words, in one module; `make(24, 4)` builds it."""

    faults: tuple[str, str]
    make: type[nn.Module]


PAIRS = [
    Pair(("no scale", "split by view"), NoScaleAndSplitByView),
    Pair(("no scale", "merge without transpose"), NoScaleAndMergeWithoutTranspose),
    Pair(("no scale", "softmax over queries"), NoScaleAndSoftmaxOverQueries),
    Pair(("no scale", "mask ignored"), NoScaleAndMaskIgnored),
    Pair(("no scale", "mask inverted"), NoScaleAndMaskInverted),
    Pair(("no scale", "mask after softmax"), NoScaleAndMaskAfterSoftmax),
    Pair(("no scale", "fill with zero"), NoScaleAndFillWithZero),
    Pair(("no scale", "no output projection"), NoScaleAndNoOutputProjection),
    Pair(("scale by d_model", "split by view"), ScaleByDModelAndSplitByView),
    Pair(("scale by d_model", "merge without transpose"), ScaleByDModelAndMergeWithoutTranspose),
    Pair(("scale by d_model", "softmax over queries"), ScaleByDModelAndSoftmaxOverQueries),
    Pair(("scale by d_model", "mask ignored"), ScaleByDModelAndMaskIgnored),
    Pair(("scale by d_model", "mask inverted"), ScaleByDModelAndMaskInverted),
    Pair(("scale by d_model", "mask after softmax"), ScaleByDModelAndMaskAfterSoftmax),
    Pair(("scale by d_model", "fill with zero"), ScaleByDModelAndFillWithZero),
    Pair(("scale by d_model", "no output projection"), ScaleByDModelAndNoOutputProjection),
    Pair(("split by view", "merge without transpose"), SplitByViewAndMergeWithoutTranspose),
    Pair(("split by view", "softmax over queries"), SplitByViewAndSoftmaxOverQueries),
    Pair(("split by view", "mask ignored"), SplitByViewAndMaskIgnored),
    Pair(("split by view", "mask inverted"), SplitByViewAndMaskInverted),
    Pair(("split by view", "mask after softmax"), SplitByViewAndMaskAfterSoftmax),
    Pair(("split by view", "fill with zero"), SplitByViewAndFillWithZero),
    Pair(("split by view", "no output projection"), SplitByViewAndNoOutputProjection),
    Pair(("merge without transpose", "softmax over queries"), MergeWithoutTransposeAndSoftmaxOverQueries),
    Pair(("merge without transpose", "mask ignored"), MergeWithoutTransposeAndMaskIgnored),
    Pair(("merge without transpose", "mask inverted"), MergeWithoutTransposeAndMaskInverted),
    Pair(("merge without transpose", "mask after softmax"), MergeWithoutTransposeAndMaskAfterSoftmax),
    Pair(("merge without transpose", "fill with zero"), MergeWithoutTransposeAndFillWithZero),
    Pair(("merge without transpose", "no output projection"), MergeWithoutTransposeAndNoOutputProjection),
    Pair(("softmax over queries", "mask ignored"), SoftmaxOverQueriesAndMaskIgnored),
    Pair(("softmax over queries", "mask inverted"), SoftmaxOverQueriesAndMaskInverted),
    Pair(("softmax over queries", "mask after softmax"), SoftmaxOverQueriesAndMaskAfterSoftmax),
    Pair(("softmax over queries", "fill with zero"), SoftmaxOverQueriesAndFillWithZero),
    Pair(("softmax over queries", "no output projection"), SoftmaxOverQueriesAndNoOutputProjection),
    Pair(("mask ignored", "no output projection"), MaskIgnoredAndNoOutputProjection),
    Pair(("mask inverted", "mask after softmax"), MaskInvertedAndMaskAfterSoftmax),
    Pair(("mask inverted", "fill with zero"), MaskInvertedAndFillWithZero),
    Pair(("mask inverted", "no output projection"), MaskInvertedAndNoOutputProjection),
    Pair(("mask after softmax", "no output projection"), MaskAfterSoftmaxAndNoOutputProjection),
    Pair(("fill with zero", "no output projection"), FillWithZeroAndNoOutputProjection),
]

LEFT_OUT = {
    ("no scale", "scale by d_model"): "one division, one divisor",
    ("mask ignored", "mask inverted"): "a mask that is not used has no polarity",
    ("mask ignored", "mask after softmax"): "a mask that is not used is used nowhere",
    ("mask ignored", "fill with zero"): "a mask that is not used fills nothing",
    ("mask after softmax", "fill with zero"): "the mask is applied either to the scores or to the weights",
}
"""Pairs in one place that cannot both be there, and why."""
