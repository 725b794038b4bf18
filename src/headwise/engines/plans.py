"""Plans: how a call was run, stored for the next call with the same key, on CPUs and GPUs.

A key is a tuple: the function that made the plan, then everything that decides how such a call is run
(shapes, strides, dtypes, devices, alignment, numbers, torch's switches). The values of tensors are not part
of a key, and a plan holds no tensor of a call.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any


class Plans:
    """Plans by key.

    A caller that asks `seen_before` stores a plan when a key comes the second time, because most keys of a
    generation occur once. When there are `most` plans, all are removed.
    """

    most = 8192

    def __init__(self) -> None:
        self._plans: dict[tuple[Hashable, ...], Any] = {}

    def get(self, key: tuple[Hashable, ...]) -> Any | None:
        """Return the plan of a key, or None if there is none."""
        return self._plans.get(key)

    def keep(self, key: tuple[Hashable, ...], plan: object) -> None:
        """Store a plan under a key. If `most` keys are stored, all are removed first."""
        if len(self._plans) >= self.most and key not in self._plans:
            self._plans.clear()
        self._plans[key] = plan

    def seen_before(self, key: tuple[Hashable, ...]) -> bool:
        """Return True if the key was seen before, and record that it has been seen now."""
        if key in self._plans:
            return True
        self.keep(key, None)
        return False

    def made_by(self, owner: Hashable) -> list[Any]:
        """Return the plans whose keys begin with this owner."""
        return [plan for key, plan in self._plans.items() if key[0] == owner and plan is not None]

    def clear(self) -> None:
        """Remove all plans."""
        self._plans.clear()


PLANS = Plans()  # of the whole process
