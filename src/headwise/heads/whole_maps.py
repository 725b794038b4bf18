"""Calls of one forward whose weights are few enough to be looked at whole, side by side as heads of one map.

What is cheap to say of a short text is dear to ask: patterns are ten light passes a layer, each of which
costs more to begin than to do. Where all weights of alike calls fit, they are made once, and every pattern is
a sum of some of them; beyond, patterns are measured as ever.

Letters: H heads of all these calls, T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..map import AttentionMap
from .record import Record, measure_patterns

__all__ = ["Whole", "whole_maps"]

MOST = 2**24  # weights, 64 MiB in float32


@dataclass(frozen=True, eq=False)
class Whole:
    """Alike calls of one sequence: of the same sizes, rules and tokens.

    weights: [1, H, T, S], those of the first call first.
    """

    records: list[Record]
    weights: Tensor

    def measure_patterns(self) -> None:
        """Add the patterns to each of the records."""
        first = self.records[0]
        assert first.map is not None
        given = AttentionMap.from_weights(self.weights, first.map.mask)
        known = {name: torch.cat([call.rows[name] for call in self.records], 1) for name in first.rows}
        values, counts = measure_patterns(given, first.kind, first.marks, known, first.reach)
        calls = len(self.records)
        parts = {name: value.chunk(calls, 1) for name, value in values.items()}
        some = {
            name: count.expand(1, self.weights.shape[1]).chunk(calls, 1) for name, count in counts.items()
        }
        for at, record in enumerate(self.records):
            record.take_patterns(
                {name: value[at] for name, value in parts.items()},
                {name: count[at] for name, count in some.items()},
            )


@torch.no_grad()
def whole_maps(records: Iterable[Record], most: int = MOST) -> Iterator[Whole]:
    """Calls that kept a map, those that are alike together; left out: more than `most` weights, several
    sequences, learned sinks, which are no key."""
    groups: list[list[Record]] = []
    for record in records:
        B, H, T, S = record.shape
        if record.map is None or B != 1 or H * T * S > most or record.map.sinks is not None:
            continue
        for group in groups:
            if _alike(group[0], record) and len(group) * H * T * S < most:
                group.append(record)
                break
        else:
            groups.append([record])
    for group in groups:
        yield Whole(group, torch.cat([call.map.dense() for call in group if call.map is not None], 1).float())


def _alike(one: Record, other: Record) -> bool:
    assert one.map is not None and other.map is not None
    return (
        (one.shape, one.kind, one.reach, one.rows.keys())
        == (other.shape, other.kind, other.reach, other.rows.keys())
        and one.marks is other.marks
        and one.map.device == other.map.device
        and (one.map.mask is other.map.mask or one.map.mask == other.map.mask)
    )
