"""Ring attention: the sequence is sharded over a group of ranks, keys and values are passed round the ring.

A rank's `Shard` of a call is its queries and keys with the mask and scoring of the full call. A run of its
queries and a run of keys, local or received, form a rectangle of the score matrix. Each rectangle is an
ordinary call of the engines, except for its positions: query i is at position i + S - T, and at i + S - T - j
in a rectangle whose first key is j. Rectangles that the mask hides completely are left out.

Forward. The keys and values of all ranks arrive in turn, after this rank's own. Rows are merged from their
parts, (largest score, sum of exponentials relative to it, weighted sum of values), as in an online softmax.
Sinks, one more column of a full row, are added once, at the end.

Backward. Given the output and lse of full rows, the backward of each rectangle is exact. Keys and values are
passed round once more; dq stays, dk and dv are passed on one step after their keys, until they are back.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim; t, s this
rank's of T, S.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..engines import backends
from ..engines.backend import Call
from ..engines.gradients import Context, needs_added
from ..engines.kernels import HALF
from ..engines.plain import TILES, unfinished
from ..engines.scores import ADDED, DIFFERENTIABLE, Scores, Tiled, own_precision, tile_dtype
from ..engines.second_pass import Frame
from ..engines.walk import REACH, ROUGH, Anchor, is_rough
from ..indexing import take
from ..mask_rules import Dense, Documents, Padding, can_read
from ..masks import BoundMask, Mask
from ..scoring import HIDDEN, Scoring
from .sequence import Layout, Ring, RingSums, Run

ANYWHERE = (Padding, Documents, Dense)  # rules that do not depend on positions


@dataclass(frozen=True, eq=False)
class Part:
    """A rectangle of the score matrix as a call, without sinks, which belong to full rows."""

    rows: slice  # among this rank's queries
    columns: slice  # among the keys of the block
    frame: Frame  # its place in the full score matrix
    scores: Scores


class Rows(Tiled):
    """The scores of some queries against all keys as sizes, mask and positions only, without numbers.

    Args:
        shape: [B, H, t, S].
        mask: bound, for these queries.
        like: a tensor on their device, of their dtype.
        positions: of the queries; None: aligned with the last key.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        mask: Mask,
        like: Tensor,
        sinks: Tensor | None,
        positions: Tensor | None = None,
    ) -> None:
        self._shape, self._like, self._sinks = shape, like.new_empty(0), sinks
        self.mask, self.positions = mask, positions

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._shape

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def input_dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def sinks(self) -> Tensor | None:
        return self._sinks


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's share of a call."""

    ring: Ring
    q: Tensor  # [B, H, t, D]
    k: Tensor  # [B, Hk, s, D]
    mask: Mask  # bound, of the full call
    scoring: Scoring  # of the full call
    queries: Layout
    keys: Layout

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, H, T, S] of the full call."""
        return self.q.shape[0], self.q.shape[1], self.queries.length, self.keys.length

    @property
    def key_sizes(self) -> list[int]:
        """The number of keys of each rank."""
        return [self.keys.size(rank) for rank in range(self.ring.size)]

    @property
    def full_rows(self) -> Rows:
        """The rows of the full call, without numbers."""
        return Rows(self.shape, self.mask, self.q, self.scoring.sinks)

    @property
    def mine(self) -> Rows:
        """This rank's rows, without numbers, with the mask that says which queries count."""
        B, H, T, S = self.shape
        at = self.queries.positions(self.ring.rank)
        counted = self.mask.counted(T)
        queries = None if counted is None else counted[:, at.to(counted.device)]
        mask = BoundMask(keys=self.mask.keys, queries=queries)
        return Rows((B, H, len(at), S), mask, self.q, self.scoring.sinks, at + S - T)

    @property
    def leaves(self) -> tuple[Tensor | None, ...]:
        """The tensors that can have a gradient, in the order of DIFFERENTIABLE."""
        return self.q, self.k, *(getattr(self.scoring, name) for name in DIFFERENTIABLE[2:])

    def of(self, leaves: Sequence[Tensor | None]) -> Shard:
        """Return the same call with other leaves, in the order of DIFFERENTIABLE."""
        q, k, *scoring_leaves = leaves
        assert q is not None and k is not None
        scoring = replace(self.scoring, **dict(zip(DIFFERENTIABLE[2:], scoring_leaves, strict=True)))  # type: ignore[arg-type]
        return replace(self, q=q, k=k, scoring=scoring)

    def detach(self) -> Shard:
        """Return the same call, detached."""
        return self.of([None if x is None else x.detach() for x in self.leaves])

    def parts(self, owner: int, k: Tensor, placed: bool = False) -> Iterator[Part]:
        """Yield the rectangles of this rank's queries and the keys `k` of `owner` that are not all hidden.

        placed: pass positions of queries even if neither mask nor bias needs them.
        """
        for queries in self.queries.runs(self.ring.rank):
            for keys in self.keys.runs(owner):
                part = self._part(queries, keys, k, placed)
                if part is not None:
                    yield part

    def _part(self, queries: Run, keys: Run, k: Tensor, placed: bool) -> Part | None:
        """Return a rectangle, or None if the mask hides all of it."""
        _, _, T, S = self.shape
        first = queries.span.start + S - T - keys.span.start  # the first query's position
        last = first + queries.size - 1
        mask = self.mask.rectangle(queries.span, keys.span)
        start, stop = mask.span(first, last, slice(0, queries.size), keys.size)
        if start == stop:
            return None
        if mask.left is not None and last <= mask.left:
            mask = replace(mask, left=None)
        if mask.right is not None and keys.size - 1 - first <= mask.right:
            mask = replace(mask, right=None)
        scoring = replace(self.scoring, sinks=None)
        if scoring.bias is not None:
            scoring = replace(scoring, bias=take(scoring.bias, (None, None, queries.span, keys.span)))
        placed = placed or scoring.slopes is not None or scoring.relative is not None
        placed = placed or any(not isinstance(rule, ANYWHERE) for rule in mask.hiding)
        positions: Tensor | None = None
        if placed and first != keys.size - queries.size:  # else aligned with the last key, the default
            positions = torch.arange(first, last + 1, device="cpu")
        scores = Scores(self.q[:, :, queries.local], k[:, :, keys.local], mask, scoring, positions)
        return Part(queries.local, keys.local, Frame(queries.span.start, keys.span.start, T, S), scores)


# The first pass


def attend(shard: Shard, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return (output [B, H, t, Dv] of this rank's queries, their lse [B, H, t], detached)."""
    output, lse = _RingAttention.apply(*shard.leaves, v, shard.detach())
    return output, lse.detach()


@dataclass(eq=False)
class Merged:
    """This rank's rows, merged from their parts."""

    top: Tensor  # [B, H, t], the largest score; HIDDEN: no key yet
    total: Tensor  # [B, H, t], the sum of exp(score - top)
    mixed: Tensor | None  # [B, H, t, Dv], the values weighted by exp(score - top)

    @classmethod
    def empty(cls, q: Tensor, value_dim: int | None) -> Merged:
        """Return rows without any key."""
        dtype = tile_dtype(q.dtype)
        top = torch.full(q.shape[:3], HIDDEN, dtype=dtype, device=q.device)
        mixed = None if value_dim is None else top.new_zeros(*q.shape[:3], value_dim)
        return cls(top, torch.zeros_like(top), mixed)

    def add(self, rows: slice, top: Tensor, total: Tensor, mixed: Tensor | None) -> None:
        """Merge a part of some rows, or a column: top and total [B, H, t]."""
        old_top = self.top[:, :, rows]
        new_top = torch.maximum(old_top, top)
        old_scale, new_scale = (old_top - new_top).exp(), (top - new_top).exp()
        self.top[:, :, rows] = new_top
        self.total[:, :, rows] = self.total[:, :, rows] * old_scale + total * new_scale
        if self.mixed is not None:
            mixed_rows = self.mixed[:, :, rows]
            mixed_rows *= old_scale[..., None]
            if mixed is not None:
                mixed_rows += mixed * new_scale[..., None]

    def add_parts(self, parts: Iterable[Part]) -> None:
        """Merge rectangles, without values."""
        for part in parts:
            self.add(part.rows, *unfinished(part.scores, None))

    def add_sinks(self, sinks: Tensor) -> None:
        """Merge the column of sinks into every row that sees a key."""
        sink = sinks.to(self.top.dtype)[:, None].expand_as(self.top)
        empty = self.top <= HIDDEN
        self.add(slice(None), torch.where(empty, HIDDEN, sink), (~empty).to(sink.dtype), None)

    @property
    def anchor(self) -> Anchor:
        """The rows' lse as a sum of two numbers, which is more precise than one."""
        empty = self.top <= HIDDEN
        return self.top.masked_fill(empty, 0), self.total.log().masked_fill(empty, 0)

    @property
    def lse(self) -> Tensor:
        high, low = self.anchor
        return (high + low).masked_fill(self.top <= HIDDEN, -torch.inf)

    def output(self, dtype: torch.dtype) -> Tensor:
        """Return the output, [B, H, t, Dv]."""
        assert self.mixed is not None
        empty = self.top <= HIDDEN
        return (self.mixed / self.total.masked_fill(empty, 1)[..., None]).to(dtype)


class _Rows(NamedTuple):
    """Tensors of full rows for the backward pass."""

    output: Tensor  # [B, H, t, Dv]
    lse: Tensor  # [B, H, t]
    high: Tensor  # lse in two numbers
    low: Tensor
    grad: Tensor  # of the output

    def some(self, rows: slice) -> _Rows:
        """Return some of the rows."""
        return _Rows(*[x[:, :, rows] for x in self])


class _RingAttention(torch.autograd.Function):
    """Ring attention with its backward."""

    @staticmethod
    def forward(ctx: Context, *args: Any) -> tuple[Tensor, Tensor]:
        *leaves, v, shard = args
        with own_precision(v.device):
            merged = _forward(shard.of(leaves), v)
        output, lse = merged.output(v.dtype), merged.lse
        ctx.mark_non_differentiable(lse)
        ctx.plan = replace(
            shard, q=v.new_empty(0), k=v.new_empty(0)
        )  # without q and k, which are in saved_tensors
        ctx.save_for_backward(*leaves, v, output, lse, *merged.anchor)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
        *leaves, v, output, lse, high, low = ctx.saved_tensors
        with own_precision(v.device):
            rows = _Rows(output, lse, high, low, grad)
            grads = _backward(ctx.plan.of(leaves), v, rows, needs_added(ctx.needs_input_grad))
        inputs = (*leaves, v)
        typed = [None if g is None else g.to(x.dtype) for g, x in zip(grads, inputs, strict=True)]
        return (*[g if n else None for g, n in zip(typed, ctx.needs_input_grad, strict=False)], None)


def _forward(shard: Shard, v: Tensor) -> Merged:
    """Return this rank's rows, merged over the keys of all ranks."""
    merged = Merged.empty(shard.q, v.shape[-1])
    for owner, block in shard.ring.blocks(shard.k, v, sizes=shard.key_sizes):
        _add_block(shard, merged, owner, *block)  # in a function, so that no view of a block stays alive
    if shard.scoring.sinks is not None:
        merged.add_sinks(shard.scoring.sinks)
    return merged


def _add_block(shard: Shard, merged: Merged, owner: int, k: Tensor, v: Tensor) -> None:
    """Merge the part of this rank's rows over the keys of `owner`."""
    for part in shard.parts(owner, k):
        merged.add(part.rows, *_of_part(Call(part.scores, v[:, :, part.columns])))


def _of_part(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return top, total and mixed (see `Merged`) of a part's rows."""
    backends.note(call)
    output, lse = backends.choose(call).forward(call)
    if _too_rough(call, lse):
        return unfinished(call.scores, call.v)
    empty = torch.isneginf(lse)
    return lse.masked_fill(empty, HIDDEN), (~empty).to(lse.dtype), output.to(lse.dtype)


def _too_rough(call: Call, lse: Tensor) -> bool:
    """Return True if the lse is too large to merge by it; tiles use two numbers instead.

    In float32 an lse of 100 is off by 4e-6, and so are all weights of its part.
    """
    limit = REACH if call.v.dtype in HALF else ROUGH
    return can_read(lse) and is_rough(lse, limit)


def _backward(shard: Shard, v: Tensor, rows: _Rows, added: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of DIFFERENTIABLE, then that of v, in the dtype of tiles."""
    ring, dtype, scoring, sizes = shard.ring, tile_dtype(v.dtype), shard.scoring, shard.key_sizes
    gradients: dict[str, Tensor] = {"q": torch.zeros(shard.q.shape, dtype=dtype, device=v.device)}
    if added:
        for name, x in scoring.tensors.items():
            if name in ADDED:
                gradients[name] = torch.zeros(x.shape, dtype=dtype, device=x.device)
    numbers_per_key = v.shape[0] * v.shape[1] * (shard.k.shape[3] + v.shape[3])
    # dk and dv of a rank's keys, in one tensor
    packed = RingSums(
        ring, lambda owner: torch.zeros(numbers_per_key * sizes[owner], dtype=dtype, device=v.device)
    )
    for owner, block in ring.blocks(shard.k, v, sizes=sizes):
        _backward_of_block(shard, rows, owner, block[0], block[1], packed.current, gradients)
        packed.pass_on()
    gradients["k"], dv = _unpacked(packed.result(), shard.k, v)
    if scoring.sinks is not None:
        gradients["sinks"] = _of_sinks(scoring.sinks, rows)
    return (*[gradients.get(name) for name in DIFFERENTIABLE], dv)


def _backward_of_block(
    shard: Shard, rows: _Rows, owner: int, k: Tensor, v: Tensor, packed: Tensor, gradients: dict[str, Tensor]
) -> None:
    """Run the backward through the keys of `owner`: add dk and dv to `packed`, the rest to `gradients`."""
    dk, dv = _unpacked(packed, k, v)
    added = any(name in gradients for name in ADDED)
    for part in shard.parts(owner, k):
        part_rows = rows.some(part.rows)
        values = v[:, :, part.columns]
        call = Call(part.scores, values, bias_gradient=added, anchor=(part_rows.high, part_rows.low))
        chosen = TILES if _too_rough(call, part_rows.lse) else backends.choose(call)
        back, d_values, _ = chosen.backward(call, part_rows.output, part_rows.lse, part_rows.grad)
        gradients["q"][:, :, part.rows] += back.q
        dk[:, :, part.columns] += back.k
        dv[:, :, part.columns] += d_values
        _add(gradients, part, {"bias": back.bias, "slopes": back.slopes, "relative": back.relative})


def _unpacked(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of dk and dv in a packed tensor."""
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)


def _add(gradients: dict[str, Tensor], part: Part, shares: dict[str, Tensor | None]) -> None:
    """Add a part's gradients of a bias, [.., T, S], slopes and relative bias."""
    for name, share in shares.items():
        if name not in gradients:
            continue
        assert share is not None, "the call requested it"
        gradient = gradients[name]
        if name == "bias":
            query, key, _, _ = part.frame
            _, _, t, s = part.scores.shape
            gradient = take(gradient, (None, None, slice(query, query + t), slice(key, key + s)))
        gradient += share


def _of_sinks(sinks: Tensor, rows: _Rows) -> Tensor:
    """Return the gradient of the sinks from this rank's rows, [H]."""
    dtype = rows.lse.dtype
    delta = (rows.grad.to(dtype) * rows.output.to(dtype)).sum(-1)  # [B, H, t]
    mass = (sinks.to(dtype)[:, None] - rows.high - rows.low).exp()
    return -(mass * delta).masked_fill(torch.isneginf(rows.lse), 0).sum((0, 2))
