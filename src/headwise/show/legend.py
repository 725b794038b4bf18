"""Which labels were found on how many heads, and what they mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..heads.labels import LABELS, MIXED
from ..heads.layer import Head
from .table import as_text, table_class

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["NOTHING_CLEAR", "census", "meanings"]

NOTHING_CLEAR = "does several things: no score above its threshold"


def census(heads: Iterable[Head]) -> list[tuple[str, int, str]]:
    """(label, how many heads, what it means): the most frequent first, those without a label last."""
    known = {entry.name: entry.meaning for entry in LABELS}
    counts = Counter(head.label.name for head in heads)
    order = sorted(counts.items(), key=lambda each: (each[0] == MIXED, -each[1]))
    return [(name, count, known.get(name, NOTHING_CLEAR)) for name, count in order]


def meanings(heads: Iterable[Head]) -> Table:
    """The census for the terminal.

    Raises:
        ImportError: rich is not installed.
    """
    table = table_class().grid(padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for name, count, meaning in census(heads):
        table.add_row(str(count), as_text(name), meaning)
    return table
