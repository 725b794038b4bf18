"""The first pass against float64: every backend, every mask, every option, and its gradients."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import headwise as hw
from headwise.errors import BackendUnavailable
from judge import Case, assert_judged, sizes, strategies

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
    assert_judged(out, plain, truth, dtype=dtype, size=size["output"], what="output")
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert w.lse.dtype == wide
    assert_judged(w.lse, plain_lse, lse, dtype=dtype, size=size["lse"], what="lse")


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
        assert_judged(mine, theirs, leaf.grad, dtype=dtype, size=size[name], times=3, what=name)


def test_a_bias_that_lies_head_by_head_is_taken_as_it_is() -> None:
    """T5 looks its bias up as [T, S, H] and turns it round: fused kernels on a GPU want rows."""
    q, k, v = torch.randn(3, 2, 4, 7, 8, dtype=torch.float64).unbind(0)
    bias = torch.randn(7, 7, 4, dtype=torch.float64).permute(2, 0, 1)[None]
    assert bias.stride(-1) != 1
    padding = hw.Mask.padding([7, 5])
    for mask in (None, padding):
        turned = hw.attention(q, k, v, mask=mask, bias=bias)[0]
        assert torch.equal(turned, hw.attention(q, k, v, mask=mask, bias=bias.contiguous())[0])
