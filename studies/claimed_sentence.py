"""The course's own sentence: do heads look there as its pages draw them?

One sentence chooses its best head among all there are. So beside what that head does stand what the best of
as many heads that look anywhere would do, what the best head of the same model with random weights does, and
what one fixed offset does.

Letters: L layers, H heads, W words.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

__all__ = ["CLAIMED", "OFFSETS", "SAME", "SENTENCE", "Drawn", "judge", "word_weights"]

SENTENCE = "The cat that I saw yesterday ran away"
CHANCE = 0.05  # a best head that this share of random choices reaches is none
DRAWS = 2000

# What the pages draw, as words by number in both directions: an arrow from i to j is "i looks at j".
CLAIMED: dict[str, tuple[tuple[int, int], ...]] = {
    "a head joins subject and verb (cat, ran)": ((1, 6), (6, 1)),
    "a head looks at the word before (cat, The)": tuple((i, i - 1) for i in range(1, 8)),
    "a head looks at the word after (cat, that)": tuple((i, i + 1) for i in range(7)),
    "a head joins a relative clause (that, I, saw)": ((2, 3), (3, 2), (3, 4), (4, 3)),
    "a head joins action and result (cat, ran, away)": ((1, 6), (6, 1), (6, 7), (7, 6)),
}
OFFSETS = tuple(about for about in CLAIMED if "looks at" in about)  # the claim is an offset
SAME = {"a head joins subject and verb (cat, ran)": ("subject > verb", "verb > subject")}  # as roles ask it


def word_weights(model: nn.Module, tokenizer: Any, text: str) -> Tensor:
    """How much each word looks at each other one, [L, H, W, W]; as Clark 2019 joins parts of words.

    A word of several tokens is looked at by all of them in sum, and looks as they do on average.
    """
    told = tokenizer(text, return_offsets_mapping=True)
    ids, offsets = list(told["input_ids"]), [tuple(map(int, span)) for span in told["offset_mapping"]]
    start = getattr(tokenizer, "bos_token_id", None)
    if ids[0] not in set(tokenizer.all_special_ids) and start is not None:
        ids, offsets = [start, *ids], [(0, 0), *offsets]
    spans, end = [], 0
    for word in text.split():
        begin = text.index(word, end)
        end = begin + len(word)
        spans.append((begin, end))
    member = torch.tensor(
        [[float(begin < right and end > left) for begin, end in offsets] for left, right in spans]
    )  # [W, T]
    place = next(model.parameters()).device
    with torch.no_grad(), hw.watch(model, pooled=None) as heads:
        model(torch.tensor([ids], device=place))
    mean = member / member.sum(-1, keepdim=True)
    maps = [heads[layer].map.dense()[0].float().cpu() for layer in heads]  # [H, T, T] each
    return torch.stack([mean @ weights @ member.T for weights in maps])


@dataclass(frozen=True)
class Drawn:
    """What was found of one drawing."""

    layer: int
    head: int
    hits: int  # arrows whose word the head looks at most, itself left out
    arrows: int  # that the model can be asked about
    weight: float  # on those words, of all that words get, on average
    chance: float  # how likely the best of as many heads that look anywhere hits as many
    by_chance: float  # how many that best one hits, on average
    untrained: int  # how many the best head of the same model with random weights hits
    offset: int  # how many one fixed offset hits, at best

    @property
    def verdict(self) -> str:
        """In words."""
        if not self.arrows:
            return "cannot be asked"
        if self.chance > CHANCE or self.hits <= self.untrained:
            return "not found"
        return "holds" if self.hits == self.arrows and self.hits > self.offset else "holds in part"


def judge(weights: Tensor, untrained: Tensor, arrows: Sequence[tuple[int, int]], *, seed: int = 0) -> Drawn:
    """The best head for some arrows.

    Args:
        weights, untrained: [L, H, W, W] of `word_weights`, of the model and with random weights.
        arrows: (word, the word it should look at); those that no head can see are left out.
    """
    L, H, W, _ = weights.shape
    seen = weights.sum((0, 1)) > 0  # of a causal model only what came before
    asked = [(i, j) for i, j in arrows if seen[i, j]]
    if not asked:
        return Drawn(0, 0, 0, 0, 0.0, 1.0, 0.0, 0, 0)
    hits, share = _hits(weights, asked)
    best = int((hits + 0.5 * share).argmax())  # of equals the one with more weight
    count = int(hits.flatten()[best])
    random_hits, _ = _hits(untrained, asked)
    draw = random.Random(seed)
    others = [int(seen[i].sum()) - int(seen[i, i]) for i, _ in asked]
    reached = []
    for _ in range(DRAWS):
        chosen = (sum(draw.random() * choices < 1 for choices in others) for _ in range(L * H))
        reached.append(max(chosen))
    offsets = Counter(j - i for i, j in asked)
    return Drawn(
        layer=best // H,
        head=best % H,
        hits=count,
        arrows=len(asked),
        weight=float(share.flatten()[best]),
        chance=sum(number >= count for number in reached) / DRAWS,
        by_chance=sum(reached) / DRAWS,
        untrained=int(random_hits.max()),
        offset=max(offsets.values()),
    )


def _hits(weights: Tensor, asked: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """How many arrows each head hits, and the mean weight on their words, [L, H]."""
    W = weights.shape[-1]
    others = weights.masked_fill(torch.eye(W, dtype=torch.bool), 0)
    others = others / others.sum(-1, keepdim=True).clamp(min=1e-30)
    heaviest = others.argmax(-1)  # [L, H, W]
    hits = torch.stack([heaviest[..., i] == j for i, j in asked]).sum(0)
    return hits, torch.stack([others[..., i, j] for i, j in asked]).mean(0)
