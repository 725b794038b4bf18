"""Heads and layers of a model as tables for the terminal, and what their labels mean."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..engines.statistics import ROW_STATISTICS
from ..errors import ArgumentError, nearest
from ..heads.collection import Heads
from ..heads.head_distances import one_number
from ..heads.labels import LABELS, MIXED
from ..heads.layer import Head, LayerHeads
from ..heads.model_diversity import attention_between
from ..heads.record import PATTERNS
from .tables import HEADERS, as_number, as_text, empty_table, table_class

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "NOTHING_CLEAR",
    "HeadsTable",
    "census",
    "check_sort",
    "diversity_of",
    "heads_table",
    "layers_table",
    "meanings",
]


USUAL = (
    "entropy", "effective_keys", "confidence", "distance", "first", "previous", "itself", "next", "induction",
)  # fmt: skip
ORDERS = ("label", "layer", "head")


class HeadsTable:
    """A table that shows itself wherever it is: printed, in a terminal, in a notebook."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich__(self) -> Table:
        return self.table

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=140, color_system=None)
        console.print(self.table)
        assert isinstance(console.file, io.StringIO)
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())

    __repr__ = __str__


def heads_table(
    heads: Heads,
    *,
    sort: str | None = None,
    descending: bool = True,
    top: int | None = None,
    columns: Sequence[str] | None = None,
    title: str | None = None,
) -> HeadsTable:
    """One row per head: layer, head, label with its score, numbers; shares of at least one half stand out.

    The number that heads are sorted by is always among them; heads without it come last.

    Raises:
        ArgumentError: nothing was watched; a column or sort that was not measured.
        PackageMissing: rich is not installed.
    """
    table = empty_table(title if title is not None else heads.title)
    everyone = heads.all()
    measured = list(dict.fromkeys(name for head in everyone for name in head.values))
    shown = [name for name in USUAL if name in measured] if columns is None else list(columns)
    for name in shown:
        if name not in measured:
            raise ArgumentError(f"columns must have been measured: got {name!r}; {nearest(name, measured)}")
    if sort is not None:
        everyone = sorted(everyone, key=_key(sort, heads, measured, descending), reverse=descending)
        shown += [sort] * (sort in measured and sort not in shown)
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("head", justify="right", no_wrap=True)
    table.add_column("label (score)", no_wrap=True)
    for name in shown:
        table.add_column(HEADERS.get(name, name.replace("_", "\n")), justify="right", no_wrap=True)
    for head in everyone[:top]:
        row = [as_number(name, head.values.get(name, math.nan)) for name in shown]
        label = as_text(str(head.label))
        label.stylize("dim" if head.label.name == MIXED else "bold")
        table.add_row(as_text(str(heads[head.path].layer)), str(head.head), label, *row)
    return HeadsTable(table)


def check_sort(sort: str) -> None:
    """Raises `ArgumentError` for what no table can be sorted by, before anything is measured."""
    known = [*ORDERS, *ROW_STATISTICS, *PATTERNS]
    if sort not in known:
        raise ArgumentError(f"sort must be a column: got {sort!r}; {nearest(sort, known)}")


def _key(
    sort: str, heads: Heads, measured: list[str], descending: bool
) -> Callable[[Head], tuple[bool, float] | float]:
    if sort == "label":
        return lambda head: (head.label.name != MIXED, head.label.score or 0.0)
    if sort == "layer":
        # by path and by place: of a layer that runs again, the first visit is "path" and "path#0"
        order = {
            name: number for number, layer in enumerate(heads.values()) for name in (layer.path, layer.place)
        }
        return lambda head: order[head.path]
    if sort == "head":
        return lambda head: head.head
    if sort not in measured:
        raise ArgumentError(f"sort must be a column: got {sort!r}; {nearest(sort, [*ORDERS, *measured])}")
    last = -math.inf if descending else math.inf

    def of(head: Head) -> float:
        value = head.values.get(sort, math.nan)
        return last if math.isnan(value) else value

    return of


# Labels


NOTHING_CLEAR = "does several things: no score above its threshold"


def census(heads: Iterable[Head]) -> list[tuple[str, int, str]]:
    """(label, how many heads, what it means): the most frequent first, those without a label last."""
    known = {entry.name: entry.meaning for entry in LABELS}
    counts = Counter(head.label.name for head in heads)
    order = sorted(counts.items(), key=lambda counted: (counted[0] == MIXED, -counted[1]))
    return [(name, count, known.get(name, NOTHING_CLEAR)) for name, count in order]


def meanings(heads: Iterable[Head]) -> Table:
    """The census for the terminal.

    Raises:
        PackageMissing: rich is not installed.
    """
    table = table_class().grid(padding=(0, 1))
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    table.add_column(style="dim")
    for name, count, meaning in census(heads):
        table.add_row(str(count), as_text(name), meaning)
    return table


# Layers


NUMBERS = ("entropy", "distance", "first")


def layers_table(heads: Heads, *, title: str | None = None) -> HeadsTable:
    """One row per layer: means over its heads, how much they differ, and how many have which label.

    Diversity is the mean Jensen-Shannon divergence between two heads, in nats: 0 where all look alike, 0.69
    (log 2) where no two look at the same keys. A layer whose maps were not kept has a dash, unless it was
    watched with `diversity=True`.

    Raises:
        ArgumentError: nothing was watched.
        PackageMissing: rich is not installed.
    """
    table = empty_table(title if title is not None else heads.title)
    heads.all()  # raises where there are none
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("heads", justify="right", no_wrap=True)
    for name in NUMBERS:
        table.add_column(HEADERS[name], justify="right", no_wrap=True)
    table.add_column("diver-\nsity", justify="right", no_wrap=True)
    table.add_column("labels")
    for layer in heads.values():
        measured = layer.statistics
        said = ", ".join(f"{count} {name}" for name, count, _ in census(layer))
        means = {name: float(measured[name].nanmean()) for name in NUMBERS if name in measured}
        numbers = [as_number(name, means.get(name, math.nan)) for name in NUMBERS]
        numbers.append(as_number("entropy", diversity_of(layer)))  # in nats, as entropy is
        table.add_row(as_text(str(layer.layer)), str(len(layer)), *numbers, as_text(said))
    return HeadsTable(table)


def diversity_of(layer: LayerHeads) -> float:
    """How much the heads of a layer differ, in nats: the mean over pairs and queries, or NaN."""
    matrix = attention_between(layer)
    return math.nan if matrix is None else float(one_number(matrix))
