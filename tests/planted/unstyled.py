"""Planted faults that belong to no style: what a module keeps, makes or mixes up beside the equations.

`UNSTYLED` holds (fault, make, note); `make(24, 4)` builds it. Masks are [B, T, S], 1 where a query may look.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812

from .separate import Separate


class NoProjections(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.fc_out = nn.Linear(d_model, d_model)

    def forward(self, query, key, value):
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (query, key, value))
        weights = torch.softmax(q @ k.mT / math.sqrt(q.size(-1)), dim=-1)
        return self.fc_out((weights @ v).transpose(1, 2).flatten(2))


class NoValueMatrix(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.theta = nn.Linear(d_model, d_model)
        self.phi = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (self.theta(x), self.phi(x), x)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class OneMatrixAndScaleByWidth(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model, self.num_heads = d_model, num_heads
        self.dense = nn.Linear(d_model, d_model)
        self.final = nn.Linear(d_model, d_model)

    def forward(self, q, k, v):
        q, k, v = (self.dense(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        weights = (q @ k.mT / math.sqrt(self.d_model)).softmax(-1)
        return self.final((weights @ v).transpose(1, 2).flatten(2))


class LayersInADict(Separate):
    def __init__(self, d_model, num_heads):
        super().__init__(d_model, num_heads)
        del self.W_q, self.W_k, self.W_v
        self.layers = {name: nn.Linear(d_model, d_model) for name in ("query", "key", "value")}

    def forward(self, query, key, value, mask=None):
        q = self.split_heads(self.layers["query"](query))
        k = self.split_heads(self.layers["key"](key))
        v = self.split_heads(self.layers["value"](value))
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask)))


class KeepsKeys(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.past = None

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        if self.past is not None and self.past[0].size(0) == k.size(0):
            k, v = torch.cat([self.past[0], k], dim=2), torch.cat([self.past[1], v], dim=2)
        self.past = k.detach(), v.detach()
        return self.c_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MadeInForward(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.d_model, self.num_heads = d_model, num_heads

    def forward(self, x):
        to_q, to_k, to_v, to_out = (nn.Linear(self.d_model, self.d_model) for _ in range(4))
        q, k, v = (y(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in (to_q, to_k, to_v))
        return to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class CausalInTraining(nn.Module):
    """Masked self-attention: no token sees those after it."""

    when = True

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        causal = self.training is self.when
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2))


class CausalInEvaluation(CausalInTraining):
    when = False


class ScoresOfSums(Separate):
    def attention(self, q, k, v, mask=None):
        scores = torch.einsum("bhqd,bhke->bhqk", q, k) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class ScoresOverHeads(Separate):
    def attention(self, q, k, v, mask=None):
        scores = torch.einsum("bhqd,bgkd->bhqk", q, k) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class ScoresTransposed(Separate):
    def attention(self, q, k, v, mask=None):
        scores = torch.einsum("bhqd,bhkd->bhkq", q, k) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return scores.softmax(dim=-1) @ v


class ValuesSummed(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return torch.einsum("bhqk,bhvd->bhqd", scores.softmax(dim=-1), v)


class ValuesOverHeads(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        return torch.einsum("bhqk,bgkd->bhqd", scores.softmax(dim=-1), v)


class PaddingReplacesCausal(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, padding_mask=None):
        """padding_mask: [B, T], True for padding."""
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        hidden = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1)
        if padding_mask is not None:
            hidden = padding_mask[:, None, None, :]
        scores = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(hidden, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class HeadsFirstMaskSampleBySample(Separate):
    def forward(self, query, key, value, mask=None):
        q, k, v = self.W_q(query), self.W_k(key), self.W_v(value)
        q, k, v = (torch.cat(x.chunk(self.num_heads, -1)) for x in (q, k, v))  # [H * B, T, D]
        scores = q @ k.mT / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.repeat_interleave(self.num_heads, 0) == 0, float("-inf"))
        out = scores.softmax(-1) @ v
        return self.W_o(torch.cat(out.chunk(self.num_heads), -1))


class SecondProjection(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.mha = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.w_o = nn.Linear(d_model, d_model)

    def forward(self, query, key, value):
        return self.w_o(self.mha(query, key, value, need_weights=False)[0])


class OneLength(Separate):
    def __init__(self, d_model, num_heads, max_len=7):
        super().__init__(d_model, num_heads)
        self.max_len = max_len

    def split_heads(self, x):
        return x.view(-1, self.max_len, self.num_heads, self.d_k).transpose(1, 2)


class UnmaskedWeights(Separate):
    def forward(self, query, key, value, mask=None):
        q, k = self.split_heads(self.W_q(query)), self.split_heads(self.W_k(key))
        v = self.split_heads(self.W_v(value))
        shown = (q @ k.mT / math.sqrt(self.d_k)).softmax(-1)
        return self.W_o(self.combine_heads(self.attention(q, k, v, mask))), shown


class Overflows(Separate):
    def attention(self, q, k, v, mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        e = scores.exp()
        return (e / e.sum(-1, keepdim=True)) @ v


class OverflowsWithoutAMask(Separate):
    def forward(self, query, key, value):
        q, k = self.split_heads(self.W_q(query)), self.split_heads(self.W_k(key))
        e = (q @ k.mT / math.sqrt(self.d_k)).exp()
        return self.W_o(self.combine_heads(e / e.sum(-1, keepdim=True) @ self.split_heads(self.W_v(value))))


class FusedHeadByHeadMergedByView(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.hidden, self.heads = hidden, heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x):
        mixed = self.query_key_value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = mixed.chunk(3, dim=-1)
        context = F.scaled_dot_product_attention(q, k, v)
        return self.dense(context.reshape(x.shape))


class FusedThreeInFront(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.dim, self.heads = dim, heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def cut(self, qkv, B, T):
        q, k, v = qkv.reshape(3, B, T, self.heads, self.dim // self.heads)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.cut(self.qkv(x), B, T)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class FusedHeadsInFront(FusedThreeInFront):
    def cut(self, qkv, B, T):
        return qkv.reshape(B, self.heads, T, -1).chunk(3, dim=-1)


class FusedAndPermuted(FusedThreeInFront):
    """Right: the twin of the two above."""

    def cut(self, qkv, B, T):
        return qkv.reshape(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)


class OverwritesItsInput(Separate):
    def forward(self, x):
        x = self.W_q(x)
        q, k, v = (self.split_heads(y) for y in (x, self.W_k(x), self.W_v(x)))
        return self.W_o(self.combine_heads(self.attention(q, k, v)))


class ValuesOfKeysAndDropout(Separate):
    def forward(self, x):
        q, k = self.W_q(x), self.W_k(x)
        v = self.split_heads(self.W_v(k))
        weights = (self.split_heads(q) @ self.split_heads(k).mT / math.sqrt(self.d_k)).softmax(-1)
        return self.W_o(self.combine_heads(F.dropout(weights, 0.1) @ v))


class SumWithoutKeepdim(Separate):
    keepdim = False

    def forward(self, query, key, value):
        q, k, v = (
            self.split_heads(y) for y in (self.W_q(query), self.W_k(key), self.W_v(value))
        )  # [B, H, T, d_k]
        rows = [self.one_head(q[b, h], k[b, h], v[b, h]) for b in range(len(q)) for h in range(q.size(1))]
        return self.W_o(self.combine_heads(torch.stack(rows).view(q.shape)))

    def one_head(self, q, k, v):
        scores = q @ k.T / math.sqrt(self.d_k)
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=self.keepdim) @ v


class SumWithKeepdim(SumWithoutKeepdim):
    """Right: the twin of the one above."""

    keepdim = True


class ScoresBeside(Separate):
    def forward(self, query, key, value):
        q, k = self.split_heads(self.W_q(query)), self.split_heads(self.W_k(key))
        qk = q @ k.mT / math.sqrt(self.d_k)
        heads = qk.softmax(-1) @ self.split_heads(self.W_v(value))
        return self.W_o(self.combine_heads(heads)), qk.detach()


class ScoresCalledWeights(ScoresBeside):
    def forward(self, query, key, value):
        out, attn_weights = super().forward(query, key, value)
        return out, attn_weights


class CausalScoresCalledWeights(Separate):
    def forward(self, x):
        q, k, v = (self.split_heads(y) for y in (self.W_q(x), self.W_k(x), self.W_v(x)))
        attn = q @ k.mT / math.sqrt(self.d_k)
        attn = attn.masked_fill(torch.ones(x.size(1), x.size(1)).triu(1).bool(), float("-inf"))
        return self.W_o(self.combine_heads(attn.softmax(-1) @ v)), attn


class WithACache(nn.Module):
    """Right: the triangle lies against the last key."""

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def visible(self, T, S):
        return torch.ones(T, S, dtype=torch.bool).tril(diagonal=S - T)

    def joined(self, past, new):
        return torch.cat([past, new], dim=2)

    def forward(self, x, layer_past=None):
        q, k, v = (
            y.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=-1)
        )
        if layer_past is not None:
            k, v = self.joined(layer_past[0], k), torch.cat([layer_past[1], v], dim=2)
        scores = q @ k.mT / math.sqrt(k.size(-1))
        scores = scores.masked_fill(~self.visible(q.size(2), k.size(2)), float("-inf"))
        heads = scores.softmax(-1) @ v
        return self.c_proj(heads.transpose(1, 2).flatten(2)), (k, v)


class CacheUnderTheFirstTriangle(WithACache):
    def visible(self, T, S):
        return torch.ones(T, S, dtype=torch.bool).tril()


class CacheBehindTheNew(WithACache):
    def joined(self, past, new):
        return torch.cat([new, past], dim=2)


class CacheOfItsOwnKind(WithACache):
    """What it wants for a cache nobody can know."""

    def forward(self, x, kv_cache=None):
        return super().forward(x)[0] if kv_cache is None else kv_cache.attend(self, x)


class CacheForOneToken(WithACache):
    """Right for one new token; several see each other."""

    def forward(self, x, layer_past=None):
        self.visible = super().visible if layer_past is None else lambda T, S: torch.ones(T, S).bool()
        return super().forward(x, layer_past)


class CacheThatCrashes(WithACache):
    def visible(self, T, S):
        return torch.ones(T, T, dtype=torch.bool).tril()


class FourLayers(nn.Module):
    """Right; what follows changes one line of it."""

    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads, self.d_k = num_heads, d_model // num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, self.d_k)).transpose(1, 2)

    def join(self, heads):
        return self.W_o(heads.transpose(1, 2).flatten(2))


class HalfForTheRoot(FourLayers):
    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.W_q, self.W_k, self.W_v))
        return self.join((q @ k.mT / (self.d_k**1 / 2)).softmax(-1) @ v)


class WeightsTimesTheRoot(FourLayers):
    def forward(self, x):
        q, k, v = (self.split(layer(x)) for layer in (self.W_q, self.W_k, self.W_v))
        return self.join((q @ k.mT).softmax(-1) * math.sqrt(self.d_k) @ v)


class TwoMasks(FourLayers):
    """attn_mask [T, S] and key_padding_mask [B, S] are bool.

    attn_mask: True where a query may attend
    key_padding_mask: True at padding
    """

    def hide(self, scores, attn_mask, key_padding_mask):
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask[:, None, None, :], -torch.inf)
        return scores

    def forward(self, x, attn_mask=None, key_padding_mask=None):
        q, k, v = (self.split(layer(x)) for layer in (self.W_q, self.W_k, self.W_v))
        scores = self.hide(q @ k.mT / math.sqrt(self.d_k), attn_mask, key_padding_mask)
        return self.join(scores.softmax(-1) @ v)


class PaddingDropped(TwoMasks):
    def hide(self, scores, attn_mask, key_padding_mask):
        return super().hide(scores, attn_mask, key_padding_mask if attn_mask is None else None)


class MemoryAndQueries(FourLayers):
    def forward(self, x, memory):
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(memory)), self.split(self.values(x, memory))
        return self.join((q @ k.mT / math.sqrt(self.d_k)).softmax(-1) @ v)

    def values(self, x, memory):
        return self.W_v(memory)


class ValuesOfTheQueries(MemoryAndQueries):
    def values(self, x, memory):
        return self.W_v(x)


class HeadsOfOneToken(FourLayers):
    def forward(self, x, mask=None):
        q, k, v = (self.split(layer(x)).transpose(1, 2) for layer in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.mT / math.sqrt(self.d_k)  # [B, T, H, H]
        if mask is not None:
            scores = scores.masked_fill(mask[:, :, None, None] == 0, -1e9)
        return self.W_o((scores.softmax(-1) @ v).flatten(2))


class CountedMask(FourLayers):
    """mask is 1 at real tokens, [B, S]."""

    large = 1e9

    def forward(self, x, mask=None):
        q, k, v = (self.split(layer(x)) for layer in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.mT / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores + (1 - mask)[:, None, None, :] * -self.large
        return self.join(scores.softmax(-1) @ v)


class CountedMaskMistyped(CountedMask):
    large = 1e-9


RIGHT_TWINS = [FusedAndPermuted, SumWithKeepdim, WithACache, TwoMasks, MemoryAndQueries, CountedMask]

UNSTYLED = [
    ("no projections", NoProjections, "only an output matrix"),
    ("no v projection", NoValueMatrix, "there is no matrix for values"),
    ("shared projection + scale by d_model", OneMatrixAndScaleByWidth, "two at once, one of them seen"),
    ("heads in a list", LayersInADict, "a dict: no parameters"),
    ("state kept between calls", KeepsKeys, "a cache that is never reset"),
    ("layers made in forward", MadeInForward, "new in every call"),
    ("causal only in training", CausalInTraining, "if self.training"),
    ("causal only in evaluation", CausalInEvaluation, "if not self.training"),
    ("half in place of the root", HalfForTheRoot, "d_k ** 1 / 2"),
    ("scale after softmax", WeightsTimesTheRoot, "weights * sqrt(d_k), scores as they are"),
    ("one mask replaces another", PaddingDropped, "if attn_mask .. elif key_padding_mask"),
    ("value from query", ValuesOfTheQueries, "cross-attention that hands on its own queries"),
    ("attention across heads", HeadsOfOneToken, "scores [B, T, H, H], a padding mask [B, T, 1, 1]"),
    ("mask ignored", CountedMaskMistyped, "(1 - mask) * -1e-9"),
    ("scores of sums", ScoresOfSums, "d and e for one axis"),
    ("scores mixed over heads", ScoresOverHeads, "h and g for one axis"),
    ("scores transposed", ScoresTransposed, "->bhkq"),
    ("values summed over positions", ValuesSummed, "k and v for one axis"),
    ("values mixed over heads", ValuesOverHeads, "h and g for one axis"),
    ("one mask replaces another", PaddingReplacesCausal, "padding assigned over the causal mask"),
    ("mask repeated in wrong order", HeadsFirstMaskSampleBySample, "[H * B] scores, [B * H] masks"),
    ("second output projection", SecondProjection, "after torch's own"),
    ("one length only", OneLength, "view with max_len"),
    ("unmasked weights returned", UnmaskedWeights, "softmax before the mask, for show"),
    ("softmax overflows", Overflows, "exp without the largest score"),
    ("softmax overflows", OverflowsWithoutAMask, "the same where no mask is taken"),
    ("merge without transpose", FusedHeadByHeadMergedByView, "beside a fused weight head by head"),
    ("fused qkv cut by view", FusedThreeInFront, "reshape(3, B, T, H, D)"),
    ("fused qkv cut by view", FusedHeadsInFront, "reshape(B, H, T, 3 D)"),
    ("projected twice", OverwritesItsInput, "x = W_q(x), then keys and values of it"),
    ("projected twice + dropout in eval", ValuesOfKeysAndDropout, "values of the projected keys"),
    ("divided by another row's sum", SumWithoutKeepdim, "e.sum(-1) broadcast along the keys"),
    ("causal mask not shifted by the cache", CacheUnderTheFirstTriangle, "tril() of T by S"),
    ("cache gives something else", CacheBehindTheNew, "new keys before the cached ones"),
    ("scores returned", ScoresBeside, "called qk: a remark"),
    ("other weights returned", ScoresCalledWeights, "the same, called attn_weights"),
    ("other weights returned", CausalScoresCalledWeights, "the same under a mask of its own"),
]
