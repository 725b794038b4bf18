"""Statistics as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..engines.statistics import RECEIVED, Statistics
from ..errors import ArgumentError, ShapeError
from .labels import plain

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["as_number", "as_text", "empty_table", "statistics_table", "table_class"]

HEADERS = {  # name -> what stands above its column: the name, and what the numbers are
    "entropy": "entropy\nnats",
    "effective_keys": "effective\nkeys",
    "confidence": "confi-\ndence",
    "distance": "distance\nkeys",
    "first": "first\nkey",
    "previous": "previous\nkey",
    "itself": "itself",
    "next": "next\nkey",
    "local": "local",
    "max_logit": "max\nlogit",
    "induction": "induc-\ntion",
    "punctuation": "punctu-\nation",
}
WEIGHTS = {  # shares of 1
    "confidence", "first", "previous", "itself", "next", "local", "induction", "duplicate_token", "special",
    "punctuation", "spread", "locality", "streaming",
}  # fmt: skip
STRONG = 0.5  # a share worth the eye's attention


def empty_table(title: str | None = None) -> Table:
    """A table as headwise prints them, without columns.

    Raises:
        ImportError: rich is not installed.
    """
    table = table_class()
    from rich.box import SIMPLE_HEAD

    shown = None if title is None else as_text(title)
    return table(box=SIMPLE_HEAD, pad_edge=False, padding=0, title=shown, title_justify="left")


def table_class() -> type[Table]:
    """rich's tables.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich.table import Table
    except ModuleNotFoundError as error:
        hint = 'headwise tables need rich; install with: pip install "headwise[cli]"'
        raise ImportError(hint, name="rich") from error
    return Table


def statistics_table(
    stats: Statistics, names: Sequence[str] | None = None, batch: int = 0, title: str | None = None
) -> Table:
    """One row a head, one column a statistic; shares of at least one half stand out. `received` is left out.

    Args:
        stats: measured per head, [B, H] each.
        names: one a head, instead of 0, 1, ...
        batch: which sequence.
        title: above the table.

    Raises:
        ImportError: rich is not installed.
        ArgumentError: no statistic but `received`.
        ShapeError: statistics per query; names that do not fit.
        IndexError: no such sequence.
    """
    table = empty_table(title)
    columns = {name: values for name, values in stats.items() if name != RECEIVED}
    if not columns:
        raise ArgumentError('stats must hold a number a head: found none; try statistics("entropy")')
    for name, values in columns.items():
        if values.ndim != 2:
            raise ShapeError(
                f"stats must be one number a head, [B, H]: {name} is {list(values.shape)}; "
                'measure them with per="head"'
            )
    heads = next(iter(columns.values())).shape[1]
    names = [str(head) for head in range(heads)] if names is None else names
    if len(names) != heads:
        raise ShapeError(f"names must match num_heads: {len(names)} names for {heads}; give one a head")

    table.add_column("head", no_wrap=True)
    for name in columns:
        table.add_column(HEADERS.get(name, name), justify="right", no_wrap=True)
    rows = zip(*(values[batch].tolist() for values in columns.values()), strict=True)
    for head, row in zip(names, rows, strict=True):
        table.add_row(as_text(head), *map(as_number, columns, row))
    return table


def as_text(text: str) -> Text:
    """Names are data: no markup, no escape codes."""
    from rich.text import Text

    return Text(plain(text))


def as_number(name: str, value: float) -> Text:
    from rich.text import Text

    if math.isnan(value):  # no query had such a key
        return Text("-", style="dim")
    if name in WEIGHTS:
        return Text(f"{value:.2f}", style="bold" if value >= STRONG else "")
    return Text(f"{value:.2f}" if name == "entropy" else f"{value:.1f}")
