"""Scripts that do not run, or run and crash, as text: each is written to a file and given to the examiner.

`SOURCES` maps a name to the text; `MESSAGES` says what is wrong with it and on which line, counted from 1
(None where no line is to blame). A script that ends with a call crashes when it is run, the others when
called.
"""

UNDEFINED_F = """\
import math

import torch
import torch.nn as nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        B, T, E = q.shape
        q = self.W_q(q).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        k = self.W_k(k).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        v = self.W_v(v).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        out = (weights @ v).transpose(1, 2).reshape(B, T, E)
        return self.W_o(out)
"""

UNDEFINED_BATCH_SIZE = """\
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim)
        self.out = nn.Linear(embed_dim, embed_dim)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q = q.view(batch_size, -1, self.num_heads, self.head_dim).transpose(1, 2)
        k = k.view(batch_size, -1, self.num_heads, self.head_dim).transpose(1, 2)
        v = v.view(batch_size, -1, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        out = F.softmax(scores, dim=-1) @ v
        return self.out(out.transpose(1, 2).reshape(x.shape))
"""

MISSING_IMPORT_OF_TORCH = """\
import math

from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(d_model, d_model)
        self.k_proj = nn.Linear(d_model, d_model)
        self.v_proj = nn.Linear(d_model, d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def forward(self, query, key, value):
        B, T, E = query.shape
        D = E // self.num_heads
        q = self.q_proj(query).view(B, -1, self.num_heads, D).transpose(1, 2)
        k = self.k_proj(key).view(B, -1, self.num_heads, D).transpose(1, 2)
        v = self.v_proj(value).view(B, -1, self.num_heads, D).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(D)
        out = torch.matmul(scores.softmax(dim=-1), v)
        return self.out_proj(out.transpose(1, 2).reshape(B, T, E))
"""

MISSING_IMPORT_OF_NN = """\
import torch


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).flatten(2))
"""

MISSING_IMPORT_OF_MATH = """\
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(C // self.num_heads)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
"""

MISSING_PACKAGE = """\
import torch
from torch import nn
from einopps import rearrange


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in self.to_qkv(x).chunk(3, -1))
        attn = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out(rearrange(attn @ v, "b h n d -> b n (h d)"))
"""

SYNTAX_ERROR = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.W_q = nn.Linear(d_model, d_model
        self.W_k = nn.Linear(d_model, d_model)

    def forward(self, q, k, v):
        return q
"""

INDENTATION_ERROR = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
          self.W_q = nn.Linear(d_model, d_model)

    def forward(self, q, k, v):
        return q
"""

MISSING_SUPER_INIT = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        self.num_heads = num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, q, k, v):
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer, x in ((self.W_q, q), (self.W_k, k), (self.W_v, v))
        )
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(dim=-1)
        return self.W_o((weights @ v).transpose(1, 2).flatten(2))


layer = MultiHeadAttention(24, 4)
"""

MISSPELT_INIT = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __int__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


layer = MultiHeadAttention(24, 4)
"""

VIEW_AFTER_TRANSPOSE = """\
import math

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model, self.num_heads = d_model, num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, q, k, v):
        B, T, _ = q.shape
        q = self.W_q(q).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        k = self.W_k(k).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        v = self.W_v(v).view(B, -1, self.num_heads, self.d_k).transpose(1, 2)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        out = scores.softmax(dim=-1) @ v
        out = out.transpose(1, 2).view(B, T, self.d_model)
        return self.W_o(out)


x = torch.randn(2, 5, 24)
MultiHeadAttention(24, 4)(x, x, x)
"""

KEYS_NOT_TRANSPOSED = """\
import math

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k) / math.sqrt(E // self.num_heads)
        out = torch.matmul(scores.softmax(dim=-1), v)
        return self.proj(out.transpose(1, 2).reshape(B, T, E))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

KEYS_TRANSPOSED_WRONG = """\
import math

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(q, k.transpose(1, 2)) / math.sqrt(E // self.num_heads)
        out = torch.matmul(scores.softmax(dim=-1), v)
        return self.proj(out.transpose(1, 2).reshape(B, T, E))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

PROJECTION_TOO_NARROW = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, self.d_k)
        self.W_k = nn.Linear(d_model, self.d_k)
        self.W_v = nn.Linear(d_model, self.d_k)
        self.W_o = nn.Linear(d_model, d_model)

    def forward(self, q, k, v):
        B, T, E = q.shape
        q = self.W_q(q).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        k = self.W_k(k).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        v = self.W_v(v).view(B, T, self.num_heads, self.d_k).transpose(1, 2)
        weights = (q @ k.mT / self.d_k**0.5).softmax(dim=-1)
        return self.W_o((weights @ v).transpose(1, 2).reshape(B, T, E))


x = torch.randn(2, 5, 24)
MultiHeadAttention(24, 4)(x, x, x)
"""

OUTPUT_LAYER_TOO_NARROW = """\
import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, d_model, head_size):
        super().__init__()
        self.query = nn.Linear(d_model, head_size)
        self.key = nn.Linear(d_model, head_size)
        self.value = nn.Linear(d_model, head_size)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        return (q @ k.mT / q.size(-1) ** 0.5).softmax(dim=-1) @ v


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        head_size = d_model // num_heads
        self.heads = nn.ModuleList(Head(d_model, head_size) for _ in range(num_heads))
        self.proj = nn.Linear(head_size, d_model)

    def forward(self, x):
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

HEADS_NOT_DIVIDING = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model=512, num_heads=12):
        super().__init__()
        self.num_heads = num_heads
        self.size = d_model // num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = (t.view(B, T, self.num_heads, self.size).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / self.size**0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, T, E))


MultiHeadAttention()(torch.randn(2, 5, 512))
"""

HEADS_ASSERTED = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, num_heads, d_model):
        super().__init__()
        assert d_model % num_heads == 0, "d_model must be divisible by num_heads"
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


layer = MultiHeadAttention(24, 4)
"""

FLOAT_HEAD_DIM = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model / num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        B, T, E = x.shape
        q, k, v = (t.view(B, T, self.num_heads, self.d_k).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / self.d_k**0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(B, T, E))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

MISSING_SELF = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

ATTRIBUTE_NEVER_SET = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.n_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

NO_FORWARD = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def foward(self, x):
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

RETURNS_NOTHING = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(dim=-1)
        out = self.proj((weights @ v).transpose(1, 2).flatten(2))
"""

MASK_NOT_BOOLEAN = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        T = x.size(1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(torch.triu(torch.ones(T, T), diagonal=1), float("-inf"))
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

INVERTED_FLOAT_MASK = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        T = x.size(1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / q.size(-1) ** 0.5
        scores = scores.masked_fill(~torch.tril(torch.ones(T, T)), float("-inf"))
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

UNPACKED_WRONG = """\
import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        T, E = x.shape
        q, k, v = (t.view(T, self.num_heads, -1).transpose(0, 1) for t in self.qkv(x).chunk(3, -1))
        weights = (q @ k.mT / q.size(-1) ** 0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(0, 1).reshape(T, E))


MultiHeadAttention(24, 4)(torch.randn(2, 5, 24))
"""

NO_ATTENTION_HERE = """\
import torch


def softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum()


print(softmax(torch.tensor([1.0, 2.0, 3.0])))
"""

SOURCES: dict[str, str] = {
    "undefined F": UNDEFINED_F,
    "undefined batch_size": UNDEFINED_BATCH_SIZE,
    "missing import of torch": MISSING_IMPORT_OF_TORCH,
    "missing import of nn": MISSING_IMPORT_OF_NN,
    "missing import of math": MISSING_IMPORT_OF_MATH,
    "missing package": MISSING_PACKAGE,
    "syntax error": SYNTAX_ERROR,
    "indentation error": INDENTATION_ERROR,
    "missing super().__init__()": MISSING_SUPER_INIT,
    "misspelt __init__": MISSPELT_INIT,
    "view after transpose": VIEW_AFTER_TRANSPOSE,
    "keys not transposed": KEYS_NOT_TRANSPOSED,
    "keys transposed wrong": KEYS_TRANSPOSED_WRONG,
    "projection too narrow": PROJECTION_TOO_NARROW,
    "output layer too narrow": OUTPUT_LAYER_TOO_NARROW,
    "heads not dividing": HEADS_NOT_DIVIDING,
    "heads asserted": HEADS_ASSERTED,
    "float head dim": FLOAT_HEAD_DIM,
    "missing self": MISSING_SELF,
    "attribute never set": ATTRIBUTE_NEVER_SET,
    "no forward": NO_FORWARD,
    "returns nothing": RETURNS_NOTHING,
    "mask not boolean": MASK_NOT_BOOLEAN,
    "inverted float mask": INVERTED_FLOAT_MASK,
    "unpacked wrong": UNPACKED_WRONG,
    "no attention here": NO_ATTENTION_HERE,
}

MESSAGES: dict[str, tuple[int | None, str, str]] = {
    "undefined F": (25, "NameError", "torch.nn.functional was never imported as F"),
    "undefined batch_size": (17, "NameError", "x.shape was never unpacked"),
    "missing import of torch": (21, "NameError", "only nn was imported from torch"),
    "missing import of nn": (4, "NameError", "torch.nn was never imported as nn"),
    "missing import of math": (15, "NameError", "math was never imported"),
    "missing package": (
        3,
        "ModuleNotFoundError",
        "einops misspelt; in general a package that is not installed",
    ),
    "syntax error": (9, "SyntaxError", "a bracket is never closed"),
    "indentation error": (9, "IndentationError", "two spaces too many"),
    "missing super().__init__()": (8, "AttributeError", "nn.Module was never set up"),
    "misspelt __init__": (18, "TypeError", "__int__ for __init__ (line 6): nn.Module takes no arguments"),
    "view after transpose": (24, "RuntimeError", "contiguous() or reshape is needed"),
    "keys not transposed": (17, "RuntimeError", "[T, D] @ [T, D]"),
    "keys transposed wrong": (
        17,
        "RuntimeError",
        "transpose(1, 2) of [B, H, T, D] swaps heads and positions",
    ),
    "projection too narrow": (17, "RuntimeError", "[E, D] layers: one head's width for all of them"),
    "output layer too narrow": (25, "RuntimeError", "Linear(D, E) (line 22) is given E features"),
    "heads not dividing": (15, "RuntimeError", "512 is not a multiple of 12"),
    "heads asserted": (8, "AssertionError", "the caller swapped d_model and num_heads (line 19)"),
    "float head dim": (15, "TypeError", "/ for // (line 9)"),
    "missing self": (13, "NameError", "num_heads for self.num_heads"),
    "attribute never set": (13, "AttributeError", "self.n_heads was set, self.num_heads is read"),
    "no forward": (18, "NotImplementedError", "foward (line 12): nn.Module finds no forward"),
    "returns nothing": (15, "", "no return: forward gives None"),
    "mask not boolean": (16, "RuntimeError", "masked_fill takes a boolean mask, triu of ones is float"),
    "inverted float mask": (16, "TypeError", "~ needs a boolean, tril of ones is float"),
    "unpacked wrong": (13, "ValueError", "x has a batch axis"),
    "no attention here": (None, "", "nothing to examine: a function of one vector"),
}
"""Line, name of the error (empty where nothing is raised), and what is wrong."""
