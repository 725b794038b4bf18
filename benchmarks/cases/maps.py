"""Statistics, pictures and rows of attention weights, beside the full matrix in eager torch.

Ours starts from q and k like the dense route, the log-sum-exp included, unless an arm says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import headwise as hw

from .. import peers, truths
from .. import problem as problems
from ..registry import OURS, Arm, Case, Prepared, Sizes, Values, register

DENSE = "eager, dense"
BY_HEAD = "eager, head by head"
LSE_READY = "headwise, after attention"
THAT_ROW = "eager, that row"


def statistics(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare all eleven statistics of causal self-attention.

    After `hw.attention` the map has its log-sum-exp already: that arm leaves out what the forward pass paid.
    """
    problem = problems.make(sizes, device, dtype, problems.causal)
    q, k, v = problem.qkv
    hidden = ~problem.mask()
    ready = hw.attention(q, k, v, causal=True)[1]
    arms: dict[str, Arm] = {
        OURS: lambda: hw.AttentionMap(q, k, causal=True).statistics(),
        LSE_READY: ready.statistics,
        DENSE: lambda: peers.dense_statistics(q, k, hidden),
        BY_HEAD: lambda: peers.head_by_head(q, k, hidden),
    }
    return Prepared(arms, lambda: truths.statistics(problem), dict)


def long_statistics(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare statistics at lengths without a dense route; the truth is computed for the last head."""
    problem = problems.make(sizes, device, dtype, problems.causal)
    q, k, _ = problem.qkv
    last = [sizes["H"] - 1]

    def part(result: Mapping[str, Tensor]) -> Values:
        return {name: values[:, last] for name, values in result.items()}

    return Prepared(
        {OURS: lambda: hw.AttentionMap(q, k, causal=True).statistics()},
        lambda: truths.statistics(problem, last),
        part,
        yardstick=lambda: truths.statistics(problem, last, torch.float32),
    )


def one_row(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare one row of one head, a matrix-vector product and a softmax."""
    head, row = sizes["head"], sizes["row"]
    problem = problems.make(sizes, device, dtype)
    q, k, _ = problem.qkv
    scale = problem.scale
    arms: dict[str, Arm] = {
        OURS: lambda: hw.AttentionMap(q, k)[0, head, row],
        THAT_ROW: lambda: torch.softmax(k[0, head] @ (q[0, head, row] * scale), dim=0),
    }

    def truth() -> Values:
        _, p = problem.weights(torch.tensor([row], device=device), head=head)
        return {"weights": p[0, 0, 0]}

    return Prepared(arms, truth, lambda result: {"weights": result})


ROWS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 257},
}


def kept_row(sizes: Sizes, device: torch.device, dtype: torch.dtype, rule: str) -> Prepared:
    """One row of one head of the map that came with a call, as one looks at a model's heads.

    Beside it the same row in eager torch: a product, the scale, the mask's row, a softmax.
    """
    head, row, options = sizes["head"], sizes["row"], ROWS[rule]
    W = options.get("window")
    rule_of_positions = None if not options else problems.causal if W is None else problems.window(W)
    problem = problems.make(sizes, device, dtype, rule_of_positions)
    (q, k, v), scale = problem.qkv, problem.scale
    weights, group = hw.attention(q, k, v, **options)[1], q.shape[1] // k.shape[1]
    hidden = None if rule_of_positions is None else ~problem.mask(torch.tensor([row], device=device))[0, 0, 0]

    def eager() -> Tensor:
        s = q[0, head, row] @ k[0, head // group].T * scale
        if hidden is not None:
            s = s.masked_fill(hidden, -torch.inf)
        return torch.softmax(s, dim=-1)

    def truth() -> Values:
        _, p = problem.weights(torch.tensor([row], device=device), head=head)
        return {"weights": p[0, 0, 0]}

    arms: dict[str, Arm] = {OURS: lambda: weights[0, head, row], THAT_ROW: eager}
    return Prepared(arms, truth, lambda result: {"weights": result})


def mean_heads(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare the mean over heads."""
    problem = problems.make(sizes, device, dtype, problems.causal)
    q, k, _ = problem.qkv
    hidden, rows = ~problem.mask(), problems.some_rows(problem)
    arms: dict[str, Arm] = {
        OURS: lambda: hw.AttentionMap(q, k, causal=True).mean_heads(),
        DENSE: lambda: peers.mean_weights(q, k, hidden),
    }

    def part(result: Tensor) -> Values:
        return {"mean": result[:, rows]}

    return Prepared(arms, lambda: {"mean": truths.mean_weights(problem, rows)}, part)


def pooled(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare the pooled map of every head."""
    cells = sizes["cells"]
    problem = problems.make(sizes, device, dtype, problems.causal)
    q, k, _ = problem.qkv
    hidden = ~problem.mask()
    arms: dict[str, Arm] = {
        OURS: lambda: hw.AttentionMap(q, k, causal=True).pooled(cells),
        DENSE: lambda: peers.pool(peers.weights(q, k, hidden), cells),
    }
    return Prepared(
        arms, lambda: {"picture": truths.pooled(problem, cells)}, lambda result: {"picture": result}
    )


def dense(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare the full matrix."""
    problem = problems.make(sizes, device, dtype, problems.causal)
    q, k, _ = problem.qkv
    hidden, rows = ~problem.mask(), problems.some_rows(problem)
    arms: dict[str, Arm] = {
        OURS: lambda: hw.AttentionMap(q, k, causal=True).dense(),
        DENSE: lambda: peers.weights(q, k, hidden).to(q.dtype),
    }

    def part(result: Tensor) -> Values:
        return {"weights": result[:, :, rows]}

    return Prepared(arms, lambda: {"weights": problem.weights(rows)[1]}, part)


def by_arithmetic(H: int, L: int) -> str:
    """Return the bytes that the dense route needs at least."""
    return f"the weights alone would be {H} * {L} * {L} * 4 bytes = {H * L * L * 4 / 1e9:.0f} GB"


SMALL = {"H": 2, "L": 48, "D": 16}
case = partial(Case, tiny=SMALL, peer=DENSE, memory=True)
register(
    case(
        "statistics_L4096",
        "all statistics of every head",
        statistics,
        {"B": 1, "H": 8, "L": 4096, "D": 64},
        headline=True,
    )
)
register(
    case(
        "cuda_statistics_L16384",
        "all statistics of every head",
        statistics,
        {"B": 1, "H": 32, "L": 16384, "D": 128},
        devices=("cuda",),
        headline=True,
    )
)
register(
    case(
        "statistics_L32768",
        "all statistics of every head",
        long_statistics,
        {"B": 1, "H": 8, "L": 32768, "D": 64},
        peer=None,
        most_repeats=3,
        notes=(by_arithmetic(8, 32768),),
    )
)
register(
    case(
        "one_row_L131072",
        "one row of one head",
        one_row,
        {"B": 1, "H": 32, "L": 131072, "D": 64, "head": 3, "row": 100000},
        tiny={**SMALL, "L": 1009, "head": 1, "row": 700},
        peer=THAT_ROW,
        headline=True,
        notes=(by_arithmetic(32, 131072),),
    )
)
register(
    case(
        "mean_heads_L2048",
        "weights, mean over heads",
        mean_heads,
        {"B": 1, "H": 8, "L": 2048, "D": 64},
    )
)
register(
    case(
        "cuda_mean_heads_L16384",
        "weights, mean over heads",
        mean_heads,
        {"B": 1, "H": 32, "L": 16384, "D": 128},
        devices=("cuda",),
    )
)
register(
    case(
        "pooled_L4096",
        "a picture of 128 x 128 cells a head",
        pooled,
        {"B": 1, "H": 8, "L": 4096, "D": 64, "cells": 128},
        tiny={**SMALL, "cells": 6},
    )
)
register(
    case(
        "dense_L1024",
        "weights, the whole matrix",
        dense,
        {"B": 1, "H": 8, "L": 1024, "D": 64},
    )
)
