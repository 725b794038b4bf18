"""Where heads look: `AttentionMap.mass` and the patterns of heads, against dense formulas in float64.

Padded batches are judged by cutting the padding off: the dense formulas see the real tokens alone.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise import Mask, heads, reference
from headwise.engines.second_pass import visible
from headwise.errors import ArgumentError, MaskError, ShapeError
from judge import error, masks

B, H, HK, L, D = 2, 6, 3, 23, 11
FIRST, LENGTH = torch.tensor([0, 5]), torch.tensor([13, 23])  # where real tokens begin, how many there are
SPOTS = torch.arange(L)
LEFT, RIGHT = FIRST[:, None] <= SPOTS, LENGTH[:, None] > SPOTS  # which keys are real
TIGHT = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-6}


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(repr=False)
class Self:
    """Self-attention over B sequences, whose weights are known densely."""

    mask: Mask = field(default_factory=Mask)
    real: Tensor = field(default_factory=lambda: torch.ones(B, L, dtype=torch.bool))
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        q, k = (2 * normal(i, B, heads, L, D) for i, heads in ((0, H), (1, HK)))
        self.q, self.k = q.to(self.dtype), k.to(self.dtype)
        self.tokens = torch.randint(4, (B, L), generator=torch.Generator().manual_seed(5))
        options = {n: x.to(self.dtype) if isinstance(x, Tensor) else x for n, x in self.options.items()}
        self.map = hw.AttentionMap(self.q, self.k, mask=self.mask, **options)
        wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
        k = self.k.double()
        self.p = reference.attention(self.q.double(), k, k, mask=self.mask, **wide)[1]

    def each(self) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """(sequence, head, its weights without padding [n, n], its tokens [n])."""
        for b in range(B):
            real = self.real[b]
            for h in range(H):
                yield b, h, self.p[b, h][real][:, real], self.tokens[b][real]

    def expected(self, formula: Callable[[Tensor, Tensor], float | Tensor]) -> Tensor:
        """[B, H] from a dense formula of weights and tokens."""
        actual = torch.empty(B, H, dtype=torch.float64)
        for b, h, p, tokens in self.each():
            actual[b, h] = formula(p, tokens)
        return actual


CASES: dict[str, Callable[[], Self]] = {
    "causal": lambda: Self(Mask.causal()),
    "bidirectional": Self,
    "left padding": lambda: Self(Mask.causal() & Mask.padding(LEFT, LEFT), LEFT),
    "right padding": lambda: Self(Mask.padding(LENGTH, LENGTH), RIGHT),
    "causal right padding": lambda: Self(Mask.causal() & Mask.padding(RIGHT, RIGHT), RIGHT),
    "window": lambda: Self(Mask.window(7)),
    "band": lambda: Self(Mask.window(left_right=(5, 3))),
    "documents": lambda: Self(Mask.documents(SPOTS // 9) & Mask.causal()),
    "dense a head": lambda: Self(Mask.causal() & Mask.dense((normal(3, H, L, L) > -1) | torch.eye(L).bool())),
    "sinks": lambda: Self(Mask.causal(), options={"sinks": normal(4, H)}),
    "softcap and bias": lambda: Self(Mask.causal(), options={"softcap": 9.0, "bias": normal(4, H, L, L)}),
    "float32": lambda: Self(Mask.causal() & Mask.padding(LEFT, LEFT), LEFT, dtype=torch.float32),
    "bfloat16": lambda: Self(Mask.causal() & Mask.padding(LENGTH, LENGTH), RIGHT, dtype=torch.bfloat16),
}


@pytest.fixture(params=list(CASES), scope="module")
def case(request: pytest.FixtureRequest) -> Self:
    return CASES[request.param]()


def assert_close(actual: Tensor, case: Self, expected: Tensor, times: float = 1.0) -> None:
    assert actual.shape == expected.shape and not actual.requires_grad
    unmeasured = expected.isnan()
    assert torch.equal(actual.isnan(), unmeasured)
    assert error(actual[~unmeasured], expected[~unmeasured]) <= times * TIGHT[case.dtype]


def rows(n: int) -> tuple[Tensor, Tensor]:
    """Query and key numbers that broadcast to [n, n]."""
    return torch.arange(n)[:, None], torch.arange(n)


def where_seen(p: Tensor, on: Tensor) -> Tensor:
    """The mean weight on `on`, over the queries that may see a key of it: NaN where there is none."""
    weight = (p * on).sum(-1)
    return weight[((p > 0) & on.bool()).any(-1)].mean()


# Mass


ON = {
    "everything": Mask(),
    "previous": Mask(left=1, right=-1),
    "ahead": Mask(left=-1),
    "window": Mask.window(3),
    "some keys": Mask.padding(normal(7, B, L) > 0),
    "lengths": Mask.padding(torch.tensor([3, 17])),
    "no keys": Mask.padding(torch.zeros(B, L, dtype=torch.bool)),
    "one set of labels": Mask.documents(SPOTS % 3),
    "labels per sequence": Mask.documents((SPOTS + torch.tensor([[0], [1]])) % 4) & Mask.causal(),
    "labels of queries": Mask.documents(SPOTS % 5, (SPOTS + 1) % 5),
    "dense": Mask.dense(normal(8, B, 1, L, L) > 0),
    "dense a head": Mask.dense(normal(9, H, L, L) > 0),
}


def on_truth(on: Mask, case: Self) -> Tensor:
    return (case.p * on.full(L, L, B, H)).sum(-1)


@pytest.mark.thinned(6, slow=2)
@pytest.mark.parametrize("on", ON.values(), ids=ON)
def test_mass_is_the_weight_of_the_keys_a_mask_allows(case: Self, on: Mask) -> None:
    truth = on_truth(on, case)
    actual = case.map.mass(on, per="query")
    assert actual.dtype == case.map.lse.dtype
    assert_close(actual, case, truth)
    assert actual.max() <= 1
    counts = case.real[:, None].expand(B, H, L) & (case.p.sum(-1) > 0)
    assert_close(case.map.mass(on), case, (truth * counts).sum(-1) / counts.sum(-1))


@pytest.mark.thinned(4, slow=3)
@pytest.mark.parametrize("on", ON.values(), ids=ON)
def test_mass_of_given_weights_is_the_same(case: Self, on: Mask) -> None:
    w = hw.AttentionMap.from_weights(case.p, Mask(queries=case.real))
    truth = on_truth(on, case)
    assert error(w.mass(on, per="query"), truth) < 1e-12
    counts = case.real[:, None] & (case.p.sum(-1) > 0)
    assert error(w.mass(on), (truth * counts).sum(-1) / counts.sum(-1)) < 1e-12


@pytest.mark.thinned(slow=2)
@pytest.mark.parametrize("queries", [slice(2, 19, 3), [11], [7, 0, 7, 22]], ids=str)
@pytest.mark.parametrize("lse_known", [True, False], ids=["with lse", "without lse"])
def test_mass_of_chosen_queries_is_that_of_the_whole_map(case: Self, queries: Any, lse_known: bool) -> None:
    """A label belongs to the query's position: the last labels would be another query's."""
    if lse_known:
        _ = case.map.lse
    for name in ("everything", "previous", "some keys", "one set of labels", "labels per sequence"):
        whole = case.map.mass(ON[name], per="query")[:, :, queries]
        part = case.map.select(queries=queries).mass(ON[name], per="query")
        assert error(part, whole) <= 10 * TIGHT[case.dtype], name


def test_mass_of_chosen_sequences_and_heads_is_theirs() -> None:
    w = CASES["left padding"]().map
    part = w.select(batch=[1], heads=[4, 1]).mass(Mask.documents(SPOTS % 3))
    assert error(part, w.mass(Mask.documents(SPOTS % 3))[1:, [4, 1]]) < 1e-13


def test_a_sink_has_no_part_in_the_mass() -> None:
    """lse with the sink in both passes would have counted it as a key that every rule allows."""
    case = CASES["sinks"]()
    assert error(case.map.mass(Mask(), per="query"), case.p.sum(-1)) < 1e-13
    assert case.map.mass(Mask(), per="query").max() < 1
    assert case.map.mass(Mask.padding(torch.zeros(B, L, dtype=torch.bool))).eq(0).all()


def test_a_head_without_a_counted_query_has_no_mean_mass() -> None:
    w = hw.AttentionMap(normal(0, B, H, 5, D), normal(1, B, H, 7, D), mask=Mask.padding([0, 7]))
    assert w.mass(Mask.window(3), per="query")[0].eq(0).all()
    actual = w.mass(Mask.window(3))
    assert actual[0].isnan().all() and not actual[1].isnan().any()


def test_mass_takes_a_mask_given_as_a_tensor() -> None:
    case = CASES["causal"]()
    allowed = normal(8, B, 1, L, L) > 0
    assert torch.equal(case.map.mass(allowed), case.map.mass(Mask.dense(allowed)))


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda w: w.mass(Mask(), per="row"), ArgumentError, 'per must be "head" or "query": got \'row\''),
        (
            lambda w: w.select(keys=[1, 4]).mass(Mask()),
            ArgumentError,
            "mass must be called on a map of all keys",
        ),
        (
            lambda w: w.select(heads=[]).mass(Mask()),
            ShapeError,
            "mass must be called on a map that is not empty",
        ),
        (lambda w: w.mass(Mask.padding([3, 4, 5])), MaskError, "must fit batch and length: [3] for [2]"),
        (lambda w: w.mass(Mask.documents(torch.arange(7))), MaskError, "[1, 7] for batch 2, length 23"),
        (lambda w: w.mass("window"), MaskError, "mask must be a Mask or a tensor: got 'window'"),
    ],
)
def test_mass_refuses(ask: Callable[[Any], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        ask(CASES["causal"]().map)


def test_labels_of_queries_outside_the_keys_must_be_given() -> None:
    w = hw.AttentionMap(normal(0, 1, 2, 7, 3), normal(1, 1, 2, 5, 3)).select(queries=[0, 6])
    message = "document query_ids must be given for queries outside the keys: positions -2 to 4 of 5 keys"
    with pytest.raises(MaskError, match=re.escape(message)):
        w.mass(Mask.documents(torch.arange(5)))
    assert w.mass(Mask.documents(torch.arange(5), torch.tensor([1, 3]))).shape == (1, 2)


@settings(max_examples=25)
@given(data=st.data())
def test_the_keys_a_mask_shows_are_counted(data: st.DataObject) -> None:
    B, H, T, S = data.draw(st.sampled_from([(2, 3, 5, 7), (1, 2, 11, 11), (3, 5, 7, 5)]))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    mask = data.draw(masks(B, H, T, S, random))
    w = hw.AttentionMap(torch.zeros(B, H, T, 1), torch.zeros(B, H, S, 1), mask=mask)
    truth = mask.full(T, S, B, H).expand(B, H, T, S).sum(-1)
    assert torch.equal(visible(w._scores).expand(B, H, T), truth)


# TransformerLens' detector, as its formulas say, densely


def detection_pattern(name: str, tokens: Tensor) -> Tensor:
    n = len(tokens)
    i, j = rows(n)
    if name == "previous_token":
        return (j == i - 1).double()
    duplicate = ((tokens[:, None] == tokens) & (j != i)).double().tril()
    if name == "duplicate_token":
        return duplicate
    shifted = duplicate.roll(1, dims=1)
    shifted[:, 0] = 0
    return shifted.tril()


def detector(p: Tensor, pattern: Tensor, measure: str, exclude_bos: bool, exclude_current: bool) -> Tensor:
    if measure == "mul":
        p = p.clone()
        if exclude_bos:
            p[:, 0] = 0
        if exclude_current:
            p.fill_diagonal_(0)
        return (p * pattern).sum() / p.sum()
    away = (p - pattern).abs()
    if exclude_bos:
        away[:, 0] = 0
    if exclude_current:
        away.fill_diagonal_(0)
    return 1 - away.mean() * len(away)


def measured(w: hw.AttentionMap, name: str, tokens: Tensor, *options: Any) -> Tensor:
    return getattr(heads, name)(w, *([] if name == "previous_token" else [tokens]), *options)


@pytest.mark.thinned(12, slow=4)
@pytest.mark.parametrize("exclude_current", [False, True], ids=["", "without current"])
@pytest.mark.parametrize("exclude_bos", [False, True], ids=["", "without bos"])
@pytest.mark.parametrize("measure", ["mul", "abs"])
@pytest.mark.parametrize("name", ["previous_token", "duplicate_token", "induction"])
def test_detection_is_transformer_lens_to_the_letter(
    case: Self, name: str, measure: str, exclude_bos: bool, exclude_current: bool
) -> None:
    way = (measure, exclude_bos, exclude_current)
    actual = measured(case.map, name, case.tokens, *way)
    truth = case.expected(lambda p, tokens: detector(p, detection_pattern(name, tokens), *way))
    assert_close(actual, case, truth, times=5)


@pytest.mark.thinned(slow=2)
@pytest.mark.parametrize("exclude_current", [False, True], ids=["", "without current"])
@pytest.mark.parametrize("exclude_bos", [False, True], ids=["", "without bos"])
@pytest.mark.parametrize("name", ["previous_token", "duplicate_token", "induction"])
def test_a_score_is_over_the_queries_that_have_something_to_look_at(
    case: Self, name: str, exclude_bos: bool, exclude_current: bool
) -> None:
    """It was over all queries: where half of them have no earlier copy, no head could score over 0.5."""

    def formula(p: Tensor, tokens: Tensor) -> Tensor:
        pattern = detection_pattern(name, tokens)
        if exclude_bos:
            pattern[:, 0] = 0
        if exclude_current:
            pattern.fill_diagonal_(0)
        return where_seen(p, pattern)

    actual = measured(case.map, name, case.tokens, "mean", exclude_bos, exclude_current)
    assert_close(actual, case, case.expected(formula), times=5)


@pytest.mark.parametrize("name", ["duplicate_token", "induction"])
def test_where_no_token_is_said_twice_there_is_nothing_to_score(name: str) -> None:
    w = CASES["causal"]().map
    assert measured(w, name, SPOTS).isnan().all()
    twice = torch.stack([SPOTS, SPOTS % 7])
    assert measured(w, name, twice).isnan().all(1).tolist() == [True, False]
    near = hw.AttentionMap(*normal(0, 2, 1, 3, L, D), mask=Mask.window(5))
    assert measured(near, name, SPOTS % 7).isnan().all()  # the copy is out of sight


@pytest.mark.parametrize("name", ["duplicate_token", "induction"])
def test_tokens_are_those_of_the_queries_positions(name: str) -> None:
    """With a cache, queries are the last of the keys; chosen ones stand where they stood."""
    case = CASES["causal"]()
    i, j = rows(L)
    chosen = torch.tensor([3, 9, 10, 22])
    for measure, score in (("mean", where_seen), ("mul", lambda p, on: (p * on).sum() / p.sum())):

        def of(rows: Any, score: Callable[[Tensor, Tensor], Tensor] = score) -> Tensor:
            return case.expected(lambda p, tokens: score(p[rows], detection_pattern(name, tokens)[rows]))

        truth = of(chosen)
        assert error(measured(case.map.select(queries=chosen), name, case.tokens, measure), truth) < 1e-12
        late = hw.AttentionMap(case.q[:, :, -5:], case.k, causal=True)
        assert error(measured(late, name, case.tokens, measure), of(slice(-5, None))) < 1e-12


def test_a_padding_token_matches_nobody() -> None:
    """Left padding with a token that the text also has: its copies are not copies."""
    case = CASES["left padding"]()
    same = torch.zeros(B, L, dtype=torch.int64)
    actual = heads.induction(case.map, same, "abs")[1]
    cut = hw.AttentionMap(case.q[1:, :, 5:], case.k[1:, :, 5:], causal=True)
    assert error(actual, heads.induction(cut, same[1:, 5:], "abs")[0]) < 1e-12


def test_without_weight_to_take_a_share_of_there_is_no_score() -> None:
    w = hw.AttentionMap.from_weights(torch.eye(5)[None, None])
    assert heads.previous_token(w, "mul", exclude_current=True).isnan().all()


@settings(max_examples=20)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=17), st.sampled_from(["mul", "abs"]))
def test_any_tokens_are_detected_as_in_the_dense_formula(tokens: list[int], measure: str) -> None:
    ids, n = torch.tensor(tokens), len(tokens)
    p = normal(n, n, n).masked_fill(rows(n)[1] > rows(n)[0], -torch.inf).softmax(-1)
    for name in ("duplicate_token", "induction"):
        actual = measured(hw.AttentionMap.from_weights(p[None, None]), name, ids, measure).item()
        assert abs(actual - detector(p, detection_pattern(name, ids), measure, False, False).item()) < 1e-12


@pytest.mark.parametrize(
    ("ask", "kind", "message"),
    [
        (lambda w: heads.previous_token(w, "sum"), ArgumentError, '"mul" or "abs": got \'sum\''),
        (lambda w: heads.induction(w, SPOTS / 2), ArgumentError, "must be integers: got torch.float32"),
        (lambda w: heads.duplicate_token(w, SPOTS > 2), ArgumentError, "integers: got torch.bool"),
        (lambda w: heads.induction(w, SPOTS[:7]), ShapeError, "one id per key: [7] for [B, S] = [2, 23]"),
        (lambda w: heads.previous_token(w.select(keys=[2])), ArgumentError, "has 1 of 23 keys"),
        (
            lambda w: heads.induction_stripe(w, 24),
            ArgumentError,
            "between 1 and key_len: got period=24 with key_len=23",
        ),
        (
            lambda w: heads.induction_stripe(w, 0),
            ArgumentError,
            "between 1 and key_len: got period=0 with key_len=23",
        ),
        (lambda w: heads.token_mass(w, SPOTS), ArgumentError, "which must be bool: got torch.int64"),
        (lambda w: heads.token_mass(w, SPOTS[:7] > 2), ShapeError, "per key: [7] for [B, S] = [2, 23]"),
        (
            lambda w: heads.sink(w, 23),
            ArgumentError,
            "key must lie inside the sequence: got key=23 with key_len=23",
        ),
        (
            lambda w: heads.sink(w, -1),
            ArgumentError,
            "key must lie inside the sequence: got key=-1 with key_len=23",
        ),
        (lambda w: heads.streaming_mass(w, -2), ArgumentError, "recent at least 1: got -2 and 256"),
        (lambda w: heads.streaming_mass(w, 2, 0), ArgumentError, "recent at least 1: got 2 and 0"),
        (lambda w: heads.locality(w, -3), ArgumentError, "reach must not be negative: got -3"),
        (lambda w: heads.grid_distance(w, 4, 5), ShapeError, "must cover the keys: 1 + 4 * 5 = 21 for 23"),
        (lambda w: heads.grid_distance(w, 0, 5), ArgumentError, "patch above 0: got 0, 5, 1, 1"),
        (lambda w: heads.grid_distance(w, 2, 11, patch=-16), ArgumentError, "got 2, 11, 1, -16"),
        (lambda w: heads.grid_distance(w, 2, 11, prefix=-1), ArgumentError, "got 2, 11, -1, 1"),
        (
            lambda w: heads.grid_distance(w.select(keys=[1]), 2, 11),
            ArgumentError,
            "map of all keys: this map has 1 of 23",
        ),
    ],
)
def test_patterns_refuse(ask: Callable[[Any], Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        ask(CASES["causal"]().map)


def test_a_query_without_a_token_is_refused() -> None:
    w = hw.AttentionMap(normal(0, 1, 2, 7, 3), normal(1, 1, 2, 5, 3))
    message = "tokens must include those of every query: positions -2 to 4 for 5 keys"
    with pytest.raises(ShapeError, match=re.escape(message)):
        heads.induction(w, torch.arange(5))


# Single keys and groups of keys


@pytest.mark.parametrize("period", [1, 2, 7])
def test_the_stripe_is_the_mean_of_one_diagonal(case: Self, period: int) -> None:
    truth = case.expected(lambda p, _: p.diagonal(1 - period).mean())
    assert_close(heads.induction_stripe(case.map, period), case, truth)


def test_token_mass_is_the_mean_weight_of_chosen_tokens(case: Self) -> None:
    truth = case.expected(lambda p, tokens: where_seen(p, (tokens == 2).expand(p.shape)))
    assert_close(heads.token_mass(case.map, case.tokens == 2), case, truth)
    assert heads.token_mass(case.map, case.tokens == 9).isnan().all()  # a text without any
    if bool(case.real.all()):
        chosen = SPOTS % 3 == 0
        assert torch.equal(
            heads.token_mass(case.map, chosen), heads.token_mass(case.map, chosen.expand(B, L))
        )


@pytest.mark.parametrize("key", [0, 1, 4])
def test_a_sink_is_what_later_queries_put_on_it(case: Self, key: int) -> None:
    truth = case.expected(lambda p, _: p[key:, key].sum() / (len(p) - key))
    assert_close(heads.sink(case.map, key), case, truth)


def test_the_sink_rate_counts_heads_above_epsilon() -> None:
    alpha = torch.tensor([[0.31, 0.3, 0.9], [0.1, math.nan, 0.7]])
    assert heads.sink_rate(alpha) == 3 / 5
    assert heads.sink_rate(alpha, epsilon=0.8) == 1 / 5
    assert math.isnan(heads.sink_rate(torch.tensor([math.nan])))


@pytest.mark.parametrize(("first", "recent"), [(2, 5), (0, 3), (7, 1), (128, 256)])
def test_streaming_mass_is_on_first_or_recent_keys(case: Self, first: int, recent: int) -> None:
    def formula(p: Tensor, _: Tensor) -> Tensor:
        i, j = rows(len(p))
        saved = (j < first) | (i - j < recent)
        return (p * saved).sum(-1)[((p > 0) & ~saved).any(-1)].mean()  # queries with anything else to see

    assert_close(heads.streaming_mass(case.map, first, recent), case, case.expected(formula))


# Against an even head


def allowed(case: Self, b: int, h: int) -> Tensor:
    """Who may see whom among the real tokens, [n, n]."""
    real = case.real[b]
    full = case.mask.full(L, L, B, H).expand(B, H, L, L)
    return full[b, h][real][:, real]


def test_spread_is_entropy_against_that_of_an_even_head(case: Self) -> None:
    truth = torch.empty(B, H, dtype=torch.float64)
    for b, h, p, _ in case.each():
        visible = allowed(case, b, h).sum(-1)
        rest = (1 - p.sum(-1)).clamp(min=0) if "sinks" in case.options else torch.zeros(len(p))
        entropy = torch.special.entr(p).sum(-1) + torch.special.entr(rest)
        truth[b, h] = entropy.mean() / (visible.double() + ("sinks" in case.options)).log().mean()
    assert_close(heads.spread(case.map), case, truth)
    expected = case.map.statistics("entropy").entropy
    assert torch.equal(heads.spread(case.map, expected), heads.spread(case.map))


def test_locality_is_nearness_against_that_of_an_even_head(case: Self) -> None:
    truth = torch.empty(B, H, dtype=torch.float64)
    for b, h, p, _ in case.each():
        i, j = rows(len(p))
        near, visible = (i - j).abs() <= 2, allowed(case, b, h).double()
        even = (visible * near).sum(-1) / visible.sum(-1)
        truth[b, h] = ((p * near).sum(-1).mean() - even.mean()) / (1 - even.mean())
    assert_close(heads.locality(case.map, reach=2), case, truth, times=10)
    expected = case.map.statistics("local", reach=2).local
    assert error(heads.locality(case.map, 2, expected), heads.locality(case.map, 2)) <= 10 * TIGHT[case.dtype]


def test_in_a_short_text_nothing_is_far_and_locality_is_not_measured() -> None:
    w = hw.AttentionMap(normal(0, 1, 2, 7, 3), normal(1, 1, 2, 7, 3), causal=True)
    assert heads.locality(w).isnan().all()
    with_sinks = hw.AttentionMap(normal(0, 1, 2, 7, 3), normal(1, 1, 2, 7, 3), sinks=torch.zeros(2).double())
    assert heads.locality(with_sinks).isnan().all()


# Grids and needles


def test_grid_distance_is_euclidean_between_patches() -> None:
    case = CASES["bidirectional"]()
    places = torch.tensor([[r, c] for r in range(3) for c in range(7)]).double()
    away = 16 * torch.cdist(places, places)
    truth = case.expected(lambda p, _: (p[2:, 2:] * away).sum(-1).mean())
    assert error(heads.grid_distance(case.map, 3, 7, 16, prefix=2), truth) < 1e-11
    chosen = case.map.select(queries=[0, 6, 11])  # the first of them is no patch
    truth = case.expected(lambda p, _: (p[2:, 2:] * away)[[4, 9]].sum(-1).mean())
    assert error(heads.grid_distance(chosen, 3, 7, 16, prefix=2), truth) < 1e-11


def test_retrieval_counts_copied_tokens_of_the_needle() -> None:
    context = torch.tensor([9, 3, 4, 5, 4, 8])
    message = torch.tensor([3, 4, 5])
    top = torch.tensor([[1, 1, -1], [2, 4, 2], [3, 3, 0]])  # [steps, heads]
    actual = heads.retrieval(top, context, message, needle=(1, 4))
    assert actual.tolist() == pytest.approx([1, 2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("shapes", "needle", "kind", "message"),
    [
        (((3,), (5,), (3,)), (0, 2), ShapeError, "got [3], [5] and [3]"),
        (((3, 2), (5,), (2,)), (0, 2), ShapeError, "got [3, 2], [5] and [2]"),
        (((3, 2), (1, 5), (3,)), (0, 2), ShapeError, "got [3, 2], [1, 5] and [3]"),
        (((3, 2), (5,), (3,)), (2, 2), ArgumentError, "needle must lie in the context: got (2, 2) of 5"),
        (((3, 2), (5,), (3,)), (4, 6), ArgumentError, "needle must lie in the context: got (4, 6) of 5"),
    ],
)
def test_retrieval_refuses(shapes: Any, needle: tuple[int, int], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)):
        heads.retrieval(*(torch.zeros(shape, dtype=torch.int64) for shape in shapes), needle)


# Long inputs


class Largest(TorchDispatchMode):
    """Remembers the largest tensor made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(x, Tensor):
                self.size = max(self.size, x.untyped_storage().nbytes())
        return made


LONG = 4096


@pytest.mark.thinned
@pytest.mark.parametrize(
    "ask",
    [
        lambda w, tokens: w.mass(Mask.window(8)),
        lambda w, tokens: heads.previous_token(w, "abs", True, True),
        lambda w, tokens: heads.duplicate_token(w, tokens, "abs"),
        lambda w, tokens: heads.induction(w, tokens),
        lambda w, tokens: heads.induction_stripe(w, LONG // 2),
        lambda w, tokens: heads.token_mass(w, tokens == 3),
        lambda w, tokens: heads.sink(w),
        lambda w, tokens: heads.induction(w, tokens, "mul"),
        lambda w, tokens: heads.streaming_mass(w),
        lambda w, tokens: heads.spread(w),
        lambda w, tokens: heads.locality(w),
    ],
    ids="mass previous duplicate induction stripe token sink share streaming spread locality".split(),
)
def test_long_inputs_are_measured_without_a_matrix(ask: Callable[[Any, Tensor], Tensor]) -> None:
    q, k = normal(0, 2, 1, 2, LONG, 8).float()
    tokens = torch.randint(97, (LONG,), generator=torch.Generator().manual_seed(1))
    w = hw.AttentionMap(q, k, causal=True)
    with Largest() as largest, hw.budget.limit("1 MiB"):
        actual = ask(w, tokens)
    assert actual.shape == (1, 2) and actual.isfinite().all()
    assert largest.size <= LONG * LONG // 4, "a quarter of the smallest matrix, that of a bool mask"
