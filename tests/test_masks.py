"""`Mask` against the rules read off one by one in `reference.allowed`.

Letters: B batch, H num_heads, T query_len, S key_len; all distinct primes, T above and below S.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

from headwise import reference
from headwise.errors import MaskError
from headwise.indexing import take
from headwise.mask_rules import can_read
from headwise.masks import Mask

Draw = Callable[..., Any]  # st.DrawFn, or data.draw
Sizes = tuple[int, int, int, int]
PRIMES = (2, 3, 5, 7, 11)
KINDS = ("band", "lengths", "real", "documents", "dense")

quick = settings(max_examples=80, deadline=None)
quicker = settings(max_examples=30, deadline=None)


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    B, H, T, S = draw(st.permutations(PRIMES))[:4]
    return B, H, T, S


def random_bools(draw: Draw, *shape: int) -> Tensor:
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    share: float = draw(st.sampled_from((0.2, 0.5, 0.9)))
    return torch.rand(shape, generator=source) < share


def random_ids(draw: Draw, batch: int, length: int) -> Tensor:
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    ids = torch.randint(0, 3, (batch, length), generator=source)
    return ids[0] if batch == 1 and draw(st.booleans()) else ids


def rule(draw: Draw, kind: str, shape: Sizes, with_query_ids: bool) -> Mask:
    B, _, T, S = shape
    if kind == "band":
        reach = st.none() | st.integers(-3, S + 2)
        return Mask(left=draw(reach), right=draw(reach))
    if kind == "lengths":
        one_each = (st.lists(st.integers(0, most), min_size=B, max_size=B) for most in (S, T))
        lengths, query_lengths = (draw(several) for several in one_each)
        return Mask.padding(lengths, draw(st.sampled_from((None, query_lengths))))
    if kind == "real":
        return Mask.padding(random_bools(draw, B, S), random_bools(draw, B, T))
    if kind == "documents":
        batch = draw(st.sampled_from((1, B)))
        query_ids = random_ids(draw, draw(st.sampled_from((1, B))), T) if with_query_ids else None
        return Mask.documents(random_ids(draw, batch, S), query_ids)
    broadcast = [draw(st.sampled_from((1, size))) for size in shape]
    return Mask.dense(random_bools(draw, *broadcast))


@st.composite
def masks(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS, most: int = 4) -> tuple[Mask, Sizes]:
    """Up to `most` rules joined, and the sizes they are for."""
    shape = draw(sizes())
    with_query_ids = shape[2] > shape[3] or draw(st.booleans())
    mask = Mask()
    for kind in draw(st.lists(st.sampled_from(kinds), max_size=most)):
        mask = mask & rule(draw, kind, shape, with_query_ids)
    return mask, shape


def whole(mask: Mask, shape: Sizes) -> Tensor:
    B, H, T, S = shape
    return mask.full(T, S, B, H).expand(shape)


def block(draw: Draw, length: int) -> slice:
    start, stop = sorted(draw(st.lists(st.integers(0, length), min_size=2, max_size=2, unique=True)))
    return slice(start, stop)


def index(draw: Draw, length: int) -> Tensor:
    return torch.tensor(draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=6)))


def positions(shape: Sizes) -> Tensor:
    return torch.arange(shape[2]) + shape[3] - shape[2]


# What the rules mean


@quick
@given(masks())
def test_a_mask_says_what_its_rules_say_one_by_one(case: tuple[Mask, Sizes]) -> None:
    mask, shape = case
    assert torch.equal(whole(mask, shape), reference.allowed(mask, *shape))


@quick
@given(st.data())
def test_joining_hides_what_either_rule_hides(data: st.DataObject) -> None:
    shape = data.draw(sizes())
    kind = data.draw(st.sampled_from(KINDS))
    second_kind = data.draw(st.just(kind) | st.sampled_from(KINDS))
    first, other = (rule(data.draw, each, shape, True) for each in (kind, second_kind))
    both = whole(first, shape) & whole(other, shape)
    assert torch.equal(whole(first & other, shape), both)
    assert torch.equal(whole(other & first, shape), both)


@quick
@given(st.data())
def test_joining_counts_the_queries_that_count_in_both(data: st.DataObject) -> None:
    shape = data.draw(sizes())
    kinds = data.draw(st.lists(st.sampled_from(("lengths", "real")), min_size=2, max_size=2))
    first, other = (rule(data.draw, kind, shape, True) for kind in kinds)
    everyone = torch.ones(shape[0], shape[2], dtype=torch.bool)

    def counted(mask: Mask) -> Tensor:
        actual = mask.counted(shape[2])
        return everyone if actual is None else actual

    assert torch.equal(counted(first & other), counted(first) & counted(other))


def as_rows(*lines: str) -> Tensor:
    return torch.tensor([[spot == "x" for spot in line] for line in lines])[None, None]


def test_causal_aligns_the_last_query_with_the_last_key() -> None:
    assert torch.equal(Mask.causal().full(2, 5), as_rows("xxxx.", "xxxxx"))
    assert torch.equal(Mask.causal().full(5, 2), as_rows("..", "..", "..", "x.", "xx"))
    assert torch.equal(Mask.causal().full(3, 3), as_rows("x..", "xx.", "xxx"))


def test_a_window_of_one_sees_the_query_itself_alone() -> None:
    assert torch.equal(Mask.window(1).full(3, 5), as_rows("..x..", "...x.", "....x"))


def test_a_window_of_two_sees_the_query_and_the_key_before_it() -> None:
    assert torch.equal(Mask.window(2).full(3, 5), as_rows(".xx..", "..xx.", "...xx"))
    assert torch.equal(Mask.window(2).full(3, 2), as_rows("..", "x.", "xx"))


def test_left_right_reaches_that_many_keys_to_either_side() -> None:
    band = Mask.window(left_right=(1, 2)).full(5, 5)
    assert torch.equal(band, as_rows("xxx..", "xxxx.", ".xxxx", "..xxx", "...xx"))
    assert torch.equal(Mask.window(left_right=(0, 0)).full(3, 5), Mask.window(1).full(3, 5))


def test_padding_takes_lengths_bools_lists_and_arrays_alike() -> None:
    wanted = Mask.padding(torch.tensor([3, 0, 5])).full(2, 5, batch=3)
    real = torch.arange(5) < torch.tensor([[3], [0], [5]])
    forms: tuple[Any, ...] = (
        [3, 0, 5],
        np.array([3, 0, 5]),
        torch.tensor([3, 0, 5], dtype=torch.uint8),
        real,
    )
    for given_as in forms:
        assert torch.equal(Mask.padding(given_as).full(2, 5, batch=3), wanted)


def test_padded_queries_keep_their_weights_but_do_not_count() -> None:
    mask = Mask.padding([3, 5], [2, 1])
    assert torch.equal(mask.full(3, 5, batch=2), Mask.padding([3, 5]).full(3, 5, batch=2))
    counted = mask.counted(3)
    assert counted is not None
    assert counted.tolist() == [[True, True, False], [True, False, False]]
    assert Mask.padding([3, 5]).counted(3) is None


def test_documents_of_the_queries_are_the_last_ones_unless_given() -> None:
    ids = [0, 0, 1, 1, 1]
    assert torch.equal(Mask.documents(ids).full(2, 5), as_rows("..xxx", "..xxx"))
    assert torch.equal(Mask.documents(ids, [1, 0, 7]).full(3, 5), as_rows("..xxx", "xx...", "....."))


def test_dense_reads_zeros_and_ones_of_any_dtype_as_bool() -> None:
    wanted = as_rows("x.x", "xx.")
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32, torch.float16):
        assert torch.equal(Mask.dense(wanted[0, 0].to(dtype)).full(2, 3), wanted)


BAND, PADDED, DOCUMENTS = Mask.window(2), Mask.padding([3]), Mask.documents([0, 0, 1])
DENSE, COUNTED = Mask.dense(torch.ones(3, 3)), Mask(queries=torch.tensor([3]))


# Pieces of a mask


@quick
@given(st.data())
def test_any_tile_is_that_piece_of_the_full_matrix(data: st.DataObject) -> None:
    mask, shape = data.draw(masks())
    rows: Any = block(data.draw, shape[2])
    columns: Any = block(data.draw, shape[3])
    if data.draw(st.booleans()):
        columns = index(data.draw, shape[3])
    if data.draw(st.booleans()):
        rows = index(data.draw, shape[2])
    piece = whole(mask, shape)[:, :, rows][..., columns]
    tile = mask.bind(*shape).tile(positions(shape)[rows], rows, columns, shape[3])
    if tile is None:
        assert mask.hides_nothing
        assert piece.all()
    else:
        assert torch.equal(tile.expand(piece.shape), piece)


@quick
@given(st.data())
def test_select_keeps_the_rules_of_those_it_picks(data: st.DataObject) -> None:
    mask, shape = data.draw(masks())
    B, H, T, S = shape
    picks: list[Any] = [
        data.draw(st.sampled_from((slice(None), block(data.draw, size), index(data.draw, size))))
        for size in (B, H, T)
    ]
    batch, heads, queries = picks
    bound = mask.bind(*shape)
    chosen = bound.select(batch, heads, queries)
    piece = take(whole(mask, shape), (batch, heads, queries), ones_stay=False)
    at = positions(shape)[queries]
    tile = chosen.tile(at, slice(0, len(at)), slice(0, S), S)
    assert piece.all() if tile is None else torch.equal(tile.expand(piece.shape), piece)

    counted, of_all = chosen.counted(len(at)), bound.counted(T)
    assert (counted is None) == (of_all is None)
    if counted is not None and of_all is not None:
        assert torch.equal(counted, of_all[batch][:, queries])


@quick
@given(st.data())
def test_span_never_cuts_off_a_visible_key(data: st.DataObject) -> None:
    mask, shape = data.draw(masks())
    rows: Any = block(data.draw, shape[2])
    if data.draw(st.booleans()):
        rows = index(data.draw, shape[2])
    at = positions(shape)[rows]
    start, stop = mask.bind(*shape).span(int(at.min()), int(at.max()), rows, shape[3])
    assert 0 <= start <= stop <= shape[3]
    visible = whole(mask, shape)[:, :, rows]
    assert not visible[..., :start].any()
    assert not visible[..., stop:].any()


def tight(visible: Tensor) -> tuple[int, int]:
    actual = visible.flatten(0, -2).any(0).nonzero().flatten().tolist()
    return (actual[0], actual[-1] + 1) if actual else (0, 0)


def span_of(mask: Mask, shape: Sizes, rows: slice) -> tuple[int, int]:
    at = positions(shape)[rows]
    return mask.bind(*shape).span(int(at[0]), int(at[-1]), rows, shape[3])


@quick
@given(st.data())
def test_span_of_a_band_is_not_one_key_too_long(data: st.DataObject) -> None:
    shape = data.draw(sizes())
    right = data.draw(st.none() | st.integers(-4, shape[3]))
    left = data.draw(st.none() | st.integers(max(0, -(right or 0)), shape[3] + 4))
    mask, rows = Mask(left=left, right=right), block(data.draw, shape[2])
    assert span_of(mask, shape, rows) == tight(whole(mask, shape)[:, :, rows])


@pytest.mark.parametrize("kind", ["lengths", "real", "documents", "dense"])
def test_span_of_one_rule_kept_in_a_tensor_is_tight(kind: str) -> None:
    @quicker
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        shape = data.draw(sizes())
        mask = rule(data.draw, kind, shape, with_query_ids=True)
        rows = block(data.draw, shape[2])
        actual = span_of(mask, shape, rows)
        if kind == "dense" and mask.tensors["allowed"].shape[-1] == 1:
            assert actual == (0, shape[3])  # one bool for all keys: nothing to cut
        elif kind == "documents":
            ids = mask.bind(*shape).tensors
            any_batch = ids["query_ids"][:, None, rows] == ids["key_ids"][None, :, None, :, 0]
            assert actual == tight(any_batch)  # which sequence holds an id is not looked at
        else:
            assert actual == tight(whole(mask, shape)[:, :, rows])

    holds()


def test_span_is_empty_where_nothing_is_seen() -> None:
    assert Mask.causal().span(-5, -1, slice(0, 5), 3) == (0, 0)
    assert Mask.padding([0, 0]).bind(2, 1, 3, 5).span(2, 4, slice(0, 3), 5) == (0, 0)
    far = Mask.window(2) & Mask.padding([2])
    assert far.bind(1, 1, 3, 11).span(8, 10, slice(0, 3), 11) == (0, 0)


@quick
@given(st.data())
def test_sees_any_tells_which_queries_see_one_of_these_keys(data: st.DataObject) -> None:
    mask, shape = data.draw(masks(("band", "lengths", "real")))
    rows, columns = block(data.draw, shape[2]), block(data.draw, shape[3])
    message = mask.sees_any(positions(shape)[rows], columns.start, columns.stop)
    visible = whole(mask, shape)[:, 0, rows, columns].any(-1)  # [B, t]
    assert torch.equal(message.expand(visible.shape), visible)


# A mask as an object


def everything(mask: Mask) -> dict[str, Any]:
    values = ((field.name, getattr(mask, field.name)) for field in dataclasses.fields(mask))
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values}


@quicker
@given(masks())
def test_a_mask_survives_pickling_copying_and_saving(case: tuple[Mask, Sizes]) -> None:
    mask, _ = case
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask), loaded, mask.to("cpu")):
        assert everything(twin) == everything(mask)


def test_repr_shows_numbers_and_the_shapes_of_tensors() -> None:
    assert repr(Mask()) == "Mask()"
    assert repr(Mask.causal() & Mask.window(256)) == "Mask(left=255, right=0)"
    assert repr(Mask.padding([1, 2, 3], [1, 1, 1])) == "Mask(keys=int64[3], queries=int64[3])"
    assert repr(Mask.documents([0, 0, 1], [1])) == "Mask(key_ids=int64[1, 3, 1], query_ids=int64[1, 1, 1])"
    assert repr(Mask.dense(torch.eye(3))) == "Mask(allowed=bool[1, 1, 3, 3])"


@quick
@given(st.data())
def test_no_method_writes_to_what_it_was_given(data: st.DataObject) -> None:
    mask, shape = data.draw(masks())
    other = rule(data.draw, data.draw(st.sampled_from(KINDS)), shape, mask.query_ids is not None)
    before = everything(mask), everything(other)
    if mask.key_ids is None or other.key_ids is None or (mask.query_ids is None) == (other.query_ids is None):
        mask & other
    bound, at = mask.bind(*shape), positions(shape)
    rows, columns = block(data.draw, shape[2]), index(data.draw, shape[3])
    bound.tile(at[rows], rows, columns, shape[3])
    bound.span(int(at[0]), int(at[-1]), slice(0, shape[2]), shape[3])
    bound.sees_any(at, 0, shape[3])
    bound.select(slice(0, 1), slice(None), rows)
    bound.counted(shape[2])
    mask.full(shape[2], shape[3], shape[0], shape[1])
    assert (everything(mask), everything(other)) == before


# Reading values only where that is free


def test_values_are_not_read_on_other_devices() -> None:
    lengths = torch.empty(3, dtype=torch.int64, device="meta")
    assert not can_read(lengths)
    assert Mask.padding(lengths).bind(3, 1, 5, 7).span(2, 6, slice(0, 5), 7) == (0, 7)
    assert Mask.dense(torch.empty(5, 7, device="meta")).tensors["allowed"].dtype == torch.bool


def test_values_are_not_read_from_fake_tensors() -> None:
    """A fake tensor says it is on the CPU but holds nothing; looking at it raised inside torch."""
    with FakeTensorMode():
        lengths = torch.empty(3, dtype=torch.int64)
        assert not can_read(lengths)
        assert Mask.padding(lengths).full(5, 7, batch=3).shape == (3, 1, 1, 7)


# Refusals


def bound_to(mask: Mask, *shape: int) -> Callable[[], Mask]:
    return lambda: mask.bind(*shape)


def bools(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def whole_numbers(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    "window of nothing": (Mask.window, "window must get either size or left_right: got size=None"),
    "window of zero": (lambda: Mask.window(0), "window must be at least 1: got 0; 1 is the query's"),
    "half a key": (lambda: Mask.window(2.5), "window must be a whole number: got 2.5; give a number of keys"),  # type: ignore[arg-type]
    "reach below zero": (
        lambda: Mask.window(left_right=(-1, 3)),
        "left_right must not be negative: got (-1, 3); use (0, 0)",
    ),
    "one reach": (
        lambda: Mask.window(left_right=(3,)),  # type: ignore[arg-type]
        "left_right must be a pair: got (3,); give",
    ),
    "float lengths": (
        lambda: Mask.padding(torch.tensor([1.0, 2.0])),
        "lengths must be integers [B] or bool [B, length]: got float32[2]; convert a mask of 0 and 1",
    ),
    "length below zero": (
        lambda: Mask.padding([3, -2]),
        "lengths must not be negative: got -2; use 0",
    ),
    "another batch": (
        bound_to(Mask.padding([3, 5]), 3, 2, 5, 7),
        "lengths must fit batch and length: [2] for [3]; give one length",
    ),
    "another length": (
        bound_to(Mask.padding([3, 5], bools(2, 7)), 2, 3, 5, 7),
        "query_lengths must fit batch and length: [2, 7] for [2, 5]; give one length",
    ),
    "beyond the keys": (
        bound_to(Mask.padding([3, 11]), 2, 3, 5, 7),
        "lengths must be at most the sequence length: 11 > 7; cut or pad",
    ),
    "beyond the queries": (
        bound_to(Mask.padding([3, 7], [5, 6]), 2, 3, 5, 7),
        "query_lengths must be at most the sequence length: 6 > 5; cut or pad",
    ),
    "float ids": (
        lambda: Mask.documents(torch.zeros(7)),
        "document ids must be integers [S] or [B, S]: got float32[7]; number the documents",
    ),
    "ids a head": (
        lambda: Mask.documents([1], whole_numbers(2, 3, 5)),
        "document query_ids must be integers [S] or [B, S]: got int64[2, 3, 5]; number the documents",
    ),
    "too few ids": (
        bound_to(Mask.documents([0, 0, 1]), 2, 3, 5, 7),
        "document ids must cover the sequence: [1, 3] for batch 2, length 7; give one id",
    ),
    "ids of another batch": (
        bound_to(Mask.documents(whole_numbers(2, 7), whole_numbers(11, 5)), 2, 3, 5, 7),
        "document query_ids must cover the sequence: [11, 5] for batch 2, length 5; give one id",
    ),
    "more queries than ids": (
        bound_to(Mask.documents([0, 0, 1]), 2, 1, 5, 3),
        "document query_ids must be given when there are more queries than keys: 5 > 3; pass",
    ),
    "a list": (
        lambda: Mask.dense([[1, 0]]),  # type: ignore[arg-type]
        "mask must be a Mask or a tensor: got list; use torch.as_tensor(mask)",
    ),
    "five dimensions": (
        lambda: Mask.dense(bools(1, 2, 3, 5, 7)),
        "mask must broadcast to [B, H, T, S]: got 5 dimensions [1, 2, 3, 5, 7]; use at most four",
    ),
    "an additive mask": (
        lambda: Mask.dense(torch.tensor([[0.0, -10000.0]])),
        "mask must hold 0 and 1 only: found -10000; 1 = may attend",
    ),
    "zeros as float": (
        lambda: Mask.dense(torch.zeros(5, 7)),
        "float mask must not be all zeros: got [5, 7], which would hide every key",
    ),
    "padding as dense": (
        bound_to(Mask.dense(bools(2, 7)), 2, 3, 5, 7),
        "mask must broadcast to [B, H, T, S] = [2, 3, 5, 7]: got [1, 1, 2, 7]; pass a [B, S] padding mask",
    ),
    "batches joined": (
        lambda: Mask.padding([3, 5]) & Mask.padding([3, 5, 7]),
        "lengths joined with & must agree in size: [2] and [3]; make both",
    ),
    "lengths and bools joined": (
        lambda: Mask.padding([3, 5], [1, 1]) & Mask.padding([5, 5], bools(3, 7)),
        "query_lengths joined with & must agree in size: [2] and [3, 7]; make both",
    ),
    "dense joined": (
        lambda: Mask.dense(bools(3, 5)) & Mask.dense(bools(5, 3)),
        "dense masks joined with & must agree in size: [1, 1, 3, 5] and [1, 1, 5, 3]; make both",
    ),
    "either of two dense": (
        lambda: Mask.dense(bools(3, 5)) | Mask.dense(bools(5, 3)),
        "dense masks joined with | must agree in size: [1, 1, 3, 5] and [1, 1, 5, 3]; make both",
    ),
    "either of two paddings": (
        lambda: Mask.padding(bools(2, 7)) | Mask.padding(bools(3, 7)),
        "lengths joined with | must agree in size: [2, 7] and [3, 7]; make both",
    ),
    "ids joined": (
        lambda: Mask.documents([0, 1]) & Mask.documents([0, 1, 1]),
        "document ids joined with & must agree in size: [1, 2] and [1, 3]; make both",
    ),
    "one with query_ids": (
        lambda: Mask.documents([0, 1], [0, 1]) & Mask.documents([0, 1]),
        "document masks joined with & must both have query_ids or neither: got one; give query_ids",
    ),
}


@pytest.mark.parametrize("case", REFUSALS, ids=lambda name: name.replace(" ", "-"))
def test_a_refusal_names_the_argument_the_numbers_and_what_to_do(case: str) -> None:
    attempt, message = REFUSALS[case]
    with pytest.raises(MaskError, match=re.escape(message)):
        attempt()


@pytest.mark.parametrize(
    "mask",
    [
        Mask.padding(torch.tensor([3, 5])),
        Mask.padding(torch.ones(2, 5, dtype=torch.bool), torch.tensor([2, 3])),
        Mask.documents(torch.arange(5) // 2) & Mask.causal(),
        Mask.documents(torch.arange(5) // 2, torch.arange(3)),
        Mask.dense(torch.ones(1, 1, 3, 5, dtype=torch.bool)) & Mask.padding([4, 5]),
    ],
    ids=["lengths", "real", "documents", "query_ids", "dense"],
)
@pytest.mark.parametrize("query_len", [3, 5])
def test_a_mask_like_one_that_was_bound_is_bound_alike(mask: Mask, query_len: int) -> None:
    """All of it, what is known of its rules too; small tensors are its own, whoever writes to those given."""
    if query_len == 5 and (mask.allowed is not None or mask.query_ids is not None):
        query_len = 3
    joined = mask & Mask.window(2)  # what a call's own options add
    bound = joined.bind(2, 1, query_len, 5)
    alike = mask.bound_alike(bound.numbers_alone(), query_len, 5)
    assert type(alike) is type(bound) and alike == bound and vars(alike).keys() == vars(bound).keys()
    for name, value in vars(bound).items():
        assert isinstance(value, Tensor) or vars(alike)[name] == value
    assert not any(isinstance(value, Tensor) for value in bound.numbers_alone().values())
    for name, value in mask.tensors.items():
        assert (getattr(alike, name).data_ptr() == value.data_ptr()) == (name == "allowed")
