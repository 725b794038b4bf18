"""What a module asks of whoever lays its sequence over several ranks; `headwise.parallel` answers.

Letters: B batch, T query_len of this rank, H num_heads, Dv value_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from ..map import AttentionMap
from ..masks import Mask
from ..scoring import Bias
from .cache import KVCache
from .memory import Memory
from .options import Positions

if TYPE_CHECKING:
    from .multihead import MultiHeadAttention

__all__ = ["Attended", "Sharding"]


class Attended(NamedTuple):
    """What a call came to on this rank."""

    heads: Tensor  # [B, H, T, Dv], before their gates
    weights: AttentionMap  # of the whole sequence
    values: Tensor  # [B, Hk, S, Dv]
    query: Tensor  # [B, T, E], with 0 at padding
    real: Tensor | None  # bool [B, T], which tokens are no padding; None: all


class Sharding(Protocol):
    """How a sequence lies over ranks."""

    def attend(
        self,
        module: MultiHeadAttention,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | Tensor | None,
        bias: Bias | None,
        positions: Positions | None,
        cache: KVCache | Memory | None,
        lengths: Tensor | Sequence[int] | None,
        documents: Tensor | None,
    ) -> Attended:
        """One call of a module, with the tokens that are this rank's."""
        ...

    def positions(self, ids: Tensor) -> tuple[Tensor, int]:
        """Where this rank's tokens, int [B, T], are in the sequence, int [T], and how long that is."""
        ...
