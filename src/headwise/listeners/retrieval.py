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
from ..heads.layer_names import ByLayer, Layer
from ..heads.measures import retrieval
from .active import Call
from .head_outputs import check_any
from .model_door import attach

__all__ = ["Retrieval", "retrieval_scores"]

ENOUGH = 0.5  # of the needle's tokens must come back, or a run tells nothing
SHOWN = 5  # heads in a summary


@dataclass(frozen=True, eq=False)
class Retrieval:
    """What one run showed.

    Attributes:
        scores: by layer, [H]: the share of the needle each head copied.
        generated: int [new_tokens], what the model said.
        recall: the share of the needle's different tokens among them (ROUGE-1 recall, by tokens). Wu 2024
            counts runs above 0.5 only.
    """

    scores: ByLayer[Tensor]
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
        return sorted(every, key=lambda entry: -entry[2])

    def __str__(self) -> str:
        count = len(self.generated)
        said = f"{count} token{' was' if count == 1 else 's were'} said"
        said += f", with {self.recall:.0%} of the needle's among them"
        verdict = "" if self.found else f": not above {ENOUGH:.0%}, so that the scores tell little"
        copied = [ranked for ranked in self.ranking()[:SHOWN] if ranked[2] > 0]
        best = ", ".join(f"layer {layer} head {head} ({score:.2f})" for layer, head, score in copied)
        return f"{said}{verdict}. Copied most by: {best or 'no head'}."


class _TopKeys:
    """The heaviest key of the last query, by layer, as a position in the text."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}
        self.tokens = 0  # in the text so far

    def hear(self, call: Call) -> None:
        if call.kind == "self":
            _, _, T, S = call.weights.shape
            last = call.weights.detach().select(batch=0, queries=T - 1)
            gone = max(0, self.tokens - S)  # a cache of a sliding window holds the last S keys alone
            self.found[call.path] = last.top(1).indices[0, :, 0, 0] + gone  # [H]


@torch.no_grad()
def retrieval_scores(
    model: nn.Module,
    input_ids: Tensor,
    needle: tuple[int, int],
    *,
    new_tokens: int | None = None,
    fallback: str | None = None,
) -> Retrieval:
    """Let a causal language model answer greedily, and see which heads fetch the needle.

    Args:
        model: a Hugging Face causal language model with a cache: in training mode, gradient checkpointing
            takes that away.
        input_ids: int [1, S]: text, needle and question.
        needle: (start, stop), where the needle lies among them.
        new_tokens: how many to generate; by default as many as the needle has.

    Raises:
        ShapeError: more than one sequence.
        ArgumentError: a needle that is empty or outside the text; fewer than one new token; a model
            that gives no cache.
        AttentionBypassed: layers that cannot be heard, or nothing heard at all.

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
    count = stop - start if new_tokens is None else new_tokens
    if count < 1:
        raise ArgumentError(
            f"new_tokens must be at least 1: got {count}; the needle has {stop - start} tokens"
        )
    listener = _TopKeys()
    top: list[dict[str, Tensor]] = []  # a step: path -> [H]
    said: list[Tensor] = []
    given, cache = input_ids, None
    with attach(model, listener, fallback) as attachment:
        for step in range(count):
            listener.found, listener.tokens = {}, S + step
            answer: Any = model(input_ids=given, past_key_values=cache, use_cache=True)
            given, cache = answer.logits[:, -1:].argmax(-1), getattr(answer, "past_key_values", None)
            if cache is None and step + 1 < count:
                raise ArgumentError(
                    f"model must give a cache: {type(model).__name__} gave past_key_values=None in step "
                    f"{step + 1} of {count}; use model.eval(), and a causal language model"
                )
            said.append(given[0, 0].cpu())
            top.append({path: keys.cpu() for path, keys in listener.found.items()})
    paths = {path: keys for by_path in top for path, keys in by_path.items()}
    check_any(model, count, paths, fallback)
    generated, tokens = torch.stack(said), input_ids[0].cpu()
    scores: dict[str, Tensor] = {}
    for path, like in paths.items():
        nowhere = torch.full_like(like, -1)  # where a layer did not run in a step
        keys = torch.stack([by_path.get(path, nowhere) for by_path in top])  # [new_tokens, H]
        scores[path] = retrieval(keys, tokens, generated, needle)
    wanted = set(tokens[start:stop].tolist())
    recall = len(wanted & set(generated.tolist())) / len(wanted)
    return Retrieval(ByLayer(scores, attachment.names), generated, recall)
