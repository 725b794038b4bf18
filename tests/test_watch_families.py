"""Families of models through `attach`: the weights heard are those of the eager route, and nothing else changes.

The judge is transformers itself: the same model with eager attention, its weights taken where they are made.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from judge import assert_judged, error
from model_families import FAMILIES, Family
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise import AttentionMap, Mask
from headwise.watch.attachment import AttentionBypassed, attach
from headwise.watch.calls import Call
from headwise.watch.places import names_in

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NAMES = "entropy confidence distance first previous itself next local received".split()
EXACT = 1e-10  # of a float64 model
DOUBLE, SINGLE = torch.float64, torch.float32


@pytest.fixture(autouse=True)
def _silent() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()


class Heard:
    """A listener that keeps every call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def hear(self, call: Call) -> None:
        self.calls.append(call)

    @property
    def paths(self) -> list[str]:
        return [call.path for call in self.calls]


class Precisely(TorchFunctionMode):
    """Lets models in float64 be so: many take their softmax in float32 whatever they are in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is SINGLE and args and isinstance(args[0], Tensor) and args[0].dtype is DOUBLE:
            kwargs = kwargs | {"dtype": DOUBLE}
        return func(*args, **kwargs)


@contextmanager
def eager_weights_kept(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """What the eager attention functions of transformers return inside the block, by module path."""
    paths = {module: path for path, module in model.named_modules()}
    kept: dict[str, list[Tensor]] = defaultdict(list)
    changed: list[tuple[Any, str, Any]] = []

    def keeping(own: Any) -> Any:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output, weights = own(module, *args, **kwargs)
            kept[paths[module]].append(weights)
            return output, weights

        return forward

    files = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    for file in files:
        if not file.startswith("transformers.models."):
            continue
        for name, own in list(vars(sys.modules[file]).items()):
            if name.endswith("eager_attention_forward"):
                changed.append((sys.modules[file], name, own))
                setattr(sys.modules[file], name, keeping(own))
    try:
        yield kept
    finally:
        for module, name, own in changed:
            setattr(module, name, own)


def run(model: nn.Module, inputs: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)  # some models draw even in eval mode
    with torch.no_grad(), Precisely():
        return model(**inputs, **more)


def numbered(kept: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """By the names under which calls are heard: a layer that runs again is path#1, path#2, ..."""
    return {
        path if not n else f"{path}#{n}": weights for path, found in kept.items() for n, weights in enumerate(found)
    }


def eager_weights(family: Family, side: str, dtype: torch.dtype) -> dict[str, Tensor]:
    model = family.build(dtype, "eager")
    with eager_weights_kept(model) as kept:
        output = run(model, family.feed(side, dtype), output_attentions=True)
    given = [x for name, part in output.items() if name.endswith("attentions") and part for x in part]
    ours = [weights for found in kept.values() for weights in found]
    for weights in given:
        assert any(weights.shape == one.shape and torch.equal(weights, one) for one in ours)
    return numbered(kept)


def real_queries(model: nn.Module, inputs: dict[str, Any], path: str, T: int) -> Tensor | None:
    """Which queries are not padding, as the inputs say."""
    mask = inputs.get("attention_mask")
    if mask is None or "vision" in path or ("decoder" in path and "decoder_input_ids" in inputs):
        return None
    if mask.shape[1] != T:
        mask = model._get_feature_vector_attention_mask(T, mask)
    return mask.bool()


def statistics(weights: Tensor, real: Tensor | None) -> dict[str, Tensor]:
    """By the statistics of given weights; what a row lacks of 1 is its sink's, which has a surprise, too."""
    queries, keys = real, real if real is not None and weights.shape[2] == weights.shape[3] else None
    stats = AttentionMap.from_weights(weights, Mask(queries=queries, keys=keys)).statistics(*NAMES)
    found = {name: getattr(stats, name) for name in NAMES}
    rest = (1 - weights.sum(-1)).clamp(min=0)
    if float(rest.max()) > 1e-4:
        rows = torch.ones_like(rest[:, :1], dtype=torch.bool) if real is None else real[:, None]
        surprise = -torch.xlogy(rest, rest) * rows
        found["entropy"] = found["entropy"] + surprise.sum(-1) / rows.sum(-1)
    return found


def traces(model: nn.Module) -> Any:
    """Everything that listening changes for a while."""
    from transformers import AttentionInterface, AttentionMaskInterface

    configs = {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    hooks = [
        (len(m._forward_pre_hooks), len(m._forward_hooks), len(m._forward_hooks_always_called), sorted(m.__dict__))
        for m in model.modules()
    ]
    registries = [dict(r._global_mapping) for r in (AttentionInterface, AttentionMaskInterface)]
    return configs, hooks, registries, torch._C._len_torch_function_stack()


def outputs_of(result: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors in a model's answer, without what it says of padding."""
    found: dict[str, Tensor] = {}
    mask = inputs.get("attention_mask")
    for name, value in result.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            padded = mask is not None and value.ndim > 2 and value.shape[:2] == mask.shape
            found[name] = value[mask.bool()] if padded else value
    assert found
    return found


def each(*routes: str) -> Any:
    chosen = [family for family in FAMILIES if family.route in routes]
    marks = [() if family.core else pytest.mark.slow for family in chosen]
    return pytest.mark.parametrize(
        "family", [pytest.param(f, marks=m, id=f.name) for f, m in zip(chosen, marks, strict=True)]
    )


@each("hook")
def test_the_weights_heard_are_the_eager_ones(family: Family) -> None:
    for side in family.sides:
        truth = eager_weights(family, side, DOUBLE)
        plain = eager_weights(family, side, SINGLE)
        exact, found = (_heard(family, side, dtype) for dtype in (DOUBLE, SINGLE))
        assert set(exact) == set(found) == set(truth)
        worst = {path: error(plain[path], truth[path]) for path in truth}
        for path in truth:
            real = _check_queries(family, side, exact[path])
            rows = torch.ones(truth[path].shape[0], truth[path].shape[2], dtype=torch.bool) if real is None else real
            right, single, ours = (
                w.movedim(1, -1)[rows] for w in (truth[path], plain[path], found[path].weights.dense())
            )
            assert error(exact[path].weights.dense().movedim(1, -1)[rows], right) < EXACT, path
            assert_judged(ours, single, right, dtype=SINGLE, size=max(1.0, 0), what=f"{path} {side}")
            _check_statistics(exact[path], found[path], truth[path], plain[path], real, worst)


def _heard(family: Family, side: str, dtype: torch.dtype, fallback: str | None = None) -> dict[str, Call]:
    model, listener = family.build(dtype), Heard()
    with attach(model, listener, fallback):
        run(model, family.feed(side, dtype))
    assert len(set(listener.paths)) == len(listener.paths)
    return {call.path: call for call in listener.calls}


def _check_queries(family: Family, side: str, call: Call) -> Tensor | None:
    T = call.weights.shape[2]
    inputs = family.feed(side)
    real = real_queries(family.build(), inputs, call.path, T)
    counted = call.weights.mask.counted(T)
    everyone = torch.ones(call.weights.shape[0], T, dtype=torch.bool)
    assert torch.equal(everyone if counted is None else counted, everyone if real is None else real), call.path
    return real


def _check_statistics(
    exact: Call, found: Call, truth: Tensor, plain: Tensor, real: Tensor | None, worst: dict[str, float]
) -> None:
    right, single = statistics(truth, real), statistics(plain.double(), real)
    ours, our_single = exact.weights.statistics(*NAMES), found.weights.statistics(*NAMES)
    for name in NAMES:
        what = f"{name} of {exact.path}"
        assert error(getattr(ours, name), right[name]) < EXACT, what
        size = max(1.0, float(truth.shape[-1])) if name in ("distance", "received") else 1.0
        assert_judged(getattr(our_single, name), single[name], right[name], dtype=SINGLE, size=size, what=what)


@each("hook", "eager")
def test_listening_changes_nothing(family: Family) -> None:
    fallback = "eager" if family.route == "eager" else None
    for side in family.sides:
        model, inputs = family.build(DOUBLE), family.feed(side, DOUBLE)
        before, outside = traces(model), run(model, inputs)
        with attach(model, Heard(), fallback):
            inside = run(model, inputs)
        assert traces(model) == before
        after = run(model, inputs)
        expected = outputs_of(outside, inputs)
        for name, value in outputs_of(inside, inputs).items():
            assert error(value, expected[name]) < 1e-9, (name, side)
        for name, value in outputs_of(after, inputs).items():
            assert torch.equal(value, expected[name]), (name, side)


@each("eager")
def test_weights_a_model_makes_itself_are_read_with_fallback_eager(family: Family) -> None:
    for side in family.sides:
        calls = list(_heard(family, side, DOUBLE, "eager").values())
        model, inputs = family.build(DOUBLE, "eager"), family.feed(side, DOUBLE)
        output = run(model, inputs, output_attentions=True)
        given = [x for name, part in output.items() if name.endswith("attentions") and part for x in part]
        assert len(given) == len(calls)
        for call, truth in zip(calls, given, strict=True):
            real = _check_queries(family, side, call)
            rows = slice(None) if real is None else real
            assert error(call.weights.dense().movedim(1, -1)[rows], truth.movedim(1, -1)[rows]) < EXACT
            for name, value in statistics(truth, real).items():
                assert error(getattr(call.weights.statistics(name), name), value) < EXACT, (name, call.path)


@each("eager", "refused")
def test_layers_that_bypass_the_hook_are_named(family: Family) -> None:
    model, inputs, listener = family.build(), family.feed(), Heard()
    before = traces(model)
    with pytest.raises(AttentionBypassed, match=r"layers of \w+.*fallback='skip'"), attach(model, listener):
        run(model, inputs)
    assert traces(model) == before
    with attach(model, listener, "skip"):
        run(model, inputs)
    assert all("dense" != path for path in listener.paths)
    if family.route == "refused":
        with pytest.raises(AttentionBypassed, match="no weights"), attach(model, listener, "eager"):
            run(model, inputs)
