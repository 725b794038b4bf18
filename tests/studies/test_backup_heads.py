"""Backup heads: contributions add up to the logit; heads that depend on a missing head do not compensate."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from planted_circuit import HEADS, INDUCTION, PREVIOUS, Letters, planted
from studies import backup_heads


@pytest.fixture(scope="module")
def study() -> Any:
    return backup_heads.Study(planted(), Letters(), period=19, sequences=2)


def test_contributions_of_heads_add_up_to_the_change_of_the_logit(study: Any) -> None:
    """The planted feed-forward networks contribute nothing: what the heads lose is what the logit loses."""
    trial = study.trial(0)
    assert trial.clean.heads.shape == (2, HEADS) == trial.means.shape
    assert trial.clean.heads[INDUCTION] == trial.clean.heads.max() > 0.1
    for head in range(HEADS):
        changes = study.without(trial, [(0, head)])
        assert abs(changes["feed_forward"]) < 1e-5
        assert changes["total"] == pytest.approx(changes["direct"] - changes["later"], abs=1e-5)


def test_later_heads_lose_without_the_head_that_they_depend_on(study: Any) -> None:
    trial = study.trial(1)
    changes = study.without(trial, [PREVIOUS])
    others = [study.without(trial, [(0, head)]) for head in range(HEADS) if (0, head) != PREVIOUS]
    assert changes["later"] < min(other["later"] for other in others) - 0.1
    assert changes["loss"] > max(other["loss"] for other in others) + 0.1
    assert trial.clean.stripes[INDUCTION] > 0.7


def test_the_same_seed_draws_the_same_tokens_and_the_model_is_as_before(study: Any) -> None:
    before = {name: value.clone() for name, value in study.model.state_dict().items()}
    ids = study.trial(3).ids
    assert torch.equal(ids, study.repeated_tokens(3)) and not torch.equal(ids, study.repeated_tokens(4))
    assert torch.equal(ids[:, 1:20], ids[:, 20:]) and ids.shape == (2, 39)
    assert all(torch.equal(before[name], value) for name, value in study.model.state_dict().items())


@pytest.mark.parametrize("name", backup_heads.TITLES)
def test_stored_results_have_the_means_of_their_numbers(name: str) -> None:
    stored = json.loads((backup_heads.RESULTS / f"backup_heads_{name}.json").read_text("utf-8"))
    assert stored["model"] == backup_heads.TITLES[name]
    for row in stored["groups"]:
        means = backup_heads.summed_up(row)["mean"]
        assert row["mean"] == pytest.approx(means, abs=2e-3)
        assert len(row["later"]) == stored["seeds"] and {tuple(at) for at in row["heads"]}.isdisjoint(
            tuple(at) for other in row["others"] for at in other
        )
    assert backup_heads.markdown(stored).count("\n") == len(stored["groups"]) + 1


def test_compensation_needs_more_than_any_other_heads_show() -> None:
    row = {"later": [0.2, 0.3], "of_others": {"later": [0.1, -0.1]}, "mean": {"part": 0.5}}
    assert backup_heads.verdict(row) == "in part: 50%"
    assert backup_heads.verdict(row | {"of_others": {"later": [0.25]}}) == "no"
    assert backup_heads.verdict(row | {"later": [-0.1, 0.3], "of_others": {"later": [-0.5]}}) == "no"
