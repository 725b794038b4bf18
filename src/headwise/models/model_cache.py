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

from ..arguments import told
from ..errors import ArgumentError, ShapeError
from ..nn import KVCache

__all__ = ["ModelCache", "check_cache"]


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


def check_cache(cache: object, count: int) -> None:
    """Raise unless this is a cache of so many layers, all of which hold the same tokens.

    Raises:
        ArgumentError: something else, or one in which a step was interrupted half way.
        ShapeError: of another number of layers.
    """
    if not isinstance(cache, ModelCache):
        raise ArgumentError(f"cache must be a ModelCache: got {told(cache)}; make one with model.cache()")
    if len(cache.layers) != count:
        raise ShapeError(
            f"cache must have the model's layers: {len(cache.layers)} and {count}; make one with "
            "model.cache() of the model itself"
        )
    if torch.compiler.is_compiling():  # there each layer counts on the device
        return
    first = cache.layers[0]._seen
    for layer in cache.layers:
        if layer._seen != first:
            lengths = [each.length for each in cache.layers]
            raise ArgumentError(
                f"cache must hold the same tokens in every layer: {max(lengths)} and {min(lengths)}, since a "
                f"step was interrupted; use cache.crop({min(lengths)})"
            )
