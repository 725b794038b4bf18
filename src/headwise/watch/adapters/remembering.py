"""What was read of a mask, kept for as long as the tensor lives unchanged.

All layers of a model get one mask, and reading its values stops a GPU: it is done once, not once a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor

__all__ = ["remembered"]

Found = TypeVar("Found")

_known: dict[tuple[int, str], tuple[Any, int, Any]] = {}  # (tensor, question) -> tensor, version, answer


def remembered(tensor: Tensor, question: str, find: Callable[[Tensor], Found]) -> Found:
    """`find(tensor)`, asked once for each state of the tensor."""
    key = (id(tensor), question)
    version = 0 if tensor.is_inference() else tensor._version
    kept = _known.get(key)
    if kept is not None and kept[0]() is tensor and kept[1] == version:
        answer: Found = kept[2]
        return answer
    answer = find(tensor)
    forget = functools.partial(_forget, _known, key)
    _known[key] = (ref(tensor, forget), version, answer)
    return answer


def _forget(known: dict[Any, Any], key: Any, _: Any) -> None:
    """Its own arguments: at the end of a program the module's names may be gone first."""
    known.pop(key, None)
