"""What users get wrong with `MultiHeadAttention`, and what it answers: the value, the rule, what to write."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError, MaskError, ShapeError

B, T, S, E, H = 2, 7, 11, 30, 5


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*(shape or (B, T, E))).to(dtype)


def refused(error: type[Exception], *words: str) -> Any:
    """Raises this error, with all of these words in its message."""
    anywhere = "".join(f"(?=.*{re.escape(word)})" for word in words)
    return pytest.raises(error, match=f"(?s){anywhere}")


# Making it


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"d_model": 512, "num_heads": 10}, ShapeError, ["512 = 10 * 51 + 2", "use 8 or 16", "head_dim"]),
        ({"d_model": 7, "num_heads": 9}, ShapeError, ["7 = 9 * 0 + 7", "use 7"]),
        ({"num_kv_heads": 2}, ShapeError, ["num_kv_heads must divide num_heads", "5 = 2 * 2 + 1", "1 or 5"]),
        ({"d_model": 0}, ShapeError, ["d_model must be", "got 0"]),
        ({"num_heads": -3}, ShapeError, ["num_heads must be", "got -3"]),
        ({"num_heads": 2.5}, ShapeError, ["num_heads must be", "got 2.5"]),
        ({"num_heads": True}, ShapeError, ["num_heads must be", "got True"]),
        ({"num_kv_heads": 0}, ShapeError, ["num_kv_heads must be", "got 0"]),
        ({"head_dim": 0}, ShapeError, ["head_dim must be", "got 0"]),
        ({"value_dim": "6"}, ShapeError, ["value_dim must be", "got '6'"]),
        ({"kdim": -1}, ShapeError, ["kdim must be", "got -1"]),
        ({"vdim": 0}, ShapeError, ["vdim must be", "got 0"]),
        ({"dropout": 1.0}, ArgumentError, ["dropout must be", "got 1.0"]),
        ({"dropout": -0.1}, ArgumentError, ["dropout must be", "got -0.1"]),
        ({"window": 0}, MaskError, ["window must be at least 1", "got 0"]),
        ({"window": (1, 2, 3)}, MaskError, ["must be a pair", "(1, 2, 3)"]),
        ({"softcap": 0.0}, ArgumentError, ["softcap must be above 0", "got 0.0"]),
        ({"scale": torch.tensor(1.0)}, ArgumentError, ["scale must be a plain number", "Tensor"]),
    ],
    ids=str,
)
def test_sizes_and_options_that_cannot_be(
    options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with refused(error, *words):
        hw.MultiHeadAttention(**{"d_model": E, "num_heads": H, **options})


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("batch_first", True, "[batch, length, width]"),
        ("add_bias_kv", True, "headwise.nn.MultiheadAttention"),
        ("add_zero_attn", False, "headwise.nn.MultiheadAttention"),
        ("embed_dim", 30, "d_model"),
        ("is_causal", True, "causal"),
        ("qkv_bias", False, "bias"),
        ("d_k", 6, "head_dim"),
        ("d_v", 6, "value_dim"),
    ],
)
def test_arguments_of_other_classes_are_answered_with_ours(name: str, value: Any, instead: str) -> None:
    with refused(ArgumentError, name, repr(value), instead):
        hw.MultiHeadAttention(E, H, **{name: value})


def test_an_argument_nobody_has_gets_the_nearest_name() -> None:
    with refused(TypeError, "'num_kvheads'", "num_kv_heads"):
        hw.MultiHeadAttention(E, H, num_kvheads=1)  # type: ignore[call-arg]


def test_torchs_spelling_points_to_both_classes() -> None:
    with refused(AttributeError, "headwise.MultiHeadAttention", "headwise.nn.MultiheadAttention"):
        _ = hw.MultiheadAttention  # type: ignore[attr-defined]
    assert not hasattr(hw, "MultiheadAttention")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hw.nothing  # type: ignore[attr-defined]


# Calling it


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("attn_mask", torch.zeros(T, T, dtype=torch.bool), ["bool [7, 7]", "may NOT", "mask=~attn_mask"]),
        ("key_padding_mask", torch.zeros(B, T, dtype=torch.bool), ["bool [2, 7]", "Mask.padding"]),
        ("is_causal", True, ["got True", "causal=True"]),
        ("causal", True, ["got True", "Mask.causal()"]),
        ("average_attn_weights", False, ["got False", "mean_heads()"]),
        ("attention_mask", torch.ones(B, T), ["float32 [2, 7]", "mask="]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_torchs_arguments_in_a_call_are_answered_with_ours(name: str, value: Any, words: list[str]) -> None:
    with refused(ArgumentError, name, *words):
        hw.MultiHeadAttention(E, H)(x(), **{name: value})


def test_a_keyword_nobody_has_gets_the_nearest_name() -> None:
    with refused(TypeError, "'need_weight'", "need_weights"):
        hw.MultiHeadAttention(E, H)(x(), need_weight=False)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(T, T, dtype=torch.bool), "bool [7, 7]"),
        (torch.ones(B, 1, 1, T), "float32 [2, 1, 1, 7]"),
        (torch.ones(B, T, E), "float32 [2, 7, 30]"),
        (hw.Mask.causal(), "Mask(right=0)"),
    ],
    ids=["bool", "numbers", "like a key", "Mask"],
)
def test_a_mask_in_keys_place_is_answered_with_mask(mask: Any, message: str) -> None:
    with refused(ArgumentError, "value must be given with key", message, "mask="):
        hw.MultiHeadAttention(E, H)(x(), mask)


@pytest.mark.parametrize("place", ["key", "value"])
@pytest.mark.parametrize(
    "mask",
    [torch.ones(B, T, E, dtype=torch.bool), torch.ones(T, T), hw.Mask.causal()],
    ids=["bool", "2-D", "Mask"],
)
def test_a_mask_among_three_inputs_is_answered_with_mask(place: str, mask: Any) -> None:
    inputs = {"query": x(), "key": x(), "value": x(), place: mask}
    with refused((ArgumentError, ShapeError), place):  # type: ignore[arg-type]
        hw.MultiHeadAttention(E, H)(**inputs)


def test_a_value_needs_a_key() -> None:
    with refused(ArgumentError, "key must be given with value", "float32 [2, 7, 30]"):
        hw.MultiHeadAttention(E, H)(x(), value=x())


@pytest.mark.parametrize(
    ("inputs", "error", "words"),
    [
        ([x(T, E)], ShapeError, ["query must have 3 dimensions", "got 2, [7, 30]", "query[None]"]),
        ([x(B, 1, T, E)], ShapeError, ["query must have 3 dimensions", "got 4, [2, 1, 7, 30]"]),
        ([x(B, T, 29)], ShapeError, ["query must be d_model wide", "got 29 for d_model=30"]),
        ([x(), x(B, S, 31), x(B, S, E)], ShapeError, ["key must be kdim wide", "got 31 for kdim=30"]),
        ([x(), x(B, S, E), x(B, S, 31)], ShapeError, ["value must be vdim wide", "got 31 for vdim=30"]),
        ([x(), x(3, S, E), x(3, S, E)], ShapeError, ["agree in batch", "2 and 3", "transpose(0, 1)"]),
        ([x(), x(B, S, E), x(B, T, E)], ShapeError, ["agree in batch and length", "[2, 11] and [2, 7]"]),
        ([x(B, 0, E)], ShapeError, ["query must not be empty", "[2, 0, 30]"]),
        ([x(), x(B, 0, E), x(B, 0, E)], ShapeError, ["key must not be empty", "[2, 0, 30]"]),
        (
            [x(dtype=torch.float64)],
            ArgumentError,
            ["query must have the dtype", "torch.float64 and torch.float32"],
        ),
        ([x(dtype=torch.int64)], ArgumentError, ["query must have the dtype", "torch.int64", "mask="]),
        ([[[1.0]]], ArgumentError, ["query must be a tensor", "got list", "torch.as_tensor"]),
        (
            [torch.zeros(B, T, E, device="meta")],
            ArgumentError,
            ["query must be on the device", "meta and cpu"],
        ),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])
def test_inputs_that_do_not_fit(
    inputs: list[Any], error: type[Exception], words: list[str], gradients: bool
) -> None:
    with torch.set_grad_enabled(gradients), refused(error, *words):
        hw.MultiHeadAttention(E, H)(*inputs)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(T, T + 1), ["mask must broadcast to [B, H, T, S] = [2, 5, 7, 7]", "[1, 1, 7, 8]"]),
        (torch.ones(B, T, T), ["mask must broadcast", "[1, 2, 7, 7]", "mask[:, None]"]),
        (torch.zeros(T, T), ["zeros"]),
        (torch.full((T, T), -torch.inf).triu(1), ["inf"]),
        (hw.Mask.padding([T, T, T]), ["3"]),
    ],
    ids=["length", "a mask a sequence", "zeros", "additive", "batch"],
)
def test_masks_that_do_not_fit(mask: Any, words: list[str]) -> None:
    with refused(MaskError, *words):
        hw.MultiHeadAttention(E, H)(x(), mask=mask)


def test_replaced_projections_are_trusted_with_their_own_dtype() -> None:
    class Widening(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return y.float()

    mha = hw.MultiHeadAttention(E, H)
    mha.q_proj = mha.k_proj = mha.v_proj = Widening()  # type: ignore[assignment]
    assert mha(x(dtype=torch.float64))[0].dtype == torch.float32
