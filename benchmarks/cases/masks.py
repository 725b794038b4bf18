"""Masks, grouped heads and scoring: rules instead of a matrix, beside torch with the matrix made beforehand.

The peers' dense masks are inputs: neither the time to make them nor their memory is counted against them.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import headwise as hw

from .. import flex, peers
from .. import problem as problems
from ..problem import Problem, Visibility
from ..registry import OURS, Arm, Case, Prepared, Sizes, register
from .attention import on_rows

DENSE = "SDPA, dense mask"
EAGER = "eager"
FLEX = "FlexAttention, compiled"


def _dense(problem: Problem) -> Arm:
    q, k, v = problem.qkv
    mask = problem.mask()
    return lambda: sdpa(q, k, v, attn_mask=mask)


def _flex(problem: Problem, rule: flex.SizedRule) -> dict[str, Arm]:
    """Return FlexAttention, compiled at its first call; it is a peer on a GPU only, which has a compiler."""
    q, k, v = problem.qkv
    if q.device.type != "cuda":
        return {}

    @cache
    def built() -> flex.Flex:
        torch._dynamo.reset()  # after eight recompilations it would give up
        (scores,) = rule.scores[:1]
        return flex.Flex(rule, scores[flex.FLEX], q, k)

    return {FLEX: lambda: built()(q, k, v)}


def window(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare a causal window."""
    W = sizes["W"]
    problem = problems.make(sizes, device, dtype, problems.window(W))
    q, k, v = problem.qkv
    ours: Arm = lambda: hw.attention(q, k, v, causal=True, window=W)[0]  # noqa: E731
    rule = flex.SizedRule({}, lambda b, h, i, j: (j <= i) & (j > i - W))
    return on_rows(problem, {OURS: ours, DENSE: _dense(problem), **_flex(problem, rule)})


def causal_padding(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare causal attention over sequences of a quarter to the full length."""
    B, L = sizes["B"], sizes["L"]
    lengths = torch.linspace(L, L / 4, B).long().to(device)
    visible: Visibility = problems.all_of(problems.causal, problems.padding(lengths))
    problem = problems.make(sizes, device, dtype, visible)
    q, k, v = problem.qkv
    mask = hw.Mask.padding(lengths)
    ours: Arm = lambda: hw.attention(q, k, v, mask=mask, causal=True)[0]  # noqa: E731
    rule = flex.SizedRule({}, lambda b, h, i, j: (j <= i) & (j < lengths[b]), by_sequence=True)
    return on_rows(problem, {OURS: ours, DENSE: _dense(problem), **_flex(problem, rule)})


def documents(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare documents packed in one sequence; a loop over the documents is a peer, too."""
    L, count = sizes["L"], sizes["documents"]
    ends = torch.linspace(0, 1, count + 1)[1:] ** 1.5 * L  # uneven: early documents are short
    ids = torch.bucketize(torch.arange(L), ends.round().long()[:-1], right=True).to(device)
    problem = problems.make(sizes, device, dtype, problems.all_of(problems.causal, problems.documents(ids)))
    q, k, v = problem.qkv
    mask = hw.Mask.documents(ids)
    pieces = ids.bincount().tolist()

    def loop() -> Tensor:
        parts = zip(*(torch.split(x, pieces, dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([sdpa(q1, k1, v1, is_causal=True) for q1, k1, v1 in parts], dim=2)

    arms: dict[str, Arm] = {
        OURS: lambda: hw.attention(q, k, v, mask=mask, causal=True)[0],
        DENSE: _dense(problem),
        "SDPA, one call a document": loop,
        **_flex(problem, flex.SizedRule({}, lambda b, h, i, j: (j <= i) & (ids[i] == ids[j]))),
    }
    return on_rows(problem, arms)


def gqa_decode(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare one new query over a long cache, with grouped heads."""
    problem = problems.make(sizes, device, dtype)
    q, k, v = problem.qkv
    B, H, _, D = q.shape
    grouped = q.view(B, k.shape[1], -1, D)  # the heads of a group as rows
    arms: dict[str, Arm] = {
        OURS: lambda: hw.attention(q, k, v, causal=True)[0],
        "SDPA, enable_gqa": lambda: sdpa(q, k, v, enable_gqa=True),
        "SDPA, groups as rows": lambda: sdpa(grouped, k, v).view(B, H, 1, D),
    }
    return on_rows(problem, arms)


def lower_right(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare a few queries over a long cache: the last query is aligned with the last key."""
    problem = problems.make(sizes, device, dtype, problems.causal)
    q, k, v = problem.qkv
    past = k.shape[2] - q.shape[2]
    arms: dict[str, Arm] = {
        OURS: lambda: hw.attention(q, k, v, causal=True)[0],
        DENSE: _dense(problem),
        **_flex(problem, flex.SizedRule({}, lambda b, h, i, j: j <= i + past)),
    }
    return on_rows(problem, arms)


def sinks(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Prepared:
    """Compare learned sinks."""
    plain = problems.make(sizes, device, dtype, problems.causal)
    q, k, v = plain.qkv
    column = torch.randn(sizes["H"]).to(device, dtype)
    hidden = ~plain.mask()
    arms: dict[str, Arm] = {
        OURS: lambda: hw.attention(q, k, v, causal=True, sinks=column)[0],
        EAGER: lambda: peers.with_sinks(q, k, v, hidden, column),
        **_flex(plain, flex.SizedRule({"sinks": column}, flex.causal)),
    }
    return on_rows(Problem(q, k, v, problems.causal, sinks=column), arms)


def softcap(sizes: Sizes, device: torch.device, dtype: torch.dtype, cap: float = 20.0) -> Prepared:
    """Compare softcapped scores, in (-cap, cap)."""
    problem = problems.make(sizes, device, dtype, problems.causal, cap)
    q, k, v = problem.qkv
    hidden = ~problem.mask()

    def bent(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(s / cap) * cap

    arms: dict[str, Arm] = {
        OURS: lambda: hw.attention(q, k, v, causal=True, softcap=cap)[0],
        EAGER: lambda: peers.with_softcap(q, k, v, hidden, cap),
        **_flex(problem, flex.SizedRule({}, flex.causal, ({flex.FLEX: bent},))),
    }
    return on_rows(problem, arms)


SMALL = {"H": 2, "L": 45, "D": 16}
case = partial(Case, peer=DENSE)
register(
    case(
        "window256_L8192",
        "causal window of 256 keys",
        window,
        {"B": 1, "H": 8, "L": 8192, "D": 64, "W": 256},
        tiny={**SMALL, "W": 7},
        target=0.2,
        memory=True,
        headline=True,
    )
)
register(
    case(
        "causal_padding_L1024",
        "causal, padded sequences",
        causal_padding,
        {"B": 4, "H": 8, "L": 1024, "D": 64},
        tiny={**SMALL, "B": 3},
    )
)
register(
    case(
        "documents_L4096",
        "causal, 8 packed documents",
        documents,
        {"B": 1, "H": 8, "L": 4096, "D": 64, "documents": 8},
        tiny={**SMALL, "documents": 3},
        memory=True,
    )
)
register(
    case(
        "gqa_decode",
        "one query, 32 heads over 8 key heads",
        gqa_decode,
        {"B": 1, "H": 32, "Hk": 8, "T": 1, "S": 4096, "D": 128},
        tiny={"H": 8, "Hk": 2, "S": 245, "D": 64},
        peer="SDPA, enable_gqa",
    )
)
register(
    case(
        "lower_right_T256_S4096",
        "causal, 256 queries after a past of 3840",
        lower_right,
        {"B": 1, "H": 8, "T": 256, "S": 4096, "D": 64},
        tiny={"H": 2, "T": 9, "S": 45, "D": 16},
    )
)
register(
    case(
        "sinks_L1024",
        "causal, learned sinks",
        sinks,
        {"B": 1, "H": 8, "L": 1024, "D": 64},
        tiny=SMALL,
        peer=EAGER,
    )
)
register(
    case(
        "softcap_L1024",
        "causal, scores capped at 20",
        softcap,
        {"B": 1, "H": 8, "L": 1024, "D": 64},
        tiny=SMALL,
        peer=EAGER,
    )
)
