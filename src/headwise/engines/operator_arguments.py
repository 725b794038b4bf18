"""Scores as the flat arguments an operator's schema can hold, and back; what its way back needs of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..masks import BoundMask
from ..scoring import Scoring
from .scores import Scores

__all__ = [
    "DIFFERENTIABLE",
    "FLAT",
    "flatten",
    "leaves",
    "restore",
    "save",
    "saved",
    "wants_gradient",
    "where_needed",
]

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
    mask = BoundMask(left, right, keys, queries, key_ids, query_ids, allowed)
    return Scores(q, k, mask, Scoring(scale, softcap, bias, slopes, sinks), positions)


def leaves(scores: Scores) -> tuple[Any, ...]:
    """What a gradient can flow to, in the order of DIFFERENTIABLE; None where there is none."""
    return flatten(scores)[: len(DIFFERENTIABLE)]


def wants_gradient(scores: Scores) -> bool:
    """Whether a gradient may flow to anything the scores are made of."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves(scores))


def save(ctx: Any, inputs: tuple[Any, ...], *more: Tensor) -> None:
    """Keep an operator's arguments, and more, for its way back."""
    ctx.tensors_at = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*(inputs[i] for i in ctx.tensors_at), *more)


def saved(ctx: Any) -> tuple[list[Any], tuple[Tensor, ...]]:
    """(the arguments, what was kept with them)."""
    kept, count = ctx.saved_tensors, len(ctx.tensors_at)  # asked for once: under checkpointing no second time
    args = list(ctx.others)
    for i, tensor in zip(ctx.tensors_at, kept[:count], strict=True):
        args[i] = tensor
    return args, kept[count:]


def where_needed(ctx: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """One gradient an argument: those that are needed, None for the rest."""
    needed = ctx.needs_input_grad
    return tuple(grads[i] if i < len(grads) and needed[i] else None for i in range(len(needed)))
