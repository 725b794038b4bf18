"""What PyTorch's own tests of its attention cover, drawn, and made of torch's classes and ours side by side.

torch's class in the same process says what is right: results, exceptions, warnings and calls of hooks.
Nothing it says is written down here, so a new version of torch shows where it differs. Ours follows torch's
slow path (`torch.backends.mha.set_fastpath_enabled(False)`), with two exceptions that these tests know by
name: `follows_mask` (a hint that contradicts a mask) and what only an operator of torch refuses
(`difference`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from as_torch_cases import (
    BOTH,
    CPU,
    HALVES,
    MODES,
    Case,
    Choose,
    Results,
    always_in_one_step,
    as_if_large,
    draw_call,
    draw_case,
    fast_path,
    follows_mask,
    made,
    numbers_of,
    outcome_of,
    refusals_differ,
    results,
    results_differ,
    slow_path,
)
from as_torch_hooks import shapes_of
from fuzz_as_torch import DRAWS

KINDS = hw.nn.MultiheadAttention, nn.MultiheadAttention
DEVICES = [CPU] + [torch.device("cuda")] * torch.cuda.is_available()
META = torch.device("meta")
on_every_device = pytest.mark.parametrize("device", DEVICES, ids=str)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
    pytest.mark.filterwarnings("ignore:Complex modules are a new feature"),
]


@cache
def places(count: int) -> st.SearchStrategy[int]:
    """Made once: making a strategy for each choice took as long as a case's calls."""
    return st.integers(0, count - 1)


def drawn(draw: Any) -> Any:
    """A strategy of cases, from a function that draws one with `choose` and a seed."""

    @st.composite
    def cases(sample: Any) -> Any:
        return draw(lambda options: options[sample(places(len(options)))], sample(places(2**31 + 1)))

    return cases()


# Calls of torch's class, layers that are adopted, and hooks on both

EXAMPLES = {
    "answers": 60, "calls": 60, "mistakes": 60, "hints": 60, "fast calls": 40, "layers": 40,
    "fast layers": 30, "hooks": 30, "hooks on layers": 25,
}  # fmt: skip  # the slow run draws 200 to 600 of each
ON_A_GPU = ("calls", "hints", "fast calls", "layers", "fast layers")


@on_every_device
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_drawn_answers_refuses_and_warns_as_torchs(name: str, device: torch.device) -> None:
    """Of several mistakes the one torch names is named; with `is_causal=True`, a mask of another shape was
    broadcast, or refused."""
    if device != CPU and name not in ON_A_GPU:
        return
    draw, differs = DRAWS[name]

    @given(drawn(draw))
    @settings(max_examples=EXAMPLES[name])
    def compare(case: Any) -> None:
        assert (differs(case) if device == CPU else differs(case, device)) is None  # type: ignore[call-arg]

    compare()


@given(drawn(lambda choose, seed: (draw_call(choose, seed), choose(BOTH))))
@settings(max_examples=15)
def test_hooks_of_state_dicts_are_called_as_torchs_are(drawn: tuple[Case, bool]) -> None:
    case, prefixed = drawn
    calls: dict[type, list[Any]] = {}
    for kind in KINDS:
        messages = calls[kind] = []
        module = made(kind, case, case.dtype)
        model = nn.Sequential(module) if prefixed else module
        module.register_state_dict_pre_hook(
            lambda *arguments, messages=messages: messages.append(arguments[1:])
        )
        module.register_state_dict_post_hook(
            lambda _, state, prefix, rest, messages=messages: messages.append(([*state], prefix, rest))
        )
        module.register_load_state_dict_pre_hook(
            lambda _, state, *rest, messages=messages: messages.append(([*state], *rest))
        )
        module.register_load_state_dict_post_hook(
            lambda _, keys, messages=messages: messages.append(tuple(keys))
        )
        state = model.state_dict()
        state.pop(next(iter(state)))
        model.load_state_dict({**state, "another": torch.zeros(1)}, strict=False)
    ours, theirs = calls.values()
    assert str(ours) == str(theirs) and len(ours) == 4


# Modules of every dtype, on every device


def described(module: nn.Module) -> list[Any]:
    """All parameters but their numbers."""
    return [(name, x.shape, x.dtype, x.device, x.requires_grad) for name, x in module.named_parameters()]


@pytest.mark.parametrize("device", [*DEVICES, META], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES, torch.complex64], ids=str)
@given(drawn(draw_case))
@settings(max_examples=5)
def test_modules_are_made_cast_moved_and_loaded_as_torchs(
    device: torch.device, dtype: torch.dtype, case: Case
) -> None:
    """Arguments of the constructor, `half` and the like, `to`, a state dict."""
    sizes = (case.embed_dim, case.num_heads, 0.0, case.bias, case.add_bias_kv, False, case.kdim, case.vdim)
    outcome, wanted = (outcome_of(partial(kind, *sizes, device=device, dtype=dtype)) for kind in KINDS)
    assert outcome.refusal == wanted.refusal and outcome.warnings == wanted.warnings
    if wanted.refusal is None:
        assert described(outcome.results) == described(wanted.results)
    torch.manual_seed(case.seed)
    ours = hw.nn.MultiheadAttention(*sizes)
    torch.manual_seed(case.seed)
    theirs = nn.MultiheadAttention(*sizes)
    for change in ("half", "bfloat16", "double", "float"):
        assert described(getattr(ours, change)()) == described(getattr(theirs, change)())
    assert described(ours.to(dtype)) == described(theirs.to(dtype))
    before = [x.clone() for x in ours.parameters()]
    ours.load_state_dict(theirs.state_dict())
    assert all(map(torch.equal, before, ours.parameters()))  # the same seed, the same weights
    assert described(ours.to(device)) == described(theirs.to(device))


@given(drawn(draw_call))
@settings(max_examples=50)
def test_calls_on_the_meta_device_have_torchs_shapes_and_gradients(case: Case) -> None:
    case = replace(case, mask_dtype=None, padding_dtype=None)
    outcomes = []
    for kind in KINDS:
        module = made(kind, case, case.dtype)
        numbers = numbers_of(case, module).to(META)
        call = partial(results, module.to(META), case, numbers, case.is_causal)
        with slow_path():
            outcomes.append(outcome_of(call))
    actual, wanted = outcomes
    if wanted.is_worded or 0 not in (case.batch, case.L, case.S):
        assert refusals_differ(actual, wanted) is None
        assert shapes_of(actual.results) == shapes_of(wanted.results)


@given(drawn(draw_call))
@settings(max_examples=10)
def test_complex_numbers_are_refused_as_torch_refuses_them(case: Case) -> None:
    """By operators, so that words and types are those of whichever comes first."""
    case = replace(case, N=2, L=3, S=3, kdim=None, vdim=None, attn_mask="none", key_padding_mask="none")
    x = torch.randn(2, 3, case.embed_dim, dtype=torch.complex64)
    for kind in KINDS:
        module = made(kind, replace(case, batch_first=True), torch.float32).to(torch.complex64)
        with fast_path(case.fast_path), MODES[case.gradients](), pytest.raises((RuntimeError, ValueError)):
            module(x, x, x, need_weights=case.need_weights)


# torch.jit, nested tensors, numerical gradients


class Calling(nn.Module):
    """A call with everything but its inputs fixed, as torch.jit.trace wants it."""

    def __init__(self, inner: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = self.inner(query, key, value, **self.options)[0]
        return output


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@given(drawn(draw_case))
@settings(max_examples=8)
def test_scripted_and_traced_modules_answer_as_torchs(case: Case) -> None:
    case = replace(case, L=min(case.L, 17), S=min(case.S, 17), gradients="none", dtype=torch.float64)
    ours, theirs = (made(kind, case, case.dtype) for kind in KINDS)
    numbers = numbers_of(case, theirs)
    for module in (ours, theirs):
        module.load_state_dict(numbers.parameters)
    hint = case.is_causal and not follows_mask(case, numbers.attn_mask)

    def scripted(module: nn.MultiheadAttention) -> Results:
        return results(torch.jit.script(module), case, numbers, hint)

    def traced(module: nn.MultiheadAttention) -> Results:
        arguments = (
            (numbers.inputs * 3)[:3] if len(numbers.inputs) != 2 else [*numbers.inputs, numbers.inputs[1]]
        )
        options = {"key_padding_mask": numbers.key_padding_mask, "attn_mask": numbers.attn_mask}
        call = Calling(module, {**options, "need_weights": case.need_weights, "is_causal": hint})
        trace = torch.jit.trace(call, tuple(x + 1 for x in arguments), check_trace=False)
        return {"output": trace(*arguments).detach()}

    for way in (scripted, traced):
        with slow_path():
            outcome, wanted = (outcome_of(lambda: way(module)) for module in (ours, theirs))  # noqa: B023
        if outcome.refusal is not None or wanted.refusal is not None:
            assert outcome.refusal is not None and wanted.refusal is not None
            assert outcome.refusal[0] is wanted.refusal[0]
        else:
            exact = wanted.results
            assert results_differ(outcome.results, exact, exact, torch.float64, 1.0, case.is_low) is None


def draw_nested(choose: Choose, seed: int) -> dict[str, Any]:
    """A call with a nested tensor, which torch takes only in evaluation, and without masks."""
    return {
        "kind": choose(("attention", "encoder layer", "encoder")),
        "layout": choose((torch.strided, torch.strided, torch.jagged)),
        "lengths": choose(((5, 7), (3,), (2, 1, 11))),
        "training": choose((False, False, True)),
        "gradients": choose(("all", "none", "inference")),
        "masked": choose((False, False, True)),
        "fast": choose((True, True, False)),
        "seed": seed,
    }


@given(drawn(draw_nested))
@settings(max_examples=30)
def test_nested_tensors_are_taken_and_refused_as_in_torch(case: dict[str, Any]) -> None:
    torch.manual_seed(case["seed"])
    options: dict[str, Any] = {"batch_first": True, "dtype": torch.float64}
    model: nn.Module = nn.MultiheadAttention(6, 2, **options)
    if case["kind"] != "attention":
        model = nn.TransformerEncoderLayer(6, 2, 11, 0.0, **options)
    if case["kind"] == "encoder":
        model = nn.TransformerEncoder(model, 2)
    parts = [torch.randn(length, 6, dtype=torch.float64) for length in case["lengths"]]
    padding = torch.zeros(len(parts), max(case["lengths"]), dtype=torch.bool) if case["masked"] else None
    model.train(case["training"])

    def call() -> Results:
        x = torch.nested.nested_tensor(parts, layout=case["layout"])
        with MODES[case["gradients"]](), fast_path(case["fast"]):
            if case["kind"] == "attention":
                output, weights = model(x, x, x, key_padding_mask=padding)
                return {"output": output.to_padded_tensor(0.0).detach(), "weights": weights.detach()}
            return {"output": model(x, src_key_padding_mask=padding).to_padded_tensor(0.0).detach()}

    wanted = outcome_of(call)
    hw.adopt(model)
    outcome = outcome_of(call)
    if outcome.refusal is not None or wanted.refusal is not None:
        assert refusals_differ(outcome, wanted) is None
    else:
        exact = wanted.results
        assert results_differ(outcome.results, exact, exact, torch.float64, 1.0) is None


def assert_gradients_are_numerical(case: Case) -> None:
    """The first and second derivatives are those of small differences, on every way of ours."""
    case = replace(
        case,
        dtype=torch.float64,
        N=None if case.N is None else 2,
        L=min(case.L, 3),
        S=min(case.L if case.inputs == "self" else case.S, 3),
        num_heads=2,
        head_dim=2,
        kdim=case.kdim and 3,
        vdim=case.vdim and 3,
        attn_mask=case.attn_mask if case.attn_mask in ("bool", "float", "causal bool") else "none",
        key_padding_mask="none" if case.key_padding_mask in ("none", "low") else "bool",
    )
    ours = made(hw.nn.MultiheadAttention, case, case.dtype)
    numbers = numbers_of(case, ours)
    mask, padding = numbers.attn_mask, numbers.key_padding_mask
    for hidden in (mask, padding):
        if hidden is not None and hidden.dtype == torch.bool:
            hidden[..., 0] = False  # a query that sees nothing has no derivative
    learned = [] if mask is None or mask.dtype == torch.bool else [mask]

    def call(*leaves: Tensor) -> tuple[Tensor, ...]:
        arguments, rest = list(leaves[: len(numbers.inputs)]), leaves[len(numbers.inputs) :]
        query, key, value = (
            (arguments * 3)[:3] if len(arguments) != 2 else (arguments[0], arguments[1], arguments[1])
        )
        options = {
            "attn_mask": rest[-1] if learned else mask,
            "key_padding_mask": padding,
            "need_weights": case.need_weights,
            "average_attn_weights": case.average_attn_weights,
        }
        parameters = dict(zip(numbers.parameters, rest, strict=False))
        actual = torch.func.functional_call(ours, parameters, (query, key, value), options)
        return actual if case.need_weights else actual[:1]

    leaves = [
        x.detach().clone().requires_grad_() for x in (*numbers.inputs, *numbers.parameters.values(), *learned)
    ]
    with as_if_large(case.way == "large"), always_in_one_step(case.way == "one step"):
        assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@given(drawn(draw_case))
@settings(max_examples=10)
def test_gradients_and_their_gradients_are_numerical_ones(case: Case) -> None:
    assert_gradients_are_numerical(case)


# The same for longer


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_more_of_everything_is_as_in_torch(name: str) -> None:
    torch.set_num_threads(1)  # for small tensors; a fixture puts it back
    draw, differs = DRAWS[name]

    @given(drawn(draw))
    @settings(max_examples=600 if name == "answers" else 200)
    def compare(case: Any) -> None:
        assert differs(case) is None

    compare()


@pytest.mark.slow
@given(drawn(draw_case))
@settings(max_examples=40)
def test_more_gradients_are_numerical_ones(case: Case) -> None:
    torch.set_num_threads(1)
    assert_gradients_are_numerical(case)
