"""What is somebody else's while a model is watched: other threads, other models, compiled code, files."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw
from headwise.errors import ArgumentError
from headwise.listeners import adapters
from headwise.listeners.active import active

pytestmark = pytest.mark.usefixtures("_small_models_at_rest")

E, H, T = 6, 2, 5


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, T, E, generator=torch.Generator().manual_seed(0))


class Fused(nn.Module):
    """Attention by torch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.num_heads = nn.Linear(E, 3 * E), H

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Ours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = hw.MultiHeadAttention(E, H)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x)[0]


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(E, H, 7, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=E, hidden_size=8, intermediate_size=7, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=11,
    )  # fmt: skip
    return Logits(transformers.LlamaModel(config).eval())


class Logits(nn.Module):
    """Takes numbers like the others here, and makes tokens of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.argmax(-1)).last_hidden_state


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fused": lambda: nn.Sequential(Fused(), Fused()),
    "ours": lambda: nn.Sequential(Ours(), Ours()),
    "encoder": encoder,
    "llama": llama,
}
each_kind = pytest.mark.parametrize("kind", MODELS)


def as_it_is(model: nn.Module) -> list[Any]:
    return [
        (type(m), sorted(m.__dict__), list(m._forward_hooks), list(m._forward_pre_hooks))
        for m in model.modules()
    ]


# Threads


@each_kind
def test_threads_that_run_one_watched_model_each_have_a_forward_of_their_own(kind: str, x: Tensor) -> None:
    """What a forward has entered and told lay in one place for all: layers were counted as path#1 and path#2,
    and torch's functions were heard in one thread of three, AttentionBypassed in the others."""
    model, rounds, count = MODELS[kind]().eval(), 4, 3
    with hw.watch(model) as alone:
        model(x)
    barrier = threading.Barrier(count, timeout=20)

    def work(_: int) -> None:
        for _ in range(rounds):
            barrier.wait()
            with torch.no_grad():
                model(x)

    before = as_it_is(model)
    with hw.watch(model) as heads, ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))
    assert heads.paths == alone.paths
    for layer in heads.values():
        assert len(layer.calls) == rounds * count
        assert sorted(call.forward for call in layer.calls) == list(range(1, rounds * count + 1))
        torch.testing.assert_close(layer.statistics.entropy, alone[layer.path].statistics.entropy)
    assert as_it_is(model) == before and not active


def test_a_bypassed_layer_is_told_of_in_the_thread_where_it_ran(x: Tensor) -> None:
    """All threads wrote into one list of layers that were not heard, and the first to come back took all."""

    class SelfAttention(Fused):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.mT).softmax(-1) @ v

    model, barrier = nn.Sequential(SelfAttention()), threading.Barrier(2, timeout=20)

    def work(_: int) -> str:
        barrier.wait()
        try:
            model(x)
        except hw.errors.AttentionBypassed as error:
            return str(error)
        return "nothing"

    messages: list[str] = []

    def watched() -> None:
        with hw.watch(model), ThreadPoolExecutor(2) as pool:
            messages.extend(pool.map(work, range(2)))

    with pytest.raises(hw.errors.AttentionBypassed, match="Sequential ran 2 times without any"):
        watched()
    assert len(messages) == 2 and all("1 layer of SelfAttention (0)" in each for each in messages)


def test_one_that_refuses_a_forward_keeps_nobody_else_in_it(x: Tensor) -> None:
    class SelfAttention(Fused):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q @ k.mT).softmax(-1) @ v

    inner = nn.Sequential(SelfAttention())
    first, second, outer = hw.watch(inner, fallback="skip"), hw.watch(inner[0]), nn.Sequential(inner, Fused())
    third = hw.watch(outer, fallback="skip")
    for each in (first, second, third):
        each.start()
    try:
        for _ in range(2):
            with pytest.raises(hw.errors.AttentionBypassed, match="1 layer of SelfAttention"):
                outer(x)
            assert [attachment.run for attachment in active] == [None] * 3
    finally:
        for each in (first, third):
            each.stop()
        with pytest.raises(hw.errors.AttentionBypassed, match="ran 2 times without any"):
            second.stop()
    assert not active and third.heads.paths == []


def test_what_raises_on_the_way_into_a_module_leaves_nobody_in_it(x: Tensor) -> None:
    model = nn.Sequential(Fused(), Fused())
    with hw.watch(model) as heads:
        enter = active[0].hooks[model[1]].mode.enter

        def raising(*_: object) -> None:
            raise OverflowError

        active[0].hooks[model[1]].mode.enter = raising
        with pytest.raises(OverflowError):
            model(x)
        with pytest.raises(OverflowError):
            model[1](x)
        assert active[0].run is None
        active[0].hooks[model[1]].mode.enter = enter
        model(x)
    assert [len(layer.calls) for layer in heads.values()] == [1, 1]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_layer_that_is_given_a_nested_tensor_is_one_that_is_not_heard(x: Tensor) -> None:
    class SelfAttention(Fused):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.is_nested else super().forward(x)

    model = nn.Sequential(SelfAttention())
    nested = torch.nested.nested_tensor(list(x))
    with hw.watch(model, fallback="skip") as heads:
        model(nested)
        assert active[0].run is None
        model(x)
    assert len(heads[0].calls) == 1 and heads[0].calls[0].forward == 2


def test_a_replica_runs_with_its_own_weights_and_is_heard_as_its_original(x: Tensor) -> None:
    """`nn.DataParallel` copies a module's dict: the forward that was in it was bound to the original."""
    model = Ours().eval()
    with hw.watch(model) as heads:
        inside = model(x)
        replica = model._replicate_for_data_parallel()
        layer = model.attention._replicate_for_data_parallel()
        replica._modules["attention"] = layer
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            layer._modules[name] = copy.deepcopy(layer._modules[name])
        layer._modules["out_proj"].weight.data.mul_(2)
        layer._modules["out_proj"].bias.data.mul_(2)
        again = replica(x)
    torch.testing.assert_close(again, 2 * inside)
    assert heads.paths == ["attention"] and len(heads[0].calls) == 2
    assert layer(x)[0].shape == x.shape  # it goes on by itself


@each_kind
def test_an_unwatched_model_in_another_thread_is_untouched(kind: str, x: Tensor) -> None:
    watched, other = MODELS[kind]().eval(), MODELS[kind]().eval()
    expected, looks = other(x), as_it_is(other)

    @torch.no_grad()
    def elsewhere() -> Tensor:
        return other(x)

    with hw.watch(watched), ThreadPoolExecutor(1) as pool:
        watched(x)
        assert torch.equal(pool.submit(elsewhere).result(), expected) and as_it_is(other) == looks


def test_one_watch_begun_and_ended_in_many_threads_ends() -> None:
    model, x = Fused(), torch.randn(1, 3, E)
    watching = hw.watch(model, pooled=None, statistics="entropy")

    def work(_: int) -> None:
        for _ in range(10):
            with watching, torch.no_grad():
                model(x)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert not active and "forward" not in model.__dict__ and len(watching.heads[0].calls) == 30


@each_kind
def test_a_forward_in_another_thread_while_watching_begins_is_not_refused(
    kind: str, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It met a hook before anybody could tell its model of a call, which looked as if there had been none."""
    model = MODELS[kind]()
    expected, actual = model(x), []

    def meanwhile(_: object) -> None:
        with ThreadPoolExecutor(1) as pool, torch.no_grad():
            actual.append(pool.submit(torch.no_grad()(model), x).result(20))

    whole = adapters.CHANGES
    for done in range(len(whole) + 1):
        monkeypatch.setattr(adapters, "CHANGES", (*whole[:done], meanwhile, *whole[done:]))
        with hw.watch(model) as heads:
            model(x)
        assert heads
    assert len(actual) == len(whole) + 1
    for output in actual:
        torch.testing.assert_close(output, expected)


@each_kind
def test_a_forward_in_another_thread_that_outlasts_the_block_is_not_refused(kind: str, x: Tensor) -> None:
    model, inside, go_on = MODELS[kind](), threading.Event(), threading.Event()
    expected = model(x)

    def wait(*_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert go_on.wait(20)

    first = next(
        path for path, module in model.named_modules() if type(module) in (nn.Linear, nn.MultiheadAttention)
    )
    model.get_submodule(first).register_forward_pre_hook(wait)  # in the first layer of attention, or of it
    with ThreadPoolExecutor(1) as pool:
        with hw.watch(model):
            model(x)
            running = pool.submit(torch.no_grad()(model), x)
            assert inside.wait(20)
        go_on.set()
        torch.testing.assert_close(running.result(20), expected)
    assert not active


def test_a_forward_called_directly_is_a_forward_each_time(x: Tensor) -> None:
    """No hook is told of it, and the second was heard as a second visit in one forward: path#1."""
    layer = nn.MultiheadAttention(E, H, batch_first=True)
    with hw.watch(layer) as heads:
        layer.forward(x, x, x)
        layer.forward(x, x, x)
    assert heads.paths == [""] and [call.forward for call in heads[0].calls] == [1, 2]


# Other modules


def test_a_layer_in_the_place_and_at_the_address_of_another_is_looked_at_anew(x: Tensor) -> None:
    """Modules were known by id: a layer made where the last one had just died was taken for it, had no hooks,
    and the model could not be watched any more."""
    model = nn.Sequential(Fused(), nn.Linear(E, E))
    for _ in range(50):
        with hw.watch(model, statistics="entropy", pooled=None) as heads:
            model(x)
        assert len(heads) == 1
        model[0] = None  # type: ignore[assignment]
        model[0] = Fused()


def test_an_equal_id_is_not_the_same_config(x: Tensor) -> None:
    """A config that died can leave its address to the next, which was then never selected."""
    import transformers

    model = llama().model
    for number in range(20):
        with hw.watch(model, statistics="entropy", pooled=None) as heads:
            model(x.argmax(-1))
        assert len(heads) == 2, number
        made = transformers.LlamaConfig(**model.config.to_diff_dict())
        made._attn_implementation = "sdpa"
        for module in model.modules():
            if "config" in module.__dict__:
                module.config = made


class Calls(nn.Module):
    """A model that calls another, which is not part of it."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.own, self.other = Fused(), [other]

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + self.other[0](x)


@each_kind
def test_another_models_attention_is_no_layer_of_the_one_that_called_it(kind: str, x: Tensor) -> None:
    """With both watched, the caller had a layer '' for each layer of the other."""
    inner = MODELS[kind]().eval()
    if kind == "llama":
        inner = nn.Sequential(inner, nn.Linear(8, E))
    with hw.watch(inner) as alone:
        inner(x)
    outer = Calls(inner)
    with hw.watch(outer) as caller, hw.watch(inner) as called:
        outer(x)
    assert caller.paths == ["own"] and called.paths == alone.paths
    with hw.watch(inner) as called, hw.watch(outer) as caller:
        outer(x)
    assert caller.paths == ["own"] and called.paths == alone.paths


def test_a_model_that_only_calls_another_has_no_layers_and_says_nothing(x: Tensor) -> None:
    class Wrapper(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.other = [other]

        def forward(self, x: Tensor) -> Tensor:
            return self.other[0](x)

    inner = MODELS["fused"]()
    outer = Wrapper(inner)
    with hw.watch(outer) as caller, hw.watch(inner) as called:
        outer(x)
    assert not caller and called.paths == ["0", "1"]


def test_weights_another_model_computes_are_not_the_callers_either(x: Tensor) -> None:
    class SelfAttention(Fused):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)

    inner = nn.Sequential(SelfAttention())
    outer = Calls(inner)
    with hw.watch(outer) as caller, hw.watch(inner, fallback="eager") as called:
        outer(x)
    assert caller.paths == ["own"] and called.paths == ["0"]


# A watch that nobody has any more


def test_a_watch_that_was_dropped_ends_and_says_so(x: Tensor) -> None:
    """`hw.watch(model).start()` with nothing kept could not be ended by anybody, and never was."""
    model = nn.Sequential(Fused())
    before = as_it_is(model)
    watching = hw.watch(model)
    watching.start()
    model(x)
    with pytest.warns(
        RuntimeWarning, match="watching must be stopped: the watcher of Sequential was dropped"
    ):
        watching = None  # type: ignore[assignment]
    assert as_it_is(model) == before and not active


def test_a_dropped_watch_does_not_keep_its_model() -> None:
    model = nn.Sequential(Fused())
    reference = weakref.ref(model)
    watching = hw.watch(model)
    watching.start()
    with pytest.warns(RuntimeWarning, match="was dropped"):
        watching = None  # type: ignore[assignment]
    del model
    gc.collect()
    assert reference() is None and not active


def test_a_watch_that_was_kept_or_stopped_goes_without_a_word(x: Tensor) -> None:
    model = nn.Sequential(Fused())
    watching = hw.watch(model)
    heads = watching.start()
    gc.collect()
    model(x)
    watching.stop()
    del watching
    gc.collect()
    assert len(heads[0].calls) == 1 and not active


def test_what_is_dropped_while_another_begins_waits_its_turn() -> None:
    """Garbage is collected at any moment, also in the middle of a change that counts who needs what."""
    from headwise.listeners.module_overrides import changing

    model, message = nn.Sequential(Fused()), []
    watching = hw.watch(model)
    watching.start()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with changing:
            del watching
            gc.collect()
            message.append((len(active), len(warned)))
        message.append((len(active), len(warned)))
    assert message == [(1, 0), (0, 1)]


# Copies and files


@each_kind
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_made_inside_a_block_is_a_model_that_is_not_watched(kind: str, way: str, x: Tensor) -> None:
    """Hooks were functions inside functions, which no file can hold, and a copy took them along."""
    model = MODELS[kind]().eval()
    expected, looks = model(x), as_it_is(model)
    with hw.watch(model) as heads:
        inside = model(x)
        made = copied(model, way)
        assert as_it_is(made) == looks
        again = made(x)
        model(x)
        assert all(len(layer.calls) == 2 for layer in heads.values())
    assert torch.equal(again, expected) and torch.equal(made(x), expected)
    torch.testing.assert_close(inside, expected)
    assert as_it_is(model) == looks
    with hw.watch(made) as others:
        made(x)
    assert others.paths == heads.paths


def copied(model: nn.Module, way: str) -> Any:
    if way == "deepcopy":
        return copy.deepcopy(model)
    if way == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_what_was_there_before_is_in_the_copy() -> None:
    model, calls = nn.Sequential(Fused()), []

    class Own:
        def __call__(self, *_: Any) -> None:
            calls.append(1)

    model.register_forward_pre_hook(Own())
    model[0].forward = Doubled(model[0].qkv)
    x = torch.randn(1, 3, E)
    with hw.watch(model, fallback="skip"):
        made = copy.deepcopy(model)
        model(x)
    assert type(made[0].__dict__["forward"]) is Doubled and made[0].forward.layer is made[0].qkv
    made(x)
    assert len(calls) == 2 and len(made._forward_pre_hooks) == 1
    assert type(model[0].__dict__["forward"]) is Doubled


class Doubled:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)[..., :E]


def test_a_shallow_copy_is_not_watched_itself(x: Tensor) -> None:
    model = Fused()
    with hw.watch(model) as heads:
        made = copy.copy(model)
        made(x)
        assert not made._forward_pre_hooks and "forward" not in made.__dict__ and not heads
        model(x)
    assert len(heads[0].calls) == 1


def test_classes_that_copy_themselves_their_own_way(x: Tensor) -> None:
    """Taken along, the answer to what the original is made of would be the copy's answer, too."""

    class Stubborn(Fused):
        def __deepcopy__(self, memo: Any) -> Stubborn:
            made = type(self).__new__(type(self))
            memo[id(self)] = made
            made.__dict__ = copy.deepcopy(self.__dict__, memo)
            return made

    model = Stubborn()
    looks = as_it_is(model)
    with hw.watch(model) as heads:
        made = copy.deepcopy(model)
        assert as_it_is(made) == looks
        made(x)
        model(x)
    assert len(heads[0].calls) == 1 and as_it_is(model) == looks


@pytest.mark.slow
def test_a_file_saved_inside_a_block_needs_no_headwise(tmp_path: Path, x: Tensor) -> None:
    for kind in ("encoder", "llama"):
        model = MODELS[kind]().eval()
        model = model.model if kind == "llama" else model
        arguments = x.argmax(-1) if kind == "llama" else x
        expected = model(arguments)
        with hw.watch(model):
            torch.save((model, arguments, expected), tmp_path / kind)
    code = (
        "import sys; sys.modules['headwise'] = None\n"
        "import torch\n"
        "for kind in ('encoder', 'llama'):\n"
        "    model, given, expected = torch.load(sys.argv[1] + '/' + kind, weights_only=False)\n"
        "    with torch.no_grad(): found = model(given)\n"
        "    assert torch.equal(found[0], expected[0])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)


# Compiled code


class Counting:
    """A backend that counts what it compiled and what of it ran."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph.forward(*args)

        return run


@pytest.mark.slow
def test_watching_does_not_bring_in_the_compiler() -> None:
    """Setting the compiler's stance imported it: seconds, in the first block of every process."""
    code = (
        "import sys, torch, headwise as hw\n"
        "model = torch.nn.Sequential(hw.MultiHeadAttention(6, 2))\n"
        "model.__class__.forward = lambda self, x: self[0](x)[0]\n"
        "with torch.no_grad(), hw.watch(model): model(torch.randn(1, 3, 6))\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.fixture
def counting() -> Iterator[Counting]:
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def test_a_stance_set_inside_a_block_stays_and_other_compiled_code_goes_on(counting: Any, x: Tensor) -> None:
    """The process ran eagerly for as long as any model was watched, and the end of the block put back a
    stance that somebody else had set meanwhile."""
    from torch._dynamo import eval_frame

    other = torch.compile(nn.Linear(E, E), backend=counting)
    other(x)
    with hw.watch(MODELS["fused"]()) as heads:
        assert eval_frame._stance.stance == "default"
        other(x)
        other(x)
        stance = torch.compiler.set_stance("eager_on_recompile")
        stance.__enter__()
    assert eval_frame._stance.stance == "eager_on_recompile" and not heads
    stance.__exit__(None, None, None)
    assert (counting.compiled, counting.ran) == (1, 3)


@pytest.mark.thinned(keep=["forward-False", "module.compile-True", "wrapped parts-True"])
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("way", ["torch.compile", "module.compile", "parts", "wrapped parts", "forward"])
def test_a_compiled_model_runs_uncompiled_inside_and_compiled_again_after(
    way: str, fullgraph: bool, counting: Any, x: Tensor
) -> None:
    model: Any = nn.Sequential(Fused(), Ours())
    options: Any = {"backend": counting, "fullgraph": fullgraph and way != "forward"}
    expected = model(x)
    if way == "torch.compile":
        model = torch.compile(model, **options)
    elif way == "module.compile":
        model.compile(**options)
    elif way == "parts":
        for part in model:
            part.compile(**options)
    elif way == "wrapped parts":
        for number, part in enumerate(model):
            model[number] = torch.compile(part, **options)
    else:
        model.forward = torch.compile(model.forward, **options)
    model(x)
    looks, compiled, ran = as_it_is(model), counting.compiled, counting.ran
    assert compiled and ran
    for _ in range(2):
        with hw.watch(model) as heads:
            inside = model(x)
        assert len(heads) == 2 and [len(layer.calls) for layer in heads.values()] == [1, 1]
        torch.testing.assert_close(inside, expected)
    assert (counting.compiled, counting.ran) == (compiled, ran) and as_it_is(model) == looks
    torch.testing.assert_close(model(x), expected)
    assert (counting.compiled, counting.ran) == (compiled, 2 * ran)


@pytest.mark.slow
def test_a_compiled_function_that_calls_the_model_is_heard(counting: Any, x: Tensor) -> None:
    model = nn.Sequential(Fused(), Ours())

    def step(x: Tensor) -> Tensor:
        return model(x * 2) + 1

    expected, fast = step(x), torch.compile(step, backend=counting)
    fast(x)
    for _ in range(3):
        with hw.watch(model) as heads:
            inside = fast(x)
        assert heads.paths == ["0", "1.attention"] and all(len(head.calls) == 1 for head in heads.values())
        torch.testing.assert_close(inside, expected)
    count = counting.compiled
    for _ in range(12):  # more than a function is ever compiled anew
        with hw.watch(model) as heads:
            fast(x)
        assert len(heads) == 2
        torch.testing.assert_close(fast(x), expected)
    assert counting.compiled <= count + 2


def test_a_function_compiled_in_one_piece_that_calls_the_model_refuses(counting: Any, x: Tensor) -> None:
    """In one piece it cannot let the model run by itself; it must not run past those who listen."""
    model = nn.Sequential(Fused())
    fast = torch.compile(lambda x: model(x) + 1, backend=counting, fullgraph=True)
    fast(x)
    refuses = pytest.raises(torch._dynamo.exc.Unsupported, match="headwise listens to this model")
    with hw.watch(model, fallback="skip") as heads, refuses:
        fast(x)
    assert not heads
    ran = counting.ran
    fast(x)
    assert counting.ran == ran + 1


@pytest.mark.parametrize("fullgraph", [False, True])
def test_functions_compiled_inside_a_model(fullgraph: bool, counting: Any, x: Tensor) -> None:
    """Those without attention stay compiled; one that attends is heard, or in one piece refuses."""

    class Parts(Fused):
        def __init__(self) -> None:
            super().__init__()
            self.act = torch.compile(lambda x: x.sin() * 2, backend=counting, fullgraph=True)
            attend = lambda q, k, v: scaled_dot_product_attention(q, k, v) + 1  # noqa: E731
            self.attend = torch.compile(attend, backend=counting, fullgraph=fullgraph)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            return self.act(self.attend(q, k, v).transpose(1, 2).flatten(2))

    model = Parts()
    expected = model(x)
    if fullgraph:
        with hw.watch(model, fallback="skip"), pytest.raises(torch._dynamo.exc.Unsupported, match="headwise"):
            model(x)
    else:
        ran = counting.ran
        with hw.watch(model) as heads:
            inside = model(x)
        assert len(heads[0].calls) == 1 and counting.ran > ran
        torch.testing.assert_close(inside, expected)
    ran = counting.ran
    torch.testing.assert_close(model(x), expected)
    assert counting.ran == ran + 2


@pytest.mark.thinned(keep=["torch.compile", "function"])
@pytest.mark.parametrize("way", ["torch.compile", "module.compile", "function"])
def test_what_is_compiled_inside_a_block_is_heard(way: str, counting: Any, x: Tensor) -> None:
    model: Any = nn.Sequential(Fused(), Ours())
    expected, run = model(x), model
    with hw.watch(model) as heads:
        if way == "torch.compile":
            run = torch.compile(model, backend=counting)
        elif way == "module.compile":
            model.compile(backend=counting)
        else:
            run = torch.compile(lambda x: model(x), backend=counting)
        inside = run(x)
        assert heads.paths == ["0", "1.attention"] and all(len(head.calls) == 1 for head in heads.values())
    torch.testing.assert_close(inside, expected)
    torch.testing.assert_close(run(x), expected)


def test_the_forward_that_is_lent_is_called_as_the_models_own_is() -> None:
    """Transformers looks at the signature of a model's forward to see what it takes."""
    import inspect

    model = llama().model
    own = nn.Sequential(Fused())
    own[0].forward = lambda x, scale=1: x
    before = [inspect.signature(each.forward) for each in (model, own[0])]
    with hw.watch(model), hw.watch(own, fallback="skip"):
        assert [inspect.signature(each.forward) for each in (model, own[0])] == before


class Twice:
    """A forward that somebody puts round another, with a mark of its own; it can be copied and saved."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * self.inner(*args, **kwargs)


def wrap(module: Any, way: str) -> None:
    inner = module.forward
    if way == "object":
        module.forward = Twice(inner)
    elif way == "function":
        module.forward = lambda *args, **kwargs: 2 * inner(*args, **kwargs)
    else:  # as accelerate does it: a wrapper that looks like what it wraps, bound to the module

        @functools.wraps(inner.__func__ if hasattr(inner, "__func__") else inner)
        def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
            return 2 * inner.__func__(self, *args, **kwargs)

        module.forward = MethodType(doubled, module)


@pytest.mark.thinned
@pytest.mark.parametrize("way", ["object", "function", "bound"])
@pytest.mark.parametrize(("place", "times"), [("", 1), ("0", 2)])
@pytest.mark.parametrize("own", [False, True])
def test_a_forward_wrapped_inside_a_block_outlives_it(
    way: str, place: str, times: int, own: bool, x: Tensor
) -> None:
    """Accelerate, PEFT and profilers keep the forward they find and put theirs round it. What they found
    inside a block took their wrapper for the module's own forward once the block was over, and recursed; it
    is the forward that it stood in for, the class's or one put there before, in later blocks as well."""

    def made() -> Any:
        torch.manual_seed(2)
        model = nn.Sequential(Fused(), Ours())
        if own:
            wrap(model.get_submodule(place), way if way != "function" else "object")
        return model

    plain, model = made(), made()
    for _ in range(times):
        wrap(plain.get_submodule(place), way)
    expected, module = plain(x), model.get_submodule(place)
    first = dict(vars(module)).get("forward")
    with hw.watch(model) as heads:
        actual = module.forward
        for _ in range(times):
            wrap(module, way)
        torch.testing.assert_close(model(x), expected)
        assert heads.paths == ["0", "1.attention"]
    assert torch.equal(model(x), expected) and len(heads["0"].calls) == 1
    with hw.watch(model) as again:
        torch.testing.assert_close(model(x), expected)
    assert again.paths == heads.paths and len(again["0"].calls) == 1
    assert torch.equal(model(x), expected)

    twins = [copy.deepcopy(model), copy.deepcopy(plain)]
    if way == "object" and not own:
        twins += [pickle.loads(pickle.dumps(each)) for each in (model, plain)]
    for twin in twins:
        twin.load_state_dict({name: 3 * value for name, value in twin.state_dict().items()})
    for ours, theirs in zip(twins[::2], twins[1::2], strict=True):
        if own and way == "object":  # a copy would run what is behind it with the weights of the other
            with pytest.raises(ArgumentError, match="copy of a module whose Twice was wrapped there"):
                ours(x)
        else:
            assert torch.equal(ours(x), theirs(x))

    module.forward = actual  # unwrapped, as far as they know
    as_made = made()(x)
    assert torch.equal(model(x), as_made)
    with hw.watch(model) as last:
        torch.testing.assert_close(model(x), as_made)
    assert last.paths == heads.paths and torch.equal(model(x), as_made)
    assert vars(module).get("forward") == first  # and what had stayed in its dict is gone

    reference, attached = weakref.ref(model), len(active)
    del model, plain, module, actual, first, twins, twin, ours, theirs, heads, again, last
    gc.collect()
    assert reference() is None and not attached


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("mine", [False, True])
def test_what_an_encoder_leaves_at_padding_is_left_there(mine: bool, norm: bool, x: Tensor) -> None:
    """In evaluation torch's encoder goes on with the real tokens alone and puts 0 at padding, before its
    norm; that was up to 1.8 there inside a block."""
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(E, H, 7, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(E) if norm else None).eval()
    if norm:
        nn.init.normal_(model.norm.bias)
    if mine:
        whole = nn.Sequential(model)
        hw.adopt(whole)
        model = whole[0]
    padding = torch.arange(T) >= torch.tensor([[T], [3], [2]])
    for hidden in (padding, padding.flip(-1)):  # the second it does not pack, and leaves what comes
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                expected = model(x, src_key_padding_mask=hidden)
                with hw.watch(model) as heads:
                    actual = model(x, src_key_padding_mask=hidden)
            assert len(heads) == 2
            torch.testing.assert_close(actual, expected)
    with hw.watch(model), hw.watch(model.layers[0]):
        torch.testing.assert_close(model(x), model(x, src_key_padding_mask=padding & False))


@pytest.mark.parametrize("sizes", [(0, T), (3, 0)])
def test_a_model_that_is_given_nothing_has_missed_nothing(sizes: tuple[int, int]) -> None:
    """An empty batch, as a filtered one may be, was said to be a model without attention."""
    model = nn.Sequential(Fused())
    with hw.watch(model) as heads:
        model(torch.zeros(*sizes, E))
    assert not heads


# The class of a module, which belongs to its author


class Counted(Fused):
    """Its class counts calls, and it asks for its very class."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        shift = 1.0 if type(self) is Counted else 0.0
        return super(self.__class__, self).forward(x) + shift + type(self).calls


class Registry(type):
    """A metaclass that knows its classes by name, each once."""

    classes: ClassVar[dict[str, type]] = {}

    def __new__(cls, name: str, bases: tuple[type, ...], space: dict[str, Any]) -> Registry:
        assert name not in cls.classes, "a class is made once"
        cls.classes[name] = made = super().__new__(cls, name, bases, space)
        return made


class Registered(Fused, metaclass=Registry):
    """Of a class that must be made once."""


@pytest.mark.parametrize("kind", [nn.MultiheadAttention, hw.nn.MultiheadAttention])
def test_a_module_made_inside_a_block_of_anothers_class_is_a_module_of_its_own(kind: type) -> None:
    mha, x = kind(E, H, batch_first=True).eval(), torch.randn(1, T, E)
    with hw.watch(mha):
        mha(x, x, x)
        twin = type(mha)(E, H, batch_first=True).eval()
    assert type(twin) is kind
    expected = twin(x, x, x)[0]
    with hw.ablate(mha, [(0, None)]):
        mha(x, x, x)
        torch.testing.assert_close(twin(x, x, x)[0], expected)


def test_a_module_may_look_at_its_class_and_write_to_it(x: Tensor) -> None:
    Counted.calls = 0
    model = nn.Sequential(Counted(), Counted())
    expected, Counted.calls = model(x), 0
    with hw.watch(model):
        torch.testing.assert_close(model(x), expected)
        assert [type(layer) is Counted for layer in model] == [True, True]
    assert Counted.calls == 2 and not Counted.__subclasses__()


def test_a_class_that_must_be_made_once_is(x: Tensor) -> None:
    model = nn.Sequential(Registered())
    with hw.watch(model) as heads:
        model(x)
    assert len(heads) == 1 and Registry.classes == {"Registered": Registered}


def test_torch_fx_traces_a_model_that_is_watched() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(E, H, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    model, x = Around().eval(), torch.randn(2, T, E)
    with hw.watch(model):
        model(x)
        graph = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(graph(x), model(x))
