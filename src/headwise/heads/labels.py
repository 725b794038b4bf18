"""Labels: a name for what a head does, only from what was measured, only above a stated threshold.

`LABELS` is the table. Scores are shares, 1 at most. To add a label, add its entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

MIXED = "mixed"
NOTHING_CLEAR = "does several things, none of them above the threshold of its label"
ROUNDING = 1e-3  # two scores of the same keys, measured in two ways: of models in float16 they differ by 1e-5


@dataclass(frozen=True)
class Entry:
    """One label: which score earns it, from where on, what it means and who says so.

    queries: of how many queries at least the score must be the mean. Where a text says one word twice, what
    a head does there is an accident.
    general: asked only where no other label fits. What is true of a previous-token head, that its weight lies
    near by, is true of many heads and says less.
    """

    name: str
    score: str  # a statistic of `AttentionMap.statistics`, or a function of `headwise.heads`
    threshold: float
    meaning: str
    source: str
    queries: int = 1
    general: bool = False


LABELS: tuple[Entry, ...] = (
    Entry(
        "induction",
        "induction",
        0.4,
        "looks at what followed an earlier copy of the word, where there is one: it continues what was said",
        "Olsson 2022; 0.4 is the threshold of ARENA's exercises for the mean weight on the stripe of random "
        "tokens said twice; this is that mean on any text, over the queries that have a copy to look for; "
        "how many of them it takes is ours",
        queries=8,
    ),
    Entry(
        "duplicate-token",
        "duplicate_token",
        0.4,
        "looks at earlier copies of the same word, where there are any",
        "Wang 2022; the threshold is that of induction, which is measured alike",
        queries=8,
    ),
    Entry(
        "previous-token",
        "previous",
        0.5,
        "looks at the word just before each word",
        "Clark 2019, section 3.1; 0.5 is its threshold for heads of position",
    ),
    Entry(
        "next-token",
        "next",
        0.5,
        "looks at the word just after each word",
        "Clark 2019, section 3.1; 0.5 is its threshold for heads of position",
    ),
    Entry(
        "self",
        "itself",
        0.5,
        "looks at each word itself",
        "Clark 2019, section 3.1; 0.5 is its threshold for heads of position",
    ),
    Entry(
        "sink",
        "first",
        0.6,
        "rests most of its weight on the first token, whatever that says: an attention sink",
        "Xiao 2024, Gu 2024; Gu counts heads from 0.3 on, which may still do something else with the rest",
    ),
    Entry(
        "special-token",
        "special",
        0.6,
        "rests most of its weight on marks that are no words, such as those of a text's start and end",
        "Clark 2019, section 3.2; 0.6 is its threshold; over the queries that see one",
    ),
    Entry(
        "punctuation",
        "punctuation",
        0.5,
        "looks at full stops, commas and the like",
        "Clark 2019, section 3.2; 0.5 as for heads of position; over the queries that see one",
    ),
    Entry(
        "broad",
        "spread",
        0.9,
        "looks at everything nearly alike: its entropy is nine tenths of the largest possible",
        "Clark 2019, section 3.3, there 3.8 nats (0.78 of log 128); relative, so that it fits any length",
        general=True,
    ),
    Entry(
        "local",
        "locality",
        0.8,
        "looks at words near by: beyond 8 it has a fifth or less of the weight that an even look has there",
        "Sukhbaatar 2019 on how short most heads' reach is; the threshold is ours",
        general=True,
    ),
)
ENTRIES = {entry.name: entry for entry in LABELS}


@dataclass(frozen=True)
class Label:
    """A name, and the score that earned it; None beside "mixed"."""

    name: str
    score: float | None = None

    def __str__(self) -> str:
        return self.name if self.score is None else f"{self.name} ({self.score:.2f})"

    @property
    def strength(self) -> tuple[bool, float]:
        """How far the score is above its threshold, as a share of the way to 1; for comparing two labels.

        A general label is weaker than any other, "mixed" weaker than all.
        """
        if self.score is None:
            return False, -math.inf
        entry = ENTRIES[self.name]
        return not entry.general, (self.score - entry.threshold) / (1 - entry.threshold)


def label(scores: Mapping[str, float]) -> Label:
    """The strongest label, see `Label.strength`; "mixed" where no score reaches its threshold.

    A score that is not there or NaN was not measured, and earns nothing. General labels are asked last; of
    equals, but for rounding, the first in `LABELS` wins: where the only special token is the first, a head
    that rests on it is a sink.

    Args:
        scores: a head's scores by the names in `LABELS`, each of enough queries; other names are ignored.

    Example:
        >>> print(label({"previous": 0.93, "first": 0.04, "locality": 0.99}))
        previous-token (0.93)
        >>> print(label({"previous": 0.31, "first": 0.22}))
        mixed
    """
    best = Label(MIXED)
    for entry in LABELS:
        score = float(scores.get(entry.score, math.nan))
        if math.isnan(score) or score < entry.threshold:
            continue
        found = Label(entry.name, score)
        is_special, above = best.strength
        if found.strength > (is_special, above + ROUNDING):
            best = found
    return best


def of_too_few(queries: Mapping[str, float]) -> frozenset[str]:
    """The scores that are the mean of fewer queries than a label takes.

    Args:
        queries: of how many queries each score is the mean; one that is not there is the mean of enough.
    """
    return frozenset(entry.score for entry in LABELS if queries.get(entry.score, math.inf) < entry.queries)
