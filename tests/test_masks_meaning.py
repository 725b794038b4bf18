"""Masks that seem to be meant otherwise than headwise reads them, and what can be done with two masks.

An accusation must never be wrong: what anyone may mean passes, at any size, and what is refused has a
spelling that passes. Letters: B batch, H num_heads, T query_len, S key_len.
"""

from __future__ import annotations

import itertools
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
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw
from headwise import Mask, reference
from headwise.errors import MaskError
from headwise.masks import mask_of_call

quick = settings(max_examples=60, deadline=None)
lengths_of = st.integers(2, 13)


def refused(*words: str) -> Any:
    """Raises `MaskError`, with all of these words in its message."""
    return pytest.raises(MaskError, match="(?s)" + "".join(f"(?=.*{re.escape(word)})" for word in words))


def heads(B: int, T: int, S: int, H: int = 3, D: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, T, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)


def hidden(length: int) -> Tensor:
    """torch's causal mask: True = may not attend."""
    return torch.ones(length, length).triu(1).bool()


def padding(*real: int, length: int, left: bool = False) -> Tensor:
    rows = torch.arange(length) < torch.tensor(real)[:, None]
    return rows.flip(1) if left else rows


# torch's causal mask


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "[L, L]": lambda m: m,
    "[1, L, L]": lambda m: m[None],
    "[1, 1, L, L]": lambda m: m[None, None],
    "[B, 1, L, L]": lambda m: m.expand(2, 1, *m.shape),
    "[B, H, L, L]": lambda m: m.repeat(2, 3, 1, 1),
    "numbers": lambda m: m.long(),
    "floats": lambda m: m.float(),
    "with padding": lambda m: m | ~padding(m.shape[0], m.shape[0] - 1, length=m.shape[0])[:, None, None],
}


@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("form", FORMS)
def test_torchs_causal_mask_is_refused_in_every_form_and_taken_turned_round(form: str, length: int) -> None:
    mask = FORMS[form](hidden(length))
    q, k, v = heads(2, length, length)
    shape = str(list(mask.shape))
    with refused("True where a query may attend", shape, "pass ~mask", "Mask.causal()", "Mask.dense(mask)"):
        hw.attention(q, k, v, mask)
    visible = hw.attention(q, k, v, ~mask.bool())[1]
    assert form == "with padding" or torch.equal(visible.dense() > 0, ~hidden(length).expand(2, 3, -1, -1))
    alone = hw.attention(q, k, v, Mask.dense(mask))[1].dense() > 0
    assert torch.equal(alone, mask.bool().expand(2, 3, length, length))


def test_every_door_that_takes_a_mask_refuses_torchs_causal_mask() -> None:
    (q, k, v), mask = heads(2, 5, 5), hidden(5)
    mha, x = hw.MultiHeadAttention(6, 3), torch.randn(2, 5, 6)
    doors: tuple[Callable[[], object], ...] = (
        lambda: hw.attention(q, k, v, mask),
        lambda: hw.why(q, k, v, mask),
        lambda: hw.AttentionMap(q, k, mask=mask),
        lambda: mha(x, mask=mask),
        lambda: mha.head_outputs(x, mask=mask),
        lambda: hw.explain(mha, x, mask=mask),
        lambda: Mask.window(3) & mask,
        lambda: mask & Mask.window(3),
        lambda: Mask.causal() | mask,
        lambda: mask | Mask.causal(),
    )
    for door in doors:
        with refused("bool[5, 5]", "pass ~mask"):
            door()


def test_a_question_about_the_keys_ahead_is_no_mask_of_a_call() -> None:
    """`mass` and `visible` are asked about any set of keys: what goes to the future is a fair question."""
    q, k, _ = heads(2, 5, 5)
    w = hw.AttentionMap(q, k)
    ahead = hidden(5)
    torch.testing.assert_close(w.mass(ahead, per="query"), (w.dense() * ahead).sum(-1))
    assert w.visible(ahead)[0, 0].tolist() == [4, 3, 2, 1, 0]
    assert w.mass(padding(5, 3, 4, 2, 1, length=5)).shape == (2, 3)
    assert hw.AttentionMap.from_weights(w.dense(), ahead).shape == (2, 3, 5, 5)


def test_one_query_that_sees_nothing_is_taken_at_its_word() -> None:
    """[[False]] is torch's causal mask of one token, and a mask that hides the only key there is."""
    for length in (1, 5):
        q, k, v = heads(2, 1, length)
        assert not hw.attention(q, k, v, torch.zeros(1, length, dtype=torch.bool))[0].any()


def test_heads_of_which_one_looks_ahead_are_taken_as_they_are() -> None:
    q, k, v = heads(2, 5, 5)
    mask = torch.stack([hidden(5), hidden(5).mT, torch.ones(5, 5, dtype=torch.bool)])
    assert torch.equal(hw.attention(q, k, v, mask)[1].dense() > 0, mask.expand(2, -1, -1, -1))
    mask[1] = True  # what the last query of the others sees would be padding in torch's
    assert torch.equal(hw.attention(q, k, v, mask)[1].dense() > 0, mask.expand(2, -1, -1, -1))


# Padding in the place of [T, S]


@st.composite
def padded(draw: st.DrawFn) -> tuple[Tensor, bool]:
    """Padding [B, S] that is no staircase of a [T, S] mask: shorter somewhere, or longer on the left."""
    batch, length = draw(lengths_of), draw(lengths_of)
    real = draw(st.lists(st.integers(1, length), min_size=batch, max_size=batch))
    left = draw(st.booleans())
    if all(a <= b for a, b in itertools.pairwise(real)):
        real[0], real[-1] = length, draw(st.integers(1, length - 1))
    return padding(*(real[::-1] if left else real), length=length, left=left), left


@quick
@given(padded())
def test_padding_for_as_many_sequences_as_queries_is_always_refused(case: tuple[Tensor, bool]) -> None:
    mask, _ = case
    B, S = mask.shape
    both = "Mask.padding(mask)", "Mask.dense(mask)", "~mask if True = padding"
    with refused("must be [T, S]", f"bool[{B}, {S}]", f"({int(mask[0].sum())}, ", *both):
        mask_of_call(mask, B, B)
    with refused("must be [T, S]", f"int64[{B}, {S}]", "Mask.padding(mask.bool())", "Mask.dense(mask)"):
        mask_of_call(mask.long(), B, B)
    assert torch.equal(mask_of_call(mask, B + 1, B).full(B, S)[0, 0], mask)  # no such batch: it is [T, S]


def test_both_spellings_of_a_padding_mask_do_what_they_say() -> None:
    (q, k, v), mask = heads(3, 3, 5), padding(5, 2, 4, length=5)
    mha, x, memory = hw.MultiHeadAttention(6, 2), torch.randn(3, 3, 6), torch.randn(3, 5, 6)
    for call in (lambda m: hw.attention(q, k, v, m), lambda m: mha(x, memory, memory, m)):
        with refused("bool[3, 5]", "(5, 2, 4 keys)"):
            call(mask)
        per_sequence, per_query = (call(m)[1].dense() > 0 for m in (Mask.padding(mask), Mask.dense(mask)))
        assert torch.equal(per_sequence, mask[:, None, None].expand_as(per_sequence))
        assert torch.equal(per_query, mask.expand_as(per_query))
        assert torch.equal(call(mask[:, None, None])[1].dense() > 0, per_sequence)


def test_joined_to_a_mask_rows_of_padding_are_refused_whatever_the_batch() -> None:
    mask = padding(5, 2, 4, length=5)
    for join in (lambda m: Mask.causal() & m, lambda m: m & Mask.causal(), lambda m: Mask.causal() | m):
        with refused("bool[3, 5]", "Mask.padding(mask)", "Mask.dense(mask)"):
            join(mask)
    both = (Mask.causal() & Mask.dense(mask)).full(3, 5)[0, 0]
    assert torch.equal(both, mask & Mask.causal().full(3, 5)[0, 0])


# No false accusations


@st.composite
def drawn_mask(draw: st.DrawFn) -> Tensor:
    """A [T, S] mask that people write: bands, prefixes, blocks, documents, and what is left of them."""
    T, S = draw(lengths_of), draw(lengths_of)
    kind = draw(st.sampled_from(["band", "prefix", "blocks", "documents", "real", "reverse", "all"]))
    i, j = torch.arange(T)[:, None] + S - T, torch.arange(S)
    visible = j <= i
    if kind == "band":
        left, right = draw(st.integers(0, 9)), draw(st.integers(0, 9))
        visible = (j >= i - left) & (j <= i + right)
    elif kind == "prefix":
        visible = visible | (j < draw(st.integers(0, S)))
    elif kind == "blocks":
        size = draw(st.integers(1, 5))
        visible = j.div(size, rounding_mode="floor") <= i.div(size, rounding_mode="floor")
    elif kind == "documents":
        ids = torch.tensor(sorted(draw(st.lists(st.integers(0, 3), min_size=T + S, max_size=T + S))))
        visible = ids[::2][:T, None] == ids[1::2][:S] if T == S else ids[-T:, None] == ids[:S]
        visible = visible & (j <= i) if draw(st.booleans()) else visible
    elif kind == "reverse":
        visible = j >= i  # reads from right to left
    elif kind == "all":
        visible = torch.ones(T, S, dtype=torch.bool)
    if kind in ("real", "prefix") or draw(st.booleans()):  # one sequence with padding, keys and queries
        listed = j < draw(st.integers(1, S))
        listed = listed if draw(st.booleans()) else listed.flip(0)
        visible = visible & listed if draw(st.booleans()) else listed.expand(T, S)
        if T == S and draw(st.booleans()):
            visible = visible & listed[:, None]
    return visible


@settings(max_examples=300, deadline=None)
@given(drawn_mask())
def test_masks_that_people_mean_are_never_refused(mask: Tensor) -> None:
    T, S = mask.shape
    for given_as in (mask, mask.long(), mask[None], mask[None, None], mask.expand(T, 1, T, S)):
        if mask.any() or given_as.dtype == torch.bool:
            assert torch.equal(mask_of_call(given_as, T, T).full(T, S, T).expand(T, 1, T, S)[0, 0], mask)
    assert torch.equal((Mask() & mask).full(T, S)[0, 0], mask)


# Where nothing is read


def test_values_are_not_looked_at_where_that_is_not_free() -> None:
    mask = hidden(5)
    assert mask_of_call(mask.to("meta"), 5, 5).allowed is not None
    with FakeTensorMode() as mode:
        assert mask_of_call(mode.from_tensor(mask), 5, 5).allowed is not None
    q, k, v = heads(5, 5, 5)
    outputs = torch.vmap(lambda m: hw.attention(q, k, v, m)[0])(mask[None])
    torch.testing.assert_close(outputs[0], hw.attention(q, k, v, Mask.dense(mask))[0])


@pytest.mark.slow
def test_a_compiled_call_takes_any_mask_in_one_graph_for_all_batches() -> None:
    """A batch as large as the number of queries would be a graph of its own if anyone compared the two."""
    torch._dynamo.reset()
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    def call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return hw.attention(q, k, v, mask, causal=True)[0]

    compiled = torch.compile(call, backend=count, fullgraph=True, dynamic=True)
    for B, T, S in ((2, 5, 7), (3, 7, 11), (5, 5, 11), (5, 11, 7)):
        q, k, v = heads(B, T, S, D=13)
        mask = torch.rand(B, 1, T, S) < 0.5
        rules = Mask.dense(mask) & Mask.causal()
        torch.testing.assert_close(compiled(q, k, v, mask), hw.attention(q, k, v, rules)[0])
    assert len(graphs) == 1
    torch._dynamo.reset()


# More queries than keys


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": True}, ["causal=True must", "queries 0 to 3 see none of 3 keys", "Mask.causal()"]),
        ({"window": 2}, ["window=2 must", "queries 0 to 3 see none of 3 keys", "mask=Mask.window(2) "]),
        (
            {"window": (5, 3)},
            ["window=(5, 3) must", "query 0 sees none", "mask=Mask.window(left_right=(5, 3))"],
        ),
        ({"window": (5, 3), "causal": True}, ["causal=True must", "queries 0 to 3"]),
        ({"mask": Mask.padding([2, 3]), "causal": True}, ["last of 7 queries", "torch.ones(7, 3).tril()"]),
    ],
    ids=str,
)
def test_with_more_queries_than_keys_those_that_see_nothing_are_named(
    options: dict[str, Any], words: list[str]
) -> None:
    q, k, v = heads(2, 7, 3)
    for call in (hw.attention, hw.why):
        with refused(*words):
            call(q, k, v, **options)
    with refused(*words):
        hw.AttentionMap(q, k, **options)


def test_both_remedies_for_more_queries_than_keys_do_what_they_say() -> None:
    q, k, v = heads(2, 7, 3)
    out, w = hw.attention(q, k, v, mask=Mask.causal())
    assert not out[:, :, :4].any() and w.visible()[0, 0].tolist() == [0, 0, 0, 0, 1, 2, 3]
    torchs = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(hw.attention(q, k, v, mask=torch.ones(7, 3).tril())[0], torchs)


# ~, |, & and the rest


LONE = {
    "causal": Mask.causal(),
    "ahead": Mask(left=-1),
    "left": Mask(left=3),
    "right": Mask(right=2),
    "padding": Mask.padding(padding(5, 2, length=7)),
    "dense": Mask.dense(torch.rand(2, 1, 5, 7) < 0.5),
    "per head": Mask.dense(torch.rand(1, 3, 5, 7) < 0.5),
}
SHAPE = (2, 3, 5, 7)


def whole(mask: Mask) -> Tensor:
    return reference.allowed(mask, *SHAPE)


@pytest.mark.parametrize("name", LONE)
def test_the_other_way_round_shows_what_was_hidden(name: str) -> None:
    mask = LONE[name]
    assert torch.equal(whole(~mask), ~whole(mask))
    assert ~~mask == mask
    q, k, v = heads(2, 5, 7)
    truth = hw.attention(q, k, v, Mask.dense(~whole(mask)))[0]
    for backend in ("auto", "tiles", "plain"):
        torch.testing.assert_close(hw.attention(q, k, v, ~mask, backend=backend)[0], truth)


@pytest.mark.parametrize(
    ("mask", "other"),
    [
        (Mask.causal(), Mask(right=2)),
        (Mask(left=3), Mask(left=1)),
        (LONE["padding"], Mask.padding(padding(1, 6, length=7, left=True))),
        (LONE["dense"], LONE["per head"]),
        (Mask(), Mask.window(2)),
        (Mask.window(2), Mask()),
    ],
    ids=str,
)
def test_either_of_two_masks_shows_what_one_of_them_shows(mask: Mask, other: Mask) -> None:
    assert torch.equal(whole(mask | other), whole(mask) | whole(other))


def test_queries_count_as_before_in_the_opposite_and_in_both_of_either() -> None:
    first, other = Mask.padding(padding(5, 2, length=7), [5, 2]), Mask(queries=torch.tensor([3, 4]))
    assert (~first).queries is first.queries
    for joined in (first | other, other | first):
        assert joined.hides_nothing and joined == Mask(queries=torch.tensor([3, 2]))


def test_what_is_no_rule_says_what_to_write_and_that_works() -> None:
    mask, other = Mask.causal(), Mask.padding([5, 2])
    with refused("~mask", "Mask(left=1, right=0)", "Mask.dense(~mask.full(T, S))"):
        ~Mask.window(2)
    with refused("~mask", "Mask(keys=int64[2])", "Mask.dense(~mask.full(T, S, B, H))"):
        _ = ~other
    with refused("~mask", "Mask()", "Mask.dense(~mask.full(T, S))"):
        ~Mask()
    for none in (Mask.documents([0, 0, 1]), mask & LONE["dense"]):
        with refused("~mask", repr(none), "full(T, S, B, H)"):
            _ = ~none
    with refused("mask | other", "Mask(right=0)", "Mask.dense(mask.full(T, S) | other.full(T, S, B, H))"):
        mask | other
    B, H, T, S = SHAPE
    union = Mask.dense(mask.full(T, S) | other.full(T, S, B, H))
    assert torch.equal(whole(union), whole(mask) | whole(other))
    assert torch.equal(whole(Mask.dense(~Mask.window(2).full(T, S))), ~whole(Mask.window(2)))


def test_a_tensor_joins_a_mask_from_either_side_as_mask_would_take_it() -> None:
    dense = torch.rand(5, 7, generator=torch.Generator().manual_seed(3)) < 0.5
    for given_as in (dense, dense.long(), dense.float(), dense[None, None]):
        for joined in (Mask.causal() & given_as, given_as & Mask.causal()):
            assert torch.equal(whole(joined), whole(Mask.causal()) & dense)
    for joined in (LONE["dense"] | dense, dense | LONE["dense"]):
        assert torch.equal(whole(joined), whole(LONE["dense"]) | dense)
    with refused("mask must hold 0 and 1 only: found -inf"):
        Mask.causal() & torch.full((5, 7), -torch.inf)


@pytest.mark.parametrize("other", [3, None, [[True]]], ids=repr)
def test_nothing_but_masks_and_tensors_joins_a_mask(other: Any) -> None:
    name = type(other).__name__
    for join in joins(other):
        with pytest.raises(TypeError, match=f"'Mask' and '{name}'|'{name}' and 'Mask'"):
            join()


def test_an_array_joined_to_a_mask_is_told_to_be_a_tensor() -> None:
    for join in joins(np.ones((5, 7), dtype=bool)):
        with refused("got ndarray", "torch.as_tensor(mask)"):
            join()


def joins(other: Any) -> tuple[Callable[[], object], ...]:
    return (
        lambda: Mask.causal() & other,
        lambda: other & Mask.causal(),
        lambda: Mask.causal() | other,
        lambda: other | Mask.causal(),
    )


def test_a_mask_is_neither_true_nor_false() -> None:
    """`causal and padding` was the padding alone, without a word."""
    questions: tuple[Callable[[], object], ...] = (
        lambda: Mask.causal() and Mask.padding([3]),
        lambda: Mask.causal() or None,
        lambda: not Mask.causal(),
        lambda: bool(Mask.causal()),
    )
    for question in questions:
        with refused("used as a bool", "Mask(right=0)", "join masks with &", "mask is None"):
            question()


def test_masks_are_equal_where_their_rules_are() -> None:
    ids = torch.tensor([0, 0, 1])
    same = [
        (Mask.causal(), Mask.causal()),
        (Mask.causal() & Mask.padding([3, 5]), Mask.padding([3, 5]) & Mask.causal()),
        (Mask.documents(ids), Mask.documents(ids.clone()).bind(1, 1, 3, 3)),
    ]
    for first, other in same[:2]:
        assert first == other and hash(first) == hash(other)
    first, bound = same[2]
    assert first != bound  # binding spells the queries' documents out
    others = (
        Mask(), Mask.causal(), Mask.window(3), Mask.padding([3, 5]), Mask.padding([3, 4]), Mask.padding([3]),
        Mask.padding(torch.ones(1, 3).bool()), Mask.documents(ids), Mask.dense(torch.eye(3)),
    )  # fmt: skip
    for i, first in enumerate(others):
        assert [first == other for other in others] == [i == j for j in range(len(others))]
    assert Mask.causal() != "causal" and len({*others, *others}) == len(others)


# Masks that do not fit, by what they are


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2 * 3, 5, 7), ["[1, 6, 5, 7]", "mask.unflatten(0, (2, 3))"]),
        (torch.ones(2, 5, 7), ["[1, 2, 5, 7]", "mask[:, None]"]),
        (torch.ones(7, 5), ["[1, 1, 7, 5]", "mask.mT"]),
        (torch.ones(7, 7), ["[1, 1, 7, 7]", "mask[..., -5:, :]"]),
        (torch.ones(11, 7), ["[1, 1, 11, 7]", "Mask.padding(mask.bool())"]),
    ],
    ids=["per head and sequence", "per sequence", "transposed", "square", "neither"],
)
def test_a_mask_that_does_not_fit_is_told_what_it_may_be(mask: Tensor, words: list[str]) -> None:
    q, k, v = heads(2, 5, 7)
    with refused("mask must broadcast to [B, H, T, S] = [2, 3, 5, 7]", *words):
        hw.attention(q, k, v, mask)


# Doors through which other people's masks come


def test_a_watched_model_may_have_any_mask() -> None:
    """What a model does is what is watched: its strict upper triangles, its rows of padding, its few keys."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
            return scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=causal)

    model, (q, k, _), few = Model(), heads(5, 5, 5), torch.randn(5, 3, 3, 2)
    cases: list[tuple[Tensor, Tensor | None, bool]] = [
        (k, hidden(5) | torch.eye(5).bool(), False),
        (k, hidden(5), False),
        (k, padding(5, 2, 4, 1, 3, length=5), False),
        (few, None, True),
    ]
    for keys, mask, causal in cases:
        plain = model(q, keys, mask, causal)
        with hw.watch(model) as watched:
            torch.testing.assert_close(model(q, keys, mask, causal), plain, equal_nan=True)
        assert len(watched) == 1
