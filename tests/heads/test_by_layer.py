"""Results by layer: a layer goes by its number or its path, in whatever is asked and given."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.errors import ArgumentError
from headwise.heads.layer_names import ByLayer, names_of
from judge import error
from small_models import albert, gpt2, ours, tokens

PLACES = ["h.0.attn", "h.1.attn", "h.2.attn", "h.3.attn"]
NAMES = names_of(PLACES)


def test_a_layer_goes_by_its_number_its_path_the_end_of_its_path_and_from_the_end() -> None:
    actual = ByLayer(dict.fromkeys(PLACES, "x") | {"h.3.attn": "last"}, NAMES)
    assert actual[3] == actual[-1] == actual["h.3.attn"] == actual["3.attn"] == "last"
    assert list(actual) == [0, 1, 2, 3] and actual.paths == PLACES and len(actual) == 4
    assert actual.path_of(-1) == actual.path_of("3.attn") == "h.3.attn" and actual.name_of("h.3.attn") == 3
    assert all(name in actual for name in (0, -4, "h.0.attn", "0.attn"))
    assert not any(name in actual for name in (4, -5, "h.4.attn", True, 1.5, None, (0, 1)))
    assert actual.get(9) is None and actual.get(9, "none") == "none" and actual.get(3, "none") == "last"
    assert dict(actual) == {0: "x", 1: "x", 2: "x", 3: "last"} == actual
    assert repr(ByLayer({"h.0.attn": 7})) == "ByLayer({0: 7})"


def test_numbers_are_the_models_whatever_is_there() -> None:
    actual = ByLayer({"h.2.attn": 2, "h.1.attn": 1}, NAMES)
    assert list(actual) == [2, 1] and actual[2] == 2 and actual[-3] == 1
    with pytest.raises(
        ArgumentError, match=r"layer must be one that ran: got -1 \(h\.3\.attn\), which did not run"
    ):
        actual[-1]
    with pytest.raises(ArgumentError, match=r"layer must be one of 0 to 3: got 7; there are h\.0\.attn"):
        actual[7]


def test_where_there_are_several_stacks_layers_go_by_paths() -> None:
    actual = ByLayer({"encoder.0": 1, "decoder.0": 2})
    assert list(actual) == ["encoder.0", "decoder.0"] and actual["decoder.0"] == 2
    with pytest.raises(ArgumentError, match=r"several stacks: got 0 for encoder\.\*, decoder\.\*"):
        actual[0]


def test_visits_of_the_only_layer_are_its_layers_and_of_one_among_others_go_by_paths() -> None:
    alone = ByLayer({"attn": 0, "attn#1": 1, "attn#2": 2}, names_of(["attn"]))
    assert list(alone) == [0, 1, 2] and alone[-1] == alone["attn#2"] == 2 and alone["attn#0"] == 0
    among = ByLayer({"h.1.attn": 0, "h.1.attn#1": 1}, NAMES)
    assert list(among) == ["h.1.attn", "h.1.attn#1"]  # the number 1 would mean either
    with pytest.raises(ArgumentError, match="several stacks: got 1"):
        among[1]


def test_it_can_be_copied_and_pickled() -> None:
    actual = ByLayer({"h.1.attn": [5]}, NAMES)
    for again in (copy.deepcopy(actual), pickle.loads(pickle.dumps(actual))):
        assert again == actual and again[1] == [5] and again.path_of(1) == "h.1.attn"


def test_what_is_collected_measured_and_pruned_goes_by_number_and_path_alike() -> None:
    model, ids = gpt2(), tokens()
    path = "transformer.h.1.attn"
    with torch.no_grad(), hw.collect(model) as outputs:
        model(ids)
    means = hw.head_means(model, [ids])
    scores = hw.importance(model, [ids])
    losses = hw.robustness(model, [ids], method="random", repeats=1, points=1).single
    assert losses is not None
    for actual in (outputs, means, scores, losses):
        assert isinstance(actual, ByLayer) and list(actual) == [0, 1]
        assert actual[1] is actual[-1] is actual[path] and actual.path_of(1) == path
    pruned = hw.prune(model, [(-1, 0)])
    assert pruned.heads == {1: [0]} and pruned.heads[path] == [0] and pruned.num_heads[-1] == (3, 2)


@pytest.mark.parametrize("name", [1, -1, "layers.1"])
def test_means_and_outputs_are_taken_by_number_and_by_path(name: int | str) -> None:
    model, x = ours(), torch.randn(2, 5, 13, dtype=torch.float64)
    with torch.no_grad(), hw.collect(model) as outputs:
        model(x)
    means = hw.head_means(model, [x])
    with torch.no_grad():
        with hw.ablate(model, [(1, 2)], method="mean", means=means):
            expected = model(x)
        with hw.ablate(model, [(name, 2)], method="mean", means={name: means[1]}):
            assert torch.equal(model(x), expected)
        with hw.patch(model, [(1, 2)], {name: outputs[1].flip(0)}), hw.collect(model) as changed:
            model(x)
    assert error(changed[1][:, 2], outputs[1].flip(0)[:, 2]) == 0


def test_what_was_collected_of_a_model_is_known_in_the_model_around_it() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model, x = ours(), torch.randn(2, 5, 13, dtype=torch.float64)
    with torch.no_grad(), hw.collect(model) as outputs:
        model(x)
    around = Around(model)
    with torch.no_grad(), hw.patch(around, [(0, None), (1, None)], outputs), hw.collect(around) as again:
        around(x.flip(0))
    assert again.paths == ["inner.layers.0", "inner.layers.1"]
    assert all(torch.equal(again[layer], outputs[layer]) for layer in (0, 1))


def test_layers_that_are_given_wrongly_are_named() -> None:
    model = ours()
    mean = torch.zeros(4, 7)
    for match, means in (
        (r"means must name a layer only once: got 'layers.0', layers.0, again", {0: mean, "layers.0": mean}),
        (r"layer must be one of 0 to 1: got 5", {0: mean, 5: mean}),
        (r"layer must be an attention layer: got 'layers.9'", {0: mean, "layers.9": mean}),
        (r"means must be a mapping from layers to tensors: got list", [mean]),
    ):
        with pytest.raises(ArgumentError, match=match):
            hw.ablate(model, [(0, 1)], method="mean", means=means)  # type: ignore[arg-type]


def test_a_plain_dict_of_a_looped_layers_visits_goes_back_in() -> None:
    """`dict(...)` of what an ALBERT gave names its visits 0, 1, 2: `patch` and `ablate` knew them not."""
    model = albert()
    with hw.collect(model) as outputs:
        model(tokens())
    means = hw.head_means(model, [{"input_ids": tokens()}])
    assert len(outputs) > 1 and list(outputs) == list(range(len(outputs)))
    path = outputs.paths[0]
    for arguments in (outputs, dict(outputs), {f"{path}#{visit}": outputs[visit] for visit in outputs}):
        with torch.no_grad(), hw.patch(model, [(0, None)], arguments), hw.collect(model) as again:
            model(tokens(seed=4))
        assert all(torch.equal(again[layer], outputs[layer]) for layer in outputs)
    runs = []
    for arguments in (means, dict(means)):
        with hw.ablate(model, [(0, 1)], "mean", means=arguments):
            runs.append(model(tokens(seed=4))[0])
    assert torch.equal(runs[0], runs[1])


def test_results_by_layer_travel_in_safe_files(tmp_path: Path) -> None:
    model = gpt2()
    means = hw.head_means(model, [{"input_ids": tokens()}])
    torch.save(means, tmp_path / "means.pt")
    back = torch.load(tmp_path / "means.pt", weights_only=True)
    assert type(back) is ByLayer and list(back) == list(means) and torch.equal(back[0], means[0])
