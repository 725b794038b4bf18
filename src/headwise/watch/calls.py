"""What is heard when an attention layer runs, and who listens."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ..map import AttentionMap

__all__ = ["Call", "Forward", "Listener", "in_backward"]


@dataclass(eq=False)
class Forward:
    """One run of a model, from its first hooked module to that module's return; in one thread."""

    number: int = 0
    padding: dict[Any, Tensor | None] = field(default_factory=dict)  # what layers were told, to run again
    masked: list[Any] = field(default_factory=list)  # configs whose models made their masks of the padding


@dataclass(frozen=True, eq=False)
class Call:
    """One attention layer at work, once.

    Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, Dv value_dim.
    """

    path: str  # the module's, in the model listened to
    kind: str  # "self" or "cross"
    weights: AttentionMap  # [B, H, T, S], before dropout
    value: Tensor | None  # [B, Hk, S, Dv]; None where only weights are to be had
    output: Tensor | None  # [B, H, T, Dv], each head before they are joined; None likewise
    forward: Forward
    tokens: dict[str, Tensor] = field(default_factory=dict)  # given around it, by argument name: int [B, T]

    @property
    def num_heads(self) -> int:
        return self.weights.shape[1]


class Listener(Protocol):
    """Someone who is told of every call while attached to a model."""

    def hear(self, call: Call) -> Tensor | None:
        """Take note; a tensor takes the place of the heads' output, [B, H, T, Dv]."""
        ...


def in_backward() -> bool:
    """Whether this is a forward run again for its gradients (checkpointing), which was heard before."""
    return torch._C._current_graph_task_id() != -1
