"""Attention in every mode torch has: derivatives of all kinds, transforms, compile, export, autocast.

Sizes are tiny (B1 H2 Hk1 T2 S3 D2) and in float64 where derivatives are compared with differences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise import Mask
from headwise.scoring import Alibi, Relative, alibi
from judge import Case, assert_judged, error, scores_from, sizes

Function = Callable[..., Tensor]

# torch's own: forward mode imports code that uses torch.jit.script; batched gradients loop where a kernel has
# no batching rule; dynamo warns about what it does itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop.*:UserWarning"),
]


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


class Mode(NamedTuple):
    """A way to call attention: what stays fixed, and what is learned beside q, k and v."""

    fixed: dict[str, Any]
    learned: dict[str, Tensor]

    def run(self, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> tuple[Tensor, hw.AttentionMap]:
        options = dict(self.fixed)
        for name, value in zip(self.learned, learned, strict=True):
            kind = {"slopes": Alibi, "relative": Relative}.get(name)
            options[name if kind is None else "bias"] = value if kind is None else kind(value)
        return hw.attention(q, k, v, **options)

    def output(self, q: Tensor, k: Tensor, v: Tensor, *learned: Tensor) -> Tensor:
        return self.run(q, k, v, *learned)[0]

    def inputs(self, gradients: bool = True) -> list[Tensor]:
        actual = [normal(1, 1, 2, 2, 2), normal(2, 1, 1, 3, 2), normal(3, 1, 1, 3, 2), *self.learned.values()]
        return [x.detach().clone().requires_grad_(gradients) for x in actual]


MODES = {
    "full": Mode({}, {}),
    "causal": Mode({"causal": True}, {}),
    "window": Mode({"window": 2}, {}),
    "band": Mode({"window": (0, 1)}, {}),
    "padding": Mode({"mask": Mask.padding([2])}, {}),
    "documents": Mode({"mask": Mask.documents([0, 0, 1])}, {}),
    "softcap": Mode({"softcap": 1.5}, {}),
    "sinks": Mode({}, {"sinks": normal(4, 2)}),
    "bias": Mode({"causal": True}, {"bias": normal(5, 2, 2, 3)}),
    "slopes": Mode({}, {"slopes": normal(6, 2).abs()}),
    "relative": Mode({}, {"relative": normal(8, 2, 3)}),
    "dense": Mode({"mask": torch.tensor([[True, False, True], [False, False, False]])}, {}),
    "everything": Mode(
        {"causal": True, "mask": Mask.padding([2]), "softcap": 1.5, "scale": 0.7},
        {"bias": normal(5, 1, 2, 3), "sinks": normal(4, 2)},
    ),
}
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


# Derivatives


@pytest.mark.thinned(3, keep=["auto-everything"], slow=2)
@every_mode
@pytest.mark.parametrize("backend", ["auto", "tiles", "plain"])
def test_gradients_are_what_differences_say(mode: Mode, backend: str) -> None:
    chosen = Mode(mode.fixed | {"backend": backend}, mode.learned)
    assert torch.autograd.gradcheck(chosen.output, mode.inputs())


@pytest.mark.thinned
@every_mode
def test_derivatives_of_derivatives_are_what_differences_say(mode: Mode) -> None:
    assert torch.autograd.gradgradcheck(mode.output, mode.inputs())


@pytest.mark.thinned
@every_mode
def test_forward_mode_agrees_with_differences(mode: Mode) -> None:
    assert torch.autograd.gradcheck(
        mode.output,
        mode.inputs(),
        check_forward_ad=True,
        check_backward_ad=False,
        check_batched_forward_grad=True,
    )


@every_mode
def test_gradients_may_come_in_batches(mode: Mode) -> None:
    """`torch.autograd.grad(..., is_grads_batched=True)`, which vectorised jacobians use."""
    leaves = mode.inputs()
    out = mode.output(*leaves)
    pulls = normal(7, 3, *out.shape)
    together = torch.autograd.grad(out, leaves, pulls, is_grads_batched=True, retain_graph=True)
    for i, pull in enumerate(pulls):
        alone = torch.autograd.grad(out, leaves, pull, retain_graph=True)
        for single, many in zip(alone, together, strict=True):
            assert error(many[i], single) < 1e-12


def test_a_row_that_sees_nothing_sends_nothing_back() -> None:
    leaves = MODES["dense"].inputs()
    out = MODES["dense"].output(*leaves)
    grads = torch.autograd.grad(out[:, :, 1].sum(), leaves, retain_graph=True)
    assert not out[:, :, 1].any() and not any(grad.any() for grad in grads)
    whole = torch.autograd.grad(out.sum(), leaves)
    assert all(bool(torch.isfinite(grad).all()) for grad in whole) and bool(whole[0][:, :, 0].any())


def test_only_what_wants_a_gradient_gets_one() -> None:
    for wanted in range(5):
        leaves = [normal(i, *x.shape) for i, x in enumerate(MODES["everything"].inputs())]
        leaves[wanted].requires_grad_()
        MODES["everything"].output(*leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [i == wanted for i in range(5)]


# Function transforms


@every_mode
def test_the_gradient_transform_equals_autograd(mode: Mode) -> None:
    leaves = mode.inputs()

    def loss(*inputs: Tensor) -> Tensor:
        return mode.output(*inputs).sin().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves)
    actual = torch.func.grad(loss, argnums=tuple(range(len(leaves))))(*mode.inputs(gradients=False))
    for mine, theirs in zip(actual, expected, strict=True):
        assert error(mine, theirs) < 1e-13


@every_mode
def test_vmap_equals_a_loop(mode: Mode) -> None:
    stacks = [torch.stack([x, 2 * x, x - 1]) for x in mode.inputs(gradients=False)]
    together = torch.func.vmap(mode.output)(*stacks)
    gradients = torch.func.vmap(torch.func.grad(lambda *inputs: mode.output(*inputs).sin().sum()))(*stacks)
    for i in range(3):
        alone = [x[i].clone().requires_grad_() for x in stacks]
        out = mode.output(*alone)
        assert error(together[i], out) < 1e-13
        assert error(gradients[i], torch.autograd.grad(out.sin().sum(), alone[0])[0]) < 1e-13


@pytest.mark.parametrize(
    ("make", "stack"),
    [
        (lambda x: {"mask": x}, torch.tensor([[True, True, False], [False, True, True]])),
        (lambda x: {"mask": Mask.padding(x)}, torch.tensor([[1], [3]])),
        (lambda x: {"mask": Mask.documents(x)}, torch.tensor([[0, 0, 1], [1, 1, 1]])),
        (lambda x: {"bias": x}, normal(5, 2, 2, 2, 3)),
        (lambda x: {"sinks": x}, normal(4, 2, 2)),
    ],
    ids=["mask", "lengths", "documents", "bias", "sinks"],
)
def test_vmap_over_a_rule_equals_a_loop(make: Callable[[Tensor], dict[str, Any]], stack: Tensor) -> None:
    q, k, v = MODES["full"].inputs(gradients=False)
    together = torch.func.vmap(lambda x: hw.attention(q, k, v, **make(x))[0])(stack)
    alone = torch.stack([hw.attention(q, k, v, **make(x))[0] for x in stack])
    assert error(together, alone) < 1e-13


@every_mode
def test_weights_are_differentiated_under_transforms_too(mode: Mode) -> None:
    leaves = mode.inputs()

    def loss(*inputs: Tensor) -> Tensor:
        return mode.run(*inputs)[1].dense().square().sum()

    expected = torch.autograd.grad(loss(*leaves), leaves[:2])
    actual = torch.func.grad(loss, argnums=(0, 1))(*mode.inputs(gradients=False))
    for mine, theirs in zip(actual, expected, strict=True):
        assert error(mine, theirs) < 1e-13
    q, *rest = mode.inputs(gradients=False)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, normal(9, *q.shape))
        along = forward_ad.unpack_dual(mode.run(dual, *rest)[1].dense()).tangent
    step = 1e-6 * normal(9, *q.shape)
    ahead, behind = (mode.run(q + way, *rest)[1].dense() for way in (step, -step))
    assert along is not None and error(along, (ahead - behind) / 2e-6) < 1e-8


# torch.compile


def assert_compiled_equals_eager(function: Function, inputs: list[Tensor], compiled: Function) -> None:
    """Forward and gradients."""
    results = []
    for run in (function, compiled):
        leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        out = run(*leaves)
        wanted = [x for x in leaves if x.requires_grad]
        grads = torch.autograd.grad(out, wanted, normal(8, *out.shape, dtype=out.dtype)) if wanted else ()
        results.append([out, *grads])
    for mine, theirs in zip(*results, strict=True):
        assert error(mine, theirs) < 1e-12


@pytest.mark.thinned(4)
@pytest.mark.usefixtures("fresh_compiler")
@every_mode
def test_compiled_in_one_graph_equals_eager(mode: Mode) -> None:
    compiled = torch.compile(mode.output, fullgraph=True, backend="aot_eager")
    assert_compiled_equals_eager(mode.output, mode.inputs(), compiled)


def of_length(T: int, S: int) -> list[Tensor]:
    q, k, v = normal(1, 2, 6, T, 4), normal(2, 2, 3, S, 4), normal(3, 2, 3, S, 4)
    return [x.requires_grad_() for x in (q, k, v)]


SINKS, BIASES, LEARNED = normal(4, 6), alibi(6), normal(9, 6, 7)
BY_LENGTH: dict[str, Function] = {
    "full": lambda q, k, v: hw.attention(q, k, v)[0],
    "causal": lambda q, k, v: hw.attention(q, k, v, causal=True)[0],
    "window": lambda q, k, v: hw.attention(q, k, v, window=3)[0],
    "lengths": lambda q, k, v: hw.attention(q, k, v, Mask.padding(torch.tensor([3, 5])), causal=True)[0],
    "holes": lambda q, k, v: hw.attention(q, k, v, Mask.padding(k[:, 0, :, 0] > -1))[0],
    "documents": lambda q, k, v: hw.attention(q, k, v, Mask.documents(torch.arange(k.shape[2]) // 3))[0],
    "sinks": lambda q, k, v: hw.attention(q, k, v, sinks=SINKS)[0],
    "slopes": lambda q, k, v: hw.attention(q, k, v, bias=BIASES)[0],
    "relative": lambda q, k, v: hw.attention(q, k, v, bias=(Relative(LEARNED), BIASES))[0],
}


@pytest.mark.thinned(99, keep=["full"], slow=2)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", BY_LENGTH)
def test_compiled_for_any_length_equals_eager_at_two(name: str) -> None:
    function = BY_LENGTH[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for T, S in ((5, 7), (11, 13)):
        assert_compiled_equals_eager(function, of_length(T, S), compiled)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_number_from_outside_may_be_symbolic() -> None:
    """With dynamic=True a float that a function closes over is a symbol, which no message can spell out."""
    cap = float(len("cap")) / 2

    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, softcap=cap)[0]

    compiled = torch.compile(output, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_compiled_equals_eager(output, of_length(5, 7), compiled)


@pytest.mark.thinned(keep=["causal"])
@pytest.mark.parametrize("name", ["full", "causal", "window", "sinks"])
def test_new_lengths_do_not_compile_again_and_again(name: str, counter: Any) -> None:
    """A graph a length would run into torch's limit of eight, and fullgraph=True turns that into an error."""
    compiled = torch.compile(BY_LENGTH[name], fullgraph=True, backend=counter, dynamic=True)
    with torch.no_grad():
        for length in (5, 7, 11, 13, 17):
            inputs = of_length(length, length)
            assert error(compiled(*inputs), BY_LENGTH[name](*inputs)) < 1e-12
    assert counter.frame_count <= 2, counter.frame_count


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_dropout_compiles_in_one_graph() -> None:
    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, dropout=0.5)[0]

    torch.manual_seed(0)
    out = torch.compile(output, fullgraph=True, backend="aot_eager")(*of_length(5, 7))
    assert out.shape == (2, 6, 5, 4) and out.requires_grad


@pytest.mark.thinned(keep=["everything"])
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", ["full", "causal", "padding", "everything"])
def test_a_map_comes_out_of_a_compiled_function_and_works(name: str) -> None:
    mode, answers = MODES[name], []
    for run in (mode.run, torch.compile(mode.run, fullgraph=True, backend="aot_eager")):
        leaves = mode.inputs()
        out, w = run(*leaves)
        assert isinstance(w, hw.AttentionMap) and not w.lse.requires_grad
        (out.sum() + w.dense().square().sum() + w[0, 1, 1].sum()).backward()
        stats = w.statistics()
        answers.append(
            [w[0, 1], w[:, :, -1:], w.mean_heads(), w.lse, stats.entropy, stats.received, leaves[0].grad]
        )
        assert repr(w) == repr(mode.run(*mode.inputs())[1])
    for mine, theirs in zip(*answers, strict=True):
        assert error(mine, theirs) < 1e-12


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "look",
    [lambda w: w[0, 1], lambda w: w.statistics("entropy").entropy],
    ids=["head", "statistics"],
)
def test_looking_at_weights_inside_a_compiled_function_breaks_the_graph_at_most(
    look: Callable[[hw.AttentionMap], Tensor],
) -> None:
    def looked_at(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return look(hw.attention(q, k, v, causal=True)[1])

    compiled = torch.compile(looked_at, backend="aot_eager")
    inputs = of_length(5, 7)
    actual, expected = compiled(*inputs), looked_at(*inputs)
    assert error(actual, expected) < 1e-12
    if expected.requires_grad:
        mine, theirs = (torch.autograd.grad(x.square().sum(), inputs[:2]) for x in (actual, expected))
        assert all(error(a, b) < 1e-12 for a, b in zip(mine, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_masks_may_be_arguments_of_a_compiled_function() -> None:
    def output(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return hw.attention(q, k, v, mask)[0]

    compiled = torch.compile(output, fullgraph=True, backend="aot_eager")
    inputs = of_length(5, 7)
    for mask in (
        None,
        Mask.causal(),
        Mask.padding([3, 7]),
        normal(9, 5, 7) > 0,
        (normal(9, 5, 7) > 0).float(),
    ):
        assert error(compiled(*inputs, mask), output(*inputs, mask)) < 1e-12


@pytest.mark.usefixtures("fresh_compiler")
def test_bad_input_is_refused_inside_a_compiled_function_too() -> None:
    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v)[0]

    q, k, v = (x.detach() for x in of_length(5, 7))
    with pytest.raises(Exception, match="q and k must agree in head_dim: 3 and 4"):
        torch.compile(output, fullgraph=True, backend="aot_eager")(q[..., :3], k, v)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "name", ["full", "causal", "window", "padding", "documents", "softcap", "sinks", "bias"]
)
def test_inductor_equals_eager(name: str) -> None:
    mode = MODES[name]

    def block(*inputs: Tensor) -> Tensor:
        q, *rest = inputs
        return mode.output(q.sin() * 2, *rest).cos()  # something on either side to be fused

    assert_compiled_equals_eager(block, mode.inputs(), torch.compile(block, fullgraph=True))


# torch.export


class Attend(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, **self.options)[0]


@pytest.mark.thinned(99)
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": 3}, {"softcap": 1.5}, {"sinks": normal(4, 2)}],
    ids=["full", "causal", "window", "softcap", "sinks"],
)
def test_an_exported_program_takes_any_batch_and_length(options: dict[str, Any]) -> None:
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", min=2, max=512)
    module = Attend(**options)

    def inputs(B: int, T: int) -> tuple[Tensor, ...]:
        return tuple(normal(i, B, 2, T, 5) for i in range(3))

    program = torch.export.export(module, inputs(3, 7), dynamic_shapes=({0: batch, 2: length},) * 3)
    for B, T in ((3, 7), (2, 13), (5, 2)):
        assert error(program.module()(*inputs(B, T)), module(*inputs(B, T))) < 1e-13


# The operator


# of opcheck's, from torch 2.15 on: see tests/engines/test_operators.py
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.thinned(keep=["padding-tiles", "sinks-flash"])
@pytest.mark.parametrize("backend", ["flash", "tiles"])
@pytest.mark.parametrize("name", ["full", "window", "padding", "sinks", "slopes"])
def test_the_operator_keeps_torchs_rules(name: str, backend: str) -> None:
    mode = MODES[name]
    leaves = mode.inputs()
    options = dict(mode.fixed) | {n: x for n, x in zip(mode.learned, leaves[3:], strict=True) if n == "sinks"}
    if "slopes" in mode.learned:  # which flash gives no gradient to
        options["bias"] = Alibi(leaves[3].requires_grad_(backend == "tiles"))
    q, k, v = leaves[:3]
    flat = v, *scores_from(q, k, v, **options).flatten()
    bias_gradient = "slopes" in mode.learned and backend == "tiles"
    torch.library.opcheck(torch.ops.headwise.attend.default, (*flat, bias_gradient, backend))


# Precision


def rounded(*shapes: tuple[int, ...]) -> list[Tensor]:
    """float32 numbers that bfloat16 can hold, so that casting them loses nothing."""
    return [normal(i, *shape).bfloat16().float() for i, shape in enumerate(shapes)]


def floats() -> list[Tensor]:
    return rounded((2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8))


LOW: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": 3},
    "padding": {"mask": Mask.padding([3, 7])},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": normal(5, 6, 5, 7, dtype=torch.float32)},
    "sinks": {"sinks": normal(4, 6, dtype=torch.float32)},
}
every_low = pytest.mark.parametrize("options", LOW.values(), ids=LOW)


@every_low
@pytest.mark.parametrize("backend", ["auto", "tiles", "plain"])
def test_autocast_runs_in_its_dtype_and_is_as_exact_as_that_allows(
    options: dict[str, Any], backend: str
) -> None:
    leaves = [x.requires_grad_() for x in floats()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, w = hw.attention(*leaves, **options, backend=backend)
    low = [x.detach().bfloat16() for x in leaves]
    expected, same = hw.attention(*low, **options, backend=backend)
    assert out.dtype == w.dtype == w.dense().dtype == torch.bfloat16
    assert w.lse.dtype == torch.float32
    assert torch.equal(out, expected) and torch.equal(w.lse, same.lse)
    out.float().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype == torch.float32 for leaf in leaves)


@every_low
def test_what_is_measured_does_not_change_under_autocast(options: dict[str, Any]) -> None:
    """Tiles are never computed in less than float32, whatever autocast says about matrix products."""
    w = hw.attention(*floats(), **options)[1]

    def measurements() -> list[Tensor]:
        return [w.dense(), w[0, 1], w.mean_heads(), w.pooled(3), w.top(2).values, w.statistics().entropy]

    outside = measurements()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = measurements()
        fresh = hw.AttentionMap(*floats()[:2], **options).lse
    for mine, theirs in zip(inside, outside, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    assert error(fresh, w.lse) < 1e-5


@every_low
@pytest.mark.parametrize("backend", ["auto", "tiles"])
def test_gradients_do_not_change_when_taken_under_autocast(options: dict[str, Any], backend: str) -> None:
    """Through the output and through the weights; the plain path's backward is torch's own."""
    actual = []
    for inside in (False, True):
        leaves = [x.requires_grad_() for x in floats()]
        out, w = hw.attention(*leaves, **options, backend=backend)
        loss = out.square().sum() + w.dense().square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            actual.append(torch.autograd.grad(loss, leaves))
    for mine, theirs in zip(*actual, strict=True):
        assert torch.equal(mine, theirs)


def test_autocast_leaves_float64_alone() -> None:
    inputs = [x.double() for x in floats()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, w = hw.attention(*inputs, causal=True)
    assert out.dtype == w.lse.dtype == torch.float64
    assert torch.equal(out, hw.attention(*inputs, causal=True)[0])


@pytest.mark.usefixtures("fresh_compiler")
def test_autocast_and_compile_go_together() -> None:
    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return hw.attention(q, k, v, window=3)[0]

    compiled = torch.compile(output, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = compiled(*floats()), output(*floats())
    assert actual.dtype == expected.dtype == torch.bfloat16 and torch.equal(actual, expected)


@every_low
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_works_forward_and_back(options: dict[str, Any], dtype: torch.dtype) -> None:
    rest = dict(options)
    mask = rest.pop("mask", Mask())
    if rest.pop("causal", False):
        mask = Mask.causal()
    if "window" in rest:
        mask = Mask.window(rest.pop("window"))
    case = Case(*(normal(i, *x.shape) for i, x in enumerate(floats())), mask, rest).to(dtype)
    ours, plain, truth = case.with_gradients(), case.with_gradients(), case.to(torch.float64).with_gradients()
    out = hw.attention(ours.q, ours.k, ours.v, ours.mask, **ours.options)[0]
    pull = normal(8, *out.shape).to(dtype)
    expected, in_dtype = truth.reference()[0], plain.reference()[0]
    assert_judged(out, in_dtype, expected, dtype=dtype, size=sizes(case)["output"], name="output")
    out.backward(pull)
    in_dtype.backward(pull)
    expected.backward(pull.double())
    for name, leaf in truth.leaves().items():
        mine, theirs = ours.leaves()[name].grad, plain.leaves()[name].grad
        assert mine is not None and theirs is not None and leaf.grad is not None and mine.dtype == dtype
        assert_judged(mine, theirs, leaf.grad, dtype=dtype, size=sizes(case, pull)[name], times=3, name=name)


# Other modes


@every_mode
def test_inference_mode_gives_the_same_numbers(mode: Mode) -> None:
    inputs = mode.inputs(gradients=False)
    with torch.inference_mode():
        out, w = mode.run(*inputs)
        inside = [w.dense(), w.mean_heads(), w[0, 1], w.pooled(2), w.statistics().entropy]
    expected, same = mode.run(*inputs)
    assert torch.equal(out, expected) and out.is_inference()
    outside = [same.dense(), same.mean_heads(), same[0, 1], same.pooled(2), same.statistics().entropy]
    later = [w.dense(), w.mean_heads(), w[0, 1], w.pooled(2), w.statistics().entropy]
    for mine, theirs, again in zip(inside, outside, later, strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        assert torch.equal(again.nan_to_num(), theirs.nan_to_num())


def test_a_map_from_outside_can_be_looked_at_in_inference_mode() -> None:
    leaves = MODES["causal"].inputs()
    w = MODES["causal"].run(*leaves)[1]
    with torch.inference_mode():
        inside = w.dense()
    assert not inside.requires_grad and torch.equal(inside, w.dense()) and w.dense().requires_grad


@every_mode
def test_gradients_off_means_no_graph(mode: Mode) -> None:
    with torch.no_grad():
        out, w = mode.run(*mode.inputs())
        assert not out.requires_grad and not w.dense().requires_grad
    assert w.dense().requires_grad  # a map asked later, with gradients on, has them


@every_mode
@pytest.mark.parametrize("dropout", [0.0, 0.5], ids=["whole", "dropout"])
def test_checkpointing_changes_no_gradient(mode: Mode, dropout: float) -> None:
    chosen = Mode(mode.fixed | {"dropout": dropout}, mode.learned)

    def loss(*inputs: Tensor) -> Tensor:
        out, w = chosen.run(*inputs)
        return out.sin().sum() + w.dense().square().sum()

    actual = []
    for again in (False, True):
        leaves = mode.inputs()
        torch.manual_seed(0)
        value = checkpoint(loss, *leaves, use_reentrant=False) if again else loss(*leaves)
        actual.append(torch.autograd.grad(value, leaves))
    for mine, theirs in zip(*actual, strict=True):
        assert torch.equal(mine, theirs)


def test_an_input_changed_before_backward_is_noticed() -> None:
    q, k, v = MODES["causal"].inputs()
    keys = k * 1
    out = MODES["causal"].output(q, keys, v)
    with torch.no_grad():
        keys.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_a_mask_of_one_length_is_taken_after_calls_of_other_lengths() -> None:
    """Traced with a length that is not known, 17 was not among (1, 17), and the mask was said not to fit."""
    ours = hw.nn.MultiheadAttention(6, 2, batch_first=True).eval()

    def attend(q: Tensor, **options: Any) -> Tensor:
        return hw.attention(q, q, q, **options)[0]

    compiled, module = (torch.compile(f, backend="aot_eager", fullgraph=True) for f in (attend, ours))
    with torch.no_grad():
        for length in (7, 11, 13):
            compiled(torch.randn(1, 2, length, 5))
            module(*[torch.randn(2, length, 6)] * 3, need_weights=False)
        q, x, hidden = torch.randn(1, 2, 17, 5), torch.randn(3, 17, 6), torch.ones(17, 17).triu(1) > 0
        for options in ({"bias": torch.randn(17, 17)}, {"mask": ~hidden}):
            torch.testing.assert_close(compiled(q, **options), attend(q, **options))
        for mask in (hidden, torch.zeros(17, 17).masked_fill(hidden, -torch.inf)):
            torch.testing.assert_close(
                module(x, x, x, attn_mask=mask, need_weights=False)[0],
                ours(x, x, x, attn_mask=mask, need_weights=False)[0],
            )
