"""Sizes in bytes, as numbers and in words."""

from __future__ import annotations

import re

from .errors import ArgumentError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse(size: int | str) -> int:
    """Return a size in bytes from a number or from words such as "512 MiB"."""
    if isinstance(size, int) and not isinstance(size, bool):
        amount: float | None = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|b)\s*", str(size), re.IGNORECASE)
        amount = float(match[1]) * UNITS[match[2].upper()] if match else None
    if amount is None or amount <= 0:
        raise ArgumentError(f'budget must be a positive number of bytes: got {size!r}; use e.g. "2 GiB"')
    return int(amount)


def readable(size: int) -> str:
    """Return a size as text such as "1.5 GiB", rounded up; `parse` reads it back."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        unit = UNITS[name.upper()]
        if size >= unit:
            tenths = -(-size * 10 // unit)
            return f"{tenths // 10}.{tenths % 10} {name}" if tenths % 10 else f"{tenths // 10} {name}"
    return f"{size} B"
