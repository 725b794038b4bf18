"""Attention functions that are not transformers' own: heard if they compute what we do, else refused by name.

They come through `AttentionInterface`, or from a model's own file. Most of them here are Llama's eager
attention with one edit, which leaves the names in its code as they are.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import os
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_watch_families import DOUBLE, EXACT, run
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headwise import watch
from headwise.errors import AttentionBypassed
from headwise.listeners.adapters import attach
from heard import Heard
from judge import error
from model_families import FAMILIES, LENGTH, Family, text

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [
    pytest.mark.usefixtures("_small_models"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

LLAMA: Family = next(family for family in FAMILIES if family.name == "llama")


def standard(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: Any = None,
    indices: Any = None,
    **kwargs: Any,
) -> Any:
    """Eager attention, of repeated keys, that may be told which keys to take."""
    groups = module.num_key_value_groups
    key = key[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*query.shape[:2], *key.shape[2:])
    value = value[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*query.shape[:2], *value.shape[2:])
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        weights = weights + attention_mask
    weights = nn.functional.softmax(weights, dim=-1)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def sharpened(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    output, weights = standard(module, 2 * query, key, value, attention_mask, **kwargs)
    return output, weights


@pytest.fixture
def dispatch() -> Iterator[Any]:
    """Registers a function, with masks of transformers, for a test."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    names: set[str] = set()

    def register(function: Any, name: str | None = None, masks: str = "eager_mask") -> nn.Module:
        name = name or function.__name__
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, getattr(masking_utils, masks))
        names.add(name)
        return LLAMA.build(DOUBLE, name)

    def forget() -> None:
        for name in names:
            del AttentionInterface._global_mapping[name], AttentionMaskInterface._global_mapping[name]
        names.clear()

    register.forget = forget  # type: ignore[attr-defined]
    yield register
    forget()


def assert_refused(model: nn.Module, match: str, side: str) -> None:
    with pytest.raises(AttentionBypassed, match=match), attach(model, Heard()):
        run(model, text(side))


def test_a_function_of_known_parts_is_answered_as_it_would_be(dispatch: Any) -> None:
    model, listener = dispatch(standard), Heard()
    expected = run(model, text("none")).last_hidden_state
    with attach(model, listener):
        actual = run(model, text("none"), unknown=torch.ones(2, 3)).last_hidden_state  # to nobody's use
    assert error(actual, expected) < EXACT and len(listener.calls) == 2


def test_a_function_of_other_parts_is_refused_by_name(dispatch: Any) -> None:
    """Whatever was registered, the softmax of q and k was heard, and what the model went on with."""
    model, listener = dispatch(sharpened), Heard()
    expected = run(model, text("none"))
    assert_refused(model, r"layers\.0\.self_attn.*sharpened uses .*standard.*'skip'", "none")
    with attach(model, listener, "eager"):
        actual = run(model, text("none"), output_attentions=True)
    assert torch.equal(actual.last_hidden_state, expected.last_hidden_state)
    for call, weights in zip(listener.calls, actual.attentions, strict=True):
        assert torch.equal(call.weights.dense(), weights)
    with attach(model, Heard(), "skip"):
        assert torch.equal(run(model, text("none")).last_hidden_state, expected.last_hidden_state)


def test_a_lookup_inside_a_block_finds_what_it_finds_outside(dispatch: Any) -> None:
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, of_a_file = dispatch(standard), AttentionInterface()
    of_a_file["sdpa"] = sharpened

    def looked_up(registry: Any, name: str) -> Any:
        function = registry.get_interface(name, eager)
        return getattr(function, "__headwise_original__", function)

    def eager() -> None: ...

    requested = [
        (at, name) for at in (ALL_ATTENTION_FUNCTIONS, of_a_file) for name in ("sdpa", "eager", "standard")
    ]
    before = [looked_up(*each) for each in requested]
    assert before[1] is eager and before[3] is sharpened
    with attach(model, Heard()):
        assert [looked_up(*each) for each in requested] == before
        with pytest.raises(KeyError, match="nobody"):
            ALL_ATTENTION_FUNCTIONS.get_interface("nobody", eager)
        assert "nobody" not in ALL_ATTENTION_FUNCTIONS and "sdpa" in ALL_ATTENTION_FUNCTIONS


def test_a_registry_that_looks_up_in_its_own_way_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a model that nobody listens to."""
    from transformers import AttentionInterface
    from transformers.models.llama import modeling_llama

    class Mine(AttentionInterface):
        def __getitem__(self, name: str) -> Any:
            return doubled if name == "sdpa" else super().__getitem__(name)

    def doubled(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        return ordinary(module, query, key, 2 * value, mask, **more)

    ordinary = modeling_llama.ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Mine())
    model, other = (
        LLAMA.build(DOUBLE, "sdpa"),
        next(family for family in FAMILIES if family.name == "gpt2").build(DOUBLE, "sdpa"),
    )
    expected = run(model, text("none")).last_hidden_state
    with attach(other, Heard()):
        assert torch.equal(run(model, text("none")).last_hidden_state, expected)


def test_a_function_is_let_go_after_the_block(dispatch: Any) -> None:
    held = torch.zeros(3)

    def holding(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
        return standard(module, query, key, value + held[0], mask, **more)

    model = dispatch(holding)
    with attach(model, Heard(), "skip"):
        run(model, text("none"))
    reference = weakref.ref(holding)
    dispatch.forget()
    del holding, model
    gc.collect()
    assert reference() is None


def test_a_lookup_that_somebody_has_replaced_is_asked(dispatch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    model, requested = dispatch(standard), []
    own = AttentionInterface.get_interface

    def mine(self: Any, *args: Any) -> Any:
        requested.append(args[0])
        return own(self, *args)

    for theirs in (mine, functools.wraps(own)(mine)):
        requested.clear()
        with monkeypatch.context() as patch:
            patch.setattr(AttentionInterface, "get_interface", theirs)
            with attach(model, Heard()):
                run(model, text("none"))
        assert requested == ["standard"] * 2


def test_an_argument_that_is_of_use_to_the_function_is_refused_by_name(dispatch: Any) -> None:
    """`indices=` of sparse attention vanished among the arguments nobody knew."""
    model, indices = dispatch(standard), torch.zeros(2, LENGTH, 4, dtype=torch.long)
    message = r"layers\.0\.self_attn.*standard is given indices=Tensor \[2, 11, 4\]"
    with pytest.raises(AttentionBypassed, match=message), attach(model, Heard()):
        run(model, text("none"), indices=indices)


# Llama's eager attention with an edit


SCORES = "torch.matmul(query, key_states.transpose(2, 3)) * scaling"
SOFTMAX = "nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)"
OUTPUT = "attn_output = torch.matmul(attn_weights, value_states)"
RETURNED = "return attn_output, attn_weights"
OPTIONS, GIVEN_MASK = "dropout: float = 0.0,", "attn_weights + attention_mask"
DROPS = "nn.functional.dropout(attn_weights, p=dropout, training=module.training)"
REPEATED = "value_states = repeat_kv(value, module.num_key_value_groups)"

OTHERWISE: dict[str, dict[str, str]] = {  # what it computes is something else
    "scale_doubled": {SCORES: f"{SCORES} * 2"},
    "scale_dropped": {SCORES: SCORES.removesuffix(" * scaling")},
    "scale_a_little_larger": {SCORES: f"{SCORES} * 1.01"},
    "temperature": {OPTIONS: f"{OPTIONS} temperature=2.0,", SCORES: f"{SCORES} / temperature"},
    "negated": {SCORES: f"{SCORES} * -1"},
    "over_queries": {SOFTMAX: SOFTMAX.replace("dim=-1", "dim=-2")},
    "output_halved": {OUTPUT: f"{OUTPUT} * 0.5"},
    "output_shifted": {OUTPUT: f"{OUTPUT} + 0.5"},
    "values_scaled": {REPEATED: f"{REPEATED} * 3"},
    "weights_halved": {SOFTMAX: f"{SOFTMAX} * 0.5"},
    "weights_squared": {SOFTMAX: f"{SOFTMAX} ** 2"},
    "weights_returned_doubled": {RETURNED: f"{RETURNED} * 2"},
    "weights_returned_of_one_head": {RETURNED: f"{RETURNED}[:, :1]"},
    "output_alone": {RETURNED: "return attn_output"},
    "heads_joined": {"return attn_output": "return attn_output.reshape(*attn_output.shape[:2], -1)"},
    "mask_ignored": {GIVEN_MASK: "attn_weights"},
    "mask_inverted": {GIVEN_MASK: "attn_weights - attention_mask"},
    "mask_halved": {GIVEN_MASK: "attn_weights + attention_mask * 0.5"},
    "keys_rolled": {"repeat_kv(key,": "repeat_kv(torch.cat([key[:, :, 1:], key[:, :, :1]], 2),"},
    "heads_permuted": {"repeat_kv(key,": "repeat_kv(torch.cat([key[:, 1:], key[:, :1]], 1),"},
    "heads_permuted_after": {"attn_output, attn_weights": "attn_output[:, :, [1, 0, 2, 3]], attn_weights"},
    "groups_in_turn": {REPEATED: f"{REPEATED}; value_states = torch.cat([value, value], 1)"},
    "capped": {SCORES: f"50 * torch.tanh({SCORES} / 50)"},
    "cap_of_its_own": {OPTIONS: f"{OPTIONS} softcap=2.0,", SCORES: f"torch.tanh({SCORES} / softcap)"},
    "dropout_without_training": {"training=module.training": "training=True", "p=dropout": "p=0.5"},
}  # fmt: skip
NO_SHARES = (  # of the keys are what these return as weights
    "over_queries", "weights_halved", "weights_squared", "weights_returned_doubled",
    "dropout_without_training",
)  # fmt: skip
UNJUDGED: dict[str, tuple[dict[str, str], str]] = {  # what no run on small tensors shows
    "long_texts_only": ({SCORES: f"{SCORES} * (1 if key.shape[2] < 4096 else 2)"}, "the number 4096"),
    "the_last_keys_alone": (
        {SCORES: f"{SCORES}[..., -90:]"},
        "the number -90",
    ),
    "by_a_share_of_the_length": ({SCORES: f"{SCORES} * max(1.0, key.shape[2] * 0.01)"}, "the number 0.01"),
    "by_a_default_length": ({OPTIONS: f"{OPTIONS} longest=512,"}, "the number 512"),
    "an_attribute": ({SCORES: f"{SCORES} / getattr(module, 'temperature', 1.0)"}, "temperature"),
    "a_list": ({OPTIONS: f"{OPTIONS} factors=[1.0],", SCORES: f"{SCORES} * factors[0]"}, "factors=list"),
    "a_global": ({SCORES: f"{SCORES} * TEMPERATURE"}, "TEMPERATURE"),
    "beyond_a_size": ({SCORES: f"{SCORES} * (2 if key.shape[2] > query.shape[-1] else 1)"}, "a comparison"),
    "in_one_dtype": ({SCORES: f"{SCORES} * (2 if query.dtype == torch.float32 else 1)"}, "a comparison"),
    "on_one_device": ({SCORES: f"{SCORES} * (2 if query.device.type == 'cuda' else 1)"}, "a comparison"),
    "half_precision": ({"torch.float32": "torch.bfloat16"}, "bfloat16"),
}
EQUAL: dict[str, dict[str, str]] = {
    "copied": {},
    "renamed": {"eager_attention_forward": "my_attention", "attn_weights": "probabilities"},
    "softmax_in_float64": {"torch.float32": "torch.float64"},
    "softmax_in_its_own_dtype": {", dtype=torch.float32": ""},
    "scaled_before": {SCORES: "torch.matmul(query * scaling, key_states.transpose(2, 3))"},
    "repeated_by_expanding": {
        REPEATED: "value_states = value[:, :, None].expand(-1, -1, module.num_key_value_groups, -1, -1)"
        ".reshape(value.shape[0], -1, *value.shape[2:])"
    },
    "repeated_by_torch": {REPEATED: "value_states = value.repeat_interleave(module.num_key_value_groups, 1)"},
    "an_option_of_no_use": {OPTIONS: f"{OPTIONS} temperature=1.0,", SCORES: f"{SCORES} / temperature"},
    "with_a_soft_cap": {
        OPTIONS: f"{OPTIONS} softcap=1.0,",
        SCORES: f"softcap * torch.tanh({SCORES} / softcap)",
    },
}


def edited(edits: dict[str, str]) -> str:
    """The source of Llama's eager attention with parts replaced."""
    from transformers.models.llama import modeling_llama

    source = inspect.getsource(modeling_llama.eager_attention_forward)
    for part, other in edits.items():
        assert part in source
        source = source.replace(part, other)
    return source


def made(source: str, **names: Any) -> Any:
    """The function that some source defines, in a file of its own."""
    from transformers.models.llama import modeling_llama

    expected = {"torch": torch, "nn": nn, "__name__": "somewhere"}
    for name in ("repeat_kv", "Unpack", "TransformersKwargs"):
        expected[name] = getattr(modeling_llama, name)
    space = expected | names
    before = set(space)
    exec(textwrap.dedent(source), space)
    return next(space[name] for name in space if name not in before and name != "__builtins__")


def assert_heard(model: nn.Module, side: str = "left") -> None:
    """The model answers as it does unwatched, with or without fallback, and the maps are its own weights."""
    expected = run(model, text(side), output_attentions=True)
    real = text(side).get("attention_mask", torch.ones(2, LENGTH)).bool()
    for fallback in (None, "eager"):
        listener = Heard()
        with attach(model, listener, fallback):
            actual = run(model, text(side)).last_hidden_state
        assert error(actual[real], expected.last_hidden_state[real]) < EXACT and len(listener.calls) == 2
        for call, weights in zip(listener.calls, expected.attentions, strict=True):
            assert float((call.weights.dense() - weights).abs().amax((1, 3))[real].max()) < EXACT


@pytest.mark.parametrize("name", OTHERWISE)
def test_an_edited_copy_of_a_known_function_is_refused_by_name(dispatch: Any, name: str) -> None:
    """It was watched as if it were the original: other logits, other weights, without a word."""
    model = dispatch(made(edited(OTHERWISE[name])), name)
    assert_refused(model, r"layers\.0\.self_attn.*somewhere\.eager_attention_forward returns", "left")


@pytest.mark.parametrize("name", OTHERWISE)
def test_the_weights_of_an_edited_copy_are_read_or_refused(dispatch: Any, name: str) -> None:
    """With fallback="eager" its own softmax is read and its own output kept; other weights are refused."""
    model, listener = dispatch(made(edited(OTHERWISE[name])), name), Heard()
    if name in NO_SHARES:
        wrong = r"weights of layers\.0\.self_attn must sum to 1 .*\.eager_attention_forward returns sum to"
        with pytest.raises(AttentionBypassed, match=wrong), attach(model, listener, "eager"):
            run(model, text("left"))
        return
    if name == "output_alone":  # with which no model of transformers can go on
        return
    if name == "weights_returned_of_one_head":
        with pytest.raises(AttentionBypassed, match="no weights"), attach(model, listener, "eager"):
            run(model, text("left"))
        return
    expected = run(model, text("left"), output_attentions=True)
    with attach(model, listener, "eager"):
        actual = run(model, text("left")).last_hidden_state
    assert torch.equal(actual, expected.last_hidden_state) and len(listener.calls) == 2
    for call, weights in zip(listener.calls, expected.attentions, strict=True):
        assert torch.equal(call.weights.dense(), weights)


@pytest.mark.parametrize("name", UNJUDGED)
def test_what_a_run_on_small_tensors_cannot_show_is_refused_by_name(dispatch: Any, name: str) -> None:
    """A function may change from some length on, or with a value that is not an argument."""
    edits, named = UNJUDGED[name]
    model = dispatch(made(edited(edits), TEMPERATURE=1.0), name)
    assert_refused(model, f"eager_attention_forward uses .*{named}", "none")


def test_a_function_that_writes_to_its_inputs_is_refused(dispatch: Any) -> None:
    """What it writes reaches the model's cache; what headwise computes in its place does not."""
    model = dispatch(made(edited({REPEATED: f"{REPEATED}; value *= 0.5"})), "written")
    assert_refused(model, "it writes to its value in place", "none")


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", EQUAL)
def test_a_copy_that_computes_the_same_is_heard(dispatch: Any, name: str, side: str) -> None:
    assert_heard(dispatch(made(edited(EQUAL[name])), name), side)


FUSED = """
def fused(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=None, **kwargs):
    causal = attention_mask is None and query.shape[2] > 1{more}
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attention_mask, dropout_p=dropout, scale=scaling, is_causal=causal, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None
"""


@pytest.mark.parametrize("masks", ["eager_mask", "sdpa_mask"])
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("more", ["", " and False"])
def test_a_function_around_torchs_fused_one_is_heard(dispatch: Any, more: str, side: str, masks: str) -> None:
    """With masks that are added or that hide; without a mask it may be causal or see everything."""
    model, eager = dispatch(made(FUSED.format(more=more)), "fused", masks), LLAMA.build(DOUBLE, "eager")
    expected, listener = run(model, text(side)).last_hidden_state, Heard()
    with attach(model, listener):
        actual = run(model, text(side)).last_hidden_state
    rows = text(side).get("attention_mask", torch.ones(2, LENGTH)).bool()
    assert error(actual[rows], expected[rows]) < EXACT and len(listener.calls) == 2
    sees_everything = bool(more) and side == "none" and masks == "sdpa_mask"
    for call, weights in zip(
        listener.calls, run(eager, text(side), output_attentions=True).attentions, strict=True
    ):
        assert bool((call.weights.dense() > 0).all()) == sees_everything
        if not sees_everything:
            distance = (call.weights.dense() - weights).abs().amax((1, 3))
            assert float(distance[rows].max()) < EXACT


@pytest.mark.parametrize("dropped", [0.0, 0.25])
def test_dropout_is_part_of_what_is_compared(dispatch: Any, dropped: float) -> None:
    """A function that leaves dropout out is as good as the original unless the model trains with it."""
    model = dispatch(made(edited({DROPS: "attn_weights"})), "undropped")
    for layer in model.layers:
        layer.self_attn.attention_dropout = dropped
    model.train()
    if dropped:
        assert_refused(model, r"dropout=1\.0", "none")
        model.eval()
    with attach(model, Heard()):
        run(model, text("none"))


def test_a_dropping_copy_is_heard_in_training(dispatch: Any) -> None:
    model = dispatch(made(edited({})), "dropping")
    for layer in model.layers:
        layer.self_attn.attention_dropout = 0.25
    with attach(model.train(), Heard()) as attachment:
        run(model, text("none"))
    assert attachment.forward.number == 1


def test_sinks_are_compared_whatever_they_are_now(dispatch: Any) -> None:
    """Doubled sinks of 0 are 0: the function is right until they have learned something."""
    from transformers.models.gpt_oss import modeling_gpt_oss

    source = inspect.getsource(modeling_gpt_oss.eager_attention_forward)
    for part, is_heard in (("module.sinks", True), ("(module.sinks * 2)", False)):
        function = made(source.replace("module.sinks", part), F=nn.functional)
        dispatch(function, "with_sinks")
        model = next(family for family in FAMILIES if family.name == "gpt-oss").build(DOUBLE, "with_sinks")
        for layer in model.layers:  # type: ignore[union-attr]
            nn.init.zeros_(layer.self_attn.sinks)  # type: ignore[union-attr, arg-type]
        assert refuses(model) is not is_heard


def test_a_bias_by_position_is_compared(dispatch: Any) -> None:
    from transformers.models.t5 import modeling_t5

    source = inspect.getsource(modeling_t5.eager_attention_forward)
    t5 = next(family for family in FAMILIES if family.name == "t5")
    for other, is_heard in (("+ position_bias", True), ("- position_bias", False)):
        dispatch(made(source.replace("+ position_bias", other)), "with_bias")
        model = t5.build(DOUBLE, "with_bias")
        listener = Heard()
        if is_heard:
            expected = run(model, t5.feed("none")).last_hidden_state
            with attach(model, listener):
                assert error(run(model, t5.feed("none")).last_hidden_state, expected) < EXACT
            continue
        with pytest.raises(AttentionBypassed, match="returns output up to"), attach(model, listener):
            run(model, t5.feed("none"))


# A proof is of the function as it is now


def refuses(model: nn.Module) -> bool:
    try:
        with attach(model, Heard()):
            run(model, text("left"))
    except AttentionBypassed as error:
        return "returns output up to" in str(error)
    return False


def test_a_function_that_is_changed_later_is_compared_again(dispatch: Any) -> None:
    """What was found of its code, defaults, or of a function that it calls, goes for those alone."""
    function = made(edited({OPTIONS: f"{OPTIONS} temperature=1.0,", SCORES: f"{SCORES} / temperature"}))
    model = dispatch(function, "changing")
    code, defaults = function.__code__, function.__defaults__
    repeat = function.__globals__["repeat_kv"]
    assert not refuses(model)
    function.__defaults__ = (0.0, 2.0)
    assert refuses(model)
    function.__defaults__ = defaults
    assert not refuses(model)
    function.__code__ = made(edited({SCORES: f"{SCORES} * 2"})).__code__
    assert refuses(model)
    function.__code__ = code
    function.__globals__["repeat_kv"] = made("def tiled(x, n): return torch.cat([x] * n, 1)")
    assert refuses(model)
    function.__globals__["repeat_kv"] = repeat
    assert not refuses(model)


def test_a_default_given_by_keyword_alone_is_compared_again(dispatch: Any) -> None:
    function = made(edited({OPTIONS: f"{OPTIONS} *, temperature=1.0,", SCORES: f"{SCORES} / temperature"}))
    model = dispatch(function, "by_keyword")
    assert not refuses(model)
    function.__kwdefaults__["temperature"] = 2.0
    assert refuses(model)


def test_each_layer_is_judged_by_its_own_attributes(dispatch: Any) -> None:
    """One layer is as the original, and the next, of the same class, is not."""
    model = dispatch(made(edited({SCORES: f"{SCORES} * (1 if module.is_causal else 2)"})), "by_layer")
    assert not refuses(model)
    model.layers[1].self_attn.is_causal = False
    assert_refused(model, r"layers\.1\.self_attn", "none")


def test_another_kind_of_call_is_compared_by_itself(dispatch: Any) -> None:
    """One that treats a single query in its own way is right for a text, and wrong for its next token."""
    model = dispatch(made(edited({SCORES: f"{SCORES} * (2 if query.shape[2] == 1 else 1)"})), "single")
    ids = text("none")["input_ids"]
    with torch.no_grad(), attach(model, Heard()):
        cache = model(input_ids=ids, use_cache=True).past_key_values
        with pytest.raises(AttentionBypassed, match="returns output up to"):
            model(input_ids=ids[:, :1], past_key_values=cache)


def test_transformers_function_with_another_helper_is_no_longer_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own sdpa function is answered without a run, for as long as it and what it calls are its own."""
    from transformers.integrations import sdpa_attention

    model = LLAMA.build(DOUBLE, "sdpa")
    with attach(model, Heard()):
        run(model, text("left"))
    with monkeypatch.context() as patch:
        patch.setattr(sdpa_attention, "repeat_kv", made("def tiled(x, n): return torch.cat([x] * n, 1)"))
        assert_refused(model, "sdpa_attention_forward uses", "left")
    with monkeypatch.context() as patch:
        patch.setattr(sdpa_attention.sdpa_attention_forward, "__defaults__", (0.0, 3.0, None, None, None))
        assert_refused(model, "sdpa_attention_forward uses", "left")
    with attach(model, Heard()):
        run(model, text("left"))


# What a run costs and leaves


class Softmaxes(TorchFunctionMode):
    """The sizes of every softmax by `nn.functional`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.softmax:
            self.sizes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_a_function_is_run_once_on_few_numbers(dispatch: Any) -> None:
    """One small softmax for all layers and forwards, however long; a step of generation has another."""
    model, ids = dispatch(made(edited({})), "counted"), torch.randint(3, 60, (1, 37))
    with torch.no_grad(), Softmaxes() as softmaxes, attach(model, Heard()):
        for _ in range(3):
            model(input_ids=ids)
        assert len(softmaxes.sizes) == 1 and max(softmaxes.sizes[0]) < 10
        cache = model(input_ids=ids, use_cache=True).past_key_values
        for _ in range(3):
            model(input_ids=ids[:, :1], past_key_values=cache)
        assert len(softmaxes.sizes) == 2 and softmaxes.sizes[1][2] == 1
        model(input_ids=ids[:, :29])
    assert len(softmaxes.sizes) == 2


def test_a_run_leaves_random_numbers_and_the_module_alone(dispatch: Any) -> None:
    model = dispatch(made(edited({DROPS: f"{DROPS}; module.head_dim = -1"})), "writing")
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.no_grad(), attach(model.train(), Heard()):
        model(**text("none"))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.layers[0].self_attn.head_dim == 8


def test_a_function_that_raises_on_small_tensors_is_refused_with_what_it_says(dispatch: Any) -> None:
    model = dispatch(made(edited({SCORES: "query.expand(3, 1, 4)"})), "raising")
    assert_refused(model, r"raises RuntimeError on small tensors.*expand", "none")


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        ("lower half", "is given attention_mask=str"),
        (torch.ones(1, 1, 1, LENGTH, LENGTH), "is given attention_mask=Tensor"),
        (torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.long), "returns output up to"),
    ],
)
def test_masks_of_other_kinds_are_refused_by_name(dispatch: Any, mask: Any, named: str) -> None:
    """What is no tensor of scores; a mask of integers is added, and an edit beside it is still noticed."""
    from transformers import AttentionMaskInterface

    model = dispatch(made(edited(OTHERWISE["scale_doubled"])), "masked")
    AttentionMaskInterface.register("masked", lambda **_: mask)
    assert_refused(model, named, "none")


def test_queries_of_other_dimensions_are_refused(dispatch: Any) -> None:
    model = dispatch(made(edited({})), "flat")
    layer, flat = model.layers[0].self_attn, torch.zeros(2, LENGTH, 8, dtype=DOUBLE)
    with attach(model, Heard()):
        function = sys.modules[type(layer).__module__].ALL_ATTENTION_FUNCTIONS["flat"]
        with pytest.raises(AttentionBypassed, match=r"is given query \[2, 11, 8\]"):
            function(layer, flat, flat, flat, None, scaling=1.0)


def test_a_function_without_named_arguments_is_refused(dispatch: Any) -> None:
    model = dispatch(made("def starred(*args, **kwargs): return torch.softmax(args[1], -1), None"), "starred")
    assert_refused(model, "starred uses arguments without names", "none")


# A model's own file


@pytest.fixture
def model_of_a_file(tmp_path: Path) -> Iterator[Callable[[dict[str, str]], nn.Module]]:
    """Builds Llama from a modeling file outside transformers, with edits, as remote code comes."""
    from transformers import LlamaConfig
    from transformers.models.llama import modeling_llama

    names: list[str] = []

    def build(edits: dict[str, str]) -> nn.Module:
        source = Path(inspect.getfile(modeling_llama)).read_text()
        source = source.replace("from ...", "from transformers.").replace(
            "from .", "from transformers.models.llama."
        )
        for part, other in edits.items():
            assert part in source
            source = source.replace(part, other)
        name = f"modeling_remote_{len(names)}"
        (tmp_path / f"{name}.py").write_text(source)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        names.append(name)
        spec.loader.exec_module(module)
        model = LLAMA.build(DOUBLE, "eager")
        remote: nn.Module = module.LlamaModel(LlamaConfig(**LLAMA.settings, attn_implementation="eager"))
        remote.to(DOUBLE).load_state_dict(model.state_dict())
        return remote.eval()

    yield build
    for name in names:
        del sys.modules[name]


def test_a_models_own_file_is_heard_if_it_computes_the_same(model_of_a_file: Any) -> None:
    assert_heard(model_of_a_file({}))
    assert_heard(model_of_a_file({SOFTMAX: "nn.functional.softmax(attn_weights, dim=-1)"}))


@pytest.mark.parametrize(
    "name", ["scale_doubled", "temperature", "negated", "over_queries", "output_halved", "mask_ignored"]
)
def test_an_edit_in_a_models_own_file_is_refused_by_name(model_of_a_file: Any, name: str) -> None:
    model, message = (
        model_of_a_file(OTHERWISE[name]),
        r"modeling_remote_0\.eager_attention_forward returns output",
    )
    with pytest.raises(AttentionBypassed, match=message), watch(model):
        run(model, text("left"))


def test_a_helper_edited_in_a_models_own_file_is_noticed(model_of_a_file: Any) -> None:
    """Groups of heads were taken in turn; the attention function itself is Llama's to the letter."""
    grouped = "hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep,"
    in_turn = "hidden_states[:, None, :, :, :].expand(batch, n_rep, num_key_value_heads,"
    model = model_of_a_file({grouped: in_turn})
    assert refuses(model)
