"""What roles are for: a head planted to carry a behaviour is told, and one that carries none is told, too."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError
from headwise.heads.behaviours import (
    BEHAVIOURS,
    CHANGED,
    COUNT,
    NUMBERS,
    Behaviour,
    RoleEffect,
    RoleEffects,
    behaviours_of,
)
from headwise.heads.grammar import RELATED, RELATIONS
from headwise.listeners.effects import _draws
from headwise.nn import MultiHeadAttention, Rope
from small_models import bert, gpt2, hooks_on, llama

RELATION = "relative pronoun > antecedent"  # has one behaviour, as this one:
ONE_RELATION = "verb > auxiliary"
CARRIER = (1, 3)  # the planted head


# Stand-ins


class Words:
    """A tokenizer of words; those in `cut` are two tokens."""

    all_special_ids = (0, 1)

    def __init__(self, cut: str = "", size: int | None = None) -> None:
        self.cut, self.size = cut, size
        self.ids_of_words = {"<start>": 0, "<end>": 1}

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        pieces = text.replace(self.cut, self.cut + " ~") if self.cut else text
        ids = [self.ids_of_words.setdefault(word, len(self.ids_of_words)) for word in pieces.split()]
        return {"input_ids": [0, *(i if self.size is None else 2 + i % (self.size - 2) for i in ids), 1]}


@dataclass
class FakeRole:
    heads: list[tuple[int, int, float]]


@dataclass
class FakeRoles:
    found: Mapping[str, FakeRole]


def role(*heads: tuple[int, int], relation: str = RELATION) -> FakeRoles:
    return FakeRoles({relation: FakeRole([(layer, head, 0.9) for layer, head in heads])})


class Planted(nn.Module):
    """2 layers of 5 heads over words; head 1.3 alone takes a person's number to where the verb is said.

    Channel 0 of a word: it is a person; 1: one (-1) or many (+1); 2: the number as said; the others are noise
    that every other head carries about.
    """

    def __init__(self, tokenizer: Words) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(0)
        for behaviour in behaviours_of(RELATION):
            for pair in behaviour.pairs():
                for text in (*pair.prompts, *pair.answers):
                    tokenizer(text)
        size, width, D = len(tokenizer.ids_of_words), 35, 7
        words = 0.3 * torch.randn(size, width, generator=noise)
        words[:, :3] = 0
        for noun in hw.heads.behaviours.PEOPLE:
            for form, number in ((noun, -1.0), (f"{noun}s", 1.0)):
                if form in tokenizer.ids_of_words:
                    words[tokenizer.ids_of_words[form], :2] = torch.tensor([1.0, number])
        self.embedding = nn.Embedding.from_pretrained(words)
        self.layers = nn.ModuleList(MultiHeadAttention(width, 5, causal=True) for _ in range(2))
        for layer in self.layers:
            for parameter in layer.parameters():
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=noise)
            layer.out_proj.weight.data[2] = 0
        carry = self.layers[1]
        first = slice(CARRIER[1] * D, (CARRIER[1] + 1) * D)
        for projection in (carry.q_proj, carry.k_proj, carry.v_proj):
            projection.weight.data[first] = 0
            projection.bias.data[first] = 0
        carry.q_proj.bias.data[first.start] = 10.0  # every word asks for a person
        carry.k_proj.weight.data[first.start, 0] = 2.0
        carry.v_proj.weight.data[first.start, 1] = 1.0
        carry.out_proj.weight.data[2, first.start] = 1.0
        message = 0.05 * torch.randn(size, width, generator=noise)
        message[:, 2] = 0
        for single, many in NUMBERS:
            message[tokenizer.ids_of_words[single], 2], message[tokenizer.ids_of_words[many], 2] = -1.0, 1.0
        self.values = nn.Parameter(message)
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)[0]
        return x @ self.values.T


@pytest.fixture(scope="module")
def planted() -> tuple[Planted, Words]:
    tokenizer = Words()
    return Planted(tokenizer), tokenizer


# Behaviours


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.name)
def test_a_behaviour_is_made_of_different_pairs_that_differ_in_one_place(behaviour: Behaviour) -> None:
    pairs = behaviour.pairs()
    assert len(set(pairs)) == len(pairs) == COUNT and behaviour.pairs() == pairs
    assert behaviour.relations and all(CHANGED in frame for frame in behaviour.frames)
    for pair in pairs:
        assert pair.prompts[0] != pair.prompts[1] and pair.answers[0] != pair.answers[1]
        assert all(answer.startswith(" ") and answer == answer.rstrip() for answer in pair.answers)
        assert all(text[0].isupper() and not text.endswith(" ") for text in pair.prompts)
        assert not any(mark in text for text in pair.prompts + pair.answers for mark in "{}*_/")


def test_behaviours_have_names_of_their_own_and_relations_of_the_grammar() -> None:
    assert len({behaviour.name for behaviour in BEHAVIOURS}) == len(BEHAVIOURS)
    expected = {f"{two} > {relation}" for relation, two in RELATIONS} | {
        f"{relation} > {two}" for relation, two in RELATIONS
    }
    assert {name for behaviour in BEHAVIOURS for name in behaviour.relations} <= expected | set(RELATED)


class Blind(nn.Module):
    """Says the same whatever it read; it listens to nobody, but has attention."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(6, 3, causal=True)
        self.chances = nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(1)))
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        self.attention(torch.ones(*ids.shape, 6))
        return self.chances.expand(*ids.shape, -1)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.name)
def test_a_model_that_does_not_read_gets_one_half_exactly(behaviour: Behaviour) -> None:
    actual = hw.role_effects(Blind(997), Words(), role((0, 1), relation=behaviour.relations[0]), draws=1)
    (row,) = (row for row in actual if row.behaviour == behaviour.name)
    assert row.accuracy == 0.5 and abs(row.margin) < 1e-6 and row.kind == "not able"


# A planted head


def test_the_head_that_carries_a_behaviour_is_told_from_the_others(planted: tuple[Planted, Words]) -> None:
    actual = hw.role_effects(*planted, role(CARRIER))
    assert [row.behaviour for row in actual] == [each.name for each in behaviours_of(RELATION)]
    near = actual[0]
    assert near.kind == "effect" and near.accuracy == 1.0 and abs(near.off) < 0.1 and near.as_much == 0
    assert near.every_draw and len(near.draws) == 4  # a layer of 5 heads has no more others
    assert near.low <= near.change <= near.high < 0 and near.more_high < 0
    assert "Switching off 1.3 lowers the margin from" in near.verdict
    assert near.verdict.endswith("none of the 4 other choices of heads lowers it as much.")


def test_a_head_that_carries_nothing_is_told_so(planted: tuple[Planted, Words]) -> None:
    (near, *_) = hw.role_effects(*planted, role((0, 2)))
    assert near.kind == "no effect" and "No effect: switching off 0.2 changes the margin from" in near.verdict
    assert near.accuracy == near.off_accuracy == 1.0


def test_others_that_do_as_much_are_counted(planted: tuple[Planted, Words]) -> None:
    """The others are drawn from a layer in which one of them carries it all."""
    (near, *_) = hw.role_effects(*planted, role((1, 0)))
    assert near.as_much >= 1 and near.kind != "effect"
    assert min(near.draws) < -1


def test_draws_are_of_as_many_other_heads_of_the_same_layers(planted: tuple[Planted, Words]) -> None:
    actual = hw.role_effects(*planted, role(CARRIER, (0, 1), (1, 0)), draws=7)
    assert all(len(row.draws) == 7 and not row.every_draw for row in actual)
    assert actual[0].heads == (CARRIER, (0, 1), (1, 0)) and actual[0].kind == "effect"


def test_a_seed_gives_the_same_draws(planted: tuple[Planted, Words]) -> None:
    counts = {0: 9, 1: 9}
    draws = [_draws([(0, 1), (1, 0)], counts, 20, random.Random(seed)) for seed in ("a", "a", "b")]
    assert draws[0] == draws[1] != draws[2]
    for drawn, every in draws:
        assert not every and len({tuple(draw) for draw in drawn}) == 20
        assert all(
            [layer for layer, _ in draw] == [0, 1] and not {(0, 1), (1, 0)} & {*draw} for draw in drawn
        )


def test_half_of_a_layer_at_most_is_switched_off(planted: tuple[Planted, Words]) -> None:
    actual = hw.role_effects(*planted, role((1, 0), CARRIER, (1, 4), (1, 1)))
    assert actual[0].heads == ((1, 0), CARRIER) and actual[0].left_on == ((1, 4), (1, 1))
    assert (
        "Left on, since at most half of a layer's heads are switched off: 1.4, 1.1 (relative pronoun > "
        "antecedent)." in flat(actual)
    )


def flat(actual: RoleEffects) -> str:
    return " ".join(str(actual).split())


# Answers of several tokens


def test_answers_of_several_tokens_are_judged_whole(planted: tuple[Planted, Words]) -> None:
    """Each verb is cut in two, the second half being the same: what is said of it is the same, too."""
    model, words = planted
    cut = Words()
    cut.ids_of_words = words.ids_of_words
    plain = type(cut).__call__
    ending = {words.ids_of_words[verb] for verbs in NUMBERS for verb in verbs}

    def doubled(text: str, **options: object) -> dict[str, list[int]]:
        ids = plain(cut, text, **options)["input_ids"]
        return {"input_ids": [i for token in ids for i in ([token, 5] if token in ending else [token])]}

    class Doubled(Words):
        def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
            return doubled(text)

    actual = hw.role_effects(model, Doubled(), role(CARRIER), draws=1)[0]
    alone = hw.role_effects(model, words, role(CARRIER), draws=1)[0]
    assert actual.pairs == alone.pairs and actual.dropped == 0 and actual.kind == "effect"
    assert actual.accuracy > 0.9 and actual.margin != alone.margin


def test_pairs_that_are_cut_differently_are_dropped_and_counted(planted: tuple[Planted, Words]) -> None:
    model, words = planted
    cut = Words(cut="were")
    cut.ids_of_words = words.ids_of_words
    cut.ids_of_words.setdefault("~", 7)
    actual = hw.role_effects(model, cut, role(CARRIER), draws=1)
    near = actual[0]
    assert near.dropped > 0 and near.pairs + near.dropped == COUNT and near.kind == "effect"
    assert "pairs were left out" in flat(actual)


def test_a_tokenizer_that_leaves_no_pair_is_told_of() -> None:
    class Letters(Words):
        def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
            return {"input_ids": [2 + ord(letter) % 90 for letter in text]}

    actual = hw.role_effects(Blind(97), Letters(), role((0, 1), relation=ONE_RELATION), draws=1)
    (row,) = actual
    assert row.pairs == 0 and row.kind == "too few prompts" and row.draws == () and math.isnan(row.margin)
    assert json.loads(actual.to_json())["effects"][0]["margin"] is None
    assert "too few to measure an effect" in flat(actual)


# Other models


@pytest.mark.parametrize("make", [gpt2, llama], ids=["gpt2", "llama"])
def test_models_of_transformers_are_asked(make: Any) -> None:
    model = make()
    before, hooks = [p.clone() for p in model.parameters()], hooks_on(model)
    actual = hw.role_effects(model, Words(size=47), role((1, 2), relation=ONE_RELATION), draws=2)
    assert all(row.pairs + row.dropped == COUNT and len(row.draws) == 2 for row in actual)
    assert all(map(torch.equal, before, model.parameters())) and hooks_on(model) == hooks


def test_a_decoder_of_ours_is_asked_as_it_is_in_transformers() -> None:
    theirs = llama()
    actual = hw.role_effects(theirs, Words(size=47), role((1, 2), relation=ONE_RELATION), draws=2)
    ours = hw.models.load(theirs).eval()
    same = hw.role_effects(ours, Words(size=47), role((1, 2), relation=ONE_RELATION), draws=2)
    for first, other in zip(actual, same, strict=True):
        for name in ("margin", "off", "change", "low", "high", "more_low", "more_high"):
            assert getattr(first, name) == pytest.approx(getattr(other, name), abs=1e-5)
        assert first.draws == pytest.approx(other.draws, abs=1e-5)


def decoder(**options: Any) -> hw.models.Transformer:
    config = hw.models.TransformerConfig(61, 24, 4, 2, rope=Rope(), **options)
    return hw.models.Transformer(config).eval()


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(61, 15), MultiHeadAttention(15, 3)
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.attention(self.embedding(ids))[0] @ self.embedding.weight.T


def test_what_cannot_be_asked_is_refused() -> None:
    words, some = Words(size=47), role((0, 1))
    for match, model, roles in (
        ("model must be a torch.nn.Module: got Words", words, some),
        ("the result of headwise.roles: got dict", decoder(), {}),
        ("the result of headwise.roles: got NoneType", decoder(), None),
        ("Transformer is in training; use", decoder().train(), some),
        ("kind='encoder', output=None; use a decoder", decoder(kind="encoder"), some),
        (r"got shape \[1, 3\] of BertForSequenceClassification", bert(), some),
        ("the output of BothWays after 10 tokens changes with the token after", BothWays(), some),
        ("head 2.1, and the model has 2 layers; measure", decoder(), role((2, 1))),
        ("head 1.4, and the model has 4 heads in layer 1; measure", decoder(), role((1, 4))),
    ):
        with pytest.raises(ArgumentError, match=match):
            hw.role_effects(model, words, roles)
    with pytest.raises(ArgumentError, match="at least 1: got 0; 20"):
        hw.role_effects(decoder(), words, some, draws=0)
    with pytest.raises(
        ArgumentError, match=r"token 72 for a vocabulary of 61; use the model's own tokenizer"
    ):
        hw.role_effects(decoder(), Words(), role((0, 1), relation="verb > subject"))


# What is told of it


def an_effect(**changes: Any) -> RoleEffect:
    row = RoleEffect(
        RELATION, "what became of an object", ((15, 7),), (), 32, 0, 2.0, 1.7, 2.3, 0.95, 1.0, 0.8, -1.0,
        -1.3, -0.7, (-0.2, 0.1, -0.3), -1.2, -0.4, False,
    )  # fmt: skip
    return replace(row, **changes)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        (
            {},
            "effect",
            "Switching off 15.7 lowers the margin from 2.00 to 1.00 nats (accuracy 0.95 to 0.80); none of "
            "3 random",
        ),
        (
            {"draws": (-1.0, 0.0, 0.1)},
            "no more than others",
            "; 1 of 3 random choices of heads lower it as much, so the effect is not specific to this role.",
        ),
        (
            {"more_high": 0.1},
            "no more than others",
            "; on average, 3 random choices of heads lower it as much, so the effect is not specific to this "
            "role.",
        ),
        (
            {"high": 0.1},
            "no effect",
            "No effect: switching off 15.7 changes the margin from 2.00 to 1.00 nats",
        ),
        (
            {"change": -0.09, "low": -0.1, "high": -0.08},
            "no effect",
            "95% interval of the change: -0.10 to -0.08.",
        ),
        ({"low": 0.1, "high": 0.3, "change": 0.2}, "raised", "Switching off 15.7 raises the margin from"),
        (
            {"margin_low": -0.1},
            "not able",
            "the model does not show this behaviour (margin 2.00 nats, 95% interval -0.10 to 2.30; accuracy",
        ),
        ({"pairs": 7}, "too few prompts", "7 pairs can be used with this tokenizer"),
        ({"draws": (), "more_high": math.nan}, "no others", "; the layer has no other heads to compare with"),
    ],
    ids=["effect", "others", "on average", "none", "small", "raised", "not able", "few", "no others"],
)
def test_verdicts_are_sentences_with_their_numbers(changes: dict[str, Any], kind: str, words: str) -> None:
    row = an_effect(**changes)
    assert row.kind == kind and words in row.verdict and row.verdict.endswith(".")


def test_the_table_fits_80_columns_and_comes_back_from_json() -> None:
    rows = [
        an_effect(),
        an_effect(margin=math.nan, change=-10.25, low=-11.25, high=-10.0, left_on=((15, 1),)),
    ]
    actual = RoleEffects(rows, ["noun > nothing"], "mean")
    assert max(map(len, str(actual).splitlines())) <= 80
    assert "Not measured: noun > nothing (no behaviour is defined for these roles)." in flat(actual)
    back = RoleEffects.from_json(actual.to_json())
    assert back[0] == actual[0] and str(back) == str(actual) and len(back[:]) == 2
    assert math.isnan(back[1].margin) and json.loads(actual.to_json())["effects"][1]["margin"] is None
    assert repr(actual) == "RoleEffects(effect: 2)"


def test_a_data_frame_has_a_row_per_behaviour() -> None:
    pytest.importorskip("pandas")
    frame = RoleEffects([an_effect()], (), "mean").to_pandas()
    assert frame.loc[0, "kind"] == "effect" and frame.loc[0, "as_much"] == 0 and len(frame) == 1


def test_no_role_and_roles_without_behaviours_are_said() -> None:
    assert "No role was found" in str(hw.role_effects(decoder(), Words(size=47), FakeRoles({})))
    actual = hw.role_effects(decoder(), Words(size=47), role((0, 1), relation="a > b"))
    assert not actual.rows and actual.unasked == ("a > b",)
    assert str(actual) == "Not measured: a > b (no behaviour is defined for these roles)."


# Mistakes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_a_model_that_looks_ahead_is_refused_in_few_bits_too(dtype: torch.dtype) -> None:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 37}
    model = BertForMaskedLM(BertConfig(vocab_size=499, **sizes)).eval().to(dtype)
    with pytest.raises(ArgumentError, match="model must be causal: the output of BertForMaskedLM after"):
        hw.role_effects(model, Words(size=499), role((1, 1)), draws=2)


def test_dropout_in_a_part_of_the_model_is_refused() -> None:
    model = gpt2().eval()
    next(module for module in model.modules() if isinstance(module, nn.Dropout)).train()
    with pytest.raises(ArgumentError, match=r"model must be in eval mode: .* is in training"):
        hw.role_effects(model, Words(), role((1, 1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "JSONDecodeError"), ("[]", "TypeError"), ('{"effects": [{}]}', "KeyError: 'relation'")],
)
def test_another_text_is_no_effects(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"text must be the output of RoleEffects.to_json: {message}"):
        RoleEffects.from_json(text)
