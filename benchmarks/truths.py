"""True sums over rows in plain torch: statistics, pooled maps, gradients. In float64 they are the truth.

Rows are taken block by block and heads one by one, so no matrix larger than a block is ever made.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .peers import REACH
from .problem import Problem


def statistics(
    problem: Problem, heads: Sequence[int] | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Return the eleven statistics by their formulas, [B, heads] each; `received` is [B, heads, S]."""
    chosen = range(problem.q.shape[1]) if heads is None else heads
    by_head = [_of_head(problem, head, dtype) for head in chosen]
    return {name: torch.stack([of_head[name] for of_head in by_head], dim=1) for name in by_head[0]}


def _of_head(problem: Problem, head: int, dtype: torch.dtype) -> dict[str, Tensor]:
    T, S = problem.q.shape[2], problem.k.shape[2]
    keys = torch.arange(S, device=problem.q.device)
    collected: dict[str, list[Tensor]] = {}
    received = torch.zeros(problem.q.shape[0], S, dtype=dtype, device=problem.q.device)
    for rows in problem.blocks():
        s, p = (x[:, 0] for x in problem.weights(rows, dtype, head))  # [B, t, S]
        at = rows + (S - T)
        near = {offset: _ahead(p, at + offset) for offset in range(-REACH, REACH + 1)}
        entropy = -torch.special.xlogy(p, p).sum(-1)
        block = {
            "entropy": entropy,
            "effective_keys": entropy.exp(),
            "confidence": p.amax(-1),
            "distance": (p * (keys - at[:, None]).abs()).sum(-1),
            "first": p[..., 0],
            "previous": near[-1],
            "itself": near[0],
            "next": near[1],
            "local": torch.stack(list(near.values())).sum(0),
            "max_logit": s.amax(-1),
        }
        for name, values in block.items():
            collected.setdefault(name, []).append(values)
        received += p.sum(-2)
    rows_of = {name: torch.cat(values, dim=-1) for name, values in collected.items()}  # [B, T]
    means = {name: values.mean(-1) for name, values in rows_of.items()}
    means["max_logit"] = rows_of["max_logit"].amax(-1)
    at = torch.arange(T, device=keys.device) + (S - T)
    for name, offset in (("previous", -1), ("next", 1)):  # only queries that have such a key
        means[name] = rows_of[name][:, (at + offset >= 0) & (at + offset < S)].mean(-1)
    return {**means, "received": received}


def _ahead(p: Tensor, key: Tensor) -> Tensor:
    """Return p[:, i, key[i]] for every row, 0 if there is no such key: [B, t]."""
    S = p.shape[-1]
    picked = p.gather(-1, key.clamp(0, S - 1)[:, None].expand(*p.shape[:2], 1)).squeeze(-1)
    return picked * ((key >= 0) & (key < S))


def pooled(
    problem: Problem,
    cells: int,
    heads: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float64,
    rows_of_cells: range | None = None,
) -> Tensor:
    """Return the weights summed in cells x cells squares, [B, heads, cells, cells]; optionally some rows.

    A sum over cells is a product with zeros and ones, R P C: adding in place would be slow on a GPU.
    """
    T, S, device = problem.q.shape[2], problem.k.shape[2], problem.q.device
    chosen = range(problem.q.shape[1]) if heads is None else heads
    wanted = range(cells) if rows_of_cells is None else rows_of_cells
    first, beyond = (-(-edge * T // cells) for edge in (wanted.start, wanted.stop))  # queries, rounded up
    keys, numbers = (torch.arange(n, device=device) for n in (S, cells))
    columns = (keys[:, None] * cells // S == numbers).to(dtype)  # [S, cells]
    picture = torch.zeros(problem.q.shape[0], len(chosen), cells, cells, dtype=dtype, device=device)
    for place, head in enumerate(chosen):
        for rows in problem.blocks_within(first, beyond):
            _, p = problem.weights(rows, dtype, head)
            down = (rows * cells // T == numbers[:, None]).to(dtype)  # [cells, t]
            picture[:, place] += down @ (p[:, 0] @ columns)
    return picture[:, :, wanted.start : wanted.stop]


def mean_weights(problem: Problem, rows: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the mean over heads of some rows, [B, t, S]."""
    return problem.weights(rows, dtype)[1].mean(1)


def gradients(problem: Problem, grad: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return the output and the gradients of q, k and v, given that of the output."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in problem.qkv)
    whole = torch.arange(q.shape[2], device=q.device)
    out = Problem(q, k, v, problem.visible).output(whole, dtype)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad.to(dtype))
    return {"output": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def entropy_gradients(
    problem: Problem, grad: Tensor, heads: Sequence[int] | None = None, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Return the entropy of every query, and the gradients of q and k for a gradient [B, H, T] of entropy.

    With H_i = -sum_j p_ij log p_ij, dH_i / ds_ij = -p_ij (log p_ij + H_i). One key head a query head.
    """
    by_head = []
    for head in range(problem.q.shape[1]) if heads is None else heads:
        q, k = (x[:, head].to(dtype) for x in (problem.q, problem.k))  # [B, L, D]
        entropies, dq, dk = [], [], torch.zeros_like(k)
        for rows in problem.blocks():
            p = problem.weights(rows, dtype, head)[1][:, 0]  # [B, t, S]
            p_log_p = torch.special.xlogy(p, p)
            entropy = -p_log_p.sum(-1)
            wanted = grad[:, head, rows].to(dtype)[..., None]
            ds = -wanted * (p_log_p + p * entropy[..., None]) * problem.scale
            entropies.append(entropy)
            dq.append(ds @ k)
            dk += ds.transpose(-2, -1) @ q[:, rows]
        by_head.append({"entropy": torch.cat(entropies, -1), "dq": torch.cat(dq, -2), "dk": dk})
    return {name: torch.stack([of_head[name] for of_head in by_head], dim=1) for name in by_head[0]}
