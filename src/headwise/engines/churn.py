"""A guard against plans built over and over: cuDNN plans each new shape, which can take 400 ms.

A run over fixed shapes pays once and is fastest. A run whose shapes keep changing (packed batches, growing
contexts) pays at every step; there torch's flash kernel, which needs no plan, is several times faster.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

__all__ = ["ShapeChurn"]


class ShapeChurn:
    """Counts how many of the recent calls came with a shape not seen before.

    Example:
        >>> churn = ShapeChurn(window=8, most=3)
        >>> for length in (5, 5, 5, 6, 7):
        ...     churn.note(length)
        >>> churn.reason(5) is None  # planned already
        True
        >>> print(churn.reason(8))
        3 of the last 5 calls had a shape not seen before, and it plans each one anew
    """

    def __init__(self, window: int = 64, most: int = 16, remembered: int = 4096) -> None:
        self.window, self.most, self.remembered = window, most, remembered
        self._seen: OrderedDict[Hashable, None] = OrderedDict()
        self._fresh: list[bool] = []

    def note(self, shape: Hashable) -> None:
        """A call with this shape is being run."""
        self._fresh.append(shape not in self._seen)
        del self._fresh[: -self.window]
        self._seen[shape] = None
        self._seen.move_to_end(shape)
        while len(self._seen) > self.remembered:
            self._seen.popitem(last=False)

    def reason(self, shape: Hashable) -> str | None:
        """Why a call with this shape had better go elsewhere; None if it is welcome."""
        fresh = sum(self._fresh)
        if shape in self._seen or fresh < self.most:
            return None
        return (
            f"{fresh} of the last {len(self._fresh)} calls had a shape not seen before, "
            "and it plans each one anew"
        )
