"""How heads of a layer differ, and heads as points and groups, against formulas written out plainly.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise import Mask, heads, reference
from headwise.errors import ArgumentError, BudgetExceeded, ShapeError
from headwise.heads import measures
from judge import error

B, H, HK, T, S, D = 2, 6, 3, 13, 17, 7
REAL = torch.arange(T) < torch.tensor([[8], [T]])  # which queries count
LEFT = torch.arange(S) >= torch.tensor([[5], [0]])  # which keys are real


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K = 2 * normal(0, B, H, T, D), normal(1, B, HK, S, D)
MAPS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": Mask.causal()},
    "padding": {"mask": Mask.causal() & Mask.padding(LEFT, REAL)},
    "window": {"mask": Mask.window(4)},
    "sinks": {"mask": Mask.causal(), "sinks": normal(2, H)},
    "some see nothing": {"mask": Mask.dense(normal(3, H, T, S) > 1.5)},
}


def map_and_truth(
    name: str, dtype: torch.dtype = torch.float64, sinks: bool = True
) -> tuple[hw.AttentionMap, Tensor, Tensor]:
    """(map, weights [B, H, T, S] or with a sink's column, which queries count [B, H, T])."""
    q, k = Q.to(dtype), K.to(dtype)
    options = {n: x.to(dtype) if isinstance(x, Tensor) else x for n, x in MAPS[name].items()}
    wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
    p = reference.attention(q.double(), k.double(), k.double(), **wide)[1]
    counts = p.sum(-1) > 0
    if name == "padding":
        counts = counts & REAL[:, None]
    if "sinks" in options and sinks:
        p = torch.cat([p, 1 - p.sum(-1, keepdim=True)], dim=-1)
    return hw.AttentionMap(q, k, **options), p, counts


def pairwise(p: Tensor, counts: Tensor, formula: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """[B, H, H]: the mean of a formula of two heads' rows over the queries that count for both."""
    actual = torch.empty(B, H, H, dtype=torch.float64)
    for b, a, c in itertools.product(range(B), range(H), range(H)):
        both = counts[b, a] & counts[b, c]
        actual[b, a, c] = formula(p[b, a][both], p[b, c][both]).mean()
    return actual


def js(p: Tensor, q: Tensor) -> Tensor:
    m = (p + q) / 2
    return (torch.xlogy(p, p / m).nan_to_num(0) + torch.xlogy(q, q / m).nan_to_num(0)).sum(-1) / 2


def product(p: Tensor, q: Tensor) -> Tensor:
    return (p * q).sum(-1)


# Where heads look


@pytest.mark.parametrize("name", MAPS)
def test_jensen_shannon_is_the_mean_divergence_of_two_heads_rows(name: str) -> None:
    w, p, counts = map_and_truth(name)
    actual = heads.jensen_shannon(w)
    assert error(actual, pairwise(p, counts, js)) < 1e-12
    assert torch.equal(actual, actual.transpose(1, 2)) and actual.diagonal(dim1=1, dim2=2).eq(0).all()
    assert actual.max() <= math.log(2) * (1 + 1e-15)


def test_half_precision_is_compared_in_float32() -> None:
    for dtype, tight in ((torch.float32, 1e-6), (torch.bfloat16, 2e-3)):  # bfloat16 weights are rounded ones
        w, p, counts = map_and_truth("causal", dtype)
        for actual, formula in ((heads.jensen_shannon(w), js), (heads.attention_overlap(w), product)):
            assert actual.dtype == torch.float32
            assert error(actual, pairwise(p, counts, formula)) < tight


def test_smoothing_leaves_padding_alone() -> None:
    """Clark's script adds 0.001 / L to 0.999 of the weights."""
    w, p, counts = map_and_truth("padding")
    evenly = LEFT.double() / LEFT.sum(-1, keepdim=True)  # [B, S]
    smoothed = 0.9 * p + 0.1 * evenly[:, None, None]
    assert error(heads.jensen_shannon(w, smooth=0.1), pairwise(smoothed, counts, js)) < 1e-12


@pytest.mark.parametrize("name", MAPS)
def test_overlap_is_the_mean_product_of_two_heads_rows(name: str) -> None:
    w, p, counts = map_and_truth(name, sinks=False)
    assert error(heads.attention_overlap(w), pairwise(p, counts, product)) < 1e-12


@pytest.mark.parametrize("measure", [heads.jensen_shannon, heads.attention_overlap])
def test_a_few_queries_are_evenly_spaced_among_those_that_count(measure: Callable[..., Tensor]) -> None:
    w, p, counts = map_and_truth("padding")
    chosen = torch.zeros_like(counts)
    chosen[0, :, [2, 4, 6]] = True  # of 1 to 7: the first of the 8 real ones sees nothing
    chosen[1, :, [2, 6, 10]] = True  # of 13
    formula = js if measure is heads.jensen_shannon else product
    assert error(measure(w, queries=3), pairwise(p, counts & chosen, formula)) < 1e-12
    assert torch.equal(measure(w, queries=99), measure(w))


@pytest.mark.parametrize("measure", [heads.jensen_shannon, heads.attention_overlap])
def test_rows_are_read_in_blocks(measure: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    w, _, _ = map_and_truth("padding")
    whole = measure(w)
    with hw.budget.limit(2 * H * S * 8):  # two rows of every head
        assert error(measure(w), whole) < 1e-13
    monkeypatch.setattr(measures, "BLOCK", 1)
    assert error(measure(w), whole) < 1e-13
    with hw.budget.limit(H * S * 8 - 1), pytest.raises(BudgetExceeded, match="dense weights"):
        measure(hw.AttentionMap(Q, K))


@pytest.mark.parametrize("measure", [heads.jensen_shannon, heads.attention_overlap])
def test_long_inputs_are_compared_without_a_matrix(measure: Callable[..., Tensor]) -> None:
    length = 4096
    q, k = normal(0, 2, 1, 2, length, 8).float()
    w = hw.AttentionMap(q, k, causal=True)
    with hw.budget.limit("4 MiB"):
        actual = measure(w)
        few = measure(w, queries=500)
    assert actual.isfinite().all() and error(few, actual) < 0.02


@pytest.mark.parametrize("measure", [heads.jensen_shannon, heads.attention_overlap])
def test_a_sequence_of_padding_compares_to_nothing(measure: Callable[..., Tensor]) -> None:
    w = hw.AttentionMap(Q, K, mask=Mask.padding([0, 9]))
    actual = measure(w)
    assert actual[0].isnan().all() and not actual[1].isnan().any()


@pytest.mark.parametrize("measure", [heads.jensen_shannon, heads.attention_overlap])
def test_comparing_carries_no_gradient(measure: Callable[..., Tensor]) -> None:
    assert not measure(hw.AttentionMap(Q.clone().requires_grad_(), K)).requires_grad


# What heads say


def test_similarity_is_the_mean_cosine_over_positions() -> None:
    x = normal(5, B, HK, T, D)
    truth = torch.empty(B, HK, HK, dtype=torch.float64)
    counted = torch.empty_like(truth)
    for b, a, c in itertools.product(range(B), range(HK), range(HK)):
        cosines = torch.cosine_similarity(x[b, a], x[b, c], dim=-1)
        truth[b, a, c], counted[b, a, c] = cosines.mean(), cosines[REAL[b]].mean()
    assert error(heads.similarity(x), truth) < 1e-13
    assert error(heads.similarity(x, REAL), counted) < 1e-13
    low = heads.similarity(x.bfloat16())
    assert low.dtype == torch.float32
    assert error(low, heads.similarity(x.bfloat16().double())) < 1e-6


def test_similarity_may_be_trained() -> None:
    x = normal(5, 1, 3, 5, 2)
    x[:, 0, 0] = 0  # no direction, no NaN
    others = x[:, 1:].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda y: heads.similarity(torch.cat([x[:, :1], y], 1)), (others,))
    assert heads.similarity(x)[0, 0, 0] == pytest.approx(4 / 5)
    y = x.clone().requires_grad_()
    heads.one_number(heads.similarity(y)).sum().backward()
    assert y.grad is not None and y.grad.isfinite().all()


def test_one_number_is_the_mean_over_pairs_of_different_heads() -> None:
    matrix = normal(6, B, H, H)
    others = ~torch.eye(H, dtype=torch.bool)
    truth = torch.stack([m[others].mean() for m in matrix])
    assert error(heads.one_number(matrix), truth) < 1e-14
    matrix[0, 0, 1] = math.nan
    truth[0] = matrix[0][others].nanmean()
    assert error(heads.one_number(matrix), truth) < 1e-14
    assert heads.one_number(torch.ones(B, 1, 1)).isnan().all()


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda w: heads.jensen_shannon(w, smooth=1.0), ArgumentError, "at least 0 and below 1: got 1.0"),
        (lambda w: heads.jensen_shannon(w, smooth=-0.5), ArgumentError, "and below 1: got -0.5"),
        (lambda w: heads.jensen_shannon(w, queries=0), ArgumentError, "queries must be at least 1: got 0"),
        (lambda w: heads.attention_overlap(w, queries=-3), ArgumentError, "at least 1: got -3"),
        (
            lambda w: heads.jensen_shannon(w.select(keys=[2])),
            ArgumentError,
            "must be called on a map of all keys",
        ),
        (lambda w: heads.attention_overlap(w.select(keys=[2])), ArgumentError, "has 1 of 17 keys"),
        (lambda w: heads.similarity(Q[0]), ShapeError, "4 dimensions [B, H, T, D]: got 3, [6, 13, 7]"),
        (lambda w: heads.similarity(Q.long()), ArgumentError, "x must be floating point: got torch.int64"),
        (lambda w: heads.similarity(Q, REAL[:1]), ShapeError, "per position: [1, 13] for [B, T] = [2, 13]"),
        (lambda w: heads.similarity(Q, REAL.int()), ArgumentError, "counted must be bool: got torch.int32"),
        (lambda w: heads.one_number(Q), ShapeError, "matrix must be square [B, H, H]: got [2, 6, 13, 7]"),
    ],
)
def test_diversity_refuses(ask: Callable[[Any], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        ask(hw.AttentionMap(Q, K))


# Points and groups


def test_points_of_a_plane_are_laid_out_as_they_were() -> None:
    points = normal(7, 11, 2) * torch.tensor([3.0, 1.0])
    away = torch.cdist(points, points)
    actual = heads.layout(away)
    assert actual.shape == (11, 2)
    assert error(torch.cdist(actual, actual), away) < 1e-12
    assert actual.mean(0).abs().max() < 1e-12
    assert actual[:, 0].var() > actual[:, 1].var()


def test_a_layout_is_the_same_each_time_and_never_mirrored() -> None:
    points = normal(8, 7, 2)
    away = torch.cdist(points, points)
    actual = heads.layout(away)
    farthest = actual.abs().argmax(0)
    assert actual[farthest[0], 0] > 0 and actual[farthest[1], 1] > 0
    assert torch.equal(actual, heads.layout(away))
    mirrored = torch.cdist(-points, -points)
    assert error(heads.layout(mirrored), actual) < 1e-12


def test_few_heads_and_equal_heads_have_a_layout() -> None:
    assert torch.equal(heads.layout(torch.zeros(1, 1)), torch.zeros(1, 2))
    assert torch.equal(heads.layout(torch.zeros(3, 3)), torch.zeros(3, 2))
    line = heads.layout(torch.tensor([[0, 4], [4, 0]]))
    assert line.dtype == torch.float32 and line.tolist() == [[2, 0], [-2, 0]]


def grouped(away: Tensor, count: int, threshold: float) -> list[int]:
    """Average linkage as its definition says: means over all pairs, taken anew each time."""
    groups = [[i] for i in range(len(away))]
    while len(groups) > count:
        means = {
            (a, c): away[groups[a]][:, groups[c]].mean().item()
            for a, c in itertools.combinations(range(len(groups)), 2)
        }
        a, c = min(means, key=lambda pair: means[pair])
        if means[a, c] > threshold:
            break
        groups[a] += groups.pop(c)
    number = {i: n for n, group in enumerate(sorted(map(sorted, groups))) for i in group}
    return [number[i] for i in range(len(away))]


@settings(max_examples=25)
@given(st.integers(1, 11), st.integers(0, 10**6), st.data())
def test_clusters_are_those_of_average_linkage(size: int, seed: int, data: st.DataObject) -> None:
    points = normal(seed, size, 3)
    away = (points[:, None] - points).norm(dim=-1)
    count = data.draw(st.integers(1, size))
    assert heads.clusters(away, count=count) == grouped(away, count, math.inf)
    assert heads.clusters(away, threshold=1.3) == grouped(away, 1, 1.3)


def test_clusters_are_numbered_as_they_appear() -> None:
    places = torch.tensor([9.0, 0.0, 9.1, 5.0, 0.1])
    away = (places[:, None] - places).abs()
    assert heads.clusters(away, count=3) == [0, 1, 0, 2, 1]
    assert heads.clusters(away, threshold=0.0) == [0, 1, 2, 3, 4]
    assert heads.clusters(torch.zeros(3, 3), threshold=0) == [0, 0, 0]
    assert heads.clusters(torch.ones(4, 4) - torch.eye(4), count=2) == [0, 0, 0, 1]  # of equals the first


SQUARE = torch.ones(3, 3) - torch.eye(3)


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda: heads.layout(torch.ones(2, 3)), ShapeError, "distances must be square [N, N]: got [2, 3]"),
        (lambda: heads.layout(torch.ones(0, 0)), ShapeError, "got [0, 0]"),
        (lambda: heads.layout(SQUARE * math.nan), ArgumentError, "distances must be finite: found nan"),
        (lambda: heads.clusters(SQUARE / 0, 2), ArgumentError, "distances must be finite: found"),
        (lambda: heads.layout(-SQUARE), ArgumentError, "distances must not be negative: found -1"),
        (lambda: heads.layout(SQUARE.triu()), ArgumentError, "[i, j] and [j, i] differ by 1"),
        (lambda: heads.clusters(SQUARE), ArgumentError, "got count=None, threshold=None"),
        (lambda: heads.clusters(SQUARE, 2, 0.5), ArgumentError, "got count=2, threshold=0.5"),
        (lambda: heads.clusters(SQUARE, 4), ArgumentError, "1 and the number of heads: got 4 of 3"),
        (lambda: heads.clusters(SQUARE, 0), ArgumentError, "1 and the number of heads: got 0 of 3"),
        (lambda: heads.clusters(SQUARE, threshold=-0.25), ArgumentError, "must not be negative: got -0.25"),
    ],
)
def test_points_and_groups_refuse(ask: Callable[[], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        ask()
