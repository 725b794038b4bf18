"""Heads as people write them: which are meant, and what is said of those that are not there."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

import headwise as hw
from headwise.errors import ArgumentError
from headwise.heads.layer_names import HeadChoice


def watched(**layers: int) -> hw.Heads:
    """Layers by path, with as many heads as it says."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({name: hw.MultiHeadAttention(6 * n, n) for name, n in layers.items()})
    model.forward = lambda: [layer(torch.zeros(1, 5, layer.d_model)) for layer in model.layers.values()]  # type: ignore[method-assign]
    with hw.watch(model) as heads:
        model()
    return heads


@pytest.fixture(scope="module")
def heads() -> hw.Heads:
    return watched(**{"0": 3, "1": 2, "2": 3})


@pytest.mark.parametrize(
    ("layers", "numbers", "intended"),
    [
        ([], [], "0.0 0.1 0.2 1.0 1.1 2.0 2.1 2.2"),
        (["1"], [], "1.0 1.1"),
        (["2,0"], ["1"], "0.1 2.1"),
        (["0", "2"], ["0-1"], "0.0 0.1 2.0 2.1"),
        (["0-1"], ["1,0"], "0.0 0.1 1.0 1.1"),
        (["-1"], ["2"], "2.2"),
        (["layers.1"], [], "1.0 1.1"),
        ([], ["1"], "0.1 1.1 2.1"),
        ([], ["2.1"], "2.1"),
        ([], ["2.1, 0.0-1", "layers.1.0"], "0.0 0.1 1.0 2.1"),
        ([], ["-1.2"], "2.2"),
    ],
    ids=str,
)
def test_what_is_written_means_these_heads(
    heads: hw.Heads, layers: Sequence[str], numbers: Sequence[str], intended: str
) -> None:
    choice = HeadChoice.of(layers, numbers)
    assert bool(choice) is bool(layers or numbers)
    assert [f"{layer}.{head}" for layer, head in choice.among(heads)] == intended.split()


def test_a_range_means_the_layers_that_are_there() -> None:
    heads = watched(**{"3": 1, "7": 1, "11": 1})
    assert HeadChoice.of(["3-8"]).among(heads) == [(3, 0), (7, 0)]
    with pytest.raises(ArgumentError, match=r"layer must be one of 3, 7, 11: got 0; "):
        HeadChoice.of(["0-7"]).among(heads)


@pytest.mark.parametrize(
    ("layers", "numbers", "message"),
    [
        (["--5"], [], "layer must be a number, a range or a module path: got '--5'; 0 is the first"),
        (["2-0"], [], "layer must be an ascending range: got '2-0'; try 0-2"),
        (["0,,2"], [], "layer must not be empty between commas: got '0,,2'; try 0,2"),
        ([""], [], "layer must not be empty between commas: got ''; "),
        ([], ["x"], "head must be a number, or layer.head: got 'x'; try 3, 0-3 or 2.3"),
        ([], ["-1"], "head must be a number, or layer.head: got '-1'; "),
        ([], ["2."], "head must be a number, or layer.head: got '2.'; "),
        ([], ["3-1"], "head must be an ascending range: got '3-1'; try 1-3"),
        ([], ["0-1.2"], "head must be of one layer: got '0-1.2'; choose the layers 0-1 and the head 2"),
        (["0"], ["2.1"], "head must be a number without a layer if layers are chosen: got '2.1'; leave out"),
    ],
    ids=str,
)
def test_what_means_nothing_is_refused_without_a_model(
    layers: Sequence[str], numbers: Sequence[str], message: str
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        HeadChoice.of(layers, numbers)


def test_what_is_not_there_is_refused_with_what_there_is(heads: hw.Heads) -> None:
    for layers, numbers, message in (
        (["9"], [], "layer must be one of 0 to 2: got 9; "),
        (["1-9"], [], "layer must be one of 0 to 2: got 9; "),
        (["x"], [], "layer must be an attention layer: got 'x'; there are layers.0"),
        ([], ["2"], "head must be one of 0 to 1: got 2 in layer 1, which has 2 heads; "),
        ([], ["0.7"], "head must be one of 0 to 2: got 7 in layer 0, which has 3 heads; "),
        ([], ["1-9"], "got 9 in layer 0, which has 3 heads; "),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            HeadChoice.of(layers, numbers).among(heads)
    with pytest.raises(ArgumentError, match="heads must not be empty: 0 layers"):
        HeadChoice.of(["0"]).among(hw.Heads())
