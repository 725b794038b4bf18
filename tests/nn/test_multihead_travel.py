"""`MultiHeadAttention` travels: compiled, exported, cast, differentiated, copied, trained, distributed.

Sizes: E 30 = H 5 * D 6 (grouped: H 6, Hk 3, D 5), B 3, T 7, S 11; tiny where derivatives are compared with
differences. Everything is float64 unless the dtype is what is tested.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.export import Dim
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import headwise as hw
from attention_modules import B, E, H, S, T, assert_same, module, normal, packed
from headwise import Mask, MultiHeadAttention, reference
from judge import assert_judged, largest
from process_groups import run_ranks

# torch's own: forward mode imports code that uses torch.jit.script; batched gradients loop where a kernel has
# no batching rule.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop.*:UserWarning"),
]


def unpacked(mha: MultiHeadAttention) -> MultiHeadAttention:
    """A twin whose projections run one by one."""
    twin = copy.deepcopy(mha)
    twin._packed = None
    for parameter in twin.parameters():
        parameter.data = parameter.data.clone()
    return twin


def by_hand(mha: MultiHeadAttention, query: Tensor, memory: Tensor | None = None, mask: Any = None) -> Tensor:
    """The module's output written out in plain torch, in the dtype of its weights."""
    memory = query if memory is None else memory

    def heads(layer: nn.Linear, x: Tensor, count: int) -> Tensor:
        return linear(x, layer.weight, layer.bias).unflatten(-1, (count, -1)).transpose(1, 2)

    q = heads(mha.q_proj, query, mha.num_heads)
    k, v = (heads(layer, memory, mha.num_kv_heads) for layer in (mha.k_proj, mha.v_proj))
    out = reference.attention(q, k, v, mask=mask)[0].transpose(1, 2).flatten(2)
    return linear(out, mha.out_proj.weight, mha.out_proj.bias)


class Kind(NamedTuple):
    """A way to use the module: how it is made, what it is called with, and what may be seen."""

    options: dict[str, Any] = {}  # noqa: RUF012
    crosses: bool = False
    pads: bool = False

    def module(self, **changes: Any) -> MultiHeadAttention:
        return module(**{**self.options, **changes})

    def inputs(self, batch: int = B, query_len: int = T, key_len: int = S, width: int = E) -> list[Tensor]:
        """[query] or [query, memory], and the mask [B, 1, 1, S] at the end where there is one."""
        actual = [normal(1, batch, query_len, width)]
        if self.crosses:
            actual.append(normal(2, batch, key_len, width))
        if self.pads:
            actual.append(
                (normal(3, batch, 1, 1, actual[-1].shape[1]) > -0.5).index_fill(3, torch.tensor(0), True)
            )
        return actual

    def run(self, mha: nn.Module, *inputs: Tensor, **options: Any) -> tuple[Tensor, Any]:
        mask = inputs[-1] if self.pads else None
        memory = inputs[1] if self.crosses else None
        actual: tuple[Tensor, Any] = mha(inputs[0], memory, memory, mask, **options)
        return actual

    def output(self, mha: nn.Module, *inputs: Tensor) -> Tensor:
        return self.run(mha, *inputs)[0]

    def by_hand(self, mha: MultiHeadAttention, *inputs: Tensor) -> Tensor:
        mask = Mask.padding(inputs[-1][:, 0, 0]) if self.pads else Mask()
        mask = mask & Mask.causal() if mha.causal else mask
        return by_hand(mha, inputs[0], inputs[1] if self.crosses else None, mask)

    def results(self, mha: nn.Module, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
        """The output, then the gradients of inputs and parameters."""
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in self.inputs()]
        leaves = [x for x in inputs if x.requires_grad] + [x for x in mha.parameters() if x.requires_grad]
        out = (run or self.output)(mha, *inputs)
        return [out, *torch.autograd.grad(out, leaves, normal(8, *out.shape, dtype=out.dtype))]


KINDS = {
    "self": Kind(),
    "cross": Kind(crosses=True),
    "causal": Kind({"causal": True}),
    "padding": Kind(pads=True),
    "padded memory": Kind({"bias": False}, crosses=True, pads=True),
    "grouped": Kind({"num_heads": 6, "num_kv_heads": 3}),
    "grouped cross": Kind({"num_heads": 6, "num_kv_heads": 2, "causal": True}, crosses=True),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@every_kind
def test_packed_apart_and_written_out_are_the_same_forward_and_back(kind: Kind) -> None:
    """What everything below leans on."""
    mha = kind.module()
    assert packed(mha) and not packed(unpacked(mha))
    expected = kind.results(mha, kind.by_hand)
    assert_same(kind.results(mha), expected)
    assert_same(kind.results(unpacked(mha)), expected)


# torch.compile


@pytest.mark.thinned(keep=["padding"], slow=2)
@pytest.mark.usefixtures("fresh_compiler")
@every_kind
def test_compiled_in_one_graph_equals_eager_forward_and_back(kind: Kind) -> None:
    mha = kind.module()
    assert_same(kind.results(torch.compile(mha, fullgraph=True, backend="aot_eager")), kind.results(mha))


@pytest.mark.thinned(0, slow=2)
@pytest.mark.parametrize("name", ["self", "causal", "cross", "padding", "grouped"])
def test_one_graph_serves_all_lengths(name: str, counter: Any) -> None:
    """One for the first length it sees, one for all others; forward and back."""
    kind = KINDS[name]
    mha = kind.module()
    compiled = torch.compile(mha, fullgraph=True, backend=counter)
    for length in (5, 7, 11, 13, 17):
        inputs = kind.inputs(query_len=length, key_len=length + 6)
        inputs[0].requires_grad_()
        outs = [kind.output(way, *inputs) for way in (compiled, mha)]
        grads = [torch.autograd.grad(out.sin().sum(), [inputs[0], mha.k_proj.weight]) for out in outs]
        assert_same([outs[0], *grads[0]], [outs[1], *grads[1]])
    assert counter.frame_count <= 2, counter.frame_count


@pytest.mark.thinned(0, slow=3)
@pytest.mark.usefixtures("fresh_compiler")
@every_kind
def test_weights_come_out_of_a_compiled_module_as_a_map(kind: Kind) -> None:
    mha, inputs = kind.module(), kind.inputs()
    _, expected = kind.run(mha, *inputs)
    _, actual = kind.run(torch.compile(mha, fullgraph=True, backend="aot_eager"), *inputs)
    assert isinstance(actual, hw.AttentionMap) and repr(actual) == repr(expected)
    assert_same([actual.dense(), actual.lse], [expected.dense(), expected.lse])
    mine, theirs = (
        torch.autograd.grad(w.dense().square().sum(), [mha.q_proj.weight, mha.k_proj.weight])
        for w in (actual, expected)
    )
    assert_same(mine, theirs)


@pytest.mark.slow
def test_a_compiled_module_keeps_learning(counter: Any) -> None:
    """Its graph reads the weights where they lie: steps of an optimiser do not compile it again."""
    kind = KINDS["self"]
    eager, mha = kind.module(), kind.module()
    compiled = torch.compile(mha, fullgraph=True, backend=counter)
    for _ in range(3):
        for way, parameters in ((eager, eager.parameters()), (compiled, mha.parameters())):
            optimiser = torch.optim.SGD(list(parameters), 0.1)
            kind.output(way, *kind.inputs()).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
    assert_same(list(mha.parameters()), list(eager.parameters()))
    assert counter.frame_count == 1 and packed(mha)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
@every_kind
def test_inductor_equals_eager_forward_and_back(kind: Kind) -> None:
    mha = kind.module()
    assert_same(kind.results(torch.compile(mha, fullgraph=True)), kind.results(mha))


# torch.export


def exported(kind: Kind, mha: MultiHeadAttention) -> torch.export.ExportedProgram:
    """A program for any batch and lengths, without weights: `AttentionMap` stays at home."""
    batch, query_len, key_len = (
        Dim("batch", max=64),
        Dim("query_len", min=2, max=512),
        Dim("key_len", min=2, max=512),
    )
    last = key_len if kind.crosses else query_len
    memory = {0: batch, 1: key_len} if kind.crosses else None
    shapes = {
        "query": {0: batch, 1: query_len}, "key": memory, "value": memory,
        "mask": {0: batch, 3: last} if kind.pads else None, "need_weights": None,
    }  # fmt: skip
    return torch.export.export(
        mha,
        *call_of(kind, *kind.inputs()),
        dynamic_shapes={name: shapes[name] for name in (*NAMES, "need_weights")},
    )


NAMES = ("query", "key", "value", "mask")


def call_of(kind: Kind, *inputs: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    memory = inputs[1] if kind.crosses else None
    return (inputs[0], memory, memory, inputs[-1] if kind.pads else None), {"need_weights": False}


@pytest.mark.thinned(0, slow=2)
@every_kind
def test_an_exported_program_takes_any_batch_and_lengths(kind: Kind) -> None:
    mha = kind.module()
    program = exported(kind, mha).module()
    for sizes in ((3, 7, 11), (2, 13, 17), (5, 2, 3)):
        inputs = kind.inputs(*sizes)
        args, kwargs = call_of(kind, *inputs)
        out, weights = program(*args, **kwargs)
        assert weights is None
        assert_same([out], [kind.output(mha, *inputs)])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11, loading
@pytest.mark.parametrize("name", ["causal", "padding", "grouped cross"])
def test_an_exported_program_is_saved_and_loaded(name: str) -> None:
    kind, file = KINDS[name], io.BytesIO()
    mha = kind.module()
    torch.export.save(exported(kind, mha), file)
    file.seek(0)
    program = torch.export.load(file)
    assert set(program.state_dict) == set(mha.state_dict())
    args, kwargs = call_of(kind, *kind.inputs(2, 13, 17))
    assert_same([program.module()(*args, **kwargs)[0]], [kind.output(mha, *kind.inputs(2, 13, 17))])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_traced_module_takes_other_weights() -> None:
    """torch.jit.trace without gradients once kept the packed weight as a constant: saved, it was there twice,
    and loading others did nothing."""
    first, second = module(dtype=torch.float32), MultiHeadAttention(E, H)

    class Output(nn.Module):
        def __init__(self, inside: MultiHeadAttention) -> None:
            super().__init__()
            self.inside = inside

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x, need_weights=False)[0]

    x = normal(1, B, T, E, dtype=torch.float32)
    with torch.no_grad():
        file = io.BytesIO()
        torch.jit.save(torch.jit.trace(Output(first), (x,), check_trace=False), file)
        file.seek(0)
        traced = torch.jit.load(file)
        traced.load_state_dict(Output(second).state_dict())
        truth = by_hand(copy.deepcopy(second).double(), x.double())
        assert_judged(traced(x), by_hand(second, x), truth, dtype=torch.float32, name="traced")


# Precision


@pytest.mark.thinned(4, slow=2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])
@every_kind
def test_every_dtype_is_as_exact_as_the_module_written_out(
    kind: Kind, gradients: bool, dtype: torch.dtype
) -> None:
    mha = kind.module(dtype=dtype)
    inputs = [x.to(dtype) if x.is_floating_point() else x for x in kind.inputs()]
    with torch.set_grad_enabled(gradients):
        out, plain = kind.output(mha, *inputs), kind.by_hand(mha, *inputs)
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    truth = kind.by_hand(copy.deepcopy(mha).double(), *wide)
    assert out.dtype == dtype and out.requires_grad == gradients
    assert_judged(out, plain, truth, dtype=dtype, name="output")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["self", "cross", "grouped"])
def test_gradients_of_every_dtype_are_as_exact_as_those_of_the_module_written_out(
    name: str, dtype: torch.dtype
) -> None:
    kind = KINDS[name]
    mha = kind.module(dtype=dtype)
    inputs = [x.to(dtype) for x in kind.inputs()]
    pull = normal(8, *inputs[0].shape, dtype=dtype)
    actual = []
    for way, as_dtype in ((kind.output, dtype), (kind.by_hand, dtype), (kind.by_hand, torch.float64)):
        twin = copy.deepcopy(mha).to(as_dtype)
        leaves = [x.to(as_dtype).requires_grad_() for x in inputs]
        actual.append(
            torch.autograd.grad(way(twin, *leaves), [*leaves, *twin.parameters()], pull.to(as_dtype))
        )
    names = ["query", "memory"][: len(inputs)] + [n for n, _ in mha.named_parameters()]
    for label, mine, plain, truth in zip(names, *actual, strict=True):
        assert mine.dtype == dtype
        size = largest(pull) * largest(inputs[-1]) if "k_proj.bias" in label else 0.0  # whose truth is 0
        assert_judged(mine, plain, truth, dtype=dtype, size=size, times=3, name=label)


@every_kind
def test_autocast_runs_in_bfloat16_and_its_gradients_are_near(kind: Kind) -> None:
    """As near as those of the projections and the attention written out under the same autocast."""
    mha = kind.module(dtype=torch.float32)
    inputs = [x.float() if x.is_floating_point() else x for x in kind.inputs()]
    actual = []
    for way in (kind.output, kind.by_hand):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = way(mha, *leaves)
        wanted = [x for x in leaves if x.requires_grad] + list(mha.parameters())
        actual.append([out, *torch.autograd.grad(out.float(), wanted, normal(8, *out.shape).float())])
    wide = kind.module()
    truth = kind.results(wide)
    size = max(map(largest, truth[1:]))
    for i, (mine, plain, exact) in enumerate(zip(*actual, truth, strict=True)):
        assert mine.dtype == (torch.bfloat16 if i == 0 else torch.float32) and bool(mine.isfinite().all())
        at = size if i else 0.0
        assert_judged(mine, plain, exact, dtype=torch.bfloat16, size=at, times=3 if i else 2, name=str(i))


def test_autocast_without_gradients_is_autocast_too() -> None:
    mha, x = module(dtype=torch.float32), normal(1, B, T, E).float()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        out, w = mha(x)
    assert out.dtype == w.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mha(x)[0], out)


# Derivatives

TINY: dict[str, tuple[Kind, tuple[Any, ...]]] = {
    "self": (Kind(), (1, 2, 2, 4)),
    "cross": (Kind(crosses=True), (1, 2, 3, 4)),
    "self without bias": (Kind({"bias": False}), (1, 2, 2, 4)),
    "cross without bias": (Kind({"bias": False, "causal": True}, crosses=True), (1, 2, 3, 4)),
    "grouped": (Kind({"num_kv_heads": 1}), (2, 2, 2, 4)),
}
every_tiny = pytest.mark.parametrize(("kind", "sizes"), TINY.values(), ids=TINY)


def tiny(
    kind: Kind, sizes: tuple[int, ...]
) -> tuple[Callable[..., Tensor], list[Tensor], MultiHeadAttention]:
    """The output as a function of inputs and parameters, all of them; the parameters are the module's own."""
    mha = kind.module(d_model=4, num_heads=2)
    inputs = [x.requires_grad_() for x in kind.inputs(*sizes)]
    names = [name for name, _ in mha.named_parameters()]

    def output(*leaves: Tensor) -> Tensor:
        arguments, parameters = leaves[: len(inputs)], leaves[len(inputs) :]
        own = all(a is b for a, b in zip(parameters, mha.parameters(), strict=True))
        if own:  # packed
            return kind.output(mha, *arguments)
        memory = arguments[1] if kind.crosses else None
        replaced = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(mha, replaced, (arguments[0], memory, memory))[0]

    return output, [*inputs, *mha.parameters()], mha


@pytest.mark.slow
@every_tiny
def test_derivatives_of_derivatives_are_what_differences_say(kind: Kind, sizes: tuple[int, ...]) -> None:
    output, leaves, _ = tiny(kind, sizes)
    assert torch.autograd.gradgradcheck(output, leaves)


@pytest.mark.thinned(keep=["self"])
@every_tiny
def test_forward_mode_agrees_with_differences(kind: Kind, sizes: tuple[int, ...]) -> None:
    output, leaves, _ = tiny(kind, sizes)
    assert torch.autograd.gradcheck(output, leaves, check_forward_ad=True, check_backward_ad=False)


@every_kind
def test_forward_mode_goes_through_the_modules_own_weights(kind: Kind) -> None:
    """A dual number that meets no transform and no other weights; with gradients on and off."""
    mha, (x, *rest) = kind.module(), kind.inputs()
    way, pull = normal(9, *x.shape), normal(8, *x.shape)
    leaf = x.clone().requires_grad_()
    back = torch.autograd.grad(kind.output(mha, leaf, *rest), leaf, pull)[0] * way
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), forward_ad.dual_level():
            dual = kind.output(mha, forward_ad.make_dual(x, way), *rest)
            along = forward_ad.unpack_dual(dual).tangent
            assert along is not None
            assert_same([(along * pull).sum(), back], [back.sum(), back])


@every_kind
def test_gradients_may_come_in_batches(kind: Kind) -> None:
    """`torch.autograd.grad(..., is_grads_batched=True)`, which vectorised jacobians use."""
    mha = kind.module()
    inputs = [x.requires_grad_(x.is_floating_point()) for x in kind.inputs()]
    leaves = [x for x in inputs if x.requires_grad] + list(mha.parameters())
    out = kind.output(mha, *inputs)
    pulls = normal(8, 2, *out.shape)
    together = torch.autograd.grad(out, leaves, pulls, is_grads_batched=True, retain_graph=True)
    for i, pull in enumerate(pulls):
        assert_same([many[i] for many in together], torch.autograd.grad(out, leaves, pull, retain_graph=True))


@pytest.mark.parametrize("name", ["self", "cross", "causal", "grouped"])
def test_gradients_of_each_sample_come_from_functional_call(name: str) -> None:
    kind = KINDS[name]
    mha, inputs = kind.module(), kind.inputs()
    parameters = {name: x.detach() for name, x in mha.named_parameters()}

    def loss(parameters: dict[str, Tensor], *sample: Tensor) -> Tensor:
        arguments = [x[None] for x in sample]
        memory = arguments[1] if kind.crosses else None
        return torch.func.functional_call(mha, parameters, (arguments[0], memory, memory))[0].sin().sum()

    in_dims = (None, *(0 for _ in inputs))
    together = torch.func.vmap(torch.func.grad(loss), in_dims=in_dims)(parameters, *inputs)
    for b in range(B):
        out = kind.output(mha, *(x[b : b + 1] for x in inputs)).sin().sum()
        alone = torch.autograd.grad(out, list(mha.parameters()))
        assert_same([together[name][b] for name in parameters], alone)
    assert packed(mha)


# The way back


@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["whole", "dropout"])
@every_kind
def test_checkpointing_changes_no_gradient(kind: Kind, dropout: float) -> None:
    mha = kind.module(dropout=dropout)

    def again(mha: nn.Module, *inputs: Tensor) -> Tensor:
        actual: Tensor = checkpoint(lambda *inputs: kind.output(mha, *inputs), *inputs, use_reentrant=False)
        return actual

    actual = []
    for way in (again, kind.output):
        torch.manual_seed(0)
        actual.append(kind.results(mha, way))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*actual, strict=True))


def as_copies() -> Any:
    """What is saved for the way back comes back as copies, none beside another."""
    return saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)


@pytest.mark.parametrize("keeping", [save_on_cpu, as_copies], ids=["save_on_cpu", "copies"])
@every_kind
def test_saved_tensors_that_come_back_as_copies_give_the_same_gradients(
    kind: Kind, keeping: Callable[[], Any]
) -> None:
    """The packed weight must not be assumed behind the weights that come back."""
    mha = kind.module()

    def with_copies(mha: nn.Module, *inputs: Tensor) -> Tensor:
        with keeping():
            return kind.output(mha, *inputs)

    assert_same(kind.results(mha, with_copies), kind.results(mha))


def test_an_input_changed_before_the_way_back_is_noticed() -> None:
    mha, x = module(), normal(1, B, T, E)
    out = mha(x)[0]
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_kept_may_be_walked_twice_and_one_not_kept_says_so() -> None:
    mha, x = module(), normal(1, B, T, E).requires_grad_()
    out = mha(x)[0].sin().sum()
    leaves = [x, *mha.parameters()]
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    second = torch.autograd.grad(out, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves)


def test_heads_nobody_asks_a_gradient_of_send_none_back() -> None:
    """A loss of the weights alone: nothing comes back through the values."""
    mha, x = module(), normal(1, B, T, E)
    mha(x)[1].dense().square().sum().backward()
    twin = unpacked(mha)
    twin(x)[1].dense().square().sum().backward()
    assert mha.out_proj.weight.grad is None
    for name in ("q_proj.weight", "q_proj.bias", "k_proj.weight"):
        assert_same([mha.get_parameter(name).grad], [twin.get_parameter(name).grad])
    assert mha.v_proj.weight.grad is None or not mha.v_proj.weight.grad.any()


# Copies

Copy = Callable[[MultiHeadAttention], MultiHeadAttention]


def saved_whole(mha: MultiHeadAttention) -> MultiHeadAttention:
    file = io.BytesIO()
    torch.save(mha, file)
    file.seek(0)
    actual: MultiHeadAttention = torch.load(file, weights_only=False)
    return actual


def saved_state(mha: MultiHeadAttention) -> MultiHeadAttention:
    file = io.BytesIO()
    torch.save(mha.state_dict(), file)
    file.seek(0)
    new = MultiHeadAttention(E, H, dtype=torch.float64)
    new.load_state_dict(torch.load(file, weights_only=True))
    return new


def assigned_state(mha: MultiHeadAttention) -> MultiHeadAttention:
    with torch.device("meta"):
        new = MultiHeadAttention(E, H, dtype=torch.float64)
    new.load_state_dict({name: value.clone() for name, value in mha.state_dict().items()}, assign=True)
    return new


def emptied(mha: MultiHeadAttention) -> MultiHeadAttention:
    new = copy.deepcopy(mha).to("meta").to_empty(device="cpu")
    new.load_state_dict(mha.state_dict())
    return new


COPIES: dict[str, Copy] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda mha: pickle.loads(pickle.dumps(mha)),
    "torch.save": saved_whole,
    "state dict": saved_state,
    "assign": assigned_state,
    "to_empty": emptied,
}
every_copy = pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)


@every_copy
def test_a_copy_is_equal_independent_and_packed(copied: Copy) -> None:
    mha, x = module(), normal(1, B, T, E)
    expected = mha(x)[0].detach()
    new = copied(mha)
    assert packed(mha) and packed(new)
    for (name, mine), (same, theirs) in zip(new.named_parameters(), mha.named_parameters(), strict=True):
        assert name == same and torch.equal(mine, theirs) and mine is not theirs
        assert mine.data_ptr() != theirs.data_ptr()
    assert torch.equal(new(x)[0], expected)
    with torch.no_grad():
        for parameter in mha.parameters():
            parameter.zero_()
        assert not mha(x)[0].any() and torch.equal(new(x)[0], expected)


def test_copies_keep_what_was_asked_of_the_original() -> None:
    mha = module(dropout=0.25, causal=True, window=3, scale=0.5, softcap=2.0, sinks=True).eval()
    mha.v_proj.requires_grad_(False)
    for new in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha)), saved_whole(mha)):
        assert repr(new) == repr(mha) and new.sizes == mha.sizes and not new.training
        assert [x.requires_grad for x in new.parameters()] == [x.requires_grad for x in mha.parameters()]
        assert_same([new(normal(1, B, T, E))[0]], [mha(normal(1, B, T, E))[0]])


def test_a_copy_made_between_forward_and_back_disturbs_neither() -> None:
    mha, x = module(), normal(1, B, T, E).requires_grad_()
    out = mha(x)[0]
    copy.deepcopy(mha)
    saved_whole(mha)
    actual = torch.autograd.grad(out.sum(), [x, *mha.parameters()])
    assert_same(actual, torch.autograd.grad(mha(x)[0].sum(), [x, *mha.parameters()]))


WAYS: dict[str, Copy] = {
    "itself": lambda mha: mha,
    "deepcopy": copy.deepcopy,
    "pickle": lambda mha: pickle.loads(pickle.dumps(mha)),
    "cast": lambda mha: mha.to(torch.float32).to(torch.float64),
}


@pytest.mark.thinned(4, slow=2)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("subject", "other"), [("q_proj", "k_proj"), ("k_proj", "v_proj"), ("q_proj", "v_proj")]
)
@pytest.mark.parametrize("label", ["weight", "bias", "layer"])
def test_tied_parameters_stay_tied_through_copies_casts_and_loading(
    label: str, subject: str, other: str, way: Copy
) -> None:
    """Laying a weight that is there twice into the block twice crashed: it can only lie in one place."""
    mha, x = module(), normal(1, B, T, E)
    if label == "layer":
        setattr(mha, other, getattr(mha, subject))
    else:
        setattr(getattr(mha, other), label, getattr(getattr(mha, subject), label))
    new = way(mha)
    new.load_state_dict({name: -value for name, value in new.state_dict().items()})
    attribute = "bias" if label == "bias" else "weight"
    assert getattr(getattr(new, subject), attribute) is getattr(getattr(new, other), attribute)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            assert_same([new(x)[0]], [by_hand(new, x)])
            assert_same([new(x, x + 1, x + 1)[0]], [by_hand(new, x, x + 1)])


def test_weights_tied_between_two_modules_stay_tied() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = module(), module()
            self.second.k_proj = self.first.k_proj
            self.second.q_proj.weight = self.first.q_proj.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)[0])[0]

    two, x = Two(), normal(1, B, T, E)
    expected = by_hand(two.second, by_hand(two.first, x))
    for new in (two, copy.deepcopy(two), copy.deepcopy(two).float().double()):
        assert new.second.k_proj is new.first.k_proj
        assert new.second.q_proj.weight is new.first.q_proj.weight
        exact = new(x) if new is two else by_hand(new.second, by_hand(new.first, x))
        assert_same([new(x)], [exact])
    assert_same([two(x)], [expected])


def test_no_weight_drags_the_others_along_when_saved() -> None:
    """Tools that save look at storages. torch.save of one projection writes all three, torch.export.save
    warns, and safetensors.torch.save_model, which wants a weight that covers its storage, refuses."""
    mha, file = module(), io.BytesIO()
    torch.save(mha.q_proj.weight.detach(), file)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in mha.parameters())
    assert file.tell() < 2 * mha.q_proj.weight.nbytes


# Elsewhere


@pytest.mark.parametrize("name", ["self", "cross"])
@pytest.mark.parametrize(
    "cast",
    [nn.Module.double, nn.Module.half, lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu", torch.float64)],
    ids=["double", "half", "to dtype", "to device and dtype"],
)
def test_a_cast_module_is_packed_again(cast: Callable[[nn.Module], nn.Module], name: str) -> None:
    kind, mha = KINDS[name], KINDS[name].module(dtype=torch.float32)
    before = list(mha.parameters())
    assert cast(mha) is mha and packed(mha)
    assert all(a is b for a, b in zip(mha.parameters(), before, strict=True))
    dtype = mha.q_proj.weight.dtype
    inputs = [x.to(dtype) for x in kind.inputs()]
    truth = kind.by_hand(copy.deepcopy(mha).double(), *(x.double() for x in inputs))
    assert_judged(kind.output(mha, *inputs), kind.by_hand(mha, *inputs), truth, dtype=dtype, name=str(dtype))


def test_one_projection_cast_alone_is_right_or_refused() -> None:
    mha, x = module(dtype=torch.float32), normal(1, B, T, E, dtype=torch.float32)
    plain, truth = by_hand(mha, x), by_hand(copy.deepcopy(mha).double(), x.double())
    mha.k_proj.double().float()
    assert not packed(mha)
    assert_judged(mha(x)[0], plain, truth, dtype=torch.float32, name="there and back")
    mha.k_proj.double()
    with pytest.raises(RuntimeError, match="same dtype"):
        mha(x)
    mha.float()
    assert packed(mha)
    assert_judged(mha(x)[0], plain, truth, dtype=torch.float32, name="all of it back")


@pytest.mark.parametrize("beginning", [copy.deepcopy, unpacked], ids=["packed", "apart"])
def test_shared_memory_is_left_where_it_is(beginning: Copy) -> None:
    """Laying it elsewhere would part it from the other processes."""
    mha, x = beginning(module()), normal(1, B, T, E)
    expected = mha(x)[0]
    assert mha.share_memory() is mha and all(parameter.is_shared() for parameter in mha.parameters())
    places = [parameter.data_ptr() for parameter in mha.parameters()]
    mha.load_state_dict({name: value.clone() for name, value in mha.state_dict().items()})
    assert places == [parameter.data_ptr() for parameter in mha.parameters()]
    assert_same([mha(x)[0]], [expected])
    with torch.no_grad():
        assert_same([mha(x)[0]], [expected])
    assert packed(copy.deepcopy(mha))


@pytest.mark.parametrize("way", ["argument", "context", "to"])
def test_a_module_without_memory_has_shapes_and_is_filled_later(way: str) -> None:
    if way == "argument":
        mha = MultiHeadAttention(E, H, dtype=torch.float64, device="meta")
    elif way == "context":
        with torch.device("meta"):
            mha = MultiHeadAttention(E, H, dtype=torch.float64)
    else:
        mha = module().to("meta")
    assert all(parameter.is_meta for parameter in mha.parameters()) and mha._packed is None
    out, weights = mha(torch.empty(B, T, E, dtype=torch.float64, device="meta"))
    assert out.shape == (B, T, E) and out.is_meta and weights.shape == (B, H, T, T)
    mha.to_empty(device="cpu")
    assert packed(mha)
    mha.load_state_dict(module().state_dict())
    assert torch.equal(mha(normal(1, B, T, E))[0], module()(normal(1, B, T, E))[0])


def test_parameters_assigned_while_loading_are_the_ones_given() -> None:
    mha, state = module(), {name: nn.Parameter(x * 2) for name, x in module().state_dict().items()}
    mha.load_state_dict(state, assign=True)
    assert all(mha.get_parameter(name) is value for name, value in state.items()) and packed(mha)
    assert_same([mha(normal(1, B, T, E))[0]], [by_hand(mha, normal(1, B, T, E))])


# Training

OPTIMISERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
}


@pytest.mark.parametrize("name", ["self", "cross", "grouped"])
@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS)
def test_steps_of_an_optimiser_equal_those_of_an_unpacked_twin(
    optimiser: Callable[[Any], torch.optim.Optimizer], name: str
) -> None:
    """k_proj has no bias here: that one's gradient is 0, and Adam divides one rounding by another."""
    kind = KINDS[name]
    mha = kind.module(bias=False)
    twin = unpacked(mha)
    for way in (mha, twin):
        steps = optimiser(way.parameters())
        for _ in range(5):
            steps.zero_grad()
            kind.output(way, *kind.inputs()).square().mean().backward()
            nn.utils.clip_grad_norm_(way.parameters(), 0.5)
            steps.step()
    assert packed(mha) and not packed(twin)
    assert_same(list(mha.parameters()), list(twin.parameters()))


@pytest.mark.thinned(slow=3)
@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])
@pytest.mark.parametrize("crosses", [False, True], ids=["self", "cross"])
@pytest.mark.parametrize(
    "change",
    [
        lambda p: torch.randn_like(p),
        lambda p: p.t() if p.ndim == 2 else p.flip(0),
        lambda p: p.clone().flip(0),
        lambda p: torch.cat([p, p])[: len(p)],
    ],
    ids=["other", "turned", "flipped", "longer memory"],
)
@pytest.mark.parametrize(
    "name", ["q_proj.weight", "k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias"]
)
def test_data_put_in_the_place_of_a_weights_own_is_used(
    change: Callable[[Tensor], Tensor], name: str, crosses: bool, gradients: bool
) -> None:
    """`p.data = other` breaks the packing, a square weight turned in place most quietly of all."""
    kind = Kind(crosses=crosses)
    mha = kind.module()
    parameter = mha.get_parameter(name)
    torch.manual_seed(0)
    parameter.data = change(parameter.data)
    assert not packed(mha)
    if gradients:
        assert_same(kind.results(mha), kind.results(mha, kind.by_hand))
    else:
        with torch.no_grad():
            assert_same([kind.output(mha, *kind.inputs())], [kind.by_hand(mha, *kind.inputs())])
    mha.float().double()
    assert packed(mha)
    assert_same(kind.results(mha), kind.results(mha, kind.by_hand))


@pytest.mark.parametrize("gradients", [True, False], ids=["gradients", "express"])
def test_heads_cut_off_in_place_are_gone(gradients: bool) -> None:
    """The last head pruned by slicing `.data`: each weight still begins where it did, and the old block was
    still taken for its rows."""
    mha, x, saved = module(), normal(1, B, T, E), 24
    expected = MultiHeadAttention(E, 4, head_dim=6, dtype=torch.float64)
    state = {name: value[:saved] for name, value in mha.state_dict().items()}
    state |= {"out_proj.weight": mha.out_proj.weight[:, :saved], "out_proj.bias": mha.out_proj.bias}
    expected.load_state_dict(state)
    mha.num_heads = mha.num_kv_heads = 4
    for layer in (mha.q_proj, mha.k_proj, mha.v_proj):
        layer.weight.data, layer.bias.data = layer.weight.data[:saved], layer.bias.data[:saved]
    mha.out_proj.weight.data = mha.out_proj.weight.data[:, :saved]
    with torch.set_grad_enabled(gradients):
        assert_same([mha(x)[0]], [expected(x)[0]])


def test_parameters_from_one_vector_are_used() -> None:
    """`vector_to_parameters` makes every parameter a view of the vector."""
    mha, x = module(), normal(1, B, T, E)
    vector = nn.utils.parameters_to_vector(mha.parameters()).detach() * 0.5
    nn.utils.vector_to_parameters(vector, mha.parameters())
    assert_same([mha(x)[0]], [by_hand(mha, x)])
    vector.mul_(-1)
    assert_same([mha(x)[0]], [by_hand(mha, x)])


# Several processes


def batch_of(rank: int | None) -> list[Tensor]:
    """Four sequences and their memories, or one rank's half of them."""
    whole = [normal(1, 4, T, E), normal(2, 4, S, E)]
    return whole if rank is None else [x[2 * rank : 2 * rank + 2] for x in whole]


def loss_of(mha: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    """Of both ways to call it, and of the weights too."""
    out, weights = mha(x, memory, memory)
    again, _ = mha(out)
    loss: Tensor = again.square().mean() + weights.dense().square().mean()
    return loss


def data_parallel() -> list[Any]:
    """Gradients of two steps; ranks begin apart and must be brought together."""
    mha, rank = module(), torch.distributed.get_rank()
    if rank:
        mha.reset_parameters()
    actual = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for unused in (False, True):
            ddp = nn.parallel.DistributedDataParallel(mha, find_unused_parameters=unused)
            mha.zero_grad()
            loss_of(ddp, *batch_of(rank)).backward()
            actual.append([parameter.grad for parameter in mha.parameters()])
    return [*actual, packed(mha)]


@pytest.mark.slow
def test_two_processes_have_the_mean_of_both_halves_gradients() -> None:
    mha = module()
    (loss_of(mha, *batch_of(0)) / 2 + loss_of(mha, *batch_of(1)) / 2).backward()
    expected = [parameter.grad for parameter in mha.parameters()]
    for plain, unused, still_packed in run_ranks(2, data_parallel):
        assert_same(plain, expected)
        assert_same(unused, expected)
        assert still_packed


def fully_sharded() -> list[Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mha, rank = module(), torch.distributed.get_rank()
    fully_shard(mha, mesh=init_device_mesh("cpu", (2,)))
    actual = []
    for _ in range(2):
        mha.zero_grad()
        out, weights = mha(batch_of(rank)[0])
        (out.square().mean() + weights.dense().square().mean()).backward()
        grads: list[Any] = [parameter.grad for parameter in mha.parameters()]
        actual.append([out.detach(), *(grad.full_tensor() for grad in grads)])
    return actual


@pytest.mark.slow
def test_a_module_sharded_over_two_processes_equals_the_whole() -> None:
    mha = module()
    outs = []
    for rank in range(2):
        out, weights = mha(batch_of(rank)[0])
        ((out.square().mean() + weights.dense().square().mean()) / 2).backward()
        outs.append(out.detach())
    grads = [parameter.grad for parameter in mha.parameters()]
    for rank, steps in enumerate(run_ranks(2, fully_sharded)):
        for out, *actual in steps:
            assert_same([out], [outs[rank]])
            assert_same(actual, grads)
