"""Measurements of a kind that was made before, in Triton's interpreter: the same bits.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from interpreted_kernels import interpreted, mended, poisoned
from second_pass_cases import normal

from triton.runtime.interpreter import InterpretedFunction  # isort: skip
from headwise.engines.plans import PLANS  # isort: skip

__all__ = ["interpreted", "mended", "poisoned"]

B, H, Hk, T, S, D = 2, 2, 1, 11, 18, 16
EVERYTHING = tuple(ROW_STATISTICS)
SEEDS = (0, 20)
Options = dict[str, Any]


def pair(seed: int, length: int = T, keys: int = S, dim: int = D, dtype: Any = torch.float16) -> list[Tensor]:
    shapes = (B, H, length, dim), (B, Hk, keys, dim)
    return [(normal(seed + i, *shape) / 2).to(dtype) for i, shape in enumerate(shapes)]


def answers(weights: AttentionMap, names: tuple[str, ...] = EVERYTHING, reach: int = 8) -> dict[str, Tensor]:
    actual = dict(weights.statistics(*names, reach=reach).items())
    assert tuple(actual) == names
    return actual | {"lse": weights.lse}


@contextmanager
def no_kernels() -> Iterator[None]:
    """Launches do nothing: only what comes before them is of interest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__getitem__", lambda *_: lambda *args, **named: None)
        yield


def planned() -> tuple[int, int]:
    """How many plans there are: for lse, for statistics."""
    return len(PLANS.made_by("lse")), len(PLANS.made_by("measure"))


def assert_alike(
    build: Callable[[], AttentionMap], names: tuple[str, ...] = EVERYTHING, reach: int = 8
) -> None:
    """What is found by plan is bit for bit what is found without."""
    with no_kernels():
        for _ in range(2):
            answers(build(), names, reach)
    before = planned()
    actual = answers(build(), names, reach)
    assert planned() == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PLANS, "_plans", {})
        truth = answers(build(), names, reach)
    assert actual.keys() == truth.keys()
    for name, value in actual.items():
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


@pytest.mark.thinned(99, keep=["counted", "holes"], slow=3)
@pytest.mark.parametrize("rules", RULES)
def test_the_second_time_gives_the_same_bits(rules: str) -> None:
    for seed in SEEDS:
        assert_alike(partial(AttentionMap, *pair(seed), **RULES[rules](seed)))
    assert planned() == (1, 1)


@pytest.mark.parametrize(
    ("names", "reach"),
    [(("entropy",), 8), (("local", "entropy"), 3), (("first", "next"), 0), (("max_logit", "distance"), 8)],
)
def test_every_choice_has_its_own_plan(names: tuple[str, ...], reach: int) -> None:
    for seed in SEEDS:
        assert_alike(partial(AttentionMap, *pair(seed, 3, 5)), names, reach)
        if "local" in names:
            assert_alike(partial(AttentionMap, *pair(seed, 3, 5)), names, reach + 2)
    assert planned() == (1, 1 + ("local" in names))


@pytest.mark.thinned(99, keep=["two parts of channels"], slow=2)
@pytest.mark.parametrize(
    ("length", "dim", "dtype"),
    [(1, 64, torch.bfloat16), (1, 128, torch.float16), (7, 128, torch.bfloat16), (9, 24, torch.float16)],
    ids=["a step", "a step of long heads", "long heads", "two parts of channels"],
)
def test_every_size_has_its_own_plan(length: int, dim: int, dtype: torch.dtype) -> None:
    for keys in (length + 4, length + 5):
        for seed in SEEDS:
            q, k = pair(seed, length, keys, dim, dtype)
            assert_alike(partial(AttentionMap, q, k, causal=True))
    assert planned() == (2, 2)


def shifted(x: Tensor) -> Tensor:
    """The same numbers, one place further on."""
    room = x.new_empty(x.numel() + 1)
    return room[1:].view(x.shape).copy_(x)


@pytest.mark.slow
def test_other_layouts_have_plans_of_their_own() -> None:
    layouts: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda x: x,
        "by position": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "shifted": shifted,
    }
    for seed in SEEDS:
        q, k = pair(seed, 3, 5)
        for lay in layouts.values():
            assert_alike(partial(AttentionMap, lay(q), lay(k)), ("entropy", "next"))
    assert planned() == (len(layouts), len(layouts))
    # channels that do not lie side by side are copied first, and then as any others
    q, k = (x.mT.contiguous().mT for x in pair(3, 3, 5))
    assert_alike(partial(AttentionMap, q, k), ("entropy", "next"))
    assert planned() == (len(layouts), len(layouts))


def test_a_given_lse_is_taken_as_it_lies() -> None:
    for seed in SEEDS:
        q, k = pair(seed, 3, 5)
        plain = AttentionMap(q, k)
        scores, lse = plain.parts()[0], plain.lse
        turned = lse.transpose(0, 2).contiguous().transpose(0, 2)
        for arguments in (lse, shifted(lse), turned, lse + 0.01):
            assert_alike(partial(make, scores, arguments), ("local",))
    assert planned()[1] == 2


def test_chosen_queries_are_at_their_own_places() -> None:
    names = ("distance", "previous")
    for seed, queries in zip(SEEDS, (slice(0, 4), slice(3, 7)), strict=True):
        whole = AttentionMap(*pair(seed, 7, 9), causal=True)
        assert_alike(partial(whole.select, queries=queries), names)
    assert planned()[1] == 1


@pytest.mark.slow
def test_a_picture_of_narrow_cells_is_made_beside_a_plan() -> None:
    q, k = pair(0)
    first, *others = [
        AttentionMap(q, k, causal=True).statistics("entropy", "itself", pooled=5) for _ in range(4)
    ]
    assert planned()[1] == 1
    for actual in others:
        assert all(torch.equal(actual[name], value) for name, value in first.items())
    other = AttentionMap(q, k, causal=True).statistics("entropy", "itself", pooled=4)  # another kind
    assert other.pooled.shape[2:] == (4, 4)


def test_a_plan_keeps_nobodys_tensors() -> None:
    saved = []
    for seed in range(4):
        q, k = pair(seed)
        for name, options in RULES.items():
            weights = AttentionMap(q, k, **options(seed))
            with no_kernels():
                answers(weights, ("entropy", "first"))
            scores = weights.parts()[0]
            assert isinstance(scores, Scores)
            held = (q, k, weights.lse, *scores.mask.tensors.values(), *scores.scoring.tensors.values())
            saved += [(name, weakref.ref(x)) for x in held]
        del q, k, weights, scores, held
    gc.collect()
    assert planned() == (len(RULES), len(RULES))
    assert [name for name, ref in saved if ref() is not None] == []
