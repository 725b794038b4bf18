"""What a page holds of every sequence of the last forward: its own numbers without padding, the maps of each
layer, exact or pooled, and two sequences compared.

Calls of a layer that continue each other, a prompt and then a query a step, are one map. Else the last call
of which a map or a picture was kept is shown. No more weights are in memory than a block of queries has.

Letters: B batch, H num_heads, h heads shown, T query_len, S key_len.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engines.scores import Scores
from ..errors import ArgumentError, ShapeError
from ..heads.collection import Heads
from ..heads.head_distances import attention_between, similarity
from ..heads.layer import Head, LayerHeads
from ..heads.layer_names import Layer, path_in_words
from ..heads.measures import weights_in_blocks
from ..heads.record import Marks, Record
from ..heads.text_changes import Alignment, Change
from ..map import AttentionMap
from ..scoring import HIDDEN, hidden_is_endless
from .heads_tables import places_of, rounded
from .heatmaps import Names, call_of, names_in, queries_pooled, summed
from .offline_pages import Blob, Blobs, as_bytes, levels, levels_of_heads
from .texts import plain, readable

EXACT = 256  # positions a side up to which a cell is a query and a key
POOLED = 128  # cells a side beyond
SHORTER = (128, 64, 32)
LONGEST = 60  # characters of a token
DIGITS = 5  # of a number, but for weights
MOST_FLIPS = 8


@dataclass(frozen=True, eq=False)
class View:
    """One layer on one sequence.

    Attributes:
        calls: that make up one map, [1, H, T, S] each; more than one: steps of generation.
        heads: which of them are shown.
        queries: of all calls, one after the other, those that are no padding: int [T].
        keys: of the last call, likewise: int [S].
        left_out: padded positions.
        names: of these queries and keys.
        steps: how many of the queries there are after the prompt and after each step; None: no generation.
    """

    calls: list[Record]
    heads: list[int]
    queries: Tensor
    keys: Tensor
    left_out: int
    names: Names
    steps: list[int] | None

    @property
    def lengths(self) -> tuple[int, int]:
        """Return the numbers of queries and keys shown."""
        return len(self.queries), len(self.keys)

    @property
    def whole(self) -> bool:
        """Return True if it is one call and nothing of it is left out."""
        return len(self.calls) == 1 and self.lengths == self.calls[0].shape[2:]

    @property
    def picture(self) -> Tensor:
        """Return the pooled mass kept of a call without a map: [H, rows, columns]."""
        made = self.calls[-1].pooled
        assert made is not None, "a call is shown that kept a map or a picture"
        return made[0]

    def size(self, side: int) -> tuple[int, int]:
        """Return rows and columns of cells; maps are exact up to `side` positions a side."""
        T, S = self.lengths
        has_map = self.calls[-1].map is not None
        if max(T, S) <= side and (has_map or self.picture.shape[1:] == (T, S)):
            return T, S
        pooled = min(POOLED, side)
        made = (T, S) if has_map else tuple(self.picture.shape[1:])
        return min(T, pooled, made[0]), min(S, pooled, made[1])

    def is_exact(self, side: int) -> bool:
        """Return True if every query and key has a cell of its own."""
        return self.size(side) == self.lengths


@dataclass(frozen=True, eq=False)
class Reading:
    """One sequence.

    Attributes:
        batch: its number, of so many `sequences`.
        heads: its own numbers, of the calls that are shown.
        layers: in the order of `heads`; None: no head of it was chosen, or it kept neither map nor picture.
        shown: the heads that were chosen.
    """

    batch: int
    sequences: int
    heads: Heads
    layers: list[View | None]
    shown: list[Head]

    @property
    def places(self) -> dict[str, int]:
        """Return {path or place: number of the layer}."""
        return places_of(self.heads)

    @property
    def numbers(self) -> set[tuple[int, int]]:
        """Return (number of the layer, head) of each head that is shown."""
        places = self.places
        return {(places[head.path], head.head) for head in self.shown}


def readings_of(
    heads: Heads,
    batch: int | None = None,
    chosen: Sequence[tuple[Layer, int]] | None = None,
    names: tuple[Sequence[str] | None, Sequence[str] | None] = (None, None),
) -> list[Reading]:
    """Return a `Reading` of every sequence of the last forward, or of one."""
    some = _places(heads, chosen)
    runs = _runs(heads)
    if not any(runs.values()):
        call_of(heads[some[0][0]])  # says so
    count = min(call.shape[0] for run in runs.values() for call in run)
    if batch is not None and (isinstance(batch, bool) or not -count <= batch < count):
        raise IndexError(f"batch must be between 0 and {count - 1}: got {batch}; choose one of those")
    numbers = range(count) if batch is None else [batch % count]
    for argument, tokens in zip(("query_tokens", "key_tokens"), names, strict=True):
        if tokens is not None and len(numbers) > 1:
            raise ArgumentError(
                f"{argument} must name the tokens of one sequence: the last forward had {count}; choose "
                "one with batch="
            )
    return [_reading(heads, runs, number, count, some, names) for number in numbers]


def _places(heads: Heads, chosen: Sequence[tuple[Layer, int]] | None) -> list[tuple[str, int]]:
    """Return (place of the layer, head) of the chosen heads; None: all, whose numbers are not computed."""
    if chosen is None and heads:
        return [(layer.place, head) for layer in heads.values() for head in range(layer.num_heads)]
    return [(head.path, head.head) for head in heads.chosen(chosen)]


def row_of(batch: int, sequences: int, rows: int) -> int:
    """Return the first row of a sequence in a batch with several rows per sequence, such as beams."""
    return batch * (rows // sequences) if rows % sequences == 0 else batch % rows


def side_within(views: Iterable[View], side: int, most: int) -> int:
    """Return the largest side of exact maps with which all maps together have at most `most` cells."""
    views = list(views)
    for shorter in SHORTER:
        if sum(len(view.heads) * math.prod(view.size(side)) for view in views) <= most:
            break
        side = min(side, shorter)
    return side


def _runs(heads: Heads) -> dict[str, list[Record]]:
    """Return {path: the calls that are shown}."""
    drawable = {
        path: [call for call in layer.calls if call.map is not None or call.pooled is not None]
        for path, layer in zip(heads.paths, heads.values(), strict=True)
    }
    runs = {path: _chain(calls) for path, calls in drawable.items()}
    longest = max(runs.values(), key=len, default=[])
    forwards = {call.forward for call in longest} if len(longest) > 1 else set()
    for path, calls in drawable.items():  # steps that look at another text are those of the others
        theirs = [call for call in calls if call.forward in forwards and call.map is not None]
        if theirs and all(call.kind == "cross" and call.shape[3] == theirs[0].shape[3] for call in theirs):
            runs[path] = theirs
    return runs


def _chain(calls: list[Record]) -> list[Record]:
    chain = calls[-1:]
    for before in reversed(calls[:-1]):
        if not _continues(before, chain[0]):
            break
        chain.insert(0, before)
    return chain


def _continues(before: Record, after: Record) -> bool:
    """Return True if `after` continues `before`, with all that was read in its cache."""
    if before.map is None or after.map is None or not before.kind == after.kind == "self":
        return False
    same = before.shape[:2] == after.shape[:2] and before.forward < after.forward
    if not same or after.shape[3] - after.shape[2] != before.shape[3]:
        return False
    # a search of several beams reads on elsewhere: sequences of a batch change their places
    earlier, later = (map.parts()[0] for map in (before.map, after.map))
    if not (isinstance(earlier, Scores) and isinstance(later, Scores)):
        return True
    return torch.equal(earlier.k, later.k[:, :, : before.shape[3]].to(earlier.k))


def _reading(
    heads: Heads,
    runs: dict[str, list[Record]],
    batch: int,
    sequences: int,
    some: list[tuple[str, int]],
    names: tuple[Sequence[str] | None, Sequence[str] | None],
) -> Reading:
    alone = Heads()
    alone.title = heads.title
    if heads.tokens is not None and len(heads.tokens) >= sequences:
        alone.tokens = [heads.tokens[row_of(batch, sequences, len(heads.tokens))]]
    marks: dict[int, Marks] = {}
    for path, layer in zip(heads.paths, heads.values(), strict=True):
        for call in runs[path] or layer.calls[-1:]:
            alone.add(path, _alone(call, row_of(batch, sequences, call.shape[0]), marks), layer.layer)
    chosen: dict[str, list[int]] = {}
    for place, head in some:
        chosen.setdefault(place, []).append(head)
    shown = {
        path: layer
        for path, layer in zip(alone.paths, alone.values(), strict=True)
        if runs[path] and layer.place in chosen
    }
    joined = {path: _joined(layer.calls) for path, layer in shown.items()}
    words = dict(zip(shown, names_in(alone, 0, list(joined.values()), *names), strict=True))
    views = {
        path: _view(layer, chosen[layer.place], _all_names(alone, layer, joined[path], words[path]))
        for path, layer in shown.items()
    }
    places = set(some)
    own = [head for head in alone.all() if (head.path, head.head) in places]
    return Reading(batch, sequences, alone, [views.get(path) for path in alone.paths], own)


def _alone(call: Record, batch: int, marks: dict[int, Marks]) -> Record:
    """Return a call as if it had read this sequence alone."""
    call.measure_patterns()
    _, H, T, S = call.shape
    mine = slice(batch, batch + 1)
    numbers: dict[str, Any] = {
        kind: {name: value[mine] for name, value in getattr(call, kind).items()}
        for kind in ("rows", "counts", "large", "pairs")
    }
    alone = None if call.map is None else call.map.detach().select(batch=batch)
    shared_marks = call.marks
    if shared_marks is not None and id(shared_marks) not in marks:
        every = (shared_marks.ids, shared_marks.special, shared_marks.punctuation, shared_marks.unknown)
        ids, *flags = (None if x is None else x[mine] for x in every)
        assert ids is not None
        marks[id(shared_marks)] = Marks(ids, *flags)
    own = None if shared_marks is None else marks[id(shared_marks)]
    return replace(call, shape=(1, H, T, S), map=alone, marks=own, **numbers)


def _joined(calls: Sequence[Record]) -> Record:
    """Return calls that continue each other as one call without a map."""
    last = calls[-1]
    queries = sum(call.shape[2] for call in calls)
    return replace(last, shape=(1, last.shape[1], queries, last.shape[3]), map=None)


def _view(layer: LayerHeads, heads: list[int], names: Names) -> View:
    calls = layer.calls
    S = calls[-1].shape[3]
    real = torch.ones(S, dtype=torch.bool)
    if calls[-1].map is not None:
        real = calls[-1].map.real_keys[0].cpu()
    parts = [_real_queries(call, real) for call in calls]
    counted = torch.cat(parts)
    if not bool(counted.any()) or not bool(real.any()):  # padding alone: nothing would be left
        counted, real = torch.ones_like(counted), torch.ones_like(real)
    steps = None
    if len(calls) > 1:
        ends = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
        steps = [int(counted[:end].sum()) for end in ends]
    queries, keys = (each.nonzero().flatten() for each in (counted, real))
    left_out = max(len(real) - len(keys), len(counted) - len(queries))
    short = {name: plain(name, LONGEST) for name in {name for each in names if each for name in each}}
    own = tuple(
        None if each is None else [short[each[at]] for at in places.tolist()]
        for each, places in zip(names, (queries, keys), strict=True)
    )
    return View(calls, heads, queries, keys, left_out, (own[0], own[1]), steps)


def _real_queries(call: Record, real: Tensor) -> Tensor:
    """Return which queries of a call are no padding, bool [T]; `real`: the same of all keys."""
    T, S = call.shape[2:]
    counted = None if call.map is None else call.map.mask.counted(T)
    mine = torch.ones(T, dtype=torch.bool) if counted is None else counted[0].cpu()
    if call.kind == "self" and T <= S:
        mine = mine & real[S - T : S]
    return mine


def _all_names(heads: Heads, layer: LayerHeads, joined: Record, names: Names) -> Names:
    """Return the names of all queries and keys; tokens after the known beginning of a text get numbers."""
    queries, keys = names
    _, _, T, S = joined.shape
    if joined.kind != "self" or T > S or (queries is not None and keys is not None):
        return names
    read = heads.words(joined)
    if keys is None and read is None and len(layer.calls) > 1 and heads.tokens is not None:
        first = layer.calls[0]
        started = heads.words(first)
        if len(heads.tokens[0]) == S != first.shape[3]:  # set by whoever generated
            read = heads.tokens[0]
        elif started is not None:
            read = [*readable(started), *(f"+{number}" for number in range(1, S - len(started) + 1))]
    keys = keys if keys is not None or read is None else readable(read)
    if queries is None and keys is not None:
        queries = keys[S - T :]
    return queries, keys


def flips(sources: list[list[Reading]], side: int) -> list[dict[str, Any]]:
    """Compare the first reading token by token with each other of the same model, up to 8 of them."""
    everyone = [((s, r), each) for s, some in enumerate(sources) for r, each in enumerate(some)]
    (first, before), *others = everyone
    compared: list[dict[str, Any]] = []
    for place, after in others:
        if len(compared) == MOST_FLIPS:
            break
        if not (_comparable(before, side) and _comparable(after, side)):
            continue
        try:
            flip = _flip(before, after)
        except ArgumentError:  # another model, or texts that have nothing in common: there is no flip
            continue
        if flip is not None:
            compared.append({"before": first, "after": place} | flip)
    return compared


def _comparable(reading: Reading, side: int) -> bool:
    return all(
        len(view.calls) == 1 and view.calls[0].map is not None and view.is_exact(side)
        for view in reading.layers
        if view is not None
    )


def _flip(before: Reading, after: Reading) -> dict[str, Any] | None:
    changes = before.heads.changes(after.heads)
    layers: list[dict[str, Any] | None] = []
    differs = False
    for path, mine, theirs in zip(changes.layers, before.layers, after.layers, strict=True):
        compared = changes.layers[path]
        differs |= any(any(each.changed) or each.by_position for each in (compared.queries, compared.keys))
        if mine is None or theirs is None:
            layers.append(None)
            continue
        queries = _line(compared.queries, mine.queries, theirs.queries)
        layers.append({"queries": queries, "keys": _line(compared.keys, mine.keys, theirs.keys)})
    if not differs:
        return None
    places, shown = before.places, before.numbers
    moved = [change for change in changes if (places[change.path], change.head) in shown]
    words = tuple(plain(each, 120) for each in changes.text.words)
    heads = [_moved(change, places[change.path], before, after) for change in moved]
    return {"words": words, "layers": layers, "heads": heads}


def _moved(change: Change, layer: int, before: Reading, after: Reading) -> dict[str, Any]:
    views = before.layers[layer], after.layers[layer]
    places: list[int] | None = None
    if change.places is not None and None not in views:
        shown_queries = [view.queries.tolist() for view in views if view is not None]
        if all(place in queries for place, queries in zip(change.places, shown_queries, strict=True)):
            places = [
                queries.index(place) for place, queries in zip(change.places, shown_queries, strict=True)
            ]
    return {
        "layer": layer,
        "head": change.head,
        "distance": rounded(change.distance, DIGITS),
        "largest": rounded(change.largest, DIGITS),
        "token": plain(change.token, 60),
        "places": places,
    }


def _line(alignment: Alignment, before: Tensor, after: Tensor) -> list[dict[str, Any]]:
    """Return both texts as one line of tokens; positions are counted without padding."""
    own = [{at: number for number, at in enumerate(real.tolist())} for real in (before, after)]
    return [
        {
            "before": None if mine is None else own[0].get(mine),
            "after": None if theirs is None else own[1].get(theirs),
            "name": plain(name, 60),
            "changed": changed,
        }
        for (mine, theirs), name, changed in zip(
            alignment.places, alignment.names, alignment.changed, strict=True
        )
    ]


FINER, PAIRS, FINER_HEADS = 512, 64, 8
LEAST = 1e-30  # a weight that is 0 and not hidden, as the page's smallest level
BLOCK = 4096  # queries per step of the search for the top keys
CELLS_AT_ONCE = 2**24  # weights of a region that are in memory

Finer = list[tuple[str, int]]  # by path and head
Texts = dict[tuple[str, ...], int]  # lists of tokens, each once, and its number


def call_sizes(view: View, side: int, texts: Texts) -> dict[str, Any]:
    """Return what a page knows of a call without its maps: sizes, tokens and steps of generation."""
    (T, S), (rows, columns) = view.lengths, view.size(side)
    return {
        "queries": T,
        "keys": S,
        "rows": rows,
        "columns": columns,
        "query_tokens": _number(view.names[0], texts),
        "key_tokens": _number(view.names[1], texts),
        "left_out": view.left_out,
        "steps": view.steps,
    }


def call_data(
    view: View,
    layer: LayerHeads,
    side: int,
    blobs: Blobs,
    texts: Texts,
    *,
    finer: Sequence[int] = (),
    outputs: Tensor | None = None,
) -> dict[str, Any]:
    """Return the data of one call of a layer: `CallData` of page_data.ts.

    Args:
        finer: heads to zoom into, where the map is not exact.
        outputs: of the heads before W_O, [1, H, T, D] of the call.
    """
    T, S = view.lengths
    rows, columns = view.size(side)
    exact = (rows, columns) == (T, S)
    maps = _packed(view, cells_of(view, view.heads, rows, columns), blobs)
    norms, written, most = _written(view, rows, columns, exact, blobs)
    zoomed = {} if exact else {head: _finer(view, layer, head, blobs) for head in finer if head in view.heads}
    head_outputs = (
        None if outputs is None or not exact else outputs_of_queries(view, layer, outputs)
    )  # [H, T, D]
    return (
        call_sizes(view, side, texts)
        | {
            "maps": maps,
            "norms": norms,
            "written": written,
            "written_most": most,
            "finer": {str(head): cells for head, cells in zoomed.items()},
            "pairs": {str(head): strongest_pairs(view, head) for head in zoomed},
            "outputs": None
            if head_outputs is None
            else {"width": head_outputs.shape[2], "data": blobs.pack(as_bytes(head_outputs.half()))},
        }
        | distances_of(view, layer, head_outputs)
    )


def _packed(view: View, cells: Tensor, blobs: Blobs) -> list[Blob | None]:
    """Return the packed cells of each head, or None for heads that are not shown."""
    shown = {head: blobs.pack(own) for head, own in zip(view.heads, levels_of_heads(cells), strict=True)}
    return [shown.get(head) for head in range(view.calls[-1].shape[1])]


def _number(names: list[str] | None, texts: Texts) -> int | None:
    return None if names is None else texts.setdefault(tuple(names), len(texts))


def cells_of(view: View, heads: list[int], rows: int, columns: int) -> Tensor:
    """Return the cells of a view, [h, rows, columns]: weights, or a query's weight in a cell."""
    T, S = view.lengths
    call, made = view.calls[-1], view.calls[-1].pooled
    if view.whole and (rows, columns) != (T, S):
        if made is None or (call.map is not None and made.shape[2:] != (rows, columns)):
            return _from_map(view, heads, rows, columns)
        mass = summed(summed(made[0][heads].float().cpu(), 1, rows), 2, columns)
        return mass / summed(queries_pooled(call, 0), 0, rows).clamp(min=1)[:, None]
    if call.map is None:
        return view.picture[heads].float().cpu()
    return _in_blocks(view, heads, rows, columns)


def _from_map(view: View, heads: list[int], rows: int, columns: int) -> Tensor:
    """Return the cells of a view from its map, pooled."""
    if not view.whole:
        return _in_blocks(view, heads, rows, columns)
    map = view.calls[0].map
    assert map is not None
    mass = map.select(heads=heads).pooled((rows, columns))[0].float().cpu()
    return mass / summed(torch.ones(view.lengths[0]), 0, rows)[:, None]


def _in_blocks(
    view: View, heads: list[int], rows: int, columns: int, factors: Tensor | None = None
) -> Tensor:
    """Return the cells of a view, computed in blocks of queries; `factors` [h, S] multiply the weights."""
    T = view.lengths[0]
    row = torch.arange(T) * rows // T
    cells = torch.zeros(len(heads), rows, columns)
    for some, p in _blocks(view, heads):
        shares = p if factors is None else p * factors[:, None]
        cells.index_add_(1, row[some], summed(shares, 2, columns))
    return cells / torch.bincount(row, minlength=rows)[:, None]


def _blocks(view: View, heads: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield blocks of (queries, counted without padding, int [t]; their weights [h, t, S])."""
    end = int(view.keys[-1]) + 1 if len(view.keys) else 0
    for whole, queries, done in _steps(view):
        _, H, T, S = whole.shape
        map = whole if heads == list(range(H)) else whole.select(heads=heads)
        for some, p in weights_in_blocks(map, queries):
            weights = p[0].float().cpu()
            nothing = weights == 0
            if bool(nothing.any()):  # too little for a number, which is not hidden
                part = map if len(some) == T else map.select(queries=some)
                weights = weights.masked_fill(nothing & _visible(part), LEAST)
            if end > S:  # what was not there yet
                weights = torch.nn.functional.pad(weights, (0, end - S))
            yield torch.arange(done, done + len(some)), weights[..., view.keys]
            done += len(some)


def _steps(view: View) -> Iterator[tuple[AttentionMap, Tensor, int]]:
    """Yield each call's map, its queries without padding, int [t], and the number of queries before it."""
    start = done = 0
    for call in view.calls:
        assert call.map is not None, "of a call without a map there is the picture"
        end = start + call.shape[2]
        queries = view.queries[(view.queries >= start) & (view.queries < end)] - start
        yield call.map, queries, done
        start, done = end, done + len(queries)


def _visible(map: AttentionMap) -> Tensor:
    """Return where the mask hides nothing, bool [h, T, S]; False everywhere for given weights."""
    scores = map.parts()[0]
    (_, H, T, S), everyone = map.shape, slice(0, map.shape[2])
    if not isinstance(scores, Scores):
        return torch.zeros(H, T, S, dtype=torch.bool)
    visible = torch.ones(1, H, T, S, dtype=torch.bool, device=map.device)
    allowed = scores.mask.tile(scores.at(everyone), everyone, slice(0, S), S)
    if allowed is not None:
        visible = visible & allowed
    if map.bias is not None:  # masks that are added
        visible = visible & (hidden_is_endless(map.bias.detach()) > HIDDEN / 2)
    return visible[0].cpu()


def norms_of(view: View) -> tuple[Tensor, float] | None:
    """Return the norms ‖v W_O‖ of all heads, [H, S], and the largest; None if they were not measured."""
    call = view.calls[-1]
    if call.written_norms is None or call.map is None:
        return None
    norms = call.written_norms[0].float()[:, view.keys]
    most = float(norms.max())
    return (norms, most) if math.isfinite(most) else None


def written_cells(view: View, heads: list[int], rows: int, columns: int) -> Tensor | None:
    """Return weight × norm as shares of the largest norm, [h, rows, columns]; None if not measured."""
    measured = norms_of(view)
    if measured is None:
        return None
    norms, most = measured
    return _in_blocks(view, heads, rows, columns, norms[heads] / (most or 1.0))


def _written(
    view: View, rows: int, columns: int, exact: bool, blobs: Blobs
) -> tuple[Blob | None, list[Blob | None] | None, float | None]:
    """Return norms ‖v W_O‖; pooled maps of weight × norm; the largest norm."""
    measured = norms_of(view)
    if measured is None:
        return None, None, None
    norms, most = measured
    if exact:
        return blobs.pack(as_bytes(norms)), None, rounded(most, DIGITS)
    cells = written_cells(view, view.heads, rows, columns)
    assert cells is not None
    return None, _packed(view, cells, blobs), rounded(most, DIGITS)


def region_cells(view: View, head: int, queries: slice, keys: slice, side: int) -> Tensor:
    """Return a part of one head's map in at most `side` x `side` cells, [rows, columns].

    A cell is a query and a key, or the share of a query's weight on its keys, averaged over its queries.

    Args:
        view: of one call that kept its map.
        queries: positions without padding; `keys` likewise.
    """
    map = view.calls[0].map
    assert map is not None and len(view.calls) == 1, "a region is read from a single call with a map"
    query_places, key_places = view.queries[queries], view.keys[keys]
    T, S = len(query_places), len(key_places)
    rows, columns = min(T, side), min(S, side)
    row = (torch.arange(T) * rows // T).to(map.device)
    own = map.select(heads=[head])
    part = own.select(keys=key_places)
    cells = torch.zeros(rows, columns, device=map.device)
    start = 0
    for places in query_places.split(max(1, CELLS_AT_ONCE // map.shape[3])):
        weights = torch.cat([p[0, 0] for _, p in weights_in_blocks(part, places)]).float()  # [t, S]
        nothing = weights == 0
        if bool(nothing.any()):  # too little for a number, which is not hidden
            visible = _visible(own.select(queries=places))[0][:, key_places].to(weights.device)
            weights = weights.masked_fill(nothing & visible, LEAST)
        cells.index_add_(0, row[start : start + len(places)], summed(weights, 1, columns))
        start += len(places)
    return (cells / torch.bincount(row, minlength=rows)[:, None]).cpu()


def check_finer(heads: Heads, finer: Sequence[tuple[Layer, int]] | None) -> Finer | None:
    """Return the heads to zoom into, by path and number, or raise `ArgumentError` if one does not exist."""
    if finer is None:
        return None
    if isinstance(finer, Sequence) and not isinstance(finer, str) and not finer:
        return []
    try:
        return [(head.path, head.head) for head in heads.chosen(finer)]
    except ArgumentError as error:
        raise ArgumentError(str(error).replace("chosen", "finer", 1)) from None


def maps_in(reading: Reading) -> dict[str, View]:
    """Return the layers whose maps were kept, by place."""
    return {
        layer.place: view
        for layer, view in zip(reading.heads.values(), reading.layers, strict=True)
        if view is not None and view.calls[-1].map is not None
    }


def strongest_of_labels(reading: Reading, side: int) -> Finer:
    """Return the strongest head of each label among pooled maps, at most 8."""
    maps = [place for place, view in maps_in(reading).items() if not view.is_exact(side)]
    by_label: dict[str, Head] = {}
    for head in sorted(reading.shown, key=lambda head: head.label.strength, reverse=True):
        if head.path in maps:
            by_label.setdefault(head.label.name, head)
    places = [(head.path, head.head) for head in by_label.values()][:FINER_HEADS]
    return sorted(places, key=lambda each: (maps.index(each[0]), each[1]))


def _finer(view: View, layer: LayerHeads, head: int, blobs: Blobs) -> dict[str, Any]:
    if view.calls[-1].map is None:
        raise ArgumentError(
            f"finer must name heads with kept maps: {path_in_words(layer.path)} was called with "
            f"{list(view.calls[-1].shape)} and kept no map; use watch(model, keep=True)"
        )
    rows, columns = (min(FINER, length) for length in view.lengths)
    cells = _from_map(view, [head], rows, columns)
    return {"rows": rows, "columns": columns, "map": blobs.pack(levels(cells))}


def strongest_pairs(view: View, head: int) -> list[tuple[int, int, float | None]]:
    """Return the strongest pairs: (query, key, weight)."""
    place = torch.full((int(view.keys[-1]) + 1,), -1).index_put((view.keys,), torch.arange(len(view.keys)))
    best = torch.empty(0), torch.empty(0, 2, dtype=torch.long)
    for map, mine, done in _steps(view):
        for some in mine.split(BLOCK):
            top = map.select(heads=[head], queries=some).top(min(PAIRS, map.shape[3]))
            values, keys = top[0][0, 0].float().cpu(), top[1][0, 0].cpu()  # [t, n]
            queries = torch.arange(done, done + len(some))[:, None].expand_as(keys)
            valid = (values > 0) & (keys < len(place))
            places = torch.stack([queries[valid], place[keys[valid]]], -1)
            both = torch.cat([best[0], values[valid]]), torch.cat([best[1], places])
            order = both[0].sort(descending=True, stable=True).indices[:PAIRS]
            best = both[0][order], both[1][order]
            done += len(some)
    rows = zip(best[1].tolist(), best[0].tolist(), strict=True)
    return [(query, key, rounded(weight, DIGITS)) for (query, key), weight in rows if key >= 0]


def outputs_of_queries(view: View, layer: LayerHeads, outputs: Tensor) -> Tensor:
    H, T = view.calls[-1].shape[1:3]
    if len(view.calls) > 1 or tuple(outputs.shape[1:3]) != (H, T):
        steps = f" in {len(view.calls)} steps" * (len(view.calls) > 1)
        raise ShapeError(
            f"outputs must come from the watched run: got [1, H, T, D] = {list(outputs.shape)} in "
            f"{path_in_words(layer.path)}, where {H} heads read "
            f"{sum(call.shape[2] for call in view.calls)} queries{steps}; enter watch and collect in the "
            "same `with` block"
        )
    return outputs[0].float().cpu()[:, view.queries]


def distances_of(
    view: View, layer: LayerHeads, head_outputs: Tensor | None
) -> dict[str, list[list[float | None]] | None]:
    """Return the Jensen-Shannon divergences between a layer's heads, and the cosines of their outputs."""
    H = view.calls[-1].shape[1]
    return {
        "distances": _matrix(attention_between(layer)) if H > 1 else None,
        "cosines": _cosines(view, head_outputs) if H > 1 else None,
    }


def _cosines(view: View, head_outputs: Tensor | None) -> list[list[float | None]] | None:
    measured = view.calls[-1].pairs.get("outputs")
    if measured is None and head_outputs is not None:
        measured = similarity(head_outputs[None])
    return None if measured is None else _matrix(measured[0])


def _matrix(numbers: Tensor | None) -> list[list[float | None]] | None:
    return (
        None
        if numbers is None
        else [[None if math.isnan(x) else round(x, 4) for x in row] for row in numbers.tolist()]
    )
