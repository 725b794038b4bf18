"""Which tokens a call attends to, and what is known of them."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..heads.record import Marks
from .calls import Call, Forward

__all__ = ["Tokens"]

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")


class Tokens:
    """What a tokenizer, or else the model's config, says of token ids."""

    def __init__(self, model: nn.Module, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.special = _special_ids(model, tokenizer)
        self.unknown = _unknown_id(tokenizer)
        self._named = lru_cache(maxsize=2**16)(self._name)
        self._marks: WeakKeyDictionary[Forward, dict[str, tuple[Tensor, Marks]]] = WeakKeyDictionary()
        self._there: dict[torch.device, Tensor] = {}

    def of(self, call: Call) -> tuple[str, Tensor] | None:
        """The ids of a call's keys, int [B, S], and the argument they came by, if its queries and keys are
        one text, given to a module around it."""
        B, _, T, S = call.weights.shape
        if call.kind != "self" or T != S:
            return None
        for name, ids in call.tokens.items():
            if tuple(ids.shape) == (B, S):
                return name, ids
        return None

    def marks(self, call: Call) -> Marks | None:
        """What is known of the tokens of a call's keys, if they are known; the ids copied, once a forward."""
        found = self.of(call)
        if found is None:
            return None
        name, ids = found
        made = self._marks.setdefault(call.forward, {})
        if name in made and made[name][0] is ids:
            return made[name][1]
        special = torch.isin(ids, self._special_on(ids.device)) if self.special else None
        punctuation = None
        if self.tokenizer is not None:
            flags = [[_is_punctuation(self._named(token)) for token in row] for row in ids.tolist()]
            punctuation = torch.tensor(flags, device=ids.device)
            if special is not None:
                punctuation &= ~special
        unknown = None if self.unknown is None else ids == self.unknown
        marks = Marks(ids.clone(), special, punctuation, unknown)  # of the tokens as they were, also later
        made[name] = ids, marks
        return marks

    def _special_on(self, device: torch.device) -> Tensor:
        """The special ids where they are needed; bringing them there stops a GPU, so it is done once."""
        if device not in self._there:
            self._there[device] = torch.tensor(self.special, device=device)
        return self._there[device]

    def names(self, ids: Tensor) -> list[list[str]] | None:
        """Tokens as text, where a tokenizer was given."""
        if self.tokenizer is None:
            return None
        return [[self._named(token) for token in row] for row in ids.tolist()]

    def _name(self, token: int) -> str:
        found = self.tokenizer.convert_ids_to_tokens(token)
        return str(found)


def _special_ids(model: nn.Module, tokenizer: Any) -> list[int]:
    """Ids that stand for no text: the start, the end, padding ...; an unknown word is one of the text's."""
    if tokenizer is not None:
        return sorted(set(tokenizer.all_special_ids) - {_unknown_id(tokenizer)})
    return sorted(_roles(getattr(model, "config", None)))


def _unknown_id(tokenizer: Any) -> int | None:
    """The id of a word that the tokenizer does not know; None where it has none, or where it means more.

    GPT-2's is its end of text, too, and bytes leave nothing unknown.
    """
    found = getattr(tokenizer, "unk_token_id", None)
    return None if found in _roles(tokenizer) else found


def _roles(told: Any) -> set[int]:
    """The ids that a tokenizer or config names for a role."""
    found: set[int] = set()
    for name in SPECIAL:
        value = getattr(told, name, None)
        found.update(x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int))
    return found


def _is_punctuation(token: str) -> bool:
    bare = token.strip("ĠĊ▁# \t\n")
    return bool(bare) and all(unicodedata.category(letter)[0] == "P" for letter in bare)
