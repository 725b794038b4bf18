"""Calls of one forward measured together: layers of the same sizes and rules are joined as heads of one map.

For short calls, launching the measurements of every layer takes longer than the measurements. So a short call
is deferred: its q and k are copied, for the model may write to them later. Copies of calls of one kind are
next to each other along the heads; when the forward is over, or when the heads are read, they are measured as
one map, and the numbers are split:

    layer 0  q [B, H, T, D] ──┐
    layer 1  q [B, H, T, D] ──┼──> [B, 3 H, T, D] ──> statistics, pictures, counts ──> [B, H] for each layer
    layer 2  q [B, H, T, D] ──┘

The rules of a mask are the same for all heads and stay unchanged; tensors by head (sinks, slopes, a learned
bias by distance) are joined like q.

`joined_maps` does the same for patterns, from maps that were stored. Patterns take ten short passes a layer,
which take longer to launch than to run; if the weights of all calls of one kind fit into memory, they are
computed once, and every pattern is a sum of some of them.

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
from .record import ALL_QUERIES, Numbers, Record, fetched, measure_patterns, numbers_of

if TYPE_CHECKING:
    from .collection import Heads

# Number of weights up to which a call is short; above, computing takes longer than launching.
SHORT_ON_CPU, SHORT = 2**23, 2**29
ROOM_ON_CPU, SHARE = 2**26, 2**-7  # maximal bytes of deferred q and k; on a GPU, as a share of its memory
PLAIN = (Tensor, nn.Parameter)
MOST_HEADS = 2**15  # of all sequences of one map
MOST_WEIGHTS = 2**24  # of joined maps: 64 MiB in float32


def is_short(shape: tuple[int, ...], on_cpu: bool) -> bool:
    """Return True if a call [B, H, T, S] is short, so that it is measured together with others."""
    return math.prod(shape) <= (SHORT_ON_CPU if on_cpu else SHORT)


class Note(NamedTuple):
    """A deferred call."""

    record: Record
    scoring: Scoring  # with copies of its tensors
    lse: Tensor | None


class Group:
    """Calls of one kind that are joined in one map, in the order in which they came, up to `room` of them.

    scores: of the first call. names, pooled: what is measured of each call.
    """

    def __init__(self, scores: Scores, room: int, names: tuple[str, ...], pooled: int | None) -> None:
        B, H, T, D = scores.q.shape
        _, Hk, S, _ = scores.k.shape
        self.mask, self.room, self.names, self.pooled = scores.mask, room, names, pooled
        self.q, self.k = scores.q.new_empty(B, room, H, T, D), scores.k.new_empty(B, room, Hk, S, D)
        # [B, H, T, D] and [B, Hk, S, D] for each call
        self.places = list(zip(self.q.unbind(1), self.k.unbind(1), strict=True))
        self.notes: list[Note] = []

    def copy_in(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Copy the q and k of one more call into the group; return the copies."""
        place = self.places[len(self.notes)]
        torch._foreach_copy_(place, (q, k))
        return place

    def joined_map(self, notes: slice = slice(None)) -> AttentionMap:
        """Return one map of these calls, [B, calls * H, T, S]."""
        chosen = self.notes[notes]
        scoring = chosen[0].scoring
        if scoring.has_tensors:
            names = list(scoring.tensors)
            tensors = {name: torch.cat([note.scoring.tensors[name] for note in chosen]) for name in names}
            scoring = replace(scoring, **tensors)  # type: ignore[arg-type]
        lse = [note.lse for note in chosen if note.lse is not None]
        start, stop, _ = notes.indices(len(self.notes))
        q, k = self.q[:, start:stop].flatten(1, 2), self.k[:, start:stop].flatten(1, 2)
        return make(Scores(q, k, self.mask, scoring), torch.cat(lse, 1) if lse else None)


class MeasuredCalls(NamedTuple):
    """The numbers of several calls that were measured together."""

    records: list[Record]
    numbers: Numbers
    rows: Tensor | None  # all row statistics, [calls, statistics, B, H]
    counts: Tensor | None  # counts by key offset, [calls, offsets, B, H]; None: every query counts


class _DeferredGroups:
    """The groups of deferred calls of one forward."""

    def __init__(self) -> None:
        self.groups: dict[Hashable, list[Group]] = {}  # by kind of call, without masks
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
        """Add a group for as many calls as there may be, within the memory limit of deferred calls."""
        q, k = scores.q, scores.k
        size = q.nbytes + k.nbytes
        room = min(
            calls, (_bytes_for_copies(q.device) - self.size) // size, MOST_HEADS // (q.shape[0] * q.shape[1])
        )
        group = Group(scores, max(1, room), names, pooled)
        self.size += size * group.room
        self.groups.setdefault(kind, []).append(group)
        return group


class DeferredCalls:
    """Calls that were heard and are not yet among the heads."""

    def __init__(self, heads: Heads) -> None:
        self._heads = ref(heads)  # to which calls are added in the order in which they were heard
        self.layers: Mapping[str, Layer] = {}  # names by path; the name of a missing path is the path
        self._records: list[tuple[str, Record]] = []
        self._groups: dict[object, _DeferredGroups] = {}  # by forward
        self._measured: list[MeasuredCalls] = []
        self._lock = threading.RLock()

    def add(self, path: str, record: Record) -> None:
        """Add a call that was measured already."""
        with self._lock:
            self._records.append((path, record))

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
        """Defer a call and return its group; None: it must be measured now.

        record: of the call, without numbers yet; with `keep` it stores the map.
        """
        scores, lse, columns = weights.as_made
        if not isinstance(scores, Scores) or columns is not None or scores.positions is not None:
            return None
        q, k, scoring = scores.q, scores.k, scores.scoring
        B, H, T, S = record.shape
        most_weights = SHORT_ON_CPU if q.is_cpu else SHORT
        if type(q) not in PLAIN or type(k) not in PLAIN or not 0 < B * H * T * S <= most_weights:
            return None
        if scores.mask.allowed is not None or scoring.bias is not None:
            return None  # too large to copy
        is_detached = not (q.requires_grad or k.requires_grad)
        kind: tuple[Hashable, ...] = (
            q.shape, k.shape, q.dtype, k.dtype, q.device, scoring.scale, scoring.softcap,
            lse is None, names, pooled, record.reach, torch.is_inference_mode_enabled(),
        )  # fmt: skip
        with self._lock:  # held to the end, so that no thread measures a group without calls
            try:
                if scoring.sinks is not None or scoring.slopes is not None or scoring.relative is not None:
                    tensors = {name: value.detach().clone() for name, value in scoring.tensors.items()}
                    kind = (*kind, *((name, value.shape, value.dtype) for name, value in tensors.items()))
                    scoring, is_detached = replace(scoring, **tensors), False  # type: ignore[arg-type]
                groups = self._groups.get(forward)
                if groups is None:
                    groups = self._groups[forward] = _DeferredGroups()
                group = groups.group(kind, scores)
                if group is None:
                    group = groups.new(kind, scores, names, pooled, len(self.layers))
            except torch.OutOfMemoryError:
                return None
            stored = (weights if is_detached else weights.detach()) if keep else None
            note = Note(record, scoring, lse)
            self._add_note(
                group, path, note, q if is_detached else q.detach(), k if is_detached else k.detach(), stored
            )
            if len(group.notes) == group.room and groups.size > _bytes_for_copies(q.device):
                self.measure(forward)
        return group

    def note_again(
        self,
        group: Group,
        like: Record,
        keep: bool,
        path: str,
        scores: Scores,
        lse: Tensor | None,
    ) -> bool:
        """Defer another call of a group, without gradients; return False if the group is full.

        like: the record of a call of that group.
        """
        with self._lock:
            if len(group.notes) >= group.room:
                return False
            record = Record(like.shape, like.kind, like.forward, marks=like.marks, reach=like.reach)
            note = Note(record, scores.scoring, lse)
            self._add_note(group, path, note, scores.q, scores.k, make(scores, lse) if keep else None)
        return True

    def _add_note(
        self, group: Group, path: str, note: Note, q: Tensor, k: Tensor, weights: AttentionMap | None
    ) -> None:
        """Copy a call into a group; `weights`: its map, if it is to be stored."""
        place = group.copy_in(q, k)
        group.notes.append(note)
        self._records.append((path, note.record))
        if weights is not None and note.lse is None:
            weights = later(partial(_scores_of_copies, *place, group.mask, note.scoring))
        note.record.map = weights

    def measure(self, forward: object) -> None:
        """Measure the deferred calls of a forward, without synchronizing with the device."""
        with self._lock:
            groups = self._groups.pop(forward, None)
            if groups is not None:
                for groups_of_kind in groups.groups.values():
                    for group in groups_of_kind:
                        group.room = len(group.notes)  # so that no call is added to it
                        self._measured += _measured(group)

    def settle(self) -> None:
        """Measure all deferred calls, fill in their numbers, and add every call to the heads."""
        if not self._records:
            return
        with self._lock:
            records, self._records = self._records, []
            try:
                for forward in list(self._groups):
                    self.measure(forward)
            finally:  # calls that were measured are added, also after an error in others
                measured, self._measured = self._measured, []
                _fill(measured)
                heads = self._heads()
                for path, record in records:
                    if heads is not None and ALL_QUERIES in record.counts:
                        heads.take(path, record, self.layers.get(path, path))


def _scores_of_copies(q: Tensor, k: Tensor, mask: Mask, scoring: Scoring) -> tuple[Scores, None]:
    """Return the scores of a stored map from copies of q and k, which later writes of the model do not
    change.

    `.data` has a version of its own, so that copies of other calls into the same tensor do not count as
    writes.
    """
    return Scores(q.data, k.data, mask, scoring), None


def _bytes_for_copies(device: torch.device) -> int:
    """Return how many bytes of q and k may be deferred."""
    return int(budget.gpu_bytes(device) * SHARE) if device.type == "cuda" else ROOM_ON_CPU


def _same_rules(a: Mask, b: Mask, on_cpu: bool) -> bool:
    """Return True if two masks are known to be equal; on a GPU no values are read.

    The masks of deferred calls have copies of tensors, which are not written to.
    """
    return (on_cpu or (a.is_positional and b.is_positional)) and a == b


@torch.no_grad()
def _measured(group: Group) -> list[MeasuredCalls]:
    """Measure the calls of a group together, or one by one if memory is short."""
    count = len(group.notes)
    try:
        return [_some_measured(group, slice(0, count))]
    except (BudgetExceeded, torch.OutOfMemoryError):
        if count == 1:
            raise
        return [_some_measured(group, slice(at, at + 1)) for at in range(count)]


def _some_measured(group: Group, notes: slice) -> MeasuredCalls:
    """Measure some calls of a group together."""
    records = [note.record for note in group.notes[notes]]
    numbers = numbers_of(group.joined_map(notes), group.names, group.pooled, records[0].reach, len(records))
    calls = len(records)
    rows = _split_calls(list(numbers.rows.values()), calls) if numbers.rows else None
    counts = None if numbers.counts_all else _split_calls(list(numbers.counts.values()), calls)
    return MeasuredCalls(records, numbers, rows, counts)


def _fill(measured: list[MeasuredCalls]) -> None:
    """Write the numbers of calls into their records, with one transfer from a GPU."""
    small = [x for group in measured for x in (group.rows, group.counts) if x is not None]
    results = iter(fetched(small))
    for group in measured:
        calls, numbers = len(group.records), group.numbers
        rows = None if group.rows is None else next(results).unbind()
        counts = None if group.counts is None else next(results).unbind()
        large = {name: value.chunk(calls, 1) for name, value in numbers.large.items()}
        offsets = {name: ROW_STATISTICS[name].offset for name in numbers.rows} | {ALL_QUERIES: None}
        is_in_main_memory = counts is not None or all(x.is_cpu for x in numbers.counts.values())
        for index, record in enumerate(group.records):
            if rows is not None:
                record.rows = dict(zip(numbers.rows, rows[index].unbind(), strict=True))
            by_offset = numbers.counts
            if counts is not None:
                by_offset = dict(zip(numbers.counts, counts[index].unbind(), strict=True))
            record.large = {name: parts[index] for name, parts in large.items()} | numbers.shared
            record.counts = {name: by_offset[offset] for name, offset in offsets.items()}
            record._is_in_main_memory = is_in_main_memory


def _split_calls(together: list[Tensor], calls: int) -> Tensor:
    """Return n tensors [B, calls * H] as one [calls, n, B, H], on the device where they were made."""
    stacked = torch.stack(together)  # [n, B, calls * H]
    return stacked.unflatten(2, (calls, -1)).permute(2, 0, 1, 3).contiguous()


# Joined maps


@dataclass(frozen=True, eq=False)
class JoinedMaps:
    """Calls of one sequence with the same sizes, rules and tokens.

    weights: [1, H, T, S], joined along heads in the order of records.
    """

    records: list[Record]
    weights: Tensor

    def measure_patterns(self) -> None:
        """Measure the patterns of all calls at once, and add them to their records."""
        first = self.records[0]
        assert first.map is not None
        joined = AttentionMap.from_weights(self.weights, first.map.mask)
        measured = {name: torch.cat([call.rows[name] for call in self.records], 1) for name in first.rows}
        values, counts = measure_patterns(joined, first.kind, first.marks, measured, first.reach)
        calls = len(self.records)
        parts = {name: value.chunk(calls, 1) for name, value in values.items()}
        count_parts = {
            name: count.expand(1, self.weights.shape[1]).chunk(calls, 1) for name, count in counts.items()
        }
        for index, record in enumerate(self.records):
            record.take_patterns(
                {name: value[index] for name, value in parts.items()},
                {name: count[index] for name, count in count_parts.items()},
            )


@torch.no_grad()
def joined_maps(records: Iterable[Record], most: int = MOST_WEIGHTS) -> Iterator[JoinedMaps]:
    """Yield calls with a map, joined if they are of one kind.

    Calls with more than `most` weights, several sequences or learned sinks, which are not keys, are left out.
    """
    groups: list[list[Record]] = []
    for record in records:
        B, H, T, S = record.shape
        if record.map is None or B != 1 or H * T * S > most or record.map.sinks is not None:
            continue
        for group in groups:
            if _same_kind(group[0], record) and len(group) * H * T * S < most:
                group.append(record)
                break
        else:
            groups.append([record])
    for group in groups:
        yield JoinedMaps(
            group, torch.cat([call.map.dense() for call in group if call.map is not None], 1).float()
        )


def _same_kind(first: Record, second: Record) -> bool:
    """Return True if two calls have the same sizes, statistics, tokens and rules."""
    assert first.map is not None and second.map is not None
    return (
        (first.shape, first.kind, first.reach, first.rows.keys())
        == (second.shape, second.kind, second.reach, second.rows.keys())
        and first.marks is second.marks
        and first.map.device == second.map.device
        and (first.map.mask is second.map.mask or first.map.mask == second.map.mask)
    )
