"""The numbers an examination works with: all different, so that no two axes can be taken for one another."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["USUAL", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """B batch, T = S long, T short, E width, H num_heads, D head_dim."""

    E: int = 24
    H: int = 4
    D: int = 6
    B: int = 3
    long: int = 7
    short: int = 5
    block: int = 16  # the longest sequence to build for

    def of_width(self, E: int, H: int | None = None) -> Sizes:
        """The same with other widths."""
        H = self.H if H is None else H
        return replace(self, E=E, H=H, D=max(1, E // max(1, H)))

    def shorter(self, length: int) -> Sizes:
        """The same for code that takes no longer sequence than this."""
        return replace(self, long=length, short=max(2, length - 2), block=length)


USUAL = ((24, 4), (32, 4), (64, 8), (512, 8), (768, 12))
