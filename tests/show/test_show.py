"""Pictures and tables show what is there, and take any text as data."""

from __future__ import annotations

import io
import subprocess
import sys
from itertools import pairwise

import numpy
import pytest
import torch

from headwise import AttentionMap, Mask
from headwise.errors import ArgumentError, ShapeError
from headwise.show.tables import as_number, empty_table

pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from headwise.show.colour_maps import NOTHING, WEIGHTS
from headwise.show.heatmaps import cells, draw, heatmaps, save
from headwise.show.sheet import NAMED


def a_map(
    heads: int = 3, query_len: int = 5, key_len: int | None = None, batch: int = 2, **options
) -> AttentionMap:
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(batch, heads, query_len, 7, generator=generator)
    k = torch.randn(batch, heads, key_len or query_len, 7, generator=generator)
    return AttentionMap(q, k, **options)


def images(figure: Figure) -> list[numpy.ma.MaskedArray]:
    return [ax.images[0].get_array() for ax in figure.axes if ax.images]


def png(figure: Figure) -> bytes:
    room = io.BytesIO()
    figure.savefig(room, format="png", dpi=40)
    return room.getvalue()


def words(axis) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


# Heat maps


def test_the_image_is_the_weights_of_the_sequence_asked_for_queries_down_keys_to_the_right() -> None:
    weights = a_map(causal=True)
    for batch in (0, 1):
        for head, image in enumerate(images(heatmaps(weights, batch=batch))):
            numpy.testing.assert_array_equal(image.filled(0), weights[batch, head].numpy())
    figure = weights.plot("abcde", batch=1)
    for head, ax in enumerate(figure.axes[:3]):
        assert (ax.images[0].norm.vmin, ax.images[0].norm.vmax) == (0, 1)
        assert ax.get_title(loc="left") == f"head {head}"
        assert tuple(ax.images[0].get_extent()) == (-0.5, 4.5, 4.5, -0.5) and ax.images[0].origin == "upper"
    assert "key" in figure.get_supxlabel() and "query" in figure.get_supylabel()


def test_hidden_cells_have_a_colour_of_their_own() -> None:
    figure = heatmaps(a_map(causal=True))
    image = figure.axes[0].images[0]
    assert numpy.array_equal(image.get_array().mask, ~numpy.tri(5, dtype=bool))
    drawn = image.to_rgba(image.get_array())
    numpy.testing.assert_allclose(drawn[0, 4, :3], to_rgb(NOTHING), atol=1e-6)
    assert all(colour != NOTHING for colour in WEIGHTS)
    assert "grey: none" in figure.axes[-1].get_ylabel()
    assert "grey" not in heatmaps(a_map()).axes[-1].get_ylabel()


def test_colours_darken_evenly() -> None:
    """The steps between neighbouring colours look alike: lightness L* falls by nearly the same each time."""
    linear = [
        numpy.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)
        for c in map(numpy.array, map(to_rgb, WEIGHTS))
    ]
    lightness = [116 * numpy.cbrt(c @ [0.2126, 0.7152, 0.0722]) - 16 for c in linear]
    steps = -numpy.diff(lightness)
    assert steps.min() > 0.8 * steps.mean()
    assert steps.max() < 1.2 * steps.mean()


def test_tokens_label_the_outer_axes() -> None:
    tokens = ["the", "cat", "sat", "on", "it"]
    figure = heatmaps(a_map(8), tokens)
    png(figure)
    corner, inner = figure.axes[4], figure.axes[1]
    assert words(corner.xaxis) == words(corner.yaxis) == tokens
    assert not any(tick.label1.get_visible() for tick in inner.yaxis.get_major_ticks())
    assert not any(tick.label1.get_visible() for tick in inner.xaxis.get_major_ticks())


def test_an_incomplete_last_row_leaves_no_column_without_labels() -> None:
    figure = heatmaps(a_map(5), "abcde")
    png(figure)
    assert figure.axes[2].xaxis.get_major_ticks()[0].label1.get_visible()


def test_many_tokens_give_way_to_positions() -> None:
    figure = heatmaps(a_map(1, NAMED + 1), [f"token{i}" for i in range(NAMED + 1)])
    png(figure)
    assert not any("token" in text for text in words(figure.axes[0].xaxis))


def titled(heads: int, tokens: list[str] | None, titles: list[str], title: str | None = None) -> Figure:
    """A picture of a layer, which has a title of each head."""
    return draw(cells(a_map(heads)), (5, 5), (tokens, tokens), titles=titles, title=title)


def test_text_is_data_not_markup() -> None:
    tokens = ["$x$", "<b>", "$\\frac{", "a_b^c", "[red]"]
    figure = titled(1, tokens, ["$E=mc^2$"], "$a$ & <i>")
    png(figure)
    ax = figure.axes[0]
    assert words(ax.xaxis) == tokens
    assert not any(text.get_parse_math() for text in (*ax.get_xticklabels(), *ax.get_yticklabels()))
    assert ax.get_title(loc="left") == "$E=mc^2$"
    assert figure.get_suptitle() == "$a$ & <i>"


def test_long_titles_are_set_small_enough_to_stand_side_by_side() -> None:
    """Seen in the first picture of a layer: "head 2: previous-token 1.00" ran into its neighbour's title."""
    figure = titled(8, None, [f"head {h}: previous-token 1.00" for h in range(8)])
    png(figure)
    boxes = [ax._left_title.get_window_extent() for ax in figure.axes[:4]]
    assert all(box.x1 < two.x0 for box, two in pairwise(boxes))


def test_any_character_can_be_drawn_without_a_warning() -> None:
    tokens = ["日本語", "हिन्दी", "👩\u200d🚀", "שלום", "\U0010ffff"]
    assert png(titled(1, tokens, ["ਪੰਜਾਬੀ"], "ไทย")).startswith(b"\x89PNG")
    tokens = ["\n", "\x1b[31m", "\ud800", "\u202e", "x" * 99]
    figure = heatmaps(a_map(1), tokens)
    png(figure)
    assert words(figure.axes[0].xaxis) == ["↵", "�[31m", "�", "�", "x" * 11 + "…"]


def test_a_long_map_is_pooled_and_says_so() -> None:
    weights = a_map(2, 300, causal=True)
    figure = heatmaps(weights, ["x"] * 300, batch=1)
    cell = torch.arange(300) * 256 // 300
    rows = torch.bincount(cell)
    mass = torch.zeros(2, 256, 256).index_put_(
        (torch.arange(2)[:, None, None], cell[:, None], cell), weights[1], accumulate=True
    )
    for image, expected in zip(images(figure), mass / rows[:, None], strict=True):
        numpy.testing.assert_allclose(image.filled(0), expected.numpy(), rtol=1e-4, atol=1e-7)
        numpy.testing.assert_allclose(image.filled(0).sum(-1), 1, rtol=1e-5)
    assert "300 in 256 cells" in figure.get_supxlabel()
    assert "300 in 256 cells" in figure.get_supylabel()
    assert "averaged over its queries" in figure.axes[-1].get_ylabel()
    assert tuple(figure.axes[0].images[0].get_extent()) == (-0.5, 299.5, 299.5, -0.5)


def test_a_long_map_is_never_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("dense weights were made")

    monkeypatch.setattr(AttentionMap, "dense", refuse)
    assert len(images(heatmaps(a_map(2, 257)))) == 2


def test_padded_queries_do_not_thin_the_means() -> None:
    lengths = torch.tensor([290, 300])
    weights = a_map(1, 300, mask=Mask.padding(lengths, query_lengths=lengths))
    (image,) = images(heatmaps(weights))
    sums = image.filled(0).sum(-1)
    assert numpy.all(numpy.isclose(sums, 1, rtol=1e-5) | (sums == 0))
    assert sums[0] > 0 == sums[-1]


def test_low_precision_and_gradients_are_no_obstacle() -> None:
    q = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    assert png(heatmaps(AttentionMap(q, q)))


def test_misfits_are_refused_with_numbers() -> None:
    with pytest.raises(ShapeError, match=r"tokens must match query_len and key_len: 4 tokens for 5 and 5"):
        heatmaps(a_map(), "abcd")
    with pytest.raises(ShapeError, match=r"11 tokens for 5 and 11"):
        heatmaps(a_map(3, 5, 11), "abcdefghijk")
    with pytest.raises(IndexError):
        heatmaps(a_map(), batch=2)


@pytest.mark.slow
def test_pictures_leave_pyplot_alone() -> None:
    code = (
        "import sys, torch, headwise as hw; "
        "hw.AttentionMap(*torch.randn(2, 1, 2, 3, 4)).plot(); "
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("missing", "call", "hint"),
    [
        ("matplotlib", lambda: heatmaps(a_map()), r'pictures need matplotlib.*"headwise\[viz\]"'),
        ("rich", empty_table, r'tables need rich.*"headwise\[cli\]"'),
    ],
)
def test_a_missing_extra_says_how_to_get_it(monkeypatch, missing, call, hint) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=hint) as caught:
        call()
    assert caught.value.name == missing


# Writing


def test_a_picture_is_written_in_the_format_of_its_name(tmp_path) -> None:
    figure = heatmaps(a_map(1))
    assert save(figure, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in save(figure, str(tmp_path / "a.SVG")).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.SVG", "a.png"]


@pytest.mark.parametrize("trouble", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_what_was_there(tmp_path, trouble) -> None:
    class Broken(Figure):
        def savefig(self, file, **options) -> None:
            file.write(b"half a pict")
            raise trouble

    old = tmp_path / "heads.png"
    old.write_bytes(b"old")
    with pytest.raises(trouble):
        save(Broken(), old)
    assert [path.name for path in tmp_path.iterdir()] == ["heads.png"]
    assert old.read_bytes() == b"old"


def test_a_place_that_cannot_hold_a_picture_is_refused(tmp_path) -> None:
    figure = Figure()
    with pytest.raises(ArgumentError, match=r"out must end in .png, .svg, .pdf: got 'heads.gif'"):
        save(figure, "heads.gif")
    with pytest.raises(ArgumentError, match=r"existing folder: '.*nowhere' does not exist; create"):
        save(figure, tmp_path / "nowhere" / "heads.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ArgumentError, match=r"folder.png' is a folder"):
        save(figure, tmp_path / "folder.png")


# Tables


def test_what_no_query_has_is_a_dash() -> None:
    stats = a_map(1, 1).statistics("previous", "itself")
    assert [str(as_number(name, values[0, 0].item())) for name, values in stats.items()] == ["-", "1.00"]


def test_shares_from_one_half_on_stand_out() -> None:
    assert [as_number("first", share).style for share in (0.49, 0.5)] == ["", "bold"]
    assert as_number("entropy", 3.0).style == ""
