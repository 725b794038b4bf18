"""Tables and pictures of watched heads: every head in its place, numbers as measured, any text as data."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import numpy
import pytest
import torch
from torch import Tensor

from headwise import AttentionMap, Heads, MultiHeadAttention, watch
from headwise.engines.statistics import ROW_STATISTICS
from headwise.errors import ArgumentError
from headwise.heads.record import reduce
from headwise.listeners.capture import SHORT

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from rich.console import Console

from headwise.show.heads_pictures import MOST_NAMED, SMALL_CELLS, layer_picture, model_picture
from headwise.show.heads_tables import as_sentences, census, check_sort, heads_table, layers_table


def previous(length: int) -> Tensor:
    return torch.eye(length).roll(1, 0).index_put((torch.tensor(0),), torch.eye(length)[0])


def even(length: int) -> Tensor:
    return torch.full((length, length), 1 / length)


def undecided(length: int) -> Tensor:
    """Less than half of the weight on the query itself, the rest spread: no label, at 6 positions."""
    return 0.35 * torch.eye(length) + 0.65 * even(length)


def a_model(
    layers: Sequence[Sequence[Tensor]],
    *,
    keep: bool = True,
    pooled: int | None = 128,
    title: str | None = "Toy",
) -> Heads:
    """Heads with these weights, [T, T] each, as if they had been watched."""
    heads = Heads()
    for number, each in enumerate(layers):
        weights = AttentionMap.from_weights(torch.stack(list(each))[None])
        record = reduce(weights, names=ROW_NAMES, pooled=pooled, with_patterns=True, keep=keep, forward=1)
        heads.add(f"layers.{number}.attention", record)
    heads.title = title
    return heads


ROW_NAMES = tuple(name for name in ROW_STATISTICS if name != "max_logit")  # which weights alone do not tell


def toy(length: int = 6) -> Heads:
    return a_model([[previous(length), even(length), undecided(length)], [undecided(length)] * 2])


def png(figure: Figure) -> bytes:
    room = io.BytesIO()
    figure.savefig(room, format="png", dpi=50)
    return room.getvalue()


def texts_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def shown(table: object, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


# The picture of a model


def test_every_head_is_drawn_once_as_it_is() -> None:
    heads = toy()
    images = model_picture(heads).axes[0].images
    expected = [layer.map[0, head] for layer in heads.values() for head in range(len(layer))]
    assert len(images) == len(expected) == 5
    for image, weights in zip(images, expected, strict=True):
        numpy.testing.assert_array_equal(image.get_array().filled(0), weights.numpy())
        assert (image.norm.vmin, image.norm.vmax) == (0, 1)
        assert image.origin == "upper"


def test_layers_run_down_and_heads_to_the_right() -> None:
    figure = model_picture(toy())
    corners = (image.get_extent() for image in figure.axes[0].images)
    drawn = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
    places = {at: (left, top) for at, (left, _, _, top) in zip(drawn, corners, strict=True)}
    assert places[0, 0][0] == places[1, 0][0] < places[0, 1][0] == places[1, 1][0] < places[0, 2][0]
    assert places[0, 0][1] == places[0, 2][1] < places[1, 0][1] == places[1, 1][1]
    bottom, top = figure.axes[0].get_ylim()
    assert bottom > top  # y grows downwards
    words = texts_of(figure)
    assert [word for word in words if word.startswith(("layer", "head"))] == [
        "head 0", "head 1", "head 2", "layer 0", "layer 1",
    ]  # fmt: skip


def test_heads_with_a_label_have_it_with_its_score_and_a_frame_in_its_colour() -> None:
    figure = model_picture(toy())
    words = texts_of(figure)
    assert {"previous-token 1.00", "broad 1.00", "1 previous-token", "1 broad", "3 mixed"} <= set(words)
    assert any(word.startswith("attends to the token just before") for word in words)
    assert not any(word.startswith("mixed") for word in words)
    frames = [patch for patch in figure.axes[0].patches if isinstance(patch, Rectangle)]
    widths = [frame.get_linewidth() for frame in frames]
    assert widths[0] == widths[1] > widths[2] == widths[3] == widths[4]


def test_the_title_says_which_model_and_which_text() -> None:
    words = texts_of(model_picture(toy(), text="to  be\nor not"))
    assert words.count("Toy: what its 5 heads attend to in “to be or not”") == 1
    assert "Model: what its one head attends to" in texts_of(model_picture(a_model([[even(3)]], title=None)))


def test_tokens_are_written_down_and_across() -> None:
    heads = toy(5)
    heads.tokens = [["$a$", "<b>", "日本", "\x1b[31m", "x" * 99]]
    figure = model_picture(heads, text="$a$ \x1b[31m")
    assert png(figure).startswith(b"\x89PNG")
    words = texts_of(figure)
    assert words.count("$a$") == 2 + 3  # beside two layers, below three heads
    assert words.count("�[31m") == 5
    assert not any(text.get_parse_math() for text in figure.axes[0].texts)


def test_many_tokens_give_way_to_the_first_and_last_position() -> None:
    heads = toy(MOST_NAMED + 1)
    heads.tokens = [[f"word{n}" for n in range(MOST_NAMED + 1)]]
    words = texts_of(model_picture(heads))
    assert not any(word.startswith("word") for word in words)
    assert words.count(str(MOST_NAMED)) == 5


@pytest.mark.parametrize("keep", [True, False])
def test_long_maps_are_pooled(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    length = SMALL_CELLS * 2 + 7
    heads = a_model([[previous(length), even(length)]], keep=keep)

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("dense weights were made")

    monkeypatch.setattr(AttentionMap, "dense", refuse)
    figure = model_picture(heads)
    arrays = [image.get_array() for image in figure.axes[0].images]
    assert all(array.shape == (SMALL_CELLS, SMALL_CELLS) for array in arrays)
    numpy.testing.assert_allclose(arrays[1].filled(0).sum(-1), 1, rtol=1e-4)
    assert "averaged over its queries" in figure.axes[1].get_ylabel()
    assert any(f"into {SMALL_CELLS} rows" in word for word in texts_of(figure))


@pytest.mark.slow
def test_a_model_of_many_heads_still_makes_a_picture_of_bearable_size() -> None:
    heads = a_model([[even(4)] * 96] * 3)
    figure = model_picture(heads)
    assert len(figure.axes[0].images) == 288
    assert max(figure.get_size_inches()) < 50
    assert not any(word == "broad 1.00" for word in texts_of(figure))  # too small for words: the frame tells
    assert png(figure)


def test_stacks_of_different_models_are_named_by_path() -> None:
    heads = a_model([[even(4)] * 2])
    record = heads[0].calls[0]
    heads.add("decoder.0.cross", record)
    words = texts_of(model_picture(heads))
    assert "layers.0.attention" in words and "decoder.0.cross" in words


def test_pictures_of_nothing_are_refused() -> None:
    with pytest.raises(ArgumentError, match="heads must not be empty: 0 layers"):
        model_picture(Heads())
    with pytest.raises(
        ArgumentError, match=r"layers.0.attention was called with \[1, 1, 4, 4\] and kept neither"
    ):
        model_picture(a_model([[even(4)]], keep=False, pooled=None))
    with pytest.raises(IndexError):
        model_picture(toy(), batch=1)


# The picture of a layer


def test_a_layer_is_its_heat_maps_with_labels_and_names() -> None:
    heads = toy()
    heads.tokens = [list("abcdef")]
    figure = layer_picture(heads, 0)
    assert figure.get_suptitle() == "Toy, layer 0"
    titles = [ax.get_title(loc="left") for ax in figure.axes[:3]]
    assert titles == ["head 0: previous-token 1.00", "head 1: broad 1.00", "head 2"]
    numpy.testing.assert_array_equal(
        figure.axes[0].images[0].get_array().filled(0), heads[0].map[0, 0].numpy()
    )
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list("abcdef")


def test_plot_is_the_grid_a_layer_or_one_head() -> None:
    heads = toy(4)
    assert "Toy: what its 5 heads attend to" in texts_of(heads.plot())
    assert "Toy: what 2 of its 5 heads attend to in “a b”" in texts_of(
        heads.plot(chosen=[(1, 0), (0, 2)], text="a b")
    )
    assert heads.plot("layers.0.attention").get_suptitle() == "Toy, layer 0"
    assert heads.plot(0, text="a b").get_suptitle() == "Toy, layer 0 in “a b”"
    assert heads.plot(-1, 1).get_suptitle() == "Toy, layer 1, head 1: self 0.51"
    with pytest.raises(ArgumentError, match="head must be given with its layer: got head=1"):
        heads.plot(head=1)
    with pytest.raises(
        ArgumentError, match="chosen must not be combined with layer: got 1 heads and layer=0"
    ):
        heads.plot(0, chosen=[(0, 1)])
    with pytest.raises(ArgumentError, match="layer must be one of 0 to 1: got 2"):
        heads.plot(2)


def test_a_layer_without_its_map_is_drawn_from_its_pooled_picture() -> None:
    heads = a_model([[previous(300), even(300)]], keep=False)
    figure = layer_picture(heads, 0)
    assert figure.axes[1].images[0].get_array().shape == (128, 128)
    assert "300 in 128 cells" in figure.get_supxlabel()
    numpy.testing.assert_allclose(figure.axes[1].images[0].get_array().filled(0).sum(-1), 1, rtol=1e-4)


def test_steps_of_generation_do_not_hide_the_picture_of_the_prompt() -> None:
    mha = MultiHeadAttention(16, 2, causal=True)
    with watch(mha) as heads:
        x = torch.randn(1, 5, 16)
        mha(x)
        mha(x[:, -1:], x, x)
    assert layer_picture(heads, 0).axes[0].images[0].get_array().shape == (5, 5)


# Tables


def test_heads_are_sorted_and_what_was_not_measured_comes_last() -> None:
    heads = toy()
    heads[1].calls[0].rows["entropy"][0, 1] = math.nan
    down, up = (heads_table(heads, sort="entropy", descending=each).table for each in (True, False))
    assert [str(cell) for cell in down.columns[3].cells] == ["1.79", "1.56", "1.56", "0.00", "-"]
    assert [str(cell) for cell in up.columns[3].cells] == ["0.00", "1.56", "1.56", "1.79", "-"]


def test_layers_are_sorted_by_their_order_not_by_their_spelling() -> None:
    heads = a_model([[even(3)]] * 11)
    record = heads[0].calls[0]
    heads.add("other", record)  # now all go by path
    table = heads_table(heads, sort="layer", descending=False).table
    assert [str(cell) for cell in table.columns[0].cells][1:3] == ["layers.1.attention", "layers.2.attention"]


def test_the_number_sorted_by_is_shown() -> None:
    assert "spread" in shown(heads_table(toy(), sort="spread", columns=["entropy"]))
    assert "spread" not in shown(heads_table(toy(), sort="label", columns=["entropy"]))


def test_an_unknown_order_is_refused_before_anything_is_measured() -> None:
    for sort in ("label", "layer", "head", "entropy", "induction"):
        check_sort(sort)
    with pytest.raises(ArgumentError, match="sort must be a column: got 'lable'; did you mean 'label'"):
        check_sort("lable")
    with pytest.raises(ArgumentError, match="sort must be a column: got 'induction'; "):
        heads_table(toy(), sort="induction")


def test_layers_are_means_of_their_heads() -> None:
    heads = toy()
    table = layers_table(heads).table
    assert table.row_count == 2
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    assert cells[0] == ["0", "1"] and cells[1] == ["3", "2"]
    assert cells[2] == [f"{layer.statistics.entropy.mean():.2f}" for layer in heads.values()]
    assert cells[3] == [f"{layer.statistics.distance.mean():.1f}" for layer in heads.values()]
    assert cells[4] == [f"{layer.statistics.first.mean():.2f}" for layer in heads.values()]
    assert cells[6] == ["1 previous-token, 1 broad, 1 mixed", "2 mixed"]
    assert "Toy" in shown(layers_table(heads))
    assert "Toy" not in shown(layers_table(heads, title=""))


def diversities(heads: Heads) -> list[str]:
    """Of each layer, as the table shows them."""
    return [str(cell) for cell in layers_table(heads).table.columns[5].cells]


def test_diversity_is_between_0_for_the_same_and_log_2_for_nothing_in_common() -> None:
    diagonal, other = torch.eye(4), torch.eye(4).roll(1, 0)
    heads = a_model([[diagonal, diagonal], [diagonal, other], [diagonal, diagonal, other]])
    assert diversities(heads) == ["0.00", f"{math.log(2):.2f}", f"{math.log(2) * 2 / 3:.2f}"]


def test_diversity_is_a_dash_where_it_is_not_known() -> None:
    heads = a_model([[even(4)] * 2], keep=False)
    assert diversities(heads) == ["-"]
    assert diversities(a_model([[even(4)]])) == ["-"]  # one head differs from nobody


def test_diversity_that_was_measured_needs_no_map() -> None:
    mha = MultiHeadAttention(16, 2)
    x = torch.randn(1, 7, 16)
    with watch(mha) as unmeasured:
        mha(x)
    with watch(mha, keep=False, diversity=True) as measured:
        mha(x)
    assert diversities(measured) == diversities(unmeasured) != ["-"]


def test_labels_are_counted_the_most_frequent_first_mixed_last() -> None:
    heads = a_model([[undecided(6)] * 4 + [even(6)] * 2 + [previous(6)]])
    assert [(name, count) for name, count, _ in census(heads.all())] == [
        ("broad", 2),
        ("previous-token", 1),
        ("mixed", 4),
    ]
    assert "spreads its weight almost evenly" in as_sentences(heads)[0]


def test_long_texts_keep_pictures_but_no_maps() -> None:
    """What `headwise look` counts on when a model reads more than it keeps maps of."""
    mha = MultiHeadAttention(8, 1)
    with watch(mha, pooled=16, patterns=True, diversity=True, statistics="entropy") as heads:
        mha(torch.randn(1, SHORT + 1, 8))
    assert heads[0].calls[0].map is None
    assert model_picture(heads).axes[0].images[0].get_array().shape == (16, 16)
