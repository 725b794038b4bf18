"""Attention with the sequence over a group of ranks: keys and values go round, queries stay where they are.

Forward. Every rank has the queries of its tokens. Block after block, one's own first, keys and values pass
by; each rectangle is an ordinary call on the same engines, and rows are put together from what each part
comes to, (largest score, sum below it, mix of values), as an online softmax does. A sink, one more column of
a whole row, is put in at the end, once.

Backward. Given the whole rows' output and lse, each part's way back is exact by itself. Keys and values go
round once more; dq stays, dk and dv travel with the block they belong to and come home, a step behind it.

Letters: B batch, T query_len, S key_len, H num_heads, Hk num_kv_heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..engines import backends
from ..engines.backend import Call
from ..engines.gradients import Context, needs_added
from ..engines.kernels import HALF
from ..engines.scores import ADDED, DIFFERENTIABLE, own_precision, tile_dtype
from ..engines.tiles import TILES, unfinished
from ..engines.walk import REACH, ROUGH, Anchor, is_rough
from ..indexing import take
from ..mask_rules import can_read
from ..scoring import HIDDEN
from .ring import GRADIENTS, Message
from .shard import Part, Shard

__all__ = ["Merged", "attend"]


def attend(shard: Shard, v: Tensor) -> tuple[Tensor, Tensor]:
    """(output [B, H, t, Dv] of this rank's queries, their lse [B, H, t], detached)."""
    scoring = shard.scoring
    leaves = (shard.q, shard.k, scoring.bias, scoring.slopes, scoring.sinks, scoring.relative)
    output, lse = _Ring.apply(*leaves, v, _Plan(shard.detach()))
    return output, lse.detach()


@dataclass(eq=False)
class Merged:
    """Rows put together from parts of them."""

    top: Tensor  # [B, H, t], the largest score; HIDDEN: nothing was seen yet
    total: Tensor  # [B, H, t], the sum of exponentials below it
    mixed: Tensor | None  # [B, H, t, Dv], of values

    @classmethod
    def nothing(cls, q: Tensor, value_dim: int | None) -> Merged:
        """Before the first part."""
        dtype = tile_dtype(q.dtype)
        top = torch.full(q.shape[:3], HIDDEN, dtype=dtype, device=q.device)
        mixed = None if value_dim is None else top.new_zeros(*q.shape[:3], value_dim)
        return cls(top, torch.zeros_like(top), mixed)

    def add(self, rows: slice, top: Tensor, total: Tensor, mixed: Tensor | None) -> None:
        """Put in what these rows come to in a part, or a column: top and total [B, H, t]."""
        old = self.top[:, :, rows]
        new = torch.maximum(old, top)
        mine, theirs = (old - new).exp(), (top - new).exp()
        self.top[:, :, rows] = new
        self.total[:, :, rows] = self.total[:, :, rows] * mine + total * theirs
        if self.mixed is not None:
            here = self.mixed[:, :, rows]
            here *= mine[..., None]
            if mixed is not None:
                here += mixed * theirs[..., None]

    def look(self, parts: Iterable[Part]) -> None:
        """Put in rectangles without their values."""
        for part in parts:
            self.add(part.rows, *unfinished(part.scores, None))

    def add_sinks(self, sinks: Tensor) -> None:
        """The column that every row has which sees anything at all."""
        sink = sinks.to(self.top.dtype)[:, None].expand_as(self.top)
        empty = self.top <= HIDDEN
        self.add(slice(None), torch.where(empty, HIDDEN, sink), (~empty).to(sink.dtype), None)

    @property
    def anchor(self) -> Anchor:
        """The rows' lse in two numbers."""
        empty = self.top <= HIDDEN
        return self.top.masked_fill(empty, 0), self.total.log().masked_fill(empty, 0)

    @property
    def lse(self) -> Tensor:
        high, low = self.anchor
        return (high + low).masked_fill(self.top <= HIDDEN, -torch.inf)

    def output(self, dtype: torch.dtype) -> Tensor:
        """[B, H, t, Dv]"""
        assert self.mixed is not None
        empty = self.top <= HIDDEN
        return (self.mixed / self.total.masked_fill(empty, 1)[..., None]).to(dtype)


@dataclass(frozen=True, eq=False)
class _Plan:
    """What the function needs beside tensors; its shard's own are none of the graph's."""

    shard: Shard

    def filled(self, leaves: tuple[Tensor | None, ...]) -> Shard:
        """The shard of these leaves, in the order of DIFFERENTIABLE."""
        q, k, bias, slopes, sinks, relative = leaves
        scoring = replace(self.shard.scoring, bias=bias, slopes=slopes, sinks=sinks, relative=relative)
        assert q is not None and k is not None
        return replace(self.shard, q=q, k=k, scoring=scoring)


class _Rows(NamedTuple):
    """What the way back needs of whole rows."""

    output: Tensor  # [B, H, t, Dv]
    lse: Tensor  # [B, H, t]
    high: Tensor  # lse in two numbers
    low: Tensor
    grad: Tensor  # of the output

    def some(self, rows: slice) -> _Rows:
        """A run of them."""
        return _Rows(*[x[:, :, rows] for x in self])


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Context, *args: Any) -> tuple[Tensor, Tensor]:
        *leaves, v, plan = args
        shard = plan.filled(tuple(leaves))
        with own_precision(v.device):
            merged = _forward(shard, v)
        output, lse = merged.output(v.dtype), merged.lse
        ctx.mark_non_differentiable(lse)
        ctx.plan = replace(plan, shard=replace(plan.shard, q=v.new_empty(0), k=v.new_empty(0)))
        ctx.save_for_backward(*leaves, v, output, lse, *merged.anchor)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
        *leaves, v, output, lse, high, low = ctx.saved_tensors
        shard = ctx.plan.filled(tuple(leaves))
        with own_precision(v.device):
            rows = _Rows(output, lse, high, low, grad)
            grads = _backward(shard, v, rows, needs_added(ctx.needs_input_grad))
        given = (*leaves, v)
        typed = [None if g is None else g.to(x.dtype) for g, x in zip(grads, given, strict=True)]
        return (*[g if n else None for g, n in zip(typed, ctx.needs_input_grad, strict=False)], None)


def _forward(shard: Shard, v: Tensor) -> Merged:
    merged = Merged.nothing(shard.q, v.shape[-1])
    for owner, block in shard.ring.blocks(shard.k, v, sizes=shard.key_sizes):
        _look(shard, merged, owner, *block)
    if shard.scoring.sinks is not None:
        merged.add_sinks(shard.scoring.sinks)
    return merged


def _look(shard: Shard, merged: Merged, owner: int, k: Tensor, v: Tensor) -> None:
    """This rank's queries at the keys of `owner`."""
    for part in shard.parts(owner, k):
        merged.add(part.rows, *_of_part(Call(part.scores, v[:, :, part.columns])))


def _of_part(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """(largest score, sum of the exponentials below it, mix of values) of a part's rows."""
    backends.note(call)
    output, lse = backends.choose(call).forward(call)
    if _too_rough(call, lse):
        return unfinished(call.scores, call.v)
    empty = torch.isneginf(lse)
    return lse.masked_fill(empty, HIDDEN), (~empty).to(lse.dtype), output.to(lse.dtype)


def _too_rough(call: Call, lse: Tensor) -> bool:
    """Whether one number is too rough to put rows together by, and to go back by; tiles have two.

    A kernel's lse of 100 in float32 is off by 4e-6, and so is all that its part weighs.
    """
    limit = REACH if call.v.dtype in HALF else ROUGH
    return can_read(lse) and is_rough(lse, limit)


def _backward(shard: Shard, v: Tensor, rows: _Rows, added: bool) -> tuple[Tensor | None, ...]:
    """Of everything in DIFFERENTIABLE, and of v; in the tiles' dtype."""
    ring, dtype, scoring, sizes = shard.ring, tile_dtype(v.dtype), shard.scoring, shard.key_sizes
    room: dict[str, Tensor] = {"q": torch.zeros(shard.q.shape, dtype=dtype, device=v.device)}
    if added:
        for name, x in scoring.tensors.items():
            if name in ADDED:
                room[name] = torch.zeros(x.shape, dtype=dtype, device=x.device)
    home: Tensor | None = None  # dk and dv of this rank's own keys, in one piece
    message: Message | None = None  # those of others, from ranks before
    each = v.shape[0] * v.shape[1] * (shard.k.shape[3] + v.shape[3])  # numbers a key
    for owner, block in ring.blocks(shard.k, v, sizes=sizes):
        packed = torch.zeros(each * sizes[owner], dtype=dtype, device=v.device)
        _look_back(shard, rows, owner, block[0], block[1], packed, room)
        if home is None:
            home = packed
            continue
        if message is not None:
            packed += message.wait()
        # what the rank before has done by now is of the keys that come here next; at last of our own
        arriving = packed.new_empty(each * sizes[(owner - 1) % ring.size])
        message = ring.pass_on(packed, arriving, GRADIENTS)
    assert home is not None
    if message is not None:
        home += message.wait()
    room["k"], dv = _apart(home, shard.k, v)
    if scoring.sinks is not None:
        room["sinks"] = _of_sinks(scoring.sinks, rows)
    return (*[room.get(name) for name in DIFFERENTIABLE], dv)


def _look_back(
    shard: Shard, rows: _Rows, owner: int, k: Tensor, v: Tensor, packed: Tensor, room: dict[str, Tensor]
) -> None:
    """The way back through the keys of `owner`: theirs into `packed`, this rank's own into `room`."""
    dk, dv = _apart(packed, k, v)
    added = any(name in room for name in ADDED)
    for part in shard.parts(owner, k):
        here = rows.some(part.rows)
        values = v[:, :, part.columns]
        call = Call(part.scores, values, bias_gradient=added, anchor=(here.high, here.low))
        chosen = TILES if _too_rough(call, here.lse) else backends.choose(call)
        back, d_values, _ = chosen.backward(call, here.output, here.lse, here.grad)
        room["q"][:, :, part.rows] += back.q
        dk[:, :, part.columns] += back.k
        dv[:, :, part.columns] += d_values
        _add(room, part, {"bias": back.bias, "slopes": back.slopes, "relative": back.relative})


def _apart(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return packed[: k.numel()].view(k.shape), packed[k.numel() :].view(v.shape)


def _add(room: dict[str, Tensor], part: Part, found: dict[str, Tensor | None]) -> None:
    """Gradients of what is added: a bias lies over queries and keys, the others are a head's."""
    for name, share in found.items():
        if name not in room:
            continue
        assert share is not None, "the call asked for it"
        mine = room[name]
        if name == "bias":
            query, key, _, _ = part.frame
            _, _, t, s = part.scores.shape
            mine = take(mine, (None, None, slice(query, query + t), slice(key, key + s)))
        mine += share


def _of_sinks(sinks: Tensor, rows: _Rows) -> Tensor:
    """[H]: of this rank's rows."""
    dtype = rows.lse.dtype
    delta = (rows.grad.to(dtype) * rows.output.to(dtype)).sum(-1)  # [B, H, t]
    mass = (sinks.to(dtype)[:, None] - rows.high - rows.low).exp()
    return -(mass * delta).masked_fill(torch.isneginf(rows.lse), 0).sum((0, 2))
