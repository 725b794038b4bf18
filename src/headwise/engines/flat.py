"""Scores as the flat arguments an operator's schema can hold, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks import Mask
from ..scoring import Scoring
from .scores import Scores

__all__ = ["DIFFERENTIABLE", "FLAT", "flatten", "restore", "wants_gradient"]

DIFFERENTIABLE = ("q", "k", "bias", "slopes", "sinks")  # the first arguments, in this order
FLAT = (
    "Tensor q, Tensor k, Tensor? bias, Tensor? slopes, Tensor? sinks, Tensor? keys, Tensor? queries, "
    "Tensor? key_ids, Tensor? query_ids, Tensor? allowed, Tensor? positions, SymInt? left, SymInt? right, "
    "float scale, float? softcap"
)


def flatten(scores: Scores) -> tuple[Any, ...]:
    """The arguments `FLAT` names."""
    mask, scoring = scores.mask, scores.scoring
    return (
        scores.q, scores.k, scoring.bias, scoring.slopes, scoring.sinks,
        mask.keys, mask.queries, mask.key_ids, mask.query_ids, mask.allowed, scores.positions,
        mask.left, mask.right, scoring.scale, scoring.softcap,
    )  # fmt: skip


def restore(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    sinks: Tensor | None,
    keys: Tensor | None,
    queries: Tensor | None,
    key_ids: Tensor | None,
    query_ids: Tensor | None,
    allowed: Tensor | None,
    positions: Tensor | None,
    left: int | None,
    right: int | None,
    scale: float,
    softcap: float | None,
) -> Scores:
    """The scores those arguments came from."""
    mask = Mask(left, right, keys, queries, key_ids, query_ids, allowed)
    return Scores(q, k, mask, Scoring(scale, softcap, bias, slopes, sinks), positions)


def wants_gradient(scores: Scores) -> bool:
    """Whether a gradient may flow to anything the scores are made of."""
    return torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in flatten(scores)[: len(DIFFERENTIABLE)]
    )
