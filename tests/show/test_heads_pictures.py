"""Pictures of heads for a talk: nothing covers a cell, no two texts meet, words stand on both sides."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy
import pytest
import torch

from headwise import AttentionMap, Heads, Mask, MultiHeadAttention, watch
from headwise.engines.statistics import ROW_STATISTICS
from headwise.errors import ArgumentError, ShapeError
from headwise.heads.layer import LABELS
from headwise.heads.record import reduce

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text

from headwise.show.colour_maps import weight_colours
from headwise.show.heads_pictures import head_picture, layer_picture, model_picture
from headwise.show.heatmaps import OF_LABEL, heatmaps
from headwise.show.sheet import weight_scale
from headwise.show.texts import MISSING

ROWS = tuple(name for name in ROW_STATISTICS if name != "max_logit")
PICTURES: dict[str, Callable[[Heads], Figure]] = {
    "grid": lambda heads: model_picture(heads),
    "layer": lambda heads: layer_picture(heads, 0),
    "head": lambda heads: head_picture(heads, 0, 0),
}


def sinks(length: int, heads: int = 1) -> Heads:
    """Heads that rest on the first key: their label has a frame, beside that very column."""
    weights = torch.full((1, heads, length, length), 0.3 / (length - 1))
    weights[..., 0] = 0.7
    watched = Heads()
    watched.add("layers.0", reduce(AttentionMap.from_weights(weights), names=ROWS, pooled=128, keep=True))
    return watched


def some(layers: int, heads: int, query_len: int, key_len: int) -> Heads:
    generator = torch.Generator().manual_seed(7)
    watched = Heads()
    for number in range(layers):
        q = 2 * torch.randn(1, heads, query_len, 5, generator=generator)
        k = torch.randn(1, heads, key_len, 5, generator=generator)
        kind = "self" if query_len == key_len else "cross"
        record = reduce(AttentionMap(q, k), kind=kind, names=ROWS, pooled=128, keep=True)
        watched.add(f"layers.{number}.attention", record)
    watched.title = "Toy"
    return watched


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


# Cells


@pytest.mark.parametrize("kind", PICTURES)
def test_every_cell_is_a_whole_number_of_dots_and_nothing_covers_one(kind: str) -> None:
    """On 186 tokens a frame hid the first column of a head labelled special-token, and it looked blank."""
    figure = PICTURES[kind](sinks(186))
    figure.canvas.draw()
    dots = numpy.asarray(figure.canvas.buffer_rgba())[..., :3]
    ax = figure.axes[1] if kind == "head" else figure.axes[0]  # above a large head stands what keys receive
    image = ax.images[0]
    assert len(ax.patches) == 1  # the frame
    left, right, below, above = image.get_extent()
    corners = ax.transData.transform([(left, below), (right, above)])
    numpy.testing.assert_allclose(corners, corners.round(), atol=1e-6)
    (x0, y0), (x1, y1) = corners.round().astype(int)
    drawn = dots[dots.shape[0] - y1 : dots.shape[0] - y0, x0:x1]
    cells = image.get_array()
    down, across = (dots // cells for dots, cells in zip(drawn.shape, cells.shape, strict=False))
    assert down >= 2 and across >= 2
    assert drawn.shape[:2] == (down * cells.shape[0], across * cells.shape[1])
    expected = weight_colours()(weight_scale()(cells))[..., :3].repeat(down, 0).repeat(across, 1)
    numpy.testing.assert_allclose(drawn / 255, expected, atol=2 / 255)


def test_pooled_pictures_are_made_coarser_where_there_is_no_room() -> None:
    """Of many heads, a picture of 128 cells a side that was kept without its map is drawn in 64."""
    heads, length = Heads(), 300
    q, k = torch.randn(2, 1, 1, length, 5, generator=torch.Generator().manual_seed(1))
    weights = AttentionMap(q, k)
    heads.add("a", reduce(weights, names=ROWS, pooled=128))
    from headwise.show.heatmaps import cells_of

    picture, lengths, _ = cells_of(heads[0], 0, 64)
    assert lengths == (length, length) and picture.shape == (1, 64, 64)
    inside = torch.bincount(torch.arange(length) * 64 // length)
    expected = weights.pooled(64)[0] / inside[:, None]
    numpy.testing.assert_allclose(picture.filled(0), expected, rtol=1e-4, atol=1e-7)


# Texts


def meetings(figure: Figure) -> list[tuple[str, str]]:
    """Texts that overlap, nearly touch in one line, or leave the page."""
    figure.draw_without_rendering()
    boxes = [
        (text.get_text(), text.get_window_extent().extents.tolist())
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip()
    ]
    point = figure.dpi / 72
    bad = []
    for (first, a), (second, b) in itertools.combinations(boxes, 2):
        if min(a[3], b[3]) - max(a[1], b[1]) <= 1:
            continue
        beside = 1.5 * point if first.isdigit() and second.isdigit() else -1  # 511 beside 0 is read as 5110
        if min(a[2], b[2]) - max(a[0], b[0]) > -beside:
            bad.append((first, second))
    page = figure.bbox
    for text, (left, low, right, high) in boxes:
        if min(left, low) < -1 or right > page.width + 1 or high > page.height + 1:
            bad.append((text, "the edge"))
    return bad


TOKENS = ("the", "quick", "extraordinarily-long-token", "x", ",", "[CLS]", "日本語", "שלום")


def draw_all(
    heads: int, layers: int, query_len: int, key_len: int, tokens: bool, text: str | None
) -> list[Figure]:
    watched = some(layers, heads, query_len, key_len)
    names: dict[str, Sequence[str]] = {}
    if tokens:
        names["query_tokens"] = [TOKENS[n % len(TOKENS)] for n in range(query_len)]
        if query_len != key_len:
            names["key_tokens"] = [TOKENS[n % len(TOKENS)] for n in range(key_len)]
        else:
            names["key_tokens"] = names["query_tokens"]
    return [
        model_picture(watched, text=text, **names),
        layer_picture(watched, 0, text=text, **names),
        head_picture(watched, 0, heads - 1, text=text, **names),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "layers", "query_len", "key_len", "tokens"),
    [(2, 1, 512, 512, False), (2, 2, 7, 29, True)],
)
def test_no_two_texts_meet(heads: int, layers: int, query_len: int, key_len: int, tokens: bool) -> None:
    for figure in draw_all(heads, layers, query_len, key_len, tokens, "some words " * 40):
        assert meetings(figure) == []
        assert max(figure.get_size_inches()) < 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_two_texts_meet_whatever_the_shape(seed: int) -> None:
    chance = random.Random(seed)
    lengths = [*range(1, 61), 61, 128, 186, 186, 512, 512, 4096]
    query_len = chance.choice(lengths)
    key_len = chance.choice([query_len, query_len, chance.choice(lengths)])
    heads, layers = chance.choice([1, 2, 3, 8, 12, 16, 25, 32]), chance.choice([1, 2, 3, 6, 24])
    most = 2 if query_len * key_len > 300_000 else 96
    heads = min(heads, most)
    layers = min(layers, max(1, most // heads))
    text = chance.choice([None, "a b", "some words " * 40])
    for figure in draw_all(heads, layers, query_len, key_len, chance.random() < 0.7, text):
        assert meetings(figure) == [], (heads, layers, query_len, key_len)
        assert max(figure.get_size_inches()) < 50


def test_a_character_that_no_font_has_is_explained_once() -> None:
    heads = some(1, 2, 3, 3)
    heads.tokens = [["a", "\U0010ffff", "c"]]
    for figure in (model_picture(heads), head_picture(heads, 0, 1)):
        assert " ".join(texts_of(figure)).count(f"{MISSING}: a character") == 1
        assert MISSING in texts_of(figure)


@pytest.mark.parametrize("length", [2, 60])
def test_words_stand_on_both_sides_up_to_60_tokens(length: int) -> None:
    heads = some(1, 2, length, length)
    heads.tokens = [[f"Ġw{n}" for n in range(length)]]
    names = [f"w{n}" for n in range(length)]
    for place, figure in enumerate((layer_picture(heads, 0), head_picture(heads, 0, 0))):
        ax = figure.axes[place]
        assert [text.get_text() for text in ax.get_yticklabels()] == names
        assert [text.get_text() for text in ax.get_xticklabels()] == names


# One head


def test_a_large_head_says_what_it_does_and_what_keys_receive() -> None:
    heads = sinks(11, heads=2)
    heads.title = "Toy"
    figure = head_picture(heads, 0, -1, text="a text")
    assert figure.get_suptitle() == "Toy, layer 0, head 1: sink 0.70"
    texts = texts_of(figure)
    (meaning,) = (entry.meaning for entry in LABELS if entry.name == "sink")
    assert f"{meaning[0].upper()}{meaning[1:]}." in " ".join(texts) and "“a text”" in texts
    (bars,) = figure.axes[0].patches
    assert bars.get_data().values.tolist() == pytest.approx(heads[0].map[0, 1].mean(0).tolist())
    with pytest.raises(ArgumentError, match=r"chosen must name heads that layers.0 has: got head 2 of 2"):
        head_picture(heads, 0, 2)
    with pytest.raises(ArgumentError, match="layer must be 0: got 1"):
        head_picture(heads, 1, 0)


def test_what_keys_receive_is_the_mean_over_queries_not_over_cells() -> None:
    heads, length = Heads(), 300  # in 256 cells: some stand for two queries
    lengths = torch.tensor([290])
    q, k = torch.randn(2, 1, 1, length, 5, generator=torch.Generator().manual_seed(1))
    weights = AttentionMap(q, k, mask=Mask.padding(lengths, query_lengths=lengths))
    heads.add("a", reduce(weights, names=ROWS, keep=True))
    received = weights[0, 0][:290].mean(0)
    expected = torch.zeros(256).index_add_(0, torch.arange(length) * 256 // length, received)
    (bars,) = head_picture(heads, 0, 0).axes[0].patches
    numpy.testing.assert_allclose(bars.get_data().values, expected, rtol=1e-4, atol=1e-7)


# Names of both texts


def test_cross_attention_has_words_of_both_texts() -> None:
    names = {"query_tokens": ["L'", "accord"], "key_tokens": ["The", "agree", "ment"]}
    heads = some(1, 2, 2, 3)
    for figure, place in ((heads.plot(0, **names), 0), (heads.plot(0, 1, **names), 1)):
        ax = figure.axes[place]
        assert [text.get_text() for text in ax.get_yticklabels()] == names["query_tokens"]
    assert set(names["query_tokens"] + names["key_tokens"]) <= set(texts_of(heads.plot(**names)))
    weights = heads[0].map
    assert {"accord", "ment"} <= set(texts_of(weights.plot(**names)))
    with pytest.raises(ShapeError, match="query_tokens must match query_len: 3 tokens for 2"):
        weights.plot(query_tokens="abc")
    with pytest.raises(ShapeError, match="key_tokens must match key_len: 2 tokens for 3"):
        heatmaps(weights, key_tokens="ab")
    with pytest.raises(ShapeError, match="key_tokens must match key_len: 2 tokens for 3"):
        layer_picture(heads, 0, key_tokens="ab")


def test_in_a_grid_of_two_texts_each_layer_has_the_words_that_fit_it() -> None:
    heads = some(1, 1, 2, 2)
    for path, (T, S), kind in (("b", (3, 3), "self"), ("c", (2, 3), "cross")):
        q, k = torch.randn(1, 1, T, 4), torch.randn(1, 1, S, 4)
        heads.add(path, reduce(AttentionMap(q, k), kind=kind, names=ROWS, keep=True))
    texts = texts_of(model_picture(heads, query_tokens=["x", "y"], key_tokens=["k", "l", "m"]))
    assert [texts.count(word) for word in ("x", "y", "k", "l", "m")] == [3, 3, 2, 2, 2]
    with pytest.raises(ShapeError, match=r"key_tokens must match a layer: 4 tokens for lengths \[2, 3\]"):
        model_picture(heads, key_tokens="abcd")


def test_two_texts_of_one_length_are_not_mistaken_for_each_other() -> None:
    texts = texts_of(model_picture(some(1, 1, 3, 3), query_tokens="abc", key_tokens="xyz"))
    assert not {"a", "x"} & set(texts)  # self-attention: of which of the two?


# Which heads


def test_layers_and_columns_without_a_chosen_head_are_left_out() -> None:
    heads = some(3, 5, 4, 4)
    figure = model_picture(heads, chosen=[(2, 1), (0, 3), (0, -2), ("layers.2.attention", 3)])
    texts = texts_of(figure)
    assert len(figure.axes[0].images) == 3
    assert "Toy: what 3 of its 15 heads attend to" in texts
    assert {"layer 0", "layer 2", "head 1", "head 3"} <= set(texts)
    assert not {"layer 1", "head 0", "head 2", "head 4"} & set(texts)
    assert "Toy: what one of its 15 heads attends to" in texts_of(model_picture(heads, chosen=[(1, 1)]))


# What is written


def test_what_is_written_is_weights_times_norms_relative_to_the_layers_largest() -> None:
    torch.manual_seed(3)
    mha = MultiHeadAttention(15, 3)
    with watch(mha, written=True) as heads:
        mha(torch.randn(2, 7, 15))
    norms = heads[0].calls[0].written_norms[1]
    expected = (heads[0].map[1] * norms[:, None] / norms.max()).numpy()
    grid = heads.plot(batch=1, written=True)
    for image, cells in zip(grid.axes[0].images, expected, strict=True):
        numpy.testing.assert_allclose(image.get_array().filled(0), cells, rtol=1e-5)
    assert "‖v W_O‖" in grid.axes[1].get_ylabel()
    assert "Model: what each key contributes to the output, in its 3 heads" in texts_of(grid)
    pair = heads.plot(0, 2, batch=1, written=True)
    weights, written = (ax.images[0].get_array() for ax in pair.axes if ax.images)
    numpy.testing.assert_allclose(weights.filled(0), heads[0].map[1, 2].numpy(), rtol=1e-6)
    numpy.testing.assert_allclose(written.filled(0), expected[2], rtol=1e-5)
    layer = heads.plot(0, batch=1, written=True)
    drawn = [ax.images[0].get_array() for ax in layer.axes if ax.images]
    assert len(drawn) == 6
    numpy.testing.assert_allclose(drawn[3].filled(0), expected[1], rtol=1e-5)
    assert meetings(pair) == meetings(layer) == []


def test_what_was_not_measured_of_writing_is_refused() -> None:
    heads = some(1, 2, 3, 3)
    for layer in (None, 0):
        with pytest.raises(
            ArgumentError,
            match=r"written=True must have norms and maps: layers.0.attention was called with \[1, 2, 3, 3\] "
            "and kept no norms; use watch",
        ):
            heads.plot(layer, written=True)


# Colours


def linear(colour: str) -> numpy.ndarray:
    c = numpy.array(to_rgb(colour))
    return numpy.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: numpy.ndarray) -> numpy.ndarray:
    to_xyz = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ rgb.clip(0, 1) / [0.9505, 1, 1.089]
    x, y, z = numpy.where(xyz > 0.008856, numpy.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


VISION = {  # Machado 2009, without one kind of cone
    "all cones": numpy.eye(3),
    "no red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


@pytest.mark.parametrize("vision", VISION)
def test_colours_of_labels_are_told_apart_by_everybody(vision: str) -> None:
    assert OF_LABEL.keys() == {entry.name for entry in LABELS}
    perceived = [lab(numpy.array(VISION[vision]) @ linear(colour)) for colour in OF_LABEL.values()]
    assert min(numpy.linalg.norm(a - b) for a, b in itertools.combinations(perceived, 2)) > 12


def test_labels_can_be_read_on_white() -> None:
    for colour in OF_LABEL.values():  # a contrast of 4.5, as WCAG asks of small letters
        assert 1.05 / (linear(colour) @ [0.2126, 0.7152, 0.0722] + 0.05) >= 4.5
