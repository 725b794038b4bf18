"""What cannot be run is refused: with the right error, the offending numbers and what to do instead.

Every refusal is tried on `attention`, on `why` and, where it is not about v, on `AttentionMap`; afterwards
the inputs are as they were and a correct call works.

Letters: B batch, H num_heads, Hk num_kv_heads, T query_len, S key_len, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise import Mask
from headwise.errors import ArgumentError, BackendUnavailable, BudgetExceeded, MaskError, ShapeError
from headwise.scoring import Alibi, Relative, alibi
from judge import inside

B, H, HK, T, S, D, DV = 2, 6, 3, 5, 7, 11, 13


def normal(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(**options)


def good() -> dict[str, Any]:
    return {"q": normal(B, H, T, D), "k": normal(B, HK, S, D), "v": normal(B, HK, S, DV)}


def bools(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


class Refusal(NamedTuple):
    """What is given instead of something good, and how it is refused."""

    arguments: dict[str, Any]
    kind: type[Exception]
    message: str
    of_maps: bool = True  # AttentionMap refuses it, too


META = torch.device("meta")

TENSORS: dict[str, Refusal] = {
    "q is a list": Refusal(
        {"q": [[1.0]]}, ArgumentError, "q must be a tensor: got list; use torch.as_tensor"
    ),
    "k is none": Refusal({"k": None}, ArgumentError, "k must be a tensor: got NoneType"),
    "v is an array": Refusal(
        {"v": np.ones((B, HK, S, DV))}, ArgumentError, "v must be a tensor: got ndarray", False
    ),
    "q in three dimensions": Refusal(
        {"q": normal(H, T, D)},
        ShapeError,
        "q must have 4 dimensions [B, H, T, D]: got 3, [6, 5, 11]; add batch and head dimensions",
    ),
    "v in five dimensions": Refusal(
        {"v": normal(1, B, HK, S, DV)},
        ShapeError,
        "v must have 4 dimensions [B, Hk, S, Dv]: got 5, [1, 2, 3, 7, 13]",
        False,
    ),
    "q of integers": Refusal(
        {"q": normal(B, H, T, D).long()},
        ArgumentError,
        "q must be floating point: got torch.int64; use q.float()",
    ),
    "k of another dtype": Refusal(
        {"k": normal(B, HK, S, D).double()},
        ArgumentError,
        "k must have the dtype of q: torch.float64 and torch.float32; use k.to(q.dtype)",
    ),
    "k elsewhere": Refusal(
        {"k": torch.empty(B, HK, S, D, device=META)},
        ArgumentError,
        "k must be on the device of q: meta and cpu; use k.to(q.device)",
    ),
    "batches of q and k": Refusal(
        {"k": normal(5, HK, S, D)},
        ShapeError,
        "q and k must agree in batch: 2 and 5; shapes are q [B, H, T, D]",
    ),
    "channels of q and k": Refusal(
        {"k": normal(B, HK, S, 17)}, ShapeError, "q and k must agree in head_dim: 11 and 17"
    ),
    "heads of k and v": Refusal(
        {"v": normal(B, 1, S, DV)}, ShapeError, "k and v must agree in num_kv_heads: 3 and 1", False
    ),
    "lengths of k and v": Refusal(
        {"v": normal(B, HK, 19, DV)}, ShapeError, "k and v must agree in key_len: 7 and 19", False
    ),
    "heads not shared evenly": Refusal(
        {"k": normal(B, 4, S, D), "v": normal(B, 4, S, DV)},
        ShapeError,
        "num_heads must be a multiple of num_kv_heads: 6 = 1 * 4 + 2; use one of 1, 2, 3, 6 key heads",
    ),
    "no keys": Refusal(
        {"k": normal(B, HK, 0, D)},
        ShapeError,
        "k must not be empty: got [2, 3, 0, 11] for [B, Hk, S, D]; skip the call",
    ),
    "no values": Refusal(
        {"v": normal(B, HK, S, 0)},
        ShapeError,
        "v must not be empty: got [2, 3, 7, 0] for [B, Hk, S, Dv]",
        False,
    ),
}

MASKS: dict[str, Refusal] = {
    "a padding mask as it is": Refusal(
        {"mask": bools(B, S)},
        MaskError,
        "mask must broadcast to [B, H, T, S] = [2, 6, 5, 7]: got [1, 1, 2, 7]; pass a [B, S] padding mask",
    ),
    "additive": Refusal(
        {"mask": torch.tensor([0.0, -math.inf] + [0.0] * 5)},
        MaskError,
        "mask must hold 0 and 1 only: found -inf; 1 = may attend",
    ),
    "mask elsewhere": Refusal(
        {"mask": torch.empty(T, S, dtype=torch.bool, device=META)},
        MaskError,
        "must be on the device of q: meta and cpu",
    ),
    "lengths elsewhere": Refusal(
        {"mask": Mask.padding(torch.empty(B, dtype=torch.int64, device=META))},
        MaskError,
        "must be on the device of q: meta and cpu",
    ),
    "window of nothing": Refusal({"window": 0}, MaskError, "window must be at least 1: got 0"),
}

SCORING: dict[str, Refusal] = {
    "no cap": Refusal(
        {"softcap": 0}, ArgumentError, "softcap must be above 0 and finite: got 0; use None for no cap"
    ),
    "cap of no number": Refusal(
        {"softcap": math.nan}, ArgumentError, "softcap must be above 0 and finite: got nan"
    ),
    "bias of integers": Refusal(
        {"bias": torch.zeros(S).long()},
        ArgumentError,
        "bias must be a floating tensor: got torch.int64; pass which keys",
    ),
    "bias of another length": Refusal(
        {"bias": normal(T, 17)},
        ShapeError,
        "bias must broadcast to [B, H, T, S] = [2, 6, 5, 7]: got [1, 1, 5, 17]; add dimensions of size 1",
    ),
    "bias in five dimensions": Refusal(
        {"bias": normal(1, B, H, T, S)},
        ShapeError,
        "bias must broadcast to [B, H, T, S]: got 5 dimensions [1, 2, 6, 5, 7]; use at most four",
    ),
    "bias elsewhere": Refusal(
        {"bias": torch.empty(T, S, device=META)},
        ArgumentError,
        "bias must be on the device of q: meta and cpu",
    ),
    "relative of other heads": Refusal(
        {"bias": Relative(normal(4, 5))},
        ShapeError,
        "relative must be [H, R] with R odd: [4, 5] for 6 heads; give a tensor of shape [6, 2 * r + 1]",
    ),
    "relative of an even number": Refusal(
        {"bias": Relative(normal(H, 4))}, ShapeError, "relative must be [H, R] with R odd: [6, 4] for 6 heads"
    ),
    "biases with a list among them": Refusal(
        {"bias": (alibi(H), [0.5])}, ArgumentError, "bias must be a floating tensor: got list"
    ),
    "biases that cannot be added": Refusal(
        {"bias": (normal(T, S), normal(3, S))},
        ShapeError,
        "bias tensors of one tuple must have shapes that can be added: [5, 7] and [3, 7]; add them before",
    ),
    "relatives of two widths": Refusal(
        {"bias": (Relative(normal(H, 5)), Relative(normal(H, 3)))},
        ShapeError,
        "relative tensors of one tuple must have shapes that can be added: [6, 5] and [6, 3]",
    ),
    "biases on two devices": Refusal(
        {"bias": (normal(T, S), torch.empty(T, S, device=META))},
        ArgumentError,
        "bias tensors of one tuple must be on one device: cpu and meta; use .to(q.device)",
    ),
    "slopes of other heads": Refusal(
        {"bias": alibi(4)},
        ShapeError,
        "slopes must hold one number per head: [4] for 6 heads; give a tensor of shape [6]",
    ),
    "sinks a key head": Refusal(
        {"sinks": normal(HK)},
        ShapeError,
        "sinks must hold one number per head: [3] for 6 heads; give a tensor of shape [6]",
    ),
    "one sink as number": Refusal(
        {"sinks": 0.5}, ArgumentError, "sinks must be a floating tensor: got float"
    ),
}

RUNNING: dict[str, Refusal] = {
    "dropout of everything": Refusal(
        {"dropout": 1.0}, ArgumentError, "dropout must be at least 0 and below 1: got 1.0", False
    ),
    "dropout of no number": Refusal({"dropout": math.nan}, ArgumentError, "below 1: got nan", False),
    "a misspelt backend": Refusal(
        {"backend": "flsh"},
        ArgumentError,
        "backend must be auto or a known name: got 'flsh'; did you mean 'flash'? "
        "choose from auto, decode, triton, cudnn, flash, efficient, tiles, plain",
        False,
    ),
    "cudnn on a CPU": Refusal(
        {"backend": "cudnn"},
        BackendUnavailable,
        'backend="cudnn" cannot run this call: it supports cuda only; the tensors are on cpu. '
        'Others that can: flash, tiles, plain; use backend="auto"',
        False,
    ),
    "flash with a cap": Refusal(
        {"backend": "flash", "softcap": 30.0},
        BackendUnavailable,
        'backend="flash" cannot run this call: it has no soft cap (softcap=30). Others that can: tiles,',
        False,
    ),
    "flash with dropout": Refusal(
        {"backend": "flash", "dropout": 0.25},
        BackendUnavailable,
        'backend="flash" cannot run this call: dropout 0.25 needs the matrix of weights, which it never '
        "computes. Others that can: plain;",
        False,
    ),
    "flash with a learned bias": Refusal(
        {"backend": "flash", "bias": normal(T, S).requires_grad_()},
        BackendUnavailable,
        'backend="flash" cannot run this call: it computes no gradient of bias, slopes or relative. Others',
        False,
    ),
    "flash with learned slopes": Refusal(
        {"backend": "flash", "bias": Alibi(normal(H).requires_grad_())},
        BackendUnavailable,
        'backend="flash" cannot run this call: it computes no gradient of bias, slopes or relative.',
        False,
    ),
}

REFUSALS = TENSORS | MASKS | SCORING | RUNNING


def tensors_in(options: dict[str, Any]) -> list[Tensor]:
    actual = []
    for value in options.values():
        if isinstance(value, Mask):
            actual += value.tensors.values()
        elif isinstance(value, (Alibi, Relative)):
            actual.append(inside(value))
        elif isinstance(value, Tensor):
            actual.append(value)
    return [x for x in actual if x.device.type == "cpu"]


def refused(call: Callable[..., Any], options: dict[str, Any], kind: type[Exception], message: str) -> None:
    """The call raises; the inputs stay as they were; what is good still works."""
    inputs = tensors_in(options)
    before = [(x, x.detach().clone(), x._version) for x in inputs]
    with pytest.raises(kind, match=re.escape(message)) as refusal:
        call(**options)
    assert isinstance(refusal.value, hw.errors.HeadwiseError)
    for x, same, version in before:
        assert x._version == version and torch.equal(x, same) and x.grad is None
    output, weights = hw.attention(**good(), causal=True)
    assert output.shape == (B, H, T, DV) and weights.dense().shape == (B, H, T, S)


def ids(name: str) -> str:
    return name.replace(" ", "-")


@pytest.mark.parametrize("name", REFUSALS, ids=ids)
def test_attention_why_and_a_map_refuse(name: str) -> None:
    arguments, kind, message, of_maps = REFUSALS[name]
    refused(hw.attention, good() | arguments, kind, message)
    refused(hw.why, good() | arguments, kind, message)
    if of_maps:
        refused(
            hw.AttentionMap, {key: x for key, x in (good() | arguments).items() if key != "v"}, kind, message
        )


@pytest.mark.parametrize("num_heads", [0, -3])
def test_slopes_for_no_heads_are_refused_with_the_number(num_heads: int) -> None:
    with pytest.raises(ArgumentError, match=f"got {num_heads}"):
        alibi(num_heads)


@pytest.mark.parametrize(
    ("num_heads", "fitting"), [(6, "1, 2, 3, 6"), (7, "1, 7"), (12, "1, 2, 3, 4, 6, 12")]
)
def test_the_choices_of_key_heads_fit(num_heads: int, fitting: str) -> None:
    q = normal(1, num_heads, T, D)
    too_many = normal(1, 5, S, D)
    with pytest.raises(ShapeError, match=f"use one of {fitting} key heads"):
        hw.attention(q, too_many, too_many)
    for choice in map(int, fitting.split(", ")):
        k = normal(1, choice, S, D)
        assert hw.attention(q, k, k)[0].shape == (1, num_heads, T, D)


def test_a_named_backend_never_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.engines.backends import BACKENDS

    def ran(*_: Any, **__: Any) -> Any:
        raise AssertionError("something ran in its place")

    for backend in BACKENDS:
        monkeypatch.setattr(type(backend), "forward", ran)
    for name in ("cudnn", "efficient"):
        with pytest.raises(BackendUnavailable, match=name):
            hw.attention(**good(), backend=name)
    with pytest.raises(BackendUnavailable, match="flash"):
        hw.attention(**good(), backend="flash", softcap=3.0)


def test_learned_bias_is_no_hindrance_where_no_gradient_is_wanted() -> None:
    bias = normal(T, S).requires_grad_()
    with torch.no_grad():
        assert hw.why(**good(), bias=bias).backend == "flash"
        assert hw.attention(**good(), bias=bias, backend="flash")[0].shape == (B, H, T, DV)


@pytest.mark.parametrize("options", [{"dropout": 0.25}, {"backend": "plain"}], ids=["dropout", "plain"])
def test_the_whole_matrix_over_the_budget_is_refused_with_its_size(options: dict[str, Any]) -> None:
    size = 3 * B * H * T * S * 4
    messages = (
        f"plain attention over [B, H, T, S] = {[B, H, T, S]} must fit the memory budget: 5 KiB > 1 KiB; "
        "leave out what needs the full matrix (dropout, forward-mode or second derivatives), or raise the "
        'budget: with headwise.budget.limit("5 KiB")'
    )
    with hw.budget.limit("1 KiB"):
        refused_inside = good()
        with pytest.raises(BudgetExceeded, match=re.escape(messages)):
            hw.attention(**refused_inside, **options)
        assert hw.attention(**refused_inside)[0].shape == (
            B,
            H,
            T,
            DV,
        )  # nothing quadratic: any budget will do
    with hw.budget.limit(size):
        assert hw.attention(**good(), **options)[0].shape == (B, H, T, DV)


def test_second_derivatives_over_the_budget_are_refused() -> None:
    arguments = good()
    arguments["q"].requires_grad_()
    output, _ = hw.attention(**arguments)
    with hw.budget.limit("1 KiB"), pytest.raises(BudgetExceeded, match="5 KiB > 1 KiB"):
        torch.autograd.grad(output.sum(), arguments["q"], create_graph=True)


# What looks odd and is fine


@pytest.mark.parametrize(
    "options",
    [
        {"window": np.int64(3)},
        {"window": [2, 0]},
        {"window": 10**9},
        {"mask": torch.ones(S, dtype=torch.int64)},
        {"mask": torch.ones(T, S)},
        {"mask": Mask.padding(np.array([3, 5]))},
        {"mask": torch.zeros(T, S, dtype=torch.bool)},
        {"bias": torch.zeros(())},
        {"bias": torch.zeros(S, dtype=torch.float64)},
        {"sinks": torch.zeros(H, dtype=torch.bfloat16)},
        {"scale": 0},
        {"dropout": 0},
    ],
    ids=str,
)
def test_what_has_one_meaning_is_taken(options: dict[str, Any]) -> None:
    output, weights = hw.attention(**good(), **options)
    assert output.shape == (B, H, T, DV) and output.dtype == torch.float32
    sums = weights.dense().sum(-1)
    assert bool(torch.isfinite(output).all()) and bool((sums < 1 + 1e-5).all())


def test_an_endless_cap_caps_nothing_or_is_refused() -> None:
    """inf * tanh(s / inf) is no number, which must not come out as the answer."""
    with contextlib.suppress(ArgumentError):
        output, _ = hw.attention(**good(), softcap=math.inf)
        assert torch.equal(output, hw.attention(**good(), backend="tiles")[0])


def test_tensors_without_data_pass_through() -> None:
    """Shape propagation on the meta device, as torch's own attention allows it."""
    options = {name: value.to(META) for name, value in good().items()}
    output, weights = hw.attention(**options, causal=True)
    assert output.shape == (B, H, T, DV) and output.device == META
    assert weights.shape == (B, H, T, S) and weights.dense().device == META
