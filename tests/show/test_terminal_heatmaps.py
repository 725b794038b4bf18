"""Heat maps in the terminal: every weight in its place and shade, at any width, in any script."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headwise import AttentionMap, Heads, Mask, MultiHeadAttention, watch
from headwise.errors import ArgumentError
from headwise.heads.record import reduce

pytest.importorskip("rich")

from rich.cells import cell_len
from rich.console import Console

from headwise.show.colour_maps import WEIGHTS
from headwise.show.terminal_heatmaps import (
    FROM,
    LEAST,
    MARK,
    NAMED,
    PLAIN_SHADES,
    SHADES,
    terminal_heatmaps,
)

SCRIPTS = ["שלום", "日本語", "مرحبا", "नमस्ते", "😀", "a\x1b[31m", "\n", "x" * 41, "é", "", "\u202eabc"]


def heads_of(
    *weights: Tensor, tokens: Sequence[str] | None = None, kind: str = "self", paths: Sequence[str] = ()
) -> Heads:
    """A layer for each [H, T, S]."""
    heads = Heads()
    for number, each in enumerate(weights):
        path = paths[number] if paths else f"layers.{number}"
        names = ["previous", "first"]
        heads.add(path, reduce(AttentionMap.from_weights(each[None]), kind=kind, names=names, keep=True))
    heads.tokens = None if tokens is None else [list(tokens)]
    return heads


def random_weights(num_heads: int, query_len: int, key_len: int, *, causal: bool = False) -> Tensor:
    scores = 3 * torch.randn(num_heads, query_len, key_len, generator=torch.Generator().manual_seed(5))
    if causal:
        scores += torch.full((query_len, key_len), -torch.inf).triu(1)
    return scores.softmax(-1)


def boxes(text: str) -> list[list[str]]:
    """What is inside each box, line by line, in reading order."""
    rows_of_boxes: list[list[str]] = []
    row: list[list[str]] = []
    for line in text.splitlines():
        if "┌" in line or re.search(r"\+-+\+", line):
            if not row:
                row = [[] for _ in re.findall(r"[┌]|\+-+\+", line)]
            else:  # the lower edge, in ASCII
                rows_of_boxes, row = rows_of_boxes + row, []
        elif "└" in line:
            rows_of_boxes, row = rows_of_boxes + row, []
        elif row:
            for inside, shown in zip(row, re.findall(r"[│|]([^│|]*)[│|]", line), strict=True):
                inside.append(shown)
    return rows_of_boxes


BEFORE = torch.tensor([[1.0, 0, 0], [0.9, 0.1, 0], [0, 0.97, 0.03]])


def test_a_small_map_is_this_picture() -> None:
    heads = heads_of(torch.stack([BEFORE, torch.full((3, 3), 1 / 3)]), tokens=["The", "猫", "sat"])
    assert str(terminal_heatmaps(heads, width=60)).splitlines() == [
        "    0.0 previous-token 0.94  0.1 broad 1.00",
        "    ┌──────┐                 ┌──────┐",
        "The │██    │                 │▓▓▓▓▓▓│",
        " 猫 │██▒▒  │                 │▓▓▓▓▓▓│",
        "sat │  ██░░│                 │▓▓▓▓▓▓│",
        "    └──────┘                 └──────┘",
        "least weight:  · 0  ░ 0.01  ▒ 0.1  ▓ 0.25  █ 0.5",
        "blank: none",
    ]


def test_one_head_is_large_and_says_what_each_word_looks_at_most() -> None:
    heads = heads_of(torch.stack([BEFORE, BEFORE]), tokens=["The", "猫", "sat"])
    assert str(terminal_heatmaps(heads, chosen=[(0, 1)], width=41)).splitlines() == [
        "0.1 previous-token 0.94",
        "       0     1     2",
        "      ┌──────────────────┐  attends to",
        "      │██████            │",
        "0 The │██████            │  The 1.00",
        "      │██████            │",
        "      │██████▒▒▒▒▒▒      │",
        "1 猫  │██████▒▒▒▒▒▒      │  The 0.90",
        "      │██████▒▒▒▒▒▒      │",
        "      │      ██████░░░░░░│",
        "2 sat │      ██████░░░░░░│  猫 0.97",
        "      │      ██████░░░░░░│",
        "      └──────────────────┘",
        "least weight:  · 0  ░ 0.01  ▒ 0.1  ▓ 0.25",
        "█ 0.5  blank: none",
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp437", "latin-1", "gb18030", "no such thing"])
def test_nothing_is_wider_than_the_terminal_or_beyond_its_letters(encoding: str) -> None:
    tokens = SCRIPTS
    several = heads_of(random_weights(5, 11, 11), random_weights(3, 11, 11, causal=True), tokens=tokens)
    for width, chosen in itertools.product((20, 30, 40, 80, 140), (None, [(1, 2)])):
        text = str(terminal_heatmaps(several, chosen=chosen, width=width, encoding=encoding))
        assert max(map(cell_len, text.splitlines())) <= width
        text.encode("ascii" if encoding == "no such thing" else encoding)
        assert "\x1b" not in text and "\u202e" not in text
        assert len(boxes(text)) == (8 if chosen is None else 1)


@pytest.mark.parametrize("width", [20, 41, 104])
@pytest.mark.parametrize("shape", [(11, 11), (3, 17), (17, 3), (1, 53), (53, 1), (1, 1), (67, 61), (300, 7)])
def test_any_shape_fits_any_width(width: int, shape: tuple[int, int]) -> None:
    heads = heads_of(random_weights(3, *shape), kind="cross")
    for chosen in (None, [(0, 2)]):
        text = str(terminal_heatmaps(heads, chosen=chosen, width=width))
        assert max(map(cell_len, text.splitlines())) <= width
        drawn = boxes(text)
        assert len(drawn) == (3 if chosen is None else 1)
        assert len({(len(box), *map(len, box)) for box in drawn}) == 1, "all of one size"
        assert "pooled" in text or (len(drawn[0]) % shape[0], len(drawn[0][0]) % shape[1]) == (0, 0)


@pytest.mark.parametrize(("shades", "encoding"), [(SHADES, "utf-8"), (PLAIN_SHADES, "ascii")])
def test_the_shade_of_each_cell_is_that_of_its_weight(shades: str, encoding: str) -> None:
    weights = random_weights(3, 11, 11, causal=True)
    text = str(terminal_heatmaps(heads_of(weights), width=140, encoding=encoding))
    for head, box in enumerate(boxes(text)):
        for query, line in enumerate(box):
            assert line[::2] == line[1::2]  # two characters wide
            for key, shade in enumerate(line[::2]):
                weight = float(weights[head, query, key])
                assert (shade == " ") == (key > query)
                if key <= query:
                    least = (0.0, *FROM)[shades.index(shade)]
                    assert least <= weight < [*FROM, 2.0][shades.index(shade)]
    assert all(f"{shade} {least:g}" in text for shade, least in zip(shades, (0, *FROM), strict=True))


def test_heads_are_in_order_and_named_with_label_and_score() -> None:
    heads = heads_of(torch.stack([BEFORE] * 2), torch.stack([BEFORE, torch.eye(3)]))
    text = str(terminal_heatmaps(heads, width=140))
    assert re.findall(r"(\d\.\d) previous-token 0\.94", text) == ["0.0", "0.1", "1.0"]
    narrow = str(terminal_heatmaps(heads, width=20))
    assert narrow.count("0.94") == 3 and narrow.count("previous-token") == 3
    printed = str(terminal_heatmaps(heads, chosen=[(1, -1), (0, 0)], width=80))
    assert printed.index("0.0 ") < printed.index("1.1 ") and "1.0 " not in printed


def test_layers_that_go_by_path_are_named_above_their_heads() -> None:
    paths = ["encoder.layers.10.self_attention", "decoder.cross_attention"]
    heads = heads_of(random_weights(2, 5, 5), random_weights(3, 3, 7), paths=paths)
    text = str(terminal_heatmaps(heads, width=40))
    assert all(path in text.splitlines() for path in paths)
    assert re.findall(r"head (\d)", text) == ["0", "1", "0", "1", "2"]
    assert [len(box) for box in boxes(text)] == [5, 5, 3, 3, 3]
    narrow = str(terminal_heatmaps(heads, width=20)).splitlines()
    assert narrow[:3] == ["encoder.layers.10.", "self_attention", "  head 0 mixed"]


def test_words_stand_beside_their_rows_in_every_script() -> None:
    heads = heads_of(random_weights(2, 11, 11), tokens=SCRIPTS)
    lines = str(terminal_heatmaps(heads, width=80)).splitlines()
    rows = [line for line in lines if "│" in line]
    assert len(rows) == 11
    assert len({cell_len(line[: line.index("│")]) for line in rows}) == 1, "boxes begin in one column"
    for line, token in zip(rows, SCRIPTS, strict=True):
        name = line[: line.index("│")].strip(" ")
        assert (MARK in name) == (token in ("שלום", "مرحبا"))
        if token in ("שלום", "日本語", "مرحبا", "नमस्ते", "😀", "é"):
            assert name.strip(MARK) == token
    assert "a�[31m" in rows[5] and "↵" in rows[6] and "xxxxxxxxxxx…" in rows[7] and "�abc" in rows[10]


def test_tokens_of_another_text_are_not_written() -> None:
    text = str(terminal_heatmaps(heads_of(random_weights(2, 3, 3), tokens=["no", "yes"]), width=40))
    assert "no" not in text.replace("none", "") and "yes" not in text
    assert [line[0] for line in text.splitlines() if "│" in line] == ["0", " ", "2"]


def test_long_texts_share_cells_that_hold_what_falls_into_them() -> None:
    length = NAMED * 2 + 1
    even, first = torch.full((length, length), 1 / length), torch.eye(length)[:1].expand(length, length)
    text = str(terminal_heatmaps(heads_of(torch.stack([even, first])), width=80))
    assert f"{length} queries and {length} keys are pooled into 17 x 17 cells" in " ".join(text.split())
    flat, column = boxes(text)
    assert set("".join(flat)) == {"░"}  # 1/17
    assert column == ["██" + " " * 32] * 17  # all of it in the first column
    assert [line.split()[0] for line in text.splitlines() if "│" in line][::16] == ["0", str(length - 1)]


@pytest.mark.parametrize("keep", [True, False])
def test_of_a_very_long_text_no_dense_weights_are_made(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mha = MultiHeadAttention(16, 2, causal=True)
    with watch(mha, keep=keep, pooled=128) as heads:
        mha(torch.randn(1, 521, 16))

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("dense weights were made")

    monkeypatch.setattr(AttentionMap, "dense", refuse)
    for chosen in (None, [(0, 1)]):
        text = str(terminal_heatmaps(heads, chosen=chosen, width=80))
        drawn = boxes(text)
        assert "521 queries and 521 keys are pooled" in text
        for row, line in enumerate(drawn[0]):
            assert " " not in line[: 2 * row + 2].rstrip() and line[2 * row + 2 :].strip() == ""


def test_queries_that_are_padding_do_not_thin_the_means() -> None:
    lengths = torch.tensor([43])
    q = torch.zeros(1, 1, 2 * 43, 4)
    weights = AttentionMap(q, q, mask=Mask.padding(lengths, query_lengths=lengths))
    heads = Heads()
    heads.add("a", reduce(weights, names=["entropy"], keep=True))
    (box,) = boxes(str(terminal_heatmaps(heads, width=40)))  # 18 cells a side, about 5 positions in each
    cells = {row[0] for row in box if row.strip()}
    assert cells == {"▒"} and box[-1].strip() == ""  # 5/43 each, in the half-full row as well


@pytest.mark.parametrize(
    ("length", "width", "box"),
    [(33, 30, (12, 24)), (33, 41, (33, 33)), (19, 80, (19, 38)), (19, 100, (38, 76))],
)
def test_one_head_takes_the_room_there_is(length: int, width: int, box: tuple[int, int]) -> None:
    heads = heads_of(random_weights(2, length, length, causal=True), tokens=["word"] * length)
    (inside,) = boxes(str(terminal_heatmaps(heads, chosen=[(0, 1)], width=width)))
    assert (len(inside), len(inside[0])) == box


def test_every_sequence_has_its_own() -> None:
    mha = MultiHeadAttention(16, 1)
    with watch(mha) as heads:
        mha(torch.randn(2, 7, 16))
    heads.tokens = [list("abcdefg"), list("tuvwxyz")]
    first, second = (str(terminal_heatmaps(heads, batch=batch, width=60)) for batch in (0, 1))
    assert "0 a" in first and "0 t" in second and first != second
    with pytest.raises(IndexError):
        terminal_heatmaps(heads, batch=2, width=60)


# Colours


def shown(maps: object, **options: object) -> str:
    console = Console(file=io.StringIO(), width=60, **options)  # type: ignore[arg-type]
    console.print(maps)
    return console.file.getvalue()


def test_in_colour_each_cell_is_one_field_of_the_pictures_ramp() -> None:
    maps = terminal_heatmaps(heads_of(torch.eye(3)[None].repeat(2, 1, 1)), width=60)
    painted = shown(maps, force_terminal=True, color_system="truecolor")
    red, green, blue = bytes.fromhex(WEIGHTS[-1][1:])
    assert f"38;2;{red};{green};{blue};48;2;{red};{green};{blue}m██" in painted
    assert re.sub(r"\x1b\[[\d;]*m", "", painted).split() == str(maps).split()


@pytest.mark.parametrize(
    "options",
    [
        {"force_terminal": True, "color_system": "truecolor", "no_color": True},
        {"force_terminal": True, "color_system": "standard"},
        {"force_terminal": False},
    ],
)
def test_without_colours_the_blocks_alone_tell(options: dict[str, object]) -> None:
    maps = terminal_heatmaps(heads_of(torch.eye(3)[None].repeat(2, 1, 1)), width=60)
    assert shown(maps, **options) == str(maps) + "\n" and repr(maps) == str(maps)
    uncoloured = terminal_heatmaps(heads_of(torch.eye(3)[None]), width=60, colour=False)
    assert "48;2" not in shown(uncoloured, force_terminal=True, color_system="truecolor")


@pytest.mark.parametrize("count", [1, 3])
def test_a_picture_that_was_kept_instead_of_a_map_is_drawn_no_finer_than_it_is(count: int) -> None:
    """Its rows stood beside the names of the first queries, as if each were one."""
    weights = random_weights(count, 24, 24)
    heads = Heads()
    heads.add("a.0", reduce(AttentionMap.from_weights(weights[None]), names=["first"], pooled=8))
    heads.tokens = [[f"w{at}" for at in range(24)]]
    lines = str(terminal_heatmaps(heads, width=70)).splitlines()
    assert "24 queries and 24 keys are pooled into 8 x 8 cells" in " ".join(lines)
    assert not any("w" in line for line in lines if "│" in line)
    inside = [line.split("│")[1] for line in lines if "│" in line]
    wide, high = len(inside[0]) // 8, len(inside) // 8
    mean = weights[0].unflatten(1, (8, 3)).sum(-1).unflatten(0, (8, 3)).mean(1)
    for row, cells in enumerate(mean.tolist()):
        shades = [SHADES[sum(weight >= start for start in FROM)] for weight in cells]
        assert inside[row * high] == "".join(shade * wide for shade in shades)


# Mistakes


def test_mistakes_are_named() -> None:
    heads = heads_of(random_weights(2, 3, 3))
    with pytest.raises(ArgumentError, match=f"width must be at least {LEAST} columns: got 19; "):
        terminal_heatmaps(heads, width=19)
    with pytest.raises(ArgumentError, match="has: got head 2 of 2; give 0 to 1"):
        terminal_heatmaps(heads, chosen=[(0, 2)], width=40)
    with pytest.raises(ArgumentError, match="heads must not be empty: 0 layers"):
        terminal_heatmaps(Heads(), width=40)
    nothing = Heads()
    nothing.add("a", reduce(AttentionMap.from_weights(random_weights(1, 3, 3)[None]), names=["first"]))
    with pytest.raises(ArgumentError, match=r"a was called with \[1, 1, 3, 3\] and kept neither"):
        terminal_heatmaps(nothing, width=40)
