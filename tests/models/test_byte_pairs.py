"""A tokenizer of the library tokenizers is called as those of transformers are, and says the same."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from headwise.errors import ArgumentError
from headwise.models.byte_pairs import UNLIMITED, BytePairs
from trained import STORY, a_small_decoder, a_tokenizer, a_vocabulary

pytest.importorskip("tokenizers")

TEXTS = ["The cat that I saw", "", "ran away, and the cat came back.\n", "é 😀"]


@pytest.fixture(scope="module")
def ours() -> BytePairs:
    return BytePairs(a_vocabulary(), model_max_length=41)


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=a_vocabulary(), bos_token="<|start|>")
    made.pad_token = "<|start|>"
    return made


# As transformers calls it

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without special tokens": {"add_special_tokens": False},
    "offsets": {"return_offsets_mapping": True},
    "cut": {"truncation": True, "max_length": 3},
    "cut, bare": {"truncation": True, "max_length": 3, "add_special_tokens": False},
    "padded": {"padding": True, "return_offsets_mapping": True},
    "tensors": {"return_tensors": "pt", "padding": "longest", "verbose": False},
}


@pytest.mark.parametrize("call", CALLS)
def test_it_says_what_transformers_says_of_the_same_file(call: str, ours: BytePairs, theirs: Any) -> None:
    options = CALLS[call]
    texts = [text for text in TEXTS if text or "add_special_tokens" not in options]
    for arguments in (texts, *texts):
        mine, expected = ours(arguments, **options), theirs(arguments, **options)
        names = ["input_ids", "attention_mask", *["offset_mapping"] * ("return_offsets_mapping" in options)]
        for name in names:
            same = mine[name], expected[name]
            assert torch.equal(*same) if call == "tensors" else same[0] == same[1], (arguments, name)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(text=st.text(max_size=31))
def test_any_text_comes_back_from_its_tokens(text: str, ours: BytePairs) -> None:
    ids = ours.encode(text)
    assert ids[0] == 0 and ours.decode(ids, skip_special_tokens=True) == text
    assert ours.decode(torch.tensor(ids[1:], dtype=torch.int64)) == text
    places = ours(text, return_offsets_mapping=True)["offset_mapping"]
    assert len(places) == len(ids) and all(0 <= a <= b <= len(text) for a, b in places)


def test_lists_are_padded_on_the_right_and_say_how_long_they_are(ours: BytePairs) -> None:
    batch = ours(["the cat", "The cat that I saw"], return_tensors="pt", return_offsets_mapping=True)
    B, T = batch["input_ids"].shape
    assert B == 2 and batch["lengths"].tolist() == batch["attention_mask"].sum(1).tolist()
    short = int(batch["lengths"][0])
    assert short < T == int(batch["lengths"][1])
    assert batch["input_ids"][0, short:].tolist() == [0] * (T - short)
    assert batch["offset_mapping"].shape == (2, T, 2) and not batch["offset_mapping"][0, short:].any()
    assert ours(["the cat", "the cat"], return_tensors="pt", padding=False)["input_ids"].shape == (2, short)
    assert ours([], return_tensors="pt")["input_ids"].shape == (0, 0) and ours([])["input_ids"] == []


def test_special_tokens_keep_their_places_where_a_text_is_cut() -> None:
    pytest.importorskip("transformers")
    around = BytePairs.of(a_tokenizer())
    assert (around.bos_token_id, around.eos_token_id, around.unk_token_id) == (256, 257, None)
    ids = around("the cat", truncation=True, max_length=5)["input_ids"]
    assert len(ids) == 5 and (ids[0], ids[-1]) == (256, 257) and around.decode(ids[1:-1]) == "the"


def test_a_text_is_cut_where_the_model_ends_unless_told(ours: BytePairs) -> None:
    assert len(ours(STORY * 9, truncation=True)["input_ids"]) == 41
    assert len(ours(STORY * 9)["input_ids"]) > 41
    assert BytePairs.of(a_vocabulary()).model_max_length == UNLIMITED


# What it knows


def test_roles_of_special_tokens_are_found(ours: BytePairs) -> None:
    roles = (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id, ours.unk_token_id)
    assert roles == (0, None, None, None)
    assert ours.all_special_ids == [0] and ours.vocab_size == len(ours) == 283
    assert repr(ours) == "BytePairs(283 tokens, 0='<|start|>')"


def test_an_unknown_word_and_padding_are_known_where_there_are_any() -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"cat": 0, "[UNK]": 1, "[PAD]": 2}, unk_token="[UNK]"))
    words.add_special_tokens(["[PAD]"])
    words.enable_padding(pad_id=2, pad_token="[PAD]")
    words.enable_truncation(1)
    ours = BytePairs(words)
    assert (ours.unk_token_id, ours.pad_token_id, ours.bos_token_id) == (1, 2, None)
    assert ours("dog")["input_ids"] == [1]
    assert words.truncation and words.padding, "the library's own is left as it was"


def test_tokens_are_shown_as_people_read_them(ours: BytePairs) -> None:
    ids = ours.encode("The cat  saw é\n日")
    assert ours.convert_ids_to_tokens(ids) == (
        ["<|start|>", "The", "cat", "␣", "saw", "␣", "<C3>", "<A9>", "\n", "<E6>", "<97>", "<A5>"]
    )
    assert ours.convert_ids_to_tokens(ids[2]) == "cat"
    assert ours.convert_ids_to_tokens(torch.tensor(ids[1:3])) == ["The", "cat"]


def test_it_is_written_copied_and_pickled(ours: BytePairs, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(ours.to_json(), "utf-8")
    read = BytePairs.from_file(tmp_path / "tokenizer.json")
    for other in (read, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other(TEXTS) == ours(TEXTS)


# What it refuses


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (3, {}, "a string or a list of strings: got int"),
        (["a", 3], {}, "got a list with a int in it"),
        ("a", {"return_tensors": "np"}, "return_tensors must be 'pt' or None: got 'np'"),
        ("a", {"padding": "max_length"}, "padding must be True, False or 'longest': got 'max_length'"),
        ("a", {"max_length": 7}, "max_length must be given with truncation=True: got 7 without"),
        ("a", {"truncation": "only_first"}, "truncation must be True or False: got 'only_first'"),
        ("a", {"truncation": True, "max_length": 1}, "above 1, the number of special tokens: got 1"),
        (["a", "b c"], {"return_tensors": "pt", "padding": False}, r"texts of lengths \[2, 3\]: got False"),
    ],
)  # fmt: skip
def test_a_call_it_cannot_answer_is_refused(
    text: Any, options: dict[str, Any], message: str, ours: BytePairs
) -> None:
    with pytest.raises(ArgumentError, match=message):
        ours(text, **options)


def test_what_is_no_token_or_no_tokenizer_is_refused(ours: BytePairs, tmp_path: Path) -> None:
    for tokens in (283, [0, -1]):
        with pytest.raises(ArgumentError, match=r"ids below 283: got (283|-1)"):
            ours.decode(tokens)
    with pytest.raises(ArgumentError, match=r"one sequence: got a tensor \[1, 2\]"):
        ours.decode(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="clean_up_tokenization_spaces must be False: got True"):
        ours.decode([3], clean_up_tokenization_spaces=True)
    with pytest.raises(ArgumentError, match="a Tokenizer of the library tokenizers: got str"):
        BytePairs("tokenizer.json")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="of the library tokenizers: got int"):
        BytePairs.of(3)
    with pytest.raises(ArgumentError, match=r"none.json' cannot be read"):
        BytePairs.from_file(tmp_path / "none.json")
    with pytest.raises(TypeError, match="text_pair"):
        ours("a", text_pair="b")  # type: ignore[call-arg]


# Tokenizers of other kinds


def bare(kind: str, *entries: Any, **options: Any) -> Any:
    import tokenizers

    made = tokenizers.Tokenizer(getattr(tokenizers.models, kind)(*entries, **options))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def test_ids_with_holes_between_them_count_up_to_the_largest() -> None:
    tokenizer = BytePairs(bare("WordLevel", {"to": 0, "be": 11, "?": 3}, unk_token="?"))
    assert tokenizer.vocab_size == len(tokenizer) == 12
    assert tokenizer.decode([11]) == "be"
    with pytest.raises(ArgumentError, match="12 entries for a vocabulary of 5"):
        a_small_decoder(vocab_size=5).save("nowhere", tokenizer)


def test_a_start_token_is_found_where_the_vocabulary_lacks_the_letter_a() -> None:
    import tokenizers

    inner = bare("BPE", {"x": 0, "y": 1, "<s>": 2}, [])
    inner.add_special_tokens(["<s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 2)]
    )
    tokenizer = BytePairs(inner)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (2, None)


def test_a_vocabulary_without_an_unknown_token_says_so_of_a_word() -> None:
    tokenizer = BytePairs(bare("WordLevel", {"to": 0, "be": 1}))
    assert tokenizer("to be")["input_ids"] == [0, 1]
    with pytest.raises(ArgumentError, match=r"only words of the tokenizer: got 'or not' .*UNK"):
        tokenizer("or not")


def test_the_unknown_token_of_a_unigram_is_known() -> None:
    tokenizer = BytePairs(bare("Unigram", [("x", -1.0), ("?", 0.0)], 1))
    assert tokenizer.unk_token_id == 1 == tokenizer("q")["input_ids"][0]


def test_halves_of_letters_and_ids_that_are_none_are_refused(ours: BytePairs) -> None:
    with pytest.raises(ArgumentError, match=r"valid Unicode: got a lone surrogate, '\\udcff'"):
        ours("to \udcff be")
    for wrong in (1.5, "a"):
        with pytest.raises(ArgumentError, match=f"tokens must be whole numbers: got {wrong!r}"):
            ours.decode([wrong])  # type: ignore[list-item]
