"""Measurements of a kind that was made before, in Triton's interpreter: the same bits, fewer steps.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headwise import Mask
from headwise.engines.scores import Scores
from headwise.engines.statistics import ROW_STATISTICS
from headwise.map import AttentionMap, make
from headwise.scoring import Alibi, Relative
from interpreted_kernels import interpreted, launched, mended, poisoned
from second_pass_cases import normal

from headwise.engines.gpu import heaviest, launches, pictures  # isort: skip
from headwise.engines.gpu import request as request_room  # isort: skip

__all__ = ["interpreted", "launched", "mended", "poisoned"]

B, H, Hk, T, S, D = 2, 2, 1, 11, 18, 16
EVERYTHING = tuple(ROW_STATISTICS)
SEEDS = (0, 20, 41)  # the first as always, then by plan, with other contents
TWICE = SEEDS[:2]
Options = dict[str, Any]


@pytest.fixture(autouse=True)
def nothing_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (heaviest, pictures):
        monkeypatch.setattr(module, "_plans", {})


def pair(seed: int, length: int = T, keys: int = S, dim: int = D, dtype: Any = torch.float16) -> list[Tensor]:
    shapes = (B, H, length, dim), (B, Hk, keys, dim)
    return [(normal(seed + i, *shape) / 2).to(dtype) for i, shape in enumerate(shapes)]


def answers(weights: AttentionMap, names: tuple[str, ...] = EVERYTHING, reach: int = 8) -> dict[str, Tensor]:
    found = dict(weights.statistics(*names, reach=reach).items())
    assert tuple(found) == names
    return found | {"lse": weights.lse}


def assert_alike(
    make_it: Callable[[], AttentionMap],
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...] = EVERYTHING,
    reach: int = 8,
) -> None:
    """What is found now is bit for bit what is found without plans."""
    found = answers(make_it(), names, reach)
    with monkeypatch.context() as patch:
        for module in (heaviest, pictures):
            patch.setattr(module, "_plans", {})
        truth = answers(make_it(), names, reach)
    assert found.keys() == truth.keys()
    for name, value in found.items():
        assert torch.equal(value.nan_to_num(7.0), truth[name].nan_to_num(7.0)), name


def lengths(seed: int) -> Tensor:
    return torch.tensor([S, 3 + seed % 7])


RULES: dict[str, Callable[[int], Options]] = {
    "full": lambda seed: {},
    "causal": lambda seed: {"causal": True},
    "window": lambda seed: {"window": (4, 2), "softcap": 3.0, "scale": 0.3},
    "lengths": lambda seed: {"mask": Mask.padding(lengths(seed)), "causal": True},
    "counted": lambda seed: {"mask": Mask.padding(lengths(seed), torch.tensor([T, 2 + seed % 5]))},
    "counted with holes": lambda seed: {
        "mask": Mask.padding(normal(seed, B, S) > -0.5, normal(seed, B, T) > 0.2)
    },
    "holes": lambda seed: {"mask": Mask.padding(normal(seed, B, S) > -0.5), "causal": True},
    "documents": lambda seed: {
        "mask": Mask.documents(torch.arange(S) // (4 + seed % 3), torch.arange(T) // 6)
    },
    "dense": lambda seed: {"mask": Mask.dense(normal(seed, 1, H, T, S) > 0)},
    "sinks": lambda seed: {"causal": True, "sinks": normal(seed, H).half()},
    "slopes": lambda seed: {"causal": True, "bias": Alibi(normal(seed, H).float().abs())},
    "relative": lambda seed: {"bias": Relative(normal(seed, H, 9).float())},
    "bias": lambda seed: {"bias": normal(seed, 1, H, T, S).half()},
}


@pytest.mark.thinned(99, keep=["causal", "counted", "holes", "sinks"])
@pytest.mark.parametrize("rules", RULES)
def test_the_second_time_gives_the_same_bits(rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in SEEDS:
        assert_alike(partial(AttentionMap, *pair(seed), **RULES[rules](seed)), monkeypatch)
        assert len(heaviest._plans) == len(pictures._plans) == 1


@pytest.mark.parametrize(
    ("names", "reach"),
    [(("entropy",), 8), (("local", "entropy"), 3), (("first", "next"), 0), (("max_logit", "distance"), 8)],
)
def test_every_choice_has_its_own_plan(
    names: tuple[str, ...], reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in SEEDS:
        assert_alike(partial(AttentionMap, *pair(seed)), monkeypatch, names, reach)
        if "local" in names:
            assert_alike(partial(AttentionMap, *pair(seed)), monkeypatch, names, reach + 2)
    assert len(pictures._plans) == 1 + ("local" in names)


@pytest.mark.thinned(99, keep=["a step", "two parts of channels"])
@pytest.mark.parametrize(
    ("length", "dim", "dtype"),
    [(1, 64, torch.bfloat16), (1, 128, torch.float16), (7, 128, torch.bfloat16), (9, 24, torch.float16)],
    ids=["a step", "a step of long heads", "long heads", "two parts of channels"],
)
def test_every_size_has_its_own_plan(
    length: int, dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for keys in (length + 4, length + 5):
        for seed in TWICE:
            q, k = pair(seed, length, keys, dim, dtype)
            assert_alike(partial(AttentionMap, q, k, causal=True), monkeypatch)
    assert len(heaviest._plans) == len(pictures._plans) == 2


def shifted(x: Tensor) -> Tensor:
    """The same numbers, one place further on."""
    room = x.new_empty(x.numel() + 1)
    return room[1:].view(x.shape).copy_(x)


def test_other_layouts_have_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda x: x,
        "by position": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "shifted": shifted,
    }
    for seed in TWICE:
        q, k = pair(seed, 3, 5)
        for lay in layouts.values():
            assert_alike(partial(AttentionMap, lay(q), lay(k)), monkeypatch, ("entropy", "next"))
    assert len(heaviest._plans) == len(pictures._plans) == len(layouts)
    # channels that do not lie side by side are copied first, and then as any others
    q, k = (x.mT.contiguous().mT for x in pair(3, 3, 5))
    assert_alike(partial(AttentionMap, q, k), monkeypatch, ("entropy", "next"))
    assert len(pictures._plans) == len(layouts)


def test_a_given_lse_is_taken_as_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in TWICE:
        q, k = pair(seed, 3, 5)
        plain = AttentionMap(q, k)
        scores, lse = plain.parts()[0], plain.lse
        turned = lse.transpose(0, 2).contiguous().transpose(0, 2)
        for given in (lse, shifted(lse), turned, lse + 0.01):
            assert_alike(partial(make, scores, given), monkeypatch, ("local",))
    assert len(pictures._plans) == 2 and len(heaviest._plans) == 1


def test_chosen_queries_are_at_their_own_places(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("distance", "previous")
    for seed, queries in zip(SEEDS, (slice(0, 4), slice(3, 7), slice(2, 6)), strict=True):
        whole = AttentionMap(*pair(seed, 7, 9), causal=True)
        assert_alike(partial(whole.select, queries=queries), monkeypatch, names)
    assert len(pictures._plans) == 1


def test_the_general_way_is_open_to_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = pair(0, 3, 5)
    for asked in ({"per": "query"}, {"pooled": 3}):
        AttentionMap(q, k).statistics("entropy", **asked)  # type: ignore[arg-type]
    AttentionMap(q, k).statistics("entropy", "received")
    assert not pictures._plans
    exact = AttentionMap(q.float(), k.float())
    exact.statistics("entropy", "local")  # whose lse is measured once more
    assert not pictures._plans
    heaviest._plans.clear()
    monkeypatch.setattr(request_room, "DEEPEST", 1)  # a launch for each sequence
    for seed in SEEDS:
        found = answers(AttentionMap(*pair(seed, 3, 5)), ("entropy", "first"))
        with monkeypatch.context() as patch:
            patch.setattr(launches, "INTERPRET", False)
            truth = answers(AttentionMap(*pair(seed, 3, 5)), ("entropy", "first"))
        for name, value in found.items():
            torch.testing.assert_close(value, truth[name], atol=2e-3, rtol=2e-3)
    assert not pictures._plans and not heaviest._plans


def test_the_same_kernels_are_launched(launched: list[str]) -> None:
    kernels = []
    for seed in SEEDS:
        launched.clear()
        answers(AttentionMap(*pair(seed, 3, 5)), ("entropy", "first"))
        kernels.append(launched[:])
    assert kernels == [["lse_kernel", "rows_kernel", "near_kernel"]] * 3


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches do nothing: only what comes before them is of interest."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda *_: lambda *args, **named: None)


@pytest.mark.usefixtures("no_kernels")
def test_a_plan_keeps_nobodys_tensors() -> None:
    kept = []
    for seed in SEEDS:
        q, k = pair(seed)
        for name, options in RULES.items():
            weights = AttentionMap(q, k, **options(seed))
            answers(weights, ("entropy", "first"))
            scores = weights.parts()[0]
            assert isinstance(scores, Scores)
            held = (q, k, weights.lse, *scores.mask.tensors.values(), *scores.scoring.tensors.values())
            kept += [(name, weakref.ref(x)) for x in held]
        del q, k, weights, scores, held
    gc.collect()
    assert len(pictures._plans) == len(heaviest._plans) == len(RULES)
    assert [name for name, ref in kept if ref() is not None] == []


@pytest.mark.usefixtures("no_kernels")
def test_plans_are_forgotten_when_they_become_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_room, "MOST_KEPT", 2)
    for length in range(1, 6):
        answers(AttentionMap(*pair(0, length, 5)), ("entropy",))
        assert len(pictures._plans) <= 2 and len(heaviest._plans) <= 2


@pytest.mark.usefixtures("no_kernels")
def test_the_second_time_takes_fewer_steps() -> None:
    """Calls of Python functions."""
    steps = []
    for seed in SEEDS:
        q, k = pair(seed)
        weights, calls = AttentionMap(q, k, causal=True), 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            weights.statistics(*EVERYTHING)
        finally:
            sys.setprofile(None)
        steps.append(calls)
    assert steps[1] == steps[2] <= 150 and steps[0] > 2 * steps[1]
