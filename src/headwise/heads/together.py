"""The calls of one forward, measured together: layers of the same sizes and rules as the heads of one map.

At everyday sizes it is not the measuring that takes time but asking for it, layer after layer. So a short
call leaves a note, with q and k copied, since a model may write to them as soon as it goes on. Copies of
calls that are alike lie side by side along the heads from the start; when the forward is over, or as soon as
somebody looks, they are measured as one map, and the numbers are cut apart:

    layer 0  q [B, H, T, D] ──┐
    layer 1  q [B, H, T, D] ──┼──> [B, 3 H, T, D] ──> statistics, pictures, counts ──> [B, H] for each layer
    layer 2  q [B, H, T, D] ──┘

Rules of a mask are the same for all heads, so they stay as they are; what a head has of its own (sinks,
slopes, a learned bias by distance) is laid side by side as q is.

`whole_maps` does the same for patterns, from maps that were kept. They are ten light passes a layer, each of
which costs more to begin than to do; where all weights of alike calls fit, these are made once, and every
pattern is a sum of some of them.

Letters: B batch, T query_len, S key_len, H num_heads, D head_dim.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from .. import budget
from ..engines.scores import Scores
from ..engines.statistics import ROW_STATISTICS
from ..errors import BudgetExceeded
from ..map import AttentionMap, later, make
from ..masks import Mask
from ..scoring import Scoring
from .layer_names import Layer
from .record import EVERYONE, Numbers, Record, fetched, measure_patterns, numbers_of

if TYPE_CHECKING:
    from .collection import Heads

# Weights up to which a call is short. Beyond, the device is busy for longer than it takes to ask.
SHORT_ON_CPU, SHORT = 2**23, 2**29
ROOM_ON_CPU, SHARE = 2**26, 2**-7  # bytes of q and k that wait; on a GPU, of all it has
PLAIN = (Tensor, nn.Parameter)
MOST_HEADS = 2**15  # of all sequences of one map
MOST_WEIGHTS = 2**24  # of whole maps: 64 MiB in float32


def is_short(shape: tuple[int, ...], on_cpu: bool) -> bool:
    """Return True if a call [B, H, T, S] is better measured together with others."""
    return math.prod(shape) <= (SHORT_ON_CPU if on_cpu else SHORT)


class Note(NamedTuple):
    """A call that waits to be measured."""

    record: Record
    scoring: Scoring  # with tensors of its own
    lse: Tensor | None


class Group:
    """Calls that one map can hold, in the order in which they came, with room for more.

    Made for calls like the first, whose scores are given; `names` and `pooled` are to be measured of each.
    """

    def __init__(self, scores: Scores, room: int, names: tuple[str, ...], pooled: int | None) -> None:
        B, H, T, D = scores.q.shape
        _, Hk, S, _ = scores.k.shape
        self.mask, self.room, self.names, self.pooled = scores.mask, room, names, pooled
        self.q, self.k = scores.q.new_empty(B, room, H, T, D), scores.k.new_empty(B, room, Hk, S, D)
        # [B, H, T, D] and [B, Hk, S, D] for each call
        self.places = list(zip(self.q.unbind(1), self.k.unbind(1), strict=True))
        self.notes: list[Note] = []

    def take(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the q and k of one more call into the group; return the copies."""
        place = self.places[len(self.notes)]
        torch._foreach_copy_(place, (q, k))
        return place

    def whole(self, notes: slice = slice(None)) -> AttentionMap:
        """Return one map of these calls, [B, calls * H, T, S]."""
        chosen = self.notes[notes]
        scoring = chosen[0].scoring
        if scoring.has_tensors:
            names = list(scoring.tensors)
            own = {name: torch.cat([note.scoring.tensors[name] for note in chosen]) for name in names}
            scoring = replace(scoring, **own)  # type: ignore[arg-type]
        lse = [note.lse for note in chosen if note.lse is not None]
        start, stop, _ = notes.indices(len(self.notes))
        q, k = self.q[:, start:stop].flatten(1, 2), self.k[:, start:stop].flatten(1, 2)
        return make(Scores(q, k, self.mask, scoring), torch.cat(lse, 1) if lse else None)


class Measured(NamedTuple):
    """What was measured of several calls together."""

    records: list[Record]
    numbers: Numbers
    rows: Tensor | None  # all row statistics, [calls, statistics, B, H]
    counts: Tensor | None  # all counts where they had to be counted, [calls, ways, B, H]


class _WaitingGroups:
    """The groups of calls of one forward that wait to be measured."""

    def __init__(self) -> None:
        self.groups: dict[Hashable, list[Group]] = {}  # by what their calls have in common, but for masks
        self.size = 0  # bytes

    def group(self, kind: Hashable, scores: Scores) -> Group | None:
        """Return a group with room for a call; None if there is none."""
        for group in self.groups.get(kind, ()):
            if len(group.notes) < group.room and (
                group.mask is scores.mask or _same_rules(group.mask, scores.mask, scores.q.is_cpu)
            ):
                return group
        return None

    def new(
        self, kind: Hashable, scores: Scores, names: tuple[str, ...], pooled: int | None, calls: int
    ) -> Group:
        """Add a group for as many calls as may come, within the memory that may wait."""
        q, k = scores.q, scores.k
        each = q.nbytes + k.nbytes
        most = min(
            calls, (_bytes_for_copies(q.device) - self.size) // each, MOST_HEADS // (q.shape[0] * q.shape[1])
        )
        group = Group(scores, max(1, most), names, pooled)
        self.size += each * group.room
        self.groups.setdefault(kind, []).append(group)
        return group


class Waiting:
    """Calls that were heard and are not among the heads yet."""

    def __init__(self, heads: Heads) -> None:
        self._heads = ref(heads)  # which take them in the end, in the order in which they were heard
        self.layers: Mapping[str, Layer] = {}  # what paths go by; one that is not there goes by itself
        self._heard: list[tuple[str, Record]] = []
        self._ahead: dict[object, _WaitingGroups] = {}  # by forward
        self._measured: list[Measured] = []
        self._lock = threading.RLock()

    def put(self, path: str, record: Record) -> None:
        """Add a call that was measured already."""
        with self._lock:
            self._heard.append((path, record))

    def note(
        self,
        forward: object,
        path: str,
        record: Record,
        weights: AttentionMap,
        names: tuple[str, ...],
        pooled: int | None,
        keep: bool,
    ) -> Group | None:
        """Copy a call of a forward, to be measured later; return its group; None: it must be measured now.

        record: of the call, without numbers yet; with `keep` its map is kept in it.
        """
        scores, lse, columns = weights.as_made
        if not isinstance(scores, Scores) or columns is not None or scores.positions is not None:
            return None
        q, k, scoring = scores.q, scores.k, scores.scoring
        B, H, T, S = record.shape
        short = SHORT_ON_CPU if q.is_cpu else SHORT
        if type(q) not in PLAIN or type(k) not in PLAIN or not 0 < B * H * T * S <= short:
            return None
        if scores.mask.allowed is not None or scoring.bias is not None:
            return None  # as large as the weights, not to be copied
        loose = not (q.requires_grad or k.requires_grad)
        kind: tuple[Hashable, ...] = (
            q.shape, k.shape, q.dtype, k.dtype, q.device, scoring.scale, scoring.softcap,
            lse is None, names, pooled, record.reach, torch.is_inference_mode_enabled(),
        )  # fmt: skip
        with self._lock:  # to the end: nobody may measure a group before its first call is in it
            try:
                if scoring.sinks is not None or scoring.slopes is not None or scoring.relative is not None:
                    own = {name: value.detach().clone() for name, value in scoring.tensors.items()}
                    kind = (*kind, *((name, value.shape, value.dtype) for name, value in own.items()))
                    scoring, loose = replace(scoring, **own), False  # type: ignore[arg-type]
                ahead = self._ahead.get(forward)
                if ahead is None:
                    ahead = self._ahead[forward] = _WaitingGroups()
                group = ahead.group(kind, scores)
                if group is None:
                    group = ahead.new(kind, scores, names, pooled, len(self.layers))
            except torch.OutOfMemoryError:
                return None
            kept = (weights if loose else weights.detach()) if keep else None
            note = Note(record, scoring, lse)
            self._take(group, path, note, q if loose else q.detach(), k if loose else k.detach(), kept)
            if len(group.notes) == group.room and ahead.size > _bytes_for_copies(q.device):
                self.measure(forward)
        return group

    def note_alike(
        self,
        group: Group,
        like: Record,
        keep: bool,
        path: str,
        scores: Scores,
        lse: Tensor | None,
    ) -> bool:
        """Copy one more call like the last of a group, whose record is given, without gradients; return False
        if the group is full."""
        with self._lock:
            if len(group.notes) >= group.room:
                return False
            record = Record(like.shape, like.kind, like.forward, marks=like.marks, reach=like.reach)
            note = Note(record, scores.scoring, lse)
            self._take(group, path, note, scores.q, scores.k, make(scores, lse) if keep else None)
        return True

    def _take(
        self, group: Group, path: str, note: Note, q: Tensor, k: Tensor, weights: AttentionMap | None
    ) -> None:
        """Copy a call into a group; `weights`: its map, if that is to be kept."""
        place = group.take(q, k)
        group.notes.append(note)
        self._heard.append((path, note.record))
        if weights is not None and note.lse is None:
            weights = later(partial(_scores_of_copies, *place, group.mask, note.scoring))
        note.record.map = weights

    def measure(self, forward: object) -> None:
        """Measure the calls of a forward that wait, without waiting for a device."""
        with self._lock:
            ahead = self._ahead.pop(forward, None)
            if ahead is not None:
                for beside in ahead.groups.values():
                    for group in beside:
                        group.room = len(group.notes)  # who has it takes no more
                        self._measured += _measured(group)

    def settle(self) -> None:
        """Measure all calls that wait, fill in their numbers, and add every call to the heads."""
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
                for path, record in heard:
                    if heads is not None and EVERYONE in record.counts:
                        heads.take(path, record, self.layers.get(path, path))


def _scores_of_copies(q: Tensor, k: Tensor, mask: Mask, scoring: Scoring) -> tuple[Scores, None]:
    """What a kept map is of where nobody could tell what is written to a model's own q and k.

    By .data: what is written for other calls beside them is not counted as written to these.
    """
    return Scores(q.data, k.data, mask, scoring), None


def _bytes_for_copies(device: torch.device) -> int:
    """Return how many bytes of q and k may wait."""
    return int(budget.gpu_bytes(device) * SHARE) if device.type == "cuda" else ROOM_ON_CPU


def _same_rules(a: Mask, b: Mask, on_cpu: bool) -> bool:
    """Return True if two masks are known to be equal; on a GPU no values are read.

    Those of a call hold copies of their own, which nobody writes to.
    """
    return (on_cpu or (a.is_positional and b.is_positional)) and a == b


@torch.no_grad()
def _measured(group: Group) -> list[Measured]:
    """Measure the calls of a group together, or one by one if memory is short."""
    count = len(group.notes)
    try:
        return [_some_measured(group, slice(0, count))]
    except (BudgetExceeded, torch.OutOfMemoryError):
        if count == 1:
            raise
        return [_some_measured(group, slice(at, at + 1)) for at in range(count)]


def _some_measured(group: Group, notes: slice) -> Measured:
    records = [note.record for note in group.notes[notes]]
    numbers = numbers_of(group.whole(notes), group.names, group.pooled, records[0].reach, len(records))
    calls = len(records)
    rows = _split_calls(list(numbers.rows.values()), calls) if numbers.rows else None
    counts = None if numbers.every else _split_calls(list(numbers.counts.values()), calls)
    return Measured(records, numbers, rows, counts)


def _fill(measured: list[Measured]) -> None:
    """Put each layer's numbers into its record; a GPU is waited for once."""
    small = [x for group in measured for x in (group.rows, group.counts) if x is not None]
    here = iter(fetched(small))
    for group in measured:
        calls, numbers = len(group.records), group.numbers
        rows = None if group.rows is None else next(here).unbind()
        counts = None if group.counts is None else next(here).unbind()
        large = {name: value.chunk(calls, 1) for name, value in numbers.large.items()}
        offsets = {name: ROW_STATISTICS[name].offset for name in numbers.rows} | {EVERYONE: None}
        here_now = counts is not None or all(x.is_cpu for x in numbers.counts.values())
        for at, record in enumerate(group.records):
            if rows is not None:
                record.rows = dict(zip(numbers.rows, rows[at].unbind(), strict=True))
            by_offset = numbers.counts
            if counts is not None:
                by_offset = dict(zip(numbers.counts, counts[at].unbind(), strict=True))
            record.large = {name: parts[at] for name, parts in large.items()} | numbers.shared
            record.counts = {name: by_offset[offset] for name, offset in offsets.items()}
            record._is_here = here_now


def _split_calls(together: list[Tensor], calls: int) -> Tensor:
    """Return n tensors [B, calls * H] as one [calls, n, B, H], on the device where they were made."""
    stacked = torch.stack(together)  # [n, B, calls * H]
    return stacked.unflatten(2, (calls, -1)).permute(2, 0, 1, 3).contiguous()


# Whole maps


@dataclass(frozen=True, eq=False)
class Whole:
    """Calls of one sequence with the same sizes, rules and tokens.

    weights: [1, H, T, S], those of the first call first.
    """

    records: list[Record]
    weights: Tensor

    def measure_patterns(self) -> None:
        """Measure the patterns of all calls at once, and add them to their records."""
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
def whole_maps(records: Iterable[Record], most: int = MOST_WEIGHTS) -> Iterator[Whole]:
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
