"""One query of a map, in one head or in all, on its short way: as exact and as wary as on the general one.

On a machine with a GPU it runs there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_cuda import CASES, case_of
from torch import Tensor

import headwise as hw
from headwise import Mask
from headwise.engines import one_query
from headwise.engines.statistics import ROW_STATISTICS
from headwise.errors import ArgumentError
from judge import Case, assert_judged, error
from second_pass_cases import normal

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@contextmanager
def the_general_way(handled: list[Any] | None = None) -> Iterator[None]:
    """Rows refused by the short way; those that it would have taken are counted."""
    short = one_query.row

    def refused(*args: Any) -> None:
        if handled is not None and short(*args) is not None:
            handled.append(args)

    one_query.row = refused  # type: ignore[assignment]
    try:
        yield
    finally:
        one_query.row = short


def maps_of(case: Case) -> Iterator[hw.AttentionMap]:
    """With the lse that came with the output, without any, and of chosen queries."""
    _, expected = hw.attention(case.q, case.k, case.v, case.mask, **case.options)
    yield expected
    yield hw.AttentionMap(case.q, case.k, mask=case.mask, **case.options)
    yield expected.select(queries=slice(None, None, -1))


def looks(w: hw.AttentionMap) -> list[tuple[int, Any, int]]:
    B, H, T, _ = w.shape
    return [(b, h, i) for b in range(B) for i in {0, T // 2, T - 1} for h in (H - 1, -H, slice(None))]


@pytest.mark.thinned(16, slow=10)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", CASES)
def test_a_row_is_as_exact_as_plain_torch(name: str, dtype: torch.dtype, device: str) -> None:
    low = case_of(name).to(dtype)
    on_device = low.on(device)
    _, truth, _ = low.to(torch.float64).reference()
    plain = on_device.reference()[1].cpu()
    for number, w in enumerate(maps_of(on_device)):
        for b, h, i in looks(w):
            at = w.shape[2] - 1 - i if number == 2 else i
            assert_judged(
                w[b, h, i].cpu(), plain[b, h, at], truth[b, h, at], dtype=dtype, size=1.0, name=name
            )


@pytest.mark.thinned(99, keep=["band, D64", "documents, D64", "left padding, D64"], slow=4)
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_the_general_way_and_most_are_taken(name: str) -> None:
    low = case_of(name).to(torch.float32)
    handled: list[Any] = []
    requested = 0
    for w in maps_of(low):
        for b, h, i in looks(w):
            short = w[b, h, i]
            with the_general_way(handled):
                general = w[b, h, i]
            requested += 1
            assert short.dtype == general.dtype and short.shape == general.shape
            assert error(short, general) <= 1e-6
            assert not bool((short[general == 0] > 1e-30).any())
    if "relative" in name:
        assert not handled
    elif "sinks" in name:  # without lse they take the general way
        assert len(handled) >= requested // 2
    else:
        assert (
            len(handled) >= requested // 3
        )  # rows that see nothing are left to the general way, where lse tells


@pytest.mark.parametrize(
    "name", [name for name in CASES if name.endswith(", D64") and "relative" not in name]
)
def test_the_steps_of_a_gpu_say_the_same_and_nan_of_what_was_overwritten(name: str) -> None:
    """Taken on a CPU: rows are not looked at, their mass is; where it is far from 1 they are NaN."""
    case = case_of(name).to(torch.float32)
    _, w = hw.attention(case.q, case.k, case.v, case.mask, **case.options)
    scores, lse, _ = w.parts()
    whole = w.dense()
    _, H, T, S = w.shape

    def as_on_gpu(h: int | None, i: int) -> Tensor:
        at, mask = i + S - T, case.mask
        start = 0 if mask.left is None else max(0, at - mask.left)
        stop = S if mask.right is None else min(S, at + mask.right + 1)
        row = one_query._by_rules(scores, lse, 1, h, i, at, slice(start, stop), True, on_cpu=False)  # type: ignore[arg-type]
        assert row is not None
        return row

    for i in (0, T // 2, T - 1):
        assert error(as_on_gpu(H - 1, i), whole[1, H - 1, i]) <= 1e-6
        assert error(as_on_gpu(None, i), whole[1, :, i]) <= 1e-6
    case.k.data.mul_(30.0)
    visible = whole[1, :, T - 1].sum(-1) > 0
    assert bool(as_on_gpu(None, T - 1)[visible].isnan().any()) == bool(visible.any())


@pytest.mark.parametrize("layout", ["packed", "turned", "expanded"])
def test_a_row_is_found_wherever_the_tensors_lie(layout: str) -> None:
    B, H, L, D = 2, 3, 11, 5
    packed = normal(0, B, L, 3, H, D).float()
    q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
    if layout == "turned":
        q, k = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k))
    elif layout == "expanded":
        k, v = (x[:, :1].expand(B, H, L, D) for x in (k, v))
    _, w = hw.attention(q, k, v, causal=True)
    whole = w.dense()
    for b, h, i in ((0, 0, 0), (1, 2, 10), (-1, -2, -3)):
        torch.testing.assert_close(w[b, h, i], whole[b, h, i])
        torch.testing.assert_close(w[b, :, i], whole[b, :, i])


@pytest.mark.parametrize("is_expected", [True, False], ids=["lse", "no-lse"])
def test_a_row_reads_its_own_query_and_the_keys_it_sees_alone(is_expected: bool) -> None:
    q, k, v = normal(0, 3, 2, 3, 19, 5).float().unbind(0)
    w = (
        hw.attention(q, k, v, causal=True, window=4)[1]
        if is_expected
        else hw.AttentionMap(q, k, mask=Mask.window(4))
    )
    expected = w[1, 2, 11]
    for x in (q.data, k.data):
        saved = x[1, 2, 8:12].clone()
        x.fill_(torch.nan)
        x[1, 2, 8:12] = saved
    assert torch.equal(w[1, 2, 11], expected) and int((expected > 0).sum()) == 4


def qkv(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = normal(1, 3, *shape).float().unbind(0)
    return q, k, v


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "padded": {"mask": Mask.padding([17, 29])},
    "sinks": {"sinks": torch.ones(3), "causal": True},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": normal(2, 1, 3, 29, 29).float()},
    "documents": {"mask": Mask.documents(torch.arange(29) // 11)},
}


@pytest.mark.parametrize("look", [lambda w: w[1, 2, 23], lambda w: w[1, :, 23]], ids=["one", "all"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rows_of_what_was_overwritten_are_refused(
    options: dict[str, Any], look: Callable[[hw.AttentionMap], Tensor]
) -> None:
    """Counted or not: a version tells, or the mass of the row."""
    q, k, v = qkv(2, 3, 29, 7)
    _, counted = hw.attention(q, k, v, **options)
    k.mul_(1.5)
    with pytest.raises(ArgumentError, match="written to in place"):
        look(counted)
    _, uncounted = hw.attention(q, k, v, **options)
    k.data.copy_(torch.randn_like(k))
    with pytest.raises(ArgumentError, match=r"now sum to [0-9.e+-]+, not 1"):
        look(uncounted)


def test_gradients_flow_through_a_row() -> None:
    q, k, v = qkv(1, 2, 13, 5)
    q.requires_grad_()
    _, w = hw.attention(q, k, v, causal=True)
    handled: list[Any] = []
    with the_general_way(handled):
        w[0, 1, 7].square().sum().backward()
    assert not handled and q.grad is not None and bool(q.grad[0, 1, 7].any()) and not bool(q.grad[0, 0].any())
    with torch.no_grad():
        assert not w[0, 1, 7].requires_grad


def test_what_is_not_there_is_refused_as_ever() -> None:
    q, k, v = qkv(2, 3, 11, 5)
    _, w = hw.attention(q, k, v)
    for index in ((2, 0, 0), (0, 3, 0), (0, 0, 11), (0, -4, 0), (0, slice(None), -12)):
        with pytest.raises(IndexError, match="must lie inside the map"):
            w[index]
    assert w[True, 0, 0].shape == w.dense()[True, 0, 0].shape


def test_under_a_transform_autocast_or_a_budget_rows_take_the_general_way() -> None:
    q, k, v = qkv(2, 3, 11, 5)
    _, w = hw.attention(q, k, v, causal=True)
    expected, handled = w[1, 2, 7], list[Any]()
    with the_general_way(handled):
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(w[1, 2, 7], expected)
        with hw.budget.limit("1 GiB"):
            torch.testing.assert_close(w[1, 2, 7], expected)
        by_batch = torch.func.vmap(lambda q, k: hw.AttentionMap(q[None], k[None], causal=True)[0, 2, 7])
        torch.testing.assert_close(by_batch(q, k)[1], expected)
    assert not handled


# Statistics of a step of generation


ROWS = tuple(ROW_STATISTICS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("S", "reach"), [(1, 8), (2, 0), (7, 3), (41, 8), (41, 100)])
def test_statistics_of_a_step_are_those_of_the_general_way(
    dtype: torch.dtype, S: int, reach: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(one_query, "DIRECT", ("cpu", "cuda"))
    q, k = normal(1, 3, 6, 1, 16).to(dtype), normal(2, 3, 2, S, 16).to(dtype)
    for options in ({}, {"causal": True}, {"scale": 0.3}, {"window": S}):
        directly = hw.AttentionMap(q, k, **options).statistics(*ROWS, reach=reach)
        assert one_query.statistics(hw.AttentionMap(q, k, **options).parts()[0], ROWS, reach) is not None
        truth = hw.AttentionMap(q.double(), k.double(), **options).statistics(*ROWS, reach=reach)
        with monkeypatch.context() as patch:
            patch.setattr(one_query, "DIRECT", ())
            general = hw.AttentionMap(q, k, **options).statistics(*ROWS, reach=reach)
        assert list(directly) == list(general) == list(ROWS)
        for name, value in directly.items():
            assert value.shape == (3, 6) and value.dtype == general[name].dtype
            assert torch.equal(value.isnan(), truth[name].isnan()), name
            near = error(general[name].nan_to_num(), truth[name].nan_to_num())
            assert error(value.nan_to_num(), truth[name].nan_to_num()) <= 2 * near + 1e-5, name


def test_what_is_more_than_a_step_takes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_query, "DIRECT", ("cpu", "cuda"))
    q, k = normal(1, 2, 4, 1, 16).bfloat16(), normal(2, 2, 4, 9, 16).bfloat16()
    learning = q.clone().requires_grad_()
    sinks = torch.zeros(4, dtype=torch.bfloat16)
    for scores in (
        hw.AttentionMap(q.float(), k.float()),  # what TF32 would make of it is not exact
        hw.AttentionMap(normal(3, 2, 4, 2, 16).bfloat16(), k),
        hw.AttentionMap(q, k, window=3),
        hw.AttentionMap(q, k, mask=Mask.padding(torch.tensor([9, 4]))),
        hw.AttentionMap(q, k, softcap=2.0),
        hw.AttentionMap(q, k, sinks=sinks),
        hw.AttentionMap(q, k, bias=hw.scoring.alibi(4)),
        hw.AttentionMap(learning, k),
    ):
        assert one_query.statistics(scores.parts()[0], ROWS, 8) is None
    expected = hw.attention(q, k, k)[1]  # whose lse is held against what is measured
    assert one_query.statistics(expected.parts()[0], ("received",), 8) is None
    assert hw.AttentionMap(learning, k).statistics("entropy").entropy.requires_grad
