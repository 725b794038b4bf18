"""The second pass of a sequence over a group of ranks: keys are passed round, each rank reduces its rows.

Given the lse of a full row, its sums over all keys are the sums over blocks of keys, added up. So tiles and
accumulators are those of one process, one rectangle after the other. Statistics of queries (entropy,
distance, ..) stay on their rank; those of keys (`received`) are passed round with the keys. Means are summed
over ranks together with the numbers of queries. Every result is of the full sequence, on every rank.

Letters: B batch, H num_heads, T query_len, S key_len; t, s this rank's of T, S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..engines.scores import Piece, own_precision
from ..engines.second_pass import Top, drawing
from ..engines.statistics import ACCUMULATORS, PICTURE, RECEIVED, ROW_STATISTICS, counted, sums_of
from ..engines.walk import ROUGH, Anchor, Block, walk
from ..masks import Mask
from ..scoring import HIDDEN
from .ring_attention import Merged, Part, Shard
from .sequence import RingSums, joined

SLACK = 2.0**-5  # a row whose weights miss the sum 1 by more than this was changed


@dataclass(frozen=True, eq=False)
class Measuring:
    """One rank's rows, whose weights are reduced."""

    shard: Shard
    lse: Tensor  # [B, H, t]
    anchor: Anchor

    @classmethod
    def of(cls, shard: Shard, lse: Tensor, error: BaseException | None = None) -> Measuring:
        """Return this rank's rows, or raise on all ranks; see `Ring.agree`.

        If the lse is too large to be exact on some rank, all ranks compute it again from tiles.
        """
        finite = lse.masked_fill(torch.isneginf(lse), 0)
        largest = 0.0 if lse.dtype == torch.float64 else float(finite.abs().max())
        largest_of_ranks = shard.ring.agree([largest], error, lse.device)
        if not any(number > ROUGH for (number,) in largest_of_ranks):
            return cls(shard, lse, (finite, torch.zeros_like(finite)))
        merged = Merged.empty(shard.q, None)
        with own_precision(lse.device):
            for owner, block in shard.ring.blocks(shard.k, sizes=shard.key_sizes):
                merged.add_parts(shard.parts(owner, block[0], placed=True))
        if shard.scoring.sinks is not None:
            merged.add_sinks(shard.scoring.sinks)
        return cls(shard, lse, merged.anchor)

    def blocks(self, part: Part, one_by_one: bool = False) -> Iterator[tuple[Block, tuple[slice, ...]]]:
        """Yield the blocks of a rectangle, each with its place among this rank's rows, [B, H, t]."""
        rows = part.rows
        high, low = (x[:, :, rows] for x in self.anchor)
        for block in walk(part.scores, self.lse[:, :, rows], one_by_one, anchor=(high, low)):
            batch, heads, inside = block.where
            yield block, (batch, heads, slice(rows.start + inside.start, rows.start + inside.stop))

    def full_rows(self) -> Block:
        """Return all rows of this rank as one block without tiles, for formulas over sums."""
        mine = self.shard.mine
        B, H, t, _ = mine.shape
        everything = Piece(slice(0, B), slice(0, H), slice(0, H), t, 1)
        return Block(mine, everything, slice(0, t), self.lse, anchor=self.anchor)

    def over_queries(self, x: Tensor) -> Tensor:
        """Gather [B, H, t, ..] of every rank into [B, H, T, ..]."""
        return joined(x, self.shard.ring, self.shard.queries, 2)

    def of_heads(
        self, rows: dict[str, Tensor], mean_of: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Reduce [B, H, t] to [B, H]: the mean, or the largest, over the queries of all ranks that count.

        mean_of: which queries count, by name; default: those of the statistic of that name.
        """
        means, largest = {}, {}
        for name, values in rows.items():
            counts = counted(name, self.shard.mine, self.lse) if mean_of is None else mean_of[name]
            if name in ROW_STATISTICS and ROW_STATISTICS[name].largest:
                largest[name] = values.masked_fill(~counts, -torch.inf).amax(-1)
            else:
                sums = values.masked_fill(~counts, 0).double().sum(-1)
                means[name] = torch.stack([sums, counts.double().sum(-1)])
        results: dict[str, Tensor] = {}
        ring, dtype = self.shard.ring, self.lse.dtype
        if means:
            sums, counts = ring.add_up(torch.stack(list(means.values()), 1))  # [statistics, B, H] each
            results |= dict(zip(means, (sums / counts).to(dtype).unbind(), strict=True))
        if largest:
            # NaN must win, unlike in the maximum of some backends
            stacked = torch.stack(list(largest.values()))
            unknown = stacked.isnan()
            highest, spoiled = ring.largest(
                torch.stack([stacked.masked_fill(unknown, -torch.inf), unknown.to(dtype)])
            )
            results |= dict(zip(largest, highest.masked_fill(spoiled > 0, torch.nan).unbind(), strict=True))
        return {name: results[name] for name in rows}


@torch.no_grad()
def measure(
    measuring: Measuring, names: tuple[str, ...], per_query: bool, reach: int, cells: tuple[int, int] | None
) -> dict[str, Tensor]:
    """Return statistics by name, as `engines.second_pass.measured` does; the pooled map comes last."""
    shard, lse = measuring.shard, measuring.lse
    B, H, _, _ = shard.shape
    rows = [name for name in names if name != RECEIVED]
    needed = {part for name in rows for part in ROW_STATISTICS[name].needs} | {"mass"}
    sums = {n: torch.full_like(lse, HIDDEN if ACCUMULATORS[n].largest else 0.0) for n in needed}
    picture = None if cells is None else lse.new_zeros(B, H, *cells)
    ragged = "first" in needed and shard.mask.keys is not None and shard.mask.keys.ndim == 2
    firsts = _first_keys(shard.mask, B) if "first" in needed else [0] * B
    received: RingSums | None = None  # the weights that keys receive
    if RECEIVED in names:
        sizes = shard.key_sizes
        received = RingSums(shard.ring, lambda owner: lse.new_zeros(B, H, sizes[owner]))

    def look(part: Part, block: Block, place: tuple[slice, ...]) -> None:
        room = None
        if received is not None:
            room = received.current[block.piece.batch, block.piece.heads, part.columns]
        draw = None if picture is None else drawing(block, picture, part.frame)
        first = _inside(firsts[block.piece.batch.start], part)
        for name, share in sums_of(block, needed, reach, True, room, draw, first).items():
            combine = torch.maximum if ACCUMULATORS[name].largest else torch.add
            sums[name][place] = combine(sums[name][place], share)

    _walked(measuring, shard, look, ragged, None if received is None else received.pass_on)
    block = measuring.full_rows()
    off = (block.with_sink(sums["mass"]) - 1).abs() > SLACK
    off &= ~torch.isneginf(lse)
    spoiled = torch.where(off.any(), torch.nan, 0.0).to(
        lse
    )  # NaN instead of an error, as on a GPU, where values are not read
    values = {name: ROW_STATISTICS[name].of(block, sums).masked_fill(off, torch.nan) for name in rows}
    if per_query:
        values = {name: measuring.over_queries(value) for name, value in values.items()}
    else:
        values = measuring.of_heads(values)
    if received is not None:
        values[RECEIVED] = joined(received.result() + spoiled, shard.ring, shard.keys, 2)
    if picture is not None:
        values[PICTURE] = shard.ring.add_up(picture + spoiled)
    return {name: values[name] for name in (*names, PICTURE) if name in values}


def _first_keys(mask: Mask, batch: int) -> list[int]:
    """Return the first key of each sequence that is not padding."""
    if mask.keys is None or mask.keys.ndim == 1:
        return [0] * batch
    return [int(first) for first in mask.keys.int().argmax(-1).tolist()]


def _inside(key: int, part: Part) -> slice:
    """Return the column of a key in a rectangle as a slice, empty if the key is not in it."""
    column = key - part.frame.first_key
    return slice(column, column + 1) if 0 <= column < part.scores.shape[3] else slice(0, 0)


def _walked(
    measuring: Measuring,
    shard: Shard,
    look: Callable[[Part, Block, tuple[slice, ...]], None],
    one_by_one: bool = False,
    done: Callable[[], None] | None = None,
) -> None:
    """Call `look` for every block of every rectangle, and `done` after the keys of each rank."""

    def visit(owner: int, k: Tensor) -> None:
        for part in shard.parts(owner, k, placed=True):
            for block, place in measuring.blocks(part, one_by_one):
                look(part, block, place)

    with own_precision(measuring.lse.device):
        for owner, block in shard.ring.blocks(shard.k, sizes=shard.key_sizes):
            visit(owner, *block)
            if done is not None:
                done()


@torch.no_grad()
def mass(measuring: Measuring, on: Mask, per_query: bool) -> Tensor:
    """Return the weight on the keys that `on` allows, [B, H] or [B, H, T]; on: bound, of the full call."""
    shard = replace(measuring.shard, mask=measuring.shard.mask & on)
    values = torch.zeros_like(measuring.lse)

    def look(part: Part, block: Block, place: tuple[slice, ...]) -> None:
        for tile in block.tiles():
            values[place] += tile.p.sum(-1)

    _walked(measuring, shard, look)
    if per_query:
        return measuring.over_queries(values)
    # counted as for `local`; `on` may mark queries as padding
    counts = counted("local", shard.mine, measuring.lse)
    return measuring.of_heads({"mass": values}, {"mass": counts})["mass"]


@torch.no_grad()
def top(measuring: Measuring, count: int) -> Top:
    """Return the heaviest keys of every query and their weights, [B, H, T, count] each."""
    shape = (*measuring.lse.shape, count)
    best = measuring.lse.new_full(shape, HIDDEN)
    keys = torch.full(shape, -1, dtype=torch.int64, device=best.device)

    def look(part: Part, block: Block, place: tuple[slice, ...]) -> None:
        for tile in block.tiles():
            heaviest, at = tile.log_p.topk(min(count, tile.log_p.shape[-1]), dim=-1)
            at = at + (tile.columns.start + part.frame.first_key)
            best[place], order = torch.cat([best[place], heaviest], -1).topk(count, dim=-1)
            keys[place] = torch.cat([keys[place], at], -1).gather(-1, order)

    _walked(measuring, measuring.shard, look)
    keys.masked_fill_(best <= HIDDEN / 2, -1)
    return Top(measuring.over_queries(best.exp()), measuring.over_queries(keys))
