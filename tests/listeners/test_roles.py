"""Roles: heads that look from a word to the one it belongs to, chosen on one half and judged on the other."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import ArgumentError
from headwise.heads.grammar import Sentence, sentences
from headwise.heads.roles import Role, Roles, judge
from headwise.listeners import role_measurement
from headwise.models import Transformer, TransformerConfig
from headwise.nn import Rope
from trained import mini, minilm


@cache
def vocabulary() -> dict[str, int]:
    words = {word for sentence in sentences(400) for word in sentence.words} | {"Well", ","}
    pieces = {piece for word in words for piece in re.findall(".{1,5}", word)}
    return {piece: number + 2 for number, piece in enumerate(sorted(pieces))}


class Tokenizer:
    """Words in pieces of at most five letters, with offsets; a start token where asked for."""

    def __init__(self, start: str = "") -> None:
        self.ids = dict(vocabulary())
        self.start = start  # "told": it has one; "added": it puts it before every text
        self.bos_token_id = 0 if start else None
        self.all_special_ids = [0] if start else []
        self.unk_token_id = 1

    def __call__(self, text: str, **options: object) -> dict[str, Any]:
        actual = [
            (match.start() + piece.start(), match.start() + piece.end())
            for match in re.finditer(r"'s|\w+|[.,?]", text)
            for piece in re.finditer(".{1,5}", match[0])
        ]
        ids, front = [self.ids.get(text[a:b], 1) for a, b in actual], [0] if self.start == "added" else []
        return {"input_ids": front + ids, "offset_mapping": [(0, 0)] * len(front) + actual}


def a_model(seed: int = 0, kind: Any = "encoder", heads: int = 3) -> Transformer:
    torch.manual_seed(seed)
    config = TransformerConfig(
        vocab_size=997, d_model=8 * heads, num_heads=heads, num_layers=2, d_ff=31, kind=kind, rope=Rope(),
    )  # fmt: skip
    return Transformer(config).eval()


def measured(model: Any, tokenizer: Any = None, **options: Any) -> Roles:
    return hw.roles(
        model, tokenizer or Tokenizer(), **{"sentences": few(), "keep": False, "batch": 64} | options
    )


@cache
def few() -> list[Sentence]:
    """Lists of nouns of one length, as many in each half."""
    alike = [s for s in sentences(400) if any("related" in name for name, _, _ in s.relations)]
    lengths = Counter(len(s.words) for s in alike)
    chosen = [s for s in alike if len(s.words) == lengths.most_common(1)[0][0]]
    return [replace(chosen[n % len(chosen)], half=n // 24, group=n) for n in range(48)]


# Judging


def looking(rule: Callable[[Sentence, int], int], drawn: list[Sentence]) -> list[Tensor]:
    """The heaviest words of two heads of one layer: by a rule, and always the first word."""
    whole = []
    for sentence in drawn:
        words = [rule(sentence, at) for at in range(len(sentence.words))]
        whole.append(torch.tensor([[words, [0] * len(words)]]))
    return whole


def right(sentence: Sentence, at: int) -> int:
    """Where the verb is that this object belongs to."""
    return next((b for name, a, b in sentence.relations if (name, a) == (OBJECT, at)), -1)


def nearest(sentence: Sentence, at: int) -> int:
    return max((b for b in range(at) if sentence.classes[b] == "verb"), default=-1)


OBJECT = "object > verb"


@pytest.fixture(scope="module")
def drawn() -> list[Sentence]:
    requested = (
        OBJECT,
        "noun > determiner",
        "determiner > noun",
        "pronoun > antecedent",
        "antecedent > reflexive",
    )
    return [
        replace(s, relations=tuple(message for message in s.relations if message[0] in requested))
        for s in sentences(240)
    ]


def test_a_head_that_is_always_right_is_found(drawn: list[Sentence]) -> None:
    roles = judge(drawn, looking(right, drawn), [0])
    role = roles[OBJECT]
    assert role.found and (role.layer, role.head, role.share, role.high) == (0, 0, 1.0, 1.0)
    cases = [s for s in drawn if s.half == 1 for name, _, _ in s.relations if name == OBJECT]
    assert role.cases == len(cases) and 0.9 < role.low < 1
    assert sum(n for _, n in role.by_distance.values()) == role.cases
    assert role.heads == [(0, 0, 1.0)] and roles.of(0, 0) == [OBJECT] == list(roles.found)
    assert roles.of(0, 1) == [] and roles.scores[OBJECT].tolist() == [[1.0, 0.0]]


def test_a_head_that_follows_a_rule_is_not_found(drawn: list[Sentence]) -> None:
    role = judge(drawn, looking(nearest, drawn), [0])[OBJECT]
    assert not role.found and role.heads == []
    assert role.rule == "the nearest verb before" and role.share == role.rules[role.rule] > 0.5
    offset = f"{role.rules[role.offset]:.0%}"
    assert role.verdict == (
        f"not found: the nearest verb before the word is right in {role.share:.0%} of cases; the best fixed "
        f"offset is right in {offset}"
    )
    assert role.class_rule == role.rule != role.offset and role.beats_offset


def test_tables_show_the_best_offset_and_the_best_rule_with_word_classes(drawn: list[Sentence]) -> None:
    """A verdict rested on word classes, and the table named the best offset alone."""
    roles = judge(drawn, looking(nearest, drawn), [0], title="t")
    role = roles[OBJECT]
    offset, by_class = role.rules[role.offset], role.rules[role.class_rule]
    assert offset < by_class == max(role.rules.values())
    (line,) = (line for line in str(roles).splitlines() if line.startswith(f"{OBJECT} "))
    assert line.endswith(f" {offset:.2f} {by_class:.2f} before")
    assert "the best rule that uses classes of words" in str(roles)
    pytest.importorskip("rich")
    assert re.search(rf" {OBJECT} .* {offset:.2f} +{by_class:.2f} +no ", str(roles.table()))
    pytest.importorskip("pandas")
    row = roles.to_pandas().loc[OBJECT]
    assert (row["offset"], row["class_rule"]) == (role.offset, role.class_rule)
    assert (row["offset_share"], row["class_rule_share"]) == (offset, by_class)


def test_a_head_is_chosen_on_one_half_and_judged_on_the_other(drawn: list[Sentence]) -> None:
    def in_first(sentence: Sentence, at: int) -> int:
        return right(sentence, at) if sentence.half == 0 else -1

    both = zip(looking(in_first, drawn), looking(right, drawn), strict=True)
    # the second head is right in both halves, but for one case of the first
    heaviest = [torch.cat([first[:, :1], other[:, :1]], 1) for first, other in both]
    spoiled = next(n for n, s in enumerate(drawn) if any(name == OBJECT for name, _, _ in s.relations))
    heaviest[spoiled][:, 1] = -1
    role = judge(drawn, heaviest, [0])[OBJECT]
    assert (role.head, role.share, role.found) == (0, 0.0, False)


def test_a_rule_that_is_always_right_leaves_nothing_to_find(drawn: list[Sentence]) -> None:
    role = judge(drawn, looking(right, drawn), [0])["noun > determiner"]
    always = "the nearest determiner before the word is always right"
    offset = f"the best fixed offset is right in {role.rules[role.offset]:.0%}"
    assert role.verdict == f"not found: {always}; {offset}"


def test_a_head_must_move_with_the_pronoun(drawn: list[Sentence]) -> None:
    def first_person(sentence: Sentence, at: int) -> int:
        """Right for he where the man comes first, whatever the pronoun."""
        return next((n for n, kind in enumerate(sentence.classes) if kind == "noun"), -1)

    role = judge(drawn, looking(first_person, drawn), [0])["pronoun > antecedent"]
    assert role.moves == 0 and not role.found and role.share <= 0.5

    def moving(sentence: Sentence, at: int) -> int:
        name = "pronoun > antecedent"
        return next((b for message, a, b in sentence.relations if (message, a) == (name, at)), -1)

    role = judge(drawn, looking(moving, drawn), [0])["pronoun > antecedent"]
    assert role.moves == 1 and role.found and max(role.rules.values()) <= 0.5


def test_cases_of_one_group_count_as_one_draw(drawn: list[Sentence]) -> None:
    """A sentence said four times over tells no more than once, and its interval is no narrower."""

    def sometimes(sentence: Sentence, at: int) -> int:
        return right(sentence, at) if len(sentence.words) % 3 else -1

    once = judge(drawn, looking(sometimes, drawn), [0])[OBJECT]
    four = drawn * 4
    often = judge(four, looking(sometimes, four), [0])[OBJECT]
    assert often.cases == 4 * once.cases and often.share == pytest.approx(once.share)
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=0.35)
    apart = [replace(s, group=number) for number, s in enumerate(four)]
    narrow = judge(apart, looking(sometimes, apart), [0])[OBJECT]
    assert narrow.high - narrow.low < 0.7 * (often.high - often.low)


def test_sentences_of_no_group_are_draws_of_their_own_and_one_group_tells_nothing(
    drawn: list[Sentence],
) -> None:
    apart = [replace(s, group=None) for s in drawn]
    each = [replace(s, group=number) for number, s in enumerate(drawn)]
    single_group = [replace(s, group=5) for s in drawn]
    assert judge(apart, looking(right, apart), [0]) == judge(each, looking(right, each), [0])
    assert judge(apart, looking(right, apart), [0])[OBJECT].found
    role = judge(single_group, looking(right, single_group), [0])[OBJECT]
    assert (
        not role.found
        and role.verdict == "not found: the difference from the best rule may be chance"
        and role.low < 0.3
    )


def test_a_causal_model_is_asked_only_about_what_it_sees(drawn: list[Sentence]) -> None:
    roles = judge(drawn, looking(right, drawn), [0], causal=True)
    assert roles[OBJECT].found and set(roles[OBJECT].rules) >= {"the nearest verb before", "the first verb"}
    assert "determiner > noun" not in roles and roles.get("determiner > noun") is None
    with pytest.raises(
        ArgumentError, match="'determiner > noun' was not measured, since the model does not look ahead"
    ):
        roles["determiner > noun"]
    with pytest.raises(ArgumentError, match="relation must be a known one: got 'object > werb'"):
        roles["object > werb"]


def test_a_relation_with_few_cases_is_not_asked() -> None:
    few = sentences(60)
    assert (
        "to test it; each needs 20)" in judge(few, looking(right, few), [0]).unasked["possessor > possessed"]
    )


# Measuring


def test_a_word_in_pieces_is_looked_at_in_sum_and_looks_on_average() -> None:
    torch.manual_seed(0)
    weights = torch.rand(1, 2, 7, 7)
    pieces = [[1], [2, 3], [4], [5, 6]]  # token 0 is special
    read = role_measurement._TokenizedSentence(
        A_SENTENCE, list(range(7)), pieces
    )  # its last word is a full stop
    words = role_measurement._Words()
    words.expect([read])
    call = type("Call", (), {"kind": "self", "path": "a", "weights": hw.AttentionMap.from_weights(weights)})
    words.hear(call)  # type: ignore[arg-type]
    top, heaviest = words.top_words["a"]
    for h in range(2):
        for at, mine in enumerate(pieces):
            others = {
                n: float(weights[0, h][mine][:, theirs].sum(1).mean())
                for n, theirs in enumerate(pieces[:3])
                if n != at
            }
            assert top[0, h, at] == max(others, key=others.__getitem__)
            torch.testing.assert_close(float(heaviest[0, h, at]), max(others.values()))


def test_two_words_that_are_equally_heavy_are_no_hit() -> None:
    sentence = Sentence(("The", "dog", "slept"), ("determiner", "noun", "verb"), ())
    words = role_measurement._Words()
    words.expect([role_measurement._TokenizedSentence(sentence, [0, 1, 2], [[0], [1], [2]])])
    even = hw.AttentionMap.from_weights(torch.full((1, 1, 3, 3), 1 / 3))
    words.hear(type("Call", (), {"kind": "self", "path": "a", "weights": even}))  # type: ignore[arg-type]
    assert words.top_words["a"][0].tolist() == [[[-1, -1, -1]]]


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_random_weights_have_no_role(kind: str) -> None:
    roles = measured(a_model(kind=kind), Tokenizer("told"), sentences=150)
    assert roles.causal == (kind == "decoder") and len(roles) >= 3
    assert list(roles.found) == []


@pytest.mark.parametrize("start", ["", "told", "added"])
def test_a_causal_model_begins_with_something_that_is_no_candidate(start: str) -> None:
    arguments: list[Tensor] = []
    model, tokenizer = a_model(kind="decoder"), Tokenizer(start)
    hook = model.register_forward_pre_hook(lambda _, args: arguments.append(args[0]))
    roles = measured(model, tokenizer)
    hook.remove()
    first = 0 if start else tokenizer.ids["Well"]
    assert roles.causal and all((ids[:, 0] == first).all() for ids in arguments[1:])
    assert not (start and (arguments[1][:, 1] == 0).any())


def test_how_many_run_at_once_changes_nothing() -> None:
    model = a_model().double()
    assert measured(model, batch=13) == measured(model, batch=7)


def test_a_model_in_training_is_measured_in_eval_mode_and_left_as_it_was() -> None:
    model = a_model().train()
    model.encoder.layers[0].eval()  # type: ignore[union-attr, index]
    before = {name: module.training for name, module in model.named_modules()}
    roles = measured(model)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert roles == measured(model.eval())


def test_sentences_with_unknown_words_are_left_out() -> None:
    tokenizer = Tokenizer()
    drawn = few()
    noun = next(
        word for sentence in drawn for word in sentence.words[::-1] if len(word) > 3 and word in tokenizer.ids
    )
    del tokenizer.ids[noun]
    roles = measured(a_model(), tokenizer)
    removed = sum(noun in sentence.words for sentence in drawn)
    assert roles.left_out == removed > 0 and roles.sentences == len(drawn) - removed
    assert f"({removed} more sentences left out: the tokenizer does not know some of their words)" in str(
        roles
    )
    tokenizer.ids = {}
    with pytest.raises(ArgumentError, match=f"all {len(drawn)} sentences have an unknown word"):
        measured(a_model(), tokenizer)


# Refusals


class Slow:
    all_special_ids = ()

    def __call__(self, text: str, **options: object) -> dict[str, Any]:
        if "return_offsets_mapping" in options:
            raise NotImplementedError
        return {"input_ids": [1]}


class Whole(Tokenizer):
    def __call__(self, text: str, **options: object) -> dict[str, Any]:
        return {"input_ids": [2], "offset_mapping": [(0, len(text))]}


class Deaf(Tokenizer):
    def __call__(self, text: str, **options: object) -> dict[str, Any]:
        return {"input_ids": [2], "offset_mapping": [(0, 1)]}


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (Slow, r"tokenizer must return the offsets of tokens: Slow returns none \(NotImplementedError\)"),
        (Whole, "a token of Whole is '[A-Z]"),
        (Deaf, "tokenizer must give every word a token: '[a-z]+' has none in Deaf"),
    ],
)
def test_a_tokenizer_that_does_not_know_its_words_is_refused(tokenizer: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        measured(a_model(), tokenizer())


def test_what_cannot_be_measured_is_refused() -> None:
    model, tokenizer = a_model(), Tokenizer()
    short, strange = a_model(), Tokenizer()
    short.config = replace(model.config, max_length=5)
    strange.ids["the"] = 2003
    for match, requested, read_by, options in (
        ("batch must be a whole number of at least 1: got 0", model, tokenizer, {"batch": 0}),
        ("sentences must be at least 60: got 7", model, tokenizer, {"sentences": 7}),
        ("sentences must not be empty: got 0", model, tokenizer, {"sentences": []}),
        (r"grammar.Sentence: got 'The dog slept\.'", model, tokenizer, {"sentences": ["The dog slept."]}),
        ("grammar.Sentence: got 700.0", model, tokenizer, {"sentences": 700.0}),
        ("grammar.Sentence: got None", model, tokenizer, {"sentences": None}),
        (r"seed must be a whole number: got \[7\]", model, tokenizer, {"seed": [7]}),
        ("one text: Transformer is an encoder-decoder", a_model(kind="encoder-decoder"), tokenizer, {}),
        ("token 2003 for a vocabulary of 997", model, strange, {}),
        (r"must read whole sentences: \d\d tokens for max_length = 5", short, tokenizer, {}),
        ("model must be a torch.nn.Module: got int", 7, tokenizer, {}),
    ):
        with pytest.raises(ArgumentError, match=match):
            measured(requested, read_by, **options)


# Kept results


@pytest.fixture
def roles_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headwise" / "roles"


class Counted:
    """How many sentences a model has read."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.read = 0
        model.register_forward_pre_hook(self.count)

    def count(self, model: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        self.read += len(args[0])

    def since(self) -> int:
        read, self.read = self.read, 0
        return read


KEEP = {"keep": True}


def test_what_was_measured_is_kept_and_proved_before_it_is_believed(roles_folder: Path) -> None:
    model = a_model()
    counted = Counted(model)
    roles = measured(model, **KEEP)
    assert counted.since() >= 47 and len(list(roles_folder.iterdir())) == 1
    assert measured(model, **KEEP) == roles and counted.since() == 7  # one for causality, six for the proof
    assert measured(model, **KEEP | {"sentences": few()[:-1]}) != roles and counted.since() >= 47
    with torch.no_grad():
        next(model.parameters())[5] += 0.1
    measured(model, **KEEP)
    assert counted.since() >= 47 and len(list(roles_folder.iterdir())) == 3


def test_a_changed_model_is_not_answered_from_what_was_kept(roles_folder: Path) -> None:
    """Ablated or hooked, its weights are what they were: only a run tells."""
    model = a_model()
    plain, counted = measured(model, **KEEP), Counted(model)
    with hw.ablate(model, {0: [0]}):
        assert measured(model, **KEEP) == measured(model) != plain
    counted.since()
    assert measured(model, **KEEP) == plain  # what the ablated one left there is not believed, either
    assert counted.since() >= 47
    layer = model.encoder.layers[0]  # type: ignore[union-attr, index]
    hook = layer.register_forward_hook(lambda module, args, output: output + torch.arange(24) / 5)
    assert measured(model, **KEEP) == measured(model) != plain
    hook.remove()
    assert measured(model, **KEEP) == plain


def test_nothing_is_read_or_written_without_keep(roles_folder: Path) -> None:
    measured(a_model())
    assert not roles_folder.exists()
    roles = measured(a_model(), **KEEP)
    (file,) = roles_folder.iterdir()
    message = json.loads(file.read_text())
    message["roles"] = message["roles"].replace("Transformer", "Impostor")
    file.write_text(json.dumps(message))
    assert "Impostor" in str(measured(a_model(), **KEEP).title)
    assert measured(a_model()) == roles


def test_a_damaged_file_is_measured_anew_and_a_full_disk_is_told_of(roles_folder: Path) -> None:
    roles = measured(a_model(), **KEEP)
    (file,) = roles_folder.iterdir()
    message = json.loads(file.read_text())
    for text in ("[]", "[" * 100_000, json.dumps(message | {"proof": 7})):
        file.write_text(text)
        assert measured(a_model(), **KEEP) == roles and len(file.read_text()) > 100
    file.unlink()
    roles_folder.rmdir()
    roles_folder.write_text("in the way")
    with pytest.warns(UserWarning, match="roles were measured but could not be saved"):
        assert measured(a_model(), **KEEP) == roles


# As text and tables


def test_what_is_printed_fits_and_cuts_no_number(drawn: list[Sentence]) -> None:
    roles = judge(
        drawn, looking(right, drawn), ["encoder.blocks.3.attention.with_a_long_name"], title="A model"
    )
    for causal in (False, True):
        roles = judge(drawn, looking(right, drawn), roles.layers, title="A model", causal=causal)
        lines = str(roles).splitlines()
        assert max(map(len, lines)) <= 80 and lines[0].startswith(
            f"A model: 1 of {len(roles)} relations found"
        )
        for name, role in roles.items():
            (line,) = (line for line in lines if line.startswith(f"{name} "))
            for number in (role.share, role.low, role.high, role.rules[role.offset]):
                assert f"{number:.2f}" in line
            assert f" {role.cases} " in line
        assert "Not found: a simple rule is always right" in lines and "  head 0 of encoder.blocks.3" in str(
            roles
        )
    assert "Not measured, since the model does not look ahead" in str(roles)


def test_a_table_says_of_each_relation_what_was_found(drawn: list[Sentence]) -> None:
    console = pytest.importorskip("rich.console")
    roles = judge(drawn, looking(right, drawn), [0], causal=True, title="[red]A model")
    shown = str(roles.table())
    assert "[red]A model" in shown and re.search(r" 0\.\d\d +yes best class rule: before", shown)
    assert re.search(r" no the nearest determiner before the word is always right", shown)
    assert "not measured, since the model does not look ahead" in shown
    narrow = console.Console(file=io.StringIO(), width=80)
    narrow.print(roles.table())
    for role in roles.values():
        rules = f"{role.rules[role.offset]:6.2f} {role.rules[role.class_rule]:5.2f} "
        whole = f"{role.low:.2f}-{role.high:.2f} {role.cases:5d} {rules}"
        assert f" {role.share:.2f} {whole}" in narrow.file.getvalue()


def test_roles_as_json_and_pandas(drawn: list[Sentence]) -> None:
    heaviest = looking(right, drawn)
    heaviest = [torch.cat([words, torch.full_like(words, -2)]) for words in heaviest]  # a layer without heads
    roles = judge(drawn, heaviest, [0, "b"], causal=True, title="t")
    back = Roles.from_json(roles.to_json())
    assert back == roles != judge(drawn, heaviest, [0, "c"], causal=True, title="t")
    assert back.scores[OBJECT].isnan().tolist() == [[False] * 2, [True] * 2]
    assert (
        isinstance(back[OBJECT], Role) and back[OBJECT].by_distance.keys() == roles[OBJECT].by_distance.keys()
    )
    pandas = pytest.importorskip("pandas")
    table = roles.to_pandas()
    assert isinstance(table, pandas.DataFrame) and bool(table.loc[OBJECT, "found"])
    assert repr(roles) == f"Roles(1 of {len(roles)} found)"
    for text in ("{}", "[1]", "x", '{"format": "other"}'):
        with pytest.raises(ArgumentError, match=r"text must be the output of Roles.to_json"):
            Roles.from_json(text)


# Trained models


@pytest.mark.slow
def test_minilm_has_at_least_six_roles_and_its_kept_ones_are_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer, _ = minilm()
    roles = hw.roles(model, tokenizer, keep=False)
    assert len(roles.found) >= 6 and roles["pronoun > antecedent"].share > 0.9
    for role in roles.found.values():
        assert all(role.share - share >= 0.15 for share in role.rules.values()) and role.low > 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert set(hw.roles(model, tokenizer).found) == set(roles.found)
    assert list(tmp_path.iterdir()) == []  # it came with the package


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_random_weights_in_the_shape_of_trained_models_have_no_role(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, tokenizer, _ = minilm()
    torch.manual_seed(3)
    if family == "bert":
        random = transformers.BertModel(model.config)
    else:  # as SmolLM2-135M, with a tenth of its layers
        random = transformers.LlamaModel(
            transformers.LlamaConfig(
                vocab_size=model.config.vocab_size, hidden_size=576, intermediate_size=1536,
                num_hidden_layers=3, num_attention_heads=9, num_key_value_heads=3,
            )
        )  # fmt: skip
    roles = hw.roles(random, tokenizer, keep=False, sentences=300)
    assert roles.causal == (family == "llama") and list(roles.found) == []


# Mistakes, and things that go wrong


A_SENTENCE = Sentence(("The", "dog", "slept", "."), ("determiner", "noun", "verb", "."), ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relations": (("a > b", 1, -1),)}, "'a > b' joins 1 and -1 of 4"),  # -1: a head that looks nowhere
        ({"relations": (("a > b", 4, 1),)}, "'a > b' joins 4 and 1 of 4"),
        ({"relations": (("a > b", 2, 2),)}, "'a > b' joins 2 and 2 of 4"),
        ({"half": 2}, "half must be 0 .* or 1 .*: got 2"),
        ({"classes": ("noun",)}, "one per word: got 1 for the words .*'dog'"),
    ],
)
def test_a_sentence_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(A_SENTENCE, **change)


def test_a_user_without_a_home_hears_that_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.warns(
        UserWarning, match="be saved: .* the user has no home folder; set XDG_CACHE_HOME"
    ) as caught:
        measured(a_model(), keep=True)
    assert caught[0].filename == __file__


def test_forwards_in_another_thread_are_not_counted() -> None:
    model = a_model(kind="decoder")
    alone = measured(model)

    def elsewhere(module: Any, args: Any, output: Any) -> None:
        if current_thread() is main_thread():
            thread = Thread(target=model, args=(args[0].flip(-1),))
            thread.start()
            thread.join()

    model.register_forward_hook(elsewhere)
    assert measured(model) == alone


def test_weights_that_are_no_numbers_are_told() -> None:
    model = a_model(kind="decoder")
    with torch.no_grad():
        model.decoder.layers[1].attention.q_proj.weight[3, 5] = torch.nan
    with pytest.raises(
        ArgumentError, match=r"compute finite weights: those of decoder.layers.1.attention are NaN"
    ):
        measured(model)


def test_a_model_of_pictures_is_told_so() -> None:
    model: Any = a_model()
    model.main_input_name = "pixel_values"  # as transformers' say
    with pytest.raises(ArgumentError, match="model must read text: Transformer reads pixel_values"):
        measured(model)


def test_how_much_a_model_generates_is_no_limit_of_what_it_reads() -> None:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=997, n_embd=6, n_layer=1, n_head=3, bos_token_id=0, eos_token_id=0)
    config.max_length = 3
    assert measured(GPT2Model(config)).causal


def test_how_many_were_left_out_is_todays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    strange = replace(A_SENTENCE, words=("The", "xylograph", "slept", "."))
    model = a_model()
    assert measured(model, keep=True).left_out == 0
    assert measured(model, keep=True, sentences=[*few(), strange]).left_out == 1


def test_no_roles_at_all_are_a_table_without_rows() -> None:
    pytest.importorskip("pandas")
    assert Roles({}, {}, []).to_pandas().shape == (0, 15)


def test_readme_says_of_roles_what_was_measured() -> None:
    """It quoted a role of MiniLM right after it had loaded mini, which has others."""
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text("utf-8").split())
    role = hw.roles(*minilm()[:2]).found["pronoun > antecedent"]
    layer, head, share = role.heads[0]
    cases = f"{share * role.cases:.0f} of {role.cases} test sentences"
    rule = f"the best simple rule finds it in {max(role.rules.values()) * role.cases:.0f}"
    assert f"head {layer}.{head} attends from a pronoun to its antecedent in {cases}; {rule}" in readme
    roles = hw.roles(*mini()[:2]).found
    assert list(roles) == ["possessed > possessor", "relative pronoun > antecedent"]
    assert {(role.layer, role.head) for role in roles.values()} == {(2, 4)}
    named = "attends from a relative pronoun to its antecedent and from a possessed noun to its possessor"
    assert f"In mini, head 2.4 (head 4 of layer 2) {named}" in readme
