"""The Triton kernels of the second pass, run by Triton's interpreter on a CPU in tiles of 16 x 16.

Every rule of a mask and every option meets every kernel, behind the public names, with room for results full
of NaN. What a GPU adds to this (compiling, matrix units, sizes) is in test_cuda_second_pass.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import headwise as hw
from as_torch_cases import always_in_one_step
from headwise import Mask
from headwise.engines import second_pass
from headwise.engines import statistics as statistics_room
from headwise.engines.gpu import launches
from headwise.engines.statistics import ACCUMULATORS, ROW_STATISTICS, STATISTICS, Accumulator, Statistic
from headwise.reference import allowed
from headwise.scoring import Alibi, Relative
from judge import Case, assert_judged, error, largest, sizes
from second_pass_cases import (
    HIDDEN_TILES,
    counted_weights,
    expected,
    gradients,
    map_of,
    masks,
    misaligned,
    normal,
    numbers,
    options,
    relaid,
    scores_of,
    strided,
    turned,
    values,
)

pytest.importorskip("triton", reason="by design: triton is made for Linux alone")
if torch.cuda.is_available():
    pytest.skip("by design: with a GPU, test_cuda_second_pass.py", allow_module_level=True)

import interpreted_kernels
from headwise.engines.gpu import request as request_room

interpreted, mended = interpreted_kernels.interpreted, interpreted_kernels.mended
poisoned, launched = interpreted_kernels.poisoned, interpreted_kernels.launched


# Cases: every kind of mask, each with an option; sizes, options and layouts take turns

SIZES = (  # H, Hk, T, S, D: for one sequence, three tiles one way at least
    (2, 2, 37, 23, 16),
    (2, 1, 19, 41, 24),
    (2, 2, 43, 17, 40),
    (4, 2, 1, 43, 5),
    (2, 1, 32, 32, 72),
    (2, 2, 37, 37, 16),
)
PAIRS = (  # the same for two sequences, whose rules differ
    (1, 1, 19, 31, 24),
    (1, 1, 23, 17, 5),
    (2, 1, 17, 32, 16),
    (1, 1, 17, 29, 40),
    (1, 1, 19, 19, 8),
    (1, 1, 17, 23, 24),
)
ALIKE = ("full", "causal", "window", "band", "wide band", "nothing at all", "documents")  # one rule for all
BACK = (("dense",), ("entropy",), ("mean",), ("keys", "entropy"), ("row",), ("entropy",))
PARTS = (("rows",), (), ("keys",), ("picked",), ())
PICTURES = ((3, 2), (2, 1), (16, 8), (2, 2), (10**9, 10**9), (5, 1))  # narrow and wide, aligned and not


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "strided": strided,
    "turned": turned,
    "misaligned": misaligned,
    "pointers": lambda x: x,
}


def small_masks(B: int, H: int, T: int, S: int) -> dict[str, Mask]:
    """Every kind of mask, at sizes of a few tiles of 16."""
    actual = masks(B, H, T, S, window=7, band=(5, 3), document=6)
    holes, real = normal(13, B, S) > -0.3, normal(14, B, T) > -0.5
    ids, others = torch.arange(S) // 6, (torch.arange(S) + torch.tensor([[0], [3]])[:B]) // 4 % 2
    actual["holes"] = Mask.padding(holes, real)
    actual["wide band"] = Mask.window(left_right=(20, 2))
    actual["nothing at all"] = Mask.dense(torch.zeros(1, 1, T, S, dtype=torch.bool))
    actual["window holes dense"] = Mask.window(11) & Mask.padding(holes) & actual["dense"]
    if T <= S:
        actual["documents"] = Mask.documents(ids)
        actual["causal labels"] = Mask.causal() & Mask.documents(ids) & Mask.documents(others)
        some = Mask.padding(torch.tensor([S - 5, 7])[:B], torch.tensor([T, T - 1])[:B])
        actual["lengths documents"] = some & Mask.documents(ids)
    return actual


def small_options(H: int, T: int, S: int) -> dict[str, dict[str, Any]]:
    """No option, and every one."""
    lowest = torch.finfo(torch.float32).min
    hiding = normal(15, 1, H, T, S).masked_fill(normal(16, 1, 1, T, S) > 0.8, lowest)
    hiding[:, :, T // 3] = lowest
    more: dict[str, dict[str, Any]] = {
        "hiding bias": {"bias": hiding},
        "steep softcap": {"softcap": 0.7, "scale": 1.0},
        "sharp": {"scale": 4.0},
        "alibi sinks": {"bias": Alibi(normal(6, H).abs()), "sinks": normal(7, H)},
    }
    return {"plain": {}, **options(H, T, S), **more}


class Judged(NamedTuple):
    """A case, and how it is looked at."""

    case: Case
    layout: str
    looks: tuple[str, ...]  # what gradients flow through
    picture: tuple[int, int]
    parts: tuple[str, ...]


def selection() -> Iterator[tuple[str, Judged]]:
    """Every mask once, everything else in turn."""
    first, two = cycle(SIZES), cycle(PAIRS)
    turns = zip(
        cycle(small_options(2, 19, 37)), cycle(LAYOUTS), cycle(BACK), cycle(PICTURES),
        cycle(PARTS), strict=False,
    )  # fmt: skip
    for kind in small_masks(2, 2, 19, 37):
        B, shapes = (1, first) if kind in ALIKE else (2, two)
        H, Hk, T, S, D = next(shapes)
        while kind not in small_masks(B, H, T, S) or (kind == "dense a head" and H == 1):
            H, Hk, T, S, D = next(shapes)
        option, layout, looks, picture, parts = next(turns)
        case = replace(
            numbers(B, H, Hk, T, S, D),
            mask=small_masks(B, H, T, S)[kind],
            options=small_options(H, T, S)[option],
        ).to(torch.float32)
        name = f"{kind}-{option}-B{B}-H{H}-Hk{Hk}-T{T}-S{S}-D{D}-{layout}".replace(" ", "_")
        yield name, Judged(case, layout, looks, picture, parts)


CASES = dict(selection())
HOLES, CAUSAL = (next(name for name in CASES if name.startswith(kind)) for kind in ("holes-", "causal-"))
every_case = pytest.mark.parametrize("judged", CASES.values(), ids=CASES)


def laid_out(case: Case, layout: str, monkeypatch: pytest.MonkeyPatch) -> Case:
    if layout == "pointers":
        monkeypatch.setattr(request_room, "takes_descriptors", lambda device: False)
    return relaid(case, LAYOUTS[layout])


@pytest.mark.thinned(99, keep=[CAUSAL], slow=2)
@every_case
def test_everything_is_as_exact_as_plain_torch(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    w = map_of(laid_out(judged.case, judged.layout, monkeypatch))
    plain = judged.case.reference()[1:]
    assert values(judged.case, w, plain, [judged.picture], judged.parts, fused=False) == []


@pytest.mark.thinned(99, keep=[HOLES, CAUSAL], slow=2)
@every_case
def test_gradients_are_as_exact_as_plain_torch(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    def arms(low: Case) -> tuple[Case, Case]:
        return laid_out(low, judged.layout, monkeypatch), low

    assert gradients(judged.case, arms, judged.looks, learned_bias=False) == []


# Heads


def head_means(case: Case, actual: dict[str, Tensor], lse: Tensor) -> dict[str, Tensor]:
    """What a head's statistics are by their definition, from those of its queries."""
    T, S = case.q.shape[2], case.k.shape[2]
    counts = ~torch.isneginf(lse)
    real = case.mask.counted(T)
    if real is not None:
        counts = counts & real[:, None]
    means = {}
    for name, statistic in ROW_STATISTICS.items():
        mine = counts
        if statistic.offset is not None:
            key = torch.arange(T) + S - T + statistic.offset
            keys = allowed(Mask(keys=case.mask.keys), len(lse), 1, 1, S)[:, 0]  # [B, 1, S]
            mine = mine & (keys & (key[:, None] == torch.arange(S))).any(-1)[:, None]
        if statistic.largest:
            means[name] = actual[name].masked_fill(~mine, -torch.inf).amax(-1)
        else:
            means[name] = actual[name].masked_fill(~mine, 0.0).sum(-1) / mine.sum(-1)
    return means


@pytest.mark.thinned(99, keep=["nothing", "wide band"])
@pytest.mark.parametrize("kind", ["padding", "holes", "nothing", "wide band", "lengths documents"])
def test_a_head_is_the_mean_over_its_counted_queries(kind: str) -> None:
    B, H, T, S = 2, 1, 19, 23
    if kind == "wide band":  # more queries than keys: the first stand before all keys
        T, S = 23, 19
    mask = small_masks(B, H, T, S)[kind]
    case = replace(numbers(B, H, 1, T, S, 8), mask=mask, options={"sinks": normal(7, H)}).to(torch.float32)
    arms = []
    for variant in (case, case.to(torch.float64)):
        _, p, lse = variant.reference()
        by_query = expected(variant, p, lse, scores_of(p, lse), [(3, 1)])
        arms.append(head_means(variant, by_query, lse) | {"received": by_query["received"]})
        arms[-1]["pooled"] = by_query["pooled 3 1"]
    w = map_of(case)
    actual = w.statistics(pooled=(3, 1))
    assert list(actual) == [*STATISTICS, "pooled"]
    extents = {"distance": float(S), "effective_keys": float(S), "max_logit": sizes(case)["lse"]}
    for name, value in actual.items():
        plain, truth = (arm[name] for arm in arms)
        assert torch.equal(torch.isnan(value), torch.isnan(truth)), name
        close = (x.nan_to_num(0.0, neginf=-torch.inf) for x in (value, plain, truth))
        assert_judged(*close, dtype=torch.float32, size=extents.get(name, S / 4), name=name)


def test_some_statistics_are_measured_alone() -> None:
    case = replace(numbers(1, 2, 1, 19, 23, 8), mask=Mask.causal()).to(torch.float32)
    w = map_of(case)
    everything = w.statistics(per="query", reach=3)
    for names in (("local",), ("distance", "first"), ("max_logit", "next", "entropy"), ("received",)):
        some = w.statistics(*names, per="query", reach=3)
        assert list(some) == list(names)
        assert all(torch.equal(some[name], everything[name]) for name in names)
    far = w.statistics("local", per="query", reach=10**9).local
    assert error(far, torch.ones(1, 2, 19)) < 1e-6


# Invariants


@pytest.mark.parametrize(
    ("kind", "cells"),
    [
        ("causal", (1, 4)),
        ("causal", (3, 2)),
        ("window", (2, 2)),
        ("ahead", (4, 1)),
        ("padding", (2, 2)),
        ("documents", (2, 2)),
    ],
)
def test_cells_that_end_where_tiles_do_are_closed_there(kind: str, cells: tuple[int, int]) -> None:
    L = 64  # four tiles
    rules = {
        "causal": Mask.causal(),
        "window": Mask.window(23),
        "ahead": Mask.window(left_right=(5, 40)),
        "padding": Mask.causal() & Mask.padding(torch.tensor([37]), torch.tensor([37])),
        "documents": Mask.documents(torch.arange(L) // 20),
    }
    case = replace(numbers(1, 1, 1, L, L, 8), mask=rules[kind]).to(torch.float32)
    w = map_of(case)
    rows, columns = cells
    weights = counted_weights(case, w.dense())  # [1, 1, L, L]
    by_column = weights.unflatten(3, (columns, -1)).sum(4)
    truth = torch.zeros(1, 1, rows, columns).index_add_(2, torch.arange(L) * rows // L, by_column)
    assert error(w.statistics("distance", pooled=cells).pooled, truth) < 1e-5


@pytest.mark.slow
def test_more_sequences_than_a_grid_is_deep_take_more_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int, ...]] = []
    launch = request_room.launch

    def noted(kernel: Any, grid: tuple[int, int, int], *args: Any) -> None:
        grids.append(grid)
        launch(kernel, grid, *args)

    case = replace(numbers(3, 2, 1, 19, 17, 8), mask=Mask.causal()).to(torch.float32)
    monkeypatch.setattr(request_room, "DEEPEST", 2)
    monkeypatch.setattr(request_room, "launch", noted)
    w, plain = map_of(case), case.reference()[1:]
    assert values(case, w, plain, [(2, 1)], (), fused=False) == []
    assert gradients(case, lambda low: (low, low), ["entropy"]) == []
    assert {grid[2] for grid in grids} == {1, 2}


def test_the_heaviest_keys_come_first_and_of_equals_the_first() -> None:
    q, k = (x.float() for x in (normal(0, 1, 2, 7, 8), normal(1, 1, 1, 37, 8)))
    k[:, :, 20], k[:, :, 36] = k[:, :, 3], k[:, :, 3]  # three keys alike, in three tiles
    values, indices = hw.AttentionMap(q, k).top(37)
    assert bool((values.diff() <= 0).all())
    assert torch.equal(indices.sort(-1).values, torch.arange(37).expand(1, 2, 7, 37))
    places = [(indices == key).int().argmax(-1) for key in (3, 20, 36)]
    assert torch.equal(places[0] + 1, places[1]) and torch.equal(places[1] + 1, places[2])
    k = torch.zeros(1, 1, 37, 8)
    k[:, :, 20] = 1.0  # one in the second tile is heavier: the last of the others makes room
    assert torch.equal(
        hw.AttentionMap(torch.ones(1, 1, 1, 8), k).top(3).indices.flatten(), torch.tensor([20, 0, 1])
    )
    even = hw.AttentionMap(torch.zeros_like(q), k, causal=True).top(20)  # all weights of a row equal
    firsts = torch.arange(20).expand(1, 2, 7, 20)
    visible = firsts <= torch.arange(30, 37)[:, None]
    assert torch.equal(even.indices, firsts.where(visible, -1))
    assert torch.equal(even.values > 0, visible.expand(1, 2, 7, 20))


def test_many_of_the_heaviest_are_sorted_instead(
    monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    case = numbers(1, 2, 1, 19, 23, 8).to(torch.float32)
    w = map_of(case)
    few = w.top(4)
    assert launched.count("top_kernel") == 1
    monkeypatch.setattr(second_pass, "MOST", 3)
    many = w.top(4)
    assert launched.count("top_kernel") == 1
    assert torch.equal(few.indices, many.indices) and error(few.values, many.values) < 1e-6


# What is hidden is not looked at


@pytest.mark.thinned(99, keep=["holes"])
@pytest.mark.parametrize(("mask", "hidden"), HIDDEN_TILES.values(), ids=HIDDEN_TILES)
def test_a_tile_that_shows_nothing_is_not_loaded(mask: Mask, hidden: slice) -> None:
    actual = []
    for content in (0.0, torch.nan):
        q, k = (x.float() for x in (normal(0, 1, 1, 16, 8), normal(1, 1, 1, 48, 8)))
        k[:, :, hidden] = content
        leaves = q.requires_grad_(), k.requires_grad_()
        w = hw.AttentionMap(q, k, mask=mask, softcap=3.0)
        mean, stats = w.mean_heads(), w.statistics(per="query", pooled=(5, 6))
        grads = torch.autograd.grad(mean.square().sum() + stats.entropy.sum(), leaves)
        assert not bool(grads[1][:, :, hidden].any())
        few = w.select(keys=slice(3, 40)).dense()
        actual.append([w.lse, mean, few, w.pooled((3, 2)), w.top(2).values, *stats.values(), *grads])
    for clean, poisoned in zip(*actual, strict=True):
        assert torch.equal(poisoned, clean)


# Shapes, strides and dtypes


@pytest.mark.thinned
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 1, 1, 1), (1, 2, 1, 1, 17, 3), (1, 1, 1, 17, 1, 8)], ids=["one", "decode", "key"]
)
def test_the_smallest_maps_are_right(shape: tuple[int, ...]) -> None:
    case = numbers(*shape).to(torch.float32)
    w, plain = map_of(case), case.reference()[1:]
    assert values(case, w, plain, [(2, 2)], fused=False) == []
    assert gradients(case, lambda low: (low, low), ["mean", "entropy"]) == []


BROADCAST = ((23,), (2, 1, 1), (2, 1, 19, 1), (1, 2, 1, 23), (2, 2, 19, 23))


@pytest.mark.thinned
@pytest.mark.parametrize("shape", BROADCAST, ids=lambda shape: "x".join(map(str, shape)))
def test_masks_and_biases_of_any_shape_broadcast(shape: tuple[int, ...]) -> None:
    case = numbers(2, 2, 1, 19, 23, 8).to(torch.float32)
    allowed, bias = normal(20, *shape) > -0.7, normal(21, *shape).float()
    if len(shape) == 4:  # any strides, too
        allowed = allowed.transpose(1, 3).contiguous().transpose(1, 3)
        bias = bias.transpose(2, 3).contiguous().transpose(2, 3)
    case = replace(case, mask=Mask.dense(allowed), options={"bias": bias})
    w = map_of(case)
    _, plain, lse = case.reference()
    truth = case.to(torch.float64).reference()[1]
    assert_judged(w.dense(), plain, truth, dtype=torch.float32, size=max(1.0, largest(lse)))


def test_a_bias_in_half_precision_hides_with_its_lowest_number() -> None:
    case = numbers(1, 2, 2, 19, 23, 8).to(torch.float32)
    hidden = normal(22, 1, 2, 19, 23) > 0.5
    hidden[:, :, 4] = True
    bias = normal(21, 1, 2, 19, 23).half()
    lowest = bias.masked_fill(hidden, torch.finfo(torch.float16).min)
    w = hw.AttentionMap(case.q, case.k, bias=lowest)
    same = hw.AttentionMap(case.q, case.k, bias=bias, mask=~hidden)
    assert bool(torch.isneginf(w.lse[:, :, 4]).all()) and torch.equal(w.lse, same.lse)
    assert torch.equal(w.dense(), same.dense()) and not bool(w.dense()[:, :, 4].any())
    assert torch.equal(w.top(3).indices, same.top(3).indices)


def test_a_bias_in_double_precision_is_read_in_single() -> None:
    """Sums that begin in float32 and go on in float64 are nothing Triton compiles."""
    case = numbers(1, 2, 2, 19, 23, 8).to(torch.float32)
    bias = normal(21, 2, 19, 23).float()
    single, double = (hw.AttentionMap(case.q, case.k, bias=x) for x in (bias, bias.double()))
    assert torch.equal(double.lse, single.lse) and torch.equal(double.dense(), single.dense())


def test_a_window_wider_than_anything_is_causal() -> None:
    case = numbers(1, 2, 2, 19, 23, 8).to(torch.float32)
    wide, causal = (hw.AttentionMap(case.q, case.k, **rule) for rule in ({"window": 2**40}, {"causal": True}))
    assert torch.equal(wide.dense(), causal.dense()) and torch.equal(wide.pooled(3), causal.pooled(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.bfloat16, "dense"), (torch.float16, "causal padding")], ids=str
)
def test_lower_precision_stays_within_its_budget(dtype: torch.dtype, kind: str) -> None:
    mask = small_masks(2, 1, 19, 23)[kind]
    case = replace(numbers(2, 1, 1, 19, 23, 24), mask=mask, options=options(1, 19, 23)["all"]).to(dtype)
    w, plain = map_of(case), case.reference()[1:]
    assert w.dense().dtype == dtype
    assert values(case, w, plain, [(2, 1)], [], fused=False) == []
    assert gradients(case, lambda low: (low, low), ["mean", "entropy"], learned_bias=False) == []


# Parts of a map


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["causal", "band", "causal labels"])
def test_chosen_queries_are_measured_where_they_stand(kind: str) -> None:
    mask = small_masks(1, 2, 19, 31)[kind]
    case = replace(numbers(1, 2, 1, 19, 31, 8), mask=mask).to(torch.float32)
    w = map_of(case)
    rows = [18, 3, 3, 17, 0, 9, 12, 10, 1, 14, 7, 5, 11, 16, 2, 13, 4, 6]  # more than a tile, in no order
    part = w.select(queries=rows, heads=[1])
    assert launches.cannot(part._scores) is None and part._scores.positions is not None
    whole, mine, dense = w.statistics(per="query"), part.statistics(per="query"), part.dense()
    for name in ROW_STATISTICS:
        assert error(mine[name], whole[name][:, 1:, rows]) <= 1e-5 * max(1.0, largest(mine[name])), name
    assert error(dense, case.to(torch.float64).reference()[1][:, 1:, rows]) < 1e-6
    assert error(mine.received, dense.sum(2)) < 1e-5
    assert error(part.pooled((1, 31))[:, :, 0], dense.sum(2)) < 1e-5
    assert torch.equal(part.top(3).indices, w.top(3).indices[:, 1:, rows])
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k)]
    pull = normal(9, *mine.entropy.shape).float()
    grads = []
    for rows_of in (
        lambda w: w.select(queries=rows, heads=[1]).statistics("entropy", per="query").entropy,
        lambda w: w.statistics("entropy", per="query").entropy[:, 1:, rows],
    ):
        looked = rows_of(hw.AttentionMap(*leaves, mask=mask))
        grads.append(torch.autograd.grad(looked, leaves, pull))
    for mine_, theirs in zip(*grads, strict=True):
        assert error(mine_, theirs) <= 1e-5 * max(1.0, largest(theirs))


def test_a_map_of_a_call_goes_to_the_kernels_with_the_lse_of_the_call(launched: list[str]) -> None:
    case = numbers(1, 2, 1, 19, 23, 8).to(torch.float32)
    _, w = hw.attention(case.q, case.k, case.v, causal=True)
    own = hw.AttentionMap(case.q, case.k, causal=True)
    mine, theirs = w.statistics(pooled=(2, 1)), own.statistics(pooled=(2, 1))
    for name, value in mine.items():
        assert error(value, theirs[name]) <= 1e-5 * max(1.0, largest(value)), name
    assert launched.count("lse_kernel") == 1  # for the map that came without one


# Who runs what


def test_every_question_reaches_kernels(launched: list[str]) -> None:
    """In float32 a walk over the rows comes first, for an lse that fits what the kernels multiply."""
    case = numbers(1, 2, 1, 19, 23, 8).to(torch.float32).with_gradients()
    w = map_of(case)
    back = ["rows_kernel", "delta_kernel", "back_q_kernel", "back_k_kernel"]
    questions: list[tuple[Callable[[], object], list[str]]] = [
        (lambda: w.lse, ["lse_kernel"]),
        (lambda: w.statistics("first", "itself"), ["rows_kernel", "near_kernel"]),
        (lambda: w.statistics("received"), ["rows_kernel", "received_kernel"]),
        (lambda: w.pooled((2, 1)), ["rows_kernel", "rows_kernel"]),
        (lambda: w.pooled(5), ["rows_kernel", "picture_kernel"]),
        (lambda: w.top(2), ["rows_kernel", "top_kernel"]),
        (lambda: w.dense(), ["rows_kernel", "dense_kernel"]),
        (lambda: w.mean_heads().sum().backward(), ["rows_kernel", "mean_kernel", *back]),
    ]
    for ask, wanted in questions:
        launched.clear()
        ask()
        assert launched == wanted


def test_kernels_are_told_apart_where_triton_compiles_anew() -> None:
    room = torch.zeros(32)
    numbers = [None, 1.5, 1, 2, 16, 2**31 + 1, 2**31 + 16]
    kinds = [*numbers, room, room[1:], room.half(), room.int(), (1, room), (2, room)]
    assert len({launches.specialization(x) for x in kinds}) == len(kinds)
    for alike in ((2, 3), (16, 48), (1.5, 2.5), (room, room[4:]), ((3, None), (5, None))):
        assert len({launches.specialization(x) for x in alike}) == 1


def test_what_a_bias_learns_is_found_tile_by_tile(launched: list[str]) -> None:
    case = replace(numbers(1, 2, 1, 19, 23, 8), options=options(2, 19, 23)["all"]).to(torch.float32)
    assert gradients(case, lambda low: (low, low), ["mean", "entropy"]) == []
    assert not {"back_q_kernel", "back_k_kernel"} & set(launched)


@pytest.mark.parametrize("kind", launches.HOPPER)
def test_block_sizes_are_known_for_every_kernel_and_head(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "INTERPRET", False)
    for hopper in (True, False):
        monkeypatch.setattr(launches, "takes_descriptors", lambda device, hopper=hopper: hopper)
        for dtype in launches.DTYPES:
            for D in (1, 16, 64, 80, 128, 129, 256):
                blocks = launches.blocks_for(kind, D, dtype, torch.device("cuda", 0))
                assert all(n >= 16 and n & (n - 1) == 0 for n in blocks[:2])  # matrix units; powers of two
                assert blocks.warps in (4, 8) and blocks.stages >= 1


def test_channels_come_in_two_powers_of_two_of_32_at_least() -> None:
    """Products that are 16 wide read outside of shared memory (Triton 3.6, Hopper)."""
    for D in range(1, 257):
        _, D0, D1 = request_room._in_two(D)
        parts = [D0, D1] if D1 else [D0]
        assert sum(parts) >= D and all(n >= 32 and n & (n - 1) == 0 for n in parts)
        assert D1 < 2 * D and (D1 == 0) == (D <= D0)


def test_what_the_kernels_cannot_take_is_said_in_words_and_runs_on_tiles(
    launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (x.float() for x in (normal(0, 1, 2, 5, 8), normal(1, 1, 1, 7, 8)))
    long = torch.zeros(1, 1, 3, 257)
    weights = hw.AttentionMap.from_weights(torch.rand(1, 1, 3, 4))
    reasons = {
        "the map was made from weights, without q and k": weights,
        "it takes bfloat16, float16 and float32, not float64": hw.AttentionMap(q.double(), k.double()),
        "it takes head_dim up to 256, not 257": hw.AttentionMap(long, long),
    }
    for reason, w in reasons.items():
        assert launches.cannot(w._scores) == reason
        w.statistics(pooled=2), w.top(1), w.dense(), w.mean_heads(), w.lse
    messages = []

    def inside(q: Tensor) -> Tensor:
        w = hw.AttentionMap(q, k)
        messages.append(launches.cannot(w._scores))
        return w.dense().sum()

    torch.func.grad(inside)(q)
    assert messages == ["a function transform (torch.func) is active, which only plain operations support"]
    assert launched == []
    assert launches.cannot(hw.AttentionMap(q, k)._scores) is None
    monkeypatch.setattr(launches, "INTERPRET", False)
    assert launches.cannot(hw.AttentionMap(q, k)._scores) == "it supports cuda only; the tensors are on cpu"


@pytest.mark.thinned(keep=["keys"])
@pytest.mark.parametrize("shared", ["keys", "queries"])
def test_labels_that_all_sequences_share_meet_labels_of_each(shared: str) -> None:
    """Of queries a batch, of keys one for all: the kernels read the first sequence's labels for every one."""
    B, T, S = 2, 19, 23
    keys, queries = torch.arange(S) // 7, torch.stack([torch.arange(T) // 5, torch.arange(T) // 5 + 1])
    if shared == "queries":
        keys, queries = torch.stack([keys, keys + 1]), queries[0]
    mask = Mask.documents(keys, queries)
    case = replace(numbers(B, 2, 1, T, S, 16), mask=mask).to(torch.float32)
    truth, plain = case.to(torch.float64).reference()[1], case.reference()[1]
    w = map_of(case)
    assert_judged(w.dense(), plain, truth, dtype=torch.float32, size=1.0)
    visible = mask.full(T, S, B).expand(B, 1, T, S).sum(-1)
    assert torch.equal(w.visible(), visible)
    assert torch.equal(w.counted_queries(), (visible > 0).expand(B, 2, T))


def test_a_statistic_without_a_kernel_is_measured_beside_those_that_have_one(
    monkeypatch: pytest.MonkeyPatch, launched: list[str]
) -> None:
    squares = Accumulator("all", lambda tile, reach: tile.p.square().sum(-1))
    monkeypatch.setitem(ACCUMULATORS, "squares", squares)
    monkeypatch.setitem(
        ROW_STATISTICS, "sameness", Statistic(lambda block, sums: sums["squares"], ("squares",))
    )
    monkeypatch.setattr(statistics_room, "STATISTICS", (*STATISTICS, "sameness"))
    case = replace(numbers(1, 2, 1, 19, 23, 8), mask=Mask.causal()).to(torch.float32)
    w = map_of(case)
    p = case.to(torch.float64).reference()[1]
    actual = w.statistics("sameness", "received", "entropy", per="query", pooled=3)
    assert list(actual) == ["sameness", "received", "entropy", "pooled"]
    assert error(actual.sameness, p.square().sum(-1)) < 1e-6
    assert error(actual.received, p.sum(2)) < 1e-5
    assert {"rows_kernel", "received_kernel"} <= set(launched)
    assert error(w.statistics("sameness").sameness, p.square().sum(-1).mean(-1)) < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_compiled_functions_use_the_same_kernels(launched: list[str]) -> None:
    def looks(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        w = hw.AttentionMap(q, k, causal=True)
        stats = w.statistics("distance", "received", "entropy", pooled=3)
        return *stats.values(), w.mean_heads(), *w.top(3), w.select(queries=[5, 2]).dense()

    q, k = (x.float() for x in (normal(0, 1, 2, 19, 8), normal(1, 1, 1, 23, 8)))
    torch._dynamo.reset()
    wanted = looks(q, k)
    by_eager = launched[:]
    launched.clear()
    actual = torch.compile(looks, fullgraph=True, backend="aot_eager")(q, k)
    torch._dynamo.reset()
    assert launched == by_eager
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(actual, wanted, strict=True))


def test_without_a_c_compiler_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton builds a launcher for each kernel: without a compiler the first call ended in a traceback."""
    monkeypatch.setenv("CC", "some compiler")
    assert launches.no_compiler() is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert "install gcc, or set CC" in str(launches.no_compiler())


@pytest.mark.thinned(99, keep=["True-True-True"])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("across", [False, True])
def test_one_step_with_weights_is_torchs_class(across: bool, average: bool, used: bool) -> None:
    """Forward, backward, and through the weights; with a sequence of padding alone in the second call."""
    torch.manual_seed(3)
    theirs = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    ours = hw.nn.MultiheadAttention(16, 2, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    x, memory = torch.randn(3, 7, 16), torch.randn(3, 11 if across else 7, 16)
    pull = torch.randn(3, 7, 16)
    S = memory.shape[1]
    for lengths in (None, [S, 5, 1], [S, 5, 0]):
        padding = None if lengths is None else torch.arange(S) >= torch.tensor(lengths)[:, None]
        actual = []
        for module in (theirs, ours):
            q = x.clone().requires_grad_()
            m = memory.clone().requires_grad_() if across else q
            with always_in_one_step():
                out, looked = module(q, m, m, key_padding_mask=padding, average_attn_weights=average)
            loss = (out * pull).sum() + (looked.square().sum() if used else 0.0)
            leaves = [q, m, *module.parameters()] if across else [q, *module.parameters()]
            actual.append([out, looked, *torch.autograd.grad(loss, leaves)])
        for mine, plain in zip(actual[1], actual[0], strict=True):
            if lengths is None or lengths[-1]:
                assert error(mine, plain) <= 1e-5 * max(1.0, largest(plain))
        assert torch.equal(actual[1][0].isnan(), actual[0][0].isnan())
        assert torch.equal(actual[1][1].isnan(), actual[0][1].isnan())


# One query


LATE = Mask.padding(torch.arange(101) >= torch.tensor([[90], [3]]))  # nothing but the end is seen
HOLES = Mask.padding(torch.rand(2, 101, generator=torch.Generator().manual_seed(5)) > 0.6)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, 1.0], dtype=torch.float64)
ONE_QUERY: dict[str, tuple[int, Mask, dict[str, Any]]] = {
    "plain": (101, Mask(), {}),
    "two tiles": (17, Mask.causal(), {}),
    "one key": (1, Mask(), {}),
    "window": (101, Mask.window(19), {}),
    "lengths": (101, Mask.padding([101, 37]), {}),
    "nothing to see": (101, Mask.padding([23, 0]), {}),
    "holes": (101, HOLES, {}),
    "late": (101, LATE, {}),
    "window and late": (101, LATE & Mask.window(40), {}),
    "softcap": (101, Mask(), {"softcap": 1.5}),
    "alibi": (101, Mask.window(60), {"bias": Alibi(SINKS.square())}),
    "by distance": (101, Mask(), {"bias": Relative(normal(7, 6, 31))}),
    "sinks": (101, Mask(), {"sinks": SINKS}),
    "sinks, nothing to see": (101, Mask.padding([0, 5]), {"sinks": SINKS}),
    "turned round": (101, Mask(), {"scale": -0.3, "softcap": 2.0}),
}


@pytest.mark.thinned(99, keep=["two tiles", "alibi", "sinks, nothing to see"], slow=2)
@pytest.mark.parametrize(("keys", "mask", "options"), ONE_QUERY.values(), ids=ONE_QUERY)
def test_one_query_over_many_keys(keys: int, mask: Mask, options: dict[str, Any]) -> None:
    q, k, v = (normal(i, 2, *size) for i, size in enumerate(((6, 1, 5), (2, keys, 5), (2, keys, 7))))
    case = Case(q, k, v, mask, options)
    low = case.to(torch.float32)
    assert hw.why(low.q, low.k, low.v, mask, **low.options).backend == "decode"
    out, weights = hw.attention(low.q, low.k, low.v, mask, **low.options, backend="decode")
    (plain, _, plain_lse), (truth, _, lse) = low.reference(), case.reference()
    assert_judged(out, plain, truth, dtype=torch.float32, size=largest(truth), name="output")
    visible = lse.isfinite()
    assert torch.equal(weights.lse.isfinite(), visible)
    assert_judged(
        weights.lse[visible], plain_lse[visible], lse[visible], dtype=torch.float32, size=4.0, name="lse"
    )
    entropy = weights.statistics("entropy").entropy  # the map of a step is a map like any other
    assert torch.equal(entropy.isfinite(), visible.any(-1))


@pytest.mark.parametrize("keys", [7, 101])
def test_a_sink_beside_large_scores_takes_its_share(keys: int) -> None:
    """Weighed by the lse of both it was off by 1e-5: the last place of a float32 at 1024 is 6e-5."""
    q, k, v = torch.ones(1, 6, 1, 4), torch.full((1, 2, keys, 4), 256.0), normal(1, 1, 2, keys, 7)
    case = Case(q.double(), k.double(), v, Mask(), {"scale": 1.0, "sinks": torch.full((6,), 1024.0).double()})
    low = case.to(torch.float32)
    out, _ = hw.attention(low.q, low.k, low.v, **low.options, backend="decode")
    (plain, *_), (truth, *_) = low.reference(), case.reference()
    assert_judged(out, plain, truth, dtype=torch.float32, size=largest(truth), name="output")


STRIDED: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": normal(8, 6, 2)[:, 0]},
    "one sink for all": {"sinks": normal(8, 1).expand(6)},
    "slopes": {"bias": Alibi(normal(8, 6, 2)[:, 1].abs())},
    "padding": {"mask": Mask.padding(((torch.arange(101) % 3)[:, None] != torch.arange(2)).t())},
}


@pytest.mark.parametrize("options", STRIDED.values(), ids=STRIDED)
def test_one_query_reads_what_does_not_lie_side_by_side(options: dict[str, Any]) -> None:
    """Sinks, slopes and padding were read as if they did: off by 0.2 to 1.9."""
    q, k, v = (normal(i, 2, n, s, 5).float() for i, (n, s) in enumerate(((6, 1), (2, 101), (2, 101))))
    out, _ = hw.attention(q, k, v, **options, backend="decode")
    truth, _ = hw.attention(*(x.double() for x in (q, k, v)), **options, backend="plain")
    assert error(out, truth) < 1e-6


@pytest.mark.parametrize("T", [1, 2, 23], ids=["decode", "in parts", "rows"])
def test_a_sink_that_is_no_number_says_so(T: int) -> None:
    """The kernel of many queries took it for the largest one, and said 0."""
    q, k, v = (normal(i, 1, n, s, 5).float() for i, (n, s) in enumerate(((2, T), (1, 101), (1, 101))))
    sinks = torch.tensor([math.nan, 0.5])
    out, w = hw.attention(q, k, v, sinks=sinks, backend="decode" if T == 1 else "triton")
    assert bool(out[:, 0].isnan().all()) and bool(w.lse[:, 0].isnan().all())
    assert bool(out[:, 1].isfinite().all())


def test_keys_that_padding_hides_are_not_read() -> None:
    q, k, v = (normal(i, 2, n, s, 5).float() for i, (n, s) in enumerate(((6, 1), (2, 101), (2, 101))))
    real = torch.arange(101) >= torch.tensor([[61], [3]])
    expected = hw.attention(q, k, v, Mask.padding(real))[0]
    for x in (k, v):
        x[~real[:, None].expand(2, 2, 101)] = math.nan
    assert torch.equal(hw.attention(q, k, v, Mask.padding(real))[0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bias": torch.zeros(1, 1, 1, 11)}, "it takes no bias"),
        (
            {"mask": Mask.documents([0] * 11)},
            "it takes no mask except padding and a band that includes the query's own position",
        ),
        (
            {"mask": ~Mask.causal()},
            "it takes no mask except padding and a band that includes the query's own position",
        ),
        ({"dropout": 0.5}, "dropout 0.5 needs the matrix of weights, which it never computes"),
        ({"T": 2}, "it takes one query, not 2"),
        ({"Dv": 257}, "it takes value_dim up to 256, not 257"),
        ({"D": 257}, "it takes head_dim up to 256, not 257"),
        ({"H": 65}, "it takes up to 64 heads that share keys, not 65"),
        ({"dtype": torch.float64}, "it takes bfloat16, float16 and float32, not float64"),
    ],
    ids=str,
)
def test_what_the_kernel_of_one_query_cannot_take(options: dict[str, Any], message: str) -> None:
    size = {"T": 1, "H": 3, "D": 5, "Dv": 5, "dtype": torch.float32}
    size |= {name: options.pop(name) for name in size if name in options}
    q, k, v = (
        torch.randn(1, n, s, d, dtype=size["dtype"])
        for n, s, d in ((size["H"], size["T"], size["D"]), (1, 11, size["D"]), (1, 11, size["Dv"]))
    )
    assert hw.why(q, k, v, **options).reasons["decode"] == message
    with pytest.raises(hw.errors.BackendUnavailable, match=message.replace("(", r"\(")):
        hw.attention(q, k, v, **options, backend="decode")


def test_one_query_has_gradients() -> None:
    q, k, v = (normal(i, 2, n, s, 5).float() for i, (n, s) in enumerate(((6, 1), (2, 37), (2, 37))))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    actual = torch.autograd.grad(hw.attention(*leaves, softcap=2.0)[0].square().sum(), leaves)
    plain = torch.autograd.grad(hw.attention(*leaves, softcap=2.0, backend="plain")[0].square().sum(), leaves)
    for mine, theirs in zip(actual, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
