"""The dense routes to compare with: plain eager torch, written for speed.

Each makes the matrix, as everyone who wants weights does today. Scale goes onto q (T x D numbers, not T x S),
masks are filled in place, and a sum over keys is a product with a vector wherever it can be one.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

REACH = 8  # what counts as near, as in `AttentionMap.statistics`


def weights(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) [B, H, T, S]; `hidden` [T, S] is True for keys to hide."""
    return _softmax(_scores(q, k, hidden))


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    s: Tensor = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
    # the smallest number instead of -inf: weights become 0 all the same, and 0 * score stays 0
    if hidden is not None:
        s.masked_fill_(hidden, torch.finfo(s.dtype).min)
    return s


def _softmax(s: Tensor) -> Tensor:
    """Return the softmax, computed in float32 for any dtype, as models do."""
    return torch.softmax(s, dim=-1, dtype=torch.float32 if s.dtype.itemsize < 4 else None)


def with_softcap(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, softcap: float) -> Tensor:
    """Return attention with softcapped scores, in (-softcap, softcap)."""
    s = (q * (q.shape[-1] ** -0.5 / softcap)) @ k.transpose(-2, -1)
    s = s.tanh_().mul_(softcap).masked_fill_(hidden, torch.finfo(s.dtype).min)
    return _softmax(s).to(v.dtype) @ v


def with_sinks(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, sinks: Tensor) -> Tensor:
    """Return attention with sinks [H]: one more column of the softmax, without a value."""
    s = _scores(q, k, hidden)
    column = sinks[:, None, None].expand(*s.shape[:3], 1)
    p = _softmax(torch.cat([s, column], dim=-1))
    return p[..., :-1].to(v.dtype) @ v


def mean_weights(q: Tensor, k: Tensor, hidden: Tensor | None) -> Tensor:
    """Return the mean over heads, [B, T, S]."""
    return weights(q, k, hidden).mean(1).to(q.dtype)


def pool(p: Tensor, cells: int) -> Tensor:
    """Return the weights summed in cells x cells squares; the lengths must be multiples of `cells`."""
    B, H, T, S = p.shape
    return p.view(B, H, cells, T // cells, cells, S // cells).sum((3, 5))


def dense_statistics(q: Tensor, k: Tensor, hidden: Tensor, cells: int | None = None) -> dict[str, Tensor]:
    """Return the statistics of `AttentionMap.statistics` for causal self-attention, from the full matrix.

    Under a causal mask every key lies behind, so the distance is the query's position less the mean key. With
    `cells`, the picture `AttentionMap.pooled` gives, too, from the same matrix.
    """
    s = _scores(q, k, hidden)
    p = _softmax(s)
    L = p.shape[-1]
    numbers = torch.arange(L, device=p.device, dtype=p.dtype)
    largest, heaviest = s.amax(-1).to(p.dtype), p.amax(-1)  # [B, H, T]
    lse = largest - heaviest.log()
    entropy = lse - torch.einsum("bhts,bhts->bht", p, s.to(p.dtype))
    by_offset = [p.diagonal(offset, -2, -1).sum(-1) for offset in range(-min(REACH, L - 1), 1)]
    statistics = {
        "entropy": entropy.mean(-1),
        "effective_keys": entropy.exp().mean(-1),
        "confidence": heaviest.mean(-1),
        "distance": (numbers - p @ numbers).mean(-1),
        "first": p[..., 0].mean(-1),
        "previous": by_offset[-2] / (L - 1),
        "itself": by_offset[-1] / L,
        "next": p.diagonal(1, -2, -1).mean(-1),
        "local": torch.stack(by_offset).sum(0) / L,
        "max_logit": largest.amax(-1),
        "received": p.sum(-2),
    }
    return statistics if cells is None else {**statistics, "pooled": pool(p, cells)}


def head_by_head(q: Tensor, k: Tensor, hidden: Tensor, cells: int | None = None) -> dict[str, Tensor]:
    """Return the same statistics head by head, which needs less memory and fits the cache better."""
    parts = [dense_statistics(q[:, h : h + 1], k[:, h : h + 1], hidden, cells) for h in range(q.shape[1])]
    return {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}


def bytes_of_statistics(heads: int, length: int, dtype: torch.dtype) -> int:
    """Return the peak bytes of `dense_statistics`: scores, and weights and scores in float32."""
    again = 0 if dtype == torch.float32 else 4
    return heads * length * length * (dtype.itemsize + 4 + again)
