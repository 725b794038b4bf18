"""What the documents of a survey come to, head by head: in walks over the shards, some documents at a time.

    mean, spread, quantiles   of each number over documents, each counting once; exact (`exact_sums.py`)
    dependence                W / (W + B): W is the variance of a head's number over documents, B that of all
                              heads' means. 0: the head does the same in every text; 1: it differs from text
                              to text by far more than heads differ. Of a head, the mean over `CHARACTER`
    with_length               how a number goes with the length of documents in tokens: Pearson's correlation
    labels                    the share of documents in which the head earns each label
    moved by                  documents whose number is farthest from the head's mean, in its spreads; places
                              in documents that look least like the rest of theirs (`document_rows.py`)

A head is stable where it is called the same in nine of ten documents, by a label or by none, and its
dependence is below 0.15; it depends on the text where that is 0.2 or more. Both thresholds are ours; of fewer
than ten documents nothing is said. A document without a number, as one of two tokens has no word said twice,
does not count in it; `documents` says how many do. Of documents with the same text the first stands for all
where they are listed.

Letters: N documents, K heads, S statistics.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ..heads.labels import LABELS, MIXED
from ..heads.layer_names import Layer
from .document_rows import PLACE, statistics
from .documents import FILE, FOLDER, FOR_GOOD, RETRY
from .exact_sums import Moments, quantiles
from .shards import DOCUMENTS, MEASURES, Shards

__all__ = ["CHARACTER", "SHARES", "HeadSummary", "Loss", "Mover", "Numbers", "Totals", "summed"]

CHARACTER = (  # shares, so that heads and texts of any length can be compared
    "confidence", "first", "previous", "itself", "next", "induction", "duplicate_token", "punctuation",
    "spread",
)  # fmt: skip
SHARES = {"least": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "most": 1.0}
STABLE, OF_TEXT, FAITHFUL = 0.15, 0.2, 0.9
FEWEST = 10  # documents, or nothing is said of what heads depend on
STILL = 1e-3  # a spread below is rounding, and no document moves it
READABLE = (24, 96)  # tokens of a document that is shown as typical, if there is such a one
LISTED = 5  # documents, and places, of each head
BATCH = 4096  # documents in memory, of COLUMNS numbers each
COLUMNS = 2048

FAILURES = {FOR_GOOD: "documents", RETRY: "documents to try again", FILE: "files", FOLDER: "folders"}

Key = tuple[Layer, int]


class Numbers(NamedTuple):
    """One number of one head over documents."""

    documents: int  # that have it
    mean: float
    spread: float  # standard deviation over documents
    quantiles: dict[str, float]
    dependence: float  # NaN: neither documents nor heads differ
    with_length: float


class Mover(NamedTuple):
    """A document that moves a head, and where in it the head looks elsewhere.

    statistic: the number that is farthest from the head's mean, by so many spreads; None: it is listed for
        its place.
    """

    document: str
    statistic: str | None
    value: float | None
    spreads: float | None
    place: int | None
    token: str | None
    moved: float | None
    key: int | None
    key_token: str | None
    weight: float | None


@dataclass
class HeadSummary:
    """One head over a corpus."""

    layer: Layer
    head: int
    statistics: dict[str, Numbers] = field(repr=False)
    labels: dict[str, float]  # label -> share of documents, largest first
    documents: int = 0
    movers: list[Mover] = field(default_factory=list, repr=False)
    places: list[Mover] = field(default_factory=list, repr=False)
    roles: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The one it earns most often."""
        return next(iter(self.labels), MIXED)

    @property
    def share(self) -> float:
        """Of the documents, in which it does."""
        return self.labels.get(self.label, 0.0)

    @property
    def dependence(self) -> float:
        """How much it depends on the text, 0 to 1: the mean over `CHARACTER`."""
        known = [self.statistics[name].dependence for name in CHARACTER if name in self.statistics]
        there = [value for value in known if not math.isnan(value)]
        return sum(there) / len(there) if there else math.nan

    @property
    def verdict(self) -> str:
        """ "stable", "text" (it depends on it) or "between"; "few" where there are under ten documents."""
        if self.documents < FEWEST:
            return "few"
        if self.dependence >= OF_TEXT:
            return "text"
        return "stable" if self.dependence < STABLE and self.share >= FAITHFUL else "between"


@dataclass
class Loss:
    """What is not in the numbers of a survey, of one kind."""

    kind: str  # "documents", "documents to try again", "files", "folders", "files of other kinds"
    count: int = 0
    first: list[tuple[str, str]] = field(default_factory=list)  # name and reason


@dataclass
class Totals:
    """What a survey comes to."""

    heads: list[HeadSummary]
    documents: int  # that were read
    failed: int
    tokens: int
    cut: int  # documents of which not all was read
    errors: list[tuple[str, str]]  # document and error, of the first few
    lost: list[Loss] = field(default_factory=list)  # what failed, kind by kind
    typical: int | None = None  # the position of the document that is nearest to all heads' means


# Walks


class _Batch(NamedTuple):
    names: list[str]  # of documents
    digests: list[str]
    positions: list[int]
    tokens: Any  # int64 [N]
    values: Any  # float32 [N, K, S], NaN where there is none
    places: list[list[tuple[Any, ...] | None]] | None  # [N][K]
    labels: list[list[str | None]] | None


class Walks:
    """Over all documents that were read, in the order of blocks."""

    def __init__(self, shards: Shards, heads: Sequence[Key]) -> None:
        self.shards, self.numbers = shards, list(shards)
        self.heads = {key: at for at, key in enumerate(heads)}

    def batches(
        self, names: Sequence[str], *, places: bool = False, labels: bool = False
    ) -> Iterator[_Batch]:
        """Some documents at a time, with these statistics."""
        import numpy

        held: list[_Batch] = []
        size = 0
        for number in self.numbers:
            batch = self._block(number, names, places, labels)
            if batch is None:
                continue
            held.append(batch)
            size += len(batch.names)
            if size >= BATCH:
                yield _joined(held, numpy)
                held, size = [], 0
        if held:
            yield _joined(held, numpy)

    def _block(self, number: int, names: Sequence[str], places: bool, labels: bool) -> _Batch | None:
        import numpy

        there = self.shards.read(
            DOCUMENTS, number, ["document", "digest", "position", "tokens", "error"]
        ).to_pylist()
        read = [row for row in there if row["error"] is None]
        if not read:
            return None
        extra = [*(PLACE if places else ()), *(["label"] if labels else ())]
        table = self.shards.read(MEASURES, number, ["position", "layer", "head", *names, *extra])
        known = {row["position"]: at for at, row in enumerate(read)}
        documents = [known[position] for position in table.column("position").to_pylist()]
        keys = zip(table.column("layer").to_pylist(), table.column("head").to_pylist(), strict=True)
        heads = [self.heads[key] for key in keys]
        N, K = len(read), len(self.heads)
        values = numpy.full((N, K, len(names)), numpy.nan, "float32")
        for at, name in enumerate(names):
            column = table.column(name).to_numpy(zero_copy_only=False).astype("float32")
            values[documents, heads, at] = column
        return _Batch(
            [row["document"] for row in read],
            [row["digest"] for row in read],
            [row["position"] for row in read],
            numpy.array([row["tokens"] for row in read], "int64"),
            values,
            _placed(table, documents, heads, N, K, PLACE) if places else None,
            _placed(table, documents, heads, N, K, ("label",)) if labels else None,
        )


def _placed(
    table: Any, documents: list[int], heads: list[int], N: int, K: int, names: Sequence[str]
) -> list[list[Any]]:
    columns = [table.column(name).to_pylist() for name in names]
    rows: list[list[Any]] = [[None] * K for _ in range(N)]
    for document, head, row in zip(documents, heads, zip(*columns, strict=True), strict=True):
        rows[document][head] = row if len(names) > 1 else row[0]
    return rows


def _joined(held: list[_Batch], numpy: Any) -> _Batch:
    if len(held) == 1:
        return held[0]
    return _Batch(
        [name for each in held for name in each.names],
        [digest for each in held for digest in each.digests],
        [position for each in held for position in each.positions],
        numpy.concatenate([each.tokens for each in held]),
        numpy.concatenate([each.values for each in held]),
        None if held[0].places is None else [row for each in held for row in each.places or ()],
        None if held[0].labels is None else [row for each in held for row in each.labels or ()],
    )


# All of it


def summed(shards: Shards) -> Totals:
    """What all finished blocks come to.

    Raises:
        ArgumentError: no document was read; a file that cannot be read.
    """
    heads, told = _first_look(shards)
    if not heads:
        why = f"; the first says: {told.errors[0][1]}" if told.errors else "; run the survey first"
        raise ArgumentError(f"survey must have read a document: 0 of {told.failed}{why}")
    walks = Walks(shards, heads)
    names = statistics()
    numbers = _numbers(walks, names)
    labels = _labels(walks)
    order = {entry.name: at for at, entry in enumerate(LABELS)}
    for at, (layer, head) in enumerate(heads):
        counted = sorted(labels[at].items(), key=lambda item: (-item[1], order.get(item[0], len(order))))
        total = sum(labels[at].values())
        shares = {label: count / total for label, count in counted}
        told.heads.append(HeadSummary(layer, head, numbers[at], shares, total))
    told.typical = _add_movers(walks, names, told.heads)
    return told


def _first_look(shards: Shards) -> tuple[list[Key], Totals]:
    """Which heads there are, in order, and how many documents."""
    heads: dict[Key, None] = {}
    told = Totals([], 0, 0, 0, 0, [])
    lost = {failure: Loss(kind) for failure, kind in FAILURES.items()}
    for number in shards:
        columns = ["document", "tokens", "found", "error", "failure"]
        for row in shards.read(DOCUMENTS, number, columns).to_pylist():
            if row["error"] is not None:
                told.failed += 1
                loss = lost[row.get("failure", FOR_GOOD)]
                loss.count += 1
                for listed in (told.errors, loss.first):
                    if len(listed) < LISTED:
                        listed.append((row["document"], row["error"]))
                continue
            told.documents += 1
            told.tokens += row["tokens"]
            told.cut += row["found"] > row["tokens"]
        table = shards.read(MEASURES, number, ["layer", "head"])
        both = zip(table.column("layer").to_pylist(), table.column("head").to_pylist(), strict=True)
        heads |= dict.fromkeys(both)
    told.lost = [loss for loss in lost.values() if loss.count]
    if any(isinstance(layer, str) for layer, _ in heads):
        return list(heads), told
    return sorted(heads), told


def _numbers(walks: Walks, names: Sequence[str]) -> list[dict[str, Numbers]]:
    K = len(walks.heads)
    told: list[dict[str, Numbers]] = [{} for _ in range(K)]
    at_once = max(1, COLUMNS // K)
    for start in range(0, len(names), at_once):
        some = names[start : start + at_once]
        moments = Moments(K * len(some))

        def walk(some: Sequence[str] = some) -> Iterator[Any]:
            for batch in walks.batches(some):
                yield batch.values.reshape(len(batch.names), -1)

        for batch in walks.batches(some):
            moments.add(batch.values.reshape(len(batch.names), -1), batch.tokens)
        count, mean, variance, length = (
            moments.count, moments.mean, moments.variance, moments.correlation,
        )  # fmt: skip
        found = quantiles(walk, K * len(some), list(SHARES.values()))
        for at, name in enumerate(some):
            column = [head * len(some) + at for head in range(K)]
            between = _variance([mean[c] for c in column])
            for head, c in enumerate(column):
                if count[c]:
                    told[head][name] = Numbers(
                        count[c], mean[c], math.sqrt(variance[c]), dict(zip(SHARES, found[c], strict=True)),
                        _dependence(variance[c], between), length[c],
                    )  # fmt: skip
    return told


def _variance(values: Sequence[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    mean = math.fsum(there) / len(there) if there else math.nan
    return math.fsum((value - mean) ** 2 for value in there) / len(there) if there else math.nan


def _dependence(within: float, between: float) -> float:
    """NaN where all is rounding."""
    return within / (within + between) if within + between > STILL**2 else math.nan


def _labels(walks: Walks) -> list[Counter[str]]:
    counted: list[Counter[str]] = [Counter() for _ in walks.heads]
    for batch in walks.batches((), labels=True):
        for row in batch.labels or ():
            for head, label in enumerate(row):
                if label is not None:
                    counted[head][label] += 1
    return counted


def _add_movers(walks: Walks, names: Sequence[str], heads: list[HeadSummary]) -> int | None:
    """The documents and places that are farthest from what a head usually does; and where the document is
    that is nearest, of those that fill a page and no more."""
    import numpy

    asked = [name for name in CHARACTER if name in names]
    shape = (len(heads), len(asked))
    mean, spread = numpy.full(shape, numpy.nan), numpy.full(shape, numpy.nan)
    for at, head in enumerate(heads):
        for s, name in enumerate(asked):
            said = head.statistics.get(name)
            if said is not None and said.spread > STILL:
                mean[at, s], spread[at, s] = said.mean, said.spread
    far: list[_Best] = [_Best() for _ in heads]
    odd: list[_Best] = [_Best() for _ in heads]
    nearest: tuple[int, float, int] | None = None
    for batch in walks.batches(asked, places=True):
        assert batch.places is not None
        away = numpy.abs((batch.values.astype("float64") - mean) / spread)  # [N, K, S]
        known = ~numpy.isnan(away)
        usual = numpy.where(known, away, 0.0).sum((1, 2)) / numpy.maximum(known.sum((1, 2)), 1)
        for n in range(len(batch.names)):
            unlike = 0 if READABLE[0] <= batch.tokens[n] <= READABLE[1] else 1
            mine = (unlike, float(usual[n]), batch.positions[n])
            nearest = mine if nearest is None or mine < nearest else nearest
        away = numpy.where(known, away, -1.0)
        which, most = away.argmax(-1), away.max(-1)  # [N, K]
        for at in range(len(heads)):
            for n in numpy.flatnonzero(most[:, at] > max(0.0, far[at].least)).tolist():
                s = int(which[n, at])
                value = float(batch.values[n, at, s])
                signed = math.copysign(float(most[n, at]), value - float(mean[at, s]))
                place = batch.places[n][at] or (None,) * len(PLACE)
                mover = Mover(batch.names[n], asked[s], value, signed, *place)
                far[at].add(float(most[n, at]), batch.positions[n], batch.digests[n], mover)
            for n, row in enumerate(batch.places):
                there = row[at]
                if there is not None and there[2] is not None and there[2] > odd[at].least:
                    mover = Mover(batch.names[n], None, None, None, *there)
                    odd[at].add(there[2], batch.positions[n], batch.digests[n], mover)
    for at, head in enumerate(heads):
        head.movers, head.places = far[at].sorted(), odd[at].sorted()
    return None if nearest is None else nearest[2]


class _Best:
    """The largest few, each text once; of equals the first in the corpus."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, int, Mover]] = {}  # by digest

    @property
    def least(self) -> float:
        """What has to be reached to be among them: equals may come first."""
        full = len(self._held) >= LISTED
        return math.nextafter(min(each[0] for each in self._held.values()), -1) if full else 0.0

    def add(self, size: float, position: int, digest: str, mover: Mover) -> None:
        rank = (size, -position)
        known = self._held.get(digest)
        if known is not None and known[:2] >= rank:
            return
        self._held[digest] = (*rank, mover)
        if len(self._held) > LISTED:
            worst = min(self._held, key=lambda each: self._held[each][:2])
            del self._held[worst]

    def sorted(self) -> list[Mover]:
        return [
            mover for _, _, mover in heapq.nlargest(LISTED, self._held.values(), key=lambda each: each[:2])
        ]
