"""The calls of one forward, measured together: layers of the same sizes and rules as the heads of one map.

At everyday sizes it is not the measuring that takes time but asking for it, layer after layer. So a short
call leaves a note, with q and k copied, since a model may write to them as soon as it goes on. When the
forward is over, or as soon as somebody looks, calls that are alike are laid side by side along the heads,
measured as one map, and cut apart again:

    layer 0  q [B, H, T, D] ──┐
    layer 1  q [B, H, T, D] ──┼──> [B, 3 H, T, D] ──> statistics, pictures, counts ──> [B, H] for each layer
    layer 2  q [B, H, T, D] ──┘

Rules of a mask are the same for all heads, so they stay as they are; what a head has of its own (sinks,
slopes, a learned bias by distance) is laid side by side as q is.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from ..engines.scores import Scores
from ..engines.statistics import ROW_STATISTICS
from ..errors import BudgetExceeded
from ..map import AttentionMap, make
from .layer_names import Layer
from .record import EVERYONE, Numbers, Record, fetched, numbers_of

__all__ = ["Waiting", "is_short"]

# Weights up to which a call is short. Beyond, the device is busy for longer than it takes to ask.
SHORT_ON_CPU, SHORT = 2**23, 2**29
ROOM_ON_CPU, ROOM = 2**26, 2**28  # bytes of q and k that wait; more, and those that wait are measured
PLAIN = (Tensor, nn.Parameter)
MOST_HEADS = 2**15  # of all sequences of one map


def is_short(shape: tuple[int, ...], on_cpu: bool) -> bool:
    """Whether a call [B, H, T, S] is better measured together with others."""
    B, H, T, S = shape
    return B * H * T * S <= (SHORT_ON_CPU if on_cpu else SHORT)


class Note(NamedTuple):
    """A call that is still to be measured, with tensors of its own."""

    kind: Hashable  # what calls of one map have in common, but for their masks
    record: Record
    scores: Scores  # q and k are copies
    lse: Tensor | None
    names: tuple[str, ...]
    pooled: int | None


class Measured(NamedTuple):
    """The numbers of calls that were measured together."""

    records: list[Record]
    numbers: Numbers
    rows: Tensor | None  # all row statistics, [statistics, B, calls * H]
    counts: Tensor | None  # all counts where they had to be counted, [ways, B, calls * H]


class Takes(Protocol):
    """Who takes calls in."""

    def add(self, path: str, record: Record, layer: Layer | None = None) -> None: ...


class _Ahead:
    """What waits of one forward."""

    __slots__ = ("notes", "size")

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.size = 0


class Waiting:
    """Calls that were heard and are not among the heads yet.

    Args:
        heads: what takes them in the end, in the order in which they were heard; not kept alive by this.
    """

    def __init__(self, heads: Takes) -> None:
        self._heads = ref(heads)
        self._heard: list[tuple[str, Record, Layer]] = []
        self._ahead: dict[object, _Ahead] = {}  # by forward
        self._measured: list[Measured] = []
        self._lock = threading.RLock()

    def put(self, path: str, record: Record, layer: Layer) -> None:
        """Take in a call that was measured."""
        with self._lock:
            self._heard.append((path, record, layer))

    def note(
        self,
        forward: object,
        path: str,
        layer: Layer,
        record: Record,
        weights: AttentionMap,
        names: tuple[str, ...],
        pooled: int | None,
        keep: bool,
    ) -> bool:
        """Leave a call for later, with copies of its q and k; False: it has to be measured now.

        Args:
            forward: what the call is part of; `measure` ends it.
            path, layer: where it is, and what it goes by.
            record: of the call, without numbers.
            keep: keep the map in the record.
        """
        scores, lse, columns = weights.as_made
        if not isinstance(scores, Scores) or columns is not None or scores.positions is not None:
            return False
        q, k, scoring = scores.q, scores.k, scores.scoring
        B, H, T, S = record.shape
        short, room = (SHORT_ON_CPU, ROOM_ON_CPU) if q.is_cpu else (SHORT, ROOM)
        if type(q) not in PLAIN or type(k) not in PLAIN or B * H * T * S > short:
            return False
        if scores.mask.allowed is not None or scoring.bias is not None:
            return False  # as large as the weights, not to be copied
        loose = not (q.requires_grad or k.requires_grad)
        kind: tuple[Hashable, ...] = (
            q.shape, k.shape, q.dtype, q.device, scoring.scale, scoring.softcap,
            lse is None, names, pooled, record.reach,
        )  # fmt: skip
        try:
            if scoring.sinks is not None or scoring.slopes is not None or scoring.relative is not None:
                own = {name: value.detach().clone() for name, value in scoring.tensors.items()}
                kind = (*kind, *((name, value.shape, value.dtype) for name, value in own.items()))
                scoring, loose = replace(scoring, **own), False  # type: ignore[arg-type]
            copied = Scores(q.detach().clone(), k.detach().clone(), scores.mask, scoring)
        except torch.OutOfMemoryError:
            return False
        if keep:
            record.map = weights if loose else weights.detach()
        with self._lock:
            ahead = self._ahead.get(forward)
            if ahead is None:
                ahead = self._ahead[forward] = _Ahead()
            ahead.notes.append(Note(kind, record, copied, lse, names, pooled))
            ahead.size += q.nbytes + k.nbytes
            self._heard.append((path, record, layer))
            if ahead.size > room:
                self.measure(forward)
        return True

    def measure(self, forward: object) -> None:
        """Measure what was noted of a forward; no device is waited for."""
        with self._lock:
            ahead = self._ahead.pop(forward, None)
            if ahead is not None:
                for alike in _alike(ahead.notes):
                    self._measured += _measured(alike)

    def settle(self) -> None:
        """Measure all that was noted, fill in the numbers, and hand over every call that was heard."""
        if not self._heard:
            return
        with self._lock:
            heard, self._heard = self._heard, []
            try:
                for forward in list(self._ahead):
                    self.measure(forward)
            finally:  # what could be measured counts, whatever became of the rest
                measured, self._measured = self._measured, []
                _fill(measured)
                heads = self._heads()
                for path, record, layer in heard:
                    if heads is not None and EVERYONE in record.counts:
                        heads.add(path, record, layer)


def _alike(notes: list[Note]) -> list[list[Note]]:
    """Those that one map can hold, in the order in which they came."""
    groups: dict[Hashable, list[list[Note]]] = {}
    for note in notes:
        beside = groups.setdefault(note.kind, [])
        B, H = note.record.shape[:2]
        for group in beside:
            a, b = group[0].scores, note.scores
            if B * H * (len(group) + 1) <= MOST_HEADS and (a.mask is b.mask or _same_rules(a, b)):
                group.append(note)
                break
        else:
            beside.append([note])
    return [group for beside in groups.values() for group in beside]


def _same_rules(a: Scores, b: Scores) -> bool:
    """Whether two masks are surely the same; on a GPU no values are read.

    Those of a call hold copies of their own, which nobody writes to.
    """
    return (a.q.is_cpu or (a.mask.is_positional and b.mask.is_positional)) and a.mask == b.mask


@torch.no_grad()
def _measured(notes: list[Note]) -> list[Measured]:
    first = notes[0]
    try:
        weights = make(first.scores, first.lse) if len(notes) == 1 else _side_by_side(notes)
        numbers = numbers_of(weights, first.names, first.pooled, first.record.reach, len(notes))
    except (BudgetExceeded, torch.OutOfMemoryError):
        if len(notes) == 1:
            raise
        return [measured for note in notes for measured in _measured([note])]
    rows = torch.stack(list(numbers.rows.values())) if numbers.rows else None
    counts = None if numbers.every else torch.stack(list(numbers.counts.values()))
    return [Measured([note.record for note in notes], numbers, rows, counts)]


def _side_by_side(notes: list[Note]) -> AttentionMap:
    """One map [B, calls * H, T, S]."""
    first = notes[0].scores
    all_scores = [note.scores for note in notes]
    q = torch.cat([scores.q for scores in all_scores], 1)
    k = torch.cat([scores.k for scores in all_scores], 1)
    scoring = first.scoring
    if scoring.has_tensors:
        names = list(scoring.tensors)
        own = {name: torch.cat([scores.scoring.tensors[name] for scores in all_scores]) for name in names}
        scoring = replace(scoring, **own)  # type: ignore[arg-type]
    lse = [note.lse for note in notes if note.lse is not None]
    return make(Scores(q, k, first.mask, scoring), torch.cat(lse, 1) if lse else None)


def _fill(measured: list[Measured]) -> None:
    """Cut numbers apart, each layer's into its record; a GPU is waited for once."""
    small = [x for group in measured for x in (group.rows, group.counts) if x is not None]
    here = iter(fetched(small))
    for group in measured:
        calls, numbers = len(group.records), group.numbers
        rows = None if group.rows is None else _apart(next(here), calls)
        counts = None if group.counts is None else _apart(next(here), calls)
        large = {name: value.chunk(calls, 1) for name, value in numbers.large.items()}
        for at, record in enumerate(group.records):
            if rows is not None:
                record.rows = dict(zip(numbers.rows, rows[at].unbind(), strict=True))
            by_offset = numbers.counts
            if counts is not None:
                by_offset = dict(zip(numbers.counts, counts[at].unbind(), strict=True))
            record.large = {name: parts[at] for name, parts in large.items()} | numbers.shared
            record.counts = {name: by_offset[ROW_STATISTICS[name].offset] for name in record.rows}
            record.counts.setdefault(EVERYONE, by_offset[None])


def _apart(together: Tensor, calls: int) -> tuple[Tensor, ...]:
    """[n, B, calls * H] as one [n, B, H] for each call."""
    return together.unflatten(2, (calls, -1)).permute(2, 0, 1, 3).contiguous().unbind()
