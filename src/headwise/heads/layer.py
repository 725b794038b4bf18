"""The heads of one layer, and one head: means over all calls, and labels.

A label is a name for what a head does, by a measured score above a threshold; `LABELS` is the table. Scores
are shares, at most 1. To add a label, add its entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engines.statistics import ROW_STATISTICS, Statistics
from ..errors import ArgumentError
from ..map import AttentionMap
from .layer_names import Layer, path_in_words
from .record import PATTERNS, WRITTEN, Record

POSITIONS = ("distance", "previous", "itself", "next", "local")  # meaningless if keys are of another text

# Labels

MIXED = "mixed"
NOTHING_CLEAR = "has no score above the threshold of a label"
ROUNDING = 1e-3  # tolerance for two scores of the same keys; in float16 models they differ by 1e-5


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
        "attends to the token that followed an earlier copy of the current token, so it can "
        "continue a repetition",
        "Olsson 2022. The threshold 0.4 is that of the ARENA exercises for the mean weight on the induction "
        "stripe of a repeated random sequence. Here the mean is taken on any text, over the queries whose "
        "token occurred before. The required number of such queries is our choice.",
        queries=8,
    ),
    Entry(
        "duplicate-token",
        "duplicate_token",
        0.4,
        "attends to earlier copies of the current token",
        "Wang 2022. The threshold is that of induction, which is measured in the same way.",
        queries=8,
    ),
    Entry(
        "previous-token",
        "previous",
        0.5,
        "attends to the token just before the current one",
        "Clark 2019, section 3.1, which also uses 0.5 for heads that attend by position.",
    ),
    Entry(
        "next-token",
        "next",
        0.5,
        "attends to the token just after the current one",
        "Clark 2019, section 3.1, which also uses 0.5 for heads that attend by position.",
    ),
    Entry(
        "self",
        "itself",
        0.5,
        "attends to the current token itself",
        "Clark 2019, section 3.1, which also uses 0.5 for heads that attend by position.",
    ),
    Entry(
        "sink",
        "first",
        0.6,
        "puts most of its weight on the first token, whatever token that is (an attention sink)",
        "Xiao 2024, Gu 2024. Gu 2024 uses 0.3; such a head may still use its other weight for something "
        "else.",
    ),
    Entry(
        "special-token",
        "special",
        0.6,
        "puts most of its weight on special tokens, such as those that mark the start and end of a text",
        "Clark 2019, section 3.2, which also uses 0.6. The mean is over the queries that see a special "
        "token.",
    ),
    Entry(
        "punctuation",
        "punctuation",
        0.5,
        "attends to punctuation, such as full stops and commas",
        "Clark 2019, section 3.2. The threshold is that of heads that attend by position. The mean is over "
        "the queries that see punctuation.",
    ),
    Entry(
        "broad",
        "spread",
        0.9,
        "spreads its weight almost evenly: its entropy is at least 90% of the largest possible",
        "Clark 2019, section 3.3, uses 3.8 nats (0.78 log 128). The threshold here is relative, so that it "
        "applies to any length.",
        general=True,
    ),
    Entry(
        "local",
        "locality",
        0.8,
        "attends mostly to the 8 nearest tokens: farther ones get at most 20% of what uniform attention "
        "gives them",
        "Sukhbaatar 2019: most heads attend to near tokens only. The threshold is our choice.",
        general=True,
    ),
)
ENTRIES = {entry.name: entry for entry in LABELS}


@dataclass(frozen=True)
class Label:
    """The name of a label and the score that reached its threshold; "mixed" has the score None."""

    name: str
    score: float | None = None

    def __str__(self) -> str:
        return self.name if self.score is None else f"{self.name} ({self.score:.2f})"

    @property
    def strength(self) -> tuple[bool, float]:
        """How far the score is above its threshold: 0 at the threshold, 1 at a score of 1.

        It serves to compare labels. A general label is weaker than any other label, and "mixed" is the
        weakest.
        """
        if self.score is None:
            return False, -math.inf
        entry = ENTRIES[self.name]
        return not entry.general, (self.score - entry.threshold) / (1 - entry.threshold)


def label(scores: Mapping[str, float]) -> Label:
    """Return the strongest label, see `Label.strength`; "mixed" where no score reaches its threshold.

    A score that is missing or NaN gives no label. General labels are considered last. If two labels are
    equally strong up to rounding, the first one in `LABELS` is returned: if the first token is the only
    special token, a head that attends to it is a "sink".

    Args:
        scores: a head's scores by the names in `LABELS`, each measured on enough queries; other names are
            ignored.

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
        candidate = Label(entry.name, score)
        is_special, above = best.strength
        if candidate.strength > (is_special, above + ROUNDING):
            best = candidate
    return best


def of_too_few(queries: Mapping[str, float]) -> frozenset[str]:
    """Return the names of scores that are the mean of fewer queries than their label requires; a score whose
    queries are not given is the mean of enough."""
    return frozenset(entry.score for entry in LABELS if queries.get(entry.score, math.inf) < entry.queries)


# Heads


@dataclass(frozen=True)
class Head:
    """One head: where it is, its numbers, its label. Unpacks to (layer, head), as `hw.ablate` takes it.

    layer: its number, numbered from the model, or its path; of a layer that runs again, "path#visit".
    """

    layer: Layer
    head: int
    path: str
    label: Label
    values: dict[str, float] = field(repr=False, hash=False)
    score: float | None = None  # what it was found by
    few: frozenset[str] = field(
        default=frozenset(), repr=False, hash=False
    )  # scores that are means of too few queries

    def __iter__(self) -> Iterator[Layer | int]:
        return iter((self.layer, self.head))

    def __len__(self) -> int:
        return 2


@dataclass(frozen=True)
class Unheard:
    """A layer with attention, or what may be attention, that could not be measured."""

    path: str  # of the module
    kind: str  # the name of its class
    softmaxes: int  # how many ran in it, in all forwards
    reason: str | None  # why fallback="eager" cannot read its weights; None: it can

    def __str__(self) -> str:
        reason = "" if self.reason is None else f"; {self.reason}"
        count = f"{self.softmaxes} softmax operation{'' if self.softmaxes == 1 else 's'}"
        return f"{self.path or 'the model itself'} ({self.kind}, {count}{reason})"


class LayerHeads:
    """The heads of one attention layer. Numbers are means over all queries of all calls, [H] each.

    Attributes:
        path: of the module.
    """

    def __init__(self, path: str, layer: Layer | None = None) -> None:
        self.path = path
        self.layer: Layer = path if layer is None else layer
        self._calls: list[Record] = []
        self.runs_again = False  # in one forward, as layers with shared weights do

    _before_reading: Callable[[], None] | None = None  # measures deferred calls and adds them

    @property
    def calls(self) -> list[Record]:
        """A `Record` per call, with numbers per sequence, [B, H]."""
        if self._before_reading is not None:
            self._before_reading()
        return self._calls

    def take(self, record: Record) -> None:
        """Add a call without measuring deferred calls first."""
        self._calls.append(record)

    def __getstate__(self) -> dict[str, object]:
        state = {**self.__dict__, "_calls": self.calls}
        state.pop("_before_reading", None)
        return state

    @property
    def kind(self) -> str:
        """Of attention, "self" or "cross": that of its largest call."""
        return max(self.calls, key=lambda call: call.shape[2]).kind if self.calls else "self"

    @property
    def place(self) -> str:
        """The path that means this layer alone: of one that runs again, "path#0" is the first visit."""
        return f"{self.path}#0" if self.runs_again and "#" not in self.path else self.path

    @property
    def name(self) -> Layer:
        """What `headwise.ablate` and the like take: its number or path; of one that runs again, its place."""
        return self.place if "#" in self.place else self.layer

    @property
    def num_heads(self) -> int:
        return self.calls[-1].shape[1]

    @property
    def statistics(self) -> Statistics:
        """Row statistics, and patterns where tokens are known: [H] each; `max_logit` is the largest."""
        for call in self.calls:
            call.measure_patterns()
        names = dict.fromkeys(name for call in self.calls for name in call.rows)
        return Statistics({name: self._over_calls(name) for name in names})

    def __getattr__(self, name: str) -> Tensor:
        if name in ROW_STATISTICS or name in PATTERNS or name in WRITTEN:
            measured = self.statistics
            if name in measured:
                return measured[name]
            option = "patterns=True" if name in PATTERNS else f"statistics=[{name!r}]"
            option = "written=True" if name in WRITTEN else option
            raise AttributeError(
                f"{name} was not measured in {path_in_words(self.path)}; use watch(model, {option})"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _over_calls(self, name: str) -> Tensor:
        """Return the mean of a statistic over all calls, or its maximum, [H]."""
        values, counts = self._with_counts(name)
        if name in ROW_STATISTICS and ROW_STATISTICS[name].largest:
            return values.amax(0)
        return torch.where(counts > 0, values * counts, 0.0).sum(0) / counts.sum(0)

    def _with_counts(self, name: str) -> tuple[Tensor, Tensor]:
        """Return a statistic per sequence, and of how many queries it is the mean: [sequences, H] each."""
        measured = [call for call in self.calls if name in call.rows]
        values = torch.cat([call.rows[name].cpu().double() for call in measured])
        counts = torch.cat([call.counts[name].cpu().double() for call in measured])
        return values, counts.masked_fill(values.isnan(), 0)  # no query was measured

    @property
    def map(self) -> AttentionMap:
        """The map of the last call that kept one.

        Raises:
            ArgumentError: none was kept.
        """
        maps = [call.map for call in self.calls if call.map is not None]
        if not maps:
            raise ArgumentError(
                f"heads must have maps: {path_in_words(self.path)} kept none, and its last call was "
                f"{list(self.calls[-1].shape)}; use watch(model, keep=True), or .pooled"
            )
        return maps[-1]

    @property
    def pooled(self) -> Tensor:
        """The picture of the last call that has one, [B, H, rows, columns].

        Raises:
            ArgumentError: none was made.
        """
        pooled_maps = [call.pooled for call in self.calls if call.pooled is not None]
        if not pooled_maps:
            raise ArgumentError(
                f"pooled maps must have been computed: none in {path_in_words(self.path)}; use "
                "watch(model, pooled=128)"
            )
        return pooled_maps[-1]

    @property
    def labels(self) -> list[Label]:
        """A label per head, from its measured numbers."""
        return [head.label for head in self]

    def __len__(self) -> int:
        return self.num_heads

    def __getitem__(self, head: int) -> Head:
        """Return one head.

        Raises:
            IndexError: no such head.
        """
        if not -self.num_heads <= head < self.num_heads:
            raise IndexError(
                f"head must be between 0 and {self.num_heads - 1}: got {head} in {path_in_words(self.path)}; "
                "choose one of those"
            )
        return list(self)[head]

    def __iter__(self) -> Iterator[Head]:
        values = {name: value.tolist() for name, value in self.statistics.items()}
        scores_with_minimum = [entry.score for entry in LABELS if entry.queries > 1 and entry.score in values]
        queries = {name: self._with_counts(name)[1].sum(0).tolist() for name in scores_with_minimum}
        for number in range(self.num_heads):
            row = {name: numbers[number] for name, numbers in values.items()}
            few = of_too_few({name: numbers[number] for name, numbers in queries.items()})
            excluded = few if self.kind == "self" else few.union(POSITIONS)
            scores = {name: value for name, value in row.items() if name not in excluded}
            yield Head(self.name, number, self.place, label(scores), row, few=few)

    def __repr__(self) -> str:
        calls = f"{len(self.calls)} call{'' if len(self.calls) == 1 else 's'}"
        return f"LayerHeads({self.path!r}, {self.num_heads} heads, {calls})"
