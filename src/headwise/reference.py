"""The equations, in plain torch: section 3.2 of Vaswani 2017, to be read beside it.

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V                                   (3.2.1)
    MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O                                (3.2.2)
        head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)

Everything the fast engines accept is computed here once more, as directly as possible: the truth in float64.
Nothing here is fast or clever, and no fast code imports it. The rules of a mask are applied separately here
rather than through `Mask.tile`, so that a mistake there is noticed.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .masks import Mask
from .scoring import HIDDEN, Alibi, Bias, Relative


def allowed(mask: Mask, B: int, H: int, T: int, S: int, device: torch.device | None = None) -> Tensor:
    """Return the mask as a bool matrix [B, H, T, S]; True = may attend."""
    i, j = positions(T, S, device)
    visible = torch.ones(B, H, T, S, dtype=torch.bool, device=device)
    if mask.right is not None:
        visible &= j - i <= mask.right
    if mask.left is not None:
        visible &= i - j <= mask.left
    for b in range(B):
        if mask.keys is not None:
            real = j < mask.keys[b] if mask.keys.ndim == 1 else mask.keys[b][None, :]
            visible[b] &= real
        if mask.key_ids is not None:
            of_keys = mask.key_ids.expand(B, -1, -1)[b]  # [S, N]
            if mask.query_ids is None:
                of_queries = of_keys[S - T :]
            else:
                of_queries = mask.query_ids.expand(B, -1, -1)[b]
            for label in range(of_keys.shape[-1]):
                visible[b] &= of_queries[:, label][:, None] == of_keys[:, label][None, :]
    if mask.allowed is not None:
        visible &= mask.allowed
    return visible


def positions(T: int, S: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return the positions of queries, [T, 1], the last one beside the last key, and of keys, [1, S]."""
    return torch.arange(T, device=device)[:, None] + (S - T), torch.arange(S, device=device)[None, :]


def scores(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """Return Q K^T / sqrt(d_k), capped, biased, and -inf where the mask forbids: [B, H, T, S]."""
    B, H, T, D = q.shape
    S = k.shape[2]
    k = k.repeat_interleave(H // k.shape[1], dim=1)  # a group of query heads shares one key head
    s = q @ k.transpose(-2, -1) * (D**-0.5 if scale is None else scale)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    i, j = positions(T, S, q.device)
    for part in bias if isinstance(bias, tuple) else () if bias is None else (bias,):
        if isinstance(part, Alibi):
            s = s - part.slopes.to(s.dtype)[:, None, None] * (i - j).abs()
            continue
        if isinstance(part, Relative):
            r = (part.values.shape[1] - 1) // 2
            added = part.values[:, (j - i).clamp(-r, r) + r]  # [H, T, S]
        else:
            added = part
        lowest = added <= torch.finfo(added.dtype).min / 2  # other libraries' value for hidden
        s = s + added.to(s.dtype).masked_fill(lowest, -torch.inf)
    if mask is not None:
        s = s.masked_fill(~allowed(mask, B, H, T, S, q.device), -torch.inf)
    return s.masked_fill(s <= HIDDEN, -torch.inf)


def weights_of(s: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return softmax(s) and its log-sum-exp: ([B, H, T, S], [B, H, T]).

    A sink is one more column without a value: it is in the sum, not in the weights. A row that sees nothing
    has weights 0 and log-sum-exp -inf.
    """
    if sinks is not None:
        B, H, T, _ = s.shape
        column = sinks.to(s.dtype).reshape(1, H, 1, 1).expand(B, H, T, 1)
        sees_nothing = torch.isneginf(s).all(-1, keepdim=True)
        s = torch.cat([s, column.masked_fill(sees_nothing, -torch.inf)], dim=-1)
    lse = torch.logsumexp(s, dim=-1)
    sees_nothing = torch.isneginf(lse)[..., None]
    weights = torch.softmax(s.masked_fill(sees_nothing, 0.0), dim=-1).masked_fill(sees_nothing, 0.0)
    return (weights if sinks is None else weights[..., :-1]), lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Bias | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (output [B, H, T, Dv], weights [B, H, T, S], log-sum-exp [B, H, T])."""
    s = scores(q, k, mask=mask, scale=scale, softcap=softcap, bias=bias)
    weights, lse = weights_of(s, sinks)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return weights @ v, weights, lse


def multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    w_q: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    w_o: Tensor,
    num_heads: int,
    mask: Mask | None = None,
) -> tuple[Tensor, Tensor]:
    """Project, split into heads, attend, concatenate, project: ([B, T, E], [B, H, T, S]).

    Weights as `torch.nn.Linear` keeps them, [out, in]; no biases, as in the paper.
    """

    def split(x: Tensor) -> Tensor:
        B, L, E = x.shape
        return x.reshape(B, L, num_heads, E // num_heads).transpose(1, 2)  # [B, H, L, D]

    heads, weights, _ = attention(split(query @ w_q.T), split(key @ w_k.T), split(value @ w_v.T), mask=mask)
    B, H, T, D = heads.shape
    concatenated = heads.transpose(1, 2).reshape(B, T, H * D)
    return concatenated @ w_o.T, weights
