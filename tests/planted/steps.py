"""Single steps of attention, and whole blocks, as learners write them: right ones, and each with one mistake.

`RIGHT` holds (code, words of its report), `WRONG` (code, the fault it must be named by).
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as learners write it
from torch import nn

RIGHT: list[tuple[Callable[..., Any], str]] = []  # code, words of its report
WRONG: list[tuple[Callable[..., Any], str]] = []  # code, the fault


def right(words: str) -> Callable[[Any], Any]:
    def keep(code: Any) -> Any:
        RIGHT.append((code, words))
        return code

    return keep


def wrong(fault: str) -> Callable[[Any], Any]:
    def keep(code: Any) -> Any:
        WRONG.append((code, fault))
        return code

    return keep


# Softmax


@right("over the axis it is given")
def softmax(x, dim=-1):
    e = torch.exp(x - x.max(dim, keepdim=True).values)
    return e / e.sum(dim, keepdim=True)


@right("over the last axis")
def softmax_of_arrays(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


@right("over the axis it is given")
def stable_softmax(scores, axis):
    return (scores - scores.logsumexp(axis, keepdim=True)).exp()


@right("of a matrix")
def softmax_of_rows(X):
    X = X - X.amax(1, keepdim=True)
    return X.exp() / X.exp().sum(1, keepdim=True)


@right("of one vector")
def softmax_of_a_vector(x):
    """The softmax of a vector."""
    e = np.exp(x - np.max(x))
    return e / e.sum()


@right("over the last axis")
def softmax_by_loops(x):
    rows = [
        torch.exp(row - row.max()) / torch.exp(row - row.max()).sum() for row in x.reshape(-1, x.shape[-1])
    ]
    return torch.stack(rows).reshape(x.shape)


@right("over the last axis")
class OwnSoftmax(nn.Module):
    def __init__(self, dim=-1):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        e = torch.exp(x - x.amax(self.dim, keepdim=True))
        return e / e.sum(self.dim, keepdim=True)


@wrong("own softmax over the wrong axis")
def softmax_over_rows(x):
    e = torch.exp(x - x.amax(0, keepdim=True))
    return e / e.sum(0, keepdim=True)


@wrong("own softmax ignores its axis")
def softmax_deaf(x, dim=-1):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@wrong("own softmax over everything")
def softmax_in_all(x):
    e = np.exp(x - np.max(x))
    return e / e.sum()


@wrong("own softmax not normalised")
def softmax_bare(x):
    return torch.exp(x - x.amax(-1, keepdim=True))


@wrong("own softmax is a log-softmax")
def softmax_as_log(x):
    return x - torch.logsumexp(x, -1, keepdim=True)


@wrong("own softmax of the negative")
def softmax_upside_down(x):
    e = torch.exp(x.amax(-1, keepdim=True) - x)
    return 1 / e / (1 / e).sum(-1, keepdim=True) if False else e / e.sum(-1, keepdim=True)


@wrong("own softmax without exp")
def softmax_of_shares(x):
    return x / x.sum(-1, keepdim=True)


@wrong("own softmax with another base")
def softmax_of_two(x):
    e = 2 ** (x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@wrong("own softmax is a sigmoid")
def softmax_each_alone(x):
    return 1 / (1 + torch.exp(-x))


@wrong("own softmax overflows")
def softmax_without_maximum(x):
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


@wrong("input modified")
def softmax_in_place(x):
    x -= x.amax(-1, keepdim=True)
    return x.exp() / x.exp().sum(-1, keepdim=True)


# Splitting


@right("[B, H, T, D]")
def split_heads(x, num_heads):
    B, T, E = x.shape
    return x.view(B, T, num_heads, E // num_heads).transpose(1, 2)


@right("[B * H, T, D]")
def transpose_qkv(X, num_heads):
    X = X.reshape(X.shape[0], X.shape[1], num_heads, -1).permute(0, 2, 1, 3)
    return X.reshape(-1, X.shape[2], X.shape[3])


@right("[H, B, T, D]")
def split_heads_by_chunks(x, n_heads):
    return x.chunk(n_heads, dim=-1)


@right("[B, H, T, D]")
def split_heads_of_arrays(x, n_heads):
    b, t, e = x.shape
    return np.transpose(np.reshape(x, (b, t, n_heads, e // n_heads)), (0, 2, 1, 3))


@right("[B, H, T, D]")
def split_into_heads(x, h, d_k):
    out = torch.zeros(x.shape[0], h, x.shape[1], d_k, dtype=x.dtype)
    for head in range(h):
        out[:, head] = x[:, :, head * d_k : (head + 1) * d_k]
    return out


@right("[B, T, H, D]")
def split_heads_behind(x, n_heads):
    return x.unflatten(-1, (n_heads, -1))


@right("[H, T, D]")
def split_heads_of_one_sequence(x, n_heads):
    T, E = x.shape
    return x.view(T, n_heads, E // n_heads).transpose(0, 1)


@right("[B * H, T, D] of an input [T, B, E]")
def split_heads_as_torch(x, num_heads):
    T, B, E = x.shape
    return x.reshape(T, B * num_heads, E // num_heads).transpose(0, 1)


HEADS, WIDTH = 4, 8


@right("[B, H, T, D]")
def split_heads_of_the_file(x):
    return x.view(x.size(0), x.size(1), HEADS, WIDTH).transpose(1, 2)


@wrong("heads split by view")
def split_heads_viewed(x, num_heads):
    B, T, E = x.shape
    return x.view(B, num_heads, T, E // num_heads)


@wrong("heads split by view")
def split_heads_viewed_in_the_batch(x, num_heads):
    B, T, E = x.shape
    return x.reshape(B * num_heads, T, E // num_heads)


@wrong("heads split by view")
def split_heads_viewed_of_one_sequence(x, num_heads):
    T, E = x.shape
    return x.view(num_heads, T, E // num_heads)


@wrong("heads and their widths exchanged")
def split_heads_exchanged(x, num_heads):
    B, T, E = x.shape
    return x.view(B, T, E // num_heads, num_heads).transpose(1, 2)


@wrong("channels dealt out in turn")
def split_heads_dealt_out(x, num_heads):
    B, T, E = x.shape
    return x.view(B, T, E // num_heads, num_heads).permute(0, 3, 1, 2)


@wrong("not split")
def split_heads_alone(x, num_heads):
    return x.unsqueeze(1)


@wrong("every head gets everything")
def split_heads_copied(x, num_heads):
    return x.unsqueeze(1).repeat(1, num_heads, 1, 1)


@wrong("heads split, axes in the wrong order")
def split_heads_turned(x, num_heads):
    B, T, E = x.shape
    return x.view(B, T, num_heads, E // num_heads).transpose(2, 3)


@wrong("number of heads ignored")
def split_heads_in_four(x, num_heads):
    B, T, E = x.shape
    return x.view(B, T, 4, E // 4).transpose(1, 2)


@wrong("split for one size only")
def split_heads_of_one_size(x, num_heads):
    return x.view(2, 5, num_heads, -1).transpose(1, 2)


@wrong("split for its callers in the wrong layout")
def split_heads_promised(x, num_heads):
    """Returns (batch, num_heads, seq_len, d_k)."""
    B, T, E = x.shape
    return x.view(B, T, num_heads, E // num_heads)


# Merging


@right("[B, H, T, D]")
def merge_heads(x):
    B, H, T, D = x.shape
    return x.transpose(1, 2).reshape(B, T, H * D)


@right("[B, H, T, D]")
def combine_heads(x):
    return torch.einsum("bhtd->bthd", x).flatten(2)


@right("[B, H, T, D]")
def concat_heads(x):
    return torch.cat([x[:, i] for i in range(x.shape[1])], dim=-1)


@right("[B, H, T, D]")
def merge_heads_of_arrays(x):
    b, h, t, d = x.shape
    return x.transpose(0, 2, 1, 3).reshape(b, t, h * d)


@right("[B * H, T, D]")
def transpose_output(X, num_heads):
    X = X.reshape(-1, num_heads, X.shape[1], X.shape[2]).permute(0, 2, 1, 3)
    return X.reshape(X.shape[0], X.shape[1], -1)


@right("[B, T, H, D]")
def merge_heads_behind(x):
    return x.flatten(2)


@wrong("heads merged without a transpose")
def merge_heads_viewed(x):
    B, H, T, D = x.shape
    return x.reshape(B, T, H * D)


@right("[H, T, D]")
def merge_heads_of_one_sequence(x):
    H, T, D = x.shape
    return x.transpose(0, 1).reshape(T, H * D)


@wrong("heads merged without a transpose")
def merge_heads_viewed_of_one_sequence(x):
    H, T, D = x.shape
    return x.reshape(T, H * D)


@wrong("heads merged interleaved")
def merge_heads_in_turn(x):
    B, H, T, D = x.shape
    return x.permute(0, 2, 3, 1).reshape(B, T, H * D)


@wrong("heads merged in the wrong order")
def merge_heads_turned(x):
    B, H, T, D = x.shape
    return x.permute(0, 3, 1, 2).reshape(B, T, H * D)


@wrong("heads stacked along the sequence")
def merge_heads_stacked(x):
    B, H, T, D = x.shape
    return x.reshape(B, H * T, D)


@wrong("heads added together")
def merge_heads_summed(x):
    return x.sum(1)


@wrong("merge for one size only")
def merge_heads_of_one_size(x):
    return x.transpose(1, 2).reshape(2, 5, -1)


@wrong("view after transpose")
def merge_heads_not_contiguous(x):
    B, H, T, D = x.shape
    return x.transpose(1, 2).view(B, T, H * D)


# Masks


@right("attends to itself and those before it")
def causal_mask(n):
    return torch.tril(torch.ones(n, n)).bool()


@right("attends to itself and those before it")
def subsequent_mask(size):
    return torch.triu(torch.ones(1, size, size), diagonal=1).type(torch.uint8) == 0


@right("-inf where a key is hidden")
def generate_square_subsequent_mask(sz):
    return torch.triu(torch.full((sz, sz), float("-inf")), 1)


@right("1 where a key is hidden")
def create_look_ahead_mask(size):
    return 1 - np.tril(np.ones((size, size)))


@right("True where a key is hidden")
def causal_mask_like(x):
    T = x.size(1)
    return torch.ones(T, T, dtype=torch.bool).triu(1)


@right("[B, 1, 1, S]")
def create_padding_mask(seq, pad_id=0):
    return (seq == pad_id)[:, None, None, :]


@right("[B, S]")
def make_pad_mask(lengths, max_len=None):
    max_len = max_len or int(lengths.max())
    return torch.arange(max_len) >= lengths[:, None]


@right("[B, T, S]")
def get_attn_pad_mask(seq_q, seq_k):
    return seq_k.eq(0).unsqueeze(1).expand(seq_q.size(0), seq_q.size(1), seq_k.size(1))


@right("padding and the future are hidden")
def make_std_mask(tgt, pad):
    return (tgt != pad).unsqueeze(-2) & subsequent_mask(tgt.size(-1))


@wrong("mask hides the position itself")
def causal_mask_of_others(n):
    """True where a key is hidden."""
    return torch.triu(torch.ones(n, n)).bool()


@wrong("mask shows the next position")
def causal_mask_too_kind(n):
    return torch.tril(torch.ones(n, n), diagonal=1)


@wrong("mask shows the future")
def causal_mask_flipped(n):
    return torch.full((n, n), float("-inf")).tril(-1)


@wrong("mask added with the signs exchanged")
def causal_mask_of_signs(n):
    return torch.full((n, n), float("-inf")).tril(0)


@wrong("mask holds NaN")
def causal_mask_times_infinity(n):
    return torch.triu(torch.ones(n, n), 1) * float("-inf")


@wrong("mask says the opposite of its words")
def causal_mask_of_words(n):
    """True where a query may attend."""
    return torch.triu(torch.ones(n, n), 1).bool()


@wrong("mask of 0 and 1 that is to be added")
def causal_mask_to_add(n):
    """To be added to the scores."""
    return torch.triu(torch.ones(n, n), 1)


@wrong("mask lets padding or the future through")
def make_std_mask_by_or(tgt, pad):
    return (tgt != pad)[:, None, None, :] | torch.tril(torch.ones(tgt.size(1), tgt.size(1))).bool()


@wrong("padding mask on the queries")
def padding_mask_of_rows(ids, pad_id=0):
    return (ids != pad_id)[:, None, :, None]


@wrong("padding mask off by one")
def padding_mask_of_lengths(lengths, max_len):
    return torch.arange(max_len) <= lengths[:, None]


@wrong("pad id ignored")
def padding_mask_of_zero(ids, pad_id):
    return (ids != 0)[:, None, None, :]


@wrong("mask hides nothing")
def causal_mask_of_ones(n):
    return torch.ones(n, n).bool()


# Scores and weights of q and k; methods


@right("softmax(q k^T / sqrt(d_k))")
def attention_weights(q, k):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-1)


@right("q k^T")
def attention_scores(q, k):
    return torch.einsum("bhtd,bhsd->bhts", q, k)


@right("q k^T / sqrt(d_k)")
def scaled_scores(q, k):
    return torch.einsum("bhtd,bhsd->bhts", q, k) / q.shape[-1] ** 0.5


@wrong("softmax over queries")
def weights_over_queries(q, k):
    return (q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))).softmax(-2)


@wrong("no scale")
def scaled_scores_in_name_alone(q, k):
    return q @ k.transpose(-2, -1)


class Whole(nn.Module):
    """What methods are taken of."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.w = nn.Linear(d_model, d_model)

    @right("[B, H, T, D]")
    def split_heads(self, x, batch_size):
        return x.view(batch_size, -1, self.num_heads, self.d_k).transpose(1, 2)

    @wrong("heads split by view")
    def split_heads_viewed(self, x):
        return x.view(x.size(0), self.num_heads, -1, self.d_k)

    @right("[B, H, T, D]")
    def merge_heads(self, x):
        return x.transpose(1, 2).contiguous().view(x.size(0), -1, self.num_heads * self.d_k)

    @right("scaled_dot_product_attention")
    def attention(self, q, k, v):
        return (q @ k.transpose(-1, -2) / self.d_k**0.5).softmax(-1) @ v


# Blocks


class Feed(nn.Module):
    def __init__(self, d, last=None):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 5 * d), nn.GELU(), nn.Linear(5 * d, d), *(last or ()))

    def forward(self, x):
        return self.net(x)


class Parts(nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.ff = Feed(d_model)
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def attend(self, x):
        return self.attn(x, x, x)[0]


@right("pre-norm")
class PreBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = x + self.attend(self.ln1(x))
        return x + self.ff(self.ln2(x))


@right("post-norm")
class PostBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = self.ln1(x + self.attend(x))
        return self.ln2(x + self.ff(x))


@right("in parallel")
class ParallelBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        h = self.ln1(x)
        return x + self.attend(h) + self.ff(h)


@right("inside the residual")
class InsideBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = x + self.ln1(self.attend(x))
        return x + self.ln2(self.ff(x))


@right("feed-forward 24 to 53 with ReLU")
class FlatBlock(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.1):
        super().__init__()
        self.mha = nn.MultiheadAttention(embed_dim, num_heads, dropout, batch_first=True)
        self.linear1, self.linear2 = nn.Linear(embed_dim, 53), nn.Linear(53, embed_dim)
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.drop = nn.Dropout(dropout)

    def last(self, x):
        return x

    def forward(self, src):
        x = self.norm1(src + self.drop(self.mha(src, src, src)[0]))
        return self.norm2(x + self.drop(self.last(self.linear2(F.relu(self.linear1(x))))))


@right("cross-attention over the memory")
class DecoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.cross_attn = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.n1, self.n2, self.n3 = (nn.LayerNorm(d_model) for _ in range(3))

    def cross(self, x, memory):
        return self.cross_attn(x, memory, memory)[0]

    def forward(self, x, memory):
        h = self.n1(x)
        x = x + self.self_attn(h, h, h)[0]
        x = x + self.cross(self.n2(x), memory)
        return x + self.ffn(self.n3(x))


@wrong("memory not used")
class DecoderLayerAlone(DecoderLayer):
    def cross(self, x, memory):
        return self.cross_attn(x, x, x)[0]


@wrong("queries from the memory")
class AskedDecoderLayer(DecoderLayer):
    def cross(self, x, memory):
        return self.cross_attn(memory, x, x)[0][:, : x.shape[1]]


@wrong("no residual around attention")
class LostBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = self.attend(self.ln1(x))
        return x + self.ff(self.ln2(x))


@wrong("no residual around feed-forward")
class LostAgainBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = x + self.attend(self.ln1(x))
        return self.ff(self.ln2(x))


@wrong("residual from the wrong place")
class NormedBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = self.ln1(x)
        x = x + self.attend(x)
        x = self.ln2(x)
        return x + self.ff(x)


@wrong("residual from the wrong place")
class ForgetfulBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        h = self.ln1(x + self.attend(x))
        return self.ln2(x + self.ff(h))


@wrong("norm missing in the block")
class HalfBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = x + self.attend(self.ln1(x))
        return x + self.ff(x)


@wrong("feed-forward before attention")
class TurnedBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = x + self.ff(self.ln1(x))
        return x + self.attend(self.ln2(x))


@wrong("feed-forward without activation")
class LinearBlock(PreBlock):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.ff = nn.Sequential(nn.Linear(d_model, 53), nn.Linear(53, d_model))


@wrong("activation after the feed-forward")
class CutBlock(PreBlock):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.ff = Feed(d_model, [nn.ReLU()])


@wrong("activation after the feed-forward")
class CutFlatBlock(FlatBlock):
    def last(self, x):
        return F.relu(x)


class OwnNorm(nn.Module):
    def forward(self, x):
        return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6)


@wrong("norm over the wrong axis")
class SidewaysBlock(PreBlock):
    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.ln1 = OwnNorm()


@wrong("dropout in eval")
class DroppedBlock(Parts):
    """attn, ff"""

    def forward(self, x):
        x = x + F.dropout(self.attend(self.ln1(x)), 0.1)
        return x + self.ff(self.ln2(x))


class Unscaled(nn.Module):
    """Attention without a scale."""

    def __init__(self, d_model, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            f(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for f in (self.W_q, self.W_k, self.W_v)
        )
        return self.W_o(((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(1, 2).flatten(2))


@wrong("no scale")
class SharpBlock(Parts):
    """attn, ff"""

    def __init__(self, d_model, n_heads):
        super().__init__(d_model, n_heads)
        self.attn = Unscaled(d_model, n_heads)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.ff(self.ln2(x))
