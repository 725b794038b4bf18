"""Importance and robustness; the judges are gates, a sequence at a time, and models cut by hand."""

from __future__ import annotations

import copy
import functools
import io
import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headwise.errors import ArgumentError, ShapeError
from headwise.listeners.ablation import ablate
from headwise.listeners.active import LayerCall, Listener
from headwise.listeners.adapters import attach
from headwise.listeners.importance import Importance, Robustness, importance, robustness
from headwise.listeners.pruning import prune
from headwise.models.batches import tracked
from judge import error
from small_models import albert, bert, gpt2, hooks_on, llama, numbers, ours, tokens

EXACT = 1e-10  # of a float64 model
LLAMA = [f"model.layers.{layer}.self_attn" for layer in range(2)]


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over sequences."""
    return model(x).square().sum((1, 2)).mean()


def surprise(model: nn.Module, ids: Tensor) -> Tensor:
    """What Hugging Face computes as a language model's loss, in float64 where theirs goes down to float32."""
    logits = model(input_ids=ids).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Gates(Listener):
    """One factor for every head of every layer, which the loss is differentiated by."""

    def __init__(self) -> None:
        self.gates: dict[str, Tensor] = {}

    def hear(self, call: LayerCall) -> Tensor:
        assert call.output is not None
        path = call.path.partition("#")[0]
        gate = self.gates.setdefault(
            path, torch.ones(call.num_heads, dtype=torch.float64, requires_grad=True)
        )
        return call.output * gate[:, None, None]


def by_gates(
    model: nn.Module, inputs: list[Any], loss: Callable[[nn.Module, Any], Tensor]
) -> dict[str, Tensor]:
    """mean over sequences of |dL / dgate|, one sequence at a time."""
    total: dict[str, Tensor] = {}
    for batch in inputs:
        gates = Gates()
        with attach(model, gates):
            value = loss(model, batch)
        grads = torch.autograd.grad(value, list(gates.gates.values()))
        for path, grad in zip(gates.gates, grads, strict=True):
            total[path] = total.get(path, 0) + grad.abs() / len(inputs)
    return total


def agree(actual: Importance, truth: Importance | dict[str, Tensor]) -> None:
    assert actual.paths == (truth.paths if isinstance(truth, Importance) else list(truth))
    for layer, expected in truth.items():
        assert error(actual[layer], expected) < EXACT * expected.abs().max()


# Gradients


@pytest.mark.slow
def test_importance_is_the_gradient_of_a_gate_a_sequence_at_a_time() -> None:
    model = gpt2()
    ids = tokens(5)
    actual = importance(model, [ids[:2], ids[2:]], surprise, normalise=False)
    agree(actual, by_gates(model, list(ids.split(1)), surprise))
    assert actual.examples == 5


def test_a_language_model_predicts_its_own_input() -> None:
    model, ids = llama(), tokens()
    expected = importance(model, [ids], lambda m, x: m(input_ids=x, labels=x).loss)
    for batches in ([ids], ids, {"input_ids": ids}, [{"input_ids": ids}]):
        agree(importance(model, batches), expected)


def test_a_summed_loss_gives_the_same() -> None:
    model, x = ours(), numbers(5, 7, 13)
    mean = importance(model, [x], squares, normalise=False)
    summed = importance(model, [x], lambda m, b: squares(m, b) * len(b), reduction="sum", normalise=False)
    agree(mean, by_gates(model, list(x.split(1)), squares))
    agree(summed, mean)


def test_normalised_scores_of_a_layer_have_length_one() -> None:
    model, x = ours(), numbers(3, 7, 13)
    plain, scaled = (importance(model, [x], squares, normalise=each) for each in (False, None))
    for path in plain:
        assert error(scaled[path], plain[path] / plain[path].norm()) < EXACT
    assert importance(model, [x], squares, method="leave_one_out").normalised is False


def test_a_model_with_labels_and_padding_uses_its_own_loss() -> None:
    model = bert()
    labels = torch.tensor([0, 2, 1])
    batch = {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens()), "labels": labels}
    actual = importance(model, batch, normalise=False)
    ones = [{name: value[i : i + 1] for name, value in batch.items()} for i in range(3)]
    agree(actual, by_gates(model, ones, lambda m, x: m(**x).loss))


def test_padding_is_no_label_of_a_language_model() -> None:
    model = gpt2()
    batch = {"input_ids": tokens(1), "attention_mask": torch.ones_like(tokens(1))}
    batch["attention_mask"][:, -2:] = 0
    short = {"input_ids": tokens(1)[:, :-2]}
    agree(importance(model, [batch]), importance(model, [short]))


def test_nothing_about_the_parameters_changes_and_frozen_models_work() -> None:
    model, x = ours(), numbers(3, 7, 13)
    expected = importance(model, [x], squares)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            frozen = importance(model, [x], squares)
        agree(frozen, expected)
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    assert hooks_on(model) == 0


def test_gradients_already_there_stay() -> None:
    model, x = ours(), numbers(3, 7, 13)
    squares(model, x).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    importance(model, [x], squares)
    assert all(torch.equal(p.grad, before[name]) for name, p in model.named_parameters())


def test_a_shared_layer_has_one_score_a_head_for_all_visits() -> None:
    model, x = albert(), tokens()

    def loss(m: nn.Module, ids: Tensor) -> Tensor:
        return m(ids).last_hidden_state.square().sum((1, 2)).mean()

    actual = importance(model, [x], loss, normalise=False)
    assert len(actual) == 1
    agree(actual, by_gates(model, list(x.split(1)), loss))


def test_layers_that_are_checkpointed_are_counted_once() -> None:
    model = llama()
    expected = importance(model, [tokens()], normalise=False)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    assert model.model.gradient_checkpointing
    agree(importance(model, [tokens()], normalise=False), expected)


# Leaving out


def test_leaving_one_out_is_the_difference_of_the_losses() -> None:
    model = gpt2()
    batches = [tokens(2), tokens(3, 5, seed=2)]
    actual = importance(model, batches, surprise, method="leave_one_out")

    def loss(m: nn.Module) -> Tensor:
        with torch.no_grad():
            return sum(surprise(m, x) * len(x) for x in batches) / 5  # type: ignore[return-value]

    for layer in range(2):
        for head in range(3):
            cut = copy.deepcopy(model)
            with torch.no_grad():
                cut.transformer.h[layer].attn.c_proj.weight[head * 11 : (head + 1) * 11] = 0
            assert error(actual[layer][head], loss(cut) - loss(model)) < EXACT
    assert hooks_on(model) == 0


def test_a_head_that_says_nothing_has_no_importance() -> None:
    model, x = ours(), numbers(3, 7, 13)
    with torch.no_grad():
        model.layers[1].out_proj.weight.unflatten(1, (4, 7))[:, 2] = 0
    for method in ("gradient", "leave_one_out"):
        actual = importance(model, [x], squares, method=method)
        assert actual[1][2] == 0
        assert (1, 2) in actual.least(1, groups=False) or min(actual[1].tolist()) < 0


# The result


def scores(**layers: list[float]) -> Importance:
    paths = {f"h.{name[1:]}.attn": torch.tensor(each) for name, each in layers.items()}
    return Importance(paths, "gradient", True, 7, {path: int(path[2]) for path in paths})


def test_heads_are_ranked_and_named_by_layer_number() -> None:
    actual = scores(l0=[0.5, 0.1], l1=[0.9, 0.3])
    assert [(r.layer, r.head) for r in actual.ranking()] == [(1, 0), (0, 0), (1, 1), (0, 1)]
    assert actual.least(2) == [(0, 1), (1, 1)] and actual.most(1) == [(1, 0)]
    assert actual[1] is actual["h.1.attn"] and 1 in actual and 2 not in actual
    with pytest.raises(ArgumentError, match="got 5"):
        actual[5]


def test_importance_can_be_read() -> None:
    words = str(scores(l0=[0.5, 0.1], l1=[0.9, 0.3]))
    assert words.startswith(
        "Importance of 4 heads, from gradients, over 7 sequences, scores normalised per layer."
    )
    assert "layer 1        0.9        0.3" in words
    assert words.endswith("Most important: layer 1 head 0 (0.9), layer 0 head 0 (0.5), layer 1 head 1 (0.3)")
    assert repr(scores(l0=[0.5, 0.1], l1=[0.9, 0.3])) == words


def test_numbers_of_layers_are_the_models_whatever_ran_first() -> None:
    """-1 was the layer heard last: where a model runs its layers from the end, the first one."""
    model = ours()
    model.layers = nn.ModuleList(reversed(model.layers))
    x = numbers(2, 5, 13)

    def backwards(m: Any, x: Tensor) -> Tensor:
        return m.layers[0](m.layers[1](x)[0])[0].square().mean()

    actual = importance(model, [x], backwards)
    assert actual.paths == ["layers.1", "layers.0"] and list(actual) == [1, 0]
    assert actual[-1] is actual[1] is actual["layers.1"]
    partly = importance(model, [x], lambda m, x: m.layers[1](x)[0].square().mean())
    with pytest.raises(
        ArgumentError, match=r"layer must be one that ran: got 0 \(layers.0\), which did not run"
    ):
        partly[0]


@pytest.mark.parametrize("count", [-1, True, 1.5])
def test_a_count_of_heads_is_not_below_zero(count: Any) -> None:
    """least(-1) gave all heads but one, as a slice does."""
    actual = scores(l0=[0.5, 0.1])
    for requested in (actual.least, actual.most):
        with pytest.raises(ArgumentError, match=f"count must be .* at least 0: got {count!r}"):
            requested(count)
    assert actual.least(0) == actual.most(0) == []


@pytest.mark.parametrize("method", ["gradient", "leave_one_out"])
@pytest.mark.parametrize(("H", "Hk"), [(6, 3), (14, 2), (7, 1)])
def test_the_least_important_heads_can_be_pruned_where_they_share_keys(H: int, Hk: int, method: str) -> None:
    """`prune` refused them: "heads must leave groups of one size". In a layer of one group none can go."""
    model = llama(hidden_size=42, num_attention_heads=H, num_key_value_heads=Hk)
    actual = importance(model, [tokens(2, 5)], surprise, method=method, progress=False)
    G, total = H // Hk, 2 * H
    assert actual.num_kv_heads == dict.fromkeys(LLAMA, Hk)
    for count in range(total + 1):
        if count % G:
            below, above = count - count % G, count - count % G + G
            with pytest.raises(
                ArgumentError, match=rf"got {count}, but .* {G} query heads; use {below} or {above}"
            ):
                actual.least(count)
            continue
        chosen = actual.least(count)
        assert len(set(chosen)) == count
        cut = copy.deepcopy(model)
        if count > total - 2 * G:
            with pytest.raises(ArgumentError, match=rf"heads must leave one in every layer: all {H} of"):
                prune(cut, chosen)
            continue
        assert sum(map(len, prune(cut, chosen).heads.values())) == count
        with torch.no_grad(), ablate(model, chosen):
            assert error(surprise(cut, tokens()), surprise(model, tokens())) < EXACT
    assert actual.least(total + 5) == actual.least(total)


def test_groups_go_by_the_mean_of_their_heads_and_the_best_of_a_layer_last() -> None:
    paths = {f"h.{i}.attn": torch.tensor(each) for i, each in enumerate(([1.0, 9.0, 2.0, 4.0], [0.5, 0.6]))}
    actual = Importance(paths, "gradient", True, 7, {"h.0.attn": 0, "h.1.attn": 1}, {"h.0.attn": 2})
    assert actual.least(1) == [(1, 0)] and actual.least(3) == [(1, 0), (0, 2), (0, 3)]
    assert actual.least(2) == [(0, 2), (0, 3)]  # (1, 1) is all that its layer would have left
    assert actual.least(5) == [(1, 0), (0, 2), (0, 3), (0, 0), (0, 1)]
    assert actual.least(4) == [(1, 0), (0, 2), (0, 3), (1, 1)]
    assert actual.least(2, groups=False) == [(1, 0), (1, 1)]


def test_groups_of_different_sizes_come_to_what_they_can() -> None:
    paths = {f"h.{i}.attn": torch.arange(6.0) + i for i in range(2)}
    actual = Importance(paths, "gradient", True, 7, {path: int(path[2]) for path in paths},
                       {"h.0.attn": 3, "h.1.attn": 2})  # fmt: skip
    for count in range(13):
        if count in (1, 11):
            with pytest.raises(
                ArgumentError, match=f"has 2 or 3 query heads; use {count - 1} or {count + 1}"
            ):
                actual.least(count)
        else:
            assert len(set(actual.least(count))) == count


@pytest.mark.parametrize("method", ["gradient", "leave_one_out"])
def test_scores_that_are_no_numbers_are_refused(method: str) -> None:
    """They were ranked without a word, wherever the sort left them."""
    model, x = ours(), numbers(2, 5, 13)
    match = r"losses of all batches sum to nan, and in layer 0 the scores of heads 0, 1, 2, 3 are nan"
    with pytest.raises(ArgumentError, match=match):
        importance(model, [x, x * torch.nan], squares, method=method)


def test_a_loss_whose_gradient_is_no_number_is_told_apart() -> None:
    def rooted(m: Any, x: Tensor) -> Tensor:
        return (m(x).sum() * 0).abs().sqrt() + 2

    with pytest.raises(ArgumentError, match=r"sum to 2, and in layer 0 .* are nan"):
        importance(ours(), [numbers(2, 5, 13)], rooted)


def test_with_several_stacks_layers_go_by_their_paths() -> None:
    model = nn.ModuleDict({"a": ours(), "b": ours()})

    def loss(m: Any, x: Tensor) -> Tensor:
        return squares(m["a"], x) + squares(m["b"], x)

    actual = importance(model, [numbers(2, 5, 13)], loss)
    assert {ranked.layer for ranked in actual.ranking()} == {
        f"{x}.layers.{i}" for x in "ab" for i in range(2)
    }


# What is refused


def refused(kind: type[Exception], match: str, *args: Any, **options: Any) -> None:
    with pytest.raises(kind, match=match):
        importance(*args, **options)


def test_wrong_arguments_are_named() -> None:
    x = numbers(2, 5, 13)
    for match, batches, loss, options in (
        ("got 'gradients'; did you mean 'gradient'", [x], squares, {"method": "gradients"}),
        ("reduction must be 'mean' or 'sum': got 'max'", [x], squares, {"reduction": "max"}),
        ("batches must not be empty: got 0", [], squares, {}),
        ("batches must be an iterable of batches: got int", 5, squares, {}),
        ("one number as a tensor: got float", [x], lambda m, b: 1.5, {}),
        (r"one number as a tensor: got shape \[2, 5, 13\]", [x], lambda m, b: m(b), {}),
        ("none was found in Stack", [x], lambda m, b: b.sum().requires_grad_(), {}),
        ("none was found in Stack", [x], lambda m, b: b.sum(), {"method": "leave_one_out"}),
        ("loss_fn must keep the gradient: its loss", [x], lambda m, b: m(b).sum().detach(), {}),
    ):
        refused(ArgumentError, match, ours(), batches, loss, **options)


def test_a_loss_of_torchs_is_told_what_a_loss_is_called_with() -> None:
    model, x = ours(), numbers(2, 5, 13)
    for loss, name in (
        (nn.MSELoss(), "MSELoss"),
        (nn.MSELoss, "MSELoss"),
        (nn.functional.mse_loss, "mse_loss"),
        (functools.partial(nn.functional.mse_loss, reduction="sum"), "mse_loss"),
    ):
        for method in ("gradient", "leave_one_out"):
            refused(ArgumentError, f"got torch's {name}.*model, batch", model, [(x, x)], loss, method=method)
    mse = nn.MSELoss()
    importance(model, [(x, numbers(2, 5, 13))], lambda model, batch: mse(model(batch[0]), batch[1]))


@pytest.mark.parametrize("loss", [lambda output: output.sum(), lambda output, target: output - target, "mse"])
def test_a_loss_of_other_arguments_fails_with_a_note_of_what_it_is_given(loss: Any) -> None:
    with pytest.raises(TypeError) as failed:
        importance(ours(), [(numbers(2, 5, 13),) * 2], loss)
    assert failed.value.__notes__ == [
        "loss_fn is called with the model and a batch, loss_fn(model, batch): here Stack and tuple"
    ]


def test_attention_without_gradients_is_not_counted_as_unimportant() -> None:
    @torch.no_grad()
    def silent(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).sum()

    refused(ArgumentError, "layers.0 runs without", ours(), [numbers(2, 5, 13)], silent)


def test_a_loss_must_be_there() -> None:
    match = "must contain labels for BertForSequenceClassification: got input_ids"
    refused(ArgumentError, match, bert(), [{"input_ids": tokens()}])
    refused(ArgumentError, "must contain labels for Stack: got nothing", ours(), [{}])
    refused(ArgumentError, "mappings if loss_fn is None: got list", ours(), [[1]])

    class Mute(nn.Module):
        def forward(self, labels: Tensor) -> Tensor:
            return labels

    refused(ArgumentError, "Mute returned none", Mute(), [{"labels": tokens()}])


def test_a_layer_must_see_one_batch_size_in_a_loss() -> None:
    def uneven(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).sum() + m(x[:1]).sum()

    refused(ShapeError, "layers.0 got 3 and 1 sequences", ours(), [numbers(3, 5, 13)], uneven)


class Windows(nn.Module):
    """Windows of 5 are folded into the batch, as in Swin, or with the windows first."""

    def __init__(self, windows_first: bool = False) -> None:
        super().__init__()
        self.inner, self.windows_first = ours(), windows_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, 5))  # [B, windows, 5, E]
        x = x.transpose(0, 1) if self.windows_first else x
        return self.inner(x.flatten(0, 1)).unflatten(0, x.shape[:2]).sum((1, 2))[:, None]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("method", ["gradient", "leave_one_out"])
def test_windows_of_one_example_count_as_one(method: str, batch: int) -> None:
    """Each window was taken for a sequence: |a| + |b| where the gate of a head moves the loss by |a + b|."""
    model, x = Windows(), numbers(batch, 35, 13)
    actual = importance(model, [x], squares, method=method, normalise=False, progress=False)
    assert actual.examples == batch
    if method == "gradient":
        agree(actual, by_gates(model, list(x.split(1)), squares))
        summed = importance(
            model, [x], lambda m, b: len(b) * squares(m, b), reduction="sum", normalise=False, progress=False
        )
        agree(summed, by_gates(model, list(x.split(1)), squares))
    assert not hooks_on(model)


def test_windows_that_lie_apart_are_refused() -> None:
    """[windows * B, ..]: neighbours in the batch are of different examples, which is seen by following them
    back to the input."""
    match = "batch sizes are 21 in inner.layers.0, and in a batch of 3 rows depend on other rows"
    refused(ShapeError, match, Windows(windows_first=True), [numbers(3, 35, 13)], lambda m, x: m(x).sum())


def test_sequences_may_come_before_the_batch() -> None:
    """[T, B, E] with B a multiple of T is not B / T windows of T examples. The gradient tells them apart;
    without one there is a word, not a guess."""
    inner = ours()

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.transpose(0, 1))

    x = numbers(6, 3, 13)
    actual = importance(First(), [x.transpose(0, 1)], squares, normalise=False, progress=False)
    assert actual.examples == 6
    agree(
        actual, {f"inner.{path}": each for path, each in by_gates(inner, list(x.split(1)), squares).items()}
    )
    match = "6 in inner.layers.0, and the number of examples may be 3 or 6; use another batch size"
    refused(ShapeError, match, First(), [x.transpose(0, 1)], squares, method="leave_one_out")


def test_layers_must_see_the_same_examples() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = ours(), ours()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x).sum() + self.b(y).sum()

    match = "batch sizes are 2 in b.layers.0, 3 in a.layers.0, which are not multiples"
    refused(ShapeError, match, Two(), [(numbers(3, 5, 13), numbers(2, 5, 13))], lambda m, b: m(*b))


# Robustness


def zeroed(model: Any, heads: list[tuple[int, int]]) -> Any:
    cut = copy.deepcopy(model)
    with torch.no_grad():
        for layer, head in heads:
            cut.layers[layer].out_proj.weight.unflatten(1, (4, 7))[:, head] = 0
    return cut


def test_robustness_is_the_loss_of_models_cut_by_hand() -> None:
    model, batches = ours(), [numbers(2, 7, 13), numbers(3, 5, 13, seed=2)]

    def loss(m: nn.Module) -> float:
        with torch.no_grad():
            return sum(squares(m, x).item() * len(x) for x in batches) / 5

    actual = robustness(model, batches, squares, repeats=2, seed=3)
    assert actual.removed == list(range(9)) and actual.num_heads == 8
    assert actual.baseline == pytest.approx(loss(model), rel=1e-12)
    order = importance(model, batches, squares).least(8, groups=False)
    expected = [loss(zeroed(model, order[:count])) for count in actual.removed]
    assert actual.by_importance.tolist() == pytest.approx(expected, rel=1e-10)
    for layer in range(2):
        expected = [loss(zeroed(model, [(layer, head)])) for head in range(4)]
        assert actual.single[layer].tolist() == pytest.approx(expected, rel=1e-10)
    assert actual.at_random.shape == (2, 9)
    everything = loss(zeroed(model, order))
    assert actual.at_random[:, 0].tolist() == [actual.baseline] * 2
    assert actual.at_random[:, -1].tolist() == pytest.approx([everything] * 2, rel=1e-10)
    assert hooks_on(model) == 0


def test_random_orders_depend_on_the_seed_alone() -> None:
    model, x = ours(), [numbers(2, 5, 13)]
    options: dict[str, Any] = {"method": "random", "single": False, "repeats": 2}
    first, again, other = (robustness(model, x, squares, seed=s, **options) for s in (0, 0, 1))
    assert torch.equal(first.at_random, again.at_random) and not torch.equal(first.at_random, other.at_random)
    assert first.by_importance is None and first.single is None


def test_points_may_be_counted_or_listed() -> None:
    model, x = ours(), [numbers(2, 5, 13)]
    expected = importance(model, x, squares)
    options: dict[str, Any] = {"method": ["importance"], "single": False, "scores": expected}
    assert robustness(model, x, squares, points=3, **options).removed == [0, 3, 5, 8]
    assert robustness(model, x, squares, points=np.int64(3), **options).removed == [0, 3, 5, 8]
    listed = robustness(model, x, squares, points=[6, 1], **options)
    assert listed.removed == [0, 1, 6] and listed.by_importance.shape == (3,) and listed.at_random is None


def test_robustness_can_be_read_kept_and_drawn() -> None:
    actual = Robustness(
        2.0, 4, [0, 2, 4], torch.tensor([2.0, 2.1, 3.0]), torch.tensor([[2.0, 2.5, 3.0], [2.0, 2.7, 3.0]]),
        {0: torch.tensor([2.001, 2.3]), 1: torch.tensor([2.0, 1.99])},
    )  # fmt: skip
    assert str(actual) == (
        "With all 4 heads the loss is 2. Removing a single head changes the loss by at most 1% for 3 of 4 "
        "heads; the largest change is that of layer 0 head 1 (+0.3). With 2 removed it is 2.1 least "
        "important first and 2.6 ± 0.14 "
        "at random; without any head it is 3."
    )
    saved = json.loads(json.dumps(actual.to_dict()))
    assert saved["removed"] == [0, 2, 4] and saved["single"]["1"] == pytest.approx([2.0, 1.99])
    pytest.importorskip("matplotlib")
    figure = actual.plot()
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "one head removed:\n0.1 increases the loss most",
        "at random: mean and range of 2 orders",
        "least important first",
        "2\nall heads",
        "3\nno head",
    ]
    figure.savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ([0, 5], "With 5 removed it is 2.3 least important first and 2.7 ± 0.14 at random."),
        ([0, 7], "Without any head it is 2.3."),
        ([0, 3, 5], "With 3 removed it is 2.1 least important first and 2.5 ± 0.14 at random; with 5 removed "
                    "it is 2.3 least important first and 2.7 ± 0.14 at random."),
    ],
)  # fmt: skip
def test_robustness_says_no_number_twice(removed: list[int], message: str) -> None:
    """The loss without any head stood there once for each curve; with one point, that point or the loss with
    all heads: "With 3 heads removed it is 2.3; with 3, 2.3"."""
    ordered = torch.tensor([2.0, 2.1, 2.3])
    shuffled = torch.tensor([[2.0, 2.4, 2.6], [2.0, 2.6, 2.8]])
    points = [0, -1] if len(removed) == 2 else [0, 1, 2]
    measured = Robustness(2.0, 7, removed, ordered[points], shuffled[:, points], None)
    assert str(measured) == f"With all 7 heads the loss is 2. {message}"


def test_robustness_of_one_head_is_told_in_one_line() -> None:
    alone = {0: torch.tensor([2.3])}
    measured = Robustness(2.0, 1, [0, 1], torch.tensor([2.0, 2.3]), None, alone)  # type: ignore[arg-type]
    assert str(measured) == "With its one head the loss is 2. Without any head it is 2.3."


def test_without_matplotlib_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"need matplotlib; install with: \S+ \S+ .headwise\[viz\]"):
        Robustness(2.0, 4, [0, 4], torch.tensor([2.0, 3.0]), None, None).plot()


def test_wrong_arguments_of_robustness_are_named() -> None:
    model, x = ours(), [numbers(2, 5, 13)]
    for match, options in (
        ("method must be .* got 'size'", {"method": ["size"]}),
        ("repeats must be .* got 0", {"repeats": 0}),
        ("points must be at least 1: got 0", {"points": 0}),
        (r"1 to 8: got \[3, 9\]", {"points": [3, 9]}),
        (r"points must be a whole number.* got 0\.5; .*\[round\(share \* num_heads\)\]", {"points": 0.5}),
        (r"points must be a whole number.* got \[1, 2\.5\]", {"points": [1, 2.5]}),
        ("points must be a whole number.* got 'all'", {"points": "all"}),
        (r"in scores, layer must be an attention layer: got 'h\.0\.attn'", {"scores": scores(l0=[1.0])}),
        (r"head 0 of layers\.1 is missing", {"scores": {"layers.0": torch.ones(4)}}),
    ):
        with pytest.raises(ArgumentError, match=match):
            robustness(model, x, squares, **options)  # type: ignore[arg-type]


# The bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_only_where_it_takes_long_and_somebody_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich")
    clock = iter(range(100))
    monkeypatch.setattr("headwise.models.batches.monotonic", lambda: next(clock))
    cases = ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False))
    for screen, wanted, visible in cases:
        monkeypatch.setattr(sys, "stderr", screen)
        assert list(tracked([1, 2, 3, 4], "counting", wanted)) == [1, 2, 3, 4]
        assert ("counting" in screen.getvalue()) == visible
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("headwise.models.batches.monotonic", lambda: 0.0)
    list(tracked(range(9), "counting"))
    assert not screen.getvalue()
    monkeypatch.setattr("headwise.models.batches.monotonic", lambda: next(clock))
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert list(tracked(iter(range(9)), "counting")) == list(range(9))
    assert not screen.getvalue()
