"""How texts are shown: tokens as readers know them, letters in the order in which they are drawn."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest

from headwise.models.pretrained import token_name
from headwise.show import texts
from headwise.show.texts import plain, readable


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (["<|endoftext|>", "The", "Ġfox", "Ċ", "Ġ", "ĠĠ"], ["<|endoftext|>", "The", "fox", "\n", "␣", "␣"]),
        (["Ġcaf", "Ã©", "ĠÅ", "ĵ"], ["caf", "é", "<C5>", "<93>"]),
        (["Ã©", "tÃ©"], ["é", "té"]),  # nothing but letters beyond ASCII says so
        (["ðŁĺ", "Ģ", "Ġok"], ["<F0><9F><98>", "<80>", "ok"]),
        (["[CLS]", "æĹ¥æľ¬", "Ġ", "[SEP]"], ["[CLS]", "日本", "␣", "[SEP]"]),
        (["<s>", "▁The", "▁", "s", "<0xC3>", "<0x0A>"], ["<s>", "The", "␣", "s", "<C3>", "\n"]),
        (["the</w>", "quick"], ["the", "quick"]),
        (["play", "##ing", "[SEP]"], ["play", "##ing", "[SEP]"]),
        (["café", "naïve", "Ärger"], ["café", "naïve", "Ärger"]),
        (["Ġorġ", "mar"], ["Ġorġ", "mar"]),  # Maltese: as bytes it would hold a control character
        (["日本", "Ġthe"], ["日本", "Ġthe"]),  # no such vocabulary writes 日
        (["", "a b"], ["", "a b"]),
        ([], []),
    ],
)
def test_tokens_are_shown_as_readers_know_them(tokens: list[str], shown: list[str]) -> None:
    assert readable(tokens) == shown
    assert readable(shown) == shown  # what was made readable stays so


@pytest.mark.parametrize(("entry", "shown"), [("ĠÃ", "<C3>"), ("<0xC3>", "<C3>"), ("日", "\ufffd")])
def test_a_token_that_is_part_of_a_letter_is_named_by_its_bytes(entry: str, shown: str) -> None:
    tokenizer = SimpleNamespace(
        decode=lambda tokens, **options: "\ufffd", convert_ids_to_tokens=lambda token: entry
    )
    assert token_name(tokenizer, 7) == shown


def test_plain_text_is_one_short_line() -> None:
    assert plain("a\r\nb\tc\u2028d") == "a↵↵b⇥c�d"
    assert plain("abcdef", 6) == "abcdef"
    assert plain("abcdefg", 6) == "abcde…"


# Letters in pictures


def test_right_to_left_letters_are_turned_round_and_joined() -> None:
    pytest.importorskip("matplotlib")
    from headwise.show.texts import in_drawn_order

    assert in_drawn_order("abc") == "abc"
    assert in_drawn_order("שלום") == "םולש"
    assert in_drawn_order("a שלום עולם 12") == "a םלוע םולש 12"
    assert in_drawn_order("שׁ") == "שׁ"  # a mark stays behind its letter
    assert in_drawn_order("بيت") == "\ufe96\ufef4\ufe91"  # initial, medial, final, from the right
    assert in_drawn_order("لا") == "\ufefb"  # one form for both
    assert in_drawn_order("دار") == "\ufead\ufe8d\ufea9"  # letters that join nothing after them


def test_what_no_font_has_is_a_square_and_matplotlib_is_not_asked_for_it() -> None:
    pytest.importorskip("matplotlib")
    from headwise.show.texts import MISSING, families, in_bold, label

    assert label("a\U0010ffffb", 9) == f"a{MISSING}b"
    assert label("שלום", 9) and MISSING not in label("שלום", 9)
    assert families()[0] == families(bold=True)[0] == "DejaVu Sans"
    assert in_bold("layer 0")


def test_letters_are_looked_for_in_the_other_fonts_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were a font with another letter, and one that has pictures in place of outlines."""
    pytest.importorskip("matplotlib")
    from headwise.show import texts

    letters = {"first": {97}, "pictures": {97, 0x1F44D}, "outlines": {0x1F44D}}
    faces = {texts.FIRST: {400: "first", 700: "first"}, "A": {400: "pictures"}, "B": {400: "outlines"}}
    monkeypatch.setattr(texts, "_faces", lambda: faces)
    monkeypatch.setattr(texts, "_letters", lambda file: letters[file])
    monkeypatch.setattr(texts, "_has_outline", lambda file, char: file == "outlines")
    monkeypatch.setattr(texts, "_others", texts._others.__wrapped__)
    monkeypatch.setattr(texts, "_drawable", texts._drawable.__wrapped__)
    monkeypatch.setattr(texts, "_more", [])
    assert texts.label("a👍日", 9) == f"a👍{texts.MISSING}"
    assert texts.families() == [texts.FIRST, "B"]
    assert texts.families(bold=True) == [texts.FIRST]
    assert texts.in_bold("a") and not texts.in_bold("a👍")


def test_texts_are_shortened_to_the_room_they_have() -> None:
    pytest.importorskip("matplotlib")
    from headwise.show.texts import fitted, inches, quoted, wrapped

    text = "the quick brown fox jumps over the lazy dog"
    lines = wrapped(text, 1.5, 9)
    assert " ".join(lines) == text and len(lines) > 1
    assert all(inches(line, 9) <= 1.5 for line in lines)
    assert quoted(text, 9, 9) == f"“{text}”"
    short = quoted(text, 1.5, 9)
    assert short.startswith("“the quick") and short.endswith(" …”") and inches(short, 9) <= 1.5
    assert fitted("head 3", 5, 9, 5) == ("head 3", 9)
    shortened, size = fitted(text, 2.0, 9, 5)
    assert shortened == text and 5 <= size < 9
    shortened, size = fitted(text, 0.5, 9, 5)
    assert shortened.endswith("…") and size == 5 and inches(shortened, 5) <= 0.5


def test_lines_hold_as_many_words_as_fit() -> None:
    inches = pytest.importorskip("matplotlib") and texts.inches
    words = "a longer word, then iiii and WWWW, unbreakablyandhopelesslylong, to the end".split()
    for room in (0.1, 0.7, 1.3, 50.0):
        lines = texts.wrapped(" ".join(words), room, 8.5)
        assert " ".join(lines).split() == words
        for line, after in pairwise(lines):
            assert inches(line, 8.5) <= room or " " not in line
            assert inches(f"{line} {after.split()[0]}", 8.5) > room
    assert texts.wrapped("  ", 1.0, 8.5) == []
