"""The first pass against float64: every backend, every mask, every option, and its gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headwise as hw
from headwise.errors import BackendUnavailable
from headwise.nn import Buckets, MultiHeadAttention
from headwise.nn.options import RelativeBias
from headwise.scoring import Alibi, Relative
from judge import Case, assert_judged, error, sizes, strategies

cases = strategies()
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def run(case: Case, backend: str = "auto", **more: object) -> tuple[torch.Tensor, hw.AttentionMap]:
    return hw.attention(case.q, case.k, case.v, case.mask, **case.options, backend=backend, **more)


@given(
    case=cases(), dtype=st.sampled_from(DTYPES), backend=st.sampled_from(["auto", "flash", "tiles", "plain"])
)
def test_output_and_lse_are_as_exact_as_plain_torch(case: Case, dtype: torch.dtype, backend: str) -> None:
    ours = case.to(dtype)
    try:
        out, w = run(ours, backend)
    except BackendUnavailable:
        assert backend == "flash" and "softcap" in case.options
        return
    truth, _, lse = case.to(dtype).to(torch.float64).reference()
    plain, _, plain_lse = ours.reference()
    assert out.dtype == dtype and out.shape == truth.shape
    size = sizes(case)
    assert_judged(out, plain, truth, dtype=dtype, size=size["output"], name="output")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert w.lse.dtype == wide
    assert_judged(w.lse, plain_lse, lse, dtype=dtype, size=size["lse"], name="lse")


@given(case=cases(), backend=st.sampled_from(["auto", "tiles"]), dtype=st.sampled_from(DTYPES[:3]))
def test_gradients_of_every_input_are_as_exact_as_plain_torch(
    case: Case, backend: str, dtype: torch.dtype
) -> None:
    ours, plain = case.to(dtype).with_gradients(), case.to(dtype).with_gradients()
    truth = case.to(dtype).to(torch.float64).with_gradients()
    out, _ = run(ours, backend)
    true_out, _, _ = truth.reference()
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    out.backward(pull.to(dtype))
    plain.reference()[0].backward(pull.to(dtype))
    true_out.backward(pull.to(dtype).double())
    size = sizes(case, pull)
    for name, leaf in truth.leaves().items():
        assert leaf.grad is not None
        mine, theirs = ours.leaves()[name].grad, plain.leaves()[name].grad
        assert mine is not None and theirs is not None
        assert_judged(mine, theirs, leaf.grad, dtype=dtype, size=size[name], times=3, name=name)


def test_a_bias_that_lies_head_by_head_is_taken_as_it_is() -> None:
    """T5 looks its bias up as [T, S, H] and turns it round: fused kernels on a GPU want rows."""
    q, k, v = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64).unbind(0)
    bias = torch.randn(7, 7, 4, dtype=torch.float64).permute(2, 0, 1)[None]
    assert bias.stride(-1) != 1
    padding = hw.Mask.padding([7, 5])
    for mask in (None, padding):
        turned = hw.attention(q, k, v, mask=mask, bias=bias)[0]
        assert torch.equal(turned, hw.attention(q, k, v, mask=mask, bias=bias.contiguous())[0])


@pytest.mark.parametrize("beside", ["a sink", "a past"])
def test_what_is_put_together_by_large_lse_is_as_exact_as_plain_torch(beside: str) -> None:
    """Seven apart at 207: of which the last place of a float32 is worth seven places of the output."""
    B, H, T, S, D = 2, 3, 7, 13, 16
    draw = torch.Generator().manual_seed(0)
    q, k = torch.zeros(B, H, T, D), torch.zeros(B, H, S, D)
    q[..., 0], k[..., 0] = 4.0, 200 + torch.rand(B, H, S, generator=draw)  # scores [200, 201]
    k[:, :, S - T, 0] += 7  # of one key among the last, which every query sees
    v = torch.randn(B, H, S, D, generator=draw)
    options = {"sinks": torch.full((H,), 200.0)} if beside == "a sink" else {}
    case = Case(q, k, v, hw.Mask.causal() if beside == "a past" else hw.Mask(), options)
    out, w = run(case, "flash")
    truth, plain = case.to(torch.float64).reference()[0], case.reference()[0]
    assert 200 < w.lse.max() < 256
    assert_judged(out, plain, truth, dtype=torch.float32, size=v.abs().max().item())


# Several biases, and what is by distance


def by_distance(*parts: Alibi | Relative, T: int, S: int) -> torch.Tensor:
    """The same as one tensor, [H, T, S]."""
    offsets = torch.arange(S) - (torch.arange(T) + S - T)[:, None]
    total = torch.zeros((), dtype=torch.float64)
    for part in parts:
        if isinstance(part, Alibi):
            total = total - part.slopes[:, None, None] * offsets.abs()
        else:
            r = part.values.shape[1] // 2
            total = total + part.values[:, offsets.clamp(-r, r) + r]
    return total


def test_a_tuple_of_biases_is_their_sum_and_each_gets_its_gradient() -> None:
    random = torch.Generator().manual_seed(3)
    T, S, H = 5, 7, 3

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()

    q, k, v = normal(2, H, T, 11), normal(2, H, S, 11), normal(2, H, S, 11)
    slopes, more, values, others, dense, row = (
        normal(H), normal(H), normal(H, 5), normal(H, 5), normal(H, T, S), normal(S)
    )  # fmt: skip
    parts = (dense, Alibi(slopes), Relative(values), row, Relative(others), Alibi(more))
    leaves = (q, k, v, slopes, more, values, others, dense, row)
    pull = normal(2, H, T, 11).detach()
    far = by_distance(*(x for x in parts if not isinstance(x, torch.Tensor)), T=T, S=S)
    truth = torch.autograd.grad(hw.attention(q, k, v, bias=dense + row + far, causal=True)[0], leaves, pull)
    for backend in ("auto", "plain"):
        out, w = hw.attention(q, k, v, bias=parts, causal=True, backend=backend)
        for mine, theirs in zip(torch.autograd.grad(out, leaves, pull), truth, strict=True):
            assert error(mine, theirs) < 1e-12
        assert w.relative is not None and error(w.relative, values + others) == 0
        assert w.bias is not None and error(w.bias[0], dense + row) == 0
    nothing = hw.attention(q, k, v, bias=())[0]
    assert torch.equal(nothing, hw.attention(q, k, v)[0])


def test_what_a_half_precision_bias_hides_stays_hidden_in_a_sum() -> None:
    """float16's lowest number, with 40000 added to it, would be a score like any other."""
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float16).unbind(0)
    bias = torch.zeros(5, 5, dtype=torch.float16)
    bias[:, 2] = torch.finfo(torch.float16).min
    values = torch.zeros(2, 3, dtype=torch.float16)
    values[:, 0] = torch.finfo(torch.float16).min
    w = hw.attention(q, k, v, bias=(bias, torch.full((5,), 4e4), Relative(values)))[1].dense()
    hidden = (torch.arange(5) == 2) | (torch.arange(5) < torch.arange(5)[:, None])
    assert torch.equal(w == 0, hidden.expand_as(w))


@pytest.mark.parametrize("both_ways", [True, False])
def test_a_layers_relative_bias_is_its_buckets_at_any_distance(both_ways: bool) -> None:
    """Buckets are made for -max_distance .. max_distance alone; beyond that they are all the last one."""
    own = RelativeBias(3, Buckets(8, 13, both_ways), dtype=torch.float64)
    torch.nn.init.normal_(own.weight, generator=torch.Generator().manual_seed(1))
    T, S = 41, 67
    offsets = torch.arange(S) - torch.arange(S - T, S)[:, None]
    dense = own.weight[own.buckets.of(offsets)].permute(2, 0, 1)
    assert torch.equal(by_distance(own(), T=T, S=S), dense)


def test_a_layer_adds_its_own_biases_to_the_calls() -> None:
    mha = MultiHeadAttention(6, 3, alibi=True, relative_bias=Buckets(8, 13), dtype=torch.float64)
    bare = MultiHeadAttention(6, 3, dtype=torch.float64)
    assert mha.relative_bias is not None
    torch.nn.init.normal_(mha.relative_bias.weight, generator=torch.Generator().manual_seed(1))
    bare.load_state_dict(mha.state_dict(), strict=False)
    x, bias = torch.randn(2, 5, 6, dtype=torch.float64), torch.randn(3, 5, 5, dtype=torch.float64)
    more = Relative(torch.randn(3, 27, dtype=torch.float64))
    own = by_distance(mha.relative_bias(), hw.scoring.alibi(3), T=5, S=5)
    for extra, dense in ((None, 0), (bias, bias), ((bias, more), bias + by_distance(more, T=5, S=5))):
        assert error(mha(x, bias=extra)[0], bare(x, bias=own + dense)[0]) < 1e-12
    mha(x)[0].sum().backward()
    assert mha.relative_bias.weight.grad is not None and mha.relative_bias.weight.grad.any()
