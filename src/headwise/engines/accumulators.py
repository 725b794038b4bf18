"""Accumulators: the sums over each query's keys that statistics are made of, collected tile by tile.

A walk passes every tile of a block of queries once; an accumulator takes its share of each. Those that need
only the keys near a query, or the first one, look there alone where nothing else needs the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..scoring import HIDDEN
from .scores import Tiled
from .walk import Block, Tile

__all__ = ["ACCUMULATORS", "NEAR_ROWS", "Accumulator", "Sums", "sums_of"]

NEAR_ROWS = 64  # queries a block when only keys near the diagonal matter

Sums = Mapping[str, Tensor]  # accumulator -> [B, H, t]


@dataclass(frozen=True)
class Accumulator:
    """A sum (or maximum) over the keys of each query, collected from tiles.

    where: which keys it needs: "all", "near" the query, or the "first" one.
    of: a tile's share, [B, H, t], from the tile and the `reach` that was asked for (of `local`).
    largest: the largest share instead of their sum.
    away: of "near", how far from the query the farthest key is that it looks at; None: `reach`.
    """

    where: str
    of: Callable[[Tile, int], Tensor]
    largest: bool = False
    away: int | None = 1


def _near(tile: Tile, low: int, high: int) -> Tensor:
    """The weight of the keys that are `low` to `high` ahead of each query; 0 where there is none."""
    p, at, count = tile.p, tile.block.at - tile.columns.start, tile.p.shape[-1]
    if 2 * (high + 1 - low) > count:  # most of the tile
        offset = torch.arange(count, device=at.device) - at[:, None]  # [t, s]
        return torch.linalg.vecdot(p, ((offset >= low) & (offset <= high)).to(p.dtype))
    spots = at[:, None] + torch.arange(low, high + 1, device=at.device)
    index = spots.clamp(0, count - 1)  # [t, high + 1 - low]
    picked = p.gather(-1, index.expand(*p.shape[:2], *index.shape))
    return torch.linalg.vecdot(picked, (index == spots).to(p.dtype))


def _distance(tile: Tile, reach: int) -> Tensor:
    """Of keys behind all queries, or ahead of all: two small products, not one as large as the tile."""
    p, at, start, stop = tile.p, tile.block.at, tile.columns.start, tile.columns.stop
    first, last = tile.block.scores.ends(tile.block.rows)
    keys = torch.arange(start, stop, device=at.device)
    behind = min(max(first + 1, start), stop) - start
    ahead = max(min(last, stop) - start, behind)  # of one query the own key is behind: either way 0
    total = torch.zeros_like(p[..., 0])
    if behind:
        part = p[..., :behind]
        total += part @ (first - keys[:behind]).to(p.dtype) + part.sum(-1) * (at - first)
    if behind < ahead:
        away = (at[:, None] - keys[behind:ahead]).abs().to(p.dtype)
        total += torch.linalg.vecdot(p[..., behind:ahead], away)
    if ahead < stop - start:
        part = p[..., ahead:]
        total += part @ (keys[ahead:] - last).to(p.dtype) + part.sum(-1) * (last - at)
    return total


ACCUMULATORS: dict[str, Accumulator] = {
    "mass": Accumulator("all", lambda tile, reach: tile.p.sum(-1)),
    "surprise": Accumulator("all", lambda tile, reach: -torch.linalg.vecdot(tile.p, tile.log_p)),
    "peak": Accumulator("all", lambda tile, reach: tile.log_p.amax(-1), largest=True),
    "distance": Accumulator("all", _distance),
    "first": Accumulator("first", lambda tile, reach: tile.p.sum(-1)),
    "previous": Accumulator("near", lambda tile, reach: _near(tile, -1, -1)),
    "itself": Accumulator("near", lambda tile, reach: _near(tile, 0, 0)),
    "next": Accumulator("near", lambda tile, reach: _near(tile, 1, 1)),
    "local": Accumulator("near", lambda tile, reach: _near(tile, -reach, reach), away=None),
}


def sums_of(
    block: Block,
    needed: set[str],
    reach: int,
    everywhere: bool,
    received: Tensor | None,
    draw: Callable[[Tile], None] | None = None,
    first: slice | None = None,
) -> dict[str, Tensor]:
    """What a block of queries comes to, by accumulator: [B, H, t] each.

    Args:
        everywhere: all keys are walked; otherwise only those near the queries and the first.
        received: where what each key receives is added up, [B, H, S], if anywhere.
        draw: what else is told of every tile, where all keys are walked.
        first: where the first real key is, if it is not for the mask to say: these may not be all keys.
    """
    sums: dict[str, Tensor] = {}
    dtype = block.scores.dtype
    for name in needed:
        start = HIDDEN if ACCUMULATORS[name].largest else 0.0
        sums[name] = torch.full_like(block.lse, start, dtype=dtype)

    def gather(tile: Tile, where: str) -> None:
        for name in needed:
            accumulator = ACCUMULATORS[name]
            if accumulator.where == where:
                share = accumulator.of(tile, reach)
                combine = torch.maximum if accumulator.largest else torch.add
                sums[name] = combine(sums[name], share)

    wanted = {ACCUMULATORS[name].where for name in needed}
    chosen: dict[str, slice] = {}
    if "near" in wanted:
        chosen["near"] = _around(block, needed, reach)
    if "first" in wanted:
        chosen["first"] = _first_key(block.scores) if first is None else first
    if everywhere or block.is_rough:
        # Of rough rows everything is taken from one and the same product, the tiles of the walk; where those
        # are made anyway, nothing is made twice.
        counted = block.counted()
        for tile in block.tiles():
            gather(tile, "all")
            if draw is not None:
                draw(tile)
            if received is not None:
                p = tile.p if counted is None else tile.p * counted[..., None]
                received[..., tile.columns] += p.sum(-2)
            for where, keys in chosen.items():
                if tile.columns.start < keys.stop and keys.start < tile.columns.stop:
                    gather(tile.part(keys), where)
    else:
        for where, keys in chosen.items():
            if keys.start < keys.stop:
                gather(block.tile(keys), where)
    return sums


def _around(block: Block, needed: set[str], reach: int) -> slice:
    """The keys that any of these may look for near the queries; none where all queries stand outside."""
    first_at, last_at = block.scores.ends(block.rows)
    around = 1
    for name in needed:
        away = ACCUMULATORS[name].away
        around = max(around, reach if away is None else away)
    start = max(0, first_at - around)
    return slice(start, max(start, min(block.scores.shape[3], last_at + around + 1)))


def _first_key(scores: Tiled) -> slice:
    """The first real key of a piece: key 0, unless padding says otherwise."""
    keys = scores.mask.keys
    if keys is None or keys.ndim == 1:
        return slice(0, 1)
    first = int(keys[0].int().argmax())
    return slice(first, first + 1)
