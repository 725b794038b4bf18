"""An attention problem: q, k, v and the mask, and its true results in any dtype for some rows.

This is written apart from headwise on purpose: masks are bare formulas on positions, the softmax is torch's.
In float64 it is the judge. Only some rows are computed at a time, so that the truth about a long sequence
does not need its matrix.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .registry import Sizes

Visibility = Callable[[Tensor, Tensor], Tensor]  # positions of queries [t, 1], of keys [S] -> bool [.., t, S]

BLOCK = 1024  # rows computed together
MOST = 2**27  # weights of one head computed together: 1 GB in float64


def causal(at: Tensor, keys: Tensor) -> Tensor:
    """Return True for keys up to the position of the query."""
    return keys <= at


def window(size: int) -> Visibility:
    """Return True for the last `size` keys, including that of the query."""
    return lambda at, keys: (keys <= at) & (keys > at - size)


def padding(lengths: Tensor) -> Visibility:
    """Return True for the first lengths[b] keys."""
    return lambda at, keys: keys < lengths[:, None, None, None]


def documents(ids: Tensor) -> Visibility:
    """Return True for keys with the id of the query; ids [S]."""
    return lambda at, keys: ids[at] == ids[keys]


def all_of(*rules: Visibility) -> Visibility:
    """Return the conjunction of all rules."""

    def both(at: Tensor, keys: Tensor) -> Tensor:
        visible = rules[0](at, keys)
        for rule in rules[1:]:
            visible = visible & rule(at, keys)
        return visible

    return both


@dataclass(frozen=True)
class Problem:
    """One attention: q [B, H, T, D], k [B, Hk, S, D], v [B, Hk, S, D]; scale 1 / sqrt(D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    visible: Visibility | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [H]

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors q, k and v."""
        return self.q, self.k, self.v

    @property
    def scale(self) -> float:
        """1 / sqrt(D)"""
        return float(self.q.shape[-1] ** -0.5)

    def mask(self, rows: Tensor | None = None) -> Tensor:
        """Return the mask of some rows, by default all: bool [B or 1, 1, t, S], True = visible."""
        T, S = self.q.shape[2], self.k.shape[2]
        rows = torch.arange(T, device=self.q.device) if rows is None else rows
        at, keys = (rows + (S - T))[:, None], torch.arange(S, device=self.q.device)
        if self.visible is None:
            return torch.ones(1, 1, len(rows), S, dtype=torch.bool, device=self.q.device)
        visible = self.visible(at, keys)
        return visible[(None,) * (4 - visible.ndim)]

    def weights(
        self, rows: Tensor, dtype: torch.dtype = torch.float64, head: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, weights) of some rows, [B, H, t, S] each, of all heads or one."""
        heads = slice(None) if head is None else slice(head, head + 1)
        group = self.q.shape[1] // self.k.shape[1]
        q = self.q[:, heads, rows].to(dtype)
        kv_heads = slice(None) if head is None else slice(head // group, head // group + 1)
        k = self.k[:, kv_heads].to(dtype)
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        s = q @ k.transpose(-2, -1) * self.scale
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)
        s = s.masked_fill(~self.mask(rows), -torch.inf)
        if self.sinks is None:
            return s, torch.softmax(s, dim=-1)
        column = self.sinks[heads].to(dtype)[:, None, None].expand(*s.shape[:3], 1)
        return s, torch.softmax(torch.cat([s, column], dim=-1), dim=-1)[..., :-1]

    def output(self, rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return the output of some rows, [B, H, t, D]."""
        _, p = self.weights(rows, dtype)
        v = self.v.to(dtype)
        return p @ v.repeat_interleave(p.shape[1] // v.shape[1], dim=1)

    def blocks(self) -> Iterator[Tensor]:
        """Yield all rows, block by block."""
        yield from self.blocks_within(0, self.q.shape[2])

    def blocks_within(self, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the rows from `start` to `stop` in blocks, which are smaller for long rows."""
        size = max(1, min(BLOCK, MOST // (self.q.shape[0] * self.k.shape[2])))
        for first in range(start, stop, size):
            yield torch.arange(first, min(first + size, stop), device=self.q.device)


def make(
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    visible: Visibility | None = None,
    softcap: float | None = None,
) -> Problem:
    """Return a problem with random q, k, v. T and S are L, and Hk is H, unless they are given.

    Drawn on the device: a CPU needs half a minute for what a long case takes.
    """
    T, S = sizes.get("T", sizes.get("L")), sizes.get("S", sizes.get("L"))
    B, H, D = sizes["B"], sizes["H"], sizes["D"]
    Hk = sizes.get("Hk", H)
    assert T is not None and S is not None
    q = torch.randn(B, H, T, D, device=device).to(dtype)
    k, v = (torch.randn(B, Hk, S, D, device=device).to(dtype) for _ in range(2))
    return Problem(q, k, v, visible, softcap)


def some_rows(problem: Problem, most: int = 64) -> Tensor:
    """Return positions spread over the sequence, including the first and the last."""
    T = problem.q.shape[2]
    return torch.linspace(0, T - 1, min(most, T), dtype=torch.float64, device=problem.q.device).round().long()
