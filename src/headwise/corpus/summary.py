"""Summary of a survey, head by head, in passes over the shards that read some documents at a time.

    mean, spread, quantiles   of each number over documents, each counting once; exact, see `Moments`
    dependence                W / (W + B): W is the variance of a head's number over documents, B that of all
                              heads' means. 0: the head does the same in every text; 1: it differs from text
                              to text by far more than heads differ. Of a head, the mean over `CHARACTER`
    with_length               how a number goes with the length of documents in tokens: Pearson's correlation
    labels                    the share of documents in which the head earns each label
    moved by                  documents whose number is farthest from the head's mean, in its spreads; places
                              in documents that look least like the rest of theirs (`document_rows.py`)

A head is stable if it has the same label, or none, in nine of ten documents and its dependence is below 0.15;
it depends on the text if that is 0.2 or more. Both thresholds are headwise's; for fewer than ten documents
there is no verdict. A document that lacks a number (one of two tokens has no repeated word) does not count in
its mean; `documents` is the number of those that count. Of equal texts only the first is listed.

Letters: N documents, K heads, S statistics.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from ..errors import ArgumentError, needed
from ..heads.layer import LABELS, MIXED
from ..heads.layer_names import Layer
from .document_rows import PLACE, STATISTICS
from .documents import FILE, FOLDER, FOR_GOOD, RETRY, arrow
from .shards import DOCUMENTS, MEASURES, Shards

CHARACTER = (  # shares, so that heads and texts of any length can be compared
    "confidence", "first", "previous", "itself", "next", "induction", "duplicate_token", "punctuation",
    "spread",
)  # fmt: skip
SHARES = {"least": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "most": 1.0}
STABLE, OF_TEXT, FAITHFUL = 0.15, 0.2, 0.9
FEWEST = 10  # documents needed for a verdict
LEAST_SPREAD = 1e-3  # a smaller spread is rounding, and has no movers
READABLE = (24, 96)  # least and most tokens of a typical document, if there is one
LISTED = 5  # documents, and places, of each head
BATCH = 4096  # documents in memory, of COLUMNS numbers each
COLUMNS = 2048

BITS = 24  # of the integer m in a float32, which is m 2^e
UNIT = 172  # every float32 is a whole number of 2^-172, and of BITS more than the smallest one needs
LARGEST = 2**24  # larger numbers of tokens count as this
ROOM = 2**14  # numbers a column whose squares, added, fit into 63 bits
LEVELS = ((21, 11), (10, 11), (0, 10))  # bits of a float32: the first, and how many

FAILURES = {FOR_GOOD: "documents", RETRY: "documents to try again", FILE: "files", FOLDER: "folders"}

Key = tuple[Layer, int]


class Numbers(NamedTuple):
    """One statistic of one head over all documents."""

    documents: int  # that have it
    mean: float
    spread: float  # standard deviation over documents
    quantiles: dict[str, float]
    dependence: float  # NaN: neither documents nor heads differ
    with_length: float


class Mover(NamedTuple):
    """A document in which a head does something unusual, and the place where it does.

    statistic: the number that is farthest from the head's mean, in spreads; None: the weights of the head
        are on other keys than in its mean.
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
        """The label that the head earns most often."""
        return next(iter(self.labels), MIXED)

    @property
    def share(self) -> float:
        """The share of documents in which the head earns that label."""
        return self.labels.get(self.label, 0.0)

    @property
    def dependence(self) -> float:
        """How much the head depends on the text, 0 to 1: the mean over `CHARACTER`."""
        values = [self.statistics[name].dependence for name in CHARACTER if name in self.statistics]
        finite = [value for value in values if not math.isnan(value)]
        return sum(finite) / len(finite) if finite else math.nan

    @property
    def verdict(self) -> str:
        """ "stable", "text" (depends on the text) or "between"; "few" with fewer than ten documents."""
        if self.documents < FEWEST:
            return "few"
        if self.dependence >= OF_TEXT:
            return "text"
        return "stable" if self.dependence < STABLE and self.share >= FAITHFUL else "between"


@dataclass
class Loss:
    """One kind of documents or files that are not in the numbers of a survey."""

    kind: str  # "documents", "documents to try again", "files", "folders", "files of other kinds"
    count: int = 0
    first: list[tuple[str, str]] = field(default_factory=list)  # name and reason


@dataclass
class Totals:
    """The summary of a survey."""

    heads: list[HeadSummary]
    documents: int  # that were read
    failed: int
    tokens: int
    cut: int  # documents of which not all was read
    errors: list[tuple[str, str]]  # document and error, of the first few
    lost: list[Loss] = field(default_factory=list)  # what failed, kind by kind
    typical: int | None = None  # the position of the document that is nearest to all heads' means


# Passes over the shards


class _Batch(NamedTuple):
    """Some documents, with their numbers as arrays."""

    documents: list[dict[str, Any]]  # N rows
    tokens: Any  # int64 [N]
    values: Any  # float32 [N, K, S], NaN where there is none
    table: Any  # of measures: a row per document and head
    row_documents: list[int]  # which of the N each row is of
    row_heads: list[int]  # which of the K


class _Walks:
    """Reads all documents that were measured, in the order of blocks, in batches."""

    def __init__(self, shards: Shards, heads: Sequence[Key]) -> None:
        self.shards, self.heads = shards, {key: at for at, key in enumerate(heads)}

    def batches(self, names: Sequence[str], extra: Sequence[str] = ()) -> Iterator[_Batch]:
        """Yield batches with these statistics as an array; extra columns only in the table."""
        of_documents = ["document", "digest", "position", "tokens", "error"]
        of_measures = ["position", "layer", "head", *names, *extra]
        documents: list[dict[str, Any]] = []
        tables: list[Any] = []
        for number in self.shards:
            rows = self.shards.read(DOCUMENTS, number, of_documents).to_pylist()
            documents += [row for row in rows if row["error"] is None]
            tables.append(self.shards.read(MEASURES, number, of_measures))
            if len(documents) >= BATCH:
                yield self._make_batch(documents, arrow().concat_tables(tables), names)
                documents, tables = [], []
        if documents:
            yield self._make_batch(documents, arrow().concat_tables(tables), names)

    def _make_batch(self, documents: list[dict[str, Any]], table: Any, names: Sequence[str]) -> _Batch:
        """Return a batch of these documents and the rows of their heads."""
        numpy = _numpy()
        index_of = {row["position"]: at for at, row in enumerate(documents)}
        row_documents = [index_of[position] for position in table.column("position").to_pylist()]
        row_heads = [self.heads[key] for key in _keys(table)]
        values = numpy.full((len(documents), len(self.heads), len(names)), numpy.nan, "float32")
        for at, name in enumerate(names):
            values[row_documents, row_heads, at] = table.column(name).to_numpy().astype("float32")
        tokens = numpy.array([row["tokens"] for row in documents], "int64")
        return _Batch(documents, tokens, values, table, row_documents, row_heads)


def _keys(table: Any) -> Iterator[Key]:
    """Yield the layer and head of every row."""
    return zip(table.column("layer").to_pylist(), table.column("head").to_pylist(), strict=True)


def _numpy() -> Any:
    """Import numpy and return it."""
    with needed("numpy", "a survey needs numpy"):
        import numpy
    return numpy


# Exact sums and quantiles


class Moments:
    """Of each of C columns of float32 numbers their count, mean and variance, and correlation with another.

    A float32 is a whole number of 2^-172. Whole numbers are added without rounding, and mean and variance are
    one division of exact numbers each: nothing cancels, and the order of documents cannot be seen.

    Args:
        columns: C.

    Example:
        >>> import numpy
        >>> moments = Moments(1)
        >>> moments.add(numpy.array([[1.0], [2.0], [numpy.nan]], "float32"), numpy.array([5, 7, 9]))
        >>> moments.count, moments.mean, moments.variance, moments.correlation
        ([2], [1.5], [0.25], [1.0])
    """

    def __init__(self, columns: int) -> None:
        # Python integers, which do not overflow: count; sums of x, x^2, x t, t and t^2
        self._sums = _numpy().zeros((6, columns), object)

    def add(self, values: Any, tokens: Any) -> None:
        """Add numbers, float32 [N, C], NaN if missing, and a whole number t for each row, int [N]."""
        for start in range(0, len(values), ROOM):
            self._add(values[start : start + ROOM], tokens[start : start + ROOM, None])

    def _add(self, values: Any, tokens: Any) -> None:
        """Add a block of rows, whose sums of squares fit into 64 bits."""
        numpy = _numpy()
        is_finite = numpy.isfinite(values)
        part, exponent = numpy.frexp(numpy.where(is_finite, values, numpy.float32(0)))
        integers = numpy.ldexp(part.astype("float64"), BITS).astype("int64")
        t = numpy.minimum(tokens, LARGEST) * is_finite
        for row, terms in ((0, is_finite), (4, t), (5, t * t)):
            self._sums[row] += terms.sum(0).astype(object)
        lowest, C = int(exponent.min()), values.shape[1]
        key = ((exponent - lowest).astype("int64") * C + numpy.arange(C)).ravel()
        for row, terms, degree in ((1, integers, 1), (2, integers * integers, 2), (3, integers * t, 1)):
            by_exponent = numpy.zeros((int(exponent.max()) - lowest + 1) * C, "int64")
            numpy.add.at(by_exponent, key, terms.ravel())
            for power, sums in enumerate(by_exponent.reshape(-1, C), lowest + UNIT - BITS):
                self._sums[row] += sums.astype(object) << (degree * power)

    @property
    def count(self) -> list[int]:
        """The number of values in each column."""
        return [int(n) for n in self._sums[0]]

    @property
    def mean(self) -> list[float]:
        """The mean of each column; NaN if it has no values."""
        return [math.nan if column is None else float(column[0]) for column in self._means()]

    @property
    def variance(self) -> list[float]:
        """The population variance of each column; NaN if it has no values."""
        return [math.nan if column is None else float(column[1] - column[0] ** 2) for column in self._means()]

    @property
    def correlation(self) -> list[float]:
        """Pearson's correlation with t; NaN if either is constant."""
        correlations = []
        for column in self._means():
            x, x2, xt, t, t2 = column or (Fraction(0),) * 5
            product, covariance = (x2 - x**2) * (t2 - t**2), xt - x * t
            size = math.sqrt(float(covariance**2 / product)) if product else math.nan
            correlations.append(math.copysign(size, covariance))
        return correlations

    def _means(self) -> Iterator[tuple[Fraction, ...] | None]:
        """Yield the means of x, x^2, x t, t and t^2 of each column; None if it has no values."""
        for n, x, x2, xt, t, t2 in self._sums.T.tolist():
            sums = ((x, UNIT), (x2, 2 * UNIT), (xt, UNIT), (t, 0), (t2, 0))
            yield tuple(Fraction(sum_, n << unit) for sum_, unit in sums) if n else None


def quantiles(walk: Callable[[], Iterator[Any]], columns: int, shares: Sequence[float]) -> list[list[float]]:
    """Return the quantiles of each of C columns, [C][Q]; NaN where there is no number.

    A quantile is the smallest measured number such that at least that share of all numbers is not above it
    (numpy's "inverted_cdf"). Its bits are found eleven at a time from the highest, in three walks over the
    numbers; memory does not grow with the number of numbers.

    Args:
        walk: yields all numbers, some rows at a time, in each call: float32 [N, C], NaN if missing.
        shares: Q of them, from 0 to 1; 0 is the smallest number.

    Example:
        >>> import numpy
        >>> quantiles(lambda: iter([numpy.array([[3.0], [1.0], [2.0]], "float32")]), 1, [0, 0.5, 1])
        [[1.0, 2.0, 3.0]]
    """
    numpy = _numpy()
    prefix = numpy.zeros((columns, len(shares)), "int64")  # the bits found so far
    rank: Any = None  # among the numbers with that prefix
    for shift, width in LEVELS:
        histogram = numpy.zeros((columns, len(shares), 1 << width), "int64")
        for values in walk():
            bits = _ordered(values.T)  # [C, N], -1 where there is no number
            high, part = bits >> (shift + width), (bits >> shift) & ((1 << width) - 1)
            for at in range(columns):
                for q in range(len(shares)):
                    matching = part[at, high[at] == prefix[at, q]]
                    histogram[at, q] += numpy.bincount(matching, minlength=1 << width)
        below = histogram.cumsum(-1)
        if rank is None:
            count = below[:, 0, -1]
            exact = [Fraction(str(share)) for share in shares]
            rank = numpy.array([[max(1, math.ceil(share * int(n))) for share in exact] for n in count])
        chosen = numpy.minimum((below < rank[:, :, None]).sum(-1), (1 << width) - 1)  # [C, Q]
        before = numpy.take_along_axis(below - histogram, chosen[:, :, None], -1)[:, :, 0]
        prefix, rank = (prefix << width) | chosen, rank - before
    bits = numpy.where(prefix >> 31, prefix & 0x7FFFFFFF, 0xFFFFFFFF - prefix)
    values = bits.astype("uint32").view("float32").astype("float64")
    values[count == 0] = math.nan
    return [[float(x) for x in row] for row in values]


def _ordered(values: Any) -> Any:
    """Map float32 to whole numbers in the same order, 0 to 2^32 - 1; NaN and infinities to -1."""
    numpy = _numpy()
    bits = numpy.ascontiguousarray(values + numpy.float32(0)).view("uint32").astype("int64")  # -0 is 0
    ordered = numpy.where(bits >> 31, 0xFFFFFFFF - bits, bits | 0x80000000)
    return numpy.where(numpy.isfinite(values), ordered, -1)


# Summary


def summed(shards: Shards) -> Totals:
    """Summarise all finished blocks."""
    heads, totals = _count_documents(shards)
    if not heads:
        cause = f"; the first error is: {totals.errors[0][1]}" if totals.errors else "; run the survey first"
        raise ArgumentError(f"survey must have read a document: it read 0 of {totals.failed}{cause}")
    walks = _Walks(shards, heads)
    numbers = _numbers(walks, STATISTICS)
    labels = _labels(walks)
    order = {entry.name: at for at, entry in enumerate(LABELS)}
    for at, (layer, head) in enumerate(heads):
        counted = sorted(labels[at].items(), key=lambda item: (-item[1], order.get(item[0], len(order))))
        total = sum(labels[at].values())
        shares = {label: count / total for label, count in counted}
        totals.heads.append(HeadSummary(layer, head, numbers[at], shares, total))
    totals.typical = _add_movers(walks, totals.heads)
    return totals


def _count_documents(shards: Shards) -> tuple[list[Key], Totals]:
    """Return the heads in order, and the counts of documents."""
    heads: dict[Key, None] = {}
    totals = Totals([], 0, 0, 0, 0, [])
    lost = {failure: Loss(kind) for failure, kind in FAILURES.items()}
    for number in shards:
        columns = ["document", "tokens", "found", "error", "failure"]
        for row in shards.read(DOCUMENTS, number, columns).to_pylist():
            if row["error"] is not None:
                totals.failed += 1
                loss = lost[row.get("failure", FOR_GOOD)]
                loss.count += 1
                for listed in (totals.errors, loss.first):
                    if len(listed) < LISTED:
                        listed.append((row["document"], row["error"]))
                continue
            totals.documents += 1
            totals.tokens += row["tokens"]
            totals.cut += row["found"] > row["tokens"]
        heads |= dict.fromkeys(_keys(shards.read(MEASURES, number, ["layer", "head"])))
    totals.lost = [loss for loss in lost.values() if loss.count]
    by_path = any(isinstance(layer, str) for layer, _ in heads)
    return list(heads) if by_path else sorted(heads), totals


def _numbers(walks: _Walks, names: Sequence[str]) -> list[dict[str, Numbers]]:
    """Return the numbers of every head, by statistic."""
    K = len(walks.heads)
    numbers: list[dict[str, Numbers]] = [{} for _ in range(K)]
    at_once = max(1, COLUMNS // K)
    for start in range(0, len(names), at_once):
        chosen = names[start : start + at_once]
        moments = Moments(K * len(chosen))

        def walk(chosen: Sequence[str] = chosen) -> Iterator[Any]:
            for batch in walks.batches(chosen):
                yield batch.values.reshape(len(batch.documents), -1)

        for batch in walks.batches(chosen):
            moments.add(batch.values.reshape(len(batch.documents), -1), batch.tokens)
        count, mean, variance, length = moments.count, moments.mean, moments.variance, moments.correlation
        quantile_values = quantiles(walk, K * len(chosen), list(SHARES.values()))
        for at, name in enumerate(chosen):
            column = [head * len(chosen) + at for head in range(K)]
            between = _variance([mean[c] for c in column])
            for head, c in enumerate(column):
                if count[c]:
                    numbers[head][name] = Numbers(
                        count[c], mean[c], math.sqrt(variance[c]),
                        dict(zip(SHARES, quantile_values[c], strict=True)),
                        _dependence(variance[c], between), length[c],
                    )  # fmt: skip
    return numbers


def _variance(values: Sequence[float]) -> float:
    """Return the population variance of the values that are not NaN."""
    finite = [value for value in values if not math.isnan(value)]
    if not finite:
        return math.nan
    mean = math.fsum(finite) / len(finite)
    return math.fsum((value - mean) ** 2 for value in finite) / len(finite)


def _dependence(within: float, between: float) -> float:
    """Return W / (W + B); NaN if both are rounding errors."""
    return within / (within + between) if within + between > LEAST_SPREAD**2 else math.nan


def _labels(walks: _Walks) -> list[Counter[str]]:
    """Return how often each head has each label."""
    counted: list[Counter[str]] = [Counter() for _ in walks.heads]
    for batch in walks.batches((), ["label"]):
        for head, label in zip(batch.row_heads, batch.table.column("label").to_pylist(), strict=True):
            counted[head][label] += 1
    return counted


def _add_movers(walks: _Walks, heads: list[HeadSummary]) -> int | None:
    """Add the documents and places that are farthest from each head's mean.

    Returns the position of the document nearest to all means, if possible of a length that fits a page.
    """
    numpy = _numpy()
    shape = (len(heads), len(CHARACTER))
    mean, spread = numpy.full(shape, numpy.nan), numpy.full(shape, numpy.nan)
    for at, head in enumerate(heads):
        for s, name in enumerate(CHARACTER):
            numbers = head.statistics.get(name)
            if numbers is not None and numbers.spread > LEAST_SPREAD:
                mean[at, s], spread[at, s] = numbers.mean, numbers.spread
    far: list[_Largest] = [_Largest() for _ in heads]
    odd: list[_Largest] = [_Largest() for _ in heads]
    nearest: list[tuple[bool, float, int]] = []  # of each batch
    for batch in walks.batches(CHARACTER, list(PLACE)):
        distance = numpy.abs((batch.values.astype("float64") - mean) / spread)  # [N, K, S]
        is_known = ~numpy.isnan(distance)
        mean_distance = numpy.where(is_known, distance, 0.0).sum((1, 2)) / numpy.maximum(
            is_known.sum((1, 2)), 1
        )
        is_long = (batch.tokens < READABLE[0]) | (batch.tokens > READABLE[1])
        positions = [row["position"] for row in batch.documents]
        nearest.append(min(zip(is_long.tolist(), mean_distance.tolist(), positions, strict=True)))
        distance = numpy.where(is_known, distance, -1.0)
        which, most = distance.argmax(-1), distance.max(-1)  # [N, K]
        places = zip(*(batch.table.column(name).to_pylist() for name in PLACE), strict=True)
        for n, at, place in zip(batch.row_documents, batch.row_heads, places, strict=True):
            document, size = batch.documents[n], float(most[n, at])
            if size > max(0.0, far[at].least):
                s = int(which[n, at])
                value = float(batch.values[n, at, s])
                signed = math.copysign(size, value - float(mean[at, s]))
                far[at].add(size, document, Mover(document["document"], CHARACTER[s], value, signed, *place))
            moved = place[list(PLACE).index("moved")]
            if moved is not None and moved > odd[at].least:
                odd[at].add(moved, document, Mover(document["document"], None, None, None, *place))
    for at, head in enumerate(heads):
        head.movers, head.places = far[at].sorted(), odd[at].sorted()
    return min(nearest)[2] if nearest else None


class _Largest:
    """Stores the few largest entries, each text once; of equal entries the first in the corpus."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[float, int, Mover]] = {}  # by digest

    @property
    def least(self) -> float:
        """The size that a new entry must exceed to be stored."""
        full = len(self._entries) >= LISTED
        return math.nextafter(min(entry[0] for entry in self._entries.values()), -1) if full else 0.0

    def add(self, size: float, document: dict[str, Any], mover: Mover) -> None:
        digest, entry = document["digest"], (size, -document["position"], mover)
        self._entries[digest] = max(entry, self._entries.get(digest, entry), key=_rank)
        if len(self._entries) > LISTED:
            del self._entries[min(self._entries, key=lambda key: _rank(self._entries[key]))]

    def sorted(self) -> list[Mover]:
        return [mover for _, _, mover in sorted(self._entries.values(), key=_rank, reverse=True)]


def _rank(entry: tuple[float, int, Mover]) -> tuple[float, int]:
    return entry[:2]
