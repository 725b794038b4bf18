"""Weights that are written to, copied, moved or named by others: what packing them must never get wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from attention_modules import PROJECTIONS, B, E, H, T, module, normal, packed
from headwise.errors import ArgumentError, MaskError
from judge import error, largest


def x() -> Tensor:
    return normal(0, B, T, E)


# Written to before the way back

WRITTEN = "modified by an inplace operation"


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("frozen", [None, "q_proj", "v_proj"])
def test_a_weight_written_to_before_the_way_back_is_noticed(name: str, frozen: str | None) -> None:
    """The product is of the block, whose version nobody counts: the gradient of x came out wrong, silently,
    where only that was asked for."""
    mha, arguments = module(), x().requires_grad_()
    if frozen is not None:
        mha.get_submodule(frozen).requires_grad_(False)
    output = mha(arguments)[0]
    with torch.no_grad():
        mha.get_parameter(f"{name}.weight").mul_(3)
    with pytest.raises(RuntimeError, match=WRITTEN):
        torch.autograd.grad(output.sum(), arguments)


def test_what_no_gradient_needs_may_be_written_to() -> None:
    mha, arguments = module(), x()
    output = mha(arguments)[0]
    expected = torch.autograd.grad(output.sum(), mha.k_proj.weight, retain_graph=True)[0]
    with torch.no_grad():  # x wants no gradient, and no gradient ever needs a bias
        mha.q_proj.weight.mul_(3)
        mha.v_proj.bias.mul_(3)
    assert torch.equal(torch.autograd.grad(output.sum(), mha.k_proj.weight)[0], expected)


# Copied


@pytest.mark.parametrize("name", ["first alone", "first for all"])
def test_a_bias_that_begins_where_it_did_and_is_another_is_used(name: str) -> None:
    """Its address was all that was looked at: the old bias was used, off by 1."""
    mha = module()
    nn.init.normal_(mha.v_proj.bias)
    first = mha.v_proj.bias.data[:1]
    mha.v_proj.bias.data = first if name == "first alone" else first.expand(E)
    wanted = copy.deepcopy(mha)
    wanted.v_proj.bias = nn.Parameter(first.repeat(E))
    assert error(mha(x())[0], wanted(x())[0]) < 1e-6
    mha(x())[0].sum().backward()
    with torch.no_grad():
        assert error(mha(x())[0], wanted(x())[0]) < 1e-6


def test_a_bias_that_was_deleted_is_missed_as_by_torchs_layer() -> None:
    mha = hw.MultiHeadAttention(E, H, bias=False)
    mha(x().float())
    del mha.k_proj.bias
    with pytest.raises(AttributeError, match="bias"):
        mha(x().float())
    copy.deepcopy(mha)


def test_a_shallow_copy_leaves_the_original_where_it_was() -> None:
    mha = module()
    places = [parameter.data_ptr() for parameter in mha.parameters()]
    twin = copy.copy(mha)
    assert [parameter.data_ptr() for parameter in mha.parameters()] == places
    assert packed(mha) and packed(twin)
    assert torch.equal(twin(x())[0], mha(x())[0])


# Moved by others


@pytest.mark.parametrize("name", ["load", "cast", "nothing"])
def test_weights_in_somebodys_buffer_stay_there(name: str) -> None:
    """Optimisers that flatten lay all parameters in one buffer and step that."""
    mha, state = module(), module().state_dict()
    parameters = list(mha.parameters())
    flat = torch.cat([parameter.data.flatten() for parameter in parameters])
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.data = part.view_as(parameter)
    if name == "load":
        mha.load_state_dict(state)
    elif name == "cast":
        mha.double()
    flat.zero_()
    assert not any(parameter.any() for parameter in mha.parameters())
    assert not mha(x())[0].any()


def test_a_hook_is_no_reason_to_move_weights() -> None:
    mha = module()
    places = [parameter.data_ptr() for parameter in mha.parameters()]
    hook = mha.q_proj.register_forward_hook(lambda *_: None)
    mha.load_state_dict(module().state_dict())
    mha.double()
    assert [parameter.data_ptr() for parameter in mha.parameters()] == places
    assert not packed(mha)
    hook.remove()
    assert packed(mha)


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def test_torch_may_swap_parameters(swapping: None) -> None:
    mha = module()
    with torch.no_grad():  # a graph that holds the parameters would keep them from being swapped
        expected = mha(x())[0]
        mha.float().double()
        assert packed(mha) and error(mha(x())[0], expected) <= 1e-6
        mha.load_state_dict(module().state_dict())
        assert error(mha(x())[0], expected) <= 1e-12


# Changed by others


def test_a_forward_that_everybody_gets_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, plain = [], nn.Linear.forward

    def counted(self: nn.Linear, arguments: Tensor) -> Tensor:
        calls.append(self)
        return plain(self, arguments)

    mha = module()
    monkeypatch.setattr(nn.Linear, "forward", counted)
    with torch.no_grad():
        mha(x())
    assert calls == [getattr(mha, name) for name in PROJECTIONS]


def test_weights_kept_elsewhere_until_they_are_needed() -> None:
    """As offloading does it: the weights on meta, the layer's own forward brings them."""
    mha = module()
    expected = mha(x())[0]
    for layer in (getattr(mha, name) for name in PROJECTIONS):
        saved = {name: parameter.detach() for name, parameter in layer.named_parameters()}
        layer.to("meta")
        layer.forward = lambda arguments, saved=saved: nn.functional.linear(
            arguments, saved["weight"], saved["bias"]
        )  # type: ignore[method-assign]
    assert error(mha(x())[0], expected) <= 1e-14


def test_a_hook_may_cast_what_comes_in() -> None:
    mha = module()
    for layer in (mha.q_proj, mha.k_proj, mha.v_proj):
        layer.register_forward_pre_hook(lambda _, args: (args[0].double(),))
    assert error(mha(x().float())[0], mha(x())[0]) <= 1e-5


# Named by others


def test_other_names_beside_own_ones_are_unexpected() -> None:
    mha = module()
    state = module().state_dict()
    for name in ("query", "key", "value"):
        state[f"{name}.weight"] = torch.full((E, E), 7.0, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*query\.weight"):
        mha.load_state_dict(state)
    actual = mha.load_state_dict(state, strict=False)
    assert sorted(actual.unexpected_keys) == ["key.weight", "query.weight", "value.weight"]
    assert not (mha.q_proj.weight == 7).any()


def test_a_subclass_keeps_its_own_children() -> None:
    class Wider(hw.MultiHeadAttention):
        def __init__(self) -> None:
            super().__init__(E, H, dtype=torch.float64)
            self.to_q, self.to_k, self.to_v = (nn.Linear(E, E, dtype=torch.float64) for _ in range(3))

    wider, other = Wider(), Wider()
    wider.load_state_dict(other.state_dict())
    assert torch.equal(wider.to_q.weight, other.to_q.weight)
    assert torch.equal(wider.q_proj.weight, other.q_proj.weight)


def test_bert_s_dotted_names_load() -> None:
    theirs = {f"self.{name}": nn.Linear(E, E, dtype=torch.float64) for name in ("query", "key", "value")}
    theirs["output.dense"] = nn.Linear(E, E, dtype=torch.float64)
    state = {
        f"{name}.{end}": value for name, their in theirs.items() for end, value in their.state_dict().items()
    }
    mha = module()
    mha.load_state_dict(state)
    assert torch.equal(mha.v_proj.weight, theirs["self.value"].weight)
    assert torch.equal(mha.out_proj.bias, theirs["output.dense"].bias)


# The rest


def test_conversions_draw_no_random_numbers() -> None:
    theirs = nn.MultiheadAttention(E, H)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    hw.MultiHeadAttention.from_torch(theirs).to_torch()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_missing_bias_does_not_begin_to_learn_in_torchs_class() -> None:
    twin = module(bias=False, out_bias=True).to_torch()
    assert not twin.in_proj_bias.requires_grad and not twin.in_proj_bias.any()
    assert twin.out_proj.bias.requires_grad


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])
def test_complex_numbers_are_refused_in_words(gradients: bool) -> None:
    mha = hw.MultiHeadAttention(E, H, dtype=torch.complex64)
    with torch.set_grad_enabled(gradients), pytest.raises(ArgumentError, match=r"floating point.*complex64"):
        mha(torch.randn(B, T, E, dtype=torch.complex64))


def test_a_padding_mask_of_another_batch_is_called_a_mask() -> None:
    with pytest.raises(MaskError, match=r"mask must broadcast to .*\[3, 5, 7, 7\]: got \[4, 1, 1, 7\]"):
        module()(x(), mask=torch.ones(4, 1, 1, T))


@pytest.mark.parametrize("sink", [0.0, 10.0, 15.0, 20.0])
def test_gradients_through_weights_beside_a_sink_that_takes_nearly_all(sink: float) -> None:
    """1 - sink's share cancels: gradients of 1e-7 were off by as much."""
    random = torch.Generator().manual_seed(3)
    q, k = (torch.randn(2, 3, 11, 16, dtype=torch.float64, generator=random) for _ in range(2))
    pull = torch.randn(2, 3, 11, 11, dtype=torch.float64, generator=random)
    sinks = torch.full((3,), sink, dtype=torch.float64)

    def gradients(dtype: torch.dtype, plain: bool) -> tuple[Tensor, ...]:
        leaves = [leaf.to(dtype).requires_grad_() for leaf in (q, k, sinks)]
        if plain:
            scores = leaves[0] @ leaves[1].mT / 4
            column = leaves[2][:, None, None].expand(2, 3, 11, 1)
            weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
        else:
            weights = hw.AttentionMap(leaves[0], leaves[1], sinks=leaves[2]).dense()
        return torch.autograd.grad((weights * pull.to(dtype)).sum(), leaves)

    truth, plain, ours = (
        gradients(torch.float64, True), gradients(torch.float32, True), gradients(torch.float32, False),
    )  # fmt: skip
    for mine, theirs, true in zip(ours, plain, truth, strict=True):
        assert error(mine, true) <= 3 * (error(theirs, true) + 1.2e-7 * 4 * largest(true))
