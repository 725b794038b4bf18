"""The parts a report is told in; each rendering sets them in its own way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """One line that says it all; `mark` is "right" or "wrong"."""

    mark: str
    text: str


@dataclass(frozen=True)
class Quote:
    """A line of the learner's source."""

    place: str  # "mha.py:41", or "" where it is not known
    line: int | None
    text: str


@dataclass(frozen=True)
class Row:
    """A label and what it stands for; code is set as it was written."""

    label: str
    text: str
    code: bool = False


@dataclass(frozen=True)
class Rows:
    """Rows that stand together."""

    rows: tuple[Row, ...]

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Listed:
    """A title and sentences under it, each with its mark: "right", "wrong", "unknown", "item"."""

    title: str
    items: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return bool(self.items)


@dataclass(frozen=True)
class Note:
    """A remark, said quietly."""

    text: str


Part = Heading | Quote | Rows | Listed | Note
