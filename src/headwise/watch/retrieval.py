"""Retrieval heads: who copies a needle out of a long text while the model says it.

A text with a sentence hidden in it (the needle) and a question is given to a model, which answers token by
token. A retrieval head's heaviest key is then the very token of the needle that comes next. Wu 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError
from ..heads.naming import Layer, names_of
from ..heads.patterns import retrieval
from .attachment import attach
from .calls import Call

__all__ = ["Retrieval", "retrieval_scores"]

ENOUGH = 0.5  # of the needle's tokens must come back, or a run tells nothing


@dataclass(frozen=True, eq=False)
class Retrieval:
    """What one run showed.

    Attributes:
        scores: by layer, [H]: the share of the needle each head copied.
        generated: int [steps], what the model said.
        recall: the share of the needle's different tokens among them (ROUGE-1 recall, by tokens). Wu 2024
            counts runs above 0.5 only.
    """

    scores: dict[Layer, Tensor]
    generated: Tensor
    recall: float

    @property
    def found(self) -> bool:
        """Whether the model found the needle, so that the scores mean something."""
        return self.recall > ENOUGH

    def ranking(self) -> list[tuple[Layer, int, float]]:
        """(layer, head, score), the best first."""
        every = [
            (layer, head, score)
            for layer, scores in self.scores.items()
            for head, score in enumerate(scores.tolist())
        ]
        return sorted(every, key=lambda each: -each[2])


class _TopKeys:
    """The heaviest key of the last query, by layer."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def hear(self, call: Call) -> None:
        if call.kind == "self":
            last = call.weights.detach().select(batch=0, queries=call.weights.shape[2] - 1)
            self.found[call.path] = last.top(1).indices[0, :, 0, 0]  # [H]


@torch.no_grad()
def retrieval_scores(
    model: nn.Module,
    input_ids: Tensor,
    needle: tuple[int, int],
    *,
    steps: int | None = None,
    fallback: str | None = None,
) -> Retrieval:
    """Let a causal language model answer greedily, and see which heads fetch the needle.

    Args:
        model: a Hugging Face causal language model with a cache.
        input_ids: int [1, S]: text, needle and question.
        needle: (start, stop), where the needle lies among them.
        steps: tokens to generate; by default as many as the needle has.

    Raises:
        ShapeError: more than one sequence.
        ArgumentError: a needle that is empty or outside the text; steps below 1.
        AttentionBypassed: layers that cannot be heard.

    Wu 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality".
    """
    if input_ids.ndim != 2 or input_ids.shape[0] != 1:
        raise ShapeError(
            f"input_ids must be one sequence, [1, S]: got {list(input_ids.shape)}; run them one by one"
        )
    start, stop = needle
    S = input_ids.shape[1]
    if not 0 <= start < stop <= S:
        raise ArgumentError(
            f"needle must lie in the text: got ({start}, {stop}) of {S} tokens; it is (first, last + 1)"
        )
    steps = stop - start if steps is None else steps
    if steps < 1:
        raise ArgumentError(f"steps must be at least 1: got {steps}; the needle has {stop - start} tokens")
    listener = _TopKeys()
    top: dict[str, list[Tensor]] = {}
    said: list[Tensor] = []
    given, cache = input_ids, None
    with attach(model, listener, fallback):
        for _ in range(steps):
            answer: Any = model(input_ids=given, past_key_values=cache, use_cache=True)
            given, cache = answer.logits[:, -1:].argmax(-1), answer.past_key_values
            said.append(given[0, 0].cpu())
            for path, keys in listener.found.items():
                top.setdefault(path, []).append(keys.cpu())
    generated, tokens = torch.stack(said), input_ids[0].cpu()
    names = names_of(list(top))
    scores = {
        names[path]: retrieval(torch.stack(keys), tokens, generated, needle) for path, keys in top.items()
    }
    wanted = set(tokens[start:stop].tolist())
    return Retrieval(scores, generated, len(wanted & set(generated.tolist())) / len(wanted))
