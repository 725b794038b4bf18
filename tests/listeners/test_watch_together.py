"""The short calls of a forward are measured together: the numbers are those of each call by itself."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
import model_families
import small_models
from headwise.heads import joint_measurement
from heard import Reused, assert_same, both, one_by_one
from model_families import FAMILIES, Family

SOME = ("llama", "gpt2", "bert", "gemma2", "gemma3 text", "gpt-oss", "mistral", "llama4 text", "bart", "t5",
        "deepseek v3", "albert", "falcon with alibi", "modernbert", "whisper", "vit")  # fmt: skip


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many calls were measured together, time after time."""
    calls: list[int] = []
    measured = joint_measurement._some_measured

    def counting(group: joint_measurement.Group, notes: slice) -> joint_measurement.MeasuredCalls:
        calls.append(len(group.notes[notes]))
        return measured(group, notes)

    monkeypatch.setattr(joint_measurement, "_some_measured", counting)
    return calls


# The same numbers


@pytest.mark.thinned(
    4, keep=["llama-none", "gpt2-left", "bert-right", "gemma2-left", "gpt-oss-none", "bart-right"]
)
@pytest.mark.parametrize("side", model_families.SIDES)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.name in SOME], ids=repr)
@torch.no_grad()
def test_layers_measured_together_are_as_measured_alone(family: Family, side: str) -> None:
    if side not in family.sides:
        side = "none"
    model, arguments = family.build(torch.float64), family.feed(side, torch.float64)
    assert_same(*both(lambda: model(**arguments), model, statistics=("entropy", "next", "local", "received")))
    assert_same(*both(lambda: model(**arguments), model, pooled=5))
    assert_same(*both(lambda: model(**arguments), model, statistics=(), pooled=4, keep=False))


@torch.no_grad()
def test_padded_layers_are_one_map(sizes: list[int]) -> None:
    model, ids = small_models.bert(num_hidden_layers=5), small_models.tokens()
    real = torch.ones_like(ids)
    real[0, 4:] = 0
    with hw.watch(model) as heads:
        model(ids, attention_mask=real)
    assert sizes == [5]
    assert heads[0].calls[0].counts["entropy"][:, 0].tolist() == [4, 7, 7]


@torch.no_grad()
def test_windows_are_measured_apart_from_the_whole(sizes: list[int]) -> None:
    family = next(family for family in FAMILIES if family.name == "gemma2")
    model, arguments = family.build(), family.feed()
    with hw.watch(model) as heads:
        model(**arguments)
    assert sizes == [1, 1]
    assert heads[0].map.mask.left is not None and heads[1].map.mask.left is None


@torch.no_grad()
def test_as_many_wait_as_there_is_room_for(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small_models.llama(num_hidden_layers=5), small_models.tokens()
    with hw.watch(model) as heads:
        model(ids)
    q = heads[0].map.parts()[0].q  # type: ignore[union-attr]
    monkeypatch.setattr(joint_measurement, "ROOM_ON_CPU", 2 * q.nbytes)  # k has as many heads or fewer
    with hw.watch(model) as fewer:
        model(ids)
    assert sizes[0] == 5 and len(sizes) > 2 and sum(sizes[1:]) == 5
    assert_same(fewer, heads)


@torch.no_grad()
def test_a_budget_that_holds_each_picture_is_enough_for_all(sizes: list[int]) -> None:
    model, ids = small_models.llama(num_hidden_layers=5), small_models.tokens(length=23)
    B, H = 3, model.config.num_attention_heads
    with hw.budget.limit(2 * B * H * 23 * 23 * 8), hw.watch(model) as heads:
        model(ids)
    assert sizes == [5, 1, 1, 1, 1, 1] and heads[4].pooled.shape == (B, H, 23, 23)


@torch.no_grad()
def test_where_memory_is_short_each_is_measured_alone(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = small_models.llama(num_hidden_layers=3), small_models.tokens()

    joined_map = joint_measurement.Group.joined_map

    def no_room(group: joint_measurement.Group, notes: slice) -> hw.AttentionMap:
        if len(group.notes[notes]) > 1:
            raise torch.OutOfMemoryError("no room")
        return joined_map(group, notes)

    with one_by_one(), hw.watch(model) as alone:
        model(ids)
    monkeypatch.setattr(joint_measurement.Group, "joined_map", no_room)
    with hw.watch(model) as heads:
        model(ids)
    assert sizes == [3, 1, 1, 1]
    assert_same(heads, alone)


@torch.no_grad()
def test_steps_of_generation_are_measured_layers_together(sizes: list[int]) -> None:
    model, ids = small_models.llama(num_hidden_layers=3), small_models.tokens(2, 5)

    def run() -> None:
        model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)

    heads, alone = both(run, model)
    assert sizes == [3] * 6
    assert_same(heads, alone)


@torch.no_grad()
def test_a_static_cache_goes_on_filling_and_the_numbers_stay() -> None:
    model, ids = small_models.llama(num_hidden_layers=3), small_models.tokens(2, 5)

    def run() -> None:
        model.generate(
            ids, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0,
            cache_implementation="static", disable_compile=True,
        )  # fmt: skip

    assert_same(*both(run, model))


# Tensors that are written to


@torch.no_grad()
def test_q_and_k_may_be_written_to_as_soon_as_a_layer_has_run(sizes: list[int]) -> None:
    torch.manual_seed(0)
    model, x = Reused(4).eval(), torch.randn(3, 5, 8)
    heads, alone = both(lambda: model(x), model, keep=False)
    assert sizes == [4]
    assert_same(heads, alone)
    assert len({float(layer.entropy.sum()) for layer in heads.values()}) == 4


@torch.no_grad()
def test_a_map_that_was_kept_refuses_as_ever() -> None:
    torch.manual_seed(0)
    model = Reused(2).eval()
    with hw.watch(model) as heads:
        model(torch.randn(3, 5, 8))
    with pytest.raises(hw.errors.ArgumentError, match=r"q, k, mask and bias must not change"):
        heads[0].map.statistics("entropy")


def test_sinks_may_be_trained_on(sizes: list[int]) -> None:
    """What a head has of its own is copied, too: an optimizer writes to it before anybody looks."""
    family = next(family for family in FAMILIES if family.name == "gpt-oss")
    model, arguments = family.build(torch.float64), family.feed()
    with hw.watch(model) as heads:
        model(**arguments).last_hidden_state.sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    model = family.build(torch.float64)
    with one_by_one(), hw.watch(model) as alone:
        model(**arguments)
    assert_same(heads, alone)
    assert not heads[0].map.requires_grad


# Looking before the end


@torch.no_grad()
def test_a_forward_that_raises_counts_as_far_as_it_came() -> None:
    model, ids = small_models.llama(num_hidden_layers=4), small_models.tokens()

    def stop(*_: object) -> None:
        raise RuntimeError("enough")

    handle = model.model.layers[2].mlp.register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="enough"), hw.watch(model) as heads:
        model(ids)
    handle.remove()
    assert len(heads) == 3
    with hw.watch(model) as whole:
        model(ids)
    for layer in range(3):
        torch.testing.assert_close(heads[layer].entropy, whole[layer].entropy)


@torch.no_grad()
def test_heads_can_be_looked_at_at_any_time() -> None:
    model, ids = small_models.llama(num_hidden_layers=3), small_models.tokens()
    with hw.watch(model) as expected:
        model(ids)
    calls: list[tuple[int, Tensor]] = []
    with hw.watch(model) as heads:

        def look(*_: object) -> None:
            calls.append((len(heads), heads[1].entropy))

        handle = model.model.layers[1].mlp.register_forward_hook(look)
        model(ids)
        first = heads[0]
        assert len(first.calls) == 1 and len(heads[2].calls) == 1
        model(ids)
        assert len(first.calls) == 2  # which was taken out before that forward
        torch.testing.assert_close(first.entropy, expected[0].entropy)
        handle.remove()
    assert [layers for layers, _ in calls] == [2, 3]
    for _, entropy in calls:
        torch.testing.assert_close(entropy, expected[1].entropy)


@torch.no_grad()
def test_heads_can_be_copied_and_pickled_inside_the_block() -> None:
    model, ids = small_models.llama(), small_models.tokens()
    with hw.watch(model) as heads:
        model(ids)
        copies = copy.deepcopy(heads), pickle.loads(pickle.dumps(heads))
        layer = pickle.loads(pickle.dumps(heads[1]))
        model(ids)
    for copied in copies:
        assert [len(layer.calls) for layer in copied.values()] == [1, 1]
        torch.testing.assert_close(copied[1].entropy, heads[1].entropy)
    assert len(layer.calls) == 1 and len(heads[1].calls) == 2


@torch.no_grad()
def test_heads_go_without_waiting_for_the_garbage_collector() -> None:
    """They hold maps, and those q and k, perhaps on a GPU."""
    model = small_models.llama()
    with hw.watch(model) as heads:
        model(small_models.tokens())
    reference, q = weakref.ref(heads), weakref.ref(heads[0].map)
    gc.collect()
    gc.disable()
    try:
        del heads
        assert reference() is None and q() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_a_block_that_ends_inside_a_forward_has_what_was_heard() -> None:
    model, ids = small_models.llama(num_hidden_layers=3), small_models.tokens()
    watching = hw.watch(model)
    heads = watching.start()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: watching.stop() and None)
    model(ids)
    handle.remove()
    assert len(heads) == 2 and heads[1].entropy.isfinite().all()


# Several at once


def test_what_is_checkpointed_counts_once() -> None:
    model = small_models.torch_encoder().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    x = small_models.numbers(2, 5, model.layers[0].linear1.in_features).requires_grad_()

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            for layer in self.model.layers:
                x = checkpoint(layer, x, use_reentrant=False)  # type: ignore[assignment]
            return x

    outer = Checkpointed()
    heads, alone = both(lambda: outer(x).sum().backward(), outer)
    assert [len(layer.calls) for layer in heads.values()] == [1] * len(heads)
    assert_same(heads, alone)


def test_who_looks_from_another_thread_never_finds_a_group_without_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, ids = small_models.llama(), small_models.tokens()
    new, looks = joint_measurement._DeferredGroups.new, []

    def interrupted(self: Any, *args: Any) -> joint_measurement.Group:
        group = new(self, *args)
        looks.append(threading.Thread(target=lambda: len(heads)))
        looks[-1].start()
        looks[-1].join(0.1)  # it has to wait for the call that the group is made for
        return group

    monkeypatch.setattr(joint_measurement._DeferredGroups, "new", interrupted)
    with torch.no_grad(), hw.watch(model) as heads:
        model(ids)
        model(ids)
        for look in looks:
            look.join(10)
    assert looks and [len(layer.calls) for layer in heads.values()] == [2] * len(model.model.layers)
