"""Numbers without a device, such as lists and ALiBi's slopes, go to the device of the queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise import Mask
from headwise.errors import MaskError

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
Q, K, V = torch.randn(3, 2, 4, 5, 7, generator=torch.Generator().manual_seed(1))


def _steps(mha: hw.MultiHeadAttention) -> Tensor:
    """A prompt of two lengths, a step, beams turned round, another step."""
    cache, outputs = mha.cache(), []
    with torch.no_grad():
        outputs.append(mha(X, cache=cache, lengths=[3, 5])[0][1])
        outputs.append(mha(X[:, :1], cache=cache)[0].flatten(0, 1))
        cache.reorder([1, 0])
        outputs.append(mha(X[:, 1:2], cache=cache)[0].flatten(0, 1))
    return torch.cat(outputs)


def _layer(**options: Any) -> hw.MultiHeadAttention:
    torch.manual_seed(0)
    return hw.MultiHeadAttention(16, 2, **options)


NUMBERS = {
    "padding": lambda: hw.attention(Q, K, V, mask=Mask.padding([3, 5], [3, 5]))[0],
    "documents": lambda: hw.attention(Q, K, V, mask=Mask.documents([0, 0, 1, 1, 1]))[0],
    "both": lambda: hw.attention(Q, K, V, mask=Mask.padding([3, 5]) & Mask.documents([0, 0, 1, 1, 1]))[0],
    "statistics": lambda: hw.attention(Q, K, V, mask=Mask.padding([3, 5], [3, 5]))[1].statistics().entropy,
    "alibi": lambda: hw.attention(Q, K, V, bias=hw.scoring.alibi(4))[0],
    "alibi of a module": lambda: _layer(device="cpu")(X, bias=hw.scoring.alibi(2))[0],
    "lengths": lambda: _layer(device="cpu")(X, lengths=[3, 5])[0],
    "packed documents": lambda: _layer(device="cpu")(X, documents=[0, 0, 1, 1, 1])[0],
    "steps": lambda: _steps(_layer(causal=True, device="cpu")),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_lists_and_slopes_go_to_the_device_of_the_queries_whatever_the_default_device(name: str) -> None:
    """A list is on no device. On "meta" there are no numbers: what is made there cannot be right."""
    expected = NUMBERS[name]()
    with torch.device("meta"):
        actual = NUMBERS[name]()
    assert torch.equal(actual, expected)


def test_lists_and_slopes_in_cpu_memory_follow_queries_to_another_device() -> None:
    q, k, v = (x.to("meta") for x in (Q, K, V))
    real = torch.ones(2, 5, dtype=torch.bool, device="meta")
    for mask in (
        Mask.padding([3, 5]),
        Mask.documents([0, 0, 1, 1, 1]),
        Mask.padding([3, 5]) & Mask.padding(real),
    ):
        output, weights = hw.attention(q, k, v, mask=mask, bias=hw.scoring.alibi(4))
        assert output.device == weights.lse.device == q.device
    mha, x = _layer(device="meta"), X.to("meta")
    for arguments in ({"lengths": [3, 5]}, {"documents": [0, 0, 1, 1, 1]}, {"mask": Mask.padding([3, 5])}):
        assert mha(x, **arguments)[0].device == q.device


def test_slopes_that_follow_queries_keep_their_gradient_and_can_be_traced() -> None:
    q, k, v = (x.to("meta") for x in (Q, K, V))
    slopes = torch.ones(4, requires_grad=True)

    def called(q: Tensor) -> Tensor:
        return hw.attention(q, k, v, bias=hw.scoring.Alibi(slopes), mask=Mask.padding([3, 5]))[0]

    for function in (called, torch.compile(called, backend="eager", fullgraph=True)):
        output = function(q)
        assert output.device == q.device and output.requires_grad


def test_a_dense_mask_elsewhere_is_still_refused() -> None:
    """It is as large as the weights: nobody moves it without being asked."""
    q, k, v = (x.to("meta") for x in (Q, K, V))
    with pytest.raises(MaskError, match="mask must be on the device of q: cpu and meta"):
        hw.attention(q, k, v, mask=torch.ones(5, 5).bool())
