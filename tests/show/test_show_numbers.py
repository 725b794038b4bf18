"""Pictures of numbers: heads' outputs before and behind W_O, statistics by layer, roles by head.

Letters: B batch, T query_len, H num_heads, Dv value_dim, E d_model.
"""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError, PackageMissing, ShapeError
from headwise.heads.roles import Role, Roles
from headwise.listeners.importance import Robustness

pytest.importorskip("matplotlib")

import numpy
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from headwise.show.curves import robustness_curve
from headwise.show.outputs_picture import _strongest, outputs_picture

B, T, E, H = 2, 5, 21, 3
WORDS = "The quick brown fox $jumps$\x1b".split(" ")


def drawn(figure: Figure) -> list[Any]:
    """The numbers of every map in it, once it is drawn without a warning."""
    figure.savefig(io.BytesIO(), format="png", dpi=20)
    return [image.get_array() for ax in figure.axes[:1] for image in ax.images]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in (*figure.texts, *(text for ax in figure.axes for text in ax.texts))]


# From heads to output


@pytest.mark.parametrize("bias", [True, False])
def test_what_heads_say_and_write_is_drawn_and_sums_to_the_output(bias: bool) -> None:
    mha, x = hw.MultiHeadAttention(E, H, out_bias=bias), torch.randn(B, T, E)
    with torch.no_grad():
        heads, (output, _) = mha.head_outputs(x), mha(x)
    figure = outputs_picture(heads, mha.out_proj, WORDS, batch=1, title="A title")
    maps = drawn(figure)
    assert len(maps) == 3 * H + 1
    for head in range(H):
        numpy.testing.assert_array_equal(maps[3 * head], heads[1, head].numpy())
        numpy.testing.assert_array_equal(maps[3 * head + 1], heads[1, head].numpy())
    parts = sum(maps[3 * head + 2] for head in range(H))
    whole = parts + (mha.out_proj.bias.detach().numpy() if bias else 0)
    numpy.testing.assert_allclose(whole, maps[-1], atol=1e-6)
    numpy.testing.assert_allclose(maps[-1], output[1].numpy(), atol=1e-6)
    words = texts(figure)
    assert words.count("$jumps$�") == 4 and "head 2" in words and "A title" in words
    assert any("and the bias added" in text for text in words) is bias


def test_what_was_collected_draws_itself_and_tells_what_is_written(tmp_path: Path) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 11, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    layer_outputs: list[Tensor] = []
    model.layers[1].self_attn.register_forward_hook(lambda module, args, out: layer_outputs.append(out[0]))
    with torch.no_grad(), hw.collect(model) as outputs:
        model(torch.randn(B, T, E))
    parts = outputs.written(1)
    assert parts.shape == (B, H, T, E)
    torch.testing.assert_close(parts.sum(1) + model.layers[1].self_attn.out_proj.bias, layer_outputs[0])
    figure = outputs.plot(tokens=WORDS)
    assert "From heads to output: layer 1" in texts(figure)
    numpy.testing.assert_allclose(drawn(figure)[-1], layer_outputs[0][0].numpy(), atol=1e-6)
    torch.save(outputs, tmp_path / "outputs.pt")
    for again in (pickle.loads(pickle.dumps(outputs)), torch.load(tmp_path / "outputs.pt")):
        assert torch.equal(again[1], outputs[1])
        with pytest.raises(ArgumentError, match="a model that still exists: that of layer 1 was deleted"):
            again.plot(1)
    gated = hw.MultiHeadAttention(E, H, gate="channel")
    with torch.no_grad(), hw.collect(gated) as outputs:
        gated(torch.randn(B, T, E))
    with pytest.raises(ArgumentError, match=r"\(MultiHeadAttention\) has gate='channel'"):
        outputs.plot()


def test_outputs_that_cannot_be_drawn_are_told_why() -> None:
    mha, heads = hw.MultiHeadAttention(E, H), torch.randn(B, H, T, E // H)
    with pytest.raises(ShapeError, match=r"tokens must match query_len: 2 tokens for 5"):
        outputs_picture(heads, mha.out_proj, ["a", "b"])
    with pytest.raises(IndexError, match=r"batch must be between 0 and 1: got 2"):
        outputs_picture(heads, mha.out_proj, batch=2)
    with pytest.raises(ShapeError, match=r"21 input channels for 2 heads of 7"):
        outputs_picture(heads[:, :2], mha.out_proj)
    with pytest.raises(ShapeError, match=r"heads must be \[B, H, T, Dv\]: got \[3, 5, 7\]"):
        outputs_picture(heads[0], mha.out_proj)
    with pytest.raises(ArgumentError, match=r"projection must be nn.Linear: got Dropout"):
        outputs_picture(heads, nn.Dropout())


def test_of_channels_that_share_a_column_the_strongest_is_seen() -> None:
    values = torch.tensor([[0.1, -3.0, 2.0, 0.0, 0.5, 0.2, -0.1]])
    assert _strongest(values, 3).tolist() == [[-3.0, 0.5, 0.20000000298023224]]
    assert _strongest(values, 7) is not None and _strongest(values, 7).shape == (1, 7)
    many = torch.randn(T, 101)
    for most in (1, 2, 50, 100):
        shown = _strongest(many, most)
        assert shown.shape == (T, most)
        numpy.testing.assert_array_equal(abs(shown).max(1), many.abs().amax(1).numpy())


# Statistics by layer


def test_every_head_is_a_dot_in_its_layer_and_the_line_is_their_mean() -> None:
    model = nn.ModuleList([hw.MultiHeadAttention(E, H, causal=True), hw.MultiHeadAttention(E, 7)])
    with torch.no_grad(), hw.watch(model, written=True) as heads:
        for layer in model:
            layer(torch.randn(B, 11, E))
    names = ("entropy", "written_first", "max_logit")
    figure = heads.plot_layers(names)
    drawn(figure)
    for ax, name in zip(figure.axes, names, strict=True):
        dots = sorted(tuple(map(float, dot)) for dot in ax.collections[0].get_offsets())  # heads in order
        expected = [heads[layer].statistics[name].tolist() for layer in (0, 1)]
        assert [y for _, y in dots] == pytest.approx([y for layer in expected for y in layer])
        assert [round(x) for x, _ in dots] == [0] * H + [1] * 7
        assert ax.lines[0].get_ydata() == pytest.approx([sum(some) / len(some) for some in expected])
    assert "Model: its 10 heads, layer by layer" in texts(figure)
    assert len(heads.plot_layers("entropy").axes) == 1
    with pytest.raises(ArgumentError, match="statistics must be measured: got 'induction'"):
        heads.plot_layers(["entropy", "induction"])
    with pytest.raises(ArgumentError, match="statistics must not be empty: got 0 names"):
        heads.plot_layers(())
    with pytest.raises(ArgumentError, match="heads must not be empty: 0 layers"):
        hw.Heads().plot_layers()


def test_layers_of_two_stacks_are_numbered_apart() -> None:
    model = nn.Transformer(22, 2, 1, 2, 11, batch_first=True).eval()
    with torch.no_grad(), hw.watch(model) as heads:
        model(torch.randn(B, T, 22), torch.randn(B, 7, 22))
    figure = heads.plot_layers("entropy")
    ax = figure.axes[0]
    drawn(figure)
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "0", "1", "0", "1"]
    lines = [line.get_ydata() for line in ax.lines if len(line.get_xdata()) == len(set(line.get_xdata()))]
    for stack, line in zip(heads.stacks.values(), lines, strict=True):
        assert line == pytest.approx([heads[path].entropy.mean().item() for path in stack.values()])
    assert sum(text.startswith(("encoder.", "decoder.")) for text in texts(figure)) == 3


# Roles by head


def role(name: str, share: float, rule: float, is_found: bool) -> Role:
    heads: list[tuple[int | str, int, float]] = [(1, 2, share), (0, 1, share)] if is_found else []
    rules = {"+1 words": 0.1, "the last noun": rule}
    by_distance = {1: (share, 23)}
    return Role(name, is_found, 1, 2, share, share - 0.1, share + 0.05, 23, rules, by_distance, heads=heads)


def test_roles_are_drawn_with_the_rule_beside_each() -> None:
    relations = [role("noun > verb", 0.3, 0.7, False), role("verb > object", 0.8, 0.4, True)]
    scores = {each.name: torch.full((2, 3), each.share) for each in relations}
    roles = Roles({each.name: each for each in relations}, scores, [0, 1], title="$Toy$")
    figure = roles.plot()
    (shares,) = drawn(figure)
    assert shares.shape == (2, 6) and shares[0].tolist() == pytest.approx(
        [0.8] * 6
    )  # what was found stands above
    left, right = figure.axes[:2]
    outlined = [patch.get_xy() for patch in left.patches if isinstance(patch, Rectangle)]
    assert outlined == [(4.5, -0.5), (0.5, -0.5)]  # heads 1.2 and 0.1
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["verb > object", "noun > verb"]
    assert [tick.get_text() for tick in left.get_xticklabels()] == ["layer 0", "layer 1"]
    dots = [tuple(map(float, dot.get_offsets()[0])) for dot in right.collections]
    assert dots == [(0.4, 0), (0.8, 0), (0.7, 1), (0.3, 1)]
    words = texts(figure)
    assert "$Toy$: 1 of 2 relations found" in words and "0.40  the last noun" in words
    with pytest.raises(ArgumentError, match="roles must have a measured relation: 0 of 1"):
        Roles({}, {}, [0], unasked={"a > b": "since"}).plot()


def test_without_matplotlib_pictures_of_numbers_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    relation = role("verb > object", 0.8, 0.4, True)
    roles = Roles({relation.name: relation}, {relation.name: torch.full((2, 3), 0.8)}, [0, 1])
    mha, x = hw.MultiHeadAttention(E, H), torch.randn(B, T, E)
    with torch.no_grad(), hw.watch(mha) as heads, hw.collect(mha) as outputs:
        mha(x)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (roles.plot, heads.plot_layers, outputs.plot):
        with pytest.raises(PackageMissing, match=r"need matplotlib; install with: \S+ \S+ .headwise\[viz\]"):
            draw()


# The loss without heads


def test_names_of_curves_stand_on_their_own_sides() -> None:
    random, ordered = torch.tensor([[2.0, 2.5, 3.0, 4.0]]), torch.tensor([2.0, 2.1, 2.2, 4.0])
    for measured in (
        Robustness(2.0, 7, [0, 2, 5, 7], ordered, random, None),
        Robustness(2.0, 7, [0, 2, 5, 7], None, random, None),
        Robustness(2.0, 7, [0, 2, 5, 7], ordered, None, None),
        Robustness(2.0, 7, [0, 2, 5, 7], random[0], random, None),
        Robustness(2.0, 7, [0, 5], ordered[:2], random[:, :2], None),
    ):
        figure = robustness_curve(measured)
        curves = ("at random", "least important first")
        names = [text for text in figure.axes[0].texts if text.get_text() in curves]
        assert len(names) == (measured.by_importance is not None) + (measured.at_random is not None)
        assert len({text.get_verticalalignment() for text in names}) == len(names)
        assert to_hex(figure.axes[0].lines[0].get_color()) == "#5b6270"
