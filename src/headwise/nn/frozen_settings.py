"""What the settings of a layer have in common: they never change, and tensors made of them are kept."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import MISSING, fields
from typing import Any, Self, TypeVar

import torch

__all__ = ["Settings", "is_recorded"]

Made = TypeVar("Made")


def is_recorded() -> bool:
    """Whether this is a call that a compiler or another mode of torch records: nothing is kept of it then."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or bool(torch._C._len_torch_dispatch_stack())
    )


class Settings:
    """A frozen dataclass of plain data, which can keep tensors that follow from it alone.

    They can never be stale, since no field can change, and are no part of what the settings are: in no copy,
    file, comparison or repr of them. Copies of a layer share its settings, and so what is kept.
    """

    _kept: dict[Hashable, Any]

    def __new__(cls, *_: object, **__: object) -> Self:
        made = super().__new__(cls)
        object.__setattr__(made, "_kept", {})
        return made

    def keep(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, or what it made before under this key."""
        if is_recorded():
            return make()
        there: Made | None = self._kept.get(key)
        return self.keep_anew(key, make) if there is None else there

    def keep_anew(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """`make()`, in place of what is kept under this key."""
        with torch.inference_mode(False), torch.no_grad():  # else training could not use it later
            made = make()
        self._kept[key] = made
        return made

    def __reduce__(self) -> tuple[type[Self], tuple[object, ...]]:
        return type(self), tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _: object) -> Self:
        return self

    def __repr__(self) -> str:
        """As it is written: what is not the default."""
        said = []
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if field.default is MISSING or value != field.default:
                said.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(said)})"
