"""Keys and values kept from one call to the next."""

from __future__ import annotations

from torch import Tensor

from ..masks import Mask

__all__ = ["KVCache"]


class KVCache:
    """The keys and values of the tokens so far."""

    length: int = 0

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Mask | None]:
        """All keys, all values, and what is to be hidden besides."""
        raise NotImplementedError
