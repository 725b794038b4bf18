"""Projections, attention and out_proj as one step: the same numbers as the ordinary way, for fewer steps.

Everyday calls of both modules go this way. What is counted here, nodes and calls of Python, is the same on
every machine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw
from as_torch_cases import as_if_large
from headwise import Mask
from headwise.nn import MultiheadAttention, one_step, ragged, self_attention
from judge import error, largest

B, T, E, H, HK, D = 3, 13, 30, 6, 2, 5
LENGTHS = [13, 7, 0]
REAL = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
HOLES = REAL & (torch.arange(T) % 3 != 0)  # the first key is hidden: causal queries may see nothing
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "padding tensor": lambda: REAL[:, None, None],
    "lengths": lambda: Mask.padding(LENGTHS),
    "bool padding": lambda: Mask.padding(REAL),
    "holes": lambda: Mask.padding(HOLES),
    "causal rule": lambda: Mask.causal(),
    "causal and lengths": lambda: Mask.causal() & Mask.padding(LENGTHS),
}
every_mask = pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def module(dtype: torch.dtype = torch.float64, **options: Any) -> hw.MultiHeadAttention:
    torch.manual_seed(3)
    made = hw.MultiHeadAttention(E, H, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)  # biases are not 0
    return made.to(dtype)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often a module's call was one step."""
    calls: list[int] = []

    def run(*args: Any) -> Any:
        calls.append(1)
        return one_step.run(*args)

    monkeypatch.setattr(self_attention, "run", run)
    yield calls
    monkeypatch.undo()


@contextmanager
def ordinary_way(mha: hw.MultiHeadAttention) -> Iterator[None]:
    """A hook that changes nothing is reason enough."""
    handle = mha.k_proj.register_forward_pre_hook(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


def answers(mha: hw.MultiHeadAttention, x: Tensor, mask: Any, looked: bool) -> dict[str, Tensor]:
    """Output, map and gradients of all that has one."""
    leaf = x.detach().clone().requires_grad_()
    output, weights = mha(leaf, mask=mask)
    assert weights is not None
    loss = (output * normal(5, *output.shape, dtype=x.dtype)).sum()
    dense = weights.dense()
    if looked:
        loss = loss + (dense * normal(6, *dense.shape, dtype=x.dtype)).sum()
    named = {"x": leaf, **dict(mha.named_parameters())}
    learning = {name: p for name, p in named.items() if p.requires_grad}
    grads = torch.autograd.grad(loss, [*learning.values()])
    actual = {f"d {name}": grad for name, grad in zip(learning, grads, strict=True)}
    statistics = weights.statistics("entropy").entropy
    return {"output": output, "weights": dense, "lse": weights.lse, "entropy": statistics, **actual}


def assert_alike(actual: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert actual.keys() == wanted.keys()
    for name, want in wanted.items():
        assert actual[name].dtype == want.dtype and actual[name].shape == want.shape, name
        assert torch.equal(actual[name].isinf(), want.isinf()), name
        near = 64 * torch.finfo(dtype).eps
        finite, expected = (x.detach().masked_fill(x.isinf(), 0).nan_to_num() for x in (actual[name], want))
        assert torch.equal(actual[name].isnan(), want.isnan()), name
        assert error(finite, expected) <= near * max(1.0, largest(expected)), name


# MultiHeadAttention


@pytest.mark.thinned(6, slow=4)
@every_mask
@pytest.mark.parametrize("looked", [False, True], ids=["output", "and weights"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"num_kv_heads": HK}, {"head_dim": 7, "scale": 0.3}, {"bias": False}],
    ids=["full", "causal", "grouped", "wide", "without bias"],
)
def test_one_step_is_the_ordinary_way(
    options: dict[str, Any],
    dtype: torch.dtype,
    looked: bool,
    mask: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mha, x = module(dtype, **options), normal(1, B, T, E, dtype=dtype)
    with ordinary_way(mha):
        wanted = answers(mha, x, mask(), looked)
    with counted(monkeypatch) as visible:
        actual = answers(mha, x, mask(), looked)
    assert visible == [1]
    assert_alike(actual, wanted, dtype)


@every_mask
@pytest.mark.parametrize("causal", [False, True])
def test_without_gradients_one_step_is_the_ordinary_way(
    causal: bool, mask: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mha, x = module(causal=causal), normal(1, B, T, E)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            with ordinary_way(mha):
                output, weights = mha(x, mask=mask())
                wanted = {"output": output, "weights": weights.dense(), "lse": weights.lse}
            with counted(monkeypatch) as visible:
                output, weights = mha(x, mask=mask())
            assert visible == [1]
            assert_alike({"output": output, "weights": weights.dense(), "lse": weights.lse}, wanted, x.dtype)
            with ordinary_way(mha):
                assert mha(x, mask=mask())[1].mask == weights.mask


@pytest.mark.parametrize("frozen", ["inputs", "k_proj.weight", "projections", "out_proj", "biases"])
def test_frozen_parts_get_no_gradient_and_change_no_other(frozen: str) -> None:
    mha, x = module(), normal(1, B, T, E)
    kinds = {"projections": ("q_proj", "k_proj", "v_proj"), "biases": ("bias",), "inputs": ()}
    for name, parameter in mha.named_parameters():
        if any(part in name for part in kinds.get(frozen, (frozen,))):
            parameter.requires_grad_(False)

    def gradients() -> dict[str, Tensor]:
        leaf = x.clone().requires_grad_(frozen != "inputs")
        mha.zero_grad()
        mha(leaf, mask=Mask.padding(LENGTHS))[0].square().sum().backward()
        named = {"x": leaf, **dict(mha.named_parameters())}
        return {name: p.grad for name, p in named.items() if p.grad is not None}

    with ordinary_way(mha):
        wanted = gradients()
    assert_alike(gradients(), wanted, x.dtype)


def test_what_was_attended_to_may_be_written_to_where_no_weight_learns() -> None:
    """`x += mha(x)` beside frozen projections: torch keeps no input there, and neither does one step."""
    mha = module().requires_grad_(False)
    leaf = normal(1, B, T, E).requires_grad_()
    x = leaf * 1
    wanted = torch.autograd.grad(x.detach().requires_grad_().mul(1).add(mha(x)[0]).sin().sum(), leaf)[0]
    x = leaf * 1
    output = mha(x)[0]
    y = x.detach().clone() + output
    x.add_(1)
    assert error(torch.autograd.grad(y.sin().sum(), leaf)[0], wanted) < 1e-12


def test_a_mask_may_be_written_to_after_the_call() -> None:
    mha, x, real = module(), normal(1, B, T, E), REAL.clone()
    output, weights = mha(x, mask=real[:, None, None])
    before = torch.autograd.grad(output.sum(), mha.q_proj.weight, retain_graph=True)[0]
    shown = mha(x, mask=real[:, None, None])[1].dense()
    real.fill_(True)
    assert torch.equal(torch.autograd.grad(output.sum(), mha.q_proj.weight)[0], before)
    assert torch.equal(weights.dense(), shown)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"causal": True, "num_kv_heads": 1}], ids=["full", "causal"])
def test_a_module_can_be_differentiated_twice(options: dict[str, Any]) -> None:
    mha = hw.MultiHeadAttention(6, 2, dtype=torch.float64, **options)
    x = normal(1, 2, 3, 6).requires_grad_()
    for mask in (None, Mask.padding([3, 2])):

        def call(x: Tensor, *parameters: Tensor, mask: Any = mask) -> tuple[Tensor, Tensor]:
            named = dict(zip(dict(mha.named_parameters()), parameters, strict=True))
            output, weights = torch.func.functional_call(mha, named, (x,), {"mask": mask})
            return output, weights.dense()

        inputs = (x, *mha.parameters())
        assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)
        for parameter in mha.q_proj.parameters():
            parameter.requires_grad_(False)
        (first,) = torch.autograd.grad(mha(x, mask=mask)[0].sin().sum(), x, create_graph=True)
        actual = torch.autograd.grad(first.square().sum(), x)[0]
        with ordinary_way(mha):
            (first,) = torch.autograd.grad(mha(x, mask=mask)[0].sin().sum(), x, create_graph=True)
            wanted = torch.autograd.grad(first.square().sum(), x)[0]
        assert error(actual, wanted) < 1e-12
        mha.requires_grad_(True)


def test_large_scores_go_back_as_exactly_as_the_ordinary_way() -> None:
    """A fused kernel's way back is off by percents where lse is in the thousands."""
    mha, x = module(torch.float32), normal(1, B, T, E, dtype=torch.float32) * 60
    exact = module()
    exact.load_state_dict(mha.state_dict())
    truth = answers(exact, x.double(), Mask.padding(LENGTHS), looked=False)
    actual = answers(mha, x, Mask.padding(LENGTHS), looked=False)
    with ordinary_way(mha):
        plain = answers(mha, x, Mask.padding(LENGTHS), looked=False)
    assert float(truth["lse"].nan_to_num(0, 0, 0).abs().max()) > 1000
    for name, true in truth.items():
        if name.startswith("d "):
            near = 3 * error(plain[name].double(), true) + 64 * torch.finfo(torch.float32).eps * largest(true)
            assert error(actual[name].double(), true) <= near, name


def test_whoever_could_notice_keeps_a_module_from_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    mha, x = module(torch.float32), normal(1, B, T, E, dtype=torch.float32)

    def is_one_step(call: Callable[[], Any] = lambda: mha(x)) -> bool:
        with counted(monkeypatch) as visible:
            call()
        return bool(visible)

    assert is_one_step()
    for layer in (mha.q_proj, mha.k_proj, mha.v_proj):
        for register in (layer.register_forward_hook, layer.register_full_backward_hook):
            handle = register(lambda *_: None)
            assert not is_one_step()
            handle.remove()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_one_step()
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        assert not is_one_step()
    assert not is_one_step(lambda: torch.func.vmap(lambda x: mha(x[None])[0])(x))
    assert not is_one_step(lambda: torch.func.grad(lambda x: mha(x)[0].sum())(x))
    assert not is_one_step(lambda: mha(x, x, x))
    assert not is_one_step(lambda: mha(x, mask=Mask.window(3)))
    assert not is_one_step(lambda: mha(x, mask=Mask.padding(LENGTHS, LENGTHS)))
    assert not is_one_step(lambda: mha(x, mask=REAL[:, None, None].int()))
    assert not is_one_step(lambda: module(torch.float32, dropout=0.1)(x))
    assert not is_one_step(lambda: module(torch.float32, softcap=5.0)(x))
    mha.v_proj.weight.data = mha.v_proj.weight.data.clone()
    assert not is_one_step()
    assert is_one_step(lambda: module(torch.float32, dropout=0.1).eval()(x))


@pytest.mark.parametrize(
    "mask", [Mask.padding([13, 14, 1]), Mask.padding([13, 1]), torch.ones(2, 1, 1, T, dtype=torch.bool)]
)
def test_padding_that_does_not_fit_is_refused_as_ever(mask: Any) -> None:
    with pytest.raises(hw.errors.MaskError):
        module()(normal(1, B, T, E), mask=mask)


# lengths=


@pytest.mark.parametrize("counts", [[13, 7, 0], [0, 11, 0], [5, 13, 2], [7]], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True, "num_kv_heads": HK}], ids=["full", "causal"])
def test_lengths_in_one_step_are_the_ordinary_way(
    options: dict[str, Any], counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "SHORT", 0)  # as if sequences were long
    mha, x = module(**options), normal(1, len(counts), T, E).requires_grad_()
    x.data[torch.arange(T) >= torch.tensor(counts)[:, None]] = torch.nan  # what stands at padding is not read
    leaves = (x, *mha.parameters())

    def outputs_by_lengths() -> list[Tensor]:
        output, weights = mha(x, lengths=counts)
        loss = output.sin().sum() + weights.dense().square().sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        second = torch.autograd.grad(first[0].sin().sum(), leaves)
        return [
            output,
            weights.dense(),
            weights.lse,
            *first,
            *second,
            *torch.autograd.grad(mha(x, lengths=counts)[0].cos().sum(), leaves),
        ]

    with ordinary_way(mha):
        wanted = outputs_by_lengths()
    calls: list[int] = []
    run = one_step.run
    monkeypatch.setattr(self_attention, "run", lambda *args: calls.append(1) or run(*args))
    for current, listed in zip(outputs_by_lengths(), wanted, strict=True):
        assert torch.equal(current.isneginf(), listed.isneginf())
        assert error(current.nan_to_num(neginf=0), listed.nan_to_num(neginf=0)) < 1e-11
    assert calls == [1, 1]
    assert nodes(mha(x, lengths=counts)[0]) <= 5  # one, and packing there and back


# torch's class, by the matrix of few weights

PADDING = torch.arange(T) >= torch.tensor([[13], [7], [2]])
TORCHS: dict[str, dict[str, Any]] = {
    "none": {},
    "bool causal": {"attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1)},
    "float causal": {"attn_mask": torch.full((T, T), -torch.inf).triu(1)},
    "hint": {"attn_mask": torch.full((T, T), -torch.inf).triu(1), "is_causal": True},
    "bool padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(B, T).masked_fill(PADDING, -torch.inf)},
    "added": {"attn_mask": normal(8, B * H, T, T, dtype=torch.float32)},
    "both": {
        "attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1),
        "key_padding_mask": torch.arange(T) < torch.tensor([[0], [2], [3]]),  # some queries see nothing
    },
}


def classes(dtype: torch.dtype, **options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    theirs = nn.MultiheadAttention(E, H, dtype=dtype, **options)
    ours = MultiheadAttention(E, H, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.thinned(99)
@pytest.mark.parametrize("average", [None, True, False], ids=["output", "mean", "heads"])
@pytest.mark.parametrize("masks", ["none", "bool padding", "added", "sees nothing"])
def test_few_weights_can_be_differentiated_twice(masks: str, average: bool | None) -> None:
    ours = MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64, empty_rows="zero")
    x = normal(1, 2, 3, 6).requires_grad_()
    options = {
        "none": {},
        "bool padding": {"key_padding_mask": torch.arange(3) >= torch.tensor([[2], [3]])},
        "added": {"attn_mask": normal(2, 3, 3)},
        "sees nothing": {"key_padding_mask": torch.tensor([[True] * 3, [False] * 3])},
    }[masks]

    def call(x: Tensor, *parameters: Tensor) -> Any:
        named = dict(zip(dict(ours.named_parameters()), parameters, strict=True))
        arguments = {**options, "need_weights": average is not None, "average_attn_weights": bool(average)}
        actual = torch.func.functional_call(ours, named, (x, x, x), arguments)
        return actual[0] if average is None else actual

    inputs = (x, *ours.parameters())
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def test_a_first_key_hidden_by_a_number_leaves_whole_rows_nan() -> None:
    """Tiles skipped the causal half of rows that saw nothing: NaN stood in the other half alone."""
    theirs, ours = classes(torch.float64, batch_first=True)
    x, padding = normal(1, B, T, E), normal(2, B, T)
    padding[1, :3] = -torch.inf
    options = {"attn_mask": torch.ones(T, T, dtype=torch.bool).triu(1), "key_padding_mask": padding}
    with torch.no_grad(), as_if_large(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual, wanted = (attend.eval()(x, x, x, **options)[1] for attend in (ours, theirs))
    assert torch.equal(actual.isnan(), wanted.isnan()) and actual.isnan().any()
    assert error(actual.nan_to_num(), wanted.nan_to_num()) < 1e-12


def test_weights_require_no_gradient_where_only_the_last_projection_learns() -> None:
    attend, x = module(torch.float32), normal(1, B, T, E, dtype=torch.float32)
    attend.requires_grad_(False)
    attend.out_proj.requires_grad_(True)
    output, visible = attend(x)
    assert output.requires_grad
    assert not visible.dense().requires_grad and not visible.mean_heads().requires_grad


# How many steps


def nodes(output: Tensor) -> int:
    """Of the graph behind it, but for the leaves."""
    visited, stack = set(), [output.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in visited:
            visited.add(node)
            stack += [before for before, _ in node.next_functions]
    return sum("AccumulateGrad" not in node.name() for node in visited)


def by_hand(x: Tensor, qkv: nn.Linear, out: nn.Linear) -> Tensor:
    q, k, v = qkv(x).view(B, T, 3, H, E // H).permute(2, 0, 3, 1, 4)
    return out(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, E))


@pytest.mark.parametrize(
    "mask", [None, REAL[:, None, None], Mask.padding(LENGTHS)], ids=["none", "tensor", "lengths"]
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_in_training_is_one_node_where_by_hand_there_are_many(causal: bool, mask: Any) -> None:
    x = normal(1, B, T, E, dtype=torch.float32)
    hand = nodes(by_hand(x, nn.Linear(E, 3 * E), nn.Linear(E, E)))
    ours = nodes(module(torch.float32, causal=causal)(x, mask=mask)[0])
    assert ours == 1 < hand


@pytest.mark.parametrize("masks", TORCHS.values(), ids=TORCHS)
@pytest.mark.parametrize("average", [None, True, False], ids=["output", "mean", "heads"])
def test_a_call_of_torchs_class_in_training_is_one_node(average: bool | None, masks: dict[str, Any]) -> None:
    """Beside weights out_proj stays apart, so that a loss of the weights alone does not need it."""
    _, ours = classes(torch.float32, batch_first=True)
    x = normal(1, B, T, E, dtype=torch.float32)
    options = {**masks, "need_weights": average is not None, "average_attn_weights": bool(average)}
    output = ours(x, x, x, **options)[0]
    adds = "attn_mask" in masks and masks["attn_mask"].dim() == 3
    if average is not None or not adds:  # of a mask that adds numbers, outputs are attention's
        apart = 0 if average is None else nodes(ours.out_proj(x.requires_grad_()))
        assert nodes(output) == 1 + apart
