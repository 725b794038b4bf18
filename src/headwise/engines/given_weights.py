"""Weights someone else computed, under the same roof as ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..indexing import Index, take
from ..masks import Mask
from ..scoring import HIDDEN
from .scores import Flat, Piece, Tiled, mask_from


@dataclass(frozen=True, eq=False)
class GivenWeights(Tiled):
    """Weights someone else computed, seen as scores: s = log p, with lse 0."""

    weights: Tensor  # [B, H, T, S]
    mask: Mask
    positions: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, T, S = self.weights.shape
        return B, H, T, S

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def given_dtype(self) -> torch.dtype:
        return self.weights.dtype

    def __reduce__(self) -> tuple[type[GivenWeights], tuple[object, ...]]:
        return GivenWeights, (self.weights, self.mask, self.positions)

    def versions(self) -> tuple[int] | None:
        """How often the weights were written to; None if not counted."""
        if (
            torch.compiler.is_compiling()
            or not isinstance(self.weights, Tensor)
            or self.weights.is_inference()
        ):
            return None
        return (self.weights._version,)

    def parts(self) -> dict[str, Flat]:
        """All it is made of, by name."""
        rules: dict[str, Flat] = {name: getattr(self.mask, name) for name in Mask.FIELDS}
        return {"weights": self.weights, "positions": self.positions, **rules}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> GivenWeights:
        """The weights those are the parts of; a name that is missing is None."""
        return cls(parts["weights"], mask_from(parts), parts.get("positions"))

    def to(self, device: torch.device) -> GivenWeights:
        """The same weights on another device."""
        return replace(self, weights=self.weights.to(device), mask=self.mask.to(device))

    def detach(self) -> GivenWeights:
        """The same weights, cut from the graph."""
        return replace(self, weights=self.weights.detach())

    def select(self, batch: Index, heads: Index, queries: Index) -> GivenWeights:
        """The weights of some sequences, heads and queries; each index a slice or an index tensor."""
        return GivenWeights(
            take(self.weights, (batch, heads, queries), ones_stay=False),
            self.mask.select(batch, heads, queries),
            self._positions_of(queries),
        )

    def piece(self, piece: Piece) -> GivenWeights:
        where = (piece.batch, piece.heads)
        return replace(self, weights=self.weights[where], mask=self.mask.select(*where, slice(None)))

    def span(self, rows: slice) -> tuple[int, int]:
        return 0, self.shape[3]  # what someone gave is there, whatever the mask says

    def tile(self, rows: slice, columns: Index) -> Tensor:
        return self.weights[:, :, rows, columns].to(self.dtype).log().clamp_(min=HIDDEN)


torch.serialization.add_safe_globals([GivenWeights])
