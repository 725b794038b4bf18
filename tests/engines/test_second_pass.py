"""The second pass against float64: weights, mean, pooled, top, statistics, and gradients through weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise import Mask, reference
from headwise.engines import scores as scores_room
from headwise.engines.statistics import (
    ACCUMULATORS,
    NEAR_ROWS,
    ROW_STATISTICS,
    STATISTICS,
    Accumulator,
    Statistic,
    _near,
)
from judge import Case, assert_judged, error, sizes, strategies

cases = strategies()
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True, params=["one tile", "many tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything twice: as small inputs go in one tile, and cut into many."""
    if request.param == "many tiles":
        monkeypatch.setattr(scores_room, "CPU_TILE", 40)
        monkeypatch.setattr(scores_room, "CPU_ROWS", 4)
        monkeypatch.setattr(scores_room, "CPU_COLUMNS", 5)


def map_of(case: Case, known_lse: bool) -> hw.AttentionMap:
    if known_lse:
        return hw.attention(case.q, case.k, case.v, case.mask, **case.options)[1]
    return hw.AttentionMap(case.q, case.k, mask=case.mask, **case.options)


@pytest.mark.thinned(keep=["one tile"])
@given(case=cases(), dtype=st.sampled_from(DTYPES), known_lse=st.booleans())
def test_weights_and_their_mean_are_as_exact_as_plain_torch(
    case: Case, dtype: torch.dtype, known_lse: bool
) -> None:
    ours = case.to(dtype)
    w = map_of(ours, known_lse)
    _, truth, lse = ours.to(torch.float64).reference()
    _, plain, plain_lse = ours.reference()
    size = sizes(case)
    dense = w.dense()
    assert dense.dtype == dtype == w.dtype and dense.shape == w.shape
    assert_judged(dense, plain, truth, dtype=dtype, size=1.0, name="weights")
    assert_judged(w.mean_heads(), plain.mean(1), truth.mean(1), dtype=dtype, size=1.0, name="mean")
    assert_judged(w.lse, plain_lse, lse, dtype=dtype, size=size["lse"], name="lse")


@pytest.mark.thinned(keep=["many tiles"])
@given(case=cases(), data=st.data())
def test_any_part_equals_that_part_of_the_whole(case: Case, data: st.DataObject) -> None:
    w = map_of(case, data.draw(st.booleans()))
    whole = case.reference()[1]
    indices, expected = {}, whole
    for dim, name in enumerate(("batch", "heads", "queries", "keys")):
        size = whole.shape[dim]
        numbers = st.lists(st.integers(-size, size - 1), min_size=1, max_size=4)
        chosen = data.draw(st.one_of(st.none(), numbers, st.slices(size)))
        if chosen is not None:
            indices[name] = chosen
            spots = range(size)[chosen] if isinstance(chosen, slice) else chosen
            expected = expected.index_select(dim, torch.tensor([i % size for i in spots], dtype=torch.int64))
    part = w.select(**indices)
    assert part.shape == expected.shape
    if 0 not in expected.shape:
        assert error(part.dense(), expected) < 1e-12
        assert error(part.mean_heads(), expected.mean(1)) < 1e-12


@pytest.mark.thinned(keep=["one tile"])
@given(case=cases(), dtype=st.sampled_from(DTYPES), part=st.sampled_from(["dense", "mean", "part"]))
def test_gradients_through_weights_are_as_exact_as_plain_torch(
    case: Case, dtype: torch.dtype, part: str
) -> None:
    columns = [0, -1, 0]

    def looked_at(weights: Tensor) -> Tensor:
        if part == "mean":
            return weights.mean(1)
        return weights if part == "dense" else weights[:, :, ::2][..., columns]

    def ours_looks(w: hw.AttentionMap) -> Tensor:
        if part == "mean":
            return w.mean_heads()
        return w.dense() if part == "dense" else w.select(queries=slice(None, None, 2), keys=columns).dense()

    ours, plain = case.to(dtype).with_gradients(), case.to(dtype).with_gradients()
    truth = case.to(dtype).to(torch.float64).with_gradients()
    actual = ours_looks(map_of(ours, known_lse=part != "part"))
    random = torch.Generator().manual_seed(3)
    pull = torch.randn(actual.shape, generator=random, dtype=torch.float64).to(dtype)
    actual.backward(pull)
    looked_at(plain.reference()[1]).backward(pull)
    looked_at(truth.reference()[1]).backward(pull.double())
    scale = case.options.get("scale") or case.q.shape[-1] ** -0.5
    flow = 3 * pull.abs().max().item()
    size = {"q": flow * scale * case.k.abs().max().item(), "k": flow * scale * case.q.abs().max().item()}
    for name, leaf in truth.leaves().items():
        if name == "v":
            continue
        mine, theirs = ours.leaves()[name].grad, plain.leaves()[name].grad
        assert mine is not None and theirs is not None and leaf.grad is not None
        extent = size.get(name, flow * case.q.shape[2])
        assert_judged(mine, theirs, leaf.grad, dtype=dtype, size=extent, times=3, name=name)


def cells_of(length: int, cells: int) -> Tensor:
    spots = torch.arange(length) * cells // length
    return (torch.arange(cells)[:, None] == spots).double()  # [cells, length]


def counted_rows(case: Case) -> Tensor:
    """[B, 1, T] of 0 and 1: the queries that are not padding."""
    B, _, T, _ = case.q.shape
    lengths = case.mask.queries
    if lengths is None:
        return torch.ones(B, 1, T, dtype=torch.float64)
    real = torch.arange(T) < lengths[:, None] if lengths.ndim == 1 else lengths
    return real[:, None].double()


@pytest.mark.thinned(keep=["many tiles"])
@given(case=cases(), cells=st.tuples(st.integers(1, 6), st.integers(1, 6)))
def test_pooled_holds_the_true_mass_of_each_cell(case: Case, cells: tuple[int, int]) -> None:
    picture = map_of(case, known_lse=True).pooled(cells)
    weights = case.reference()[1] * counted_rows(case)[..., None]
    T, S = weights.shape[2:]
    rows, columns = cells_of(T, min(cells[0], T)), cells_of(S, min(cells[1], S))
    expected = rows @ weights @ columns.T
    assert error(picture, expected) < 1e-12
    assert error(picture.sum((2, 3)), weights.sum((2, 3))) < 1e-12


@pytest.mark.thinned(keep=["one tile"])
@given(case=cases(), count=st.integers(1, 4))
def test_top_gives_the_heaviest_keys_in_order(case: Case, count: int) -> None:
    weights = case.reference()[1]
    count = min(count, weights.shape[-1])
    values, indices = map_of(case, known_lse=True).top(count)
    expected = weights.topk(count, dim=-1).values
    assert error(values, expected) < 1e-12
    listed = indices >= 0
    assert torch.equal(listed, expected > 0)
    picked = weights.gather(-1, indices.clamp(min=0))
    assert error(picked[listed], values[listed]) < 1e-12


def truth_of(case: Case, reach: int) -> dict[str, Tensor]:
    """Every statistic a query by its definition, from the dense matrix in float64: [B, H, T]."""
    options = dict(case.options)
    sinks = options.pop("sinks", None)
    s = reference.scores(case.q, case.k, mask=case.mask, **options)
    p, lse = reference.weights_of(s, sinks)
    T, S = p.shape[2:]
    at, keys = torch.arange(T)[:, None] + S - T, torch.arange(S)
    entropy = -torch.xlogy(p, p).sum(-1)
    if sinks is not None:
        sink = 1 - p.sum(-1)
        sink = torch.where(torch.isneginf(lse), 0.0, (sinks[:, None] - lse).exp())
        entropy = entropy - torch.xlogy(sink, sink)
    real = case.mask.keys
    first_key = torch.zeros(p.shape[0], dtype=torch.int64)
    if real is not None and real.ndim == 2:
        first_key = real.int().argmax(-1)
    first = p.gather(-1, first_key[:, None, None, None].expand(*p.shape[:3], 1)).squeeze(-1)
    return {
        "entropy": entropy,
        "effective_keys": entropy.exp(),
        "confidence": p.amax(-1),
        "distance": (p * (at - keys).abs()).sum(-1),
        "first": first,
        "previous": (p * (keys == at - 1)).sum(-1),
        "itself": (p * (keys == at)).sum(-1),
        "next": (p * (keys == at + 1)).sum(-1),
        "local": (p * ((at - keys).abs() <= reach)).sum(-1),
        "max_logit": s.amax(-1),
    }


def counts(case: Case, name: str) -> Tensor:
    """Which queries a head's mean is taken over, [B, H, T]."""
    lse = case.reference()[2]
    T, S = case.q.shape[2], case.k.shape[2]
    counted = counted_rows(case).bool() & ~torch.isneginf(lse)
    offset = {"previous": -1, "itself": 0, "next": 1}.get(name)
    if offset is not None:
        real = reference.allowed(Mask(keys=case.mask.keys), len(lse), 1, 1, S)[:, 0]  # [B, 1, S]
        beside = torch.arange(T)[:, None] + S - T + offset == torch.arange(S)
        counted = counted & (beside & real).any(-1)[:, None]
    return counted


@pytest.mark.thinned(keep=["many tiles"])
@given(case=cases(), reach=st.integers(0, 3), names=st.sets(st.sampled_from(STATISTICS)))
def test_statistics_are_what_their_formulas_say(case: Case, reach: int, names: set[str]) -> None:
    actual = map_of(case, known_lse=True).statistics(*sorted(names), reach=reach, per="query")
    truth = truth_of(case, reach)
    visible = ~torch.isneginf(case.reference()[2])
    names = names or set(STATISTICS)
    assert set(actual) == names
    for name in names - {"received"}:
        assert error(actual[name][visible], truth[name][visible]) < 1e-11 * max(1, case.k.shape[2]), name
    if "received" in names:
        weights = case.reference()[1] * counted_rows(case)[..., None]
        assert error(actual.received, weights.sum(2)) < 1e-12
        assert error(actual.received.sum(-1), weights.sum((2, 3))) < 1e-12


@pytest.mark.thinned(keep=["one tile"])
@given(case=cases())
def test_a_head_is_the_mean_over_its_counted_queries(case: Case) -> None:
    stats = map_of(case, known_lse=True).statistics()
    truth = truth_of(case, reach=8)
    for name, values in truth.items():
        counted = counts(case, name)
        if name == "max_logit":
            expected = values.masked_fill(~counted, -torch.inf).amax(-1)
        else:
            expected = (values * counted).nan_to_num(0.0).sum(-1) / counted.sum(-1)
        assert torch.equal(torch.isnan(stats[name]), torch.isnan(expected)), name
        assert error(stats[name].nan_to_num(0.0), expected.nan_to_num(0.0)) < 1e-10, name


@pytest.mark.thinned(keep=["many tiles"])
@given(
    lengths=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    more=st.integers(0, 3),
    left=st.booleans(),
    rules=st.sampled_from([Mask(), Mask.causal(), Mask.window(3), Mask.window(left_right=(2, 1))]),
    reach=st.integers(0, 3),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_a_padded_batch_has_the_statistics_of_each_sequence_alone(
    lengths: list[int], more: int, left: bool, rules: Mask, reach: int, dtype: torch.dtype
) -> None:
    """The query beside the padding counted for `next` or `previous`: six tokens that look at the next one
    gave 1.0, and 0.833 with two padding tokens behind them."""
    B, T = len(lengths), max(lengths) + more
    random = torch.Generator().manual_seed(7)
    q = torch.randn(B, 4, T, 5, generator=random, dtype=dtype)
    k = torch.randn(B, 2, T, 5, generator=random, dtype=dtype)
    sizes = torch.tensor(lengths)
    real = torch.arange(T) < sizes[:, None]
    real = real.flip(-1) if left else real
    paddings = [Mask.padding(real, real)] if left else [Mask.padding(real, real), Mask.padding(sizes, sizes)]
    for padding in paddings:
        padded = hw.AttentionMap(q, k, mask=rules & padding)
        together = padded.statistics(reach=reach)
        for b, length in enumerate(lengths):
            mine = slice(T - length, T) if left else slice(0, length)
            own = hw.AttentionMap(q[b : b + 1, :, mine], k[b : b + 1, :, mine], mask=rules)
            for name, alone in own.statistics(reach=reach).items():
                among = together[name][b : b + 1]
                among = among[..., mine] if name == "received" else among
                torch.testing.assert_close(among, alone, equal_nan=True, msg=name)
                counts = padded.counted_queries(name)[b : b + 1, :, mine]
                assert torch.equal(counts, own.counted_queries(name)), name


@pytest.mark.thinned(keep=["one tile"])
@given(case=cases(), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_statistics_in_lower_precision_stay_within_the_budget(case: Case, dtype: torch.dtype) -> None:
    low = case.to(dtype)
    truth = truth_of(low.to(torch.float64), reach=8)
    plain = truth_of(low, reach=8)
    actual = map_of(low, known_lse=True).statistics(per="query")
    visible = ~torch.isneginf(low.to(torch.float64).reference()[2])
    size = sizes(case)["lse"]
    for name, expected in truth.items():
        extent = size * (case.k.shape[2] if name in ("distance", "effective_keys") else 1)
        assert_judged(
            actual[name][visible],
            plain[name][visible],
            expected[visible],
            dtype=dtype,
            size=extent,
            name=name,
        )


@pytest.mark.slow
def test_a_statistic_may_look_farther_than_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys two away were silently 0 in the first row of every block, unless `local` was asked for, too."""
    two_away = Accumulator("near", lambda tile, reach: _near(tile, -2, -2), away=2)
    monkeypatch.setitem(ACCUMULATORS, "two_away", two_away)
    entry = Statistic(lambda block, sums: sums["two_away"], ("two_away",), offset=-2)
    monkeypatch.setitem(ROW_STATISTICS, "two_away", entry)
    monkeypatch.setattr("headwise.engines.statistics.STATISTICS", (*STATISTICS, "two_away"))
    T = 3 * NEAR_ROWS + 1
    weights = hw.AttentionMap(*torch.randn(2, 1, 3, T, 5, dtype=torch.float64).unbind(0))
    expected = weights.dense().diagonal(-2, 2, 3)  # [1, 3, T - 2]
    for others in ((), ("entropy",)):
        measured = weights.statistics("two_away", *others, per="query").two_away
        torch.testing.assert_close(measured[..., 2:], expected)
