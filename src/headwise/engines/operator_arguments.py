"""What the way back of an operator needs of its arguments."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["save", "saved", "where_needed"]


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
