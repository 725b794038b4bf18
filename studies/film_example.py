"""The film's small example: five words, d_model 8, two heads, every number worked out here.

Words and weights are set by hand, with one decimal, so that a viewer can follow them: of a word's eight
numbers four say what it is and four where it stands. Head 1 turns places one step back, so each word looks
for the word before it; head 2 turns classes into those they go with, so a verb looks for nouns and a noun for
the verb. A test holds all of it to `headwise.MultiHeadAttention` with the same weights.

Letters: T words, E d_model, H heads, D head_dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = ("the", "cat", "chased", "a", "mouse")
CHANNELS = ("article", "noun", "verb", "which", "cos fast", "sin fast", "cos slow", "sin slow")
HEADS = 2
FEATURES = {  # article, noun, verb, and which of them
    "the": (1.0, 0.0, 0.0, 0.4),
    "cat": (0.0, 1.0, 0.0, 0.7),
    "chased": (0.0, 0.0, 1.0, 0.2),
    "a": (1.0, 0.0, 0.0, -0.4),
    "mouse": (0.0, 1.0, 0.0, -0.7),
}
TURNS = (0.3, 1 / 9)  # of two hands of a clock, from one place to the next
SHARP_PLACE, SHARP_CLASS, SHARP_WHICH = 4.0, 6.0, 4.0  # how much larger queries are than keys
SOUGHT = (1, 2, 1)  # an article looks for a noun, a noun for a verb, a verb for a noun


@dataclass(frozen=True)
class Example:
    """The tensors of every step of one call, in float64."""

    x: Tensor  # [T, E]
    w_q: Tensor  # [E, E]: q = x @ w_q; so with the others
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    q: Tensor  # [T, E]
    k: Tensor
    v: Tensor
    scores: Tensor  # [H, T, T]
    weights: Tensor  # [H, T, T]
    mixed: Tensor  # [H, T, D]
    joined: Tensor  # [T, E]
    output: Tensor  # [T, E]

    def of_head(self, name: str, head: int) -> Tensor:
        """Return the columns of q, k or v of a head, [T, D]."""
        return heads_of(getattr(self, name))[head]


def heads_of(x: Tensor) -> Tensor:
    """Split columns into heads: [T, E] -> [H, T, D]."""
    return x.unflatten(-1, (HEADS, -1)).transpose(0, 1)


def example() -> Example:
    """Compute every step from the words to the output."""
    x = torch.stack([torch.tensor([*FEATURES[word], *_place(at)]) for at, word in enumerate(WORDS)]).double()
    x = _one_decimal(x)
    w_q, w_k, w_v, w_o = (_one_decimal(weight) for weight in _weights())
    q, k, v = x @ w_q, x @ w_k, x @ w_v  # [T, E]
    D = x.shape[-1] // HEADS
    scores = heads_of(q) @ heads_of(k).mT / math.sqrt(D)  # [H, T, T]
    weights = scores.softmax(-1)
    mixed = weights @ heads_of(v)  # [H, T, D]
    joined = mixed.transpose(0, 1).flatten(1)  # [T, E]
    return Example(x, w_q, w_k, w_v, w_o, q, k, v, scores, weights, mixed, joined, joined @ w_o)


def _one_decimal(x: Tensor) -> Tensor:
    return (x * 10).round() / 10 + 0.0  # no minus zero


def _place(at: int) -> list[float]:
    """Return the cosines and sines of a position."""
    angles = [2 * math.pi * turn * at for turn in TURNS]
    return [wave(angle) for angle in angles for wave in (math.cos, math.sin)]


def _weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return W_q, W_k, W_v, W_o [E, E]; rows 0 to 3 are the content of a word, rows 4 to 7 its position."""
    w_q, w_k, w_v = torch.zeros(3, 8, 8, dtype=torch.float64)
    for number, turn in enumerate(TURNS):  # both hands one step back
        cos, sin = math.cos(2 * math.pi * turn), math.sin(2 * math.pi * turn)
        back = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
        w_q[4 + 2 * number : 6 + 2 * number, 2 * number : 2 * number + 2] = SHARP_PLACE * back
    w_k[4:, :4] = torch.eye(4)
    turned = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]).double() / 2
    for has, wants in enumerate(SOUGHT):
        w_q[has, 4:] = SHARP_CLASS * turned[wants]
    w_q[3, 4:] = SHARP_WHICH * turned[3]  # and each for its like: "the" goes with "cat", "a" with "mouse"
    w_k[:4, 4:] = turned  # a basis of its own, as a trained head has: scores are as without
    w_v[:4, :4] = torch.eye(4)
    w_v[:4, 4:] = turned
    place = torch.arange(8).double()
    w_o = torch.cos(math.pi / 8 * (place[None] + 0.5) * place[:, None]) / 2  # cosines: every number reads all
    return w_q, w_k, w_v, w_o
