"""Self-attention without gradients as a GPU is served: the same numbers as the ordinary way, on any device.

Which devices are served so is a list; here the CPU is put on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_one_step import HOLES, every_mask, normal, ordinary_way
from torch import Tensor

import headwise as hw
from headwise.listeners.adapters import attended
from headwise.nn import self_attention
from headwise.nn.as_torch import module as as_torch_module
from heard import Reused, assert_same, both, one_by_one
from judge import error
from small_models import llama, tokens

B, T, E, H = 3, 13, 48, 6
SEVERAL: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "grouped": {"num_kv_heads": 2},
    "scaled, without bias": {"scale": 0.3, "bias": False},
}


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether calls were answered by `served`, with the CPU among the devices that are."""
    calls: list[bool] = []
    ours = self_attention.served

    def served(*args: Any) -> Any:
        made = ours(*args)
        calls.append(made is not None)
        return made

    monkeypatch.setattr(self_attention, "SERVES", ("cpu", "cuda"))
    monkeypatch.setattr(self_attention, "served", served)
    return calls


def module(dtype: torch.dtype, **options: Any) -> hw.MultiHeadAttention:
    torch.manual_seed(3)
    return hw.MultiHeadAttention(E, H, dtype=dtype, **options)


@pytest.mark.thinned(4, slow=2)
@every_mask
@pytest.mark.parametrize("options", SEVERAL.values(), ids=SEVERAL)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_served_is_the_ordinary_way(
    mode: Callable[[], Any], options: dict[str, Any], mask: Callable[[], Any], answered: list[bool]
) -> None:
    mha, x = module(torch.bfloat16, **options), normal(1, B, T, E, dtype=torch.bfloat16)
    truth = hw.MultiHeadAttention(E, H, dtype=torch.float64, **options)
    truth.load_state_dict(mha.state_dict())
    with mode():
        exact, exact_map = truth(x.double(), mask=mask())
        with ordinary_way(mha):
            wanted, wanted_map = mha(x, mask=mask())
        for _ in range(3):  # the third goes by plan
            answered.clear()
            output, weights = mha(x, mask=mask())
            assert answered == [True]
            assert error(output, exact) <= 2 * error(wanted, exact)
            assert error(weights.dense(), exact_map.dense()) <= 2 * error(
                wanted_map.dense(), exact_map.dense()
            )
            assert weights.mask == wanted_map.mask
            assert torch.equal(weights.lse.isneginf(), exact_map.lse.isneginf())
            assert not output[exact == 0].any()


def test_what_is_learned_or_large_is_not_served(
    answered: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    mha, x = module(torch.float32), normal(1, B, T, E, dtype=torch.float32)
    mha(x)
    assert answered == []
    monkeypatch.setattr(self_attention, "MOST_WITHOUT_LSE", B * H * T * T - 1)
    with torch.no_grad():
        mha(x)
        mha(x, need_weights=False)
        mha.out_proj.register_forward_hook(lambda *_: None)
        mha(x, need_weights=False)
    assert answered == [False, True, False]


def test_a_mask_may_be_written_to_after_the_call(answered: list[bool]) -> None:
    mha, x = module(torch.bfloat16), normal(1, B, T, E, dtype=torch.bfloat16)
    for mask in (HOLES.clone()[:, None, None], HOLES.clone(), torch.tensor([13, 7, 1])):
        arguments = mask if mask.ndim == 4 else hw.Mask.padding(mask)
        with torch.no_grad():
            weights = mha(x, mask=arguments)[1]
            before = mha(x, mask=arguments)[1].dense()
            mask.fill_(1)
        assert torch.equal(weights.dense(), before)
    assert answered == [True] * 6


# Torch's class


HIDDEN = torch.triu(torch.ones(T, T, dtype=torch.bool), 1)
PADS = torch.arange(T) >= torch.tensor([13, 7, 2])[:, None]
MASK_ARGUMENTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bool": {"attn_mask": HIDDEN},
    "bool, hint": {"attn_mask": HIDDEN, "is_causal": True},
    "float": {"attn_mask": torch.zeros(T, T).masked_fill(HIDDEN, -torch.inf)},
    "numbers": {"attn_mask": normal(7, T, T, dtype=torch.float32)},
    "each head's": {"attn_mask": normal(8, B * H, T, T, dtype=torch.float32) > 0.8},
    "padding": {"key_padding_mask": PADS},
    "both": {"attn_mask": HIDDEN, "key_padding_mask": PADS},
    "both, hint": {"attn_mask": HIDDEN, "key_padding_mask": PADS, "is_causal": True},
    "numbers and padding": {
        "attn_mask": normal(7, T, T, dtype=torch.float32),
        "key_padding_mask": torch.zeros(B, T).masked_fill(PADS, -torch.inf),
    },
}


@pytest.mark.parametrize("message", MASK_ARGUMENTS.values(), ids=MASK_ARGUMENTS)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("learns", [True, False])
def test_torchs_class_is_answered_by_torchs_function(
    learns: bool, batch_first: bool, message: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    theirs = torch.nn.MultiheadAttention(E, H, batch_first=batch_first)
    ours = hw.nn.MultiheadAttention(E, H, batch_first=batch_first)
    ours.load_state_dict(theirs.state_dict())
    requests: list[bool] = []
    by_torch = as_torch_module._by_torchs_kernel

    def counted(*args: Any) -> Tensor:
        requests.append(True)
        return by_torch(*args)

    monkeypatch.setattr(as_torch_module, "SERVES", ("cpu", "cuda"))
    monkeypatch.setattr(as_torch_module, "_by_torchs_kernel", counted)
    monkeypatch.setattr(as_torch_module, "native", lambda *_: None)  # which a GPU is asked for bare calls
    x = normal(1, B, T, E, dtype=torch.float32)
    x = (x if batch_first else x.transpose(0, 1)).requires_grad_(learns)
    answers = []
    for made in (theirs, ours):
        x.grad = None
        with torch.set_grad_enabled(learns):
            output, weights = made(x, x, x, need_weights=False, **message)
        assert weights is None
        if learns:
            output.square().sum().backward()
        answers.append((output.detach(), x.grad, *(p.grad for p in made.parameters())))
    for actual, wanted in zip(answers[1], answers[0], strict=True):
        torch.testing.assert_close(actual, wanted)
    # with gradients, what is bare, or causal by its hint, is one step of ours
    hinted = message.get("is_causal", False) and "key_padding_mask" not in message
    assert requests == ([] if learns and (not message or hinted) else [True])


# Watched: torch's own function attends, and lse is made of copies when a forward is over


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    calls: list[bool] = []

    def output_alone(*args: Any) -> Any:
        made = attended_alone(*args)
        calls.append(made is not None)
        return made

    attended_alone = attended._output_alone
    monkeypatch.setattr(attended, "LSE_LATER", ("cpu", "cuda"))
    monkeypatch.setattr(attended, "_output_alone", output_alone)
    return calls


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"pooled": 5}, {"keep": False}, {"keep": True}], ids=str)
def test_a_watched_forward_has_the_same_numbers(options: dict[str, Any], alone: list[bool]) -> None:
    model, ids = llama(num_hidden_layers=3).float(), tokens()
    message = model(ids).logits
    with hw.watch(model, **options) as heads:
        assert torch.equal(model(ids).logits, message)  # bit for bit: what attends is what always does
    assert alone == [True]  # the first; the others are like it
    with one_by_one(), hw.watch(model, **options) as wanted:
        model(ids)
    assert_same(heads, wanted)
    if options.get("keep", True):
        for layer in (0, 1, 2):
            torch.testing.assert_close(heads[layer].map.dense(), wanted[layer].map.dense())


@torch.no_grad()
def test_steps_of_generation_have_the_same_numbers(alone: list[bool]) -> None:
    model, ids = llama(num_hidden_layers=2).float(), tokens(2, 5)

    def run() -> Tensor:
        message: Tensor = model.generate(
            ids, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return message

    heads, wanted = both(run, model)
    assert all(alone)
    assert_same(heads, wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_map_without_lse_is_of_q_and_k_as_they_were(mode: Callable[[], Any], alone: list[bool]) -> None:
    torch.manual_seed(0)
    model, x = Reused(2).eval(), torch.randn(3, 5, 8)
    calls: list[Tensor] = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with mode():
        with pytest.MonkeyPatch.context() as patch:

            def looked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                calls.append(torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1))
                return sdpa(q, k, v)

            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", looked)
            model(x)
        with hw.watch(model, keep=True) as heads:
            model(x)  # writes to q and k as it goes on, and clears them in the end
    assert alone == [True, True]
    for layer, wanted in enumerate(calls):
        torch.testing.assert_close(heads[layer].map.dense(), wanted)


@torch.no_grad()
def test_whoever_looks_at_once_gets_lse_at_once(alone: list[bool]) -> None:
    model, ids = llama(num_hidden_layers=2).float(), tokens()
    with hw.watch(model), hw.ablate(model, [(0, 1)]):
        model(ids)
    with hw.watch(model, patterns=True):
        model(ids)
    assert alone == []
