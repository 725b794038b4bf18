"""What the way back of an operator needs of its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.function import FunctionCtx

__all__ = ["Context", "save", "saved", "where_needed"]


class Context(FunctionCtx):
    """What autograd hands a function on its way there and back: it keeps what is put on it."""

    if TYPE_CHECKING:
        saved_tensors: tuple[Tensor, ...]
        needs_input_grad: tuple[bool, ...]

        def save_for_backward(self, *tensors: Tensor | None) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


def save(ctx: Context, inputs: tuple[object, ...], *more: Tensor) -> None:
    """Keep an operator's arguments, and more, for its way back."""
    ctx.tensors_at = [i for i, value in enumerate(inputs) if isinstance(value, Tensor)]
    ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)), *more)


def saved(ctx: Context) -> tuple[list[Any], tuple[Tensor, ...]]:
    """(the arguments, what was kept with them)."""
    kept, count = ctx.saved_tensors, len(ctx.tensors_at)  # asked for once: under checkpointing no second time
    args = list(ctx.others)
    for i, tensor in zip(ctx.tensors_at, kept[:count], strict=True):
        args[i] = tensor
    return args, kept[count:]


def where_needed(ctx: Context, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """One gradient an argument: those that are needed, None for the rest."""
    needed = ctx.needs_input_grad
    return tuple(grads[i] if i < len(grads) and needed[i] else None for i in range(len(needed)))
