"""Conversions against those they convert for: torch's own module, and a softmax over an additive mask.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim; all distinct primes unless square.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise import reference
from headwise.errors import ArgumentError, MaskError, ShapeError
from headwise.foreign_masks import from_huggingface, from_torch, to_huggingface, to_torch
from headwise.masks import Mask

Draw = Callable[..., Any]  # st.DrawFn, or data.draw
Sizes = tuple[int, int, int, int]
D = 13
KINDS = ("band", "lengths", "real", "documents", "dense")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

quick = settings(max_examples=50, deadline=None)


@st.composite
def sizes(draw: st.DrawFn, square: bool | None = None) -> Sizes:
    B, H, T, S = draw(st.permutations((2, 3, 5, 7, 11)))[:4]
    if draw(st.booleans()) if square is None else square:
        T = S
    return B, H, T, S


def source(draw: Draw) -> torch.Generator:
    return torch.Generator().manual_seed(draw(st.integers(0, 2**16)))


def bools(draw: Draw, *shape: int) -> Tensor:
    share: float = draw(st.sampled_from((0.3, 0.7)))
    return torch.rand(shape, generator=source(draw)) < share


def floats(draw: Draw, *shape: int) -> Tensor:
    """Numbers to add, some of them -inf."""
    noise = torch.randn(shape, generator=source(draw), dtype=torch.float64)
    return noise.masked_fill(bools(draw, *shape), -torch.inf) if draw(st.booleans()) else noise


@st.composite
def masks(draw: st.DrawFn, square: bool | None = None) -> tuple[Mask, Sizes]:
    """Up to three rules joined, and the sizes they are for."""
    B, _, T, S = shape = draw(sizes(square))
    mask = Mask()
    for kind in draw(st.lists(st.sampled_from(KINDS), max_size=3)):
        if kind == "band":
            reach = st.none() | st.integers(-1, S)
            mask = mask & Mask(left=draw(reach), right=draw(reach))
        elif kind == "lengths":
            mask = mask & Mask.padding(draw(st.lists(st.integers(0, S), min_size=B, max_size=B)))
        elif kind == "real":
            mask = mask & Mask.padding(bools(draw, B, S))
        elif kind == "documents":
            ids, query_ids = (bools(draw, draw(st.sampled_from((1, B))), size).int() for size in (S, T))
            mask = mask & Mask.documents(ids, query_ids)
        else:
            mask = mask & Mask.dense(bools(draw, *(draw(st.sampled_from((1, size))) for size in shape)))
    return mask, shape


def named(shape: Sizes) -> dict[str, Any]:
    return dict(zip(("batch", "num_heads", "query_len", "key_len"), shape, strict=True))


def projected(shape: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, H, T, D], k and v [B, H, S, D]."""
    B, H, T, S = shape
    numbers = torch.Generator().manual_seed(0)

    def some(length: int) -> Tensor:
        return torch.randn(B, H, length, D, generator=numbers, dtype=torch.float64)

    return some(T), some(S), some(S)


def by_torch(shape: Sizes, **masks: Any) -> Tensor:
    """Weights [B, H, T, S] of torch's module; its projections are identities."""
    H = shape[1]
    q, k, v = (x.transpose(1, 2).flatten(2) for x in projected(shape))
    module = torch.nn.MultiheadAttention(H * D, H, bias=False, batch_first=True, dtype=torch.float64)
    with torch.no_grad(), warnings.catch_warnings():
        # a bool mask beside a float one is deprecated there, and works
        warnings.filterwarnings("ignore", message="Support for mismatched")
        cast(Tensor, module.in_proj_weight).copy_(torch.eye(H * D).repeat(3, 1))
        weights = module(q, k, v, average_attn_weights=False, **masks)[1]
    assert isinstance(weights, Tensor)
    return weights


def by_reference(shape: Sizes, mask: Mask, bias: Tensor | None) -> Tensor:
    return reference.attention(*projected(shape), mask=mask, bias=bias)[1]


def agree(theirs: Tensor, ours: Tensor) -> None:
    """Equal, where torch's NaN for a query that sees nothing is our 0."""
    assert torch.equal(theirs.isnan().any(-1), (ours == 0).all(-1))
    torch.testing.assert_close(theirs.nan_to_num(0.0), ours)


# torch.nn.MultiheadAttention


@pytest.mark.thinned(2)
@pytest.mark.parametrize("padding", ["none", "bool", "float"])
@pytest.mark.parametrize("pattern", ["none", "bool", "bool per head", "float", "float per head"])
def test_torch_masks_mean_what_torchs_module_does_with_them(pattern: str, padding: str) -> None:
    @settings(max_examples=15, deadline=None)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        B, H, T, S = shape = data.draw(sizes())
        of = {"bool": bools, "float": floats}
        attn_mask = key_padding_mask = None
        if pattern != "none":
            each = (B * H,) if "per head" in pattern else ()
            attn_mask = of[pattern.split()[0]](data.draw, *each, T, S)
        if padding != "none":
            key_padding_mask = of[padding](data.draw, B, S)
        before = [None if x is None else x.clone() for x in (attn_mask, key_padding_mask)]
        mask, bias = from_torch(attn_mask, key_padding_mask, **named(shape))

        assert (bias is None) == ("float" not in pattern + padding)
        assert mask.hides_nothing == ("bool" not in pattern + padding)
        theirs = by_torch(shape, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
        agree(theirs, by_reference(shape, mask, bias))
        for x, was in zip((attn_mask, key_padding_mask), before, strict=True):
            assert x is None or torch.equal(x, cast(Tensor, was))

    holds()


@quick
@given(st.data())
def test_beside_an_attn_mask_the_causal_hint_adds_nothing(data: st.DataObject) -> None:
    B, H, T, S = shape = data.draw(sizes())
    attn_mask = bools(data.draw, T, S)
    mask, bias = from_torch(attn_mask, is_causal=True, **named(shape))
    assert bias is None
    assert torch.equal(mask.full(T, S, B, H)[0, 0], ~attn_mask)
    agree(by_torch(shape, attn_mask=attn_mask, is_causal=True), by_reference(shape, mask, bias))


@quick
@given(sizes())
def test_the_causal_hint_alone_aligns_to_the_first_key(shape: Sizes) -> None:
    mask, bias = from_torch(is_causal=True, **named(shape))
    q, k, v = projected(shape)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(theirs, by_reference(shape, mask, bias) @ v)
    assert torch.equal(mask.full(shape[2], shape[3])[0, 0], torch.ones(shape[2:]).tril().bool())


def test_gradients_reach_a_float_mask() -> None:
    pattern = torch.zeros(5, 7, dtype=torch.float64, requires_grad=True)
    padding = torch.zeros(2, 7, dtype=torch.float64, requires_grad=True)
    shape = (2, 3, 5, 7)
    mask, bias = from_torch(pattern, padding, **named(shape))
    loss = by_reference(shape, mask, bias).square().sum()
    assert all(gradient.any() for gradient in torch.autograd.grad(loss, (pattern, padding)))


@quick
@given(masks())
def test_torchs_module_attends_as_the_mask_says(case: tuple[Mask, Sizes]) -> None:
    mask, shape = case
    agree(by_torch(shape, **to_torch(mask, **named(shape))), by_reference(shape, mask, None))


def shapes_of(mask: Mask, shape: Sizes) -> tuple[list[int] | None, list[int] | None, bool]:
    masks = to_torch(mask, **named(shape))
    for value in (masks["attn_mask"], masks["key_padding_mask"]):
        assert value is None or (value.dtype == torch.bool and value.is_contiguous())
    pattern, padding = (
        None if value is None else list(value.shape)
        for value in (masks["attn_mask"], masks["key_padding_mask"])
    )
    return pattern, padding, masks["is_causal"]


def test_torch_is_given_the_smallest_masks_it_takes() -> None:
    shape = (2, 3, 5, 7)
    some = torch.ones(2, 3, 5, 7, dtype=torch.bool)
    assert shapes_of(Mask(), shape) == (None, None, False)
    assert shapes_of(Mask.padding([3, 5], [1, 2]), shape) == (None, [2, 7], False)
    assert shapes_of(Mask.dense(some[:, :1, :1]), shape) == (None, [2, 7], False)
    assert shapes_of(Mask.dense(some[:1, :1, :1]), shape) == (None, [2, 7], False)
    assert shapes_of(Mask.dense(some[:1, :1, :, :1]), shape) == ([5, 7], None, False)
    assert shapes_of(Mask.window(3) & Mask.padding([3, 5]), shape) == ([5, 7], [2, 7], False)
    assert shapes_of(Mask.documents([0] * 7), shape) == ([5, 7], None, False)
    assert shapes_of(Mask.documents(torch.zeros(2, 7, dtype=torch.int64)), shape) == ([6, 5, 7], None, False)
    assert shapes_of(Mask.dense(some[:1, :, :1]), shape) == ([6, 5, 7], None, False)


def test_is_causal_is_said_of_square_causal_masks_alone() -> None:
    square = (2, 3, 5, 5)
    assert shapes_of(Mask.causal(), square) == ([5, 5], None, True)
    assert shapes_of(Mask.causal() & Mask.padding([3, 5]), square) == ([5, 5], [2, 5], True)
    assert shapes_of(Mask.window(5), square) == ([5, 5], None, True)  # a window over everything before
    for other in (
        Mask.window(4),
        Mask(right=1),
        Mask.causal() & Mask.documents([0] * 5),
        Mask.causal() & Mask.dense(torch.eye(5)),
    ):
        assert shapes_of(other, square)[2] is False
    assert shapes_of(Mask.causal(), (2, 3, 5, 7))[2] is False


@quick
@given(masks(square=True), st.booleans())
def test_torchs_fused_path_attends_as_the_mask_says(case: tuple[Mask, Sizes], causal: bool) -> None:
    """Without weights torch drops a mask whose hint says causal, so the hint must be true."""
    mask, shape = case
    mask = mask & Mask.causal() if causal else mask
    H = shape[1]
    q, k, v = (x.transpose(1, 2).flatten(2) for x in projected(shape))
    module = torch.nn.MultiheadAttention(H * D, H, batch_first=True, dtype=torch.float64)
    masks = to_torch(mask, **named(shape))
    with torch.no_grad():
        fused = module(q, k, v, need_weights=False, **masks)[0]
        weighed = module(q, k, v, **masks)[0]
    visible = ~weighed.isnan()
    torch.testing.assert_close(fused[visible], weighed[visible])


# Hugging Face


def by_huggingface(shape: Sizes, attention_mask: Tensor) -> Tensor:
    """Weights of "eager" attention: softmax(q k^T / sqrt(D) + attention_mask)."""
    q, k, _ = projected(shape)
    return torch.softmax(q @ k.transpose(-2, -1) * D**-0.5 + attention_mask.double(), dim=-1)


def seeing(attention_mask: Tensor, shape: Sizes) -> Tensor:
    hidden = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
    return (~hidden).any(-1, keepdim=True).expand(*shape[:3], 1)


def test_no_attention_mask_hides_nothing() -> None:
    mask, bias = from_huggingface(None, query_len=5)
    assert mask.hides_nothing
    assert mask.counted(5) is None
    assert bias is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_tokenizers_mask_hides_padding_on_either_side(side: str, dtype: torch.dtype) -> None:
    @settings(max_examples=15, deadline=None)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        B, H, T, S = shape = data.draw(sizes())
        lengths = torch.tensor(data.draw(st.lists(st.integers(1, S), min_size=B, max_size=B)))
        spots = torch.arange(S)
        real = spots < lengths[:, None] if side == "right" else spots >= S - lengths[:, None]
        query_len = min(T, S)
        mask, bias = from_huggingface(real.to(dtype), query_len=query_len)
        assert bias is None
        counted = mask.counted(query_len)
        assert counted is not None
        assert torch.equal(counted, real[:, S - query_len :])

        shape = (B, H, query_len, S)
        additive = torch.zeros(B, 1, 1, S).masked_fill(~real[:, None, None], torch.finfo(torch.float32).min)
        torch.testing.assert_close(by_reference(shape, mask, None), by_huggingface(shape, additive))

    holds()


@quick
@given(st.data())
def test_a_bool_mask_in_four_dimensions_says_who_may_attend(data: st.DataObject) -> None:
    B, H, T, S = shape = data.draw(sizes())
    allowed = bools(data.draw, B, data.draw(st.sampled_from((1, H))), data.draw(st.sampled_from((1, T))), S)
    for given_mask in (allowed, allowed.int()):
        mask, bias = from_huggingface(given_mask, query_len=T)
        assert bias is None
        assert torch.equal(mask.full(T, S, B, H).expand(shape), allowed.expand(shape))


@pytest.mark.parametrize("low", ["finfo.min", "-inf"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_additive_mask_weighs_as_eager_attention_does(dtype: torch.dtype, low: str) -> None:
    @settings(max_examples=15, deadline=None)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        B, H, T, S = shape = data.draw(sizes())
        heads = data.draw(st.sampled_from((1, H)))
        hidden = bools(data.draw, B, heads, T, S)
        adds = data.draw(st.booleans())
        attention_mask = torch.zeros(B, heads, T, S, dtype=dtype)
        if adds:
            attention_mask += torch.randn(heads, T, S, generator=source(data.draw)).to(dtype)
            hidden[0, 0, 0, 0] = False
        attention_mask.masked_fill_(hidden, torch.finfo(dtype).min if low == "finfo.min" else -torch.inf)
        before = attention_mask.clone()

        mask, bias = from_huggingface(attention_mask, query_len=T)
        assert (bias is not None) == adds
        assert torch.equal(mask.full(T, S, B, H).expand(shape), ~hidden.expand(shape))
        ours, theirs = by_reference(shape, mask, bias), by_huggingface(shape, attention_mask)
        sees = seeing(attention_mask, shape)
        torch.testing.assert_close(ours.masked_fill(~sees, 0), theirs.masked_fill(~sees, 0))
        assert not ours.masked_fill(sees, 0).any()
        assert torch.equal(attention_mask, before)

    holds()


def test_what_is_hidden_twice_over_stays_hidden() -> None:
    """T5 adds position biases to its mask: finfo.min and a little more or less, or -inf in float16."""
    low = torch.tensor(torch.finfo(torch.float16).min, dtype=torch.float16)
    attention_mask = torch.stack([low * 2, low * 0.9, low + 30, torch.zeros_like(low)])[None, None, None]
    mask, bias = from_huggingface(attention_mask)
    assert mask.full(1, 4).flatten().tolist() == [False, False, False, True]
    assert bias is None


def test_large_numbers_that_are_not_nearly_the_lowest_are_only_added() -> None:
    mask, bias = from_huggingface(torch.tensor([0.0, -10000.0, -1e9])[None, None, None])
    assert mask.full(1, 3).all()
    assert bias is not None
    assert bias.flatten().tolist() == [0.0, -10000.0, -1e9]


def test_a_bias_that_learns_is_kept_even_while_it_is_zero() -> None:
    learned = torch.zeros(1, 3, 5, 7, requires_grad=True)
    assert from_huggingface(learned)[1] is not None
    assert from_huggingface(learned.detach())[1] is None


def test_where_values_cannot_be_read_a_float_mask_is_a_bias_too() -> None:
    mask, bias = from_huggingface(torch.empty(2, 1, 5, 7, device="meta"))
    assert mask.tensors["allowed"].shape == (2, 1, 5, 7)
    assert bias is not None


@quick
@given(masks(), st.sampled_from(FLOATS))
def test_eager_attention_weighs_as_the_mask_says(case: tuple[Mask, Sizes], dtype: torch.dtype) -> None:
    mask, shape = case
    attention_mask = to_huggingface(mask, dtype=dtype, **named(shape))
    assert attention_mask.dtype == dtype
    assert set(attention_mask.flatten().tolist()) <= {0.0, torch.finfo(dtype).min}
    ours, theirs = by_reference(shape, mask, None), by_huggingface(shape, attention_mask)
    sees = seeing(attention_mask, shape)
    torch.testing.assert_close(ours, theirs.masked_fill(~sees, 0))


def test_huggingface_is_given_one_mask_for_all_heads_where_they_agree() -> None:
    shape = (2, 3, 5, 7)
    assert to_huggingface(Mask(), **named(shape)).shape == (2, 1, 5, 7)
    assert to_huggingface(Mask.causal() & Mask.padding([3, 5]), **named(shape)).shape == (2, 1, 5, 7)
    per_head = Mask.dense(torch.ones(3, 1, 7))
    assert to_huggingface(per_head, **named(shape)).shape == (2, 3, 5, 7)
    assert to_huggingface(per_head, dtype=torch.float16, **named(shape)).shape == (2, 3, 5, 7)


def test_writing_to_what_was_handed_out_leaves_the_mask_alone() -> None:
    allowed = torch.ones(2, 1, 5, 7, dtype=torch.bool)
    mask, sizes_of = Mask.dense(allowed), named((2, 3, 5, 7))
    to_huggingface(mask, **sizes_of).zero_()
    cast(Tensor, to_torch(mask, **sizes_of)["attn_mask"]).fill_(True)
    assert allowed.all()


# Refusals


def torch_masks(**masks: Any) -> Callable[[], object]:
    return lambda: from_torch(**masks, **named((2, 3, 5, 7)))


def some(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(shape, dtype=dtype)


REFUSALS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "integer attn_mask": (
        torch_masks(attn_mask=some(5, 7, dtype=torch.int64)),
        MaskError,
        "attn_mask must be bool or floating: got torch.int64; use .bool(); in torch's masks True = may not",
    ),
    "integer key_padding_mask": (
        torch_masks(key_padding_mask=some(2, 7, dtype=torch.uint8)),
        MaskError,
        "key_padding_mask must be bool or floating: got torch.uint8; use .bool()",
    ),
    "attn_mask turned round": (
        torch_masks(attn_mask=some(7, 5)),
        ShapeError,
        "attn_mask must be [T, S] = [5, 7] or [B*H, T, S] = [6, 5, 7]: got [7, 5]; repeat",
    ),
    "key_padding_mask turned round": (
        torch_masks(key_padding_mask=some(7, 2)),
        ShapeError,
        "key_padding_mask must be [B, S] = [2, 7]: got [7, 2]; give one value per key",
    ),
    "three dimensions": (
        lambda: from_huggingface(some(2, 5, 7)),
        ShapeError,
        "attention_mask must be [B, S] or [B, 1 or H, T, S]: got 3 dimensions [2, 5, 7]; pass [B, T, S] as",
    ),
    "other rows": (
        lambda: from_huggingface(some(2, 1, 7, 7), query_len=5),
        ShapeError,
        "attention_mask must have one row per query: got 7 for 5 queries; pass only",
    ),
    "more queries than positions": (
        lambda: from_huggingface(some(2, 7), query_len=11),
        ShapeError,
        "query_len must not be more than the positions in attention_mask: 11 > 7; leave it out",
    ),
    "packed documents": (
        lambda: from_huggingface(torch.tensor([[1, 1, 2, 2]])),
        MaskError,
        "attention_mask [B, S] must hold 0 and 1 only: found 2; for several documents",
    ),
    "additive in two dimensions": (
        lambda: from_huggingface(torch.tensor([[0.0, -10000.0]])),
        MaskError,
        "attention_mask [B, S] must hold 0 and 1 only: found -10000; for several documents",
    ),
    "zeros and ones as float": (
        lambda: from_huggingface(torch.eye(5)[None, None]),
        MaskError,
        "4-D attention_mask of 0 and 1 must not be torch.float32: got 5 ones in [1, 1, 5, 5], which would",
    ),
    "integer dtype": (
        lambda: to_huggingface(Mask(), dtype=torch.int64, **named((2, 3, 5, 7))),
        ArgumentError,
        "dtype must be floating: got torch.int64; use None for a bool mask",
    ),
}


@pytest.mark.parametrize("case", REFUSALS, ids=lambda name: name.replace(" ", "-"))
def test_a_refusal_names_the_argument_the_numbers_and_what_to_do(case: str) -> None:
    attempt, kind, message = REFUSALS[case]
    with pytest.raises(kind, match=re.escape(message)):
        attempt()
