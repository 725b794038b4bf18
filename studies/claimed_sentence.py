"""The course's example sentence: whether heads look where the arrows of its pages point.

One sentence chooses its best head among all there are. So beside what that head does stand what the best of
the same heads does with the words it looks at shuffled, what the best head of the same model with random
weights does, and what one fixed offset does.

Letters: L layers, H heads, W words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

SENTENCE = "The cat that I saw yesterday ran away"
CHANCE = 0.05  # a best head that this share of shuffles reaches is none
DRAWS = 2000

# What the pages draw, as words by number in both directions: an arrow from i to j is "i looks at j".
CLAIMED: dict[str, tuple[tuple[int, int], ...]] = {
    "a head joins subject and verb (cat, ran)": ((1, 6), (6, 1)),
    "a head attends to the word before (cat, The)": tuple((i, i - 1) for i in range(1, 8)),
    "a head attends to the word after (cat, that)": tuple((i, i + 1) for i in range(7)),
    "a head joins a relative clause (that, I, saw)": ((2, 3), (3, 2), (3, 4), (4, 3)),
    "a head joins action and result (cat, ran, away)": ((1, 6), (6, 1), (6, 7), (7, 6)),
}
OFFSETS = tuple(about for about in CLAIMED if "looks at" in about)  # the claim is an offset
SAME = {"a head joins subject and verb (cat, ran)": ("subject > verb", "verb > subject")}  # as roles ask it


def word_weights(model: nn.Module, tokenizer: Any, text: str) -> Tensor:
    """Return how much each word attends to each other, [L, H, W, W]; words are joined as in Clark 2019.

    A word of several tokens is looked at by all of them in sum, and looks as they do on average.
    """
    encoded = tokenizer(text, return_offsets_mapping=True)
    ids, offsets = list(encoded["input_ids"]), [tuple(map(int, span)) for span in encoded["offset_mapping"]]
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
    """The measurements of one set of drawn arrows."""

    layer: int
    head: int
    hits: int  # arrows whose word the head looks at most, itself left out
    arrows: int  # that the model can be asked about
    weight: float  # on those words, of all that other words get, on average
    chance: float  # how often the best of these heads does as well with the words it looks at shuffled
    by_chance: float  # how many that best one hits then, on average
    untrained: int  # how many the best head of the same model with random weights hits
    untrained_weight: float
    offset: int  # how many one fixed offset hits, at best

    @property
    def verdict(self) -> str:
        """The verdict as a phrase."""
        if not self.arrows:
            return "cannot be asked"
        if self.chance > CHANCE or (self.untrained, self.untrained_weight) >= (self.hits, self.weight):
            return "not found"
        return "holds" if self.hits == self.arrows and self.hits > self.offset else "holds in part"


def judge(weights: Tensor, untrained: Tensor, arrows: Sequence[tuple[int, int]], *, seed: int = 0) -> Drawn:
    """Return the best head for some arrows: most hits, then the largest weight on them.

    Args:
        weights, untrained: [L, H, W, W] of `word_weights`, of the model and with random weights.
        arrows: (word, the word it should look at); those that no head can see are left out.
    """
    visible = weights.sum((0, 1)) > 0  # of a causal model only what came before
    visible.fill_diagonal_(False)
    visible_arrows = [(i, j) for i, j in arrows if visible[i, j]]
    if not visible_arrows:
        return Drawn(0, 0, 0, 0, 0.0, 1.0, 0.0, 0, 0.0, 0)
    rows, columns = (torch.tensor(side) for side in zip(*visible_arrows, strict=True))
    others, random_others = (_others(each) for each in (weights, untrained))
    hits, share = _hits(others[:, rows, columns], others.amax(-1)[:, rows])
    best = int((hits + share / 2).argmax())
    random_hits, random_share = _hits(random_others[:, rows, columns], random_others.amax(-1)[:, rows])
    random_best = int((random_hits + random_share / 2).argmax())
    shuffled = torch.Generator().manual_seed(seed)
    words = {
        i: [number for number, (word, _) in enumerate(visible_arrows) if word == i] for i, _ in visible_arrows
    }
    got = torch.zeros(DRAWS, *hits.shape, len(visible_arrows))  # [DRAWS, L * H, arrows]
    for i, numbers in words.items():
        row = others[:, i, visible[i]]  # [L * H, words that are seen]
        order = torch.rand(DRAWS, *row.shape, generator=shuffled).argsort(-1)[..., : len(numbers)]
        got[..., numbers] = row.expand(DRAWS, -1, -1).gather(-1, order)
    counts, shares = _hits(got, others.amax(-1)[:, rows])  # [DRAWS, L * H]
    as_well = (counts + shares / 2).amax(-1) >= hits[best] + share[best] / 2
    offsets = Counter(j - i for i, j in visible_arrows)
    return Drawn(
        layer=best // weights.shape[1],
        head=best % weights.shape[1],
        hits=int(hits[best]),
        arrows=len(visible_arrows),
        weight=float(share[best]),
        chance=float(as_well.double().mean()),
        by_chance=float(counts.amax(-1).double().mean()),
        untrained=int(random_hits[random_best]),
        untrained_weight=float(random_share[random_best]),
        offset=max(offsets.values()),
    )


def _others(weights: Tensor) -> Tensor:
    """Return the share of each word's weight that every other word gets, [L * H, W, W]."""
    W = weights.shape[-1]
    others = weights.flatten(0, 1).masked_fill(torch.eye(W, dtype=torch.bool), 0)
    return others / others.sum(-1, keepdim=True).clamp(min=1e-30)


def _hits(on_arrows: Tensor, most: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many arrows each head hits, and its mean weight on them."""
    return (on_arrows >= most).sum(-1), on_arrows.mean(-1)
