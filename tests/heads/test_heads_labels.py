"""Labels: earned by a measured score above a stated threshold, or not given."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headwise as hw
from headwise import heads
from headwise.heads import LABELS, Label, label
from trained import minilm

BY_NAME = {entry.name: entry for entry in LABELS}
SCORES = [entry.score for entry in LABELS]


@pytest.mark.parametrize("entry", LABELS, ids=BY_NAME)
def test_a_score_at_its_threshold_earns_its_label(entry: heads.layer.Entry) -> None:
    assert label({entry.score: entry.threshold}) == Label(entry.name, entry.threshold)
    assert label({entry.score: entry.threshold - 1e-9}) == Label("mixed")


def test_a_label_reads_as_name_and_score() -> None:
    assert str(label({"previous": 0.9349})) == "previous-token (0.93)"
    assert str(label({"previous": 0.2})) == str(Label("mixed")) == "mixed"


def test_rounding_does_not_decide_between_two_names_of_one_thing() -> None:
    """Heads whose only special token is the first were now one, now the other: by 6e-8, in float16 1.2e-5."""
    for score in (0.6, 0.717424, 0.999):
        for more in (-2e-5, 0.0, 6e-8, 2e-5):
            assert label({"first": score + 1e-6, "special": score + 1e-6 + more}).name == "sink"
    assert label({"first": 0.717, "special": 0.719}) == Label("special-token", 0.719)  # another one, too


def test_a_general_label_gives_way_to_any_other() -> None:
    assert label({"previous": 0.55, "locality": 0.99}) == Label("previous-token", 0.55)
    assert label({"previous": 0.45, "locality": 0.99}) == Label("local", 0.99)


@given(st.dictionaries(st.sampled_from([*SCORES, "entropy"]), st.floats(0, 1) | st.just(math.nan)))
def test_a_label_always_stands_on_a_measured_score(scores: dict[str, float]) -> None:
    actual = label(scores)
    if actual.score is None:
        assert actual.name == "mixed"
        assert all(not scores.get(entry.score, 0) >= entry.threshold for entry in LABELS)
    else:
        entry = BY_NAME[actual.name]
        assert actual.score == scores[entry.score] >= entry.threshold


def scores_of(w: hw.AttentionMap, tokens: torch.Tensor) -> dict[str, float]:
    """Everything the table asks for that needs no tokenizer."""
    stats = w.statistics("previous", "next", "itself", "first", "entropy")
    actual = {name: stats[name] for name in ("previous", "next", "itself", "first")}
    actual |= {"spread": heads.spread(w, stats.entropy), "locality": heads.locality(w)}
    actual |= {name: getattr(heads, name)(w, tokens) for name in ("induction", "duplicate_token")}
    return {name: value.item() for name, value in actual.items()}


@pytest.mark.parametrize(
    "name", ["previous-token", "self", "sink", "induction", "duplicate-token", "broad", "local"]
)
def test_a_head_made_for_it_gets_its_label(name: str) -> None:
    period, times = 13, 5
    n = period * times
    i, j = torch.arange(n)[:, None], torch.arange(n)
    tokens = torch.arange(period).repeat(times)
    scores = {
        "previous-token": j == i - 1,
        "self": j == i,
        "sink": j == 0,
        "induction": (j == i + 1 - period) | (j == i + 1 - 2 * period),
        "duplicate-token": (j == i - period) | (j == i - 2 * period),
        "broad": j < 0,
        "local": (i - j < 9) & (i - j > 1),
    }[name]
    w = hw.AttentionMap(torch.zeros(1, 1, n, 1), torch.zeros(1, 1, n, 1), bias=8.0 * scores, causal=True)
    assert label(scores_of(w, tokens)).name == name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_padded_text_has_the_labels_that_it_has_alone(implementation: str) -> None:
    """Head 1.8 of MiniLM was `next-token` on this text alone (0.512) and `mixed` with padding (0.427)."""
    model, tokenizer, _ = minilm()
    texts = ["The cat ran away", "The cat that I saw yesterday came back, and it slept."]
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        with torch.no_grad(), hw.watch(model) as padded:
            model(**tokenizer(texts, return_tensors="pt", padding=True))
        with torch.no_grad(), hw.watch(model) as alone:
            model(**tokenizer(texts[0], return_tensors="pt"))
    finally:
        model.set_attn_implementation(before)
    for path in alone.paths:
        of_batch, of_text = padded[path].calls[0], alone[path].calls[0]
        for name, value in of_text.rows.items():
            torch.testing.assert_close(of_batch.rows[name][:1], value, atol=1e-5, rtol=1e-4, equal_nan=True)
            assert torch.equal(of_batch.counts[name][:1], of_text.counts[name]), name
    actual = [(head.layer, head.head) for head in alone.find("next-token")]
    assert (1, 8) in actual
    with torch.no_grad(), hw.watch(model) as padded:
        model(**tokenizer(texts[0], return_tensors="pt", padding="max_length", max_length=13))
    assert [head.label.name for head in padded.all()] == [head.label.name for head in alone.all()]


def test_the_strongest_label_is_farthest_above_its_threshold() -> None:
    """A label of few heads before one that is true of many, and "mixed" behind all."""
    order = [
        Label("self", 0.9),  # 0.8 of the way from 0.5 to 1
        Label("sink", 0.9),  # 0.75 of the way from 0.6
        Label("induction", 0.4),
        Label("local", 0.99),  # general
        Label("broad", 0.9),
        Label("mixed"),
    ]
    weakest_first = sorted(order, key=lambda each: each.strength)
    assert weakest_first[::-1] == order
