"""A mask in words: what it hides from whom, and which way round it is to be read.

Letters: B batch, T query_len, S key_len.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

POLARITY = (
    "Here True (or 1) means: may attend. Boolean masks of torch.nn.MultiheadAttention say the opposite, "
    "True = may not attend."
)


@dataclass(frozen=True)
class MaskWords:
    """One sample's mask."""

    words: tuple[str, ...]
    later: int | None = None  # keys after query + later are hidden, because they come later
    padding: tuple[int, ...] = ()  # keys hidden from every query


def in_words(mask: Tensor | None, sample: int) -> MaskWords:
    """What the mask of one sample hides.

    Args:
        mask: bool [B, T, S], True = may attend; None hides nothing.

    Example:
        >>> in_words(torch.ones(1, 3, 3).tril().bool(), 0).words[0]
        'Causal: a query may see the keys up to its own place; those that come later are hidden.'
    """
    if mask is None:
        return MaskWords(("There is no mask: every query may see every key.",))
    seen = mask[sample]  # [T, S]
    T, S = seen.shape
    if bool(seen.all()):
        return MaskWords(("The mask hides nothing: every query may see every key.",))
    padding = tuple(int(s) for s in (~seen).all(0).nonzero().flatten())
    later = _later(seen, padding)
    words, known = [], torch.zeros(T, S, dtype=torch.bool)
    if later is not None:
        known |= _beyond(T, S, later)
        place = "its own place" if later == 0 else f"place query {later:+d}"
        words.append(f"Causal: a query may see the keys up to {place}; those that come later are hidden.")
    if padding:
        known[:, list(padding)] = True
        words.append(f"{_numbered('Key', padding)} hidden from every query, as padding is.")
    others = int((~seen & ~known).sum())
    if others:
        more, many = "more " if words else "", others > 1
        pairs = f"{others} {more}pair{'s' * many} of query and key {'are' if many else 'is'} hidden"
        words.append(f"{pairs} by the mask.")
    empty = tuple(int(t) for t in (~seen).all(1).nonzero().flatten())
    if empty:
        words.append(f"{_numbered('Query', empty)} left with no key to see.")
    words.append(f"In all, {int((~seen).sum())} of {T * S} pairs are hidden.")
    return MaskWords(tuple(words), later, padding)


def _later(seen: Tensor, padding: tuple[int, ...]) -> int | None:
    """The offset of a causal mask: the last query beside the last key, or the first beside the first."""
    T, S = seen.shape
    real = torch.ones(S, dtype=torch.bool)
    real[list(padding)] = False
    for offset in dict.fromkeys((S - T, 0)):
        beyond = _beyond(T, S, offset)
        edge = _beyond(T, S, offset - 1) & ~beyond
        if bool((beyond & real).any()) and not bool((seen & beyond).any()) and bool((seen & edge).any()):
            return offset
    return None


def _beyond(T: int, S: int, offset: int) -> Tensor:
    return torch.arange(S) > torch.arange(T)[:, None] + offset  # [T, S]


def _numbered(word: str, numbers: tuple[int, ...]) -> str:
    if len(numbers) == 1:
        return f"{word} {numbers[0]} is"
    plural = "Queries" if word == "Query" else f"{word}s"
    if len(numbers) > 2 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{plural} {numbers[0]} to {numbers[-1]} are"
    return f"{plural} {', '.join(map(str, numbers[:-1]))} and {numbers[-1]} are"
