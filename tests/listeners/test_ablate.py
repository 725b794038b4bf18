"""Heads switched off and patched; the judge is the model with rows of an output projection at zero."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import headwise as hw
from headwise.errors import ArgumentError, AttentionBypassed, ShapeError
from headwise.heads.layer_names import ByLayer
from headwise.listeners.ablation import ablate, head_means
from headwise.listeners.active import Listener
from headwise.listeners.adapters import attach
from headwise.listeners.head_outputs import collect, patch
from headwise.listeners.importance import importance
from headwise.listeners.pruning import prune
from headwise.masks import Mask
from headwise.nn import MultiHeadAttention
from headwise.scoring import Relative
from judge import error
from small_models import albert, bert, gpt2, hooks_on, llama, numbers, ours, tokens, torch_encoder

EXACT = 1e-10  # of a float64 model

Run = Callable[[nn.Module], Tensor]


def padded() -> dict[str, Tensor]:
    """Tokens, the last three of the first sequence padding."""
    ids = tokens()
    real = torch.ones_like(ids)
    real[0, -3:] = 0
    return {"input_ids": ids, "attention_mask": real}


def logits(model: Any) -> Tensor:
    return model(**padded()).logits


# Each: the model, how it is run, and layer 1's output projection as rows of its inputs [H * Dv, E].
MODELS: dict[str, tuple[Callable[[], Any], Run, Callable[[Any], Tensor], int]] = {
    "gpt2": (gpt2, logits, lambda m: m.transformer.h[1].attn.c_proj.weight, 3),
    "bert": (bert, logits, lambda m: m.bert.encoder.layer[1].attention.output.dense.weight.T, 5),
    "llama": (llama, logits, lambda m: m.model.layers[1].self_attn.o_proj.weight.T, 6),
    "torch": (
        torch_encoder,
        lambda m: m(numbers(2, 7, 20)),
        lambda m: m.layers[1].self_attn.out_proj.weight.T,
        4,
    ),
    "ours": (ours, lambda m: m(numbers(2, 7, 13)), lambda m: m.layers[1].out_proj.weight.T, 4),
}
every_model = pytest.mark.parametrize("name", MODELS)


def without(name: str, model: Any, heads: list[int]) -> Tensor:
    """The output with layer 1's heads taken out of the output projection by hand."""
    _, run, rows, H = MODELS[name]
    model = copy.deepcopy(model)
    with torch.no_grad():
        for head in heads:
            rows(model).unflatten(0, (H, -1))[head] = 0
        return run(model)


@every_model
def test_a_head_at_zero_says_nothing(name: str) -> None:
    make, run, _, _ = MODELS[name]
    model = make()
    with torch.no_grad():
        before = run(model)
        with ablate(model, [(1, 2), (1, 0)]):
            actual = run(model)
        after = run(model)
    assert error(actual, without(name, model, [0, 2])) < EXACT < error(actual, before)
    assert torch.equal(before, after)
    assert hooks_on(model) == 0


@every_model
def test_a_layer_without_a_head_means_all_of_them(name: str) -> None:
    make, run, _, H = MODELS[name]
    model = make()
    with torch.no_grad(), ablate(model, [(-1, None)]):
        actual = run(model)
    assert error(actual, without(name, model, list(range(H)))) < EXACT


def test_a_layer_may_be_named_by_its_path_or_the_end_of_it() -> None:
    model = gpt2()
    actual = []
    for heads in ([(1, 2)], [("transformer.h.1.attn", 2)], [("h.1.attn", 2)], {1: [2]}, {"h.1.attn": [2]}):
        with torch.no_grad(), ablate(model, heads):
            actual.append(model(tokens()).logits)
    assert all(torch.equal(each, actual[0]) for each in actual)


def test_blocks_may_be_nested_and_one_entered_again() -> None:
    name, (make, run, _, _) = "llama", MODELS["llama"]
    model = make()
    first, second = ablate(model, [(1, 0)]), ablate(model, [(1, 4)])
    with torch.no_grad():
        before = run(model)
        with first:
            with second, first:
                both = run(model)
            whole = run(model)
        with second:
            other = run(model)
        after = run(model)
    assert error(both, without(name, model, [0, 4])) < EXACT
    assert error(whole, without(name, model, [0])) < EXACT
    assert error(other, without(name, model, [4])) < EXACT
    assert torch.equal(before, after) and hooks_on(model) == 0


def test_an_exception_leaves_the_model_as_it_was() -> None:
    model = bert()
    with torch.no_grad():
        before = model(tokens()).logits
        with pytest.raises(KeyError), ablate(model, [(0, 0)]):
            raise KeyError("mine")
        with (
            pytest.raises(ArgumentError, match=r"head must be one of 0 to 4: got 9 in bert.encoder.layer.1"),
            ablate(model, [(1, 9)]),
        ):
            model(tokens())
        after = model(tokens()).logits
    assert torch.equal(before, after) and hooks_on(model) == 0
    assert model.config._attn_implementation == "sdpa"


def test_a_block_in_which_the_model_does_not_run_is_fine() -> None:
    with ablate(gpt2(), [(0, 99)]):
        pass


def test_a_layer_that_does_not_run_is_not_passed_over() -> None:
    """`ablate(model, [("layers.1#99", 0)])` did nothing, and the output was taken for that of an ablation."""
    model, x = ours(), numbers(2, 7, 13)
    never = r"heads must be in layers that run: the model ran, but layers.1#99 never ran"
    with pytest.raises(ArgumentError, match=never), ablate(model, [(0, 1), ("layers.1#99", 0)]):
        model(x)
    with pytest.raises(ArgumentError, match=r"but layers.1 never ran"), ablate(model, [(1, 0)]):
        model.layers[0](x)
    with pytest.raises(ArgumentError, match=r"but layers.1 never ran"), collect(model, [(1, 0)]):
        model.layers[0](x)
    with pytest.raises(KeyError), ablate(model, [("layers.1#99", 0)]):  # which is told of instead
        {}[model(x)]
    with pytest.raises(ArgumentError, match=r"the model itself never ran"), ablate(model, [("", 0)]):
        model(x)
    with ablate(model, [("layers.1#0", 0)]):
        model(x)
    assert hooks_on(model) == 0


def helped(q: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, q, q)


class Helped(nn.Module):
    """Attends through a helper: nothing about the class tells."""

    def forward(self, x: Tensor) -> Tensor:
        return helped(x.unflatten(-1, (3, 4)).transpose(1, 2)).transpose(1, 2).flatten(2)


def test_what_is_heard_can_be_ablated_though_it_looks_like_no_attention() -> None:
    """`watch` heard it, `ablate` said "no attention was found in this model", and `collect` gave {}."""
    model, x = nn.Sequential(nn.Identity(), Helped()), numbers(2, 5, 12)
    with hw.watch(model) as heads:
        plain = model(x)
    assert heads.paths == ["1"]
    expected = plain.clone()
    expected[..., 4:8] = 0
    for chosen in ([("1", 1)], [heads["1", 1]], {"1": [1]}):
        with ablate(model, chosen):
            assert error(model(x), expected) < EXACT
    with collect(model) as outputs:
        model(x)
    assert outputs.paths == ["1"] and outputs["1"].shape == (2, 3, 5, 4)
    with pytest.raises(ArgumentError, match="layer must be an attention layer: got '7'"):
        ablate(model, [("7", 1)])


def test_a_model_without_attention_has_no_means_and_nothing_to_collect() -> None:
    """Both gave {}, as if all was well."""
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.randn(2, 3)
    with pytest.raises(AttentionBypassed, match="Sequential ran 2 times without any"):
        head_means(model, [x, x])
    with pytest.raises(AttentionBypassed, match="Sequential ran 1 times without any"), collect(model):
        model(x)
    assert head_means(model, [x], fallback="skip") == {}


def test_none_means_all_heads_for_collect_alone() -> None:
    for name in (ablate, prune):
        with pytest.raises(ArgumentError, match=r"heads must be \(layer, head\) pairs: got None"):
            name(ours(), None)


def test_gradients_are_those_of_the_model_without_the_head() -> None:
    model = ours()
    with ablate(model, [(1, 2)]):
        model(numbers(2, 7, 13)).sum().backward()
    grad = model.layers[1].out_proj.weight.grad
    assert not grad.unflatten(1, (4, 7))[:, 2].any() and grad.unflatten(1, (4, 7))[:, 1].any()


# The mean


def heads_of(model: Any, run: Run) -> ByLayer[Tensor]:
    with torch.no_grad(), collect(model) as outputs:
        run(model)
    return outputs


def test_the_mean_is_over_real_positions() -> None:
    model = bert()
    batch = padded()
    real = batch["attention_mask"].bool()
    message = heads_of(model, lambda m: m(**batch))
    with torch.no_grad(), ablate(model, [(0, 3)], "mean"), collect(model) as outputs:
        model(**batch)
    path = "bert.encoder.layer.0.attention.self"
    mean = message[path].transpose(1, 2)[real].mean(0)  # [H, Dv]
    assert error(outputs[path][:, 3], mean[3].expand_as(outputs[path][:, 3])) < EXACT
    assert torch.equal(outputs[path][:, 2], message[path][:, 2])


def test_means_of_several_batches_take_the_place_of_the_batch_s_own() -> None:
    model = llama()
    batches = [padded(), {"input_ids": tokens(2, 5, seed=3)}]
    means = head_means(model, batches)
    path = "model.layers.1.self_attn"
    parts = [heads_of(model, lambda m, batch=batch: m(**batch))[path].transpose(1, 2) for batch in batches]
    everything = torch.cat([parts[0][padded()["attention_mask"].bool()], parts[1].flatten(0, 1)])
    assert error(means[path], everything.mean(0)) < EXACT
    with torch.no_grad(), ablate(model, [(1, 5)], "mean", means=means), collect(model, [(1, 5)]) as outputs:
        model(tokens(1, 1))
    assert error(outputs[path][0, 5, 0], means[path][5]) < EXACT


# The uniform


@pytest.mark.parametrize("kind", ["causal", "padding", "window", "bias", "relative", "nothing"])
def test_uniform_is_the_mean_of_the_values_a_head_may_see(kind: str) -> None:
    mha = MultiHeadAttention(13, 4, num_kv_heads=2, head_dim=5, value_dim=7, sinks=True, softcap=3.0).double()
    x, T = numbers(2, 7, 13), 7
    masks = {"causal": Mask.causal(), "padding": Mask.padding([4, 7]), "window": Mask.window(3)}
    allowed = torch.ones(2, 1, T, T, dtype=torch.bool)
    bias = None
    if kind in masks:
        allowed = masks[kind].full(T, T, 2).expand(2, 1, T, T)
    elif kind == "bias":
        allowed = numbers(1, 1, T, T, seed=5) > 0
        allowed[..., 0] = True
        bias = numbers(1, 1, T, T, seed=6).masked_fill(~allowed, -torch.inf)
    elif kind == "relative":  # hides from the second neighbour on
        apart = (torch.arange(T) - torch.arange(T)[:, None]).abs()
        allowed = (apart < 2).expand(2, 1, T, T)
        bias = Relative(numbers(4, 5, seed=6).index_fill(1, torch.tensor([0, 4]), -torch.inf))
    with torch.no_grad(), ablate(mha, [("", 1), ("", 2)], "uniform"), collect(mha) as outputs:
        mha(x, mask=masks.get(kind), bias=bias)
        value = mha.v_proj(x).unflatten(-1, (2, 7)).transpose(1, 2)  # [B, Hk, S, Dv]
    shares = allowed.double() / allowed.sum(-1, keepdim=True)
    expected = shares.expand(2, 2, T, T) @ value
    assert error(outputs[""][:, 1], expected[:, 0]) < EXACT
    assert error(outputs[""][:, 2], expected[:, 1]) < EXACT


def test_uniform_in_a_language_model_is_the_mean_so_far() -> None:
    model = gpt2()
    with torch.no_grad(), ablate(model, [(0, 1)], "uniform"), collect(model, [(0, 1)]) as outputs:
        model(tokens())
        first = model.transformer.h[0]
        x = first.ln_1(model.transformer.wte(tokens()) + model.transformer.wpe(torch.arange(7)))
        value = first.attn.c_attn(x)[..., 66:].unflatten(-1, (3, 11))[:, :, 1]
    sofar = value.cumsum(1) / torch.arange(1, 8)[:, None]
    assert error(outputs["transformer.h.0.attn"][:, 1], sofar) < EXACT


# A layer that runs several times


def test_a_shared_layer_is_ablated_at_every_visit_or_at_one() -> None:
    model = albert()
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"

    def without(*layers: str) -> ByLayer[Tensor]:
        with torch.no_grad(), ablate(model, [(layer, 2) for layer in layers]), collect(model) as outputs:
            model(tokens())
        return outputs

    plain = without()
    assert plain.paths == [path, f"{path}#1", f"{path}#2"] and list(plain) == [0, 1, 2]
    assert [not each[:, 2].any() for each in without(path).values()] == [True, True, True]
    assert [not each[:, 2].any() for each in without(f"{path}#1").values()] == [False, True, False]
    assert [not x[:, 2].any() for x in without(f"{path}#0", f"{path}#2").values()] == [
        True,
        False,
        True,
    ]


# Patching


def test_patching_every_head_repeats_the_other_run() -> None:
    model = gpt2()
    clean, other = tokens(seed=1), tokens(seed=2)
    path = "transformer.h.1.attn"
    with torch.no_grad():
        outputs, plain = heads_of(model, lambda m: m(clean)), heads_of(model, lambda m: m(other))
        with patch(model, [(1, 0), (1, 2)], outputs), collect(model) as actual:
            model(other)
    assert torch.equal(actual[path][:, [0, 2]], outputs[path][:, [0, 2]])
    assert torch.equal(actual[path][:, 1], plain[path][:, 1])
    assert torch.equal(actual["transformer.h.0.attn"], plain["transformer.h.0.attn"])


@pytest.mark.parametrize("positions", [slice(2, 5), [2, 3, 4], torch.tensor([2, 3, -3])], ids=repr)
def test_patching_at_positions_leaves_the_others(positions: Any) -> None:
    model = ours()
    outputs = {"layers.0": numbers(2, 4, 7, 7, seed=4)}
    with torch.no_grad():
        plain = heads_of(model, lambda m: m(numbers(2, 7, 13)))["layers.0"]
        with patch(model, [(0, 1)], outputs, positions), collect(model, [(0, 1)]) as actual:
            model(numbers(2, 7, 13))
    expected = plain.clone()
    expected[:, 1, 2:5] = outputs["layers.0"][:, 1, 2:5]
    assert torch.equal(actual["layers.0"], expected)


def test_what_is_collected_is_a_copy_without_a_graph_and_a_block_has_its_own() -> None:
    model = ours()
    block = collect(model, [(0, 0)])
    with block as outer:
        with block as inner:
            model(numbers(2, 7, 13, seed=1))
        model(numbers(2, 7, 13, seed=2))
    assert list(inner) == list(outer) == [0] and not torch.equal(inner["layers.0"], outer["layers.0"])
    assert not inner["layers.0"].requires_grad


def test_generated_text_is_that_of_the_ablated_model() -> None:
    model = llama()
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        by_hand.model.layers[0].self_attn.o_proj.weight[:, 8:16] = 0
    options = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(tokens())}
    with ablate(model, [(0, 1)]):
        actual = model.generate(tokens(), **options)
    assert torch.equal(actual, by_hand.generate(tokens(), **options))


# What is refused


def refused(kind: type[Exception], match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=match):
        call()


def refused_inside(kind: type[Exception], match: str, block: Any, x: Tensor) -> None:
    with pytest.raises(kind, match=match), block:
        block.model(x)


def test_wrong_arguments_are_named_at_once() -> None:
    model = ours()
    for match, arguments in (
        ("model must be a torch.nn.Module: got int", (5, [])),
        ("method must be .* got 'zeros'; did you mean 'zero'", (model, [], "zeros")),
        ("pairs: got 5;", (model, 5)),
        ("pairs: got 1 among them", (model, (1, 2))),
        ("layer must be one of 0 to 1: got 7", (model, [(7, 0)])),
        ("got 'layers.9'; there are layers.0", (model, [("layers.9", 0)])),
        ("#<run>.* got 'layers.0#x'; for example 'layers.0#1'", (model, [("layers.0#x", 0)])),
        *((f"head must be .* got {head!r}", (model, [(0, head)])) for head in (-1, True, 1.5, "2")),
    ):
        refused(ArgumentError, match, lambda arguments=arguments: ablate(*arguments))
    refused(ArgumentError, "fallback must be .* 'loud'", lambda: ablate(model, [], fallback="loud"))


def test_means_must_be_there_and_fit() -> None:
    model, x, means = ours(), numbers(2, 7, 13), {"layers.0": torch.zeros(4, 5)}
    match = "means must be given only with method='mean': got method='zero'"
    refused(ArgumentError, match, lambda: ablate(model, [(0, 1)], means=means))
    refused(ArgumentError, "layers.1 is missing", lambda: ablate(model, [(1, 1)], "mean", means=means))
    match = r"means must be \[H, Dv\] = \[4, 7\] in layers.0: got \[4, 5\]"
    refused_inside(ShapeError, match, ablate(model, [(0, 1)], "mean", means=means), x)
    visits = {"layers.0#1": torch.zeros(4, 7)}
    match = "means must hold every run of a layer: layers.0 is missing"
    refused_inside(ArgumentError, match, ablate(model, [(0, 1)], "mean", means=visits), x)
    refused(ArgumentError, "batches must not be empty: got 0", lambda: head_means(model, []))


def test_outputs_to_patch_with_must_be_there_and_fit() -> None:
    model, x, fitting = ours(), numbers(2, 7, 13), torch.zeros(2, 4, 7, 7)
    outputs = {"layers.0": torch.zeros(2, 4, 6, 7)}
    refused(ArgumentError, "layers.1 is missing", lambda: patch(model, [(1, 0)], outputs))
    for kind, match, arguments, positions in (
        (ShapeError, r"= \[2, 4, 7, 7\] in layers.0: got \[2, 4, 6, 7\]", outputs, None),
        (
            ArgumentError,
            "outputs must hold every run of a layer: layers.0 is missing",
            {"layers.0#1": fitting},
            None,
        ),
        (IndexError, "positions must lie inside .* got 7", {"layers.0": fitting}, [7]),
    ):
        refused_inside(kind, match, patch(model, [(0, 0)], arguments, positions), x)


class OwnAttention(nn.Module):
    """Weights by a softmax of its own."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        q = self.project(x).unflatten(-1, (2, 3)).transpose(1, 2)  # [B, H, T, D]
        weights = torch.softmax(q @ q.transpose(2, 3), -1)
        return (weights @ q).transpose(1, 2).flatten(2)


def test_a_layer_whose_outputs_are_not_in_hand_is_not_passed_over() -> None:
    model = nn.Sequential(OwnAttention())
    x = numbers(2, 5, 6)
    for fallback, match in (
        ("eager", r"in 0 only the weights \[2, 2, 5, 5\] can be read"),
        ("skip", "heads must be in layers that headwise can intercept: 0 compute"),
        (None, "OwnAttention"),
    ):
        refused_inside(AttentionBypassed, match, ablate(model, [(0, 1)], fallback=fallback), x)
    assert hooks_on(model) == 0


def test_others_hear_what_is_left() -> None:
    model, output = ours(), []

    class Ear(Listener):
        def hear(self, call: Any) -> None:
            output.append(call.output)

    with ablate(model, [(0, 3)]), attach(model, Ear()):
        model(numbers(2, 7, 13))
    assert not output[0][:, 3].any() and output[1][:, 3].any()


def test_heads_that_were_found_can_be_ablated() -> None:
    """What `heads.find` gives goes straight into `ablate`."""
    torch.manual_seed(0)
    mha, x = hw.MultiHeadAttention(24, 3).double(), torch.randn(2, 5, 24).double()
    with hw.watch(mha) as heads:
        mha(x)
    actual = heads.find("entropy", top=1)
    with hw.ablate(mha, actual):
        without = mha(x)[0]
    with hw.ablate(mha, [(0, actual[0].head)]):
        assert torch.equal(mha(x)[0], without)
    assert not torch.equal(mha(x)[0], without)


def test_heads_that_were_ranked_can_be_ablated() -> None:
    """`Ranked` unpacks to three and was refused. What has a layer and a head is taken, by its path if any."""
    model, x = ours(), numbers(2, 7, 13)
    ranked = importance(model, [x], lambda m, x: m(x).square().mean()).ranking()[:3]
    with torch.no_grad():
        with ablate(model, ranked):
            actual = model(x)
        with ablate(model, [(entry.layer, entry.head) for entry in ranked]):
            assert torch.equal(model(x), actual)
        with ablate(model, [SimpleNamespace(layer=0, head=2, path="layers.1")]):
            actual = model(x)
        with ablate(model, [(1, 2)]):
            assert torch.equal(model(x), actual)
