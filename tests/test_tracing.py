"""Tracers of torch: `torch.jit.trace`, `torch.fx.symbolic_trace`, `make_fx`, AOTAutograd, linearize.

What is recorded for one example must be right for other numbers, lengths and batches, or be refused. Sizes:
E 30 = H 5 * D 6, B 3, T 7, S 11; float64.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, nop
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import headwise as hw
from headwise import Mask, MultiHeadAttention
from headwise.errors import ArgumentError, BackendUnavailable

B, T, S, E, H = 3, 7, 11, 30, 5
LENGTHS = [(B, T, S), (2, 13, 17), (5, 3, 3), (1, 1, 19)]  # the example's, then others

# A tracer warns of every size that Python looks at, of torch's own modules, too.
pytestmark = [
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*get_attr Node with no underlying reference.*:UserWarning"),
]


class Call(nn.Module):
    """A module called in some way; only tensors come in and out."""

    def __init__(self, inner: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.call(self.inner, *arguments)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def masked(batch: int, rows: int, columns: int) -> Tensor:
    """A mask in which every query sees its first key."""
    visible = torch.rand(batch, 1, rows, columns) > 0.4
    visible[..., 0] = True
    return visible


def assert_traced(module: nn.Module, inputs: Callable[[int, int, int], tuple[Tensor, ...]]) -> None:
    """A trace of the first of LENGTHS computes what the module does, for other numbers of every length."""
    traced = torch.jit.trace(module, inputs(*LENGTHS[0]), check_trace=False)
    for sizes in LENGTHS:
        arguments = inputs(*sizes)
        torch.testing.assert_close(traced(*arguments), module(*arguments))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"num_heads": 6, "num_kv_heads": 3},
    "rope": {"rope": hw.nn.Rope(), "causal": True},
    "alibi": {"alibi": True, "causal": True},
    "sinks": {"sinks": True},
    "window": {"window": 3, "causal": True},
    "softcap": {"softcap": 2.0},
    "relative_bias": {"relative_bias": hw.nn.Buckets(8)},
    "norm and gate": {"qk_norm": "rms", "gate": "head"},
}
Inputs = Callable[[int, int, int], tuple[Tensor, ...]]
CALLS: dict[str, tuple[Callable[..., Tensor], Inputs]] = {
    "self": (lambda mha, x: mha(x)[0], lambda b, t, s: (normal(b, t, E),)),
    "no weights": (lambda mha, x: mha(x, need_weights=False)[0], lambda b, t, s: (normal(b, t, E),)),
    "weights": (lambda mha, x: mha(x)[1].dense(), lambda b, t, s: (normal(b, t, E),)),
    "entropy": (lambda mha, x: mha(x)[1].statistics().entropy, lambda b, t, s: (normal(b, t, E),)),
    "cross": (lambda mha, x, y: mha(x, y, y)[0], lambda b, t, s: (normal(b, t, E), normal(b, s, E))),
    "mask": (lambda mha, x, m: mha(x, mask=m)[0], lambda b, t, s: (normal(b, t, E), masked(b, t, t))),
    "padding": (
        lambda mha, x, real: mha(x, mask=Mask.padding(real))[0],
        lambda b, t, s: (normal(b, t, E), masked(b, 1, t)[:, 0, 0]),
    ),
    "bias": (lambda mha, x, m: mha(x, bias=m)[0], lambda b, t, s: (normal(b, t, E), normal(b, 1, t, t))),
    "lengths": (
        lambda mha, x, n: mha(x, lengths=n)[0],
        lambda b, t, s: (normal(b, t, E), torch.randint(1, t + 1, (b,))),
    ),
    "documents": (
        lambda mha, x, ids: mha(x, documents=ids)[0],
        lambda b, t, s: (normal(b, t, E), torch.randint(0, 3, (b, t)).sort().values),
    ),
}


@pytest.mark.thinned(24, slow=4)
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_traced_module_is_right_for_other_inputs_and_lengths(option: str, call: str, grad: bool) -> None:
    """With gradients a trace held q and k of the example as constants, and answered with its numbers; without
    them rope= raised, and lengths were those of the example."""
    torch.manual_seed(1)
    made = MultiHeadAttention(E, **{"num_heads": H, **OPTIONS[option]}, dtype=torch.float64)
    ask, inputs = CALLS[call]
    for mode in (True, False):
        with torch.set_grad_enabled(grad):
            assert_traced(Call(made.train(mode), ask), inputs)


@pytest.mark.thinned(2, slow=2)
@pytest.mark.parametrize("look", ["output", "dense", "lse", "mean_heads", "top", "pooled", "row"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 3}, {"softcap": 2.0}], ids=str)
def test_a_traced_attention_is_right_for_other_inputs(options: dict[str, Any], look: str) -> None:
    """q and k that require gradients were constants in the graph, and a look at the map raised
    `unordered_map::at`."""
    looks: dict[str, Callable[[Tensor, hw.AttentionMap], Tensor]] = {
        "output": lambda out, weights: out,
        "dense": lambda out, weights: weights.dense(),
        "lse": lambda out, weights: weights.lse,
        "mean_heads": lambda out, weights: weights.mean_heads(),
        "top": lambda out, weights: weights.top(1).values,
        "pooled": lambda out, weights: weights.pooled(1),
        "row": lambda out, weights: weights[0, 1, 0],
    }

    def inputs(b: int, t: int, s: int) -> tuple[Tensor, ...]:
        q, k, v = (normal(b, H, t, 6).requires_grad_() for _ in range(3))
        return q, k, v

    traced = torch.jit.trace(
        lambda q, k, v: looks[look](*hw.attention(q, k, v, **options)), inputs(B, T, S), check_trace=False
    )
    for sizes in LENGTHS:
        arguments = inputs(*sizes)
        expected = looks[look](*hw.attention(*arguments, **options))
        torch.testing.assert_close(traced(*arguments), expected)


def test_a_trace_keeps_gradients_and_a_band_that_the_example_did_not_reach() -> None:
    """One query sees every key: that nothing is hidden must not be recorded."""
    mha = MultiHeadAttention(E, H, causal=True, dtype=torch.float64)
    traced = torch.jit.trace(Call(mha, lambda m, x: m(x)[0]), (normal(B, 1, E),), check_trace=False)
    x = normal(B, T, E)
    torch.testing.assert_close(traced(x), mha(x)[0])
    traced(x).square().sum().backward()
    actual = [p.grad.clone() for p in mha.parameters() if p.grad is not None]
    mha.zero_grad()
    mha(x)[0].square().sum().backward()
    for gradient, parameter in zip(actual, mha.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_a_cache_is_refused_while_a_call_is_traced() -> None:
    mha = MultiHeadAttention(E, H, causal=True, dtype=torch.float64)
    with pytest.raises(ArgumentError, match=r"cache must not be given under torch.jit.trace.*got KVCache\("):
        torch.jit.trace(Call(mha, lambda m, x: m(x, cache=m.cache())[0]), (normal(B, T, E),))
    memory, x = mha.remember(normal(B, S, E)), normal(B, 1, E)
    with pytest.raises(
        ArgumentError, match=r"lengths must not be given under torch.jit.trace.*got \[1, 0, 1\]"
    ):
        torch.jit.trace(Call(mha, lambda m, x: m(x, cache=memory, lengths=[1, 0, 1])[0]), (x,))


def test_a_named_backend_is_refused_while_a_call_is_traced() -> None:
    q = normal(B, H, T, 6)
    with pytest.raises(BackendUnavailable, match=r'backend="tiles" cannot run this call: a tracer'):
        torch.jit.trace(lambda q: hw.attention(q, q, q, backend="tiles")[0], (q,))


# torch.fx


class Block(nn.Module):
    """A residual block with torch's attention, as models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(E, H, batch_first=True)
        self.last = nn.Linear(E, E)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        out, _ = self.attend(x, x, x, key_padding_mask=~real, need_weights=False)
        last: Tensor = self.last(x + out)
        return last


class Encoder(nn.Module):
    """A model around torch's encoder."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(E, H, 17, 0.0, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False) if whole else layer

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        out: Tensor = self.stack(x, src_key_padding_mask=~real)
        return out * 2


class Own(nn.Module):
    """A model with our module."""

    def __init__(self) -> None:
        super().__init__()
        self.mha = MultiHeadAttention(E, H)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        out, _ = self.mha(x, mask=real[:, None, None], need_weights=False)
        return x + out


MODELS = {
    "attention": Block,
    "encoder": lambda: Encoder(True),
    "layer": lambda: Encoder(False),
    "own": Own,
}


@pytest.mark.parametrize("name", MODELS)
def test_torch_fx_keeps_our_modules_whole(name: str) -> None:
    """An adopted model raised TraceError: torch's tracer keeps whole what lives in torch.nn alone."""
    torch.manual_seed(1)
    model = MODELS[name]().double()
    theirs = None if name == "own" else torch.fx.symbolic_trace(model)
    hw.adopt(model)
    graph = torch.fx.symbolic_trace(model)
    if theirs is not None:
        nodes, expected = ([(n.op, str(n.target)) for n in g.graph.nodes] for g in (graph, theirs))
        assert nodes == expected
    for node in graph.graph.nodes:
        node.type = None  # this file's annotations are strings, which torch.fx does not pickle
    graph.recompile()
    x, real = normal(B, T, E), masked(B, 1, T)[:, 0, 0]
    for traced in (graph, pickle.loads(pickle.dumps(graph))):
        torch.testing.assert_close(traced(x, real), model(x, real))
    graph(x, real).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_torch_fx_refuses_a_hook_that_would_run_twice() -> None:
    model = Block()
    hw.adopt(model)
    model.attend.register_forward_hook(lambda *_: None)
    with pytest.raises(ArgumentError, match=r"MultiheadAttention must have no hooks under torch.fx.*: got 1"):
        torch.fx.symbolic_trace(model)


class Function(nn.Module):
    """A model that calls the function."""

    def forward(self, q: Tensor) -> Tensor:
        return hw.attention(q, q, q)[0]


def test_torch_fx_is_told_how_to_keep_the_function_whole() -> None:
    with pytest.raises(ArgumentError, match=r"q must be a tensor: got Proxy; .*torch.fx.wrap.*torch.export"):
        torch.fx.symbolic_trace(Function())


# make_fx and what is built on it

CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * T, [False] * 5 + [True] * 2, [False] * 3 + [True] * 4])


def torchs(
    mha: nn.Module, x: Tensor, attn_mask: Tensor | None, padding: Tensor | None, wants: bool
) -> Tensor:
    output: Tensor = mha(x, x, x, padding, wants, attn_mask)[0]
    return output


Ask = Callable[..., Tensor]
FUNCTIONS: dict[str, tuple[Callable[[], nn.Module], Ask, tuple[Tensor, ...]]] = {
    f"torch's class, {name}, weights {wants}": (
        lambda: hw.nn.MultiheadAttention(E, H, batch_first=True),
        lambda m, x, *rest, name=name, wants=wants: torchs(
            m, x, rest[0] if name == "mask" else None, rest[0] if name == "padding" else None, wants
        ),
        masks,
    )
    for name, masks in {"plain": (), "mask": (CAUSAL,), "padding": (PADDING,)}.items()
    for wants in (True, False)
} | {
    "plain": (lambda: MultiHeadAttention(E, H), lambda m, x: m(x)[0], ()),
    "causal": (lambda: MultiHeadAttention(E, H, causal=True), lambda m, x: m(x)[0], ()),
    "rope": (lambda: MultiHeadAttention(E, H, rope=hw.nn.Rope()), lambda m, x: m(x)[0], ()),
    "alibi": (lambda: MultiHeadAttention(E, H, alibi=True, causal=True), lambda m, x: m(x)[0], ()),
    "sinks": (lambda: MultiHeadAttention(E, H, sinks=True), lambda m, x: m(x)[0], ()),
    "mask": (lambda: MultiHeadAttention(E, H), lambda m, x, mask: m(x, mask=mask)[0], (~CAUSAL,)),
    "weights": (
        lambda: MultiHeadAttention(E, H),
        lambda m, x: m(x)[1].dense().mean(1) @ m(x)[0],
        (),
    ),
    "lengths": (
        lambda: MultiHeadAttention(E, H),
        lambda m, x, n: m(x, lengths=n)[0],
        (torch.tensor([7, 5, 2]),),
    ),
}


@pytest.mark.thinned(8, slow=2)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_forward_and_backward(name: str, mode: str) -> None:
    """Values were read while they were recorded, and gradients went through an autograd function of ours."""
    make, ask, more = FUNCTIONS[name]
    module = make().double()
    names, parameters = zip(*module.named_parameters(), strict=True)

    def gradients(x: Tensor, *arguments: Tensor) -> tuple[Tensor, ...]:
        held = {f"inner.{n}": p for n, p in zip(names, arguments[len(more) :], strict=True)}
        out = torch.func.functional_call(Call(module, ask), held, (x, *arguments[: len(more)]))
        return out, *torch.autograd.grad(out.square().sum(), (x, *arguments[len(more) :]))

    graph = make_fx(gradients, tracing_mode=mode)(normal(B, T, E).requires_grad_(), *more, *parameters)
    x = normal(B, T, E).requires_grad_()
    torch.testing.assert_close(graph(x, *more, *parameters), gradients(x, *more, *parameters))


@pytest.mark.thinned(4, slow=2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_aot_function_and_linearize_answer_as_the_module_does(name: str) -> None:
    """AOTAutograd met values that it cannot read, and linearize raised where there was a mask."""
    make, ask, more = FUNCTIONS[name]
    module = make().double()
    names, parameters = zip(*module.named_parameters(), strict=True)
    count = len(more)

    def ahead(x: Tensor, *arguments: Tensor) -> Tensor:
        held = {f"inner.{n}": p for n, p in zip(names, arguments[count:], strict=True)}
        out: Tensor = torch.func.functional_call(Call(module, ask), held, (x, *arguments[:count]))
        return out

    x, y = normal(B, T, E).requires_grad_(), normal(B, T, E)
    actual = aot_function(ahead, nop)(x, *more, *parameters)
    torch.testing.assert_close(actual, ask(module, x, *more))
    wanted = (x, *parameters)
    expected = torch.autograd.grad(ask(module, x, *more).square().sum(), wanted)
    for first, other in zip(torch.autograd.grad(actual.square().sum(), wanted), expected, strict=True):
        torch.testing.assert_close(first, other)

    def f(x: Tensor) -> Tensor:
        return ask(module, x, *more)

    out, push = torch.func.linearize(f, x.detach())
    torch.testing.assert_close((out, push(y)), torch.func.jvp(f, (x.detach(),), (y,)))
