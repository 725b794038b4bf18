"""What people who tried only to get a wrong number found, each as a test."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError
from headwise.masks import Mask
from judge import assert_judged, error


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = normal(0, 3, *(shape or (1, 2, 7, 8)))
    return q, k, v


@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize(
    "rules", [{"causal": True}, {"window": 3}, {"mask": Mask.causal() & Mask.padding([5])}], ids=str
)
def test_a_scale_of_zero_or_less_hides_what_is_hidden(scale: float, rules: dict[str, Any]) -> None:
    """torch's CPU kernel scales what it has hidden: -inf times -0.5 was the largest score of all, and NaN."""
    q, k, v = qkv()
    out, visible = hw.attention(q, k, v, scale=scale, **rules)
    by_hand, _ = hw.attention(q, k, v, scale=scale, backend="plain", **rules)
    torch.testing.assert_close(out, by_hand)
    torch.testing.assert_close(visible.dense() @ v, by_hand)
    with pytest.raises(hw.errors.BackendUnavailable, match=f"a scale above 0, not {scale:g}"):
        hw.attention(q, k, v, scale=scale, backend="flash", **rules)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 10.0])
def test_without_weights_half_precision_is_as_exact_as_torchs_fused_function(
    dtype: torch.dtype, size: float
) -> None:
    """A row hidden by -1e4 swallowed its scores in half precision, where torch has float32 inside."""
    theirs, ours = nn.MultiheadAttention(64, 4).to(dtype), hw.nn.MultiheadAttention(64, 4).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    x, mask = (size * normal(0, 17, 1, 64)).to(dtype), torch.zeros(17, 17, dtype=dtype)
    mask[3] = -1e4
    plain, actual = (m(x, x, x, attn_mask=mask, need_weights=False)[0] for m in (theirs, ours))
    x, exact = x.double(), theirs.double()
    truth = exact(x, x, x, attn_mask=mask.double(), need_weights=False)[0]
    assert_judged(actual, plain, truth, dtype=dtype)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_the_mean_of_many_heads_in_half_precision_loses_none() -> None:
    """Heads were added up in bfloat16, one by one: rows summed to 0.995."""
    theirs, ours = (m(128, 64, batch_first=True) for m in (nn.MultiheadAttention, hw.nn.MultiheadAttention))
    ours.load_state_dict(theirs.state_dict())
    x = normal(0, 1, 257, 128).bfloat16()
    with torch.no_grad():
        plain, actual = (m.bfloat16().eval()(x, x.clone(), x)[1].double() for m in (theirs, ours))
    assert float((actual.sum(-1) - 1).abs().mean()) <= 2 * float((plain.sum(-1) - 1).abs().mean())


@pytest.mark.parametrize("far", [2.0**10, 2.0**20])
def test_mass_merging_and_gradients_hold_at_large_scores(far: float) -> None:
    """Scores that are whole numbers around a large one: plain torch is exact, two rounded lse are not."""
    c = far**0.5
    q, k = torch.full((1, 1, 5, 1), c), c + torch.tensor([3.0, 0, 1, 2, 0, 1, 3]).view(1, 1, 7, 1) / c
    v = normal(2, 1, 1, 7, 3)
    s = (q.double() @ k.double().mT).masked_fill(~torch.ones(5, 7, dtype=torch.bool).tril(2), -torch.inf)
    p = torch.softmax(s, -1)
    out, visible = hw.attention(q, k, v, causal=True, scale=1.0)  # a longer past: two parts
    assert error(out, p @ v.double()) < 1e-6
    assert (
        error(visible.mass(Mask.window(3), per="query"), p.masked_fill(~Mask.window(3).full(5, 7), 0).sum(-1))
        < 1e-6
    )
    sinks = torch.tensor([far])
    out, _ = hw.attention(q, k, v, scale=1.0, sinks=sinks)
    share = torch.softmax(
        torch.cat([q.double() @ k.double().mT, torch.full((1, 1, 5, 1), far).double()], -1), -1
    )
    assert error(out, share[..., :-1] @ v.double()) < 1e-6
    leaf = v.clone().requires_grad_()
    for rules in ({}, {"mask": torch.ones(5, 7, dtype=torch.bool)}):
        (actual,) = torch.autograd.grad(hw.attention(q, k, leaf, scale=1.0, **rules)[0].sum(), leaf)
        wanted = torch.softmax(q.double() @ k.double().mT, -1).sum(-2)[..., None].expand_as(v)
        assert error(actual, wanted) < 1e-5


@pytest.mark.parametrize(
    "travel",
    [lambda w: w.detach(), lambda w: w.cpu(), copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))],
    ids=["detach", "cpu", "deepcopy", "pickle"],
)
def test_a_map_that_was_written_over_does_not_travel(travel: Callable[[hw.AttentionMap], Any]) -> None:
    """A copy counted versions anew, and was a map of other numbers."""
    q, k, _ = qkv()
    visible = hw.AttentionMap(q, k)
    q.mul_(-1)
    with pytest.raises(ArgumentError, match="written to in place"):
        travel(visible)


def test_a_map_without_a_call_is_of_what_it_was_made_of_in_inference_mode_too() -> None:
    with torch.inference_mode():
        q, k, _ = qkv()
        visible = hw.AttentionMap(q, k)
        q.mul_(-1)
        with pytest.raises(ArgumentError, match="now sum to"):
            visible.dense()


def test_given_weights_that_were_written_over_are_refused() -> None:
    """A row that was empty when the map was made stayed empty in its statistics."""
    p = torch.softmax(normal(0, 2, 3, 11, 11), -1)
    arguments = p.clone()
    arguments[0, 0, 0] = 0
    visible = hw.AttentionMap.from_weights(arguments)
    arguments.copy_(p)
    for look in (lambda: visible.dense(), lambda: visible.statistics("entropy")):
        with pytest.raises(ArgumentError, match="written to in place"):
            look()


def test_the_mask_of_a_map_may_be_changed_and_used() -> None:
    """What had been worked out about its documents went along: off by 0.56."""
    q, k, v = qkv(1, 1, 300, 4)
    _, visible = hw.attention(q, k, v, Mask.documents(torch.arange(300) // 50))
    before, mask = visible.dense(), visible.mask
    assert mask.key_ids is not None and mask.query_ids is not None
    mask.key_ids.zero_()
    mask.query_ids.zero_()
    torch.testing.assert_close(hw.attention(q, k, v, mask)[0], hw.attention(q, k, v)[0])
    assert torch.equal(visible.dense(), before)


def test_a_bias_just_above_what_hides_hides_in_no_backend() -> None:
    q, k, v = qkv()
    bias = torch.full((7, 7), -6e29)
    actual = [hw.attention(q, k, v, bias=bias, backend=name) for name in ("flash", "plain", "tiles")]
    for out, visible in actual:
        torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
        torch.testing.assert_close(visible.dense(), torch.full((1, 2, 7, 7), 1 / 7))


def test_a_query_of_nan_is_nan_however_few_keys_there_are() -> None:
    """torch's CPU kernel takes a row of NaN over fewer keys than it takes at a time for an empty one."""
    for S in (*range(1, 20), 33):
        q, k, v = normal(0, 1, 2, 3, 8), normal(1, 1, 2, S, 8), normal(2, 1, 2, S, 8)
        q[0, 0, 0, 0] = torch.nan
        out, visible = hw.attention(q, k, v)
        for actual in (out, visible.dense()):
            assert bool(actual[0, 0, 0].isnan().all())
            assert not bool(actual[0, 0, 1:].isnan().any()) and not bool(actual[0, 1].isnan().any())
    ours = hw.nn.MultiheadAttention(16, 2, batch_first=True)
    x = normal(3, 1, 2, 16)
    x[0, 0, 0] = torch.nan
    assert bool(ours(x, x[:, 1:], x[:, 1:], need_weights=False)[0][0, 0].isnan().all())


@pytest.mark.parametrize(
    "rules",
    [{"sinks": torch.tensor([0.0, 100.0])}, {"bias": torch.full((7, 7), -1e4), "sinks": torch.zeros(2)}],
    ids=["high", "low"],
)
def test_sinks_far_above_the_scores_are_no_reason_to_refuse(rules: dict[str, Any]) -> None:
    """exp(sink - largest score) was endless, and the map said that its tensors had changed."""
    q, k, v = qkv()
    out, visible = hw.attention(q, k, v, **rules)
    torch.testing.assert_close(visible.dense() @ v, out)
    torch.testing.assert_close(visible[0, 1, 3] @ v[0, 1], out[0, 1, 3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mass_is_measured_in_its_own_precision_under_autocast(dtype: torch.dtype) -> None:
    q, k, v = qkv()
    _, visible = hw.attention(q, k, v, causal=True)
    wanted = visible.mass(Mask.window(2))
    with torch.autocast("cpu", dtype):
        assert torch.equal(visible.mass(Mask.window(2)), wanted)


def test_numpys_bools_pick_and_torchs_unsigned_lengths_count() -> None:
    _, visible = hw.attention(*qkv(1, 3, 7, 8))
    assert torch.equal(visible[:, np.array([True, False, True])], visible.dense()[:, [0, 2]])
    assert Mask.padding(torch.tensor([3], dtype=torch.uint16)).full(1, 5).sum() == 3
    with pytest.raises(ArgumentError, match=r"device must be a device or its name: got torch\.float64"):
        visible.to(torch.float64)  # type: ignore[arg-type]
