"""What hooks and tools find in a `MultiHeadAttention`: four ordinary layers, their weights and their names.

Sizes: E 30 = H 5 * D 6, B 3, T 7, S 11; grouped: H 6 over Hk 3, D 5. Everything is float64.
"""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from attention_modules import PROJECTIONS, B, E, H, S, T, assert_same, module, normal, packed
from headwise import Mask, MultiHeadAttention, reference
from headwise.errors import ArgumentError, ShapeError
from judge import assert_judged, error
from model_families import not_before

Affine = tuple[Tensor, Tensor | None]  # a weight [out, in] and a bias [out]


def affine(layer: Any) -> Affine:
    return layer.weight, layer.bias


def by_hand(
    mha: MultiHeadAttention,
    query: Tensor,
    memory: Tensor | None = None,
    **replaced: Affine | Callable[..., Tensor],
) -> Tensor:
    """The output written out in plain torch; `replaced` says what stands in the place of a projection."""
    memory = query if memory is None else memory

    def apply(name: str, x: Tensor) -> Tensor:
        stands = replaced[name] if name in replaced else affine(getattr(mha, name))
        return linear(x, *stands) if isinstance(stands, tuple) else stands(x)

    def heads(x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, -1)).transpose(1, 2)

    q = heads(apply("q_proj", query), mha.num_heads)
    k, v = (heads(apply(name, memory), mha.num_kv_heads) for name in ("k_proj", "v_proj"))
    out = reference.attention(q, k, v, mask=Mask.causal() if mha.causal else None, sinks=mha.sinks)[0]
    return apply("out_proj", out.transpose(1, 2).flatten(2))


def inputs(crosses: bool) -> tuple[Tensor, ...]:
    return (normal(1, B, T, E), normal(2, B, S, E)) if crosses else (normal(1, B, T, E),)


def output(mha: nn.Module, query: Tensor, memory: Tensor | None = None) -> Tensor:
    actual: Tensor = mha(query, memory, memory)[0]
    return actual


every_crossing = pytest.mark.parametrize("crosses", [False, True], ids=["self", "cross"])
every_projection = pytest.mark.parametrize("name", PROJECTIONS)
with_and_without_gradients = pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])


# Hooks


def shapes(crosses: bool) -> dict[str, tuple[list[int], list[int]]]:
    """What goes into each projection of 6 heads over 3, and what comes out."""
    length = S if crosses else T
    return {
        "q_proj": ([B, T, 30], [B, T, 30]),
        "k_proj": ([B, length, 30], [B, length, 15]),
        "v_proj": ([B, length, 30], [B, length, 15]),
        "out_proj": ([B, T, 30], [B, T, 30]),
    }


@with_and_without_gradients
@every_crossing
def test_hooks_see_what_goes_into_every_projection_and_what_comes_out(crosses: bool, gradients: bool) -> None:
    mha = module(E, 6, num_kv_heads=3)
    calls: dict[str, list[Any]] = {name: [] for name in PROJECTIONS}
    for name in PROJECTIONS:
        layer = getattr(mha, name)
        layer.register_forward_pre_hook(lambda _, args, name=name: calls[name].append(list(args[0].shape)))
        layer.register_forward_hook(lambda _, args, out, name=name: calls[name].append(list(out.shape)))
    with torch.set_grad_enabled(gradients):
        actual = output(mha, *inputs(crosses))
    assert {name: tuple(both) for name, both in calls.items()} == shapes(crosses)
    assert_same([actual], [by_hand(mha, *inputs(crosses))])


@pytest.mark.parametrize("early", [False, True], ids=["hook", "pre-hook"])
@every_crossing
def test_hooks_on_the_way_back_see_the_gradients_of_every_projection(crosses: bool, early: bool) -> None:
    mha = module(E, 6, num_kv_heads=3)
    visible: dict[str, Any] = {}
    for name in PROJECTIONS:

        def back(_: Any, *grads: Any, name: str = name) -> None:
            visible[name] = tuple(list(grad.shape) for (grad,) in grads)

        layer = getattr(mha, name)
        (layer.register_full_backward_pre_hook if early else layer.register_full_backward_hook)(back)
    leaves = [x.requires_grad_() for x in inputs(crosses)]
    actual = torch.autograd.grad(output(mha, *leaves).sin().sum(), [*leaves, *mha.parameters()])
    assert visible == {name: both[1:] if early else both for name, both in shapes(crosses).items()}
    expected = torch.autograd.grad(by_hand(mha, *leaves).sin().sum(), [*leaves, *mha.parameters()])
    assert_same(actual, expected)


@with_and_without_gradients
@every_projection
@every_crossing
def test_a_hook_that_changes_an_output_changes_the_result(crosses: bool, name: str, gradients: bool) -> None:
    mha = module()
    layer, plain = getattr(mha, name), by_hand(mha, *inputs(crosses))
    weight, bias = affine(layer)
    assert bias is not None
    with torch.set_grad_enabled(gradients):
        handle = layer.register_forward_hook(lambda _, args, out: 2 * out)
        doubled = by_hand(mha, *inputs(crosses), **{name: (2 * weight, 2 * bias)})
        assert_same([output(mha, *inputs(crosses))], [doubled])
        assert name == "out_proj" or not packed(mha)
        handle.remove()

        handle = layer.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        moved = by_hand(mha, *inputs(crosses), **{name: (weight, bias + weight.sum(1))})
        assert_same([output(mha, *inputs(crosses))], [moved])
        handle.remove()
        assert packed(mha)
        assert_same([output(mha, *inputs(crosses))], [plain])


@with_and_without_gradients
def test_hooks_on_all_modules_there_are_see_every_projection(gradients: bool) -> None:
    mha, visible = module(), []
    kinds = (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
    )
    for kind in kinds:
        handle = kind(lambda layer, *rest: visible.append(layer))
        try:
            with torch.set_grad_enabled(gradients):
                output(mha, normal(1, B, T, E))
        finally:
            handle.remove()
        expected = {mha.q_proj, mha.k_proj, mha.v_proj, mha.out_proj, mha}
        assert len(visible) == 5 and set(visible) == expected and packed(mha)
        visible.clear()


def test_hooks_on_weights_see_their_gradients() -> None:
    mha, x = module(), normal(1, B, T, E)
    plain = torch.autograd.grad(output(mha, x).sin().sum(), [mha.q_proj.weight, mha.k_proj.weight])
    calls: list[Tensor] = []
    mha.q_proj.weight.register_hook(lambda grad: 2 * grad)
    mha.k_proj.weight.register_post_accumulate_grad_hook(lambda weight: calls.append(weight.grad.clone()))
    assert packed(mha)
    output(mha, x).sin().sum().backward()
    assert_same([mha.q_proj.weight.grad, calls[0]], [2 * plain[0], plain[1]])


# Projections that are replaced


class Lora(nn.Module):
    """A frozen layer and a small correction: W x + b + U D x."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, dtype=base.weight.dtype)
        self.up = nn.Linear(rank, base.out_features, bias=False, dtype=base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        corrected: Tensor = self.base(x) + self.up(self.down(x))
        return corrected


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Negated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def lora(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    new = Lora(getattr(mha, name), 2)
    setattr(mha, name, new)
    return lambda: (new.base.weight + new.up.weight @ new.down.weight, new.base.bias)


def sequential(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    first, second = getattr(mha, name), nn.Linear(E, E, dtype=torch.float64)
    setattr(mha, name, nn.Sequential(first, nn.Dropout(0.0), second))
    return lambda: (second.weight @ first.weight, linear(first.bias, second.weight, second.bias))


def parametrized(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    layer = getattr(mha, name)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return lambda: (2 * layer.parametrizations.weight.original, layer.bias)


def pruned(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    layer = prune.l1_unstructured(getattr(mha, name), "weight", amount=0.5)
    return lambda: (layer.weight_orig * layer.weight_mask, layer.bias)


def normed(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    layer = weight_norm(getattr(mha, name))
    length, way = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    with torch.no_grad():
        length.mul_(1.5)
    return lambda: (length * way / way.norm(dim=1, keepdim=True), layer.bias)


def spectral(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    """In evaluation: in training every look at the weight is one more step of its power iteration."""
    layer = spectral_norm(getattr(mha, name)).eval()
    weight, norm = layer.parametrizations.weight.original, layer.parametrizations.weight[0]
    return lambda: (weight / (norm._u @ (weight @ norm._v)), layer.bias)


def other_forward(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    """An instance's own forward in the place of its class's, which is how accelerate moves weights about."""
    layer = getattr(mha, name)
    old = layer.forward
    layer.forward = lambda x: 2 * old(x)
    return lambda: (2 * layer.weight, 2 * layer.bias)


def subclass(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    new = Negated(E, E, dtype=torch.float64)
    setattr(mha, name, new)
    return lambda: (-new.weight, -new.bias)


def around_the_same_weight(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    """Another layer with the very parameters of the one before it."""
    new, old = Negated(E, E, dtype=torch.float64), getattr(mha, name)
    new.weight, new.bias = old.weight, old.bias
    setattr(mha, name, new)
    return lambda: (-new.weight, -new.bias)


def another_layer(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    new = nn.Linear(E, E, dtype=torch.float64)
    setattr(mha, name, new)
    return lambda: affine(new)


def another_weight(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    layer = getattr(mha, name)
    layer.weight = nn.Parameter(normal(9, E, E) / 5)
    return lambda: affine(layer)


def without_bias(mha: MultiHeadAttention, name: str) -> Callable[[], Affine]:
    layer = getattr(mha, name)
    layer.bias = None
    return lambda: affine(layer)


REPLACED = {
    "LoRA": lora, "Sequential": sequential, "parametrized": parametrized, "pruned": pruned,
    "weight_norm": normed, "spectral_norm": spectral, "own forward": other_forward, "subclass": subclass,
    "around the same weight": around_the_same_weight,
    "another layer": another_layer, "another weight": another_weight, "without bias": without_bias,
}  # fmt: skip
every_replacement = pytest.mark.parametrize("replace", REPLACED.values(), ids=REPLACED)


@pytest.mark.thinned(slow=2)
@every_replacement
@every_projection
@every_crossing
def test_a_replaced_projection_gives_what_the_maths_gives(
    crosses: bool, name: str, replace: Callable[[MultiHeadAttention, str], Callable[[], Affine]]
) -> None:
    """Twice, with a step of training between; without gradients too."""
    torch.manual_seed(0)
    mha = module()
    effective = replace(mha, name)
    optimiser = torch.optim.SGD([x for x in mha.parameters() if x.requires_grad], 0.1)
    for _ in range(2):
        leaves = [x.requires_grad_() for x in inputs(crosses)]
        learned = [x for x in mha.parameters() if x.requires_grad]
        actual = output(mha, *leaves)
        grads = torch.autograd.grad(actual.square().mean(), [*leaves, *learned], allow_unused=True)
        expected = by_hand(mha, *leaves, **{name: effective()})
        same = torch.autograd.grad(expected.square().mean(), [*leaves, *learned], allow_unused=True)
        assert_same([actual, *grads], [expected, *same])
        with torch.no_grad():
            assert_same([output(mha, *leaves)], [expected])
        for parameter, grad in zip(learned, grads[len(leaves) :], strict=True):
            parameter.grad = grad
        optimiser.step()
    assert name == "out_proj" or not packed(mha)


def test_tools_may_be_taken_off_again() -> None:
    """The weight is then an ordinary one, and the next cast, copy or load packs it."""
    x = normal(1, B, T, E)
    mha = module()
    plain = output(mha, x)
    parametrized(mha, "q_proj")
    parametrize.remove_parametrizations(mha.q_proj, "weight", leave_parametrized=False)
    assert_same([output(mha, x)], [plain])
    pruned(mha, "k_proj")
    prune.remove(mha.k_proj, "weight")
    assert_same([output(mha, x)], [by_hand(mha, x)])
    other_forward(mha, "v_proj")
    del mha.v_proj.forward
    assert_same([output(mha, x)], [by_hand(mha, x)])
    assert packed(copy.deepcopy(mha)) and packed(mha.double())
    assert_same([output(mha, x)], [by_hand(mha, x)])


@every_replacement
def test_a_module_with_a_replaced_projection_is_copied_and_loaded_whole(
    replace: Callable[[MultiHeadAttention, str], Callable[[], Affine]],
) -> None:
    mha, x = module(), normal(1, B, T, E)
    replace(mha, "k_proj")
    mha.load_state_dict(mha.state_dict())
    expected = output(mha, x)
    if replace is not other_forward:  # whose copy still calls the original's
        with torch.no_grad():  # a pruned weight is no leaf, which deepcopy refuses
            output(mha, x)
            new = copy.deepcopy(mha)
        assert_same([output(new, x)], [expected])
    assert_same([output(mha, x)], [expected])


@pytest.fixture
def quantised_engine() -> Iterator[str]:
    """One that this processor runs: torch names those it was built with. The setting is put back."""
    quantized = torch.backends.quantized
    before = quantized.engine
    try:
        yield next(
            filter(runs_quantised, sorted(quantized.supported_engines, key=lambda name: name != before))
        )
    finally:
        quantized.engine = before


def runs_quantised(engine: str) -> bool:
    try:
        torch.backends.quantized.engine = engine
        with warnings.catch_warnings(action="ignore"):
            torch.ao.nn.quantized.dynamic.Linear(2, 3)(torch.zeros(1, 2))
    except RuntimeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@every_crossing
@pytest.mark.usefixtures("quantised_engine")
def test_quantised_projections_are_used(crosses: bool) -> None:
    """torch's default engine is that of x86: elsewhere it raises, "unknown architecture", at the first."""
    mha = module(dtype=torch.float32).eval()
    small = torch.ao.quantization.quantize_dynamic(mha, {nn.Linear}, dtype=torch.qint8)
    layers = {name: getattr(small, name) for name in PROJECTIONS}
    assert all(type(layer) is not nn.Linear for layer in layers.values()) and packed(mha)
    arguments = [x.float() for x in inputs(crosses)]
    with torch.no_grad():
        plain = by_hand(small, *arguments, **layers)
        actual = output(small, *arguments)
        truth = by_hand(copy.deepcopy(mha).double(), *(x.double() for x in arguments))
    assert_judged(actual, plain, truth, dtype=torch.float32, name="quantised")
    assert error(actual, plain) < error(actual, truth) / 2, "it is nearer to what was not quantised"


def test_what_is_replaced_is_let_go() -> None:
    """Quantising or sharding a model is done to save the memory of its weights."""
    mha = module()
    reference = weakref.ref(mha.q_proj.weight)
    for name in PROJECTIONS:
        setattr(mha, name, nn.Linear(E, E, dtype=torch.float64))
    output(mha, normal(1, B, T, E))
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("tool", ["parametrized", "pruned"])
def test_sinks_under_a_tool_are_seen_without_gradients_too(tool: str) -> None:
    mha, x = module(sinks=True), normal(1, B, T, E)
    if tool == "parametrized":
        parametrize.register_parametrization(mha, "sinks", Doubled())
    else:
        prune.l1_unstructured(mha, "sinks", amount=2)
    expected = by_hand(mha, x)
    assert_same([output(mha, x)], [expected])
    with torch.no_grad():
        assert_same([output(mha, x)], [expected])


# Names


def test_names_and_their_order_do_not_change() -> None:
    """Files other people have saved depend on them."""
    own = [f"{name}.{end}" for name in PROJECTIONS for end in ("weight", "bias")]
    assert list(module().state_dict()) == own
    assert [name for name, _ in module().named_parameters()] == own
    assert list(module(sinks=True).state_dict()) == ["sinks", *own]
    weights = [f"{name}.weight" for name in PROJECTIONS]
    assert list(module(bias=False).state_dict()) == weights
    assert list(module(bias=False, out_bias=True).state_dict()) == [*weights, "out_proj.bias"]
    assert [name for name, _ in module().named_children()] == list(PROJECTIONS)
    assert module().state_dict()["q_proj.weight"].shape == (E, E)


SEPARATE = {
    "lessons": ("W_q", "W_k", "W_v", "W_o"),
    "more lessons": ("w_q", "w_k", "w_v", "w_o"),
    "linear": ("q_linear", "k_linear", "v_linear", "out_linear"),
    "DistilBERT": ("q_lin", "k_lin", "v_lin", "out_lin"),
    "BERT": ("query", "key", "value", "dense"),
    "Llama": ("wq", "wk", "wv", "wo"),
    "Hugging Face": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "diffusion": ("to_q", "to_k", "to_v", "to_out"),
    "T5": ("q", "k", "v", "o"),
}
PACKED = {
    "vision": ("qkv", "proj"),
    "ModernBERT": ("Wqkv", "Wo"),
    "in_proj": ("in_proj", "out_proj"),
}


def separate(mha: MultiHeadAttention, names: Sequence[str]) -> dict[str, Tensor]:
    state = mha.state_dict()
    own = [(name, theirs) for name, theirs in zip(PROJECTIONS, names, strict=True)]
    return {
        f"{theirs}.{end}": state[f"{name}.{end}"].clone()
        for name, theirs in own
        for end in ("weight", "bias")
        if f"{name}.{end}" in state
    }


def in_one(mha: MultiHeadAttention, names: Sequence[str]) -> dict[str, Tensor]:
    state, actual = mha.state_dict(), {}
    for end in ("weight", "bias"):
        if f"q_proj.{end}" in state:
            actual[f"{names[0]}.{end}"] = torch.cat([state[f"{name}.{end}"] for name in PROJECTIONS[:3]])
            actual[f"{names[1]}.{end}"] = state[f"out_proj.{end}"].clone()
    return actual


def in_torchs(mha: MultiHeadAttention, _: Any = None) -> dict[str, Tensor]:
    state = in_one(mha, ("in_proj", "out_proj"))
    return {name.replace("in_proj.", "in_proj_"): value for name, value in state.items()}


def turned(mha: MultiHeadAttention, _: Any = None) -> dict[str, Tensor]:
    """GPT-2's own Conv1D keeps its weights [in, out]."""
    state = in_one(mha, ("c_attn", "c_proj"))
    return {name: value.T.contiguous() if value.ndim == 2 else value for name, value in state.items()}


Theirs = Callable[[MultiHeadAttention], dict[str, Tensor]]
FOREIGN: dict[str, Theirs] = {
    **{origin: lambda mha, names=names: separate(mha, names) for origin, names in SEPARATE.items()},
    **{origin: lambda mha, names=names: in_one(mha, names) for origin, names in PACKED.items()},
    "torch": in_torchs,
    "GPT-2": turned,
}
every_foreign = pytest.mark.parametrize("theirs", FOREIGN.values(), ids=FOREIGN)
SIZES: dict[str, dict[str, Any]] = {
    "plain": {},
    "without bias": {"bias": False},
    "grouped": {"num_heads": 6, "num_kv_heads": 3},
    "other widths": {"num_heads": 3, "num_kv_heads": 1, "head_dim": 7, "value_dim": 4},
}


def assert_loaded(new: MultiHeadAttention, expected: Mapping[str, Tensor]) -> None:
    state = new.state_dict()
    assert list(state) == list(expected) and packed(new)
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.thinned(4, slow=2)
@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
@every_foreign
def test_weights_load_from_other_peoples_names(theirs: Theirs, options: dict[str, Any]) -> None:
    """Packed rows are q's, then k's, then v's, as many as each has."""
    mha = module(**options)
    for assign in (False, True):
        state = theirs(mha)
        before = dict(state)
        new = MultiHeadAttention(**{"d_model": E, "num_heads": H, "dtype": torch.float64, **options})
        new.load_state_dict(state, assign=assign)
        assert_loaded(new, mha.state_dict())
        assert list(state) == list(before), "the caller's dict was changed"
        assert all(state[name] is value for name, value in before.items())
        assert_same([output(new, normal(1, B, T, E))], [output(mha, normal(1, B, T, E))])
        assert all(parameter.is_contiguous() for parameter in new.parameters())


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E, dtype=torch.float64)
        self.attn = MultiHeadAttention(E, 6, dtype=torch.float64, **options)
        self.dense = nn.Linear(E, E, dtype=torch.float64)  # a name that is known to belong to attention


@every_foreign
def test_weights_load_inside_a_bigger_model(theirs: Theirs) -> None:
    """Only what lies under the module's own prefix is renamed."""
    options = {"num_kv_heads": 2}
    model = nn.ModuleDict({"blocks": nn.ModuleList(Block(**options) for _ in range(2))})
    states, state = [], {}
    for i, block in enumerate(model["blocks"]):  # type: ignore[arg-type, var-annotated]
        mha = module(E, 6, **options)
        with torch.no_grad():
            mha.q_proj.weight.mul_(i + 1)
        states.append(mha.state_dict())
        state |= {f"blocks.{i}.attn.{name}": value for name, value in theirs(mha).items()}
        for other in ("norm", "dense"):
            state |= {f"blocks.{i}.{other}.{n}": x + 1 for n, x in getattr(block, other).state_dict().items()}
    before = dict(state)
    model.load_state_dict(state)
    for i, block in enumerate(model["blocks"]):  # type: ignore[arg-type, var-annotated]
        assert_loaded(block.attn, states[i])
        assert torch.equal(block.dense.weight, state[f"blocks.{i}.dense.weight"])
    assert list(state) == list(before) and all(state[name] is value for name, value in before.items())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    "widths", [{}, {"kdim": 14, "vdim": 22}, {"kdim": 14}], ids=["packed", "kdim vdim", "kdim"]
)
def test_the_state_of_torchs_own_class_loads(widths: dict[str, int], bias: bool) -> None:
    theirs = nn.MultiheadAttention(E, H, bias=bias, dtype=torch.float64, **widths)
    with torch.no_grad():
        for i, parameter in enumerate(theirs.parameters()):
            parameter.copy_(normal(50 + i, *parameter.shape) / 5)
    mha = MultiHeadAttention(E, H, bias=bias, dtype=torch.float64, **widths)
    mha.load_state_dict(theirs.state_dict())
    q, k, v = normal(1, B, T, E), normal(2, B, S, theirs.kdim), normal(3, B, S, theirs.vdim)
    expected = theirs(*(x.transpose(0, 1) for x in (q, k, v)), average_attn_weights=False)
    out, weights = mha(q, k, v)
    assert_same([out, weights.dense()], [expected[0].transpose(0, 1), expected[1]])


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (lambda mha: in_one(module(), ("qkv", "proj")), "qkv.weight"),  # 3 * 30 rows are not 30 + 15 + 15
        (lambda mha: in_one(module(), ("c_attn", "c_proj")), "c_attn.weight"),
        (lambda mha: separate(mha, SEPARATE["lessons"]) | {"W_x.weight": normal(1, 2)}, "W_x.weight"),
        (lambda mha: separate(mha, ("query", "key", "V", "dense")), "query.weight"),  # not all three
        (lambda mha: mha.state_dict() | {"proj.weight": normal(1, E, E)}, "proj.weight"),
        (lambda mha: in_torchs(mha) | {"bias_k": normal(1, 1, 1, E)}, "bias_k"),
    ],
    ids=["rows", "GPT-2 rows", "stranger", "incomplete", "twice", "bias_k"],
)
def test_what_is_not_understood_is_named_and_not_guessed_at(state: Theirs, named: str) -> None:
    mha = module(E, 6, num_kv_heads=3)
    arguments = state(mha)
    with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: .*"{named}"'):
        MultiHeadAttention(E, 6, num_kv_heads=3, dtype=torch.float64).load_state_dict(arguments)
    message = MultiHeadAttention(E, 6, num_kv_heads=3, dtype=torch.float64).load_state_dict(
        arguments, strict=False
    )
    assert named in message.unexpected_keys


# Models as they are: either the same numbers, or refused


def layer_of(model: str, path: str, **settings: Any) -> nn.Module:
    """One attention layer of a tiny model of transformers', with random weights and no dropout."""
    transformers = pytest.importorskip("transformers", reason="transformers is among the test tools")
    config = getattr(transformers, model.replace("Encoder", "").removesuffix("Model") + "Config")
    made = getattr(transformers, model)(config(**settings, attn_implementation="eager")).double().eval()
    layer: nn.Module = made.get_submodule(path)
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(60 + i, *parameter.shape) / 3)
    return layer


PLAIN = {"hidden_size": E, "num_hidden_layers": 1, "num_attention_heads": H, "intermediate_size": 7,
         "vocab_size": 11, "max_position_embeddings": 13, "pad_token_id": 0}  # fmt: skip
GPT = {"n_embd": E, "n_layer": 1, "n_head": H, "vocab_size": 11, "n_positions": 13}
VISION = {name: PLAIN[name] for name in list(PLAIN)[:4]} | {"image_size": 8, "patch_size": 4}
FALCON: dict[str, Any] = {**PLAIN, "num_attention_heads": 15}
ROTARY: dict[str, Any] = {
    "position_embeddings": (torch.ones(1, T, 1), torch.zeros(1, T, 1)), "attention_mask": None
}  # fmt: skip
IN_FALCON = {**ROTARY, "alibi": None, "attention_mask": torch.zeros(B, 1, T, T)}
BLOOM = {"residual": torch.zeros(B, T, E), "alibi": torch.zeros(B * H, 1, T),
         "attention_mask": torch.zeros(B, 1, T, T)}  # fmt: skip
Layer = tuple[tuple[str, str, dict[str, Any]], dict[str, Any], dict[str, Any]]  # which; a call; our options
LOADED: dict[str, Layer] = {
    "GPT-2": (("GPT2Model", "h.0.attn", GPT), {}, {}),
    "the first GPT": (("OpenAIGPTModel", "h.0.attn", GPT), {}, {"causal": True}),
    "ImageGPT": (("ImageGPTModel", "h.0.attn", GPT), {}, {"causal": True}),
    "GPT-BigCode, multi-query": (("GPTBigCodeModel", "h.0.attn", GPT), {}, {"num_kv_heads": 1}),
    "Llama": (("LlamaModel", "layers.0.self_attn", PLAIN | {"num_key_value_heads": 1}), ROTARY,
              {"num_kv_heads": 1, "bias": False}),
    "BERT": (("BertModel", "encoder.layer.0.attention.self", PLAIN), {}, {}),
    "OPT": (("OPTModel", "decoder.layers.0.self_attn",
             PLAIN | {"ffn_dim": 7, "word_embed_proj_dim": E}), {}, {}),
    "ViT": (("ViTModel", "layers.0.attention", VISION), {}, {}),
    "BLIP": (("BlipVisionModel", "encoder.layers.0.self_attn", VISION), {}, {}),
    "DistilBERT": (("DistilBertModel", "transformer.layer.0.attention",
                    {"dim": E, "n_layers": 1, "n_heads": H, "hidden_dim": 7, "vocab_size": 11}), {}, {}),
    "MPT": (("MptModel", "blocks.0.attn", {"d_model": E, "n_heads": H, "n_layers": 1, "vocab_size": 11}),
            {"position_bias": torch.zeros(H, 1, T)}, {"bias": False}),
    "ModernBERT": (("ModernBertModel", "layers.0.attn", PLAIN), ROTARY, {"bias": False}),
    "T5": (("T5EncoderModel", "encoder.block.0.layer.0.SelfAttention",
            {"d_model": E, "d_kv": 6, "num_layers": 1, "num_heads": H, "d_ff": 7, "vocab_size": 11}),
           {"position_bias": torch.zeros(1, H, T, T)}, {"bias": False, "scale": 1.0}),
}  # fmt: skip
HEAD_BY_HEAD: dict[str, Layer] = {
    "GPT-BigCode": (("GPTBigCodeModel", "h.0.attn", GPT | {"multi_query": False}), {}, {}),
    "GPT-NeoX": (("GPTNeoXModel", "layers.0.attention", PLAIN), ROTARY, {}),
    "BLOOM": (("BloomModel", "h.0.self_attention",
               {"hidden_size": E, "n_layer": 1, "n_head": H, "vocab_size": 11}), BLOOM, {}),
    "Falcon": (("FalconModel", "h.0.self_attention", FALCON | {"multi_query": False}), IN_FALCON,
               {"num_heads": 15, "bias": False}),
    "Falcon, multi-query": (("FalconModel", "h.0.self_attention", FALCON), IN_FALCON,
                            {"num_heads": 15, "num_kv_heads": 1, "bias": False}),
    "Falcon, grouped": (("FalconModel", "h.0.self_attention",
                         FALCON | {"new_decoder_architecture": True, "num_kv_heads": 5}), IN_FALCON,
                        {"num_heads": 15, "num_kv_heads": 5, "bias": False}),
    "DeBERTa": (("DebertaModel", "encoder.layer.0.attention.self",
                 PLAIN | {"relative_attention": False, "pos_att_type": None}),
                {"attention_mask": torch.ones(B, 1, T, T)}, {"bias": False}),
}  # fmt: skip
OTHERWISE: dict[str, Layer] = {
    "Phi-3": (("Phi3Model", "layers.0.self_attn", PLAIN | {"num_key_value_heads": 1}), ROTARY,
              {"num_kv_heads": 1, "bias": False}),
    "CodeGen": (("CodeGenModel", "h.0.attn", GPT | {"n_embd": 32, "n_head": 4, "rotary_dim": 2}), {},
                {"d_model": 32, "num_heads": 4, "bias": False}),
}  # fmt: skip


def assert_as_said(mha: MultiHeadAttention, layer: nn.Module, call: dict[str, Any]) -> None:
    """Many of them take their softmax in float32, whatever they are given."""
    x = normal(1, B, T, E)
    call = {name: value.double() if isinstance(value, Tensor) else value for name, value in call.items()}
    with torch.no_grad():
        actual = layer(x, **call)
        truth, plain = mha(x)[0], copy.deepcopy(mha).float()(x.float())[0]
    message: Tensor = actual if isinstance(actual, Tensor) else actual[0]
    assert_judged(message, plain, truth, dtype=torch.float32, name="what the model says")


def ours_for(options: dict[str, Any], layer: nn.Module) -> tuple[MultiHeadAttention, dict[str, Tensor]]:
    """A new module, and the layer's state; a layer without an output projection gets one."""
    new = MultiHeadAttention(**{"d_model": E, "num_heads": H, "dtype": torch.float64, **options})
    state = {name: x for name, x in layer.state_dict().items() if "relative_attention" not in name}
    state = {name.replace("projection.", "proj."): x for name, x in state.items()}
    if not any(name.startswith(("o", "proj", "dense", "c_proj", "Wo")) for name in state):
        state |= {"out_proj.weight": torch.eye(E, dtype=torch.float64), "out_proj.bias": torch.zeros(E)}
    return new, state


# Before: a scale rounded to a whole number; other paths; sizes that its own config refuses.
SINCE = {"ImageGPT": (5, 21), "ViT": (5, 9), "ModernBERT": (5, 21)}
of_real_models = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


@pytest.mark.thinned(4)
@of_real_models
@pytest.mark.parametrize("name", LOADED)
def test_real_layers_load_and_say_the_same(name: str) -> None:
    not_before(SINCE.get(name, (0, 0)), name)
    which, call, options = LOADED[name]
    layer = layer_of(which[0], which[1], **which[2])
    mha, state = ours_for(options, layer)
    mha.load_state_dict(state)
    assert_as_said(mha, layer, call)


@of_real_models
@pytest.mark.parametrize("name", [*HEAD_BY_HEAD, *OTHERWISE])
def test_rows_that_may_go_otherwise_are_refused_and_what_is_told_puts_them_right(name: str) -> None:
    """GPT-BigCode's c_attn, head by head, was taken for nanoGPT's, all of q first: 0.56 off, nothing missing,
    nothing unexpected."""
    which, call, options = (HEAD_BY_HEAD | OTHERWISE)[name]
    layer = layer_of(which[0], which[1], **which[2])
    mha, state = ours_for(options, layer)
    before = {key: value.clone() for key, value in mha.state_dict().items()}
    for strict in (True, False):
        with pytest.raises(
            RuntimeError, match=r"must be known to hold all of q, .*: \[\d+, \d+\]"
        ) as message:
            mha.load_state_dict(state, strict=strict)
    assert all(torch.equal(x, before[key]) for key, x in mha.state_dict().items() if "out_proj" not in key)
    if name in OTHERWISE:
        return
    advice = re.search(r"torch\.cat\(.*?\]\)(?=;)", str(message.value)).group()  # type: ignore[union-attr]
    packed_names = [
        key for key in state if any(fused_name in key for fused_name in ("c_attn", "query_key", "in_proj"))
    ]
    for key in packed_names:
        state[f"in_proj_{key.rpartition('.')[2]}"] = eval(advice, {"torch": torch, "weight": state.pop(key)})
    state = {key.replace("c_proj", "out_proj"): value for key, value in state.items()}
    if name == "DeBERTa":  # it has biases of its own, of queries and values
        mha = MultiHeadAttention(E, H, dtype=torch.float64)
        state["in_proj_bias"] = torch.cat([state.pop("q_bias"), torch.zeros(E), state.pop("v_bias")])
    mha.load_state_dict(state)
    assert_as_said(mha, layer, call)


@pytest.mark.parametrize("options", SIZES.values(), ids=SIZES)
def test_a_small_gpt_loads_where_it_can_be_no_other(options: dict[str, Any]) -> None:
    """nanoGPT's c_attn is [out, in] and in order; with a bias it might be GPT-BigCode's, which is not."""
    mha = module(**options)
    new = MultiHeadAttention(**{"d_model": E, "num_heads": H, "dtype": torch.float64, **options})
    state = in_one(mha, ("c_attn", "c_proj"))
    if mha.q_proj.bias is None or mha.num_kv_heads == 1:
        new.load_state_dict(state)
        return assert_loaded(new, mha.state_dict())
    rows = mha.sizes.query_width + mha.sizes.key_width + mha.sizes.value_width
    with pytest.raises(RuntimeError, match=rf"c_attn.weight must be known .*: \[{rows}, 30\] may"):
        new.load_state_dict(state)
    for theirs, own in (("c_attn.", "in_proj_"), ("c_proj.", "out_proj.")):
        state = {name.replace(theirs, own): x for name, x in state.items()}
    new.load_state_dict(state)
    assert_loaded(new, mha.state_dict())


def test_a_square_c_attn_has_no_side_to_tell_it_by() -> None:
    """[in, out] or [out, in]: 3 heads of 6 over 1 make 30 rows of 30 columns."""
    mha = module(E, 3, num_kv_heads=1, head_dim=6)
    with pytest.raises(RuntimeError, match=r"c_attn.weight must be known .*: \[30, 30\] may"):
        module(E, 3, num_kv_heads=1, head_dim=6).load_state_dict(turned(mha))


# To and from torch's class


TORCHS: dict[str, dict[str, Any]] = {
    "packed": {},
    "without bias": {"bias": False},
    "kdim vdim": {"kdim": 14, "vdim": 22},
    "kdim vdim without bias": {"kdim": 14, "vdim": 22, "bias": False},
}
every_torchs = pytest.mark.parametrize("options", TORCHS.values(), ids=TORCHS)


def torchs(**options: Any) -> nn.MultiheadAttention:
    made = nn.MultiheadAttention(E, H, **{"dtype": torch.float64, "batch_first": True, **options})
    with torch.no_grad():
        for i, parameter in enumerate(made.parameters()):
            parameter.copy_(normal(50 + i, *parameter.shape) / 5)
    return made


def three(source: Any) -> tuple[Tensor, Tensor, Tensor]:
    return normal(1, B, T, E), normal(2, B, S, source.kdim), normal(3, B, S, source.vdim)


@every_torchs
def test_a_module_from_torchs_says_the_same_and_goes_back_unchanged(options: dict[str, Any]) -> None:
    theirs = torchs(dropout=0.25, **options).eval()
    ours = MultiHeadAttention.from_torch(theirs)
    assert ours.dropout == 0.25 and not ours.training and ours.q_proj.weight.dtype == torch.float64
    assert (ours.kdim, ours.vdim) == (theirs.kdim, theirs.vdim)
    real = torch.arange(S) < torch.tensor([11, 5, 3])[:, None]
    out, weights = ours(*three(theirs), real[:, None, None])
    expected = theirs(*three(theirs), key_padding_mask=~real, average_attn_weights=False)
    assert_same([out, weights.dense()], expected)

    back = ours.to_torch()
    assert back.dropout == 0.25 and not back.training and back.batch_first
    mine, own = back.state_dict(), theirs.state_dict()
    assert list(mine) == list(own) and all(torch.equal(mine[name], own[name]) for name in own)
    assert_same([back(*three(theirs))[0]], [theirs(*three(theirs))[0]])


@every_torchs
def test_a_module_to_torchs_says_the_same_and_comes_back_unchanged(options: dict[str, Any]) -> None:
    ours = module(**options)
    theirs = ours.to_torch(batch_first=False)
    assert theirs.training and not theirs.batch_first
    actual = theirs(*(x.transpose(0, 1) for x in three(ours)), average_attn_weights=False)
    out, weights = ours(*three(ours))
    assert_same([actual[0].transpose(0, 1), actual[1]], [out, weights.dense()])
    again = MultiHeadAttention.from_torch(theirs)
    state, own = again.state_dict(), ours.state_dict()
    assert list(state) == list(own) and all(torch.equal(state[name], own[name]) for name in own)


def test_copies_to_and_from_torchs_are_copies() -> None:
    theirs = torchs()
    ours = MultiHeadAttention.from_torch(theirs)
    back = ours.to_torch()
    before = output(ours, normal(1, B, T, E)).detach()
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *back.parameters()):
            parameter.zero_()
    assert torch.equal(output(ours, normal(1, B, T, E)), before)


def test_biases_that_only_one_side_has_are_zero_on_the_other() -> None:
    for options in ({"bias": False, "out_bias": True}, {"bias": True, "out_bias": False}):
        ours = module(**options)
        theirs = ours.to_torch()
        assert_same([theirs(*three(ours))[0]], [ours(*three(ours))[0]])


@pytest.mark.parametrize("widths", [{}, {"kdim": 14, "vdim": 22}], ids=["packed", "kdim vdim"])
def test_what_is_frozen_here_is_frozen_in_torchs(widths: dict[str, int]) -> None:
    """Biases too: they once came out of a frozen module ready to learn. What torch keeps as one learns only
    if all of it did."""
    frozen = module(**widths).requires_grad_(False).to_torch()
    assert not any(x.requires_grad for x in frozen.parameters())
    partly = module(**widths)
    partly.k_proj.requires_grad_(False)
    wanted = {name: x.requires_grad for name, x in partly.to_torch().named_parameters()}
    assert wanted.pop("out_proj.weight") and wanted.pop("out_proj.bias") and not wanted.pop("in_proj_bias")
    if widths:
        assert wanted == {"q_proj_weight": True, "k_proj_weight": False, "v_proj_weight": True}
    else:
        assert wanted == {"in_proj_weight": False}
    assert all(x.requires_grad for x in module(**widths).to_torch().parameters())


def with_another_out_proj() -> nn.MultiheadAttention:
    """Its weights say less than its forward does; they were copied as if they said it all."""
    theirs = nn.MultiheadAttention(E, H)
    theirs.out_proj = nn.Sequential(theirs.out_proj, nn.Tanh())  # type: ignore[assignment]
    return theirs


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(3, 5), "module must be a torch.nn.MultiheadAttention: got Linear"),
        (None, "module must be a torch.nn.MultiheadAttention: got NoneType"),
        (nn.MultiheadAttention(E, H, add_bias_kv=True), "got add_bias_kv=True"),
        (nn.MultiheadAttention(E, H, add_zero_attn=True), "got add_zero_attn=True"),
        (
            with_another_out_proj(),
            "out_proj must be a plain nn.Linear: got Sequential with a forward of its own",
        ),
    ],
    ids=["another class", "nothing", "add_bias_kv", "add_zero_attn", "out_proj"],
)
def test_what_cannot_come_from_torchs_is_refused(module: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MultiHeadAttention.from_torch(module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 6, "num_kv_heads": 3}, r"30 and 6 \* 5, num_kv_heads 3, value_dim 5"),
        ({"head_dim": 7}, r"30 and 5 \* 7, num_kv_heads 5, value_dim 7"),
        ({"value_dim": 11}, r"30 and 5 \* 6, num_kv_heads 5, value_dim 11"),
        ({"causal": True}, "causal must be off: got causal=True"),
        ({"window": 3}, "window must be off: got window=3"),
        ({"window": (2, 1)}, r"window must be off: got window=\(2, 1\)"),
        ({"scale": 0.5}, "scale must be off: got scale=0.5"),
        ({"softcap": 2.0}, "softcap must be off: got softcap=2.0"),
        ({"sinks": True}, r"sinks must be off: got sinks=\[5\]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_what_torchs_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    mha = module(**options)
    with pytest.raises((ShapeError, ArgumentError), match=message):
        mha.to_torch()


@every_projection
def test_a_forward_of_its_own_is_not_merged_into_torchs(name: str) -> None:
    mha = module()
    getattr(mha, name).forward = lambda x: x
    with pytest.raises(
        ArgumentError, match=r"projections must be nn\.Linear: got Linear with a forward of its"
    ):
        mha.to_torch()


@pytest.mark.parametrize(
    ("replace", "message"),
    [(lora, "Lora"), (sequential, "Sequential"), (parametrized, "ParametrizedLinear"), (subclass, "Negated")],
)
@every_projection
def test_a_replaced_projection_is_not_merged_into_torchs(name: str, replace: Any, message: str) -> None:
    mha = module()
    replace(mha, name)
    with pytest.raises(ArgumentError, match=f"projections must be nn.Linear: got {message}"):
        mha.to_torch()


# The first weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_torchs
def test_the_first_weights_are_torchs_to_the_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    """In float64 too, where sqrt(6 / n) and sqrt(3) * sqrt(2 / n) are not the same bound."""
    torch.manual_seed(7)
    theirs = nn.MultiheadAttention(E, H, dtype=dtype, **options)
    after = torch.rand(3)
    torch.manual_seed(7)
    ours = MultiHeadAttention(E, H, dtype=dtype, **options)
    assert torch.equal(torch.rand(3), after), "it drew more or fewer numbers"
    for name, mine in MultiHeadAttention.from_torch(theirs).state_dict().items():
        assert torch.equal(ours.state_dict()[name], mine), name
    for name, mine in ours.to_torch().state_dict().items():
        assert torch.equal(theirs.state_dict()[name], mine), name
