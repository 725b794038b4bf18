"""Calls of a kind that came before: the same bits as the first time, and no plan for what may change.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise import Mask
from headwise.engines import first_pass
from headwise.engines.gpu import launches
from headwise.engines.plans import PLANS
from headwise.errors import ArgumentError, MaskError, ShapeError
from second_pass_cases import normal

B, H, Hk, T, D = 2, 6, 3, 19, 8

Options = dict[str, Any]


@pytest.fixture(autouse=True)
def nothing_planned() -> Iterator[None]:
    PLANS.clear()
    yield
    PLANS.clear()


def made(seed: int, dtype: torch.dtype = torch.float32, length: int = T) -> list[Tensor]:
    shapes = ((B, H, length, D), (B, Hk, length, D), (B, Hk, length, D))
    return [normal(seed + i, *shape).to(dtype) for i, shape in enumerate(shapes)]


def plans() -> int:
    return len(PLANS.made_by(first_pass.OWNER))


def test_a_kind_is_planned_when_it_comes_back() -> None:
    for seed, count in ((0, 0), (1, 1), (2, 1)):
        hw.attention(*made(seed), causal=True)
        assert plans() == count
    hw.attention(*made(0, length=T + 1), causal=True)
    assert plans() == 1


def test_a_plan_is_for_one_kind_alone() -> None:
    """Whatever is different about a call takes it off the plan."""
    q, k, v = made(0)
    for _ in range(3):
        hw.attention(q, k, v, causal=True)
    used: list[object] = []
    plan_for = first_pass.plan_for

    def noted(key: Any) -> Any:
        used.append(plan_for(key))
        return used[-1]

    others: dict[str, Callable[[], object]] = {
        "dtype": lambda: hw.attention(q.double(), k.double(), v.double(), causal=True),
        "stride": lambda: hw.attention(q.mT.contiguous().mT, k, v, causal=True),
        "not causal": lambda: hw.attention(q, k, v),
        "scale": lambda: hw.attention(q, k, v, causal=True, scale=0.2),
        "gradient": lambda: hw.attention(q.clone().requires_grad_(), k, v, causal=True),
        "more keys": lambda: hw.attention(q[:, :, 1:], k, v, causal=True),
        "a class of its own": lambda: hw.attention(
            torch.nn.Parameter(q, requires_grad=False), k, v, causal=True
        ),
        "dropout": lambda: hw.attention(q, k, v, causal=True, dropout=0.1),
        "a backend by name": lambda: hw.attention(q, k, v, causal=True, backend="tiles"),
        "autocast": lambda: autocast(q, k, v),
        "vmap": lambda: torch.vmap(lambda x: hw.attention(x, k, v, causal=True)[0])(q[None]),
        "alignment": lambda: hw.attention(shifted(q), k, v, causal=True),
    }
    first_pass.plan_for = noted
    try:
        hw.attention(q, k, v, causal=True)
        assert used == [plan_for(first_pass.plan_key(q, k, v, None, 0, D**-0.5, None))]
        assert used[0] is not None
        for name, call in others.items():
            used.clear()
            call()
            assert not any(used), name
    finally:
        first_pass.plan_for = plan_for


def autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = hw.attention(q, k, v, causal=True)[0]
    assert output.dtype == torch.bfloat16
    return output


def shifted(x: Tensor) -> Tensor:
    """The same numbers one place further in memory."""
    room = torch.empty(x.numel() + 1)
    return room[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"causal": 2, "window": 0}, MaskError),
        ({"window": 0}, MaskError),
        ({"softcap": -1.0}, ArgumentError),
        ({"sinks": torch.zeros(H + 1)}, ShapeError),
        ({"mask": Mask.padding([T + 1, 2])}, MaskError),
    ],
)
def test_what_is_wrong_is_refused_every_time(options: Options, kind: type[Exception]) -> None:
    for seed in range(3):
        with pytest.raises(kind):
            hw.attention(*made(seed), **options)
    assert not plans()


def test_a_map_of_a_planned_call_refuses_tensors_that_were_overwritten() -> None:
    for seed in range(3):
        q, k, v = made(seed)
        _, weights = hw.attention(q, k, v, causal=True)
    q.mul_(2)
    with pytest.raises(ArgumentError, match="written to in place"):
        weights.dense()


def test_a_dense_mask_overwritten_before_the_way_back_is_told() -> None:
    allowed = normal(1, 1, 1, T, T) > 0
    for seed in range(3):
        leaves = [x.requires_grad_() for x in made(seed)]
        output, _ = hw.attention(*leaves, mask=Mask.dense(allowed))
    allowed.logical_not_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_plans_are_forgotten_when_they_become_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLANS, "most", 3)
    for length in range(2, 12):
        for seed in range(2):
            hw.attention(*made(seed, length=length), causal=True)
    assert len(PLANS._plans) <= 3


assert not launches.INTERPRET, "kernels in Python have tests of their own"


# What a hostile tester found


@pytest.mark.parametrize("options", [{"mask": Mask.causal()}, {"scale": 1}, {"causal": True}], ids=str)
@pytest.mark.parametrize("kv_heads", [H, Hk])
def test_a_checkpoint_may_go_one_way_there_and_another_back(options: Options, kv_heads: int) -> None:
    """The second of two alike is planned, and the first is run again by that plan."""

    def gradients(checkpointed: bool) -> list[Tensor]:
        PLANS.clear()
        leaves = [
            normal(i, 2, heads, 7, 8).float().requires_grad_()
            for i, heads in enumerate((H, kv_heads, kv_heads))
        ]

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return hw.attention(q, k, v, **options)[0]

        q = leaves[0]
        for _ in range(4):
            q = (
                checkpoint(call, q, *leaves[1:], use_reentrant=False)
                if checkpointed
                else call(q, *leaves[1:])
            )
        return list(torch.autograd.grad(q.square().sum(), leaves))

    for mine, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(mine, theirs)


def test_on_the_meta_device_there_are_shapes_and_no_plans() -> None:
    q, k, v = (x.to("meta") for x in made(0))
    for options in ({}, {"mask": Mask.causal()}, {"window": 3}):
        for _ in range(3):
            assert hw.attention(q, k, v, **options)[0].shape == q.shape
    assert not PLANS.made_by(first_pass.OWNER)
    with pytest.raises(ArgumentError, match="device"):
        hw.attention(q, made(0)[1], v)


@pytest.mark.filterwarnings("ignore:.*nested.*")
def test_nested_tensors_are_told_to_be_padded() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    for options in ({}, {"mask": Mask.causal()}, {"window": 3}):
        with pytest.raises(ArgumentError, match="pad it"):
            hw.attention(nested, nested, nested, **options)


def test_an_empty_batch_has_gradients_every_time() -> None:
    for _ in range(4):
        leaves = [torch.randn(0, 2, 5, 8).requires_grad_() for _ in range(3)]
        hw.attention(*leaves, causal=True)[0].sum().backward()
        assert leaves[0].grad is not None and leaves[0].grad.shape == (0, 2, 5, 8)


def test_a_row_of_nan_does_not_hide_one_that_is_too_rough() -> None:
    actual = []
    for _ in range(3):
        q, k, v = made(0)
        q[0], q[1], k[1] = torch.nan, q[1] * 60, k[1] * 60
        leaves = [x.requires_grad_() for x in (q, k, v)]
        output, _ = hw.attention(*leaves, mask=Mask.causal())
        actual.append([x[1] for x in torch.autograd.grad(output, leaves, torch.ones_like(output))])
    assert plans() == 1
    for mine, theirs in zip(actual[0], actual[2], strict=True):
        assert torch.equal(mine, theirs)
