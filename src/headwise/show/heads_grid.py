"""Where the heads of a grid stand: its rows and columns, and what is written beside them, in inches.

Letters: T query_len, S key_len.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..heads.collection import Heads
from ..heads.layer import Head
from .pictured_heads import cells_of, layer_name, names_in
from .sheet import LONGEST, fine_enough, sharpness, whole
from .texts import MISSING, inches, label, wrapped

if TYPE_CHECKING:
    from .heatmaps import Cells

__all__ = ["GAP", "LINE", "MOST_NAMED", "SMALL_CELLS", "TITLED", "Row", "Sheet", "points"]

SMALL_CELLS = 128  # a side, in the grid
MOST_NAMED = 20  # tokens that can be read beside a small heat map
TITLED = 0.7  # inches: the smallest heat map with words above it
PITCH = 0.09  # inches from one name to the next
GAP, OVER, LINE = 0.14, 0.24, 0.17  # inches: between heat maps, above one for its label, of a line of text
HOW = (
    "Each square is one head. A row is a token that attends (query), a column one that is attended to (key); "
    "the darker, the more weight. Labels are measured: the number is the score that earned them."
)
HOW_WRITTEN = (
    "Each square is one head. A row is a token that attends (query), a column one that is attended to (key); "
    "the darker, the more is written: weight times the norm of what the head writes of that key, relative to "
    "the largest norm of its layer. Labels are of the weights alone."
)


@dataclass
class Row:
    """One layer of the grid."""

    name: str
    size: float  # of its name, in points
    heads: list[Head]  # those to draw
    picture: Cells
    lengths: tuple[int, int]
    names: tuple[list[str], list[str]]  # of queries, of keys, as written; []: there is no room
    wide: float = 0.0  # inches of one heat map
    tall: float = 0.0
    ends: set[int] = field(default_factory=set)  # the heads with names of keys below: the next row has others
    below: float = 0.0  # inches for these

    @property
    def pooled(self) -> bool:
        """Whether positions share cells."""
        return self.picture.shape[1:] != self.lengths


@dataclass
class Sheet:
    """The measures of a grid, in inches."""

    rows: list[Row]
    columns: list[int]  # the heads that have one
    side: float  # of the largest heat map
    left: float  # where the first begins
    width: float
    dpi: int
    grown: float  # how much larger than usual letters are
    how: list[str] = field(default_factory=list)  # to read it, in lines

    @classmethod
    def of(
        cls,
        heads: Heads,
        everyone: Sequence[Head],
        batch: int,
        query_tokens: Sequence[str] | None,
        key_tokens: Sequence[str] | None,
        written: bool,
    ) -> Sheet:
        layers: dict[str, list[Head]] = {}
        for head in everyone:
            layers.setdefault(head.path, []).append(head)
        columns = sorted({head.head for head in everyone})
        count, across = len(layers), len(columns)
        roughly = max(0.3, min(max(1.0, min(2.4, 6.2 / across, 8 / count)), 30 / across, 34 / count))
        dpi = sharpness(across * (roughly + GAP) + 2, count * (roughly + OVER) + 2)
        most = fine_enough(roughly, dpi, SMALL_CELLS)
        found = [cells_of(heads[path], batch, most, written=written) for path in layers]
        names = names_in(heads, batch, [call for _, _, call in found], query_tokens, key_tokens)
        longest = max((max(lengths) for _, lengths, _ in found if max(lengths) <= MOST_NAMED), default=1)
        side = max(roughly, min(PITCH * longest, 30 / across, 34 / count))
        grown = min(1.6, max(1.0, across * (side + GAP) / 13))
        rows = []
        for (path, mine), (picture, lengths, _), known in zip(layers.items(), found, names, strict=True):
            layer = heads[path]
            number = isinstance(layer.layer, int)
            rows.append(
                Row(
                    label(layer_name(layer), 34),
                    (9 if number else 6.5) * grown,
                    mine,
                    picture,
                    lengths,
                    (_written_out(known[0], lengths[0], side), _written_out(known[1], lengths[1], side)),
                    whole(side, picture.shape[2], dpi),
                    whole(side, picture.shape[1], dpi),
                )
            )
        side = max(max(row.wide, row.tall) for row in rows)
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            same = after is not None and (row.lengths[1], row.names[1]) == (after.lengths[1], after.names[1])
            row.ends = {head.head for head in row.heads}
            if same and after is not None:
                row.ends -= {head.head for head in after.heads}
            row.below = 0.0 if same else _below(row, grown)
        left = (
            0.34 + max(inches(row.name, row.size) for row in rows) + max(_beside(row, grown) for row in rows)
        )
        width = max(left + across * (side + GAP) + 0.8 * grown, 8.5)
        sheet = cls(rows, columns, side, left, width, dpi, grown)
        sheet.how = wrapped(_how(rows, written), width - 0.3, 8.5 * grown)
        return sheet

    def x(self, head: int) -> float:
        """Where the heat maps of a head's column begin."""
        return self.left + self.columns.index(head) * (self.side + GAP)

    @property
    def x_end(self) -> float:
        """Where the last column ends."""
        return self.left + len(self.columns) * (self.side + GAP)

    @property
    def tall(self) -> float:
        """From the names of the columns to what stands below the last row."""
        return 0.2 * self.grown + sum(self.over + row.tall + row.below for row in self.rows)

    @property
    def over(self) -> float:
        """Inches above a heat map, for its label."""
        return OVER * self.grown if self.side >= TITLED else GAP


def _written_out(names: list[str] | None, length: int, side: float) -> list[str]:
    if names is None or length > MOST_NAMED or side / length < 0.8 * PITCH:
        return []
    return [label(token, LONGEST) for token in names]


def points(side: float, length: int) -> float:
    """The size of names along a heat map."""
    return min(7.0, 0.88 * 72 * side / length)


def _beside(row: Row, grown: float) -> float:
    """Inches that names of queries take."""
    if row.names[0]:
        return max(inches(name, points(row.tall, row.lengths[0])) for name in row.names[0])
    return inches(str(row.lengths[0] - 1), 6 * grown)


def _below(row: Row, grown: float) -> float:
    """Inches that names of keys take."""
    if row.names[1]:
        return 0.1 + max(inches(name, points(row.wide, row.lengths[1])) for name in row.names[1])
    return 0.2 * grown


def _how(rows: Sequence[Row], written: bool) -> str:
    how = HOW_WRITTEN if written else HOW
    shared = sorted({max(row.picture.shape[1:]) for row in rows if row.pooled})
    if shared:
        how += f" Positions share {shared[-1]} rows and columns."
    if any(MISSING in name for row in rows for side in row.names for name in side):
        how += f" {MISSING}: a character that no font of this machine has."
    return how
