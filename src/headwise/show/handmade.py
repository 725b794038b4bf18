"""Hand-made heads: attention whose behaviour is known because it was written down. Not a trained model.

Position j has the one-hot vector e_j as its key; the query at i is a sum of the e_j it wants, times a
strength. So q_i . k_j is the strength where j is wanted and 0 elsewhere, and the softmax does the rest. The
strength grows with log T, which leaves a wanted word about 0.95 of the weight at any length. A query that
finds nothing it wants rests on the first word, as heads of trained models like to.

Letters: H num_heads, T number of words.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..map import AttentionMap

__all__ = ["HANDMADE", "MOST_WORDS", "SENTENCE", "handmade_heads", "split"]

HANDMADE = "hand-made heads, not a trained model"  # said wherever they are shown
SENTENCE = "The cat that I saw yesterday ran away and the cat that you saw stayed"
MOST_WORDS = 1000
SHARPNESS = 3.0  # a wanted word outweighs all others together by e^3 to 1


def handmade_heads(text: str) -> tuple[list[str], AttentionMap, list[str]]:
    """A text's words, a map [1, H, T, T] of hand-made heads over them, and the heads' names.

    Raises:
        ArgumentError: no word, or more than 1,000.

    Example:
        >>> words, weights, names = handmade_heads("to be or not to be")
        >>> weights[0, names.index("same word"), 1]    # "be" finds both
        tensor([0.0041, 0.4918, 0.0041, 0.0041, 0.0041, 0.4918])
    """
    words = split(text)
    if not words:
        raise ArgumentError("text must hold at least one word: found 0; try a sentence that repeats itself")
    if len(words) > MOST_WORDS:
        raise ArgumentError(
            f"text must hold at most {MOST_WORDS} words: found {len(words)}; give a shorter one"
        )
    vocabulary: dict[str, int] = {}
    ids = torch.tensor([vocabulary.setdefault(_spelling(word), len(vocabulary)) for word in words])
    q = torch.stack([rule(ids) for rule in HEADS.values()])[None]  # [1, H, T, T]
    k = torch.eye(len(words))[None, None]  # [1, 1, T, T]: every head has the same keys
    return words, AttentionMap(q, k, scale=1.0), list(HEADS)


def split(text: str) -> list[str]:
    """Words as spaces part them, punctuation before and after each on its own.

    Example:
        >>> split("«Don't», she said...")
        ['«', "Don't", '»', ',', 'she', 'said', '.', '.', '.']
    """
    words = []
    for chunk in text.split():
        start, stop = 0, len(chunk)
        while start < stop and _punctuates(chunk[start]):
            start += 1
        while stop > start and _punctuates(chunk[stop - 1]):
            stop -= 1
        words += [*chunk[:start], *([chunk[start:stop]] if start < stop else []), *chunk[stop:]]
    return words


def _punctuates(char: str) -> bool:
    return unicodedata.category(char).startswith("P")


def _spelling(word: str) -> str:
    """What two copies of a word have in common: letters, however typed, not their case."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())


# The heads. Each goes from word ids [T] to queries [T, T]: how much the word at i wants the one at j.


def _ahead(ids: Tensor) -> Tensor:
    """j - i, [T, T]."""
    at = torch.arange(len(ids))
    return at - at[:, None]


def _sharp(wanted: Tensor) -> Tensor:
    """Queries that want these positions, bool [T, T], and the first one where they want none."""
    wanted = wanted.clone()
    wanted[:, 0] |= ~wanted.any(-1)
    return wanted * (SHARPNESS + math.log(len(wanted)))


def _same(ids: Tensor) -> Tensor:
    return ids[:, None] == ids


def _after_same(ids: Tensor) -> Tensor:
    """True where the word before j is an earlier copy of the word at i."""
    return (ids[:, None] == ids.roll(1)) & (_ahead(ids) <= 0) & (torch.arange(len(ids)) > 0)


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "previous word": lambda ids: _sharp(_ahead(ids) == -1),
    "itself": lambda ids: _sharp(_ahead(ids) == 0),
    "next word": lambda ids: _sharp(_ahead(ids) == 1),
    "nearby words": lambda ids: -(_ahead(ids) / 2.0).square(),
    "first word": lambda ids: _sharp(torch.zeros(len(ids), len(ids), dtype=torch.bool)),
    "every word": lambda ids: torch.zeros(len(ids), len(ids)),
    "same word": lambda ids: _sharp(_same(ids)),
    "induction": lambda ids: _sharp(_after_same(ids)),
}
