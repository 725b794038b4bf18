"""What people bring along from torch and numpy that is taken as they mean it, and answers that are right.

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim, E d_model.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from habits import B, D, E, H, S, Stack, T, ablated, jagged, mha, x
from headwise.errors import ShapeError


@pytest.mark.parametrize("causal", [0, 1, None, np.True_, torch.tensor(True)], ids=repr)
def test_any_yes_or_no_is_taken_for_causal(causal: Any) -> None:
    q = x(B, H, T, D)
    assert torch.equal(hw.attention(q, q, q, causal=causal)[0], hw.attention(q, q, q, causal=bool(causal))[0])


def test_the_answers_for_padding_and_nested_batches_are_right() -> None:
    """What the message tells to write is written here, and is what was meant."""
    layer, batch = mha(), jagged()
    padded, lengths = batch.to_padded_tensor(0.0), [len(y) for y in batch.unbind()]
    output = layer(padded, mask=hw.Mask.padding(lengths))[0]
    for arguments, y, length in zip(batch.unbind(), output, lengths, strict=True):
        torch.testing.assert_close(y[:length], layer(arguments[None])[0][0])
    attention_mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    torch.testing.assert_close(layer(padded, mask=hw.Mask.padding(attention_mask.bool()))[0], output)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "softcap": {"softcap": 2.0},
    "dropout": {"dropout": 0.5},
    "sinks": {"sinks": torch.ones(H, requires_grad=True)},
    "bias": {"bias": torch.ones(T, S, requires_grad=True)},
    "padding": {"mask": hw.Mask.padding(torch.ones(0, S, dtype=torch.bool))},
}


@pytest.mark.parametrize("backend", ["auto", "tiles", "plain"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_empty_batch_has_an_empty_answer_and_gradients(options: dict[str, Any], backend: str) -> None:
    q, k, v = x(0, H, T, D), x(0, 1, S, D), x(0, 1, S, 13)
    tensors = [y.requires_grad_() for y in (q, k, v)]
    output, weights = hw.attention(q, k, v, backend=backend, **options)
    assert output.shape == (0, H, T, 13) and weights.shape == weights.dense().shape == (0, H, T, S)
    assert weights.lse.shape == (0, H, T)
    learned = [y for y in options.values() if isinstance(y, Tensor)]
    grads = torch.autograd.grad(output.sum(), tensors + learned)
    assert all(
        not grad.any() and grad.shape == y.shape for grad, y in zip(grads, tensors + learned, strict=True)
    )
    with pytest.raises(
        ShapeError, match=r"statistics must be called on a map that is not empty.*\[0, 3, 5, 7\]"
    ):
        weights.statistics()


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])
def test_a_module_on_an_empty_batch_does_what_torchs_does(gradients: bool) -> None:
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    ours, empty = hw.MultiHeadAttention.from_torch(theirs), x(0, T, E)
    with torch.set_grad_enabled(gradients):
        output, weights = ours(empty)
        expected, matrix = theirs(empty, empty, empty, average_attn_weights=False)
        assert output.shape == expected.shape and weights.shape == matrix.shape
        assert ours(empty, x(0, S, E), x(0, S, E))[0].shape == (0, T, E)
    if gradients:
        output.sum().backward()
        assert all(p.grad is not None and not p.grad.any() for p in ours.parameters())
    with hw.watch(ours) as heads:
        ours(empty)
    assert not heads


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])
def test_a_projection_may_be_swapped_for_another(name: str, gradients: bool) -> None:
    layer, other, arguments = mha(), nn.Linear(E, E), x()
    layer(arguments)
    expected = mha()
    expected.load_state_dict(layer.state_dict())
    expected.get_submodule(name).load_state_dict(other.state_dict())
    projection = layer.get_submodule(name)
    torch.utils.swap_tensors(projection.weight, other.weight)
    torch.utils.swap_tensors(projection.bias, other.bias)
    with torch.set_grad_enabled(gradients):
        torch.testing.assert_close(layer(arguments)[0], expected(arguments)[0])
        del other  # and the memory that was ours
        torch.testing.assert_close(layer(arguments)[0], expected(arguments)[0])


@pytest.mark.parametrize("made", [hw.ablate, hw.collect], ids=lambda made: made.__name__)
def test_a_block_that_was_never_entered_says_that_it_did_nothing(made: Callable[..., object]) -> None:
    block = made(Stack(), {0: [1]})
    with pytest.warns(RuntimeWarning, match=r"nothing was done to heads of layers.0.*write with headwise"):
        del block
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ablated({0: [1]})
        gc.collect()
