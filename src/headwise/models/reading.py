"""A text as a model's input: tokens, their names, and what did not fit."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError

__all__ = ["MOST_TOKENS", "Reading", "most_tokens", "read"]

MOST_TOKENS = 4096  # without being asked for more: a look should take seconds
UNLIMITED = 1 << 24  # a tokenizer that knows no limit says 10^30
SPACE = "␣"


@dataclass(frozen=True)
class Reading:
    """One text, ready for `model(**inputs)`."""

    inputs: dict[str, Tensor]  # [1, T] each
    tokens: list[str]  # T names that people can read
    found: int  # tokens in the whole text, special ones included
    limit: int | None = None  # of the model, where it has one

    @property
    def cut(self) -> bool:
        """Whether the end was left out."""
        return self.found > len(self.tokens)


def read(text: str, model: nn.Module, tokenizer: Any, *, most: int = MOST_TOKENS) -> Reading:
    """Turn a text into tokens: as many, from its beginning, as the model takes and `most` allows.

    Raises:
        ArgumentError: a text without a token; a tokenizer and a model that do not fit.
    """
    limit = most_tokens(model, tokenizer)
    room = most if limit is None else min(most, limit)
    verbose = {"verbose": False}  # that a text is too long is for us to say
    found = len(tokenizer(text, **verbose)["input_ids"])
    encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=room, **verbose)
    ids = encoded["input_ids"][0].tolist()
    special = set(tokenizer.all_special_ids)
    unknown = getattr(tokenizer, "unk_token_id", None)
    if all(token in special and token != unknown for token in ids):
        raise ArgumentError("text must hold at least one word: found 0; try a sentence")
    size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if max(ids) >= size:
        raise ArgumentError(
            f"tokenizer must fit the model: token {max(ids)} for a vocabulary of {size}; are they a pair?"
        )
    taken = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in encoded.items() if name in taken}
    return Reading(inputs, [_name(tokenizer, token) for token in ids], found, limit)


def most_tokens(model: nn.Module, tokenizer: Any) -> int | None:
    """How many tokens the model reads at once; None where nobody says."""
    limits = [getattr(tokenizer, "model_max_length", UNLIMITED)]
    limits.append(getattr(model.config, "max_position_embeddings", None) or UNLIMITED)
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            before = 0 if module.padding_idx is None else module.padding_idx + 1  # RoBERTa counts from there
            limits.append(module.num_embeddings - before)
    least = min(limits)
    return None if least >= UNLIMITED else int(least)


def _name(tokenizer: Any, token: int) -> str:
    """A token as people write it: without the marks of its alphabet of bytes, Ġ for a space."""
    said = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    return said.strip(" ") or SPACE
