"""Reading what a call returned: the output, and the weights of every head where they come along."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .failing import Unreadable

__all__ = ["Answer", "read", "shape_text"]


class Answer(NamedTuple):
    """What a call gave, batch first."""

    output: Tensor  # [B, T, E]
    weights: Tensor | None  # [B, H, T, S]


def shape_text(tensor: Tensor) -> str:
    """[3, 7, 24]."""
    return str(list(tensor.shape))


def _tensors(raw: object, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in it, in order."""
    if isinstance(raw, Tensor):
        yield raw
    elif type(raw).__module__ == "numpy" and hasattr(raw, "__array__"):
        yield torch.as_tensor(raw)
    elif depth < 3:
        if isinstance(raw, Mapping):
            raw = list(raw.values())
        elif dataclasses.is_dataclass(raw) and not isinstance(raw, type):
            raw = [getattr(raw, one.name) for one in dataclasses.fields(raw)]
        if isinstance(raw, (list, tuple)):
            for one in raw:
                yield from _tensors(one, depth + 1)


def read(raw: object, layout: str, B: int, T: int, S: int, H: int) -> Answer:
    """The output and the weights, batch first.

    Raises:
        Unreadable: no tensor in it is [B, T, something] in this layout.
    """
    found = list(_tensors(raw))
    if not found:
        raise Unreadable(f"it returned {type(raw).__name__} and no tensor; return the output")
    for i, tensor in enumerate(found):
        output = _output(tensor, layout, B, T, H)
        if output is not None and not _is_weights(tensor, T, S, found):
            others = found[:i] + found[i + 1 :]
            weights = next(
                (w for w in (_weights(one, layout, B, T, S, H) for one in others) if w is not None), None
            )
            return Answer(output, weights)
    wanted = {"sequence first": f"[{T}, {B}, width]", "one sequence": f"[{T}, width]"}
    shapes = ", ".join(map(shape_text, found[:3]))
    raise Unreadable(
        f"it returned a tensor {shapes}; the output must be {wanted.get(layout, f'[{B}, {T}, width]')}"
    )


def _is_weights(tensor: Tensor, T: int, S: int, found: list[Tensor]) -> bool:
    """A [B, T, S] before the output in a tuple is the weights."""
    return len(found) > 1 and tensor.ndim >= 3 and tuple(tensor.shape[-2:]) == (T, S)


def _output(tensor: Tensor, layout: str, B: int, T: int, H: int) -> Tensor | None:
    shape = tuple(tensor.shape)
    if layout == "one sequence":
        return tensor[None] if len(shape) == 2 and shape[0] == T else None
    if layout == "sequence first":
        return tensor.transpose(0, 1) if len(shape) == 3 and shape[:2] == (T, B) else None
    if layout == "heads first" and len(shape) == 4 and shape[:3] == (B, H, T):
        return tensor.transpose(1, 2).flatten(2)  # [B, T, H * D]
    if layout == "heads inside" and len(shape) == 4 and shape[:3] == (B, T, H):
        return tensor.flatten(2)
    if layout == "heads in the batch" and len(shape) == 3 and shape[:2] == (B * H, T):
        return tensor.unflatten(0, (B, H)).transpose(1, 2).flatten(2)
    return tensor if len(shape) == 3 and shape[:2] == (B, T) else None


def _weights(tensor: Tensor, layout: str, B: int, T: int, S: int, H: int) -> Tensor | None:
    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        return None
    if layout == "one sequence":
        tensor, shape = tensor[None], (1, *shape)
        B = 1
    if shape == (B, H, T, S):
        return tensor
    if shape == (H, B, T, S):
        return tensor.transpose(0, 1)
    if shape == (B * H, T, S):
        return tensor.unflatten(0, (B, H))
    if shape == (T, S, B, H):
        return tensor.permute(2, 3, 0, 1)
    if shape == (B, T, S) and H == 1:
        return tensor[:, None]
    return None
