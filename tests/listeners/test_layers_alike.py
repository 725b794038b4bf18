"""Layers like one before them take its way, with the same numbers; and whatever differs does not."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
import small_models
from headwise.engines import first_pass
from headwise.heads import joint_measurement
from headwise.listeners.adapters import attended, huggingface
from headwise.listeners.capture import Tokens

Forward = Callable[[], object]


@pytest.fixture(params=["lse with the output", "lse later"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to an output: as on a CPU, and as on a GPU."""
    if request.param == "lse later":
        monkeypatch.setattr(attended, "LSE_LATER", ("cpu", "cuda"))
    return str(request.param)


@pytest.fixture
def alike(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers that went the way of one before them, by class name; and that were asked and did not."""
    calls: list[str] = []
    requests: list[tuple[object, nn.Module]] = []  # of which forward, and which layer
    answered = attended.repeat_call

    def counting(
        alike: Any, run: Any, function: Any, module: nn.Module, args: Any, arguments: Any
    ) -> Tensor | None:
        output = answered(alike, run, function, module, args, arguments)
        if requests and requests[-1] == (run, module):  # of one way it was told no, and there is another
            assert calls.pop() == "not"
        requests.append((run, module))
        calls.append("alike" if output is not None else "not")
        return output

    monkeypatch.setattr(huggingface, "repeat_call", counting)
    return calls


@contextmanager
def each_by_itself() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "remember_call", lambda *_: None)
        yield


def body(family: str, **settings: Any) -> Any:
    """A small model without what stands on top of it, in float32: in float64 no lse comes later."""
    return getattr(small_models, family)(**settings).base_model.float()


def watched(model: Any, run: Forward, **options: Any) -> tuple[Any, hw.Heads]:
    with hw.watch(model, **options) as heads:
        output = run()
    return output, heads


def assert_the_same(model: Any, run: Forward, **options: Any) -> hw.Heads:
    """The numbers, maps and outputs are those of layers that each go their own way."""
    output, heads = watched(model, run, **options)
    with each_by_itself():
        other, alone = watched(model, run, **options)
    first, second = (x.last_hidden_state if hasattr(x, "last_hidden_state") else x for x in (output, other))
    assert torch.equal(first, second)
    assert heads.paths == alone.paths
    for mine, theirs in zip(heads.values(), alone.values(), strict=True):
        assert len(mine.calls) == len(theirs.calls)
        for call, its in zip(mine.calls, theirs.calls, strict=True):
            assert (call.shape, call.kind, call.forward) == (its.shape, its.kind, its.forward)
            assert (call.marks is None) == (its.marks is None)
            if call.marks is not None:
                assert torch.equal(call.marks.ids, its.marks.ids)
            for name, value in its.rows.items():
                torch.testing.assert_close(call.rows[name], value, equal_nan=True, msg=name)
            for name, value in its.counts.items():
                assert torch.equal(call.counts[name], value)
            assert (call.map is None) == (its.map is None)
            if call.map is not None:
                torch.testing.assert_close(call.map.dense(), its.map.dense())
    return heads


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("padded", [False, True])
def test_all_layers_but_the_first_take_its_way(
    ways: str, alike: list[str], family: str, padded: bool
) -> None:
    model, ids = body(family), small_models.tokens()
    messages: dict[str, Any] = {}
    if padded:
        messages["attention_mask"] = torch.ones_like(ids)
        messages["attention_mask"][1, -3:] = 0
    watched(model, lambda: model(input_ids=ids, **messages))
    assert alike == ["alike"] * (model.config.num_hidden_layers - 1)
    heads = assert_the_same(model, lambda: model(input_ids=ids, **messages))
    assert len(heads) == model.config.num_hidden_layers


@torch.inference_mode()
def test_in_inference_mode_too(ways: str, alike: list[str]) -> None:
    model, ids = body("llama", num_hidden_layers=3), small_models.tokens()
    assert_the_same(model, lambda: model(input_ids=ids))
    assert alike.count("alike") == 2


@torch.no_grad()
def test_steps_of_generation(ways: str, alike: list[str]) -> None:
    model, ids = small_models.llama().float(), small_models.tokens(1)
    assert_the_same(model, lambda: model.generate(ids, max_new_tokens=4, do_sample=False))
    assert alike.count("alike") >= 4


@torch.no_grad()
def test_what_a_layer_is_told_for_itself_counts(ways: str, alike: list[str]) -> None:
    """Scales, causality and a mask of its own, set on one layer of three."""
    ids = small_models.tokens()

    def scale(layer: Any) -> None:
        layer.self_attn.scaling *= 2

    def causal(layer: Any) -> None:
        layer.self_attn.is_causal = False

    def train(layer: Any) -> None:
        layer.self_attn.training = True
        layer.self_attn.attention_dropout = 0.0

    for change in (scale, causal, train):
        model = body("llama", num_hidden_layers=3)
        change(model.layers[1])
        alike.clear()
        assert_the_same(model, lambda: model(input_ids=ids))  # noqa: B023, called at once
        assert alike[:2] == ["not", "alike"]


@torch.no_grad()
def test_gradients_are_not_for_this_lane(alike: list[str]) -> None:
    model, ids = body("llama", num_hidden_layers=3), small_models.tokens()
    with torch.enable_grad():
        output, heads = watched(model, lambda: model(input_ids=ids))
        output.last_hidden_state.sum().backward()
    assert "alike" not in alike and len(heads) == 3
    assert model.layers[0].self_attn.q_proj.weight.grad is not None


@torch.no_grad()
def test_autocast_around_one_layer(alike: list[str]) -> None:
    model, ids = body("llama", num_hidden_layers=3), small_models.tokens()
    own = model.layers[1].forward

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return own(*args, **kwargs)

    model.layers[1].forward = cast
    assert_the_same(model, lambda: model(input_ids=ids))
    assert alike[:2] == ["not", "alike"]


@torch.no_grad()
def test_two_towers_of_one_size_read_two_texts(ways: str, alike: list[str]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (body("llama", num_hidden_layers=2) for _ in "ab")

        def forward(self, ids: Tensor, other: Tensor) -> Tensor:
            first: Tensor = self.first(input_ids=ids).last_hidden_state
            return first + self.second(input_ids=other).last_hidden_state

    model, ids, other = Two(), small_models.tokens(), small_models.tokens(seed=1)
    heads = assert_the_same(model, lambda: model(ids, other))
    by_path = {layer.path: layer.calls[0].marks.ids for layer in heads.values()}
    for path, read in by_path.items():
        assert torch.equal(read, ids if path.startswith("first.") else other), path


@torch.no_grad()
def test_a_look_in_the_middle_of_a_forward(ways: str) -> None:
    """What was noted is measured at once; the layers after it begin anew, and none is lost."""
    model, ids = body("llama", num_hidden_layers=5), small_models.tokens()
    calls: list[int] = []
    with hw.watch(model) as heads:
        hook = model.layers[2].register_forward_hook(lambda *_: calls.append(len(heads)))
        model(input_ids=ids)
        hook.remove()
    assert calls == [3] and len(heads) == 5
    with each_by_itself():
        _, alone = watched(model, lambda: model(input_ids=ids))
    for mine, theirs in zip(heads.values(), alone.values(), strict=True):
        torch.testing.assert_close(mine.statistics.entropy, theirs.statistics.entropy)


@torch.no_grad()
def test_somebody_else_begins_to_listen_in_the_middle(ways: str, alike: list[str]) -> None:
    model, ids = body("llama", num_hidden_layers=5), small_models.tokens()
    second = hw.watch(model)

    def begin(*_: object) -> None:
        second.start()

    with hw.watch(model) as heads:
        hook = model.layers[2].register_forward_pre_hook(begin)
        model(input_ids=ids)
        hook.remove()
    others = second.stop()
    assert len(heads) == 5 and len(others) == 3
    for layer in (2, 3, 4):
        torch.testing.assert_close(heads[layer].statistics.entropy, others[layer].statistics.entropy)


@torch.no_grad()
def test_a_layer_that_runs_twice_has_two_visits(ways: str) -> None:
    model, ids = body("llama", num_hidden_layers=3), small_models.tokens()
    model.layers[2] = model.layers[1]
    heads = assert_the_same(model, lambda: model(input_ids=ids))
    assert [path for path in heads.paths if "#" in path] == ["layers.1.self_attn#1"]


@torch.no_grad()
def test_threads_note_their_own_calls(ways: str) -> None:
    model = body("llama", num_hidden_layers=4)
    texts = [small_models.tokens(seed=seed) for seed in range(6)]
    with each_by_itself():
        alone = [watched(model, lambda: model(input_ids=text))[1] for text in texts]  # noqa: B023
    with hw.watch(model) as heads:
        threads = [threading.Thread(target=lambda text=text: model(input_ids=text)) for text in texts]
        with torch.no_grad():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    for layer in range(4):
        calls = heads[layer].calls
        assert len(calls) == len(texts)
        for text, expected in zip(texts, alone, strict=True):
            mine = [call for call in calls if torch.equal(call.marks.ids, text)]
            assert len(mine) == 1
            for name, value in expected[layer].calls[0].rows.items():
                torch.testing.assert_close(mine[0].rows[name], value, equal_nan=True)


@torch.no_grad()
def test_q_and_k_may_be_written_to_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lse comes later, the numbers and the kept map are of copies."""
    monkeypatch.setattr(attended, "LSE_LATER", ("cpu", "cuda"))
    model, ids = body("llama", num_hidden_layers=3), small_models.tokens()
    expected = watched(model, lambda: model(input_ids=ids))[1]
    answered = attended.repeat_call

    def spoiling(
        alike: Any, run: Any, function: Any, module: nn.Module, args: Any, arguments: Any
    ) -> Tensor | None:
        output = answered(alike, run, function, module, args, arguments)
        if output is not None:
            args[0].data.zero_()
            args[1].data.zero_()
        return output

    monkeypatch.setattr(huggingface, "repeat_call", spoiling)
    heads = watched(model, lambda: model(input_ids=ids))[1]
    for mine, theirs in zip(heads.values(), expected.values(), strict=True):
        assert torch.equal(mine.statistics.entropy, theirs.statistics.entropy)
        assert torch.equal(mine.map.dense(), theirs.map.dense())


# What hostile eyes found


class _OneIsNotCausal:
    """Says of itself that it is not causal, in one layer of four, where only asking finds it."""

    def __getattr__(self, name: str) -> Any:
        if name == "is_causal" and self.__dict__["layer_idx"] == 2:
            return False
        return super().__getattr__(name)  # type: ignore[misc]


class _Constant:
    """Its mode of training is no attribute."""

    training = property(lambda _: False, lambda *_: None)


class _PerLayer:
    """Every other layer is causal, by a descriptor of its class."""

    def __get__(self, subject: Any, kind: Any = None) -> object:
        return self if subject is None else subject.layer_idx % 2 == 0

    def __set__(self, subject: object, value: object) -> None: ...


class _Described:
    is_causal = _PerLayer()


@pytest.mark.parametrize("kind", [_OneIsNotCausal, _Constant, _Described])
def test_what_a_layer_says_of_itself_is_asked_for_wherever_it_is(ways: str, kind: type) -> None:
    model, ids = body("llama", num_hidden_layers=4), small_models.tokens()
    for layer in model.layers:
        attention = layer.self_attn
        attention.__class__ = type("Attention", (kind, type(attention)), {})
        attention.__dict__.pop("training" if kind is _Constant else "is_causal")
    with torch.no_grad():
        expected = model(input_ids=ids).last_hidden_state
        with hw.watch(model):
            actual = model(input_ids=ids).last_hidden_state
        assert_the_same(model, lambda: model(input_ids=ids))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("written_to", [False, True])
def test_a_call_is_answered_as_one_of_its_own_kind(
    mode: Any, written_to: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of a part of a fused projection lies in memory otherwise: another plan is for it."""
    requested = first_pass.compute
    kinds: list[bool] = []

    def checking(scores: Any, v: Tensor, collect: tuple[str, ...] = (), key: Any = None) -> Any:
        kinds.append(key is None or key == first_pass.plan_key_of_scores(scores, v, collect))
        return requested(scores, v, collect, key)

    monkeypatch.setattr(first_pass, "compute", checking)
    model, ids = body("gpt2"), small_models.tokens()
    padding = torch.ones_like(ids)
    padding[1, -3:] = 0

    def push(_: object, __: object, output: Tensor) -> Tensor:
        return output.add_(0.1) if written_to else output

    for layer in model.h:
        layer.attn.c_attn.register_forward_hook(push)
    with mode():
        for _ in range(3):
            assert_the_same(model, lambda: model(input_ids=ids, attention_mask=padding, use_cache=False))
    assert kinds and all(kinds)


def test_one_layer_in_inference_mode_and_the_next_not(ways: str) -> None:
    model, ids = body("llama", num_hidden_layers=3), small_models.tokens()
    own = model.layers[0].forward

    def inferred(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode():
            return own(*args, **kwargs)

    model.layers[0].forward = inferred
    with torch.no_grad():
        assert len(assert_the_same(model, lambda: model(input_ids=ids))) == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_special_ids_are_told_in_few_bits(dtype: torch.dtype) -> None:
    tokens = Tokens(nn.Identity())
    tokens.special = [0, 256, 257]
    ids = torch.tensor([[0, 1, 2, 80]], dtype=dtype)
    assert tokens._is_special(ids).tolist() == [[True, False, False, False]]


@torch.no_grad()
def test_a_scale_in_a_tensor_may_be_another_in_the_next_layer(ways: str) -> None:
    model, ids = body("llama", num_hidden_layers=3), small_models.tokens()
    shared = torch.tensor(0.25)

    def louder(*_: object) -> None:
        shared.mul_(2)

    for layer in model.layers:
        layer.self_attn.scaling = shared
        layer.register_forward_hook(louder)

    def run() -> object:
        shared.fill_(0.25)
        return model(input_ids=ids)

    assert_the_same(model, run)


@torch.no_grad()
def test_nothing_of_a_forward_is_kept_by_a_block_that_is_over(ways: str) -> None:
    model, ids = body("llama", num_hidden_layers=3), small_models.tokens()
    block = hw.watch(model, keep=False)
    groups: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        noting = joint_measurement.Group.__init__

        def noting_init(self: Any, *args: Any) -> None:
            noting(self, *args)
            groups.append(weakref.ref(self.q))

        patch.setattr(joint_measurement.Group, "__init__", noting_init)
        with block:
            model(input_ids=ids)
    gc.collect()
    assert groups and all(group() is None for group in groups)
