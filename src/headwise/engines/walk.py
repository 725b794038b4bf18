"""Walking the weights: every tile of exp(s - lse), block of queries by block, in linear memory.

The precision of a log-sum-exp is handled here, too. A float32 lse of 300 is rounded by up to 1.5e-5, and
exp(s - lse) is off by as much; one of 1e9 by 32. So where some row's lse is ROUGH, its block is walked twice:
first for each row's largest score and the sum of the rest, as softmax does it; exp(s - largest - log sum) is
as exact.

So is whether an lse is that of its row. A map stores q, k and a dense mask themselves, not copies. If they
were overwritten without a version count, the lse is no longer that of their rows, and the weights have a mass
that differs from 1 by more than rounding. Then an error is raised; the mass is never divided away.

Weights computed elsewhere are walked as scores, too (`GivenWeights`).

Letters: B batch, H num_heads, T query_len, S key_len, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..indexing import Index, take
from ..mask_rules import can_read
from ..masks import Mask
from ..scoring import HIDDEN
from .scores import Flat, Piece, Scores, Tiled, blocks, mask_from

ROUGH = 16.0  # from here on half a unit in the last place of a float32 is as large as softmax's error
REACH = 2.0**8  # from here on, kernels' merging of parts and their backward are too inexact as well
FAR = 2.0**20  # from here on exp(s - lse) may overflow, so that dividing by its sum comes too late
SLACK = 2.0**-14  # an error in a row's log mass that is not examined
SOME = 8  # queries checked for all where only a few keys of each are read


# A log-sum-exp in two numbers, [B, H, T] each: a score and the logarithm of the rest; 0 and 0 for a row that
# sees nothing. For scores that are a part of their rows, whose other parts are elsewhere.
Anchor = tuple[Tensor, Tensor]


class Tile:
    """Some weights of a block of queries: p [B, H, t, s] and their logarithms."""

    def __init__(self, block: Block, columns: Index, scores: Tensor | None = None) -> None:
        self.block = block
        # indices instead of a slice are used only where nothing reads their positions
        self.columns: slice = columns  # type: ignore[assignment]
        s = block.scores.tile(block.rows, columns) if scores is None else scores
        self.log_p: Tensor = block.log_of(s)  # [B, H, t, s]
        self._p: Tensor | None = None

    def part(self, keys: slice) -> Tile:
        """Return the part of the tile for a slice of keys."""
        start, stop = max(self.columns.start, keys.start), min(self.columns.stop, keys.stop)
        local = slice(start - self.columns.start, stop - self.columns.start)
        new = Tile.__new__(Tile)
        new.block, new.columns = self.block, slice(start, stop)
        new.log_p = self.log_p[..., local]
        new._p = None if self._p is None else self._p[..., local]
        return new

    @property
    def p(self) -> Tensor:
        """The weights, computed on first use."""
        if self._p is None:
            self._p = self.log_p.exp()
        return self._p


class Block:
    """A block of queries of one piece, with its row of tiles."""

    def __init__(
        self,
        scores: Tiled,
        piece: Piece,
        rows: slice,
        lse: Tensor,
        rough: float = ROUGH,
        anchor: Anchor | None = None,
    ) -> None:
        self.scores, self.piece, self.rows = scores, piece, rows  # the scores are the piece's
        self.lse = lse  # [B, H, t]
        # 0 for rows that see nothing: their scores are HIDDEN, so their weights are 0
        self._high = torch.where(torch.isneginf(lse), 0.0, lse)
        self._low: Tensor | None = None  # the rest of lse, where it is stored in two parts
        self.divisor: Tensor | None = None  # what sums over a row are divided by, once computed
        self.at = scores.at(rows)  # the positions of the queries, int [t]
        # With an anchor, scores of one product may not be compared with an lse of another: rounding differs.
        self.is_rough = anchor is None and isinstance(scores, Scores) and is_rough(lse)
        if anchor is not None:
            self._high, self._low = anchor
        if self.is_rough and (rough == ROUGH or is_rough(lse, rough)):
            self._anchor()

    def _anchor(self) -> None:
        """Set lse as the largest score and the logarithm of the rest."""
        top, total, _ = online(self.scores, None, self.rows, self.piece.columns)
        empty = top <= HIDDEN
        check_rows(self.scores, self.rows, self.lse, torch.where(empty, -torch.inf, top + total.log()))
        self._high = torch.where(empty, 0.0, top)
        self._low = torch.where(empty, 0.0, total.log())

    def log_of(self, s: Tensor) -> Tensor:
        """Return the logarithm of the weights for scores, [B, H, t, ..], in place."""
        for part in (self._high, self._low):
            if part is not None:
                s = s.sub_(part[(...,) + (None,) * (s.ndim - part.ndim)])
        return s

    def with_sink(self, mass: Tensor) -> Tensor:
        """Return the sum of each row's weights, [B, H, t], including the sink's."""
        log_sunk = self.log_of_sinks()
        if log_sunk is None:
            return mass
        return mass + torch.where(torch.isneginf(self.lse), 0.0, log_sunk.exp())

    def log_of_sinks(self) -> Tensor | None:
        """Return the logarithm of the sink's weight, [B, H, t]; None: there is no sink."""
        sinks = self.scores.sinks
        if sinks is None:
            return None
        return self.log_of(sinks.to(self._high.dtype)[:, None].expand_as(self._high).clone())

    @property
    def where(self) -> tuple[slice, slice, slice]:
        """The index of this block in a result [B, H, T, ...] of the whole request."""
        return self.piece.batch, self.piece.heads, self.rows

    def tile(self, columns: Index) -> Tile:
        return Tile(self, columns)

    def tiles(self) -> Iterator[Tile]:
        """Yield every tile in which this block of queries can see a key."""
        for columns in blocks(*self.scores.span(self.rows), self.piece.columns):
            yield Tile(self, columns)

    def counted(self) -> Tensor | None:
        """Return which of these queries count in means, bool [B, 1, t]; None: all."""
        real = self.scores.mask.counted(self.scores.shape[2])
        return None if real is None else real[:, None, self.rows]


def walk(
    scores: Tiled,
    lse: Tensor,
    one_by_one: bool = False,
    rows: int | None = None,
    rough: float = ROUGH,
    anchor: Anchor | None = None,
) -> Iterator[Block]:
    """Yield every block of queries of every piece.

    Args:
        one_by_one: never two sequences in one piece.
        rows: queries a block; by default what suits the device.
        rough: how large an lse may be; FAR where what is made of the weights is divided by their sum anyway.
        anchor: lse more exactly, where these are not all keys, so that it cannot be recomputed here.
    """
    for piece in scores.pieces(one_by_one):
        mine, their_lse = scores.piece(piece), lse[piece.batch, piece.heads]
        for block in blocks(0, scores.shape[2], rows or piece.rows):
            block_anchor = None
            if anchor is not None:
                high, low = anchor
                index = (piece.batch, piece.heads, block)
                block_anchor = high[index], low[index]
            yield Block(mine, piece, block, their_lse[:, :, block], rough, block_anchor)


def online(
    scores: Tiled, v: Tensor | None, rows: slice, columns: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (largest score, sum of the exponentials below it, mix of values by them) of a block of queries.

    The shapes are [B, H, t], [B, H, t], [B, H, t, Dv]. A sink is included; a row that sees nothing has HIDDEN
    as its largest, whatever its sink.
    """
    B, H, _, _ = scores.shape
    t = rows.stop - rows.start
    top = torch.full((B, H, t), HIDDEN, dtype=scores.dtype, device=scores.device)
    total = torch.zeros_like(top)
    mixed = None if v is None else v.new_zeros(B, H, t, v.shape[-1], dtype=scores.dtype)
    start, stop = scores.span(rows)
    for keys in blocks(start, stop, columns):
        s = scores.tile(rows, keys)  # [B, H, t, s]
        new_top = torch.maximum(top, s.amax(-1))
        p = s.sub_(new_top[..., None]).exp_()
        shrink = (top - new_top).exp()
        total = total * shrink + p.sum(-1)
        if v is not None and mixed is not None:
            block = v[:, :, keys].to(scores.dtype)  # [B, Hk, s, Dv]
            added = (p.view(B, v.shape[1], -1, p.shape[-1]) @ block).view(mixed.shape)
            mixed = mixed * shrink[..., None] + added
        top = new_top
    if scores.sinks is not None:
        sink = scores.sinks.to(scores.dtype)[:, None]
        new_top = torch.where(top <= HIDDEN, HIDDEN, torch.maximum(top, sink))
        shrink = (top - new_top).exp()
        total = total * shrink + (sink - new_top).exp()
        mixed = None if mixed is None else mixed * shrink[..., None]
        top = new_top
    return top, total, mixed


def lse_of_block(scores: Tiled, rows: slice, columns: int) -> Tensor:
    """Return the log-sum-exp of a block of queries, [B, H, t]."""
    top, total, _ = online(scores, None, rows, columns)
    return torch.where(top <= HIDDEN, -torch.inf, top + total.log())


# Precision of lse


def is_rough(lse: Tensor, limit: float = ROUGH) -> bool:
    """Return True if some row's lse is larger than `limit`, or must not be read."""
    if lse.dtype == torch.float64 or not lse.numel():
        return False
    if not can_read(lse):
        return True
    return float(torch.nan_to_num(lse, nan=0.0, posinf=0.0, neginf=0.0).abs().max()) > limit


def check_mass(scores: Tiled, rows: slice, lse: Tensor, mass: Tensor) -> None:
    """Raise unless the weights of a block of queries sum to 1: mass [B, H, t], a sink's share included.

    Raises:
        ArgumentError: they do not, by more than rounding.
    """
    if isinstance(scores, Scores) and can_read(lse):
        off = torch.where(torch.isneginf(lse) & (mass == 0), 0.0, mass.log())
        _check(scores, rows, lse, off)


def check_rows(scores: Tiled, rows: slice, lse: Tensor, now: Tensor) -> None:
    """Raise unless `now`, the recomputed lse of a block of queries, equals the stored one.

    Raises:
        ArgumentError: it is not, by more than rounding.
    """
    if isinstance(scores, Scores) and can_read(lse):
        off = torch.where(torch.isneginf(lse) & torch.isneginf(now), 0.0, now - lse)
        _check(scores, rows, lse, off)


def check_some(scores: Tiled, lse: Tensor) -> None:
    """Raise if q, k or the mask of a map were overwritten, as a few full rows show.

    For callers that read a few keys of each query, and so never compute a row's sum.

    Raises:
        ArgumentError: a row's lse is not the one that is kept.
    """
    if isinstance(scores, Scores) and can_read(lse):
        chosen = evenly(scores.shape[2])
        some = scores.detach().select(slice(None), slice(None), chosen)
        all_rows = slice(0, len(chosen))
        for piece in some.pieces():
            mine, row_lse = some.piece(piece), lse[piece.batch, piece.heads][:, :, chosen]
            check_rows(mine, all_rows, row_lse, lse_of_block(mine, all_rows, piece.columns))


def evenly(size: int) -> Tensor:
    """Return SOME of 0 .. size - 1, evenly spaced from the first to the last."""
    return torch.linspace(0, size - 1, min(SOME, size), dtype=torch.float64, device="cpu").round().long()


def _check(scores: Scores, rows: slice, lse: Tensor, off: Tensor) -> None:
    """Raise if `off` [B, H, t], the error in the logarithm of a row's mass, is more than rounding."""
    strange = off.abs() > SLACK  # False for NaN, which the result shows
    if not bool(strange.any()):
        return
    strange &= (off.abs() > _bound(scores, rows, lse)) & ~torch.isposinf(lse)
    if not bool(strange.any()):
        return
    b, h, i = (int(n) for n in strange.nonzero()[0])
    raise ArgumentError(
        "q, k, mask and bias must not change while their map is in use: the weights of a query now sum to "
        f"{float(off[b, h, i].exp()):.6g}, not 1 (sequence {b}, head {h}, query {rows.start + i} of those "
        "read); pass q.clone() and k.clone(), or read the map before writing"
    )


def _bound(scores: Scores, rows: slice, lse: Tensor) -> Tensor:
    """Return a bound on rounding, [B, H, t]: of the products, of biases, and of lse."""
    half = scores.input_dtype in (torch.float16, torch.bfloat16)
    unit = torch.finfo(torch.float64 if lse.dtype == torch.float64 else torch.float32).eps
    q, k = scores.q[:, :, rows].to(lse.dtype), scores.k.to(lse.dtype)
    longest = torch.nan_to_num(k.norm(dim=-1)).amax(-1).repeat_interleave(scores.group, dim=1)  # [B, H]
    products = q.norm(dim=-1) * longest[..., None] * abs(scores.scoring.scale) * (q.shape[-1] + 8)
    added = torch.zeros(())
    for value in scores.scoring.tensors.values():
        finite = torch.where(value > -1e29, value.detach().to(lse.dtype), 0.0)
        finite = torch.nan_to_num(finite, nan=0.0, posinf=0.0).abs().max()
        added = added + finite * (scores.shape[3] if value is scores.scoring.slopes else 1)
    of_lse = torch.nan_to_num(lse, neginf=0.0).abs()
    return 4 * unit * (products + added + of_lse) + (2.0**-8 if half else 0.0)


# Weights as scores


@dataclass(frozen=True, eq=False)
class GivenWeights(Tiled):
    """Weights computed elsewhere, read as scores: s = log p, with lse 0."""

    weights: Tensor  # [B, H, T, S]
    mask: Mask
    positions: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        B, H, T, S = self.weights.shape
        return B, H, T, S

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def input_dtype(self) -> torch.dtype:
        return self.weights.dtype

    def __reduce__(self) -> tuple[type[GivenWeights], tuple[object, ...]]:
        return GivenWeights, (self.weights, self.mask, self.positions)

    def versions(self) -> tuple[int] | None:
        """Return how often the weights were written to; None if not counted."""
        if (
            torch.compiler.is_compiling()
            or not isinstance(self.weights, Tensor)
            or self.weights.is_inference()
        ):
            return None
        return (self.weights._version,)

    def parts(self) -> dict[str, Flat]:
        """Return all parts by name."""
        rules: dict[str, Flat] = {name: getattr(self.mask, name) for name in Mask.FIELDS}
        return {"weights": self.weights, "positions": self.positions, **rules}

    @classmethod
    def from_parts(cls, parts: Mapping[str, Any]) -> GivenWeights:
        """Return the weights with these parts; a missing name is None."""
        return cls(parts["weights"], mask_from(parts), parts.get("positions"))

    def to(self, device: torch.device) -> GivenWeights:
        """Return the same weights on another device."""
        return replace(self, weights=self.weights.to(device), mask=self.mask.to(device))

    def detach(self) -> GivenWeights:
        """Return the same weights, cut from the graph."""
        return replace(self, weights=self.weights.detach())

    def select(self, batch: Index, heads: Index, queries: Index) -> GivenWeights:
        """Return the weights of some sequences, heads and queries; each index a slice or an index tensor."""
        return GivenWeights(
            take(self.weights, (batch, heads, queries), ones_stay=False),
            self.mask.select(batch, heads, queries),
            self._positions_of(queries),
        )

    def piece(self, piece: Piece) -> GivenWeights:
        where = (piece.batch, piece.heads)
        return replace(self, weights=self.weights[where], mask=self.mask.select(*where, slice(None)))

    def span(self, rows: slice) -> tuple[int, int]:
        return 0, self.shape[3]  # weights computed elsewhere exist whatever the mask hides

    def tile(self, rows: slice, columns: Index) -> Tensor:
        return self.weights[:, :, rows, columns].to(self.dtype).log().clamp_(min=HIDDEN)


torch.serialization.add_safe_globals([GivenWeights])
