"""Tables at any width: no number is ever cut, what has no room is left out by name, words are wrapped."""

from __future__ import annotations

import io
import math
import random
import re
from collections import Counter
from itertools import pairwise

import pytest
import torch

from headwise import Heads
from headwise.errors import ArgumentError
from headwise.heads.layer import LABELS, MIXED, NOTHING_CLEAR, Head, Label
from headwise.heads.record import Record
from headwise.heads.roles import Role, Roles
from headwise.nn.presets import PRESETS

pytest.importorskip("rich")

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from headwise.show.fitted_tables import FittedTable, in_letters, wrapped
from headwise.show.heads_tables import (
    SINKS_EXPLAINED,
    USUAL,
    as_sentences,
    heads_table,
    layers_table,
)
from headwise.show.layers_pictures import roles_table
from headwise.show.tables import WEIGHTS, as_number, empty_table, figures, presets_table

WIDTHS = (20, 30, 40, 60, 80, 104, 140)
PATHS = (
    "model.decoder.block.{}.layer_with_a_rather_long_name.EncDecAttention",
    "層.{}.注意",
    "😀.{}",
    "encoder.{}.self_attention",
)


def drawn(seed: int, *, paths: bool) -> Heads:
    """Two layers of three heads with numbers of every size; by number, or by path where asked."""
    chance = random.Random(seed)
    heads = Heads()
    for layer in range(2):
        rows = {name: torch.tensor([[_number(chance, name) for _ in range(3)]]) for name in USUAL}
        counts = {name: torch.full((1, 3), 97) for name in USUAL}
        path = chance.choice(PATHS).format(10 * layer) if paths else f"layers.{10 * layer}.attention"
        heads.add(f"{path}.{layer}" if paths else path, Record((1, 3, 97, 97), rows=rows, counts=counts))
    heads.title = chance.choice(["Toy", "日本語 model", None])
    return heads


def _number(chance: random.Random, name: str) -> float:
    if chance.random() < 0.1:
        return math.nan
    return chance.random() if name in WEIGHTS else 10 ** chance.uniform(-2, 5)


def shown(table: object, width: int, **options: object) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, **options)  # type: ignore[arg-type]
    console.print(table)
    return console.file.getvalue()


def left_out(text: str) -> set[str]:
    """The columns that the line below names."""
    match = re.search(r"Columns not shown: (.*?)\. Make the terminal", " ".join(text.split()))
    return set(match[1].split(", ")) if match else set()


def whole(text: str, numbers: list[str], width: int) -> bool:
    """Whether every number is there, as often as it should be, and nothing is cut or too wide."""
    words = Counter(word.strip("(),;:") for word in text.split())
    complete = all(words[number] >= count for number, count in Counter(numbers).items())
    return complete and "…" not in text and all(cell_len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("paths", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_of_a_table_of_heads_is_whole(width: int, paths: bool) -> None:
    for seed in range(4):
        heads = drawn(seed, paths=paths)
        sort = random.Random(seed).choice([None, "label", "distance", "effective_keys"])
        text = shown(heads_table(heads, sort=sort), width)
        out = left_out(text)
        columns = [name for name in USUAL if name.replace("_", " ") not in out]
        numbers = [str(as_number(name, head.values[name])) for head in heads.all() for name in columns]
        numbers += [f"{head.label.score:.2f}" for head in heads.all() if head.label.score is not None]
        assert whole(text, numbers, width), text
        assert sort is None or sort == "label" or sort in columns, "what is sorted by stays"
        assert len(out) < len(USUAL) or width < 40 or paths


@pytest.mark.parametrize("paths", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_of_a_table_of_layers_is_whole(width: int, paths: bool) -> None:
    for seed in range(3):
        heads = drawn(seed, paths=paths)
        text = shown(layers_table(heads), width)
        out = left_out(text)
        numbers = ["3"] * 2
        for layer in heads.values():
            for name in {"entropy", "distance", "first"} - out:
                numbers.append(str(as_number(name, float(layer.statistics[name].nanmean()))))
        assert whole(text, numbers, width), text
        assert "labels" in out or all(head.label.name in text for head in heads.all())


def test_what_is_left_out_is_there_at_the_width_that_is_named() -> None:
    for seed in range(2):
        heads = drawn(seed, paths=seed % 2 == 1)
        for table in (heads_table(heads), layers_table(heads), presets_table(PRESETS.values())):
            text = " ".join(shown(table, 30).split())
            (enough,) = map(int, re.findall(r"Make the terminal (\d+) columns wide, or use \S+", text))
            assert "Columns not shown" not in shown(table, enough)
            assert "Columns not shown" in shown(table, enough - 1)


def test_more_room_never_shows_less() -> None:
    table = heads_table(drawn(3, paths=False))
    counts = [len(left_out(shown(table, width))) for width in range(20, 141, 12)]
    assert counts[0] == 9 and counts[-1] == 0
    assert all(later <= earlier for earlier, later in pairwise(counts))
    assert left_out(shown(table, 80)) <= {"effective keys", "confidence", "induction", "next", "itself"}


def test_at_40_columns_a_table_of_heads_is_this() -> None:
    heads = Heads()
    rows = {"previous": [0.93, 0.1], "entropy": [0.5, 1234.567], "distance": [1.0, 98765.4]}
    counts = {name: torch.full((1, 2), 97) for name in rows}
    values = {name: torch.tensor([numbers]) for name, numbers in rows.items()}
    heads.add("layers.0", Record((1, 2, 97, 97), rows=values, counts=counts))
    assert [line.rstrip() for line in shown(heads_table(heads), 40).splitlines()] == [
        "",
        "                                 entropy",
        "layer head label (score)            nats",
        "────────────────────────────────────────",
        "    0    0 previous-token (0.93)    0.50",
        "    0    1 mixed                 1234.57",
        "",
        "Columns not shown: distance, previous.",
        "Make the terminal 60 columns wide, or",
        "use --json or to_pandas().",
    ]
    assert [line.rstrip() for line in shown(heads_table(heads), 20).splitlines()][:4] == [
        "layer 0, head 0,",
        "  previous-token",
        "  (0.93)",
        "layer 0, head 1,",
    ]


def test_an_encoding_without_these_letters_gets_question_marks() -> None:
    heads = drawn(1, paths=True)
    heads.title = "日本"
    for width in (20, 60, 140):
        raw = io.BytesIO()
        console = Console(file=io.TextIOWrapper(raw, encoding="ascii"), width=width, highlight=False)
        console.print(heads_table(heads))
        console.file.flush()
        assert raw.getvalue().startswith(b"??\n")
    assert in_letters(Text("é 日本 x"), "latin-1").plain == "é ?? x"
    assert in_letters(Text("é"), "no such encoding").plain == "?"


# Words


@pytest.mark.parametrize("width", range(1, 40))
def test_wrapped_words_are_all_there_and_none_is_too_wide(width: int) -> None:
    text = "12 duplicate-token, in model.layers.10.self_attn 日本語文字列 of 3 x"
    lines = [line.plain for line in wrapped(Text(text), width)]
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(cell_len(line) <= max(width, 2) for line in lines)
    if width >= 19:
        assert any("12 duplicate-token," in line for line in lines), "a count stays with what it counts"
    if width >= 10:
        assert any("10." in line for line in lines), "no number inside a path is torn apart"


def test_words_keep_their_style_and_lines() -> None:
    first, second = wrapped(Text("one two\nthree", "bold"), 9)
    assert (first.plain, second.plain) == ("one two", "three")
    assert first.style == second.style == "bold"
    assert [line.plain for line in wrapped(Text(""), 5)] == [""]


def test_names_are_data_and_no_markup() -> None:
    table = empty_table("[red]title")
    table.add("name", least=0)
    table.add_row("[bold]x[/bold]")
    assert "[bold]x[/bold]" in shown(table, 60) and "[red]title" in shown(table, 60)


def test_columns_that_say_nothing_of_their_rank_go_from_the_right() -> None:
    table = empty_table()
    for header in ("word", "abc", "def", "ghi"):
        table.add_column(header, no_wrap=header != "word", justify="right")
    table.add_row("some words here", "1.25", "2.25", "3.25")
    assert left_out(shown(table, 25)) == {"ghi"}
    assert left_out(shown(table, 20)) == {"def", "ghi"}
    assert isinstance(table, FittedTable) and left_out(shown(table, 60)) == set()
    assert shown(empty_table(), 20) == "\n"


# Other tables


@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_of_the_presets_is_whole(width: int) -> None:
    text = shown(presets_table(PRESETS.values()), width)
    every = [figures(preset) for preset in PRESETS.values()]
    numbers = [str(model.d_model) for model in every] + [str(model.num_heads) for model in every]
    if width >= 80:
        assert not left_out(text)
        numbers += [str(model.attention_layers) for model in every]
    assert whole(text, [*numbers, *PRESETS], width)


def some_roles(*layers: int | str) -> Roles:
    roles = {
        f"a rather long relation {number} > antecedent": Role(
            f"a rather long relation {number} > antecedent", number == 0, layer, 11, 0.625, 0.5, 0.75, 12345,
            {"3 words": 0.25, "the nearest noun before": 0.375}, {}, heads=[(layer, 11, 0.625)],
        )
        for number, layer in enumerate(layers)
    }  # fmt: skip
    unasked = {"pronoun > antecedent": "since the model does not look ahead"}
    return Roles(roles, {}, list(layers), unasked=unasked, title="Toy")


@pytest.mark.parametrize("width", WIDTHS)
def test_every_number_of_the_roles_is_whole(width: int) -> None:
    text = shown(roles_table(some_roles(0, 10)), width)
    out = left_out(text)
    numbers = ["0.62"] * 2 + ["0.11", "10.11"]
    numbers += ["12345"] * 2 * ("cases" not in out) + ["0.50-0.75"] * 2 * ("95%" not in out)
    assert whole(text, numbers, width), text
    assert len(re.findall(r"\byes\b", text)) == 1 and len(re.findall(r"\bno\b", text)) >= 1
    by_path = shown(roles_table(some_roles("encoder.layers.10.self_attention", 3)), width)
    assert "10" in by_path and whole(by_path, ["0.62"] * 2, width)


# Heads that are chosen, and their roles


def test_only_chosen_heads_and_their_layers_are_listed() -> None:
    heads = drawn(2, paths=False)
    chosen = [("layers.10.attention", -1), (10, 0), (10, 2), (0, 1)]
    assert [(head.layer, head.head) for head in heads.chosen(chosen)] == [(0, 1), (10, 0), (10, 2)]
    table = heads_table(heads, chosen=chosen).table
    assert [str(cell) for cell in table.columns[0].cells] == ["0", "10", "10"]
    assert [str(cell) for cell in table.columns[1].cells] == ["1", "0", "2"]
    layers = layers_table(heads, chosen=chosen[:3]).table
    assert [str(cell) for cell in layers.columns[0].cells] == ["10"]
    assert [str(cell) for cell in layers.columns[1].cells] == ["2"]
    entropies = [head.values["entropy"] for head in heads.chosen(chosen[:3])]
    mean = math.fsum(number for number in entropies if not math.isnan(number)) / len(entropies)
    assert str(next(iter(layers.columns[2].cells))) == f"{mean:.2f}"
    assert as_sentences(heads, chosen=chosen) == as_sentences(heads.chosen(chosen))


def test_heads_that_are_not_there_cannot_be_chosen() -> None:
    heads = drawn(0, paths=False)
    for chosen, message in (
        ([(0, 3)], r"chosen must name heads that layers\.0\.attention has: got head 3 of 3; give 0 to 2$"),
        ([(0, -4)], "got head -4 of 3"),
        ([(5, 0)], "layer must be one of 0, 10: got 5"),
        ([], r"chosen must be pairs of layer and head: got \[\]; give \[\(0, 3\)\], or None for all"),
        ([3], r"chosen must be pairs of layer and head: got 3; give \[\(0, 3\)\]"),
        ([(0, 1.5)], r"got head 1\.5 of 3"),
        ([(0, "x")], "got head 'x' of 3"),
        ([(0, True)], "got head True of 3"),
        ("01", "chosen must be pairs of layer and head: got '01'"),
        ([(1, 2, 3)], r"got \(1, 2, 3\)"),
    ):
        for table in (heads_table, layers_table, as_sentences):
            with pytest.raises(ArgumentError, match=message):
                table(heads, chosen=chosen)  # type: ignore[operator]
    alone = Heads()
    alone.add(
        "a", Record((1, 1, 7, 7), rows={"first": torch.zeros(1, 1)}, counts={"first": torch.ones(1, 1)})
    )
    with pytest.raises(ArgumentError, match=r"a has: got head 1 of 1; give 0$"):
        alone.chosen([(0, 1)])


def test_roles_stand_beside_the_heads_that_have_them() -> None:
    heads = drawn(4, paths=False)
    roles = some_roles(10)
    role = next(iter(roles))
    roles[role].heads[:] = [(10, 2, 0.625)]
    table = heads_table(heads, roles=roles).table
    assert [str(cell) for cell in table.columns[3].cells] == ["-"] * 5 + [role]
    for width in WIDTHS:
        text = shown(heads_table(heads, roles=roles), width)
        assert all(word in text for word in role.split())


# Sentences


def head(name: str, score: float | None = 0.9) -> Head:
    return Head(0, 0, "a", Label(name, None if name == MIXED else score), {})


@pytest.mark.parametrize("entry", LABELS, ids=[entry.name for entry in LABELS])
def test_every_label_is_a_plain_sentence_that_fits_a_line(entry: object) -> None:
    name, meaning = entry.name, entry.meaning  # type: ignore[attr-defined]
    first, *_ = as_sentences([head(name)])
    article = "An" if name[0] in "aeiou" else "A"
    assert first == f"{article} {name} head {meaning}."
    assert len(meaning) <= 110 and "[" not in meaning and not meaning.endswith(".")
    assert as_sentences([head(MIXED)]) == [f"A mixed head {NOTHING_CLEAR}."]


def test_why_heads_rest_is_said_where_a_third_of_them_do() -> None:
    few = [head("sink"), *[head("self")] * 3]
    many = [head("sink"), head("special-token"), *[head("self")] * 2, *[head(MIXED)] * 2]
    assert SINKS_EXPLAINED not in as_sentences(few) + as_sentences([head("sink")])  # one head is not many
    sentences = as_sentences(many)
    assert sentences[-1] == SINKS_EXPLAINED and len(sentences) == 5
    assert all(
        source in SINKS_EXPLAINED
        for source in ("sum to 1", "many trained models", "Clark 2019", "Kobayashi 2020", "Xiao 2024", "Gu")
    )
    assert as_sentences([]) == []
