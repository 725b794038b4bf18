"""Retrieval heads: what a run counts, against the eager weights of the same run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.errors import ArgumentError, AttentionBypassed, ShapeError


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


@pytest.fixture(scope="module")
def sliding() -> Any:
    """Every layer sees the last 8 tokens, and its cache holds no more."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=5, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, sliding_window=8, initializer_range=0.5,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


def by_hand(model: Any, ids: Tensor, needle: tuple[int, int], steps: int) -> tuple[dict[int, Tensor], Tensor]:
    """As the paper's script does it, with all weights of every step."""
    start, stop = needle
    model.set_attn_implementation("eager")
    scores = {layer: torch.zeros(6) for layer in range(2)}
    messages: list[int] = []
    arguments, cache = ids, None
    with torch.no_grad():
        for _ in range(steps):
            out = model(arguments, past_key_values=cache, use_cache=True, output_attentions=True)
            token = int(out.logits[0, -1].argmax())
            for layer, weights in enumerate(out.attentions):
                for head in range(6):
                    key = int(weights[0, head, -1].argmax())
                    if start <= key < stop and int(ids[0, key]) == token:
                        scores[layer][head] += 1 / (stop - start)
            arguments, cache = torch.tensor([[token]]), out.past_key_values
            messages.append(token)
    model.set_attn_implementation("sdpa")
    return scores, torch.tensor(messages)


@pytest.mark.parametrize("seed", range(4))
def test_scores_are_those_counted_by_hand(model: Any, seed: int) -> None:
    ids = torch.randint(0, 13, (1, 29), generator=torch.Generator().manual_seed(seed))
    expected, message = by_hand(model, ids, (5, 12), 7)
    actual = hw.retrieval_scores(model, ids, (5, 12))
    assert actual.generated.tolist() == message.tolist()
    assert list(actual.scores) == list(expected)
    for layer, scores in expected.items():
        torch.testing.assert_close(actual.scores[layer], scores)
    best = actual.ranking()
    assert len(best) == 12 and best[0][2] == max(float(x.max()) for x in expected.values())
    needle = set(ids[0, 5:12].tolist())
    assert actual.recall == len(needle & set(message.tolist())) / len(needle)
    assert actual.found == (actual.recall > 0.5)


def without_a_cache(
    model: Any, ids: Tensor, needle: tuple[int, int], steps: int
) -> tuple[dict[int, Tensor], list[int]]:
    """The whole text again at every step: a key's index is its position."""
    start, stop = needle
    model.set_attn_implementation("eager")
    scores = {layer: torch.zeros(6) for layer in range(2)}
    text = ids
    with torch.no_grad():
        for _ in range(steps):
            out = model(text, use_cache=False, output_attentions=True)
            token = int(out.logits[0, -1].argmax())
            for layer, weights in enumerate(out.attentions):
                for head, key in enumerate(weights[0, :, -1].argmax(-1).tolist()):
                    if start <= key < stop and int(ids[0, key]) == token:
                        scores[layer][head] += 1 / (stop - start)
            text = torch.cat([text, torch.tensor([[token]])], 1)
    model.set_attn_implementation("sdpa")
    return scores, text[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("needle", [(0, 8), (33, 40)])
@pytest.mark.parametrize("seed", range(3))
def test_with_a_sliding_window_keys_are_counted_from_the_beginning_of_the_text(
    sliding: Any, seed: int, needle: tuple[int, int]
) -> None:
    """Key 3 of a cache that holds the last 8 tokens was taken for the text's fourth token.

    With a needle at the beginning of 40 tokens a head scored 0.875, though no step can see any of it.
    """
    ids = torch.randint(0, 5, (1, 40), generator=torch.Generator().manual_seed(seed))
    expected, message = without_a_cache(sliding, ids, needle, 7)
    actual = hw.retrieval_scores(sliding, ids, needle, new_tokens=7)
    assert actual.generated.tolist() == message
    for layer, scores in expected.items():
        torch.testing.assert_close(actual.scores[layer], scores)
    assert (actual.ranking()[0][2] == 0) == (needle == (0, 8))


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
    with pytest.raises(ArgumentError, match="new_tokens must be at least 1: got 0"):
        hw.retrieval_scores(model, ids, (1, 3), new_tokens=0)


def test_a_model_without_a_cache_is_refused(model: Any) -> None:
    """Gradient checkpointing takes the cache away: every later step saw its own token alone, and scores were
    those of one step."""
    ids = torch.randint(0, 13, (1, 9), generator=torch.Generator().manual_seed(1))
    model.gradient_checkpointing_enable()
    model.train()
    try:
        match = r"must return a cache: LlamaForCausalLM returned past_key_values=None in step 1 of 2; use"
        with pytest.raises(ArgumentError, match=match):
            hw.retrieval_scores(model, ids, (1, 3))
        assert len(hw.retrieval_scores(model, ids, (1, 3), new_tokens=1).generated) == 1  # which needs none
    finally:
        model.gradient_checkpointing_disable()
        model.eval()


class Answering(nn.Module):
    """Says token 1 again and again; its layers run from the last to the first, the first only once."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(hw.MultiHeadAttention(8, 2) for _ in range(2)) for _ in range(num_layers)
        )

    def forward(self, input_ids: Tensor, past_key_values: Any, use_cache: bool) -> Any:
        x = torch.zeros(1, input_ids.shape[1], 8)
        for stage in reversed(self.stages):
            for layer in reversed(stage):
                if past_key_values is None or layer is not self.stages[0][0]:
                    layer(x)
        return SimpleNamespace(logits=torch.eye(3)[torch.ones_like(input_ids)], past_key_values=())


def test_layers_go_by_their_numbers_in_the_model_and_count_in_the_steps_in_which_they_run() -> None:
    """Numbers were those of the order in which layers were heard; and of a layer that did not run, the keys
    of the step before were counted again."""
    actual = hw.retrieval_scores(Answering(2), torch.tensor([[1, 1, 1, 1]]), (0, 4), new_tokens=2)
    assert actual.generated.tolist() == [1, 1]
    assert list(actual.scores) == [3, 2, 1, 0]
    assert all(scores.tolist() == [0.25, 0.25] for scores in actual.scores.values())  # of the first step


def test_a_run_can_be_read() -> None:
    actual = hw.retrieval_scores(Answering(1), torch.tensor([[1, 1, 1]]), (0, 3), new_tokens=1)
    assert str(actual) == (
        "1 token was generated, with 100% of the needle's tokens among them. Copied most by: layer 1 head "
        "0 (0.33), "
        "layer 1 head 1 (0.33), layer 0 head 0 (0.33), layer 0 head 1 (0.33)."
    )
    missed = hw.retrieval_scores(Answering(1), torch.tensor([[1, 0, 2]]), (1, 3))
    assert str(missed) == (
        "2 tokens were generated, with 0% of the needle's tokens among them: at most 50%, so the scores mean "
        "little. Copied most by: no head."
    )


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(AttentionBypassed, match="Answering ran 2 times without any"):
        hw.retrieval_scores(Answering(0), torch.tensor([[1, 0, 2]]), (0, 2))
