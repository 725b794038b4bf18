"""What users of torch's attention class rely on without thinking holds for ours, too: calls and training.

Every test draws calls, makes them with torch's class and with ours (`drop_in_calls.py`), and compares. What
belongs to the module rather than to its calls is in test_drop_in_module.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from as_torch_cases import Choose
from drop_in_calls import DEVICES, Call, E, Made, N, check_drawn, difference, made, path
from headwise.nn.as_torch import torch_call

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """Seeds of the quick run, and others of the slow one."""
    slow = pytest.param(range(few, many), id="many", marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [pytest.param(range(few), id="few"), slow])


every_device = pytest.mark.parametrize("device", DEVICES)
Gradients = Sequence[Tensor | None]
Answer = tuple[Tensor, Tensor | None]


def loss_of(output: Tensor, weights: Tensor | None, uses: str = "both") -> Tensor:
    """A number that depends on the output, on the weights, or on both."""
    pull = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device)
    loss = output.new_zeros(())
    if uses != "weights" or weights is None:
        loss = loss + (output * pull.view(output.shape)).sum()
    if uses != "output" and weights is not None:
        loss = loss + weights.square().sum()
    return loss


# What may be written to between the call and backward

TARGETS = (
    "residual", "query", "key", "value", "output", "weights", "attn_mask", "key_padding_mask",
    "in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias", "bias_k", "bias_v",
    "q_proj_weight", "k_proj_weight", "v_proj_weight",
)  # fmt: skip


def trained(call: Call, ours: bool, target: str, way: str, uses: str) -> Gradients | None:
    """Gradients of a step in which `target` changes after the call; None if torch refuses backward.

    Args:
        way: "out of place" (so that gradients are right whatever was kept), "in place", or "uncounted": in
            place through `.data`, which the version counter does not notice.
    """
    step = made(call, ours)
    with path(call, ours):
        output, weights = step.answer()
    if target == "residual" and way == "out of place":
        output = step.query + output
    elif target == "residual":
        output = step.query.add_(output)
    elif target in ("output", "weights") and way == "out of place":
        output, weights = (3 * output, weights) if target == "output" else (output, 3 * weights)
    elif way != "out of place":
        written = {**step.tensors, "output": output, "weights": weights}[target]
        if way == "uncounted":
            written = written.data
        with torch.set_grad_enabled(not written.is_leaf):
            written.logical_not_() if written.dtype == torch.bool else written.mul_(3)
    loss = loss_of(output, weights, uses)
    if not loss.requires_grad:
        return []
    try:
        return torch.autograd.grad(loss, step.learning, allow_unused=True)
    except RuntimeError as error:
        if "inplace" not in str(error):
            raise
        return None


def check_write(call: Call, target: str, way: str, uses: str) -> None:
    """Where torch's gradients are right, ours are; where torch refuses, ours are right or refused."""
    theirs, ours = trained(call, False, target, way, uses), trained(call, True, target, way, uses)
    if call.batch_first and call.batched and call.strides == "contiguous" and target in ("residual", "value"):
        assert theirs is not None  # torch projects copies
    if way == "in place" and theirs is not None:  # torch checks versions: what it does not refuse is right
        right: Gradients | None = theirs
    else:
        right = trained(call, False, target, "out of place", uses)
    assert right is not None
    if theirs is not None and difference(theirs, right, call.tolerance) is None:
        assert ours is not None, "backward raised, and torch's does not"
        assert difference(ours, right, call.tolerance) is None
        assert [x is None for x in ours] == [x is None for x in theirs]
    elif way == "in place" and ours is not None:
        assert difference(ours, right, call.tolerance) is None


@every_device
@few_or_many(20, 50)
@pytest.mark.parametrize("target", TARGETS)
def test_what_torch_lets_be_written_to_stays_writable(target: str, seeds: range, device: str) -> None:
    """`x = norm(x); x += mha(x, x, x)[0]` trains with torch's class; ours raised."""

    def check(call: Call, choose: Choose) -> None:
        is_counted = target in ("residual", "output", "weights") or choose((True, True, False))
        uses = choose(("both", "output", "weights"))
        check_write(call, target, "in place" if is_counted else "uncounted", uses)

    check_drawn(check, seeds, device, target)


@every_device
@few_or_many(30, 60)
def test_inputs_and_masks_made_in_inference_mode_can_be_trained_on(seeds: range, device: str) -> None:
    """Features cached under `inference_mode` raised "Inference tensors cannot be saved for backward"."""

    def gradients(call: Call, ours: bool) -> Gradients | None:
        step = made(call, ours)
        with torch.inference_mode():
            copies = {id(x): x.clone() for x in (step.query, step.key, step.value)}
            step.masks = {name: mask.clone() for name, mask in step.masks.items()}
        step.query, step.key, step.value = (copies[id(x)] for x in (step.query, step.key, step.value))
        try:
            with path(call, ours):
                loss = loss_of(*step.answer())
            return torch.autograd.grad(loss, step.learning, allow_unused=True) if loss.requires_grad else []
        except RuntimeError as error:
            if "Inference tensors cannot be saved for backward" not in str(error):
                raise
            return None

    def check(call: Call, choose: Choose) -> None:
        masks = {"attn_mask": choose(("none", "bool", "float")), "key_padding_mask": choose(("none", "bool"))}
        call = replace(call, learns="none", is_causal=False, **masks)
        theirs, ours = gradients(call, False), gradients(call, True)
        if theirs is not None:
            assert ours is not None, "backward raised, and torch's does not"
            assert difference(ours, theirs, call.tolerance) is None

    check_drawn(check, seeds, device)


# What an answer is, beside its numbers

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def facts_of(call: Call, ours: bool, mode: str, autocasts: bool) -> dict[str, Any]:
    """All that code can see of an answer, of the inputs after the call, and of which gradients there are."""
    step = made(call, ours)
    before = {name: x._version for name, x in step.tensors.items()}
    with (
        path(call, ours),
        MODES[mode](),
        torch.autocast(call.device, torch.bfloat16, enabled=autocasts),
    ):
        output, weights = step.answer()
    facts: dict[str, Any] = {
        "versions": {name: x._version for name, x in step.tensors.items()} == before,
        "random numbers drawn": torch.get_rng_state().tolist() if call.training else None,
        "attributes": sorted(vars(step.module).keys() - {"_adopted_by_headwise"}),
    }
    if ours:  # torch's is a transposed view where the batch comes first, and in its fast path it is not
        assert output.is_contiguous()
    theirs = {x.untyped_storage().data_ptr() for x in step.tensors.values()}
    for name, x in {"output": output, "weights": weights}.items():
        if x is None:
            facts[name] = None
            continue
        facts[name] = {
            "class": type(x), "dtype": x.dtype, "device": x.device, "shape": x.shape, "layout": x.layout,
            "bytes": x.untyped_storage().nbytes(), "is inference": x.is_inference(), "is leaf": x.is_leaf,
            "requires_grad": x.requires_grad, "has grad_fn": x.grad_fn is not None,
            "is the caller's memory": x.untyped_storage().data_ptr() in theirs,
            "strides": x.stride() if name == "weights" else None,
        }  # fmt: skip
        if x.requires_grad:
            grads = torch.autograd.grad(
                x.float().square().sum(), step.learning, allow_unused=True, retain_graph=True
            )
            facts[f"gradients from {name}"] = [None if grad is None else grad.dtype for grad in grads]
    if weights is not None:
        facts["one memory"] = output.untyped_storage().data_ptr() == weights.untyped_storage().data_ptr()
    return facts


@every_device
@few_or_many(300, 450)
def test_an_answer_looks_as_torchs_does(seeds: range, device: str) -> None:
    """Weights required a gradient where only out_proj learned, and `weights.numpy()` raised."""

    def check(call: Call, choose: Choose) -> None:
        mode, autocasts = choose(["gradients", *MODES]), choose((False, False, False, True))
        if autocasts:
            call = replace(call, dtype=torch.float32)
        assert facts_of(call, True, mode, autocasts) == facts_of(call, False, mode, autocasts)

    check_drawn(check, seeds, device)


# What is saved for backward, and other ways to run it


def gradients(loss: Tensor, learning: Sequence[Tensor]) -> Gradients:
    return torch.autograd.grad(loss, learning, allow_unused=True)


def offloaded(call: Call, ours: bool) -> tuple[Gradients, int]:
    """Gradients where all that is saved is replaced by copies and then lost; how many bytes that was.

    Bytes that the caller holds anyway do not count.
    """
    step = made(call, ours)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x.detach().clone()

    with path(call, ours), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output, weights = step.answer()
        count = len(saved)
        loss = loss_of(output, weights)
    if not loss.requires_grad:
        return [], 0
    caller = {x.untyped_storage().data_ptr() for x in step.tensors.values()}
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in saved[:count]}
    size = sum(storage.nbytes() for place, storage in storages.items() if place not in caller)
    for x in saved[:count]:
        if x.is_floating_point():  # masks of ours may stay with their node
            x.untyped_storage().fill_(1)  # in every byte: tiny numbers
    with path(call, ours):
        return gradients(loss, step.learning), size


@every_device
@few_or_many(40, 80)
def test_saved_tensors_can_be_offloaded_and_are_no_more_than_torchs(seeds: range, device: str) -> None:
    """Ours may save a copy of the inputs and of q, k and v more than torch does; and, where no weights are
    wanted, up to `torch_call.FEW` of them twice, where torch's fused kernel saves none.
    """

    def check(call: Call, _: Choose) -> None:
        call = replace(call, lengths=(83, 89))
        plain = made(call, False)
        with path(call, False):
            loss = loss_of(*plain.answer())
        wanted = gradients(loss, plain.learning) if loss.requires_grad else []
        (theirs, size), (ours, our_size) = offloaded(call, False), offloaded(call, True)
        assert difference(theirs, wanted, call.tolerance) is None
        assert difference(ours, wanted, call.tolerance) is None
        few = N * call.num_heads * 83 * (89 + 2)
        assert few < torch_call.FEW
        extra = 6 * N * 89 * E + (2 * few if call.weights is None else 0)
        assert our_size <= 1.05 * size + extra * call.dtype.itemsize

    check_drawn(check, seeds, device)


def checkpointed(reentrant: bool) -> Callable[..., Gradients]:
    def run(answer: Callable[[], Answer], learning: Sequence[Tensor]) -> Gradients:
        def again(*_: Tensor) -> tuple[Tensor, ...]:
            return tuple(x for x in answer() if x is not None)

        actual = checkpoint(again, *learning, use_reentrant=reentrant)
        loss_of(actual[0], actual[1] if len(actual) > 1 else None).backward()
        return [x.grad for x in learning]

    return run


def twice(answer: Callable[[], Answer], learning: Sequence[Tensor]) -> Gradients:
    grads = torch.autograd.grad(loss_of(*answer()), learning, allow_unused=True, create_graph=True)
    size = sum(grad.square().sum() for grad in grads if grad is not None)
    return [*grads, *(gradients(size, learning) if isinstance(size, Tensor) and size.requires_grad else ())]


def retained(answer: Callable[[], Answer], learning: Sequence[Tensor]) -> Gradients:
    output, weights = answer()
    loss = loss_of(output, weights)
    first = torch.autograd.grad(loss, learning, allow_unused=True, retain_graph=True)
    if weights is not None and weights.requires_grad:
        first += torch.autograd.grad(weights.sum(), learning, allow_unused=True, retain_graph=True)
    second = gradients(loss, learning)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        gradients(loss, learning)
    return [*first, *second]


def inside(context: Callable[[], AbstractContextManager[Any]]) -> Callable[..., Gradients]:
    def run(answer: Callable[[], Answer], learning: Sequence[Tensor]) -> Gradients:
        with context():
            return gradients(loss_of(*answer()), learning)

    return run


class Deterministic:
    """`torch.use_deterministic_algorithms` for a while."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


RUNS: dict[str, Callable[..., Gradients]] = {
    "save_on_cpu": inside(torch.autograd.graph.save_on_cpu),
    "checkpoint, reentrant": checkpointed(True),
    "checkpoint": checkpointed(False),
    "retain_graph": retained,
    "double backward": twice,
    "anomaly mode": inside(lambda: torch.autograd.detect_anomaly(check_nan=True)),
    "one thread": inside(lambda: torch.autograd.set_multithreading_enabled(False)),
    "deterministic": inside(Deterministic),
}


@every_device
@few_or_many(20, 30)
@pytest.mark.parametrize("name", RUNS)
def test_backward_runs_as_torchs_does(name: str, seeds: range, device: str) -> None:
    if (name, device) == ("deterministic", "cuda"):
        pytest.skip("by design: cuBLAS must be told by an environment variable before it starts")

    def check(call: Call, _: Choose) -> None:
        actual = []
        for ours in (False, True):
            step = made(call, ours)
            with path(call, ours):
                if not any(x is not None and x.requires_grad for x in step.answer()):
                    return
                try:
                    actual.append(RUNS[name](step.answer, step.learning))
                except RuntimeError as error:  # torch's fused kernels cannot be differentiated twice
                    if ours or "is not implemented" not in str(error):
                        raise
                    return
        assert (
            difference(
                actual[1], actual[0], 30 * call.tolerance if name == "double backward" else call.tolerance
            )
            is None
        )
        assert [x is None for x in actual[1]] == [x is None for x in actual[0]]

    check_drawn(check, seeds, device)


# Hooks, on what is returned and on the module


def heard(call: Call, ours: bool, uses: str) -> dict[str, Any]:
    """What hooks of every kind were called with, and what was left in `grad`."""
    step, events = made(call, ours), {}

    def hear(name: str) -> Callable[..., None]:
        def hook(*arguments: Any) -> None:
            assert name not in events, f"{name} was called twice"
            events[name] = arguments

        return hook

    module = step.module
    module.register_forward_pre_hook(
        lambda module, args, kwargs: hear("before")(args, kwargs), with_kwargs=True
    )
    module.register_forward_hook(
        lambda module, args, kwargs, actual: hear("after")(args, kwargs, actual), with_kwargs=True
    )
    if call.seed % 2:  # these wrap inputs and outputs
        module.register_full_backward_pre_hook(lambda module, grads: hear("backward")(grads))
        module.register_full_backward_hook(lambda module, grads, outer: hear("backward done")(grads, outer))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda x, name=name: hear(name)(x.grad))
    with path(call, ours):
        output, weights = step.answer()
    shown = {"output": output} if weights is None else {"output": output, "weights": weights}
    for name, x in shown.items():
        if x.requires_grad:
            x.register_hook(hear(f"gradient of {name}"))
            x.retain_grad()
    loss = loss_of(output, weights, uses)
    if loss.requires_grad:
        loss.backward()
    saved = {f"grad of {name}": x.grad if x.requires_grad else None for name, x in shown.items()}
    return events | saved | {"leaves": [x.grad for x in step.leaves]}


def flat(actual: Any) -> list[Any]:
    """The tensors in what a hook got, and whatever else it got."""
    if isinstance(actual, dict):
        return [x for key in sorted(actual) for x in (key, *flat(actual[key]))]
    return [y for x in actual for y in flat(x)] if isinstance(actual, (tuple, list)) else [actual]


@every_device
@few_or_many(80, 140)
def test_hooks_hear_what_they_hear_of_torchs_class(seeds: range, device: str) -> None:
    """A hook on the weights was called with None, and `weights.grad` was filled, for a loss of the output; a
    hook on the output was called with None for a loss of the weights.
    """

    def check(call: Call, choose: Choose) -> None:
        uses = choose(("both", "output", "weights"))
        ours, theirs = heard(call, True, uses), heard(call, False, uses)
        assert ours.keys() == theirs.keys()
        for name in theirs:
            actual, wanted = flat(ours[name]), flat(theirs[name])
            tensors = [[x if isinstance(x, Tensor) else None for x in each] for each in (actual, wanted)]
            numbers = [[None if x is None else x.to(call.dtype) for x in each] for each in tensors]
            assert difference(*numbers, call.tolerance) is None, name
            assert [None if isinstance(x, Tensor) else x for x in actual] == [
                None if isinstance(x, Tensor) else x for x in wanted
            ]

    check_drawn(check, seeds, device)


@every_device
def test_threads_can_share_a_module(device: str) -> None:
    """Eight threads train on one module at once, each with inputs and masks of its own."""
    steps: list[Made] = []

    def collect(call: Call, _: Choose) -> None:
        same = {"option": "plain", "frozen": "nothing", "inputs": "self", "num_heads": 3, "way": "own"}
        steps.append(made(replace(call, dtype=torch.float64, batch_first=True, learns="all", **same), True))
        steps[-1].module = steps[0].module

    def work(step: Made) -> list[Tensor]:
        actual: list[Tensor] = []
        for _ in range(5):
            output, weights = step.answer()
            loss = loss_of(output, weights)
            actual += output, *torch.autograd.grad(loss, step.learning, retain_graph=True)
        return actual

    check_drawn(collect, range(8), device)
    with ThreadPoolExecutor(8) as pool:
        actual = list(pool.map(work, steps))
    for ours, step in zip(actual, steps, strict=True):
        assert difference(ours, work(step), step.call.tolerance) is None
