"""Hooks of modules, drawn, put on torch's classes and on ours: who is called, in which order, with what.

`out_proj` is left out of it: ours calls it as a module, torch takes its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import headwise as hw
from as_torch_cases import (
    BOTH,
    Case,
    Choose,
    Results,
    draw_call,
    made,
    numbers_of,
    outcome_of,
    refusals_differ,
    results,
    results_differ,
    slow_path,
)
from as_torch_layers import LayerCase, draw_layer, layer_numbers, layer_of, layer_results


@dataclass(frozen=True)
class HookCase:
    """A hook, on one module or on all."""

    kind: str
    path: str | None  # None: on every module there is
    replaces: bool  # what it is given, by its double
    prepend: bool
    with_kwargs: bool
    always_call: bool


def draw_hooks(choose: Choose, paths: Sequence[str]) -> list[HookCase]:
    """One to three hooks on modules of these names."""
    return [
        HookCase(
            choose(("forward pre", "forward", "forward", "full backward", "full backward pre")),
            choose((*paths, *paths, None)),
            choose(BOTH),
            choose(BOTH),
            choose(BOTH),
            choose(BOTH),
        )
        for _ in range(choose((1, 2, 3)))
    ]


def doubled(x: Any) -> Any:
    """All floating tensors in it times two."""
    if isinstance(x, tuple):
        return tuple(map(doubled, x))
    return 2 * x if isinstance(x, Tensor) and x.is_floating_point() else x


def shapes_of(x: Any) -> Any:
    """The same with shapes in place of tensors."""
    if isinstance(x, Tensor):
        return tuple(x.shape)
    if isinstance(x, (tuple, list)):
        return [shapes_of(part) for part in x]
    return {name: shapes_of(part) for name, part in x.items()} if isinstance(x, dict) else x


@contextmanager
def listening(model: nn.Module, hooks: list[HookCase]) -> Iterator[list[Any]]:
    """What hooks hear: which of them, where, and the shapes of what they are given."""
    names = {module: name for name, module in model.named_modules() if not name.endswith("out_proj")}
    calls: list[Any] = []
    handles = []
    for number, hook in enumerate(hooks):

        def called(module: nn.Module, *args: Any, number: int = number, hook: HookCase = hook) -> Any:
            if module in names:
                calls.append((number, hook.kind, names[module], shapes_of(args)))
            if not hook.replaces or module not in names:
                return None
            if hook.kind == "forward pre":
                return (doubled(args[0]), args[1]) if len(args) == 2 else doubled(args[0])
            return doubled(args[-1] if hook.kind == "forward" else args[0])

        options: dict[str, Any] = {}
        if hook.kind.startswith("forward") and hook.path is not None:
            options["with_kwargs"] = hook.with_kwargs
        if hook.kind == "forward":
            options["always_call"] = hook.always_call
        name = f"{hook.kind} hook".replace(" ", "_")
        if hook.path is None:
            handles.append(getattr(torch_module, f"register_module_{name}")(called, **options))
        else:
            register = getattr(model.get_submodule(hook.path), f"register_{name}")
            handles.append(register(called, prepend=hook.prepend, **options))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def hooks_differ(
    model: nn.Module, torchs: nn.Module, hooks: list[HookCase], call: Callable[[nn.Module], Results]
) -> str | None:
    """How hooks of ours are called in another way than torch's, or change something else."""
    with listening(model, hooks) as ours:
        outcome = outcome_of(lambda: call(model))
    with slow_path(), listening(torchs, hooks) as theirs:
        wanted = outcome_of(lambda: call(torchs))
    if ours != theirs:
        return f"heard {ours}, not {theirs}"
    if outcome.refusal is not None or wanted.refusal is not None:
        return refusals_differ(outcome, wanted)
    if outcome.warnings != wanted.warnings:
        return f"warnings are {outcome.warnings}, not {wanted.warnings}"
    return results_differ(outcome.results, wanted.results, wanted.results, torch.float64, pull=4.0)


def draw_hooked_call(choose: Choose, seed: int) -> tuple[Case, list[HookCase]]:
    """A call that is not empty, and hooks on the module or on all modules."""
    case = draw_call(choose, seed)
    case = replace(
        case,
        dtype=torch.float64,
        N=2 if case.N == 0 else case.N,
        L=max(case.L, 1),
        S=max(case.S, 1),
        is_causal=False,
        mask_dtype=None,
        padding_dtype=None,
        autocast=False,
    )
    return case, draw_hooks(choose, [""])


def draw_hooked_layer(choose: Choose, seed: int) -> tuple[LayerCase, list[HookCase]]:
    """A call of a layer, and hooks on its parts or on all modules."""
    case = draw_layer(choose, seed)
    masks = {
        name: replace(mask, hint=None if mask.hint is None else False) for name, mask in case.masks.items()
    }
    case = replace(case, dtype=torch.float64, masks=masks, autocast=False)
    paths = [
        name
        for name, _ in layer_of(case, case.dtype).named_modules()
        if not name.endswith(("out_proj", "activation"))
    ]
    return case, draw_hooks(choose, paths)


def hooked_call_difference(drawn: tuple[Case, list[HookCase]]) -> str | None:
    """How a call of ours with these hooks differs from one of torch's; None: it does not."""
    case, hooks = drawn
    ours, theirs = (
        made(kind, case, case.dtype) for kind in (hw.nn.MultiheadAttention, nn.MultiheadAttention)
    )
    numbers = numbers_of(case, theirs)
    return hooks_differ(ours, theirs, hooks, lambda module: results(module, case, numbers, case.is_causal))


def hooked_layer_difference(drawn: tuple[LayerCase, list[HookCase]]) -> str | None:
    """How a call of an adopted layer with these hooks differs from torch's; None: it does not."""
    case, hooks = drawn
    ours, theirs, numbers = layer_of(case, case.dtype), layer_of(case, case.dtype), layer_numbers(case)
    hw.adopt(ours)
    return hooks_differ(
        ours, theirs, hooks, lambda model: layer_results(model, case, numbers, all_hints=True)
    )
