"""Whether the result of a softmax is all of a layer's attention weights, told from shapes alone.

Letters: B batch, T query_len, S key_len, H num_heads; n windows that a layer cuts its positions into.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Size

__all__ = ["is_elementwise", "weights_shape"]


def weights_shape(
    shape: Size, num_heads: int | None, given: list[Size], returned: list[Size]
) -> tuple[int, int, int, int] | str:
    """[B, H, T, S] of a softmax over the last dimension, or why it cannot be all of a layer's weights.

    It is if there is a row for every position of what the layer was given, or of what it returns: some layers
    have fewer queries than keys. Layers that attend inside windows have the windows among their sequences.

    Args:
        shape: of the softmax, at least 3 dimensions.
        num_heads: as the layer says; None: it does not.
        given: shapes of the tensors that the layer was given.
        returned: shapes of those that it returned.

    Example:
        >>> weights_shape(Size([8, 3, 49, 49]), 3, [Size([2, 14, 14, 32])], [Size([2, 14, 14, 32])])
        (8, 3, 49, 49)
    """
    if is_elementwise(shape, given, returned):
        return f"the softmax gave {list(shape)}, the shape of the layer's input or output: it may be a gate"
    *lead, T, S = shape
    folded = _by_head(lead, num_heads, given)
    if folded is None:
        heads = "H" if num_heads is None else num_heads
        return f"the softmax gave {list(shape)}, which is not [B, {heads}, T, S]"
    B, H = folded
    if any(_has_rows(tensor, B, T) for tensor in given):
        return B, H, T, S
    if any(_has_rows(tensor, B, T) or tuple(tensor[:3]) == (B, H, T) for tensor in returned):
        return B, H, T, S
    windows = {B // tensor[0] for tensor in (*given, *returned) if _has_windows(tensor, B, T)}
    if not windows:
        seen = f"it was given {_shown(given)} and returned {_shown(returned)}"
        return f"the softmax gave {list(shape)}, whose {T} queries are not all positions: {seen}"
    if H in windows - {1} and len(lead) == 2:
        return f"the softmax gave {list(shape)}, in which windows and heads cannot be told apart"
    return B, H, T, S


def is_elementwise(shape: Size, given: list[Size], returned: list[Size]) -> bool:
    """Return True if a softmax has the shape of a layer's first input or output: a gate, or probabilities."""
    return shape in (*given[:1], *returned[:1])


def _by_head(lead: list[int], H: int | None, given: list[Size]) -> tuple[int, int] | None:
    """(sequences, heads) of the leading dimensions of a softmax; None: they are something else."""
    if len(lead) == 2:
        return (lead[0], lead[1]) if H is None or lead[1] == H else None
    if len(lead) == 1 and H is None:  # one head, if there are as many as there are sequences
        return (lead[0], 1) if any(tensor[0] == lead[0] for tensor in given) else None
    if len(lead) == 1:
        return (lead[0] // H, H) if H and lead[0] % H == 0 else None
    return (math.prod(lead[:-1]), H) if H is not None and lead[-1] == H else None


def _positions(tensor: Size) -> list[Size]:
    """What a tensor [B, .., C] or [B, C, ..] may have of positions."""
    return [tensor[1:-1], tensor[2:]]


def _has_rows(tensor: Size, B: int, T: int) -> bool:
    """Whether a tensor has B sequences of T positions."""
    if tuple(tensor[:2]) == (T, B):
        return True
    return tensor[0] == B and any(sides.numel() == T for sides in _positions(tensor))


def _has_windows(tensor: Size, B: int, T: int) -> bool:
    """Whether a tensor has as many positions as B windows of T hold; none is filled up with padding."""
    if not tensor[0] or B % tensor[0]:
        return False
    return any(B // tensor[0] * T == sides.numel() for sides in _positions(tensor))


def _shown(shapes: Iterable[Size]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes) or "no tensor"
