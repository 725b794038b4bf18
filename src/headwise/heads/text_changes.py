"""Two texts through one model: which heads changed their weights, and at which token.

Tokens of the two texts are partners if they are the same, in order (longest runs first, as in `difflib`), or
if a run was replaced by a run of the same length: "he" by "she". Tokens without a partner are not compared.

The rows of two partners are compared by the Jensen-Shannon divergence over keys that have a partner, with one
more entry for the weight of all other keys and one for a learned sink:

    JS(p || q) = H((p + q) / 2) - (H(p) + H(q)) / 2      in nats; 0: equal; log 2: nothing in common

Letters: H num_heads, T query_len, S key_len, N pairs of queries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import groupby, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..map import AttentionMap
from .layer import Label
from .layer_names import Layer, path_in_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .collection import Heads, ShownTable
    from .layer import LayerHeads
    from .record import Record

# Which tokens are partners


@dataclass(frozen=True)
class Text:
    """One sequence of positions, padding included.

    ids: identities of tokens; None: unknown.
    real: the positions that are not padding.
    special: those of tokens such as [CLS].
    """

    names: tuple[str, ...] = field(compare=False)  # two layers may have different names for one text
    ids: tuple[Hashable, ...] | None
    real: tuple[int, ...]
    special: frozenset[int] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, eq=False)
class Alignment:
    """The positions of two texts as one line: (first, second), None where the other text has no partner.

    Attributes:
        places: positions; padding has none.
        tokens: what stands there in the first text and in the second, "" where there is nothing.
        changed: whether they differ there.
        by_position: tokens are unknown, and partners are those that stand in the same place.
    """

    places: tuple[tuple[int | None, int | None], ...]
    tokens: tuple[tuple[str, str], ...]
    changed: tuple[bool, ...]
    by_position: bool = False

    @property
    def names(self) -> list[str]:
        """Of each place: "the", "he/she" where the texts differ."""
        return [
            f"{mine}/{theirs}" if differs and mine and theirs else mine or theirs
            for (mine, theirs), differs in zip(self.tokens, self.changed, strict=True)
        ]

    @property
    def shared(self) -> list[int]:
        """The places where both texts have a token."""
        return [at for at, place in enumerate(self.places) if None not in place]

    def positions(self, side: int, places: Iterable[int]) -> list[int]:
        """Return the positions of some places in the first text (0) or the second (1)."""
        return [at for place in places if (at := self.places[place][side]) is not None]

    def without_partner(self, side: int) -> list[int]:
        """Return the positions in the first text (0) or the second (1) that have no partner in the other."""
        return self.positions(side, (at for at, place in enumerate(self.places) if place[1 - side] is None))

    @property
    def words(self) -> tuple[str, str]:
        """The words that only the first text has, and only the second; each change once."""
        runs: dict[tuple[str, str], None] = {}  # in order, each once
        for differs, run in groupby(zip(self.tokens, self.changed, strict=True), key=itemgetter(1)):
            if differs:
                mine, theirs = zip(*(pair for pair, _ in run), strict=True)
                runs[" ".join(" ".join(mine).split()), " ".join(" ".join(theirs).split())] = None
        before, after = ([run[side] for run in runs if run[side]] for side in (0, 1))
        return ", ".join(before), ", ".join(after)


def align(before: Text, after: Text) -> Alignment:
    """Find the positions that are partners; the pairs do not depend on which text comes first.

    Raises:
        ArgumentError: no token in common but special ones; unknown tokens, not equally many.
    """
    if before.ids is None or after.ids is None:
        return _by_position(before, after)
    ids = [before.ids[at] for at in before.real], [after.ids[at] for at in after.real]
    # the result of difflib depends on the order of texts; partners must not
    swapped = (len(ids[0]), list(map(repr, ids[0]))) > (len(ids[1]), list(map(repr, ids[1])))
    first, second = ids[::-1] if swapped else ids
    places: list[tuple[int | None, int | None]] = []
    shared = 0
    for kind, *span in SequenceMatcher(None, first, second, autojunk=False).get_opcodes():
        a0, a1, b0, b1 = [*span[2:], *span[:2]] if swapped else span
        mine, theirs = before.real[a0:a1], after.real[b0:b1]
        if kind == "equal":
            shared += sum(at not in before.special for at in mine)
        if len(mine) == len(theirs):
            places += zip(mine, theirs, strict=True)
        else:
            places += [(at, None) for at in mine]
            places += [(None, at) for at in theirs]
    if not shared:
        raise ArgumentError(
            f"texts must have a token in common: {_quoted(before)} and {_quoted(after)} have 0 except "
            "special tokens; change only a few words"
        )
    tokens = tuple(
        ("" if a is None else before.names[a], "" if b is None else after.names[b]) for a, b in places
    )
    changed = tuple(a is None or b is None or before.ids[a] != after.ids[b] for a, b in places)
    return Alignment(tuple(places), tokens, changed)


def _by_position(before: Text, after: Text) -> Alignment:
    """Align two texts of unknown tokens position by position."""
    if len(before.real) != len(after.real):
        raise ArgumentError(
            f"tokens must be known to compare texts of different lengths: got {len(before.real)} and "
            f"{len(after.real)} positions without token ids; pass input_ids to the model, or set "
            "heads.tokens on both results"
        )
    tokens = tuple((str(at), str(at)) for at in before.real)
    places = tuple(zip(before.real, after.real, strict=True))
    return Alignment(places, tokens, (False,) * len(tokens), by_position=True)


def _quoted(text: Text) -> str:
    """Return the beginning of a text in quotes."""
    words = " ".join(text.names[at] for at in text.real if at not in text.special)
    return repr(words if len(words) <= 40 else words[:39] + "…")


# Which text a layer reads


class _WatchedTexts:
    """The texts that every layer read in one run."""

    def __init__(self, heads: Heads, batch: int) -> None:
        self.batch = batch
        self.calls = {path: _call(layer) for path, layer in zip(heads.paths, heads.values(), strict=True)}
        self.maps = {path: map.select(batch=batch) for path, (_, map) in self.calls.items()}
        self.ids: dict[str, tuple[Hashable, ...]] = {  # of layers whose tokens are known
            path: tuple(call.marks.ids[batch].tolist())
            for path, (call, _) in self.calls.items()
            if call.marks is not None
        }
        self.words = {path: heads.words(call, batch) for path, (call, _) in self.calls.items()}

    def texts(self, path: str) -> tuple[Text, Text]:
        """Return the texts of the queries and of the keys of a layer."""
        call = self.calls[path][0]
        T, S = self.maps[path].shape[2:]
        if call.kind == "self":
            keys = self._text(S, path)
            return keys if T == S else _last(keys, T), keys
        query_layer = max(
            (other for other, ids in self.ids.items() if len(ids) == T),
            key=lambda other: _in_common(other, path),
            default=None,
        )
        query_ids = None if query_layer is None else self.ids[query_layer]
        key_layer = next(
            (other for other, ids in self.ids.items() if len(ids) == S and ids != query_ids), None
        )
        queries = Text((), None, tuple(range(T))) if query_layer is None else self._text(T, query_layer)
        return queries, Text((), None, self._real(path)) if key_layer is None else self._text(S, key_layer)

    def _real(self, path: str) -> tuple[int, ...]:
        """Return the positions of the real keys of a layer."""
        return tuple(self.maps[path].real_keys[0].nonzero().flatten().tolist())

    def _text(self, length: int, path: str) -> Text:
        """Return the text of the keys of a layer."""
        special: frozenset[int] = frozenset()
        words, marks = self.words[path], self.calls[path][0].marks
        names = None if words is None else tuple(words)
        if marks is not None and marks.special is not None:
            special = frozenset(marks.special[self.batch].nonzero().flatten().tolist())
        ids = self.ids.get(path, names)
        shown = names or tuple(map(str, range(length) if ids is None else ids))
        return Text(shown, ids, self._real(path), special)


def _in_common(path: str, other: str) -> int:
    """Return how many leading module names two paths have in common."""
    pairs = zip(path.split("."), other.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _last(text: Text, length: int) -> Text:
    """Return the last `length` positions of a text: the queries where they are fewer than the keys."""
    before = len(text.names) - length
    return Text(
        text.names[before:],
        None if text.ids is None else text.ids[before:],
        tuple(at - before for at in text.real if at >= before),
        frozenset(at - before for at in text.special if at >= before),
    )


def _call(layer: LayerHeads) -> tuple[Record, AttentionMap]:
    """Return the last call with a map, if possible one whose tokens are known, and its map."""
    pairs = [(call, call.map) for call in layer.calls if call.map is not None]
    if not pairs:
        raise ArgumentError(
            f"heads must have maps: {path_in_words(layer.path)} was called with "
            f"{list(layer.calls[-1].shape)} and kept none; use watch(model, keep=True)"
        )
    return next((pair for pair in reversed(pairs) if pair[0].marks is not None), pairs[-1])


# Heads


@dataclass(frozen=True)
class Change:
    """One head on two texts. Unpacks to (layer, head), as `hw.ablate` takes it.

    Attributes:
        distance: the mean over queries of the Jensen-Shannon divergence of its two rows, 0 .. log 2; NaN
            where no query counts in both texts.
        largest: that of the query that changed most.
        token: that query's token, "he/she" where the texts differ there.
        places: its position in the first text and in the second.
        before_label, after_label: what the head is called on each text.
    """

    layer: Layer
    head: int
    path: str
    distance: float
    before_label: Label
    after_label: Label
    largest: float = math.nan
    token: str = ""
    places: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Layer | int]:
        return iter((self.layer, self.head))

    def __len__(self) -> int:
        return 2


@dataclass(frozen=True, eq=False)
class Compared:
    """One layer on both texts.

    rows: the divergence of every query that both texts have, [H, N] in float64; NaN where it does not count.
    since: of these queries, the first that `Change.distance` is the mean of.
    """

    maps: tuple[AttentionMap, AttentionMap]  # [1, H, T, S] each
    queries: Alignment
    keys: Alignment
    rows: Tensor
    since: int = 0


class Changes:
    """The heads of a model on two texts.

    Attributes:
        all: every head, the most changed first; those without a query to compare come last.
        layers: path -> what was compared there, with the divergence of every query.
        title: of the model.
    """

    def __init__(self, all: list[Change], layers: dict[str, Compared], title: str | None = None) -> None:
        self.all, self.layers, self.title = all, layers, title

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[Change]:
        return iter(self.all)

    @property
    def text(self) -> Alignment:
        """Both texts as one: that of the last layer's queries."""
        return list(self.layers.values())[-1].queries

    def first(self, top: int | None) -> list[Change]:
        """Return the heads that changed most.

        Raises:
            ArgumentError: top below 1; no head at all.
        """
        if top is not None and top < 1:
            raise ArgumentError(f"top must be at least 1: got {top}; None gives all")
        if not self.all:
            raise ArgumentError("changes must hold at least one head: got 0; choose others")
        return self.all[:top]

    def weights(self, change: Change) -> tuple[Tensor, Tensor]:
        """Return the weights of a head on both texts, float32 [places of queries, places of keys] each.

        Rows and columns are the places of the alignment, so that the two can be laid on each other; NaN where
        a text has no such token.
        """
        compared = self.layers[change.path]
        first, second = (_on_places(compared, change.head, side) for side in (0, 1))
        return first, second

    def table(self, top: int | None = 10) -> ShownTable:
        """Return the heads that changed most, for the terminal (rich).

        Args:
            top: at most so many; None: all.

        Raises:
            ArgumentError: top below 1.
            PackageMissing: rich is not installed.
        """
        from ..show.changes_picture import changes_table

        return changes_table(self, top=top)

    def plot(self, top: int = 6) -> Figure:
        """Draw the heads that changed most: on the first text, on the second, and the difference.

        Args:
            top: at most so many.

        Raises:
            ArgumentError: top below 1.
            PackageMissing: matplotlib is not installed.
        """
        from ..show.changes_picture import changes_picture

        return changes_picture(self, top=top)

    def __repr__(self) -> str:
        text = f"{len(self)} head{'' if len(self) == 1 else 's'}"
        for change in self.all[:1]:
            text += f", most in {change.layer}.{change.head}: {change.distance:.3f} nats"
        return f"Changes({text})"


@torch.no_grad()
def changes(before: Heads, after: Heads, *, batch: int = 0) -> Changes:
    """Return how much every head changed between two texts: see `headwise.Heads.changes`."""
    _check_same_model(before, after)
    watched = _WatchedTexts(before, batch), _WatchedTexts(after, batch)
    aligned = functools.cache(align)  # two texts have one alignment, however many layers read them
    layers: dict[str, Compared] = {}
    looking_ahead: list[Alignment] = []
    for path in before.paths:
        (old_queries, old_keys), (new_queries, new_keys) = (run.texts(path) for run in watched)
        queries, keys = aligned(old_queries, new_queries), aligned(old_keys, new_keys)
        maps = watched[0].maps[path], watched[1].maps[path]
        rows, looks_ahead = _divergence(maps, queries, keys)
        if looks_ahead and watched[0].calls[path][0].kind == "self":
            looking_ahead.append(queries)
        layers[path] = Compared(maps, queries, keys, rows)
    texts = {id(text): text for layer in layers.values() for text in (layer.queries, layer.keys)}
    differing = [text for text in texts.values() if any(text.changed)]
    any_looks_ahead = any(text in differing for text in looking_ahead)
    # a difference in one of two texts, as of an encoder and a decoder, may be visible everywhere in the other
    if not any_looks_ahead and len(differing) == 1:
        layers = {path: _since_the_difference(layer, differing[0]) for path, layer in layers.items()}
    head_changes = [
        change for path, layer in layers.items() for change in _changes_of_layer(before, after, path, layer)
    ]
    head_changes.sort(key=lambda change: math.inf if math.isnan(change.distance) else -change.distance)
    return Changes(head_changes, layers, before.title)


def _check_same_model(before: Heads, after: Heads) -> None:
    """Raise `ArgumentError` if the heads are not of the same layers."""
    sizes = []
    for heads in (before, after):
        heads.all()  # raises if nothing was watched
        sizes.append({path: len(layer) for path, layer in zip(heads.paths, heads.values(), strict=True)})
    for path in [*sizes[0], *sizes[1]]:
        mine, theirs = (size.get(path, 0) for size in sizes)
        if mine != theirs:
            raise ArgumentError(
                f"other must be of the same model: {path_in_words(path)} has {mine} heads here and {theirs} "
                "there; watch one model on both texts"
            )


def _since_the_difference(layer: Compared, text: Alignment) -> Compared:
    """Leave out the queries before the first difference, which a causal model reads alike."""
    if layer.queries is not text:
        return layer
    first = text.changed.index(True)
    since = len([at for at in text.shared if at < first])
    return replace(layer, since=since if since < len(text.shared) else 0)


def _changes_of_layer(before: Heads, after: Heads, path: str, layer: Compared) -> Iterator[Change]:
    """Yield the change of every head of a layer."""
    rows, shared, names = layer.rows[:, layer.since :], layer.queries.shared, layer.queries.names
    for mine, theirs in zip(before[path], after[path], strict=True):
        row = rows[mine.head]
        place, pair, largest = None, None, math.nan
        if bool(row.isfinite().any()):
            most = int(row.nan_to_num(-1.0).argmax())
            place, largest = shared[layer.since + most], float(row[most])
            pair = layer.queries.positions(0, [place])[0], layer.queries.positions(1, [place])[0]
        yield Change(
            mine.layer, mine.head, path, float(row.nanmean()), mine.label, theirs.label, largest,
            "" if place is None else names[place], pair,
        )  # fmt: skip


# Rows


BLOCK = 2**21  # numbers of one block of rows: 16 MiB, a few times


def _divergence(
    maps: tuple[AttentionMap, AttentionMap], queries: Alignment, keys: Alignment
) -> tuple[Tensor, bool]:
    """Return the divergence, [H, N] in float64; and if a query before the first difference looks ahead."""
    shared = queries.shared
    H = maps[0].shape[1]
    rows = torch.full((H, len(shared)), math.nan, dtype=torch.float64)
    step = max(1, BLOCK // (H * max(map.shape[3] for map in maps)))
    first_changed = queries.changed.index(True) if any(queries.changed) else len(queries.changed)
    ahead = False
    for start in range(0, len(shared), step):
        places = shared[start : start + step]
        bins, counts = [], []
        for side, map in enumerate(maps):
            numbers = torch.tensor(queries.positions(side, places))
            block = map.select(queries=numbers)
            p = block.dense()[0].detach().to("cpu", torch.float64, copy=True)  # [H, t, S]
            counts.append(block.counted_queries()[0].cpu())
            earlier = [number for number, at in enumerate(places) if at < first_changed]
            if earlier and not ahead:
                is_ahead = torch.arange(p.shape[2]) > block.positions.cpu()[earlier][:, None]
                ahead = bool((p[:, earlier] * is_ahead).any())
            bins.append(_bins(p, block, keys, side))
        divergence = _jensen_shannon(*bins).masked_fill(~(counts[0] & counts[1]), math.nan)
        rows[:, start : start + len(places)] = divergence
    return rows, ahead


def _bins(p: Tensor, block: AttentionMap, keys: Alignment, side: int) -> Tensor:
    """Return the shares of each row's weight, [H, t, bins]: each key with a partner, all others, a sink.

    p: weights, [H, t, S], which are overwritten.
    """
    positions = keys.positions(side, keys.shared)
    parts = [p if positions == list(range(p.shape[-1])) else p[..., positions]]
    if len(keys.shared) < len(keys.places):
        parts.append(p[..., keys.without_partner(side)].sum(-1, keepdim=True))
    if block.sinks is not None:
        parts.append((block.sinks.detach()[:, None] - block.lse[0]).exp().cpu().double()[..., None])
    bins = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    return bins.div_(bins.sum(-1, keepdim=True))  # rounded weights must also sum to 1


def _jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Return the divergence of each row, [H, t], of shares [H, t, bins]."""
    divergence = torch.special.entr((p + q).div_(2))
    divergence.sub_(torch.special.entr(p).add_(torch.special.entr(q)).div_(2))
    return divergence.sum(-1).clamp(0, math.log(2))


def _on_places(layer: Compared, head: int, side: int) -> Tensor:
    """Return one head's weights at the places that this text has, NaN elsewhere."""
    rows, columns = (
        [(at, position) for at, place in enumerate(text.places) if (position := place[side]) is not None]
        for text in (layer.queries, layer.keys)
    )
    grid = torch.full((len(layer.queries.places), len(layer.keys.places)), math.nan)
    numbers = torch.tensor([position for _, position in rows])
    weights = layer.maps[side].select(heads=head, queries=numbers).dense()[0, 0].detach().cpu().float()
    to_rows, to_columns = (torch.tensor([at for at, _ in pairs]) for pairs in (rows, columns))
    grid[to_rows[:, None], to_columns] = weights[:, [position for _, position in columns]]
    return grid
