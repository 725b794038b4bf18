"""The second pass alone: the cost of statistics after attention, beside cuDNN's forward of that shape.

Maps are made before the clock starts, so they have their log-sum-exp, as after `hw.attention`; what a map has
measured it does not keep, so every call measures anew. cuDNN computes something else, the output: only its
time is compared, and each arm is judged by its own truth.

Letters: B batch, H num_heads, Hk num_kv_heads, L length, D head_dim, W window.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

import headwise as hw
from headwise.engines.statistics import ROW_STATISTICS

from .. import peers, truths
from .. import problem as problems
from ..problem import Problem
from ..registry import OURS, Apart, Arm, Case, Pinned, Prepared, Sizes, Values, register
from .maps import DENSE

CUDNN = "cuDNN's forward"
FUSED = "the fused forward"
BOTH_WAYS = "cuDNN, forward and backward"
COPY = "a copy of that size"
UNGROUPED = "headwise, 32 key heads"
WHOLE_CAUSAL = "headwise, without the window"
UNPADDED = "headwise, without padding"

ROWS = ("entropy", "confidence", "distance", "max_logit")
MOST_JUDGED = 2**34  # weights; a second or two in float64


def in_bands(tensors: Mapping[str, Tensor]) -> Values:
    """Split values [B, H, many, ...] after 8, 64, 512, ... rows, keys or rows of cells.

    Under a causal mask the first rows, keys and cells hold far more weight than most. What an error may be
    follows from the largest value: judged as one, the later ones could be anything at all.
    """
    values: Values = {}
    for name, whole in tensors.items():
        if whole.ndim < 3:
            values[name] = whole
            continue
        start, stop = 0, 8
        while start < whole.shape[2]:
            values[f"{name} from {start}"] = whole[:, :, start:stop]
            start, stop = stop, 8 * stop
    return values


@dataclass(frozen=True)
class Look:
    """One kind of statistic: the call, its truth in any dtype, and the compared part of the result."""

    call: Arm
    truth: Callable[[torch.dtype], Values]
    part: Callable[[Any], Values]

    def beside(self, name: str, arm: Arm, judge: Apart) -> Prepared:
        """Compare with an arm that computes something else; both are checked in bands."""
        return Prepared(
            {OURS: self.call, name: arm},
            truth=lambda: in_bands(self.truth(torch.float64)),
            part=lambda result: in_bands(self.part(result)),
            yardstick=lambda: in_bands(self.truth(torch.float32)),
            apart={
                name: Apart(lambda: in_bands(judge.truth()), lambda result: in_bands(judge.part(result))),
            },
        )

    def beside_look(self, name: str, other: Look) -> Prepared:
        """Compare with another statistic of headwise."""
        return self.beside(name, other.call, Apart(partial(other.truth, torch.float64), other.part))


def pinned(call: Arm, device: torch.device) -> Arm:
    """Return the call pinned to cuDNN; on a CPU, which only tests use, the plain call."""
    return Pinned(call, partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)) if device.type == "cuda" else call


def beside_cudnn(problem: Problem, look: Look, name: str = CUDNN) -> Prepared:
    """Compare a statistic of causal weights with cuDNN's forward (a CPU: the fused one) on some rows."""
    q, k, v = problem.qkv
    rows = problems.some_rows(problem)
    judge = Apart(lambda: {"output": problem.output(rows)}, lambda result: {"output": result[:, :, rows]})
    return look.beside(name, pinned(lambda: sdpa(q, k, v, is_causal=True), q.device), judge)


# Statistics and pictures


def heads_judged(problem: Problem) -> list[int]:
    """Return the heads to check: all, or the last (farthest in memory) if float64 takes too long."""
    B, H, T, _ = problem.q.shape
    return list(range(H)) if B * H * T * problem.k.shape[2] <= MOST_JUDGED else [H - 1]


def true_statistics(
    problem: Problem, heads: Sequence[int], names: Sequence[str], cells: int | None, dtype: torch.dtype
) -> Values:
    """Return the true statistics, by default all, of some heads; with `cells`, pooled maps, too."""
    values = truths.statistics(problem, heads, dtype)
    chosen = {name: values[name] for name in names or values}
    return chosen if cells is None else {**chosen, "pooled": truths.pooled(problem, cells, heads, dtype)}


def of_heads(heads: Sequence[int]) -> Callable[[Mapping[str, Tensor]], Values]:
    """Return the statistics of some heads."""
    return lambda result: {name: values[:, heads] for name, values in result.items()}


def statistics_of(
    problem: Problem, names: Sequence[str] = (), cells: int | None = None, **rules: Any
) -> Look:
    """Return the call for statistics, by default all, and pooled maps; `rules` are masks besides causal."""
    weights = hw.attention(*problem.qkv, causal=True, **rules)[1]
    heads = heads_judged(problem)
    return Look(
        lambda: weights.statistics(*names, pooled=cells),
        partial(true_statistics, problem, heads, names, cells),
        of_heads(heads),
    )


def statistics(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, names: Sequence[str] = (), forward: str = CUDNN
) -> Prepared:
    """Compare statistics and, if `cells` is not 0, pooled maps."""
    problem = problems.make(sizes, device, dtype, problems.causal)
    return beside_cudnn(problem, statistics_of(problem, names, sizes.get("cells")), forward)


def beside_eager(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare all statistics with the matrix in eager torch."""
    problem = problems.make(sizes, device, dtype, problems.causal)
    q, k, v = problem.qkv
    weights, hidden = hw.attention(q, k, v, causal=True)[1], ~problem.mask()
    arms: dict[str, Arm] = {
        OURS: weights.statistics,
        DENSE: lambda: peers.dense_statistics(q, k, hidden),
    }
    return Prepared(arms, lambda: in_bands(truths.statistics(problem)), in_bands)


def grouped(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare heads that share a key head with heads that have copies of it."""
    problem = problems.make(sizes, device, dtype, problems.causal)
    group = sizes["H"] // sizes["Hk"]
    k, v = (x.repeat_interleave(group, dim=1) for x in (problem.k, problem.v))
    alone = replace(problem, k=k, v=v)
    cells = sizes["cells"]
    return statistics_of(problem, cells=cells).beside_look(UNGROUPED, statistics_of(alone, cells=cells))


def window(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare a causal window with the call without it."""
    W, cells = sizes["W"], sizes["cells"]
    problem = problems.make(sizes, device, dtype, problems.causal)
    near = replace(problem, visible=problems.window(W))
    return statistics_of(near, cells=cells, window=W).beside_look(
        WHOLE_CAUSAL, statistics_of(problem, cells=cells)
    )


def half_padding(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare sequences whose second half is padding with sequences without padding.

    The truth is that of the first half alone, with nothing after it.
    """
    half, cells = sizes["L"] // 2, sizes["cells"]
    problem = problems.make(sizes, device, dtype, problems.causal)
    heads = heads_judged(problem)
    real = replace(problem, **{name: getattr(problem, name)[:, :, :half] for name in "qkv"})
    lengths = torch.full((sizes["B"],), half, device=device)
    padded = statistics_of(problem, cells=cells, mask=hw.Mask.padding(lengths, lengths))

    def truth(dtype: torch.dtype) -> Values:
        values = true_statistics(real, heads, (), cells // 2, dtype)
        after = sizes["L"] - half, cells - cells // 2
        received = pad(values["received"], (0, after[0]))
        return {**values, "received": received, "pooled": pad(values["pooled"], (0, after[1]) * 2)}

    return replace(padded, truth=truth).beside_look(UNPADDED, statistics_of(problem, cells=cells))


# Weights


def mean_heads(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare the mean over heads."""
    problem = problems.make(sizes, device, dtype, problems.causal)
    weights, rows = hw.attention(*problem.qkv, causal=True)[1], problems.some_rows(problem)
    look = Look(
        weights.mean_heads,
        lambda dtype: {"mean": truths.mean_weights(problem, rows, dtype)[:, None]},
        lambda result: {"mean": result[:, None, rows]},
    )
    return beside_cudnn(problem, look)


def dense(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare the full matrix of some heads with a copy of as many numbers: the limit of the memory."""
    count = sizes["heads"]
    problem = problems.make(sizes, device, dtype, problems.causal)
    weights, rows = hw.attention(*problem.qkv, causal=True)[1], problems.some_rows(problem)
    some = replace(problem, **{name: getattr(problem, name)[:, :count] for name in "qkv"})
    source = torch.randn(sizes["B"], count, sizes["L"], sizes["L"], device=device, dtype=dtype)
    copied = torch.empty_like(source)
    look = Look(
        lambda: weights.select(heads=slice(0, count)).dense(),
        lambda dtype: {"weights": some.weights(rows, dtype)[1]},
        lambda result: {"weights": result[:, :, rows]},
    )
    judge = Apart(
        lambda: {"copied": source[:, :, rows].double()}, lambda result: {"copied": result[:, :, rows]}
    )
    return look.beside(COPY, lambda: copied.copy_(source), judge)


def top(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare the weights of the top keys, and the true weights of the returned keys."""
    count = sizes["count"]
    problem = problems.make(sizes, device, dtype, problems.causal)
    weights, rows = hw.attention(*problem.qkv, causal=True)[1], problems.some_rows(problem)

    def truth(dtype: torch.dtype) -> Values:
        heaviest = problem.weights(rows, dtype)[1].topk(count).values
        return {"values": heaviest, "named": heaviest}

    def part(result: Any) -> Values:
        values, keys = (x[:, :, rows] for x in result)
        named = problem.weights(rows)[1].gather(-1, keys.clamp(min=0).long())
        return {"values": values, "named": named.masked_fill(keys < 0, 0)}

    return beside_cudnn(problem, Look(lambda: weights.top(count), truth, part))


# The way back


def entropy_gradient(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare the entropy of every query and its gradients with cuDNN's forward and backward.

    Of cuDNN, output and dq are judged on some rows: they need no other row.
    """
    problem = problems.make(sizes, device, dtype, problems.causal)
    q, k, v = (x.requires_grad_() for x in problem.qkv)
    weights, heads = hw.attention(q, k, v, causal=True)[1], heads_judged(problem)
    upstream = torch.randn(q.shape[:3], device=device)
    grad, rows = torch.randn(q.shape, device=device).to(dtype), problems.some_rows(problem)
    plain = Problem(q.detach(), k.detach(), v.detach(), problems.causal)

    def ours() -> tuple[Tensor, ...]:
        entropy = weights.statistics("entropy", per="query").entropy
        return entropy.detach(), *torch.autograd.grad(entropy, (q, k), upstream)

    def part(result: tuple[Tensor, ...]) -> Values:
        return {name: values[:, heads] for name, values in zip(("entropy", "dq", "dk"), result, strict=True)}

    def theirs() -> tuple[Tensor, ...]:
        output = sdpa(q, k, v, is_causal=True)
        return output.detach(), *torch.autograd.grad(output, (q, k, v), grad)

    def truth_of_theirs() -> Values:
        leaf = q.detach().double().requires_grad_()
        output = replace(plain, q=leaf).output(rows)
        (dq,) = torch.autograd.grad(output, leaf, grad[:, :, rows].double())
        return {"output": output.detach(), "dq": dq[:, :, rows]}

    look = Look(ours, lambda dtype: truths.entropy_gradients(plain, upstream, heads, dtype), part)
    judge = Apart(
        truth_of_theirs, lambda result: {"output": result[0][:, :, rows], "dq": result[1][:, :, rows]}
    )
    return look.beside(BOTH_WAYS, pinned(theirs, device), judge)


SMALL = {"H": 2, "L": 48, "D": 16}
SMALL_PICTURE = {**SMALL, "cells": 6}
FEW = 7  # turns where one call takes a good part of a second
SOME = 12  # where it takes a tenth
case = partial(Case, tiny=SMALL, peer=CUDNN, devices=("cuda",), memory=True)

for length in (16384, 131072):
    whole = {"B": 1, "H": 32, "L": length, "D": 128}
    at_length = partial(case, most_repeats=FEW if length > 16384 else None)
    for cells in (128, 512):
        register(
            at_length(
                f"second_pass_rows_cells{cells}_L{length}",
                f"lse known: entropy, confidence, distance, largest logit, a picture of {cells} x {cells}",
                partial(statistics, names=ROWS),
                {**whole, "cells": cells},
                tiny=SMALL_PICTURE,
                target=0.7 if cells == 128 else None,
                headline=cells == 128,
            )
        )
    register(
        at_length(
            f"second_pass_received_L{length}",
            "lse known: attention received by every key",
            partial(statistics, names=("received",)),
            whole,
            target=0.58,
        )
    )
    register(
        at_length(
            f"second_pass_everything_L{length}",
            "lse known: all statistics, a picture of 128 x 128",
            statistics,
            {**whole, "cells": 128},
            tiny=SMALL_PICTURE,
            target=1.25,
        )
    )

for kind, names, target in (
    ("entropy", ("entropy",), 1.25),
    ("rows", tuple(ROW_STATISTICS), 1.6),
    ("everything", (), 1.85),
):
    register(
        Case(
            f"second_pass_cpu_{kind}_L8192",
            f"lse known: statistics of every head ({kind}), beside the fused forward",
            partial(statistics, names=names, forward=FUSED),
            {"B": 1, "H": 8, "L": 8192, "D": 64},
            tiny=SMALL,
            peer=FUSED,
            devices=("cpu",),
            target=target,
            most_repeats=FEW,
        )
    )

LONG = {"B": 1, "H": 32, "L": 16384, "D": 128}
register(
    case(
        "second_pass_mean_heads_L16384",
        "lse known: weights, mean over heads",
        mean_heads,
        LONG,
        target=0.85,
    )
)
register(
    case(
        "second_pass_dense8_L16384",
        "lse known: weights of 8 heads, the whole matrix",
        dense,
        {**LONG, "heads": 8},
        tiny={**SMALL, "heads": 1},
        peer=COPY,
        target=1.43,  # 70% of the bandwidth a copy reaches
    )
)
register(
    case(
        "second_pass_top8_L16384",
        "lse known: the 8 heaviest keys of every query",
        top,
        {**LONG, "count": 8},
        tiny={**SMALL, "count": 3},
    )
)
register(
    case(
        "second_pass_gqa_L16384",
        "lse known: all statistics, a picture of 128 x 128, 32 heads over 8 key heads",
        grouped,
        {**LONG, "Hk": 8, "cells": 128},
        tiny={**SMALL_PICTURE, "H": 4, "Hk": 2},
        peer=UNGROUPED,
        target=1.05,
    )
)
register(
    case(
        "second_pass_window4096_L131072",
        "lse known: all statistics, a picture of 128 x 128, a window of 4096 keys",
        window,
        {**LONG, "L": 131072, "W": 4096, "cells": 128},
        tiny={**SMALL_PICTURE, "W": 7},
        peer=WHOLE_CAUSAL,
        target=0.1,
        most_repeats=FEW,
    )
)
register(
    case(
        "second_pass_half_padding_L16384",
        "lse known: all statistics, a picture of 128 x 128, half of every sequence padding",
        half_padding,
        {**LONG, "B": 4, "cells": 128},
        tiny={**SMALL_PICTURE, "B": 3},
        peer=UNPADDED,
        most_repeats=SOME,
    )
)
register(
    case(
        "second_pass_statistics_L16384",
        "lse known: all statistics of every head",
        beside_eager,
        LONG,
        peer=DENSE,
        target=0.05,
        headline=True,
        most_repeats=SOME,
    )
)
for length in (256, 512):
    register(
        case(
            f"second_pass_statistics_L{length}",
            "lse known: all statistics of every head",
            beside_eager,
            {"B": 4, "H": 16, "L": length, "D": 64},
            peer=DENSE,
            target=1.0,
        )
    )
register(
    case(
        "second_pass_entropy_gradient_L16384",
        "lse known: entropy of every query, forward and backward",
        entropy_gradient,
        LONG,
        peer=BOTH_WAYS,
        factor=3.0,
    )
)
