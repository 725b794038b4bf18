"""What users of torch's attention class do with the module itself works with ours, and gives the same.

Copies, files, state dicts, parametrisations, pruning and other tools are applied in drawn order to a module
of torch's class and to one of ours. After each, both look alike and train alike; where torch's raises, ours
raises the same. Calls are drawn in `drop_in_calls.py`.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    skip_init,
    vector_to_parameters,
)
from torch.optim.swa_utils import AveragedModel

import headwise as hw
from as_torch_cases import Choose
from drop_in_calls import (
    DEVICES,
    OPTIONS,
    Call,
    E,
    Made,
    check_drawn,
    difference,
    made,
    module_of,
    path,
    seed_all,
)  # fmt: skip
from process_groups import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask"),
    pytest.mark.filterwarnings("ignore:.*non-leaf Tensor is being accessed"),
]
Module = nn.MultiheadAttention
Change = Callable[[Module, Call], Module]


def a_parameter(module: Module, call: Call) -> str:
    """The name of one of the module's own, not of out_proj's."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    return names[call.seed % len(names)] if names else "in_proj_weight"


def is_ours(module: nn.Module) -> bool:
    return isinstance(module, hw.nn.MultiheadAttention)


def saved(label: Any, weights_only: bool) -> Any:
    """Through a file and back."""
    file = io.BytesIO()
    torch.save(label, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def loaded(into: Module, state: dict[str, Any], **options: Any) -> Module:
    into.load_state_dict(state, **options)
    return into


def emptied(module: Module) -> Module:
    module.zero_grad()
    state = {name: x.clone() for name, x in module.state_dict().items()}
    device = module.out_proj.weight.device
    return loaded(module.to("meta").to_empty(device=device), state)


def uninitialised(module: Module, call: Call) -> Module:
    kind = hw.nn.MultiheadAttention if is_ours(module) else nn.MultiheadAttention
    where = {"batch_first": call.batch_first, "dtype": call.dtype, "device": call.device}
    fresh = skip_init(kind, E, call.num_heads, **OPTIONS[call.option], **where)
    return loaded(fresh.train(module.training), module.state_dict())


def rounded(module: Module, call: Call) -> Module:
    """In another dtype and back; gradients are left out, which rounding would take apart."""
    module.zero_grad()
    return module.to(torch.bfloat16).to(call.dtype)


def swapped(module: Module, call: Call) -> Module:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return rounded(module, call)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def from_an_older_pickle(module: Module) -> Module:
    """Before torch had kdim, `_qkv_same_embed_dim` was not there."""
    state = dict(vars(module))
    if module._qkv_same_embed_dim:
        del state["_qkv_same_embed_dim"]
    older = type(module).__new__(type(module))
    older.__setstate__(state)
    return older


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def changed(module: Module, change: Callable[[Module], Any]) -> Module:
    change(module)
    return module


def with_plain_tensor(module: Module, call: Call) -> Module:
    """As tools do that compute a parameter anew in every step."""
    name = a_parameter(module, call)
    parameter = getattr(module, name)
    delattr(module, name)
    setattr(module, name, parameter.detach() * 2)
    return module


def without_parametrizations(module: Module) -> None:
    for part in (module, module.out_proj):
        for name in [*part.parametrizations] if parametrize.is_parametrized(part) else []:
            parametrize.remove_parametrizations(part, name, leave_parametrized=True)


def without_pruning(module: Module) -> None:
    for part in (module, module.out_proj):
        for name in [name.removesuffix("_orig") for name in part._parameters if name.endswith("_orig")]:
            prune.remove(part, name)


def averaged(module: Module) -> Module:
    average = AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        vector_to_parameters(1.5 * parameters_to_vector(module.parameters()), module.parameters())
        average.update_parameters(module)
    return average.module


CHANGES: dict[str, Change] = {
    "copy": lambda m, _: copy.copy(m),
    "deep copy": lambda m, _: copy.deepcopy(m),
    "deep copy in a list": lambda m, _: copy.deepcopy(nn.ModuleList([m, m]))[1],
    "pickle": lambda m, _: pickle.loads(pickle.dumps(m)),
    "torch.save": lambda m, _: saved(m, weights_only=False),
    "older pickle": lambda m, _: from_an_older_pickle(m),
    "state dict": lambda m, call: loaded(
        module_of(replace(call, seed=5), is_ours(m)), saved(m.state_dict(), weights_only=True)
    ),
    "assigned state dict": lambda m, _: loaded(
        m, {name: 2 * x for name, x in m.state_dict().items()}, assign=True
    ),
    "to_empty": lambda m, _: emptied(m),
    "skip_init": uninitialised,
    "other dtype and back": rounded,
    "swapped parameters": swapped,
    "shared memory": lambda m, _: m.share_memory(),
    "parametrised": lambda m, call: changed(
        m, lambda m: parametrize.register_parametrization(m, a_parameter(m, call), Halved())
    ),
    "parametrised out_proj": lambda m, _: changed(
        m, lambda m: parametrize.register_parametrization(m.out_proj, "weight", Halved())
    ),
    "weight_norm": lambda m, call: changed(
        m, lambda m: parametrizations.weight_norm(m, a_parameter(m, call))
    ),
    "orthogonal": lambda m, _: changed(m, lambda m: parametrizations.orthogonal(m.out_proj)),
    "spectral_norm": lambda m, _: changed(m, lambda m: parametrizations.spectral_norm(m.out_proj)),
    "parametrisation removed": lambda m, _: changed(m, without_parametrizations),
    "pruned": lambda m, call: changed(m, lambda m: prune.l1_unstructured(m, a_parameter(m, call), 0.5)),
    "pruned out_proj": lambda m, _: changed(
        m, lambda m: prune.ln_structured(m.out_proj, "weight", 0.5, 2, 0)
    ),
    "pruning removed": lambda m, _: changed(m, without_pruning),
    "vector of parameters": lambda m, _: changed(
        m,
        lambda m: vector_to_parameters(2 * parameters_to_vector(m.parameters()).detach(), m.parameters()),
    ),
    "average": lambda m, _: averaged(m),
    "plain tensor": with_plain_tensor,
    "other out_proj": lambda m, call: changed(
        m, lambda m: setattr(m, "out_proj", nn.Linear(E, E, device=call.device, dtype=call.dtype))
    ),
    "other dropout": lambda m, call: changed(  # on a GPU other numbers are dropped
        m, lambda m: setattr(m, "dropout", 0.3 if call.device == "cpu" else 0.0)
    ),
    "frozen": lambda m, _: m.requires_grad_(False),
    "evaluation": lambda m, _: m.eval(),
}


def looks(module: Module) -> dict[str, Any]:
    """All that generic code iterates over."""
    return {
        "name": type(module).__name__,
        "is torch's": isinstance(module, nn.MultiheadAttention),
        "repr": repr(module),
        "attributes": [name for name in vars(module) if name != "_adopted_by_headwise"],
        "parameters": [
            (n, p.shape, p.dtype, p.requires_grad, p.is_leaf) for n, p in module.named_parameters()
        ],
        "buffers": [(name, x.shape) for name, x in module.named_buffers()],
        "modules": [(name, type(part).__name__) for name, part in module.named_modules()],
        "state": [*module.state_dict()],
        "training": module.training,
        "gradients": [name for name, p in module.named_parameters() if p.grad is not None],
    }


def answer(step: Made) -> tuple[Tensor, Tensor | None]:
    """Call the module; torch's class does not call out_proj: hooks that make its weight are called here."""
    ours, out_proj = is_ours(step.module), step.module.out_proj
    for hook in [] if ours else out_proj._forward_pre_hooks.values():
        hook(out_proj, ())
    with path(step.call, ours):
        return step.answer()


def trained(module: Module, call: Call) -> list[Tensor | None]:
    """Answers, state and gradients of a step with this module; gradients stay on the parameters."""
    step = made(call, is_ours(module))
    step.module = module
    output, weights = answer(step)
    loss = output.square().sum() if weights is None else output.square().sum() + weights.square().sum()
    if loss.requires_grad:
        loss.backward()
    with torch.no_grad():
        again = answer(step)
    return [output, weights, *again, *module.state_dict().values(), *(x.grad for x in step.learning)]


def attempted(act: Callable[..., Any], module: Module, call: Call) -> tuple[Any, str | None]:
    """(what comes of it, None), or (None, what was raised)."""
    try:
        return act(module, call), None
    except Exception as error:
        return None, repr(error)


def check_chain(call: Call, choose: Choose, first: str) -> None:
    """Three changes, a training step after each."""
    modules = [module_of(call, False), module_of(call, True)]
    names = (first, choose([*CHANGES]), choose([*CHANGES]))
    for name in names:
        for act in (CHANGES[name], trained):
            actual = []
            for module in modules:
                seed_all(call.seed)
                actual.append(attempted(act, module, call))
            (theirs, raised), (ours, our_raised) = actual
            assert our_raised == raised, f"{name} of {names}"
            if raised is not None:
                return
            if act is trained:
                assert difference(ours, theirs, call.tolerance) is None, f"{name} of {names}"
            else:
                modules = [theirs, ours]
                assert is_ours(ours)
            assert looks(modules[1]) == looks(modules[0]), f"{name} of {names}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "seeds", [pytest.param(range(4), id="few"), pytest.param(range(4, 7), id="many", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("first", CHANGES)
def test_a_module_can_be_changed_as_torchs_and_is_the_same(first: str, seeds: range, device: str) -> None:
    check_drawn(lambda call, choose: check_chain(call, choose, first), seeds, device, first)


def _answer_elsewhere(step: Made) -> list[Any]:
    return [None if x is None else x.tolist() for x in step.answer()]


@pytest.mark.slow
def test_another_process_can_use_an_adopted_module() -> None:
    steps: list[Made] = []

    def collect(call: Call, _: Choose) -> None:
        call = replace(call, is_adopted=True, is_causal=False, learns="none", frozen="all")
        steps.append(made(replace(call, attn_mask="bool", key_padding_mask="none"), True))

    check_drawn(collect, [1])
    assert run_ranks(2, _answer_elsewhere, steps[0]) == [_answer_elsewhere(steps[0])] * 2
