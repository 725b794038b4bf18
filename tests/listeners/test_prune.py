"""Heads taken out: a pruned model says what it said with those heads at zero, and is smaller."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from headwise.errors import ArgumentError, AttentionBypassed, PackageMissing
from headwise.listeners.ablation import ablate
from headwise.listeners.importance import importance
from headwise.listeners.model_structure import likely_places
from headwise.listeners.pruning import load_pruned, prune
from headwise.nn import MultiHeadAttention
from judge import error
from model_families import FAMILIES, Family
from small_models import (
    Stack,
    albert,
    bert,
    gpt2,
    hooks_on,
    hugging_face,
    llama,
    numbers,
    ours,
    tokens,
    torch_encoder,
)

HOOKED = [family for family in FAMILIES if family.route == "hook"]

EXACT = 1e-10  # of a float64 model
KEY = "headwise_pruned_heads"

Run = Callable[[Any], Tensor]


def read(model: Any) -> Tensor:
    return model(tokens()).logits


def feed(model: Any) -> Tensor:
    return model(numbers(2, 7, 13))


# Each: the model, how it is run, heads of the first layer and of the second.
CASES: dict[str, tuple[Callable[[], Any], Run, list[int], list[int]]] = {
    "gpt2": (gpt2, read, [1], [0, 2]),
    "bert": (bert, read, [0, 3], [4]),
    "llama, whole groups": (llama, read, [2, 3], [0, 1, 4, 5]),
    "llama, one of each group": (llama, read, [0, 3, 4], [1, 3, 5]),
    "llama, both": (llama, read, [0, 1, 2, 5], [1, 2, 4, 5]),
    "albert": (albert, lambda m: m(tokens()).last_hidden_state, [1, 2], []),
    "ours": (ours, feed, [0, 1], [1, 2]),
    "ours, alone": (lambda: ours(num_kv_heads=4, sinks=True, softcap=3.0), feed, [3], [0, 2]),
    "ours, shared": (lambda: ours(num_kv_heads=1, bias=False, out_bias=True), feed, [3], [0, 2, 1]),
}
every_case = pytest.mark.parametrize("name", CASES)


def chosen(model: nn.Module, name: str) -> list[tuple[str, int]]:
    return [(path, head) for path, heads in zip(likely_places(model), CASES[name][2:], strict=False)
            for head in heads]  # fmt: skip


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@every_case
def test_a_pruned_model_says_what_it_says_with_those_heads_at_zero(name: str) -> None:
    make, run, *_ = CASES[name]
    model = make()
    heads = chosen(model, name)
    before = size(model)
    with torch.no_grad():
        plain = run(model)
        with ablate(model, heads):
            expected = run(model)
        report = prune(model, heads)
        actual = run(model)
        with ablate(model, {}):
            output = run(model)
    assert error(actual, expected) < EXACT < error(actual, plain)
    assert error(output, expected) < EXACT
    assert report.parameters == (before, size(model)) and size(model) < before
    assert hooks_on(model) == 0


@every_case
def test_gradients_reach_what_is_left(name: str) -> None:
    make, run, *_ = CASES[name]
    model = make()
    run(model).sum().backward()
    prune(model, chosen(model, name))
    loss = run(model).sum()  # while the graph of before may still be there
    loss.backward()
    for path in {path for path, _ in chosen(make(), name)}:
        for parameter in model.get_submodule(path).parameters():
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape


# Which weights are left


def test_gpt2_cross_attention_is_pruned_too() -> None:
    hf = hugging_face()
    model = gpt2(add_cross_attention=True)
    assert isinstance(model, hf.GPT2LMHeadModel)
    visible = numbers(3, 5, 33)
    heads = [("transformer.h.0.crossattention", 1), ("transformer.h.1.attn", 0)]
    with torch.no_grad():
        with ablate(model, heads):
            expected = model(tokens(), encoder_hidden_states=visible).logits
        prune(model, heads)
        actual = model(tokens(), encoder_hidden_states=visible).logits
    assert error(actual, expected) < EXACT
    assert model.transformer.h[0].crossattention.q_attn.nf == 22


def test_ours_is_packed_again_and_shows_its_sizes() -> None:
    mha = MultiHeadAttention(13, 4, num_kv_heads=2, head_dim=5, value_dim=7, sinks=True)
    prune(mha, [("", 0), ("", 1)])
    assert (mha.num_heads, mha.num_kv_heads, mha.sinks.shape) == (2, 1, (2,))
    assert mha._packed is not None and mha._packed.holds((mha.q_proj, mha.k_proj, mha.v_proj))
    assert "2 heads of 5 over 1 key/value heads" in repr(mha)
    mha.load_state_dict(mha.state_dict())
    assert mha(torch.randn(2, 5, 13))[1].shape == (2, 2, 5, 5)


def test_dtype_and_what_is_frozen_stay() -> None:
    model = ours().bfloat16()
    model.layers[0].q_proj.weight.requires_grad_(False)
    model.layers[0].out_proj.bias.requires_grad_(False)
    bias = model.layers[0].out_proj.bias
    prune(model, [(0, 0), (0, 1)])
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["layers.0.q_proj.weight", "layers.0.out_proj.bias"]
    assert model.layers[0].out_proj.bias is bias


def test_a_model_without_memory_can_be_pruned() -> None:
    with torch.device("meta"):
        model = Stack(MultiHeadAttention(12, 4))
    report = prune(model, [(0, 3)])
    assert report.num_heads == {0: (4, 3)} and model.layers[0].q_proj.weight.shape == (9, 12)


# Pruning again, and bringing back


def test_heads_are_numbered_anew_and_written_down_as_they_were() -> None:
    model = llama()
    prune(model, {0: [0, 3, 4], 1: [2, 3]})
    report = prune(model, [(0, 1), (1, 0), (1, 1)])
    first, second = "model.layers.0.self_attn", "model.layers.1.self_attn"
    assert report.heads == {0: [1], 1: [0, 1]} and report.heads[second] == [0, 1]
    assert getattr(model.config, KEY) == {first: [0, 2, 3, 4], second: [0, 1, 2, 3]}
    once = llama()
    prune(once, getattr(model.config, KEY))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), once.parameters(), strict=True))
    assert torch.equal(read(model), read(once))


def test_a_new_model_with_the_config_of_a_pruned_one_begins_with_nothing_pruned() -> None:
    hf, model = hugging_face(), gpt2()
    prune(model, [(0, 1)])
    fresh = hf.GPT2LMHeadModel(copy.deepcopy(model.config))
    prune(fresh, [(1, 2)])
    assert getattr(fresh.config, KEY) == {"transformer.h.1.attn": [2]}


@pytest.mark.parametrize(
    "make", [gpt2, bert, lambda: llama(tie_word_embeddings=True)], ids=["gpt2", "bert", "llama"]
)
@pytest.mark.parametrize("way", ["class", "auto", "model", "shards"])
def test_a_saved_model_comes_back_bit_for_bit(make: Callable[[], Any], way: str, tmp_path: Path) -> None:
    hf, model = hugging_face(), make()
    prune(model, {0: [0, 1], 1: [2, 3] if model.config.model_type == "llama" else [2]})
    model.save_pretrained(tmp_path, **({"max_shard_size": "30KB"} if way == "shards" else {}))
    kind: Any = type(model)
    if way == "auto":
        kind = hf.AutoModelForSequenceClassification if make is bert else hf.AutoModelForCausalLM
    elif way == "model":
        kind = make()
    again = load_pruned(kind, tmp_path)
    assert type(again) is type(model) and again.dtype == torch.float64 and not again.training
    assert getattr(again.config, KEY) == getattr(model.config, KEY)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert torch.equal(read(model), read(again))


def test_a_plain_module_is_built_and_pruned_again() -> None:
    model, again = ours(), ours()
    report = prune(model, [(0, 0), (0, 1)])
    prune(again, report.heads)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    again.load_state_dict(model.state_dict())
    assert torch.equal(feed(model), feed(again))


def test_text_is_generated_with_and_without_a_cache_alike() -> None:
    model = llama()
    prune(model, [(0, 0), (0, 1), (1, 0), (1, 2), (1, 4)])
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(tokens())}
    with_cache = model.generate(tokens(), **options)
    assert torch.equal(with_cache, model.generate(tokens(), use_cache=False, **options))


def test_a_model_inside_another_writes_to_its_own_config() -> None:
    around = nn.ModuleDict({"reader": gpt2()})
    prune(around, [(0, 1)])
    assert getattr(around["reader"].config, KEY) == {"transformer.h.0.attn": [1]}


def test_the_report_can_be_read() -> None:
    assert str(prune(gpt2(), [(0, 1), (1, 0), (1, 2)])) == (
        "3 heads pruned in 2 layers: 29,370 -> 24,915 parameters (-15.2%).\n"
        "  transformer.h.0.attn: 3 -> 2 heads, without 1\n"
        "  transformer.h.1.attn: 3 -> 1 head, without 0, 2"
    )
    assert str(prune(gpt2(), [(0, 1)])).startswith("1 head pruned in 1 layer: ")
    assert prune(gpt2(), []).heads == {}


# Every family


@pytest.mark.filterwarnings("ignore")
@pytest.mark.thinned(0, keep=[repr(family) for family in HOOKED if family.core], slow=2)
@pytest.mark.parametrize("family", HOOKED, ids=repr)
def test_every_family_is_pruned_rightly_or_refused(family: Family) -> None:
    hugging_face()
    model = family.build(family.finest)
    arguments = family.feed("none", family.finest)
    heads: dict[str, list[int]] = {}
    for path in likely_places(model):
        for some in ([0], [0, 1], [0, 2]):  # one; a whole group; one of each group
            try:
                prune(copy.deepcopy(model), {path: some})
            except ArgumentError:
                continue
            heads[path] = some
            break
    if not heads:
        return

    def run() -> Tensor:
        torch.manual_seed(0)  # some mask patches at random
        with torch.no_grad():
            return torch.cat([each.flatten() for each in floats(model(**arguments))])

    plain = run()
    with ablate(model, heads):
        expected = run()
    prune(model, heads)
    actual = run()
    # Some compute parts of themselves in float32 whatever they are in.
    rounding = torch.finfo(torch.float32).eps * plain.abs().max()
    assert error(actual, expected) <= 32 * rounding < error(actual, plain)


def family_of(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def floats(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output.double()] if output.is_floating_point() else []
    parts = (
        output.values() if hasattr(output, "values") else output if isinstance(output, (tuple, list)) else ()
    )
    return [each for part in parts for each in floats(part)]


# What is refused


def refused(match: str, model: nn.Module, heads: Any) -> None:
    """Nothing is changed, not even in layers that come first."""
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ArgumentError, match=match):
        prune(model, heads)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before) and before.keys() == after.keys()


def test_heads_that_are_not_there_are_refused() -> None:
    refused("layer must be one of 0 to 1: got 2", gpt2(), [(0, 0), (2, 0)])
    refused(r"0 to 2: got 3 in transformer.h.1.attn, which has 3 heads", gpt2(), [(0, 0), (1, 3)])
    refused("all 3 of transformer.h.1.attn would be removed", gpt2(), [(0, 0), (1, None)])
    refused("got 9 in the model itself, which has 2 heads", MultiHeadAttention(8, 2), [(0, 9)])
    refused("all 2 of the model itself would be removed", MultiHeadAttention(8, 2), [(0, None)])
    path = "encoder.albert_layer_groups.0.albert_layers.0.attention"
    refused(f"every run of a layer: got '{path}#1'", albert(), [(f"{path}#1", 0)])


def test_a_part_of_a_group_is_refused_with_what_would_work() -> None:
    match = (
        r"in model.layers.0.self_attn the 3 key/value heads would serve 1, 2, 2 of 2 query heads each; "
        r"prune the same number in every group, or all of group 0 \(heads 0 to 1\)"
    )
    refused(match, llama(), [(0, 1)])


def test_torch_s_own_class_is_refused_with_what_would_work() -> None:
    words = "layers.0.self_attn is torch's MultiheadAttention, whose 4 heads .* embed_dim = 20.*from_torch"
    refused(words, torch_encoder(), [(0, 1)])


class OddAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 6)


def test_unknown_attention_is_named_beside_the_known() -> None:
    match = "0 is OddAttention; supported are headwise.MultiHeadAttention, GPT-2, BERT"
    refused(match, nn.Sequential(OddAttention()), [(0, 1)])


def test_projections_that_are_wrapped_or_tied_are_refused() -> None:
    wrapped = ours()
    wrapped.layers[1].k_proj = nn.Sequential(wrapped.layers[1].k_proj)  # type: ignore[assignment]
    refused("layers.1.k_proj is Sequential", wrapped, [(0, 0), (0, 1), (1, 0)])
    tied = ours()
    tied.layers[1].k_proj.weight = tied.layers[0].k_proj.weight
    refused(r"layers.1.k_proj.weight is shared with layers.0.k_proj.weight, layers.1.k_proj.weight", tied,
            [(1, 0), (1, 1)])  # fmt: skip
    masked = ours()
    torch_prune.identity(masked.layers[0].v_proj, "weight")
    refused("layers.0.v_proj.weight is NoneType", masked, [(0, 0), (0, 1)])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda layer: layer.register_parameter("slope", nn.Parameter(torch.ones(6))), r"has slope \[6\]"),
        (lambda layer: layer.register_buffer("table", torch.ones(6, 2)), r"has table \[6, 2\]"),
        (lambda layer: setattr(layer, "q_norm", nn.LayerNorm(48)), r"has q_norm.weight \[48\]"),
        (lambda layer: setattr(layer, "head_dim", 7), "has 48, 24 and 24 channels"),
        (
            lambda layer: setattr(layer, "o_proj", nn.Linear(40, 36)),
            "6 heads of 8 and 40 channels into o_proj",
        ),
    ],
    ids=["parameter", "buffer", "norm", "channels", "output"],
)
def test_what_may_depend_on_heads_is_refused(change: Callable[[Any], Any], match: str) -> None:
    model = llama()
    change(model.model.layers[0].self_attn)
    refused(match, model, [(0, 0), (0, 1)])


def test_a_bias_from_elsewhere_and_strange_forwards_are_refused() -> None:
    match = r"\S*relative_position_bias\S* \[\S+ 4\], which is added to the scores"
    refused(match, family_of("beit").build(), [(0, 1)])
    refused("XGLMAttention.* has a forward that reads embed_dim", family_of("xglm").build(), [(0, 1)])


def strange_forward(text: str) -> Any:
    """A method that mentions what it is given, under the roof of transformers."""
    space: dict[str, Any] = {}
    exec(f"def forward(self, hidden_states):\n    {text}", space)
    return space["forward"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("return self.config.num_attention_heads", "num_attention_heads"),
        ("return self.is_kv_shared_layer", "is_kv_shared_layer"),
        ("embed_dim = hidden_states.shape[-1]; return embed_dim", "embed_dim"),
        ("return self.hidden_size", "hidden_size"),
    ],
)
def test_a_forward_that_counts_on_all_heads_is_refused(text: str, name: str) -> None:
    model = llama()
    layer = model.model.layers[0].self_attn
    layer.hidden_size = 48
    layer.__class__ = type("OddAttention", (type(layer),), {"forward": strange_forward(text)})
    layer.__class__.__module__ = "transformers.odd"
    match = rf"layers.0.self_attn \(OddAttention\) has a forward that reads {name};"
    refused(match, model, {"layers.0.self_attn": [0, 1]})


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    hf, model, reader = hugging_face(), gpt2(), bert()

    def refused(match: str, kind: Any = hf.GPT2LMHeadModel, folder: str = "", **changes: Any) -> None:
        with pytest.raises(ArgumentError, match=match):
            load_pruned(kind, tmp_path / folder, **changes)

    refused(r"no config.json in '\S*nowhere'", folder="nowhere")
    model.save_pretrained(tmp_path)
    refused("has no headwise_pruned_heads")
    prune(model, [(0, 1)])
    model.save_pretrained(tmp_path)
    refused("got n_layer with a model that is built", gpt2(), n_layer=3)
    refused("got 'transformer.h.0.attn'; there are h.0.attn", hf.GPT2Model)
    refused(r"transformer.h.2\S* missing in .* not GPT2LMHeadModel", n_layer=3)
    prune(reader, [(0, 1)])
    reader.save_pretrained(tmp_path / "reader")
    match = r"bert.pooler.dense.bias is \[35\] in .* does not exist in BertForMaskedLM"
    refused(match, hf.BertForMaskedLM, "reader")
    (tmp_path / "model.safetensors").unlink()
    refused("no model.safetensors in")


def test_heads_that_bypass_every_hook_can_still_be_pruned() -> None:
    """RoFormer computes its own weights: nothing to hear, but its projections are known."""
    family = family_of("roformer")
    model = family.build(torch.float64)
    by_hand = copy.deepcopy(model)
    arguments = family.feed("none", torch.float64)
    with torch.no_grad():
        by_hand.encoder.layer[0].attention.output.dense.weight[:, 8:16] = 0
        expected = by_hand(**arguments).last_hidden_state
        with pytest.raises(AttentionBypassed), ablate(model, [(0, 1)]):
            model(**arguments)
        prune(model, [(0, 1)])
        actual = model(**arguments).last_hidden_state
    assert error(actual, expected) < EXACT


def test_without_safetensors_the_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a bare ModuleNotFoundError, the only one in the house without a hint."""
    model = gpt2()
    prune(model, [(0, 1)])
    model.save_pretrained(tmp_path)
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(PackageMissing, match=r'load_pruned needs safetensors; .* "headwise\[watch\]"'):
        load_pruned(type(model), tmp_path)


def test_the_least_important_heads_go_as_they_are_ranked() -> None:
    """`Ranked` has a score, too, and `prune` wanted pairs: "got Ranked(layer=0, ...) among them"."""
    model, by_pairs = ours(num_kv_heads=4), ours(num_kv_heads=4)
    actual = importance(model, [numbers(2, 5, 13)], lambda m, x: m(x).square().mean())
    done = prune(model, actual.ranking()[-2:])
    assert sum(map(len, done.heads.values())) == 2
    assert prune(by_pairs, actual.least(2)).heads == done.heads


@pytest.mark.parametrize("name", ["vit", "mixtral", "marian", "llava"])
def test_families_that_save_under_other_names_come_back(name: str, tmp_path: Path) -> None:
    """Their own loader knows the names; ours said that the class was wrong."""
    family = family_of(name)
    model, inputs = family.build(), family.feed("none")
    inside = (".0.attention", ".0.attention.attention", ".0.self_attn")
    places = [path for path in likely_places(model) if path.endswith(inside)]
    prune(model, {places[-1]: [0, 1]})
    model.save_pretrained(tmp_path)
    again = load_pruned(type(model), tmp_path)
    assert type(again) is type(model)
    with torch.no_grad():
        torch.manual_seed(0)
        before = model(**inputs)
        torch.manual_seed(0)
        after = again(**inputs)
    assert torch.equal(before[0], after[0]) and size(again) == size(model)
