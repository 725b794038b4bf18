"""Families of models through `attach`: the weights heard are the eager route's, and nothing else changes.

The judge is transformers itself: the same model with eager attention, its weights taken where they are made.
"""

from __future__ import annotations

import copy
import os
import pickle
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise import AttentionMap, Mask, ablate, budget, watch
from headwise.errors import AttentionBypassed, AttentionUnheard
from headwise.listeners.active import LayerCall
from headwise.listeners.adapters import attach
from headwise.listeners.model_structure import DISPATCHES, likely_places, names_in
from heard import Heard
from judge import error
from model_families import FAMILIES, LENGTH, Family, text

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [
    pytest.mark.usefixtures("_small_models"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask:UserWarning"),  # WavLM's own
]

NAMES = "entropy confidence distance first previous itself next local received".split()
EXACT = 1e-10  # of a float64 model
DOUBLE, SINGLE = torch.float64, torch.float32


class Precisely(TorchFunctionMode):
    """Lets models in float64 be so: many take their softmax in float32 whatever they are in.

    What else they ask for in float32 stays: rotary angles multiply two such tensors.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        requested = kwargs.get("dtype") is SINGLE and "softmax" in getattr(func, "__name__", "")
        if requested and isinstance(args[0], Tensor) and args[0].dtype is DOUBLE:
            kwargs = kwargs | {"dtype": DOUBLE}
        return func(*args, **kwargs)


@contextmanager
def eager_weights_kept(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The weights that layers compute inside the block, by module path.

    Where layers hand over to transformers' eager attention functions, they are taken from those; elsewhere
    from what a layer returns beside its output.
    """
    paths = {module: path for path, module in model.named_modules()}
    places = set(likely_places(model))
    saved: dict[str, list[Tensor]] = defaultdict(list)
    with ExitStack() as undo:
        for module, path in paths.items():
            if isinstance(module, nn.MultiheadAttention):
                every_head = {"need_weights": True, "average_attn_weights": False}
                handle = module.register_forward_pre_hook(
                    lambda _, args, kwargs, more=every_head: (args, kwargs | more), with_kwargs=True
                )
                undo.callback(handle.remove)

            def note(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
                own = path in places and DISPATCHES not in names_in(type(module))
                if own and isinstance(output, (tuple, list)):
                    saved[path] += [by_head(module, x) for x in output[1:] if is_weights(module, x)]

            undo.callback(module.register_forward_hook(note).remove)

        def keeping(own: Any) -> Any:
            def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                output, weights = own(module, *args, **kwargs)
                saved[paths[module]].append(weights)
                return output, weights

            return forward

        for file in {type(module).__module__ for module in model.modules()}:
            for name, own in list(vars(sys.modules[file]).items()):
                if file.startswith("transformers.models.") and name.endswith("eager_attention_forward"):
                    undo.callback(setattr, sys.modules[file], name, own)
                    setattr(sys.modules[file], name, keeping(own))
        yield saved


def is_weights(module: nn.Module, x: Any) -> bool:
    return isinstance(x, Tensor) and (x.ndim == 4 or type(module).__name__ == "SamVisionAttention")


def by_head(module: nn.Module, weights: Tensor) -> Tensor:
    """[B, H, T, S] of the order a layer has them in."""
    if type(module).__name__ == "XLNetRelativeAttention":  # [T, S, B, H]
        return weights.permute(2, 3, 0, 1)
    if type(module).__name__ == "SamVisionAttention":  # [B * H, T, S]
        return weights.unflatten(0, (-1, module.num_attention_heads))  # type: ignore[arg-type]
    return weights


def run(model: nn.Module, inputs: dict[str, Any], **more: Any) -> Any:
    torch.manual_seed(0)  # some models draw even in eval mode
    with torch.no_grad(), Precisely():
        return model(**inputs, **more)


def numbered(saved: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """By the names under which calls are heard: a layer that runs again is path#1, path#2, ..."""
    return {
        path if not n else f"{path}#{n}": weights
        for path, actual in saved.items()
        for n, weights in enumerate(actual)
    }


def eager_weights(
    family: Family, side: str, dtype: torch.dtype, model: nn.Module | None = None
) -> dict[str, Tensor]:
    """By the model, or by one that is built for it."""
    model = model or family.build(dtype, "eager")
    with eager_weights_kept(model) as saved:
        output = run(model, family.feed(side, dtype), output_attentions=True)
    arguments = [x for name, part in output.items() if name.endswith("attentions") and part for x in part]
    ours = [weights for actual in saved.values() for weights in actual]
    if family.name == "sam":  # what its decoder calls attentions are something else
        arguments = list(output.vision_attentions)
    if family.name == "minimax":  # and what its linear layers do
        arguments = [weights for weights in arguments if weights.shape[2] == LENGTH]
    for weights in arguments:
        assert any(torch.equal(weights.flatten(), our.flatten()) for our in ours)
    return numbered(saved)


def real(
    family: Family, inputs: dict[str, Any], path: str, length: int, of_keys: bool = False
) -> Tensor | None:
    """Which queries or keys of a layer are not padding, as the inputs say: bool [B, length]; None: all."""
    decoding = "decoder" in path and "decoder_input_ids" in inputs
    from_encoder = of_keys and any(word in path for word in ("encoder_attn", "EncDec"))
    mask = inputs.get("decoder_attention_mask" if decoding and not from_encoder else "attention_mask")
    if mask is None or any(word in path for word in ("vision", "visual", "qformer")):
        return None
    if mask.shape[1] != length:
        mask = family.build()._get_feature_vector_attention_mask(length, mask)  # type: ignore[operator]
    return mask.bool()


def statistics(weights: Tensor, queries: Tensor | None, keys: Tensor | None) -> dict[str, Tensor]:
    """By the statistics of given weights; what a row lacks of 1 is its sink's, which has a surprise, too."""
    stats = AttentionMap.from_weights(weights, Mask(queries=queries, keys=keys)).statistics(*NAMES)
    actual = {name: getattr(stats, name) for name in NAMES}
    rest = (1 - weights.sum(-1)).clamp(min=0)
    if float(rest.max()) > 1e-4:
        rows = torch.ones_like(rest[:, :1], dtype=torch.bool) if queries is None else queries[:, None]
        surprise = -torch.xlogy(rest, rest) * rows
        actual["entropy"] = actual["entropy"] + surprise.sum(-1) / rows.sum(-1)
    return actual


def traces(model: nn.Module) -> Any:
    """Everything that listening changes for a while."""
    from transformers import AttentionInterface, AttentionMaskInterface

    configs = {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    hooks = [
        (
            len(m._forward_pre_hooks),
            len(m._forward_hooks),
            len(m._forward_hooks_always_called),
            sorted(m.__dict__),
        )
        for m in model.modules()
    ]
    kinds = (AttentionInterface, AttentionMaskInterface)
    registries = [(dict(kind._global_mapping), dict(vars(kind))) for kind in kinds]
    return configs, hooks, registries, torch._C._len_torch_function_stack()


def outputs_of(result: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors in a model's answer, without what it says of padding."""
    actual: dict[str, Tensor] = {}
    mask = inputs.get("attention_mask")
    for name, value in result.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            padded = mask is not None and value.ndim > 2 and value.shape[:2] == mask.shape
            actual[name] = value[mask.bool()] if padded else value
    assert actual
    return actual


def each(*routes: str, judged: bool = False) -> Any:
    chosen = [f for f in FAMILIES if f.route in routes and (f.judged or not judged)]
    core = [family.name for family in chosen if family.core]
    families = pytest.mark.parametrize("family", chosen, ids=lambda family: family.name)
    return lambda test: pytest.mark.thinned(0, keep=core, slow=2)(families(test))


@each("hook", judged=True)
def test_the_weights_heard_are_the_eager_ones(family: Family) -> None:
    eager = {dtype: family.build(dtype, "eager") for dtype in (DOUBLE, SINGLE)}
    models = {dtype: family.build(dtype) for dtype in (DOUBLE, SINGLE)}
    for side in family.sides:
        truth, plain = (eager_weights(family, side, dtype, model) for dtype, model in eager.items())
        exact, actual = (watched_call(family, side, dtype, model) for dtype, model in models.items())
        assert set(exact) == set(actual) == set(truth)
        padding = {path: check_padding(family, side, exact[path]) for path in truth}
        rounding = torch.finfo(SINGLE).eps + max(
            error(only(plain[path], padding[path][0]), only(truth[path], padding[path][0])) for path in truth
        )
        for path, (queries, keys) in padding.items():
            right = only(truth[path], queries)
            assert error(only(exact[path].weights.dense(), queries), right) < EXACT, path
            assert error(only(actual[path].weights.dense(), queries), right) <= 2 * rounding, path
            expected = statistics(truth[path], queries, keys)
            for name, value in measured(exact[path].weights).items():
                assert difference(value, expected[name]) < EXACT, (name, path, side)
            for name, value in measured(actual[path].weights).items():
                # a mean of weights may be as wrong as they are, a sum over keys or queries as all of them are
                size = right.shape[-2] if name in ("distance", "received", "entropy") else 1
                assert difference(value, expected[name]) <= 2 * size * rounding, (name, path, side)


def measured(weights: AttentionMap) -> dict[str, Tensor]:
    stats = weights.statistics(*NAMES)
    return {name: getattr(stats, name) for name in NAMES}


def difference(actual: Tensor, truth: Tensor) -> float:
    """As `error`; what no query has (a next key, say) is NaN in both."""
    assert torch.equal(actual.isnan(), truth.isnan())
    return error(actual.nan_to_num(), truth.nan_to_num())


def only(weights: Tensor, queries: Tensor | None) -> Tensor:
    """The rows of real queries: [rows, S, H] or [B, T, S, H]."""
    return weights.movedim(1, -1) if queries is None else weights.movedim(1, -1)[queries]


def watched_call(
    family: Family, side: str, dtype: torch.dtype, model: nn.Module, fallback: str | None = None
) -> dict[str, LayerCall]:
    listener = Heard()
    with attach(model, listener, fallback):
        run(model, family.feed(side, dtype))
    assert len(set(listener.paths)) == len(listener.paths)
    return {call.path: call for call in listener.calls}


def check_padding(family: Family, side: str, call: LayerCall) -> tuple[Tensor | None, Tensor | None]:
    """Which queries and keys are real; those and only those are counted."""
    B, _, T, S = call.weights.shape
    inputs = family.feed(side)
    queries = real(family, inputs, call.path, T)
    keys = real(family, inputs, call.path, S, of_keys=True)
    counted, everyone = call.weights.mask.counted(T), torch.ones(B, T, dtype=torch.bool)
    assert torch.equal(everyone if counted is None else counted, everyone if queries is None else queries), (
        call.path
    )
    return queries, keys


@each("hook", "eager", "mixed")
def test_listening_changes_nothing(family: Family) -> None:
    fallback = None if family.route == "hook" else "eager"
    model = family.build(family.finest)
    for side in family.sides:
        inputs = family.feed(side, family.finest)
        outside, before = run(model, inputs), traces(model)
        with attach(model, Heard(), fallback):
            inside = run(model, inputs)
        assert traces(model) == before
        after = run(model, inputs)
        expected = outputs_of(outside, inputs)
        for name, value in outputs_of(inside, inputs).items():
            assert error(value, expected[name]) < 1e-9, (name, side)
        for name, value in outputs_of(after, inputs).items():
            assert torch.equal(value, expected[name]), (name, side)


@each("eager", "mixed")
def test_weights_a_model_makes_itself_are_read_with_fallback_eager(family: Family) -> None:
    model, eager = family.build(family.finest), family.build(family.finest, "eager")
    for side in family.sides:
        calls = watched_call(family, side, family.finest, model, "eager")
        truth = eager_weights(family, side, family.finest, eager)
        assert set(calls) == set(truth)
        for path, call in calls.items():
            queries, keys = check_padding(family, side, call)
            ours, right = call.weights.dense(), truth[path].to(call.weights.dtype)
            if family.name == "wavlm":  # which gives the mean over heads alone
                ours, right = ours.mean(1, keepdim=True), right[:, :1]
            assert error(only(ours, queries), only(right, queries)) < EXACT, (path, side)
            for name, value in measured(call.weights).items():
                expected = statistics(call.weights.dense(), queries, keys)[name]
                assert difference(value, expected) < EXACT, (name, path, side)


@each("eager", "mixed", "partly", "refused")
def test_layers_that_bypass_the_hook_are_named(family: Family) -> None:
    model, inputs, listener = family.build(), family.feed(), Heard()
    run(model, inputs)
    before = traces(model)
    with pytest.raises(AttentionBypassed, match=r"layers of \w+.*fallback='skip'"), attach(model, listener):
        run(model, inputs)
    assert traces(model) == before
    with attach(model, listener, "skip"):
        run(model, inputs)
    assert bool(listener.calls) == (family.route == "mixed")
    if family.route == "refused":
        with pytest.raises(AttentionBypassed, match="no weights"), attach(model, listener, "eager"):
            run(model, inputs)
    if family.route == "partly":
        with pytest.warns(AttentionUnheard, match="not intercepted"), attach(model, listener, "eager"):
            run(model, inputs)
        assert listener.calls


@each("none")
def test_a_model_without_attention_says_nothing(family: Family) -> None:
    """Whoever listens must notice: nothing was heard though a forward ran."""
    model, listener = family.build(), Heard()
    with attach(model, listener) as attachment:
        run(model, family.feed())
    assert not listener.calls and attachment.forward.number == 1


@pytest.mark.slow
def test_a_layer_that_its_model_replaces_on_the_way_is_named() -> None:
    """BigBird puts full attention in the place of its sparse one when a text is short."""
    family = by_name("big bird sparse")
    model, inputs = family.build(), text("none")
    with pytest.raises(AttentionBypassed, match="BigBird"), attach(model, Heard()):
        run(model, inputs)
    listener = Heard()
    with attach(model, listener, "eager"):
        run(model, inputs)
    assert len(listener.calls) == 2


def by_name(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def test_texts_packed_into_one_sequence() -> None:
    """position_ids that start again, without an attention_mask."""
    family = by_name("llama")
    model, eager = family.build(DOUBLE), family.build(DOUBLE, "eager")
    inputs = text("none") | {"position_ids": (torch.arange(LENGTH) % 4).expand(2, -1), "use_cache": False}
    listener = Heard()
    with attach(model, listener):
        run(model, inputs)
    with eager_weights_kept(eager) as saved:
        run(eager, inputs)
    for call in listener.calls:
        assert call.weights.mask.allowed is None, "nothing quadratic"
        assert error(call.weights.dense(), saved[call.path][0]) < EXACT


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_four_dimensional_masks_of_the_user(name: str) -> None:
    family = by_name(name)
    mask = torch.rand(2, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) > 0.4
    mask |= torch.eye(LENGTH, dtype=torch.bool)
    added = torch.zeros(mask.shape, dtype=DOUBLE).masked_fill(~mask, torch.finfo(DOUBLE).min)
    model, eager, listener = family.build(DOUBLE), family.build(DOUBLE, "eager"), Heard()
    with attach(model, listener):
        run(model, text("none") | {"attention_mask": mask})
        run(model, text("none") | {"attention_mask": added})
    with eager_weights_kept(eager) as saved:
        run(eager, text("none") | {"attention_mask": added})
    assert len(listener.calls) == 4
    for call in listener.calls:
        assert error(call.weights.dense(), saved[call.path][0]) < EXACT


def test_weights_asked_of_the_model_are_still_given() -> None:
    family = by_name("bert")
    model, eager = family.build(DOUBLE), family.build(DOUBLE, "eager")
    with attach(model, Heard()):
        actual = run(model, text("none"), output_attentions=True).attentions
    expected = run(eager, text("none"), output_attentions=True).attentions
    for first, other in zip(actual, expected, strict=True):
        assert error(first, other) < EXACT


# What is a model's own


@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_names_stay_as_they_are(name: str) -> None:
    """DeepSeek V3.2 and others branch on the name: under one of ours they dropped their top-k mask."""
    model = by_name(name).build()
    before = traces(model)[0]
    with attach(model, Heard()):
        run(model, text("none"))
        assert traces(model)[0] == before
        assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_query_sees_as_many_keys_as_its_model_chose(implementation: str) -> None:
    """With its mask dropped, a query of DeepSeek V3.2 saw every key before it: logits were off by 3 to 5.

    A key that no query had chosen was taken for padding, and its own query was not counted.
    """
    model, inputs = by_name("deepseek v3.2").build(DOUBLE, implementation), text("none")
    outside, listener = run(model, inputs), Heard()
    with attach(model, listener), ablate(model, []):
        inside = run(model, inputs)
    assert error(inside.last_hidden_state, outside.last_hidden_state) < EXACT
    for call in listener.calls:
        assert call.weights.mask.counted(LENGTH) is None
        visible = (call.weights.dense() > 0).sum(-1)
        assert torch.equal(visible, torch.arange(1, LENGTH + 1).clamp(max=4).expand_as(visible))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_no_mask_is_made_of_a_padded_text(implementation: str) -> None:
    """A long text has no room for one; 40 x 40 is too much here."""
    model, listener = by_name("llama").build(DOUBLE, implementation), Heard()
    with attach(model, listener), budget.limit("1 KiB"):
        run(model, text("left", 37))
    assert all(call.weights.mask.allowed is None for call in listener.calls)


def test_a_bool_mask_is_to_a_model_what_its_function_makes_of_it() -> None:
    """Eager attention adds a mask, whatever is in it: True is 1 there, and what is False is seen as well."""
    model, listener = by_name("llama").build(DOUBLE, "eager"), Heard()
    inputs = text("none") | {"attention_mask": torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()}
    expected = run(model, inputs).last_hidden_state
    with attach(model, listener):
        assert error(run(model, inputs).last_hidden_state, expected) < EXACT
    assert all(bool((call.weights.dense() > 0).all()) for call in listener.calls)


def test_layers_without_a_softmax_are_left_out_and_the_others_keep_their_numbers() -> None:
    """MiniMax: the first advice was fallback="eager", and it failed: there are no weights to read."""
    for name in ("minimax", "olmo hybrid", "qwen3-next"):
        model = by_name(name).build()
        for fallback in (None, "eager", "skip"):
            with watch(model, fallback=fallback) as heads:
                run(model, text("none"))
            assert list(heads) == [1], name


def test_another_model_with_the_same_config_is_not_touched() -> None:
    """Its config had our name in it, and so it was answered by us as well."""
    model = by_name("llama").build(DOUBLE)
    other = type(model)(model.config).to(DOUBLE).eval()
    other.config = model.config
    inputs, listener = text("left"), Heard()
    expected = run(other, inputs).last_hidden_state
    with attach(model, listener):
        actual = run(other, inputs).last_hidden_state
    assert torch.equal(actual, expected) and not listener.calls


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_the_config_of_a_copy_made_inside_is_its_own(copied: Any) -> None:
    model = by_name("llama").build(DOUBLE)
    model.config._attn_implementation_internal = "flash_attention_2"  # for which there is nothing here
    with attach(model, Heard()):
        made = copied(model.config)
    assert made._attn_implementation == "flash_attention_2" and type(made._attn_implementation) is str


def test_a_kernel_without_words_has_its_model_run_as_it_else_would() -> None:
    """Flash attention: the model asked it for what no CPU has; inside a block it takes its other way."""
    for name in ("llama", "gpt-oss"):
        model, inputs = by_name(name).build(DOUBLE), text("left")
        truth, expected = eager_weights(by_name(name), "left", DOUBLE), run(model, inputs).last_hidden_state
        model.config._attn_implementation_internal = "flash_attention_2"
        listener, first = Heard(), ExitStack()
        first.enter_context(attach(nn.Sequential(model), Heard()))  # which ends before the other does
        with attach(model, listener):
            first.close()
            actual = run(model, inputs).last_hidden_state
        assert model.config._attn_implementation == "flash_attention_2"
        rows = inputs["attention_mask"].bool()
        assert error(actual[rows], expected[rows]) < EXACT
        for call in listener.calls:
            assert error(only(call.weights.dense(), rows), only(truth[call.path], rows)) < EXACT


def test_an_implementation_chosen_inside_a_block_stays() -> None:
    model, listener = by_name("llama").build(DOUBLE), Heard()
    expected = run(model, text("none")).last_hidden_state
    with attach(model, listener):
        model.set_attn_implementation("eager")  # type: ignore[operator]
        actual = run(model, text("none"), output_attentions=True)
    assert model.config._attn_implementation == "eager" and len(listener.calls) == 2
    assert error(actual.last_hidden_state, expected) < EXACT
    for call, weights in zip(listener.calls, actual.attentions, strict=True):
        assert torch.equal(call.weights.dense(), weights)


def test_attentions_that_a_config_asks_for_are_given() -> None:
    """They were left out of the model's answer, for nobody had asked with an argument."""
    model = by_name("llama").build(DOUBLE, "eager")
    model.config.output_attentions = True
    expected = run(model, text("none")).attentions
    with attach(model, Heard()):
        actual = run(model, text("none")).attentions
    for first, other in zip(actual, expected, strict=True):
        assert error(first, other) < EXACT


# Generating

GENERATING = {
    "gpt2": (by_name("gpt2"), "GPT2LMHeadModel"),
    "llama": (by_name("llama"), "LlamaForCausalLM"),
    "mistral": (by_name("mistral"), "MistralForCausalLM"),
    "gemma2": (by_name("gemma2"), "Gemma2ForCausalLM"),
    "gpt-oss": (by_name("gpt-oss"), "GptOssForCausalLM"),
    "llama4 text": (by_name("llama4 text"), "Llama4ForCausalLM"),
    "t5": (by_name("t5"), "T5ForConditionalGeneration"),
}
NEW = 5


def generator(name: str, implementation: str | None = None) -> nn.Module:
    family, model = GENERATING[name]
    config = type(family.build().config).__name__
    generating = replace(family, model=model, config=config)
    return generating.build(DOUBLE, implementation)


def generated(model: nn.Module, cache: str, side: str) -> Tensor:
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    with torch.no_grad(), Precisely():
        return model.generate(**text(side), **options)  # type: ignore[operator]


@pytest.mark.thinned(99, keep=["gpt2-dynamic", "t5-static"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("gpt2", "t5") else pytest.mark.slow) for n in GENERATING]
)
def test_generating(name: str, cache: str) -> None:
    """The same tokens; at each step one query over the keys there are, with the eager weights."""
    model, eager = generator(name), generator(name, "eager")
    for side in ("none", "left"):
        expected, listener = generated(model, cache, side), Heard()
        with attach(model, listener):
            actual = generated(model, cache, side)
        assert torch.equal(actual, expected)
        with eager_weights_kept(eager) as saved:
            assert torch.equal(generated(eager, cache, side), expected)
        steps: dict[str, list[LayerCall]] = defaultdict(list)
        for call in listener.calls:
            steps[call.path].append(call)
        assert set(steps) == set(saved)
        for path, calls in steps.items():
            assert len(calls) == len(saved[path])
            for call, truth in zip(calls, saved[path], strict=True):
                check_step(call, truth)
            if "self" in path.lower() and "encoder." not in path.removeprefix("decoder."):
                check_lengths([call.weights.shape for call in calls], name, side)


def check_step(call: LayerCall, truth: Tensor) -> None:
    S = call.weights.shape[3]
    rows = call.weights.mask.counted(call.weights.shape[2])
    assert not only(truth[..., S:], rows).any(), "places of a cache not yet filled"
    assert error(only(call.weights.dense(), rows), only(truth[..., :S], rows)) < EXACT, call.path


def check_lengths(shapes: list[torch.Size], name: str, side: str) -> None:
    first = 1 if name == "t5" else LENGTH
    assert [shape[2] for shape in shapes] == [first] + [1] * (NEW - 1)
    if name in ("gpt2", "llama", "t5"):  # the others have windows, whose caches forget
        assert [shape[3] for shape in shapes] == list(range(first, first + NEW))
