"""The layers of a model as a table for the terminal: what their heads come to."""

from __future__ import annotations

import math

from ..heads.collection import Heads
from ..heads.comparing import attention_between
from ..heads.diversity import one_number
from ..heads.layer import LayerHeads
from .heads_table import HeadsTable
from .legend import census
from .table import HEADERS, as_number, as_text, empty_table

__all__ = ["diversity_of", "layers_table"]

NUMBERS = ("entropy", "distance", "first")


def layers_table(heads: Heads, *, title: str | None = None) -> HeadsTable:
    """One row a layer: means over its heads, how much they differ, and how many have which label.

    Diversity is the mean Jensen-Shannon divergence between two heads, in nats: 0 where all look alike, 0.69
    (log 2) where no two look at the same keys. A layer whose maps were not kept has a dash, unless it was
    watched with `diversity=True`.

    Raises:
        ArgumentError: nothing was watched.
        ImportError: rich is not installed.
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
    found = attention_between(layer)
    return math.nan if found is None else float(one_number(found))
