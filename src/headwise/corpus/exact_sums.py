"""Sums and quantiles of many float32 numbers, exact, so that they do not depend on the order of documents.

A float32 is m 2^e with a whole m of 24 bits. Whole numbers are added without rounding: per column and
exponent, m and m^2 are summed as integers. Mean and variance are then one division of exact numbers each:
nothing cancels, and processes that finished in another order say the same to the last bit.

Quantiles are numbers that were measured: the smallest one that at least a share q of all are not above
(numpy's "inverted_cdf"). They are found by their bits, eleven at a time from the highest: three walks over
the numbers, each of which counts how many fall into each of 2,048 parts. What is held does not grow with how
many numbers there are.

Letters: C columns, N numbers a column, Q quantiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from ..errors import needed

__all__ = ["Moments", "quantiles"]

BITS = 24  # of m
LOWEST = -149  # exponent of the smallest float32, as a power of two
EXPONENTS = 256 + BITS + 24
LARGEST = 2**24  # of the whole numbers beside them
ROOM = 2**14  # numbers a column whose squares fit into 63 bits
LEVELS = ((21, 11), (10, 11), (0, 10))  # from which bit on, and how many


def _numpy() -> Any:
    with needed("numpy", "a survey needs numpy"):
        import numpy
    return numpy


class Moments:
    """Of each of C columns how many numbers there are, their mean and variance, and how they go with another.

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
        numpy = _numpy()
        self.columns, self._free = columns, ROOM
        shape = columns * EXPONENTS
        self._now = [numpy.zeros(shape, "int64") for _ in range(3)]  # sums of m, m^2, m t
        self._past = [[0] * shape for _ in range(3)]
        self.count = [0] * columns
        self._tokens = [[0, 0] for _ in range(columns)]  # sums of t and t^2

    def add(self, values: Any, tokens: Any) -> None:
        """Numbers, float32 [N, C], NaN where there is none; and a whole number for each row, int [N]."""
        numpy = _numpy()
        for start in range(0, len(values), ROOM):
            self._add(
                numpy.asarray(values[start : start + ROOM], "float32"),
                numpy.asarray(tokens[start : start + ROOM], "int64"),
            )

    def _add(self, values: Any, tokens: Any) -> None:
        numpy = _numpy()
        if len(values) > self._free:
            self._settle()
        self._free -= len(values)
        there = numpy.isfinite(values)
        row, column = numpy.nonzero(there)
        part, exponent = numpy.frexp(values[there])
        whole = numpy.ldexp(part.astype("float64"), BITS).astype("int64")
        key = column * EXPONENTS + (exponent.astype("int64") - BITS - LOWEST + BITS)
        sums = whole, whole * whole, whole * numpy.minimum(tokens[row], LARGEST)
        for held, some in zip(self._now, sums, strict=True):
            numpy.add.at(held, key, some)
        t = numpy.minimum(tokens, LARGEST)
        known = there.T.astype("int64")
        counted = zip(known.sum(1).tolist(), (known @ t).tolist(), (known @ (t * t)).tolist(), strict=True)
        for at, (count, one, two) in enumerate(counted):
            self.count[at] += count
            self._tokens[at][0] += one
            self._tokens[at][1] += two

    def _settle(self) -> None:
        """What was summed in 63 bits joins sums that have no end."""
        for held, past in zip(self._now, self._past, strict=True):
            for at in held.nonzero()[0].tolist():
                past[at] += int(held[at])
            held[:] = 0
        self._free = ROOM

    def _exact(self, which: int, column: int, power: int) -> Fraction:
        """A sum; power: how many times a number's exponent counts."""
        if self._free < ROOM:
            self._settle()
        total = 0
        for exponent in range(EXPONENTS):
            held = self._past[which][column * EXPONENTS + exponent]
            if held:
                total += held << (power * exponent)
        return Fraction(total, 1 << (power * (BITS - LOWEST)))

    @property
    def mean(self) -> list[float]:
        """NaN where there is no number."""
        return [float(self._exact(0, at, 1) / n) if n else math.nan for at, n in enumerate(self.count)]

    @property
    def variance(self) -> list[float]:
        """Over all that there are, divided by their number; NaN where there is none."""
        return [float(self._spread(at)) if n else math.nan for at, n in enumerate(self.count)]

    def _spread(self, at: int) -> Fraction:
        n = self.count[at]
        return self._exact(1, at, 2) / n - (self._exact(0, at, 1) / n) ** 2

    @property
    def correlation(self) -> list[float]:
        """Pearson's, with the whole numbers; NaN where either is always the same."""
        said = []
        for at, n in enumerate(self.count):
            if not n:
                said.append(math.nan)
                continue
            first, second = (Fraction(x, n) for x in self._tokens[at])
            mine, theirs = self._spread(at), second - first**2
            together = self._exact(2, at, 1) / n - first * self._exact(0, at, 1) / n
            product = mine * theirs
            said.append(
                math.copysign(math.sqrt(float(together**2 / product)), together) if product else math.nan
            )
        return said


Walk = Callable[[], Iterator[Any]]


def quantiles(walk: Walk, columns: int, shares: Sequence[float]) -> list[list[float]]:
    """The quantiles of each of C columns, [C][Q]; NaN where there is no number.

    Args:
        walk: gives all numbers anew each time, some rows at a time: float32 [N, C], NaN where there is none.
        shares: Q of them, from 0 to 1; 0 is the smallest number.

    Example:
        >>> import numpy
        >>> quantiles(lambda: iter([numpy.array([[3.0], [1.0], [2.0]], "float32")]), 1, [0, 0.5, 1])
        [[1.0, 2.0, 3.0]]
    """
    numpy = _numpy()
    Q = len(shares)
    prefix = numpy.zeros((columns, Q), "int64")  # the bits that are known
    rank: Any = None  # among the numbers that begin so
    count = numpy.zeros(columns, "int64")
    for shift, width in LEVELS:
        found = numpy.zeros((columns, Q, 1 << width), "int64")
        for values in walk():
            bits = _ordered(numpy.asarray(values, "float32"))  # [N, C], -1 where there is no number
            high, part = bits >> (shift + width), (bits >> shift) & ((1 << width) - 1)
            for at in range(columns):
                there = bits[:, at] >= 0
                if rank is None:
                    found[at] += numpy.bincount(part[there, at], minlength=1 << width)
                    continue
                for q in range(Q):
                    mine = there & (high[:, at] == prefix[at, q])
                    found[at, q] += numpy.bincount(part[mine, at], minlength=1 << width)
        if rank is None:
            count = found[:, 0].sum(-1)
            exact = [Fraction(str(share)) for share in shares]
            rank = numpy.array([[max(1, math.ceil(share * int(n))) for share in exact] for n in count])
        below = found.cumsum(-1)
        chosen = (below < rank[:, :, None]).sum(-1)  # [C, Q]
        chosen = numpy.minimum(chosen, (1 << width) - 1)
        before = numpy.take_along_axis(below - found, chosen[:, :, None], -1)[:, :, 0]
        prefix, rank = (prefix << width) | chosen, rank - before
    values = _back(prefix)
    values[count == 0] = math.nan
    return [[float(x) for x in row] for row in values]


def _ordered(values: Any) -> Any:
    """float32 as whole numbers in the same order, 0 to 2^32 - 1; -1 where there is no number."""
    numpy = _numpy()
    bits = numpy.ascontiguousarray(values + numpy.float32(0)).view("uint32").astype("int64")  # -0 is 0
    ordered = numpy.where(bits >> 31, 0xFFFFFFFF - bits, bits | 0x80000000)
    return numpy.where(numpy.isfinite(values), ordered, -1)


def _back(ordered: Any) -> Any:
    numpy = _numpy()
    bits = numpy.where(ordered >> 31, ordered & 0x7FFFFFFF, 0xFFFFFFFF - ordered)
    return bits.astype("uint32").view("float32").astype("float64")
