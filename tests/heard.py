"""A listener for tests."""

from __future__ import annotations

from headwise.listeners.active import Call

__all__ = ["Heard"]


class Heard:
    """Keeps every call."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def hear(self, call: Call) -> None:
        self.calls.append(call)

    @property
    def paths(self) -> list[str]:
        return [call.path for call in self.calls]
