"""What a `Transformer` keeps of the tokens it has read, so that each is read once.

    cache = model.cache()
    logits = model(prompt, cache=cache, last=True)         # [B, 1, V]
    logits = model(token, cache=cache)                     # one more token, [B, 1] -> [B, 1, V]

Letters: B batch, T length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..nn import KVCache

__all__ = ["ModelCache"]


class ModelCache:
    """A `KVCache` of every decoder layer; of an encoder-decoder, also what its layers know of the source.

    Made by `model.cache()`. All layers hold the same tokens, so what is said of one is so of all.
    """

    def __init__(self, layers: Sequence[KVCache]) -> None:
        self.layers = list(layers)
        self.memories: list[Any] | None = None  # `Memory` of every layer's cross-attention

    @property
    def length(self) -> int:
        """Tokens held; of the longest sequence."""
        return self.layers[0].length

    @property
    def batch(self) -> int | None:
        """B; None while nothing was read."""
        return self.layers[0].batch

    def positions(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Of the next `count` tokens: int [T], or [B, T] where sequences are of different lengths."""
        return self.layers[0].positions(count, device)

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence i becomes what sequence index[i] was; as many as are named, as beams need it."""
        for held in (*self.layers, *(self.memories or ())):
            held.reorder(index)

    def crop(self, length: int) -> None:
        """Forget all tokens from this one on; the source is kept."""
        for layer in self.layers:
            layer.crop(length)

    def reset(self) -> None:
        """Forget everything, the source as well."""
        for layer in self.layers:
            layer.reset()
        self.memories = None

    def __repr__(self) -> str:
        source = "" if self.memories is None else ", and the source"
        return f"ModelCache({len(self.layers)} layers of {self.layers[0]!r}{source})"
