"""Two texts through one model: partners, distances against float64, pictures and tables."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise import AttentionMap, Heads, Mask, MultiHeadAttention, watch
from headwise.errors import ArgumentError
from headwise.heads.record import Marks, reduce
from headwise.heads.text_changes import Changes, Text, align
from headwise.models import Transformer, TransformerConfig

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from rich.console import Console

HE = "[CLS] the doctor said that he was tired [SEP]".split()
SHE = "[CLS] the doctor said that she was tired [SEP]".split()


def text(words: Sequence[str], real: Sequence[int] | None = None) -> Text:
    special = frozenset(at for at, word in enumerate(words) if word.startswith("["))
    return Text(tuple(words), tuple(words), tuple(range(len(words)) if real is None else real), special)


def heads_of(*layers: Tensor, words: Sequence[str], mask: Mask | None = None) -> Heads:
    """Heads with these weights, [H, T, T] each, as if they had been watched on these words."""
    heads = Heads()
    ids = torch.tensor([[crc32(word.encode()) for word in words]])
    marks = Marks(ids, torch.tensor([[word.startswith("[") for word in words]]))
    for number, weights in enumerate(layers):
        map = AttentionMap.from_weights(weights[None], mask)
        heads.add(
            f"layers.{number}.attention", reduce(map, names=("entropy",), marks=marks, keep=True, forward=1)
        )
    heads.tokens, heads.title = [list(words)], "Toy"
    return heads


def random_weights(heads: int, length: int, seed: int, *, causal: bool = False) -> Tensor:
    scores = torch.randn(heads, length, length, generator=torch.Generator().manual_seed(seed)) * 3
    if causal:
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return scores.softmax(-1)


def plain_distance(a: Tensor, b: Tensor, pairs: Sequence[tuple[int, int]]) -> list[float]:
    """The mean over pairs of JS, written out, in float64; a, b: [T, S] of one head."""
    mine, theirs = [i for i, _ in pairs], [j for _, j in pairs]
    rows = []
    for i, j in pairs:
        p, q = a[i].double(), b[j].double()
        p = torch.cat([p[mine], (p.sum() - p[mine].sum())[None]]).clamp(min=0)
        q = torch.cat([q[theirs], (q.sum() - q[theirs].sum())[None]]).clamp(min=0)
        p, q = p / p.sum(), q / q.sum()
        m = (p + q) / 2
        rows.append(
            sum(
                float(x * (x / z).log()) / 2
                for distribution in (p, q)
                for x, z in zip(distribution, m, strict=True)
                if x > 0
            )
        )
    return rows


def model(kind: str = "decoder", **settings: object) -> Transformer:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 29, "d_model": 33, "num_heads": 3, "num_layers": 2, "d_ff": 37}
    made = Transformer(TransformerConfig(kind=kind, max_length=23, **(sizes | settings)))  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # wide enough for heads to differ
    return made.eval()


def ids(*numbers: int) -> Tensor:
    return torch.tensor([numbers])


@torch.no_grad()
def watched(model: torch.nn.Module, *arguments: Tensor, **more: object) -> Heads:
    with watch(model) as heads:
        model(*arguments, **more)
    return heads


def changed_at_random(heads: int, after: Sequence[str] = SHE) -> Changes:
    """Random weights on one text and on another."""
    other = heads_of(random_weights(heads, len(after), 1), words=after)
    return heads_of(random_weights(heads, 9, 0), words=HE).changes(other)


# Partners


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("a b c", "a b c", "a b c"),
        ("a he c", "a she c", "a he/she c"),
        ("a x y c", "a v w c", "a x/v y/w c"),
        ("a x c", "a v w c", "a x v w c"),
        ("a c", "a not c", "a not c"),
        ("a x c y e", "a v c w e", "a x/v c y/w e"),
    ],
    ids=["the same", "one word", "two together", "other pieces", "added", "two apart"],
)
def test_tokens_are_partners_where_they_are_the_same_or_replaced_by_as_many(
    before: str, after: str, names: str
) -> None:
    aligned = align(text(before.split()), text(after.split()))
    assert aligned.names == names.split()
    for side, message in enumerate((before, after)):
        assert [place[side] for place in aligned.places if place[side] is not None] == list(
            range(len(message.split()))
        )


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=11),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=11),
)
@settings(max_examples=60, deadline=None)
def test_partners_do_not_depend_on_which_text_comes_first(before: list[str], after: list[str]) -> None:
    if not set(before) & set(after):
        return
    forward, back = align(text(before), text(after)), align(text(after), text(before))
    assert sorted(map(str, forward.places)) == sorted(str((a, b)) for b, a in back.places)


def test_padding_has_no_partner() -> None:
    padded = text([*HE, "[PAD]", "[PAD]"], range(len(HE)))
    left = text(["[PAD]", *SHE], range(1, len(SHE) + 1))
    assert align(padded, left).names == align(text(HE), text(SHE)).names
    assert align(padded, left).places[5] == (5, 6)


def test_texts_without_a_common_token_are_refused() -> None:
    message = "texts must have a token in common: 'he slept' and 'dogs bark' have 0"
    with pytest.raises(ArgumentError, match=message):
        align(text("[CLS] he slept [SEP]".split()), text("[CLS] dogs bark [SEP]".split()))


def test_unknown_tokens_are_partners_by_position_and_must_be_equally_many() -> None:
    mha, x = MultiHeadAttention(12, 3), torch.randn(2, 7, 12)
    same = watched(mha, x).changes(watched(mha, x))
    assert same.text.by_position and all(change.distance == 0 for change in same)
    with pytest.raises(
        ArgumentError, match="must be known to compare texts of different lengths: got 7 and 5"
    ):
        watched(mha, x).changes(watched(mha, x[:, :5]))


# Distances


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=7, deadline=None)
def test_a_distance_is_that_of_a_plain_computation_in_float64(seed: int, replaced: bool) -> None:
    other = SHE if replaced else [*SHE[:5], "nobody", "else", *SHE[6:]]
    a, b = random_weights(3, len(HE), seed), random_weights(3, len(other), seed + 1)
    forward = heads_of(a, words=HE).changes(heads_of(b, words=other))
    back = heads_of(b, words=other).changes(heads_of(a, words=HE))
    if replaced:
        pairs = [(at, at) for at in range(len(HE))]
    else:
        pairs = [(at, at) for at in range(5)] + [(at, at + 1) for at in range(6, len(HE))]
    for change in forward:
        rows = plain_distance(a[change.head], b[change.head], pairs)
        assert change.distance == pytest.approx(sum(rows) / len(rows), rel=1e-12, abs=1e-14)
        assert change.largest == pytest.approx(max(rows), rel=1e-12)
        assert change.places == pairs[rows.index(max(rows))]
        assert 0 <= change.distance <= change.largest <= math.log(2)
    assert {tuple(each): each.distance for each in back} == {tuple(each): each.distance for each in forward}
    assert [each.distance for each in forward] == sorted((each.distance for each in forward), reverse=True)


def test_rows_that_share_no_key_are_log_2_apart_and_the_same_text_is_0_apart() -> None:
    ahead, behind = torch.eye(9).roll(1, 1)[None], torch.eye(9)[None]
    (apart,) = heads_of(ahead, words=HE).changes(heads_of(behind, words=SHE))
    assert apart.distance == math.log(2)
    heads = heads_of(random_weights(5, 9, 0), words=HE)
    assert [each.distance for each in heads.changes(heads)] == [0] * 5


def test_a_causal_models_rows_before_the_first_difference_are_the_same_and_not_in_the_mean() -> None:
    decoder = model()
    a, b = ids(3, 5, 7, 11, 13, 17), ids(3, 5, 7, 2, 13, 17)
    changed = watched(decoder, a).changes(watched(decoder, b))
    for layer in changed.layers.values():
        assert layer.since == 3
        assert float(layer.rows[:, :3].max()) < 1e-9
        assert float(layer.rows[:, 3:].max()) > 1e-6
    most = changed.all[0]
    rows = changed.layers[most.path].rows[most.head]
    assert most.distance == pytest.approx(float(rows[3:].mean()))
    assert changed.text.names[3] == "11/2"


def test_a_model_that_looks_ahead_has_all_queries_in_the_mean() -> None:
    encoder = model("encoder")
    changed = watched(encoder, ids(3, 5, 7, 11, 13)).changes(watched(encoder, ids(3, 5, 7, 2, 13)))
    assert [layer.since for layer in changed.layers.values()] == [0, 0]
    assert float(changed.layers[changed.all[0].path].rows[:, :3].max()) > 1e-6


def test_padding_in_a_batch_changes_no_distance() -> None:
    encoder = model("encoder").double()
    a, b = ids(3, 5, 7, 11, 13), ids(3, 5, 2, 4, 7, 13)
    alone = watched(encoder, a).changes(watched(encoder, b))
    padded = []
    for x in (a, b):
        length = x.shape[1]
        batch = torch.cat([ids(*range(1, 9)), torch.nn.functional.pad(x, (0, 8 - length), value=23)])
        padded.append(watched(encoder, batch, lengths=[8, length]))
    together = padded[0].changes(padded[1], batch=1)
    assert together.text.names == alone.text.names
    distances = [{tuple(x): x.distance for x in changed} for changed in (together, alone)]
    assert distances[0] == pytest.approx(distances[1], rel=1e-9)


def test_a_query_that_sees_nothing_in_one_text_is_left_out() -> None:
    blind = random_weights(2, 9, 0)
    blind[0, 4] = 0
    changed = heads_of(blind, words=HE).changes(heads_of(random_weights(2, 9, 1), words=SHE))
    rows = changed.layers["layers.0.attention"].rows
    assert rows.isnan().sum() == 1 and rows[0, 4].isnan()
    nowhere = heads_of(torch.zeros(2, 9, 9), words=HE).changes(heads_of(blind, words=SHE))
    assert all(math.isnan(change.distance) and change.places is None for change in nowhere)


def test_a_learned_sink_is_a_bin_of_its_own() -> None:
    decoder = model(sinks=True)
    a, b = watched(decoder, ids(3, 5, 7, 11)), watched(decoder, ids(3, 5, 2, 11))
    assert a.changes(b).all[0].distance > 1e-6
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(30.0)
    sunk = watched(decoder, ids(3, 5, 7, 11)).changes(watched(decoder, ids(3, 5, 2, 11)))
    assert sunk.all[0].distance < 1e-6  # all of the weight is in the sink, on both texts


def two_texts(source: str, target: str, seed: int) -> Heads:
    """A layer of an encoder, and a decoder's two: as Hugging Face's families are heard."""
    heads = Heads()
    words = {"encoder.0.self": source.split(), "decoder.0.self": target.split()}
    sizes = {"decoder.0.cross": (len(target.split()), len(source.split()))}
    for path in ("encoder.0.self", "decoder.0.self", "decoder.0.cross"):
        expected = words.get(path)
        T, S = sizes.get(path) or (len(expected or ""), len(expected or ""))
        weights = random_weights(2, max(T, S), seed, causal=path == "decoder.0.self")[:, :T, :S]
        marks = (
            None if expected is None else Marks(torch.tensor([[crc32(word.encode()) for word in expected]]))
        )
        map = AttentionMap.from_weights(weights[None] / weights[None].sum(-1, keepdim=True))
        kind = "cross" if expected is None else "self"
        heads.add(path, reduce(map, kind=kind, names=("entropy",), marks=marks, keep=True, forward=1))
    heads.tokens = [target.split()]
    return heads


def test_cross_attention_pairs_queries_with_the_decoders_text_and_keys_with_the_encoders() -> None:
    changed = two_texts("a b c d e", "x y z", 0).changes(two_texts("a b not c d e", "x y z", 1))
    cross = changed.layers["decoder.0.cross"]
    assert cross.queries.names == ["x", "y", "z"] and cross.queries.places == ((0, 0), (1, 1), (2, 2))
    assert cross.keys.places == ((0, 0), (1, 1), (None, 2), (2, 3), (3, 4), (4, 5))
    assert {layer.since for layer in changed.layers.values()} == {0}  # the encoder is seen from everywhere
    later = two_texts("a b c d e", "x y z", 0).changes(two_texts("a b c d e", "x y v", 1))
    assert [layer.since for layer in later.layers.values()] == [0, 2, 2]
    assert later.layers["decoder.0.cross"].queries.names == ["x", "y", "z/v"]
    assert len(later.plot(top=1).axes) == 5


# What is refused


def test_what_cannot_be_compared_is_refused() -> None:
    first, other = heads_of(random_weights(2, 9, 0), words=HE), heads_of(random_weights(3, 9, 0), words=SHE)
    with pytest.raises(ArgumentError, match=r"of the same model: layers.0.attention has 2 heads here and 3"):
        first.changes(other)
    deeper = heads_of(*[random_weights(2, 9, 0)] * 2, words=SHE)
    with pytest.raises(ArgumentError, match=r"layers.1.attention has 0 heads here and 2 there"):
        first.changes(deeper)
    with pytest.raises(ArgumentError, match="heads must not be empty: 0 layers"):
        first.changes(Heads())
    with pytest.raises(IndexError, match="1"):
        first.changes(first, batch=1)
    for layer in other.values():
        layer.calls[0].map = None
    with pytest.raises(ArgumentError, match=r"must have maps: layers.0.attention .* \[1, 3, 9, 9\]"):
        other.changes(other)
    changed = first.changes(heads_of(random_weights(2, 9, 1), words=SHE))
    for show in (changed.plot, changed.table):
        with pytest.raises(ArgumentError, match="top must be at least 1: got 0"):
            show(top=0)
    nobody = Changes([], changed.layers)
    with pytest.raises(ArgumentError, match="changes must hold at least one head: got 0"):
        nobody.plot()
    assert repr(nobody) == "Changes(0 heads)"


# Showing them


def shown(table: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 100])
def test_a_table_cuts_no_number_and_names_the_token(width: int) -> None:
    changed = changed_at_random(5)
    lines = shown(changed.table(top=3), width)
    for change in changed.all[:3]:
        assert (
            f"{change.distance:.3f}" in lines and f"{change.largest:.3f}" in lines and change.token in lines
        )
    assert "…" not in lines and max(map(len, lines.splitlines())) <= width
    assert f"0.{changed.all[3].head} " not in lines
    assert "“he” became “she”" in " ".join(lines.split())
    assert repr(changed).startswith("Changes(5 heads, most in 0.")


def test_what_differs_is_told_run_by_run_and_the_same_change_once() -> None:
    twice = align(text("he sat where he is".split()), text("she sat where she is".split()))
    assert twice.words == ("he", "she")
    apart = align(text("a cat ran off here".split()), text("a dog ran on there".split()))
    assert apart.words == ("cat, off here", "dog, on there")


def test_markup_and_escape_codes_in_tokens_are_text() -> None:
    evil = [*HE[:5], "[red]\x1b[31m$x^", *HE[6:]]
    changed = changed_at_random(1, evil)
    assert "\x1b" not in shown(changed.table(), 100) and "[red]" in shown(changed.table(), 100)
    changed.plot(top=1).canvas.draw()  # type: ignore[attr-defined]


def test_a_picture_lays_both_texts_on_each_other_with_the_difference_beside_them() -> None:
    a, b = random_weights(3, 9, 0), random_weights(3, 9, 1)
    changed = heads_of(a, words=HE).changes(heads_of(b, words=SHE))
    figure = changed.plot(top=2)
    maps = [ax for ax in figure.axes if len(ax.images) == 1 and ax.get_title(loc="left")]
    assert [ax.get_title(loc="left") for ax in maps] == ["with “he”", "with “she”", "difference"] * 2
    first = changed.all[0].head
    for ax, weights in zip(maps, (a[first], b[first], b[first] - a[first]), strict=False):
        torch.testing.assert_close(torch.tensor(ax.images[0].get_array().data), weights)  # type: ignore[union-attr]
    names = [tick.get_text() for tick in maps[0].get_yticklabels()]
    assert names == [*HE[:5], "he/she", *HE[6:]]
    assert [tick.get_weight() for tick in maps[3].get_xticklabels()][5] == "bold"


def test_a_token_that_a_text_does_not_have_is_hatched() -> None:
    changed = changed_at_random(1, [*SHE[:5], "nobody", "else", *SHE[6:]])
    figure = changed.plot()
    hatched = [sum(bool(patch.get_hatch()) for patch in ax.patches) for ax in figure.axes[:3]]
    assert hatched == [4, 2, 6]  # rows and columns of two, one and three tokens
    before, after = changed.weights(changed.all[0])
    assert before.shape == (11, 11) and (~before.isnan()).sum() == 9**2 and (~after.isnan()).sum() == 10**2


def test_of_a_long_text_the_rows_that_changed_most_are_shown_with_their_positions() -> None:
    before = [f"w{number}" for number in range(41)]
    after = [*before[:30], "other", *before[31:]]
    a = random_weights(2, 41, 0, causal=True)
    b = torch.cat([a[:, :30], random_weights(2, 41, 1, causal=True)[:, 30:]], 1)
    changed = heads_of(a, words=before).changes(heads_of(b, words=after))
    figure = changed.plot(top=1)
    names = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert len(names) == 12
    assert "w30/other 30" in names
    assert figure.get_figheight() < 8
