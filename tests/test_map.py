"""`AttentionMap` as its users meet it: indexing, selecting, standing in for the dense tensor, moving about.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim; distinct primes, or
products of them where heads share keys.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

import headwise as hw
from headwise import Mask
from headwise.engines.scores import Scores
from headwise.engines.statistics import STATISTICS, Statistics
from headwise.engines.walk import SOME
from headwise.errors import ArgumentError, BudgetExceeded, ShapeError
from headwise.map import make
from headwise.scoring import Alibi, Relative
from judge import error, inside, with_inside

B, H, HK, T, S, D = 2, 6, 3, 5, 7, 11
SHAPE = (B, H, T, S)
NAMES = ("batch", "heads", "queries", "keys")


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def qkv(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((B, H, T, D), (B, HK, S, D), (B, HK, S, D))
    q, k, v = (normal(i, *shape, dtype=dtype) for i, shape in enumerate(shapes))
    return q, k, v


def a_map(**options: Any) -> hw.AttentionMap:
    """A map that came from a call: its lse is known."""
    return hw.attention(*qkv(), **options)[1]


def without_lse(**options: Any) -> hw.AttentionMap:
    q, k, _ = qkv()
    return hw.AttentionMap(q, k, **options)


HOLES = normal(9, B, 1, T, S) > -0.3
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "padding": {"mask": Mask.padding([3, S], [T, 2])},
    "documents": {"mask": Mask.documents([0, 0, 0, 1, 1, 2, 2])},
    "holes": {"mask": HOLES},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": normal(4, H, T, S)},
    "slopes": {"bias": Alibi(normal(5, H).abs())},
    "relative": {"bias": Relative(normal(7, H, 5))},
    "sinks": {"sinks": normal(6, H)},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


class Touched:
    """The shapes of all scores that were computed, in tiles or whole."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    @property
    def elements(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.shapes)


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> Touched:
    visible = Touched()
    of_scores, all_scores = Scores.tile, Scores.full

    def tile(self: Scores, rows: slice, columns: Any) -> Tensor:
        actual = of_scores(self, rows, columns)
        visible.shapes.append(tuple(actual.shape))
        return actual

    def whole(self: Scores) -> Tensor:
        before = len(visible.shapes)
        actual = all_scores(self)
        visible.shapes[before:] = [tuple(actual.shape)]
        return actual

    monkeypatch.setattr(Scores, "tile", tile)
    monkeypatch.setattr(Scores, "full", whole)
    return visible


# What it is


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_come_in_the_dtype_of_q_and_lse_in_at_least_float32(dtype: torch.dtype) -> None:
    w = hw.attention(*qkv(dtype))[1]
    assert w.dtype == w.dense().dtype == w[0, 1].dtype == w.mean_heads().dtype == dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert w.lse.dtype == w.pooled(3).dtype == w.top(2).values.dtype == w.statistics().entropy.dtype == wide


def test_repr_tells_shape_mask_and_dtype_and_never_computes(touched: Touched) -> None:
    assert repr(without_lse()) == f"AttentionMap({list(SHAPE)}, float64)"
    assert repr(without_lse(causal=True)) == f"AttentionMap({list(SHAPE)}, Mask(right=0), float64)"
    assert (
        repr(without_lse(mask=Mask.padding([3, 5])))
        == f"AttentionMap({list(SHAPE)}, Mask(keys=int64[2]), float64)"
    )
    assert repr(without_lse().to("meta")) == f"AttentionMap({list(SHAPE)}, float64, meta)"
    assert touched.shapes == []


def test_sizes_are_told_without_computing_anything(touched: Touched) -> None:
    """A map of a long context is asked its size like any tensor, and must not make the matrix to answer."""
    w = without_lse()
    with hw.budget.limit("1 B"):
        assert w.size() == torch.Size(SHAPE) and w.size(-1) == S and w.dim() == 4
        assert w.numel() == B * H * T * S and w.is_floating_point() and not w.is_cuda
        assert not w.requires_grad
    assert touched.shapes == []


# Indexing


def positions(size: int) -> st.SearchStrategy[Any]:
    return st.integers(-size, size - 1)


def slices(size: int, backwards: bool = False) -> st.SearchStrategy[slice]:
    """Slices that pick something; start and stop may lie beyond the ends. torch takes no steps backwards."""
    ends = st.none() | st.integers(-size - 2, size + 2)
    steps = st.sampled_from([None, 1, 2, 3, -1, -2, -3] if backwards else [None, 1, 2, 3])
    return st.builds(slice, ends, ends, steps).filter(lambda index: len(range(size)[index]) > 0)


def lists(size: int) -> st.SearchStrategy[Any]:
    numbers = st.lists(positions(size), min_size=1, max_size=4)
    bools = st.lists(st.booleans(), min_size=size, max_size=size).filter(any)
    return st.one_of(numbers, numbers.map(torch.tensor), bools, bools.map(torch.tensor))


@st.composite
def indices(draw: st.DrawFn) -> Any:
    """What people write in brackets: a prefix of the dimensions, `...` somewhere, new axes, a list or two."""
    count = draw(st.integers(0, 4))
    gap = draw(st.none() | st.integers(0, count))
    dims = list(range(4)) if gap is None else [*range(gap), *range(4 - (count - gap), 4)]
    many = draw(st.integers(0, 2))
    where = draw(st.permutations(range(count)))[:many]
    parts: list[Any] = []
    for place, dim in zip(range(count), dims, strict=False):
        size = SHAPE[dim]
        if place in where:
            parts.append(
                draw(lists(size) if many == 1 else st.lists(positions(size), min_size=2, max_size=2))
            )
        else:
            parts.append(draw(positions(size) | slices(size)))
    if gap is not None:
        parts.insert(gap, ...)
    if draw(st.integers(0, 4)) == 0:
        parts.insert(draw(st.integers(0, len(parts))), None)
    if len(parts) == 1 and not isinstance(parts[0], list) and draw(st.booleans()):
        return parts[0]
    return tuple(parts)


def assert_same(actual: Tensor, expected: Tensor, label: object = "") -> None:
    assert type(actual) is Tensor, label
    assert error(actual, expected) < 1e-14, label


@given(index=indices(), known_lse=st.booleans(), name=st.sampled_from(sorted(OPTIONS)))
def test_indexing_is_the_dense_tensors_indexing(index: Any, known_lse: bool, name: str) -> None:
    w = (a_map if known_lse else without_lse)(**OPTIONS[name])
    assert_same(w[index], w.dense()[index], index)


@given(index=indices())
def test_indexing_given_weights_is_the_dense_tensors_indexing(index: Any) -> None:
    dense = a_map().dense()
    assert_same(hw.AttentionMap.from_weights(dense)[index], dense[index], index)


@given(data=st.data())
def test_steps_may_go_backwards_as_in_numpy(data: st.DataObject) -> None:
    index = tuple(data.draw(slices(size, backwards=True) | positions(size)) for size in SHAPE)
    w = a_map(causal=True)
    expected = w.dense().numpy()[index]
    assert_same(w[index], torch.as_tensor(np.array(expected)), index)


@pytest.mark.parametrize(
    "index",
    [
        (slice(0), ...),
        (slice(None), slice(3, 3)),
        (slice(None), slice(None), slice(4, 1)),
        (..., slice(2, 2)),
        torch.tensor([], dtype=torch.int64),
        [],
        (slice(None), []),
        (..., []),
        [False] * B,
        (slice(None), torch.zeros(H, dtype=torch.bool)),
    ],
    ids=str,
)
@pytest.mark.parametrize("known_lse", [True, False], ids=["lse", "no-lse"])
def test_choosing_nothing_gives_an_empty_tensor(index: Any, known_lse: bool) -> None:
    w = (a_map if known_lse else without_lse)(causal=True)
    expected = w.dense()[index]
    assert w[index].shape == expected.shape and w[index].dtype == expected.dtype


def test_a_mask_picks_weights_one_by_one() -> None:
    w = a_map()
    dense = w.dense()
    assert_same(w[w > 0.2], dense[dense > 0.2])
    assert_same(w[torch.tensor([True, False])], dense[:1])
    assert_same(w[:, torch.arange(H) % 2 == 0], dense[:, ::2])


@pytest.mark.parametrize(
    "index",
    [np.int64(1), np.array([1, 0]), (0, np.array([2, 4])), range(2), (slice(None), range(1, 5))],
    ids=str,
)
def test_numbers_of_numpy_and_ranges_are_indices_too(index: Any) -> None:
    w = a_map()
    assert_same(w[index], w.dense()[index])


@pytest.mark.parametrize(
    ("index", "numbers"),
    [
        (2, "batch must lie inside the map: got 2 for size 2; use 0 to 1"),
        (-3, "batch must lie inside the map: got -3 for size 2"),
        ((0, 6), "heads must lie inside the map: got 6 for size 6"),
        ((..., -8), "keys must lie inside the map: got -8 for size 7"),
        ((0, 0, 5), "queries must lie inside the map: got 5 for size 5"),
        ((slice(None), [0, 13]), "heads must lie inside the map: got 13 for size 6"),
        ((slice(None), torch.tensor([-7])), "heads must lie inside the map: got -7 for size 6"),
        (
            (0, 1, 2, 3, 4),
            "index must have at most one entry per dimension: got 5 for 4; the dimensions are batch, head",
        ),
        ([True], "batch must have one bool per index: got 1 for 2"),
        ((..., 0, ...), "index must have at most one ellipsis: got 2"),
    ],
    ids=str,
)
def test_an_index_outside_the_map_is_refused_with_its_numbers(index: Any, numbers: str) -> None:
    with pytest.raises(IndexError, match=numbers):
        a_map()[index]


# Computing only what is asked


@pytest.mark.parametrize("make", [a_map, without_lse], ids=["lse", "no-lse"])
def test_one_row_of_one_head_is_one_row_of_one_head_of_work(
    make: Callable[..., hw.AttentionMap], touched: Touched
) -> None:
    w = make()
    row = w[0, 3, 4:5]
    assert touched.shapes == [(1, 1, 1, S)] and row.shape == (1, S)
    assert w[0, 3, 4].shape == (S,) and len(touched.shapes) == 1  # without a tile: see test_one_query.py


def test_a_key_of_every_query_is_not_every_key_of_every_query(touched: Touched) -> None:
    q, k = normal(1, 1, 2, 401, 3), normal(2, 1, 2, 401, 3)
    w = hw.attention(q, k, k)[1]
    assert w[0, :, :, 7].shape == (2, 401) and touched.elements == 2 * 401 * (1 + SOME)


@pytest.mark.parametrize(
    ("index", "elements"),
    [
        ((slice(None), 4), B * T * S),
        ((0, [1, 4]), 2 * T * S),
        ((0, 3, [1, 2]), 2 * S),
        ((torch.tensor(1), 2), T * S),
        ((np.int64(1), np.int64(2)), T * S),
        ((0, None, 3), T * S),
    ],
    ids=str,
)
def test_only_what_an_index_names_is_computed(index: Any, elements: int, touched: Touched) -> None:
    w = a_map()
    assert w[index].numel() == elements
    assert touched.elements == elements


def test_the_near_statistics_do_not_walk_every_key(touched: Touched) -> None:
    q, k = normal(1, 1, 2, 401, 3), normal(2, 1, 2, 401, 3)
    w = hw.attention(q, k, k)[1]
    w.statistics("previous", "itself", "next", "first")
    assert touched.elements < 401 * 401 / 2


# Selecting


def picked(data: st.DataObject, shape: tuple[int, ...]) -> dict[str, Any]:
    """Arguments of `select` for some of the dimensions."""
    chosen = {}
    for name, size in zip(NAMES, shape, strict=True):
        numbers = st.lists(positions(size), min_size=1, max_size=3)
        actual = data.draw(st.none() | positions(size) | slices(size, backwards=True) | numbers, label=name)
        if actual is not None:
            chosen[name] = actual
    return chosen


def dense_part(dense: Tensor, chosen: dict[str, Any]) -> Tensor:
    for dim, name in enumerate(NAMES):
        if name in chosen:
            index, size = chosen[name], dense.shape[dim]
            spots = (
                range(size)[index]
                if isinstance(index, slice)
                else [index]
                if isinstance(index, int)
                else index
            )
            dense = dense.index_select(dim, torch.tensor([i % size for i in spots], dtype=torch.int64))
    return dense


@given(
    data=st.data(),
    name=st.sampled_from(sorted(OPTIONS)),
    known_lse=st.booleans(),
    given_weights=st.booleans(),
)
def test_a_selection_of_a_selection_is_a_selection(
    data: st.DataObject, name: str, known_lse: bool, given_weights: bool
) -> None:
    w = (a_map if known_lse else without_lse)(**OPTIONS[name])
    expected = w.dense()
    if given_weights:
        w = hw.AttentionMap.from_weights(expected)
    for _ in range(3):
        chosen = picked(data, tuple(w.shape))
        w, expected = w.select(**chosen), dense_part(expected, chosen)
        assert isinstance(w, hw.AttentionMap) and w.shape == expected.shape
        assert_same(w.dense(), expected)
        assert_same(w.mean_heads(), expected.mean(1))
        assert len(w) == expected.shape[0]


@given(data=st.data(), name=st.sampled_from(sorted(OPTIONS)))
def test_statistics_of_a_selection_are_those_of_the_whole_there(data: st.DataObject, name: str) -> None:
    w = a_map(**OPTIONS[name])
    chosen = picked(data, tuple(w.shape))
    chosen.pop("keys", None)
    whole, part = w.statistics(per="query"), w.select(**chosen).statistics(per="query")
    for each in set(STATISTICS) - {"received"}:
        expected = dense_part(whole[each][..., None], chosen).squeeze(-1)
        visible = dense_part(~torch.isneginf(w.lse)[..., None], chosen).squeeze(-1)
        assert error(part[each][visible], expected[visible]) < 1e-12, each


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"batch": 2}, "batch must lie inside the map: got 2 for size 2; use 0 to 1"),
        ({"heads": [0, -7]}, "heads must lie inside the map: got -7 for size 6; use 0 to 5"),
        ({"queries": torch.tensor([5])}, "queries must lie inside the map: got 5 for size 5"),
        ({"keys": 7}, "keys must lie inside the map: got 7 for size 7"),
        ({"heads": [True, False]}, "heads must have one bool per index: got 2 for 6"),
        ({"queries": [0.5]}, "queries must be whole numbers in one dimension: got 0.5"),
        ({"keys": [[1, 2]]}, r"keys must be whole numbers in one dimension: got \[1, 2\]"),
        ({"batch": True}, "batch must"),
    ],
    ids=str,
)
def test_a_selection_outside_the_map_is_refused_with_its_numbers(
    chosen: dict[str, Any], message: str
) -> None:
    with pytest.raises(IndexError, match=message):
        a_map().select(**chosen)


@pytest.mark.parametrize(
    "chosen", [{name: []} for name in NAMES] + [{name: slice(2, 2)} for name in NAMES], ids=str
)
def test_selecting_nothing_gives_an_empty_map(chosen: dict[str, Any]) -> None:
    part = a_map().select(**chosen)
    assert 0 in part.shape and part.dense().shape == part.shape


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda w: w.pooled(3), "pooled"),
        (lambda w: w.top(1), "top"),
        (lambda w: w.statistics(), "statistics"),
    ],
    ids=["pooled", "top", "statistics"],
)
def test_what_needs_whole_rows_refuses_a_map_of_chosen_keys(ask: Callable[[Any], Any], name: str) -> None:
    messages = f"{name} must be called on a map of all keys: this map has 2 of 7 keys; call it before select"
    with pytest.raises(ArgumentError, match=re.escape(messages)):
        ask(a_map().select(keys=[1, 4]))


# Standing in for the dense tensor


VALUES = normal(7, B, H, S, 3)
STAND_INS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda w: torch.sum(w),
    "sum over keys": lambda w: torch.sum(w, dim=-1),
    "matmul": lambda w: torch.matmul(w, VALUES),
    "einsum": lambda w: torch.einsum("bhts,bhsd->bhtd", w, VALUES),
    "stack": lambda w: torch.stack([w, w]),
    "cat of both": lambda w: torch.cat([w, torch.ones(SHAPE, dtype=torch.float64)]),
    "where": lambda w: torch.where(w > 0.1, w, 0.0),
    "log": lambda w: torch.log(w),
    "softmax": lambda w: torch.nn.functional.softmax(w, dim=-1),
    "times two": lambda w: w * 2,
    "two times": lambda w: 2 * w,
    "times a tensor": lambda w: w * VALUES[..., 0].unsqueeze(-2),
    "a tensor times": lambda w: VALUES[..., 0].unsqueeze(-2) * w,
    "plus itself": lambda w: w + w,
    "one minus": lambda w: 1 - w,
    "minus": lambda w: w - 0.5,
    "half": lambda w: w / 2,
    "one over": lambda w: 1 / (w + 1),
    "squared": lambda w: w**2,
    "two to the": lambda w: 2**w,
    "negative": lambda w: -w,
    "absolute": lambda w: abs(w),
    "at values": lambda w: w @ VALUES,
    "values at": lambda w: VALUES.mT @ w.mT,
    "greater": lambda w: w > 0.1,
    "at least": lambda w: w >= 0.1,
    "less": lambda w: w < 0.1,
    "at most": lambda w: w <= 0.1,
    "equal": lambda w: w == 0,
    "unequal": lambda w: w != 0,
    "a method": lambda w: w.sum(-1),
    "a method with names": lambda w: w.mean(dim=(0, 1), keepdim=True),
    "transposed": lambda w: w.mT,
    "reshaped": lambda w: w.reshape(-1, S),
    "permuted": lambda w: w.permute(0, 2, 1, 3),
    "largest": lambda w: w.max(dim=-1).values,
    "float": lambda w: w.float(),
    "clone": lambda w: w.clone(),
    "as a tensor": torch.as_tensor,
    "is close": lambda w: torch.isclose(w, w + 0.1),
    "sum by name": lambda w: torch.sum(input=w, dim=0),
}


@pytest.mark.parametrize("label", STAND_INS, ids=lambda name: name.replace(" ", "-"))
def test_a_map_does_what_its_dense_tensor_does(label: str) -> None:
    w = a_map(causal=True)
    actual, expected = STAND_INS[label](w), STAND_INS[label](w.dense())
    assert type(actual) is Tensor
    assert actual.dtype == expected.dtype and torch.equal(actual, expected)


def test_a_map_becomes_an_array() -> None:
    w = a_map()
    dense = w.dense().numpy()
    for array in (np.asarray(w), np.array(w), w.numpy(), w.__array__()):
        assert isinstance(array, np.ndarray) and np.array_equal(array, dense)
    assert np.asarray(w, dtype=np.float32).dtype == np.float32
    assert np.array_equal(np.multiply(w, 2), dense * 2)
    assert w.tolist() == w.dense().tolist()


def test_a_bfloat16_map_becomes_a_float32_array() -> None:
    w = hw.attention(*qkv(torch.bfloat16))[1]
    assert np.asarray(w).dtype == np.float32
    assert np.array_equal(np.asarray(w), w.dense().float().numpy())


def test_an_array_made_from_given_weights_is_a_copy_when_one_is_asked_for() -> None:
    """`numpy.array` promises a copy: writing to it must not reach the tensor the map was made from."""
    dense = a_map().dense()
    before = dense.clone()
    array = np.array(hw.AttentionMap.from_weights(dense))
    array[...] = -1
    assert torch.equal(dense, before)


def test_what_no_tensor_has_no_map_has() -> None:
    with pytest.raises(AttributeError, match="'AttentionMap' object has no attribute 'entropy'"):
        _ = a_map().entropy
    with pytest.raises(AttributeError, match="'_private'"):
        _ = a_map()._private
    assert not hasattr(a_map(), "__iadd__")


def test_maps_can_be_kept_in_sets_and_as_keys() -> None:
    first, second = a_map(), a_map()
    assert hash(first) == hash(first)
    assert {first: 1, second: 2}[first] == 1 and len({first, first, second}) == 2


# The memory budget


def test_a_dense_matrix_over_the_limit_is_refused_with_its_size_and_what_to_do() -> None:
    w = a_map()
    with pytest.raises(BudgetExceeded) as refusal:
        w.dense(limit="1 KiB")
    text = str(refusal.value)
    assert text.startswith(f"dense weights {list(SHAPE)} must fit the memory budget: 3.3 KiB > 1 KiB;")
    for way_out in ("w[b, h]", "select", "pooled", "statistics", "top", 'budget.limit("3.3 KiB")'):
        assert way_out in text
    assert isinstance(refusal.value, MemoryError)


def test_exactly_the_size_fits() -> None:
    size = B * H * T * S * 8
    w = a_map()
    assert w.dense(limit=size).shape == w.shape
    with pytest.raises(BudgetExceeded, match=r"> 3\.3 KiB"):
        w.dense(limit=size - 1)
    assert w.mean_heads(limit=size // H).shape == (B, T, S)
    with pytest.raises(BudgetExceeded, match=re.escape(f"dense mean weights {[B, T, S]}")):
        w.mean_heads(limit=size // H - 1)


@pytest.mark.parametrize(
    "ask",
    [
        lambda w: w.dense(),
        lambda w: w.mean_heads(),
        lambda w: w * 2,
        lambda w: w.sum(),
        lambda w: torch.sum(w),
        lambda w: np.asarray(w),
        lambda w: w[0],
        lambda w: w[0, None],
        lambda w: list(w),
    ],
    ids=["dense", "mean", "operator", "method", "function", "array", "index", "axis", "iter"],
)
def test_no_way_to_the_matrix_goes_around_the_budget(ask: Callable[[Any], Any]) -> None:
    w = a_map()
    with hw.budget.limit("100 B"), pytest.raises(BudgetExceeded, match="> 100 B"):
        ask(w)
    ask(w)


def test_given_weights_are_there_already_and_need_no_budget() -> None:
    dense = a_map().dense()
    with hw.budget.limit("100 B"):
        assert hw.AttentionMap.from_weights(dense).dense() is dense


def test_what_stays_small_is_allowed_where_the_matrix_is_not() -> None:
    w = a_map(causal=True)
    with hw.budget.limit("3 KiB"):
        with pytest.raises(BudgetExceeded, match=r"3\.3 KiB > 3 KiB"):
            w.dense()
        assert w[0, 3, 4].shape == (S,)
        assert w.select(heads=3).shape == (B, 1, T, S)
        assert w.statistics().entropy.shape == (B, H)
        assert w.pooled(3).shape == (B, H, 3, 3)
        assert w.top(2).values.shape == (B, H, T, 2)


def test_a_limit_that_is_no_size_is_refused() -> None:
    for ask in (a_map().dense, a_map().mean_heads):
        with pytest.raises(ArgumentError, match="got 'plenty'"):
            ask(limit="plenty")


# Weights from elsewhere


@every_option
def test_a_map_of_given_weights_equals_the_map_they_came_from(options: dict[str, Any]) -> None:
    w = a_map(**options)
    mask = options.get("mask")
    again = hw.AttentionMap.from_weights(w.dense(), mask if isinstance(mask, Mask) else None)
    assert again.shape == w.shape and again.dtype == w.dtype
    assert torch.equal(again.dense(), w.dense())
    assert error(again.mean_heads(), w.mean_heads()) < 1e-14
    assert error(again.pooled((3, 2)), w.pooled((3, 2))) < 1e-13
    assert error(again.top(3).values, w.top(3).values) < 1e-14
    assert torch.equal(again.top(3).indices, w.top(3).indices)
    rows_are_whole = "sinks" not in options
    for per in ("head", "query"):
        mine, theirs = again.statistics(per=per), w.statistics(per=per)
        assert set(theirs) - set(mine) == {"max_logit"}
        for name in mine:
            if rows_are_whole or name not in ("entropy", "effective_keys"):  # the sink's share is not told
                assert torch.equal(torch.isnan(mine[name]), torch.isnan(theirs[name])), name
                assert error(mine[name].nan_to_num(), theirs[name].nan_to_num()) < 1e-12, name


def test_statistics_of_given_weights_are_what_their_formulas_say_where_rows_do_not_sum_to_one() -> None:
    """Weights after dropout, or with a sink's share taken out, are not to be stretched to sum to 1."""
    p = a_map().dense() * 0.6
    stats = hw.AttentionMap.from_weights(p).statistics("confidence", "distance", "first", per="query")
    away = (torch.arange(T)[:, None] + S - T - torch.arange(S)).abs()
    assert error(stats.first, p[..., 0]) < 1e-14
    assert error(stats.confidence, p.amax(-1)) < 1e-14
    assert error(stats.distance, (p * away).sum(-1)) < 1e-13


def test_given_weights_have_no_scores_to_find_the_largest_of() -> None:
    given_map = hw.AttentionMap.from_weights(a_map().dense())
    assert "max_logit" not in given_map.statistics()
    with pytest.raises(
        ArgumentError, match="max_logit must be measured on scores: this map was made from weights"
    ):
        given_map.statistics("max_logit")


@pytest.mark.parametrize(
    ("weights", "kind", "message"),
    [
        (
            torch.ones(H, T, S),
            ShapeError,
            r"weights must have 4 dimensions .*: got 3, \[6, 5, 7\]; pass a mean over",
        ),
        (torch.ones(T, S), ShapeError, r"got 2, \[5, 7\]"),
        (torch.ones(SHAPE).int(), ArgumentError, "weights must be floating point: got torch.int32"),
        (
            torch.ones(SHAPE) - 1.25,
            ArgumentError,
            "weights must not be negative: found -0.25; for scores use",
        ),
    ],
    ids=["one sequence", "one head", "integers", "negative"],
)
def test_weights_that_are_none_are_refused(weights: Tensor, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        hw.AttentionMap.from_weights(weights)


def test_gradients_flow_through_given_weights() -> None:
    leaf = a_map().dense().requires_grad_()
    w = hw.AttentionMap.from_weights(leaf)
    (w.dense() * 2 + w[0].sum() + w.mean_heads().sum()).sum().backward()
    assert leaf.grad is not None and bool((leaf.grad != 0).all())
    assert not w.detach().dense().requires_grad


# Moving it about


def everything(w: hw.AttentionMap) -> list[Tensor]:
    """All one can ask of a map, as tensors."""
    actual = [w.dense(), w.mean_heads()]
    if w._columns is None:
        actual += [w.lse, w.pooled(3), *w.top(2), *w.statistics().values()]
    return actual


def assert_same_map(actual: hw.AttentionMap, expected: hw.AttentionMap) -> None:
    assert isinstance(actual, hw.AttentionMap)
    assert repr(actual) == repr(expected)
    for mine, theirs in zip(everything(actual), everything(expected), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-14, equal_nan=True)


def maps() -> dict[str, hw.AttentionMap]:
    actual = {name: a_map(**options) for name, options in OPTIONS.items()}
    actual["no lse"] = without_lse(causal=True)
    actual["part"] = a_map(causal=True, sinks=normal(6, H)).select(heads=[4, 0], queries=slice(1, 5, 2))
    actual["keys"] = a_map().select(keys=[5, 1, 1])
    actual["run of keys"] = a_map().select(keys=slice(1, 6, 2))
    actual["weights"] = hw.AttentionMap.from_weights(a_map().dense(), Mask.padding([S, 4], [3, 5]))
    actual["part of weights"] = actual["weights"].select(batch=1, heads=[0, 5], keys=slice(2))
    return actual


@pytest.mark.thinned
@pytest.mark.parametrize("name", maps(), ids=lambda name: name.replace(" ", "-"))
def test_a_map_survives_pickling_and_copying(name: str) -> None:
    w = maps()[name]
    for again in (
        pickle.loads(pickle.dumps(w)),
        copy.deepcopy(w),
        copy.copy(w),
        w.to("cpu"),
        w.cpu(),
        w.detach(),
    ):
        assert_same_map(again, w)


@pytest.mark.parametrize("name", maps(), ids=lambda name: name.replace(" ", "-"))
def test_a_map_passes_through_tree_map(name: str) -> None:
    w = maps()[name]
    assert_same_map(pytree.tree_map(lambda x: x, {"a": [w]})["a"][0], w)
    doubled = pytree.tree_map_only(Tensor, lambda x: x * 2 if x.is_floating_point() else x, w)
    assert isinstance(doubled, hw.AttentionMap) and doubled.shape == w.shape


def test_the_leaves_of_a_map_are_tensors_alone() -> None:
    """Code that maps `x.to(...)` over every leaf (data parallel wrappers do) must not meet a None."""
    for name, w in maps().items():
        assert [type(leaf) for leaf in pytree.tree_leaves(w) if not isinstance(leaf, Tensor)] == [], name


def test_a_map_can_be_put_together_from_anything_for_leaves() -> None:
    """What torch does with a tree of flags or sizes in place of tensors (vmap's out_dims, data parallel)."""
    for name, w in maps().items():
        assert type(pytree.tree_map(lambda x: 0, w)) is hw.AttentionMap, name


def test_a_deep_copy_shares_no_memory_and_a_detached_map_does() -> None:
    q, k, _ = qkv()
    w = hw.AttentionMap(q, k)
    before = w.dense()
    deep, detached = copy.deepcopy(w), w.detach()
    q.zero_()
    assert torch.equal(deep.dense(), before)
    with pytest.raises(ArgumentError, match="q, k, mask and bias must not change while their map is in use"):
        detached.dense()


@pytest.mark.parametrize("which", [0, 1], ids=["q", "k"])
@pytest.mark.parametrize(
    "ask",
    [
        lambda w: w.dense(),
        lambda w: w[0, 1],
        lambda w: w.mean_heads(),
        lambda w: w.statistics(),
        lambda w: w.lse,
    ],
    ids=["dense", "head", "mean", "statistics", "lse"],
)
def test_a_map_of_what_was_written_over_says_so(ask: Callable[[Any], Any], which: int) -> None:
    """A map is of q and k as they were; after writing to them in place its answers would be of nothing."""
    tensors = qkv()[:2]
    w = hw.AttentionMap(*tensors)
    tensors[which].mul_(2)
    with pytest.raises(
        ArgumentError, match=r"must not change while their map is in use: one was written to in place"
    ):
        ask(w)
    assert ask(hw.AttentionMap(*tensors)) is not None


@pytest.mark.parametrize("name", ["sinks", "bias", "slopes", "relative"])
def test_a_map_whose_scoring_was_written_over_says_so(name: str) -> None:
    """Learned sinks and biases are written to by every optimizer step: lse is of the old ones then."""
    options = OPTIONS[name]
    given_tensor = next(iter(options.values()))
    learned = inside(given_tensor).clone()
    w = a_map(**{"bias" if name != "sinks" else name: with_inside(given_tensor, learned)})
    learned.add_(3)
    with pytest.raises(ArgumentError, match="written to in place"):
        w.statistics("entropy")


def test_detaching_cuts_every_input_from_the_graph() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    sinks, bias = normal(6, H).requires_grad_(), normal(4, H, T, S).requires_grad_()
    w = hw.attention(q, k, v, sinks=sinks, bias=bias)[1]
    assert w.dense().requires_grad and not w.detach().dense().requires_grad
    assert w.detach().select(heads=2).mean_heads().requires_grad is False


def test_a_map_moves_with_all_its_tensors() -> None:
    w = a_map(mask=Mask.padding([3, S]) & Mask.documents([0, 0, 0, 1, 1, 2, 2]), sinks=normal(6, H))
    moved = w.to("meta")
    assert moved.device.type == "meta" and moved.lse.device.type == "meta" and moved.shape == w.shape
    assert {x.device.type for x in pytree.tree_leaves(moved) if isinstance(x, Tensor)} == {"meta"}
    assert w.device.type == "cpu"


READER = """
import json, sys
import torch
import headwise

found = torch.load(sys.argv[1], weights_only=True)
answer = {name: [repr(w), w.dense().sum((0, 1)).tolist()] for name, w in found["maps"].items()}
answer["entropy"] = found["statistics"].entropy.tolist()
answer["top"] = found["top"].indices.tolist()
print(json.dumps(answer))
"""


@pytest.mark.slow
def test_a_saved_map_loads_safely_in_a_fresh_process(tmp_path: Path) -> None:
    saved, w = maps(), a_map()
    path = tmp_path / "maps.pt"
    torch.save({"maps": saved, "statistics": w.statistics(), "top": w.top(3)}, path)
    for name, again in torch.load(path, weights_only=True)["maps"].items():
        assert_same_map(again, saved[name])
    src = Path(hw.__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READER, str(path)],
        env={"PYTHONPATH": str(src)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer.pop("entropy") == w.statistics().entropy.tolist()
    assert answer.pop("top") == w.top(3).indices.tolist()
    for name, (shown, sums) in answer.items():
        assert shown == repr(saved[name])
        torch.testing.assert_close(torch.tensor(sums, dtype=torch.float64), saved[name].dense().sum((0, 1)))


# What may be asked of it, and how


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda w: w.pooled(0), "cells must be a number or a pair, each at least 1: got 0"),
        (lambda w: w.pooled((3, -2)), r"cells must be a number or a pair, each at least 1: got \(3, -2\)"),
        (lambda w: w.top(0), "count must be between 1 and key_len: got 0 of 7; use 7"),
        (lambda w: w.top(11), "count must be between 1 and key_len: got 11 of 7; use 7"),
        (lambda w: w.statistics("entrpy"), "got 'entrpy'; did you mean 'entropy'"),
        (lambda w: w.statistics("entropy", "locl"), "got 'locl'; did you mean 'local'"),
        (lambda w: w.statistics(per="row"), 'per must be "head" or "query": got \'row\''),
        (lambda w: w.statistics(reach=-3), "reach must not be negative: got -3"),
    ],
    ids=["no cells", "negative cells", "no keys", "too many keys", "name", "second name", "per", "reach"],
)
def test_an_argument_out_of_range_is_refused_with_its_number(ask: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        ask(a_map())


def test_pictures_are_never_larger_than_the_map() -> None:
    w = a_map()
    assert w.pooled().shape == SHAPE and error(w.pooled(), w.dense()) < 1e-14
    assert w.pooled(3).shape == (B, H, 3, 3)
    assert w.pooled((2, 100)).shape == (B, H, 2, S)


def test_statistics_have_names_shapes_and_a_mapping() -> None:
    stats = a_map().statistics("entropy", "received")
    assert isinstance(stats, Statistics) and list(stats) == ["entropy", "received"] and len(stats) == 2
    assert stats.entropy is stats["entropy"] and stats.entropy.shape == (B, H)
    assert stats.received.shape == (B, H, S)
    assert repr(stats) == f"Statistics(entropy [{B}, {H}], received [{B}, {H}, {S}])"
    assert "entropy" in dir(stats) and "distance" not in dir(stats)
    assert set(a_map().statistics()) == set(STATISTICS)
    per_query = a_map().statistics(per="query")
    assert all(per_query[name].shape == (B, H, T) for name in STATISTICS if name != "received")


def test_a_statistic_that_was_not_measured_says_how_to_ask_for_it() -> None:
    stats = a_map().statistics("entropy")
    with pytest.raises(
        AttributeError, match=re.escape("distance was not measured; call statistics('distance')")
    ):
        _ = stats.distance
    with pytest.raises(KeyError, match="distance"):
        stats["distance"]


def test_a_statistic_nobody_knows_is_met_with_the_nearest_name() -> None:
    with pytest.raises(AttributeError, match="no statistic 'entrpy'; did you mean 'entropy'"):
        _ = a_map().statistics("entropy").entrpy
    with pytest.raises(ArgumentError, match="got 'previus'; did you mean 'previous'"):
        Statistics.formula("previus")


@pytest.mark.parametrize("name", STATISTICS)
def test_every_statistic_says_what_it_is_and_where_it_comes_from(name: str) -> None:
    text = Statistics.formula(name)
    assert ":" in text or "=" in text
    own = ("effective_keys", "local")  # ours: no paper to name
    assert re.search(r"\b(19|20)\d\d\b", text) or name in own, text


# What must always hold


@every_option
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_are_equal_to_the_last_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)

    def run() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, w = hw.attention(*leaves, **options)
        (out.sum() + w.dense().square().sum()).backward()
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        return [out.detach(), *everything(w.detach()), *grads]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first.nan_to_num(), second.nan_to_num())


@every_option
def test_nothing_writes_to_what_it_was_given(options: dict[str, Any]) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    given_too: list[Tensor] = [q, k, v, HOLES]
    for value in options.values():
        if isinstance(value, Tensor):
            given_too.append(value)
        elif isinstance(value, Mask):
            given_too += value.tensors.values()
        elif isinstance(value, (Alibi, Relative)):
            given_too.append(inside(value))
    before = [x.detach().clone() for x in given_too]
    versions = [x._version for x in given_too]
    out, w = hw.attention(q, k, v, **options)
    (out.sum() + w.dense().square().sum() + w.mean_heads().square().sum() + w[0, 1, 2].sum()).backward()
    everything(w)
    everything(hw.AttentionMap(q, k, **options))
    everything(hw.AttentionMap.from_weights(w.dense()))
    hw.attention(q, k, v, **options, dropout=0.5)
    for x, same, version in zip(given_too, before, versions, strict=True):
        assert torch.equal(x, same) and x._version == version


# Gradients


def test_of_what_is_measured_only_entropy_carries_a_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    for w in (hw.attention(q, k, v)[1], hw.AttentionMap(q, k)):
        assert not w.lse.requires_grad
        assert not any(x.requires_grad for x in (w.pooled(3), w.top(2).values))
        for name, value in w.statistics().items():
            assert value.requires_grad == (name in ("entropy", "effective_keys")), name
        assert w.dense().requires_grad and w[0, 1].requires_grad and w.mean_heads().requires_grad


LOOKS: dict[str, Callable[[hw.AttentionMap], Tensor]] = {
    "dense": lambda w: w.dense(),
    "mean": lambda w: w.mean_heads(),
    "row": lambda w: w[0, 1, 1],
    "head": lambda w: w[:, 1],
    "keys": lambda w: w[..., [2, 0, 2]],
    "part": lambda w: w.select(heads=[1], queries=slice(1, None), keys=slice(0, 2)).dense(),
    "mean of some keys": lambda w: w.select(keys=slice(None, None, 2)).mean_heads(),
    "product": lambda w: w @ torch.ones(3, 1, dtype=torch.float64),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("known_lse", [True, False], ids=["lse", "no-lse"])
def test_weights_are_differentiable_wherever_one_looks(
    look: Callable[[hw.AttentionMap], Tensor], known_lse: bool
) -> None:
    q, k = normal(1, 1, 2, 2, 2).requires_grad_(), normal(2, 1, 1, 3, 2).requires_grad_()
    sinks = normal(3, 2).requires_grad_()

    def weights(q: Tensor, k: Tensor, sinks: Tensor) -> Tensor:
        if known_lse:
            return look(hw.attention(q, k, k.detach(), causal=True, sinks=sinks)[1])
        return look(hw.AttentionMap(q, k, causal=True, sinks=sinks))

    assert torch.autograd.gradcheck(weights, (q, k, sinks))


def test_second_derivatives_of_weights_are_right() -> None:
    q, k = normal(1, 1, 2, 2, 2).requires_grad_(), normal(2, 1, 1, 3, 2).requires_grad_()

    def weights(q: Tensor, k: Tensor) -> Tensor:
        return hw.AttentionMap(q, k, causal=True, softcap=2.0).dense()

    assert torch.autograd.gradgradcheck(weights, (q, k))


# What measures of heads ask of a map


@every_option
def test_a_map_tells_where_its_queries_stand_and_what_they_may_see(options: dict[str, Any]) -> None:
    w = a_map(**options)
    assert w.positions.tolist() == list(range(S - T, S))
    assert w.ends == (S - T, S - 1)
    visible = w.mask.full(T, S, B, H).expand(SHAPE)
    assert torch.equal(w.visible().expand(B, H, T), visible.sum(-1))
    near = visible & Mask.window(2).full(T, S)
    assert torch.equal(w.visible(w.mask & Mask.window(2)).expand(B, H, T), near.sum(-1))
    some = w.select(queries=[3, 1])
    assert some.positions.tolist() == [S - T + 3, S - T + 1]
    assert some.ends == (S - T + 1, S - T + 3)
    assert (w.sinks is None) == ("sinks" not in options)
    assert (w.bias is None) == (not isinstance(options.get("bias"), Tensor))


def test_a_map_tells_which_keys_are_real() -> None:
    real = torch.arange(S) < torch.tensor([[3], [S]])
    assert torch.equal(a_map(**OPTIONS["padding"]).real_keys, real)
    assert torch.equal(a_map(mask=Mask.padding(real)).real_keys, real)
    assert torch.equal(a_map(mask=Mask.padding(real)).select(keys=[5, 2]).real_keys, real[:, [5, 2]])
    assert a_map(causal=True).real_keys.all()
    assert a_map(causal=True).select(keys=slice(2, 5)).real_keys.shape == (B, 3)


def test_a_map_tells_which_queries_count() -> None:
    counts = a_map(**OPTIONS["padding"]).counted_queries()
    assert torch.equal(counts, (torch.arange(T) < torch.tensor([[T], [2]]))[:, None].expand(B, H, T))
    w = a_map(window=3)
    assert w.counts_every_query
    assert w.counted_queries().all()
    assert w.counted_queries("received").all()
    assert w.counted_queries("next").tolist() == [[[True] * (T - 1) + [False]] * H] * B
    assert not a_map(**OPTIONS["holes"]).counts_every_query
    assert not hw.AttentionMap.from_weights(w.dense()).counts_every_query
    with pytest.raises(ArgumentError, match="statistics must be known names: got 'entropie'"):
        w.counted_queries("entropie")


def test_visible_counts_keys_of_chosen_queries_where_they_stand() -> None:
    """Of chosen queries the last labels were taken for theirs: [2, 2] keys where there are [4, 2]."""
    x = torch.randn(1, 1, 6, 4)
    weights, mask = hw.AttentionMap(x, x), hw.Mask.documents([0, 0, 0, 0, 1, 1])
    for queries in ([1, 4], slice(0, 2), [5]):
        chosen = weights.select(queries=queries)
        assert torch.equal(chosen.visible(mask), weights.visible(mask)[..., queries])
        assert torch.equal(chosen.visible(mask.full(6, 6)[..., queries, :]), chosen.visible(mask))
    with pytest.raises(
        ArgumentError, match="visible must be called on a map of all keys: this map has 2 of 6 keys"
    ):
        weights.select(keys=[0, 1]).visible()


# A bias by distance


@pytest.mark.parametrize("queries", [[3, 0, 3, 4], slice(1, 4), [2]], ids=["picked", "run", "one"])
def test_chosen_queries_send_back_to_a_relative_bias_what_all_would(queries: Any) -> None:
    """Queries that do not follow each other have no diagonals: each run of them goes back for itself."""
    q, k, _ = qkv()
    arms = []
    for whole in (True, False):
        values = normal(7, H, 5).requires_grad_()
        w = hw.AttentionMap(q, k, bias=Relative(values), causal=True)
        p = w.dense()[:, :, queries] if whole else w.select(queries=queries).dense()
        p.backward(normal(8, *p.shape))
        arms.append((p.detach(), values.grad))
    for theirs, mine in zip(*arms, strict=True):
        assert error(mine, theirs) < 1e-13


def test_what_was_saved_before_there_was_a_relative_bias_still_loads() -> None:
    """Scorings were pickled as five parts, maps in files without that name."""
    w = a_map(bias=OPTIONS["slopes"]["bias"], sinks=normal(6, H))
    scoring = w._scores.scoring
    kind, parts = scoring.__reduce__()
    old = kind(*parts[:5])
    assert old.relative is None and old.sinks is scoring.sinks and old.slopes is scoring.slopes
    named = w._scores.parts()
    assert named.pop("relative") is None
    assert torch.equal(make(Scores.from_parts(named), w.lse).dense(), w.dense())
    again = pickle.loads(pickle.dumps(Relative(normal(7, H, 5))))
    assert torch.equal(again.values, normal(7, H, 5))
