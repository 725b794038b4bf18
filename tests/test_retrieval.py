"""Retrieval heads: what a run counts, against the eager weights of the same run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.errors import ArgumentError, ShapeError


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, initializer_range=0.5,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def by_hand(model: Any, ids: Tensor, needle: tuple[int, int], steps: int) -> tuple[dict[int, Tensor], Tensor]:
    """As the paper's script does it, with all weights of every step."""
    start, stop = needle
    model.set_attn_implementation("eager")
    scores = {layer: torch.zeros(6) for layer in range(2)}
    said: list[int] = []
    given, cache = ids, None
    with torch.no_grad():
        for _ in range(steps):
            out = model(given, past_key_values=cache, use_cache=True, output_attentions=True)
            token = int(out.logits[0, -1].argmax())
            for layer, weights in enumerate(out.attentions):
                for head in range(6):
                    key = int(weights[0, head, -1].argmax())
                    if start <= key < stop and int(ids[0, key]) == token:
                        scores[layer][head] += 1 / (stop - start)
            given, cache = torch.tensor([[token]]), out.past_key_values
            said.append(token)
    model.set_attn_implementation("sdpa")
    return scores, torch.tensor(said)


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_counted_by_hand(model: Any, seed: int) -> None:
    ids = torch.randint(0, 13, (1, 29), generator=torch.Generator().manual_seed(seed))
    expected, said = by_hand(model, ids, (5, 12), 7)
    found = hw.retrieval_scores(model, ids, (5, 12))
    assert found.generated.tolist() == said.tolist()
    assert list(found.scores) == list(expected)
    for layer, scores in expected.items():
        torch.testing.assert_close(found.scores[layer], scores)
    best = found.ranking()
    assert len(best) == 12 and best[0][2] == max(float(x.max()) for x in expected.values())
    needle = set(ids[0, 5:12].tolist())
    assert found.recall == len(needle & set(said.tolist())) / len(needle)
    assert found.found == (found.recall > 0.5)


def test_some_seed_has_a_head_that_retrieves(model: Any) -> None:
    """Else the test above would compare zeros."""
    best = 0.0
    for seed in range(4):
        ids = torch.randint(0, 13, (1, 29), generator=torch.Generator().manual_seed(seed))
        best = max(best, hw.retrieval_scores(model, ids, (5, 12)).ranking()[0][2])
    assert best > 0


def test_what_cannot_be_is_refused(model: Any) -> None:
    ids = torch.zeros(1, 9, dtype=torch.long)
    with pytest.raises(ShapeError, match=r"input_ids must be one sequence, \[1, S\]: got \[2, 9\]"):
        hw.retrieval_scores(model, ids.expand(2, -1), (1, 3))
    with pytest.raises(ArgumentError, match=r"needle must lie in the text: got \(7, 12\) of 9 tokens"):
        hw.retrieval_scores(model, ids, (7, 12))
    with pytest.raises(ArgumentError, match="steps must be at least 1: got 0"):
        hw.retrieval_scores(model, ids, (1, 3), steps=0)
