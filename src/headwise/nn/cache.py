"""Keys and values kept from one call to the next, so that each token is projected once.

    columns      0 1 2 3 4 5 6                 two sequences of different lengths
    in use       k k k k k . .                 . . k k k . .    aligned at their end
                 k k k k k . .                 k k k k k . .

Columns are in the order of the tokens, and new ones come after the last. T queries over S columns stand
beside the last T, as everywhere in headwise, so masks and biases by distance need no change.

Maps of earlier steps hold views of the same memory. New columns are written without counting a version
(`_put`), since no map holds them yet; columns that a map may hold are written with it, and then the map
raises.

Keys and values are projections of one module. A cache knows its module by a weak reference and refuses any
other while it holds tokens: a module of equal sizes would silently compute wrong numbers.

Letters: B batch, T query_len, S key_len, M max_length, H num_heads, Hk num_kv_heads, D head_dim, Dv
value_dim.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError
from ..mask_meaning import whole_number
from ..mask_rules import can_read
from ..masks import BoundMask, Mask

LEAST = 64  # columns of a growing cache's first block


class Owned:
    """Keys and values that one module projected, and that no other module may attend to.

    A copy belongs to the same module, or to its copy where both are copied at once. What comes from a file
    belongs to the module that uses it first.
    """

    _owner: weakref.ref[nn.Module] | None = None  # None: the next module that uses it

    @property
    def _is_empty(self) -> bool:
        return False

    def is_of(self, module: nn.Module) -> bool:
        """Return True if the module is known to be the owner."""
        return self._owner is not None and self._owner() is module

    def belong_to(self, module: nn.Module) -> None:
        """Make the module the owner.

        Raises:
            ArgumentError: another module is, unless there is nothing of it here.
        """
        if self.is_of(module):
            return
        if self._owner is not None and not self._is_empty:  # asked last: graphs must not depend on it
            owner = self._owner()
            filled_by = "a module that is gone" if owner is None else f"another {type(owner).__name__}"
            raise ArgumentError(
                f"cache must be used by the module that filled it: got {type(module).__name__} for one of "
                f"{filled_by}; make one for each layer with mha.cache(), for each model with model.cache()"
            )
        self._owner = weakref.ref(module)

    def _owner_of_copy(self, memo: dict[int, Any]) -> weakref.ref[nn.Module] | None:
        owner = None if self._owner is None else self._owner()
        return self._owner if owner is None else weakref.ref(memo.get(id(owner), owner))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_owner"}


class KVCache(Owned):
    """The keys and values of the tokens so far, for `mha(x, cache=cache)`; made by `mha.cache()`.

    It is for one module: another one, even of equal sizes, is refused until the cache is empty (`reset`).

    Args:
        max_length: columns there can be; room for all of them is taken at once. Default: it grows.
        ring: the last max_length tokens are kept and older ones forgotten, for modules with a window.

    Raises:
        ArgumentError: a ring without max_length.
        ShapeError: max_length below 1.

    Example:
        >>> import headwise as hw
        >>> mha = hw.MultiHeadAttention(64, 4, causal=True).eval().requires_grad_(False)
        >>> x, cache = torch.randn(2, 7, 64), mha.cache()
        >>> prompt, _ = mha(x[:, :5], cache=cache)
        >>> steps = [mha(x[:, i : i + 1], cache=cache)[0] for i in (5, 6)]
        >>> torch.allclose(torch.cat([prompt, *steps], 1), mha(x)[0], atol=1e-6)
        True
        >>> cache
        KVCache(7 columns, batch 2, 4 heads, float32)
    """

    def __init__(self, max_length: int | None = None, ring: bool = False) -> None:
        if max_length is not None:
            max_length = whole_number(max_length, "max_length")
            if max_length < 1:
                raise ShapeError(f"max_length must be at least 1: got {max_length}; or leave it out")
        elif ring:
            raise ArgumentError("ring must have a max_length: got None; give the module's window or more")
        self.max_length, self.ring = max_length, ring
        self._k: Tensor | None = None  # [B, Hk, room, D]
        self._v: Tensor | None = None  # [B, Hk, room, Dv]
        self._seen: int | None = 0  # tokens that came, the longest sequence's; None: only the device knows
        self._at: Tensor | None = None  # the same on the device, int64 []; of a cache that is reserved
        self._first: list[int] | None = None  # of each sequence, its first column among those that came
        self._first_there: Tensor | None = None  # the same on the device, int64 [B]
        self._shown = 0  # columns of the blocks that somebody may hold a view of

    # What it holds

    @property
    def _is_empty(self) -> bool:
        return self._seen == 0

    @property
    def seen(self) -> int:
        """Tokens that came so far, also those that a ring forgot; of the longest sequence."""
        if self._seen is None:
            assert self._at is not None
            self._seen = int(self._at)
        return self._seen

    @property
    def length(self) -> int:
        """Columns in use."""
        return min(self.seen, self.max_length) if self.ring and self.max_length else self.seen

    @property
    def batch(self) -> int | None:
        """B; None while nothing is known of it."""
        return None if self._k is None else self._k.shape[0]

    @property
    def starts(self) -> Tensor | None:
        """The first real column of each sequence, int [B]; None: all begin at the first."""
        if self._first_there is None:
            return None
        return (self._first_there - (self.seen - self.length)).clamp(min=0)

    @property
    def is_ragged(self) -> bool:
        """True if sequences are of different lengths."""
        return self._first is not None

    @property
    def nbytes(self) -> int:
        """Memory taken, with room for what is to come."""
        return sum(x.numel() * x.element_size() for x in (self._k, self._v) if x is not None)

    def positions(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Of the next `count` tokens: int [T], or [B, T] where sequences are of different lengths."""
        if self._k is not None:
            device = self._k.device
        if torch.compiler.is_compiling() and self._at is not None:
            next_ones = self._at + torch.arange(count, device=device)
        else:
            next_ones = torch.arange(self.seen, self.seen + count, device=device)
        return next_ones if self._first_there is None else next_ones - self._first_there[:, None]

    def columns(self, count: int) -> int:
        """S, how many columns a call with so many tokens attends to."""
        if self.ring and self.max_length is not None:
            return count + min(self.seen, self.max_length - 1)
        return count + self.seen

    def __repr__(self) -> str:
        used = f"{self.length} columns"
        if self.max_length is not None:
            used = f"{'last ' if self.ring else ''}{self.length} of {self.max_length} columns"
        inside = [used]
        if self._k is not None:
            B, Hk = self._k.shape[:2]
            inside += [f"batch {B}", f"{Hk} heads", str(self._k.dtype).removeprefix("torch.")]
        return f"KVCache({', '.join(inside)})"

    # Adding to it

    def reserve(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """Take room for max_length columns now, as steps that are compiled need it; the cache itself."""
        assert self.max_length is not None
        shape = (batch, num_kv_heads, self.max_length)
        self._k = _room((*shape, head_dim), dtype or torch.get_default_dtype(), device)
        self._v = _room((*shape, value_dim), dtype or torch.get_default_dtype(), device)
        with torch.inference_mode(False):
            self._at = torch.zeros((), dtype=torch.int64, device=device)
        return self

    def extend(
        self, k: Tensor, v: Tensor, lengths: Sequence[int] | None = None, module: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        """Add the keys and values of new tokens.

        Args:
            k: [B, Hk, T, D], at their positions already.
            v: [B, Hk, T, Dv]
            lengths: how many of each sequence's T are real, the first ones.
            module: whose keys and values they are.

        Returns:
            All keys [B, Hk, S, D] and values [B, Hk, S, Dv] that the T new tokens attend to, in order, and
            what is padding among them.

        Raises:
            ShapeError: sizes that do not fit what is there; more than max_length columns.
            ArgumentError: another dtype or device; gradients in a cache of fixed size; another module than
                the one whose tokens are there.
        """
        joins = self.check(k, v, module)
        T, seen = k.shape[2], self.seen
        if lengths is not None:
            return self._extend_ragged(k, v, lengths, joins)
        end = seen + T
        if self.ring and self.max_length is not None and end > self.max_length:
            return self._extend_ring(k, v, end)
        self._check_room(seen, T, end)
        if joins:
            self._k = k if not seen or self._k is None else torch.cat((self._k[:, :, :seen], k), 2)
            self._v = v if not seen or self._v is None else torch.cat((self._v[:, :, :seen], v), 2)
        else:
            if self._k is None or end > self._k.shape[2] or self._k.requires_grad:
                self._grow(k, v, end)
            self._put(seen, k, v)
        self._set_seen(end)
        assert self._k is not None and self._v is not None
        mask = None if self._first is None else self._padding(end, end)
        if self.ring and self._at is not None:  # compiled steps go round without a count of versions
            return self._k[:, :, :end].clone(), self._v[:, :, :end].clone(), mask
        self._shown = max(self._shown, end)
        if self._k.shape[2] == end:
            return self._k, self._v, mask
        return self._k[:, :, :end], self._v[:, :, :end], mask

    def next_column(
        self, batch: int, num_kv_heads: int, head_dim: int, value_dim: int, x: Tensor
    ) -> int | None:
        """Where the next token goes, if it only need be written there: nobody has seen that column."""
        seen, k, v = self._seen, self._k, self._v
        if k is None or v is None or seen is None or self.ring or self._first is not None:
            return None
        if seen < self._shown or seen >= k.shape[2] or k.requires_grad or v.requires_grad:
            return None
        a, b = k.shape, v.shape
        if a[0] != batch or a[1] != num_kv_heads or a[3] != head_dim or b[3] != value_dim:
            return None
        plain = k.dtype is x.dtype and v.dtype is x.dtype and k.device == x.device
        return seen if plain else None

    def add_column(self, at: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """One more token, [B, Hk, 1, D] and [B, Hk, 1, Dv], where `next_column` said; all there is, then."""
        assert self._k is not None and self._v is not None
        self._k.data.narrow(2, at, 1).copy_(k)
        self._v.data.narrow(2, at, 1).copy_(v)
        self._seen = self._shown = end = at + 1
        if self._at is not None:
            self._at.fill_(end)
        return self._k.narrow(2, 0, end), self._v.narrow(2, 0, end)

    def _extend_ring(self, k: Tensor, v: Tensor, end: int) -> tuple[Tensor, Tensor, Mask | None]:
        """Where something is forgotten: what is handed out is a copy, in order."""
        assert self.max_length is not None
        T, kept = k.shape[2], min(k.shape[2], self.max_length)
        keys, values = self._after_past(k, v, self.max_length - 1)
        if self._k is None:
            self._grow(k, v, end)
        self._put(end - kept, k[:, :, T - kept :], v[:, :, T - kept :])
        self._set_seen(end)
        return keys, values, self._padding(end, keys.shape[2])

    def _extend_ragged(
        self, k: Tensor, v: Tensor, lengths: Sequence[int], joins: bool
    ) -> tuple[Tensor, Tensor, Mask | None]:
        """A chunk padded on its right: attended to as it is, and kept aligned at its end."""
        (B, _, T, _), seen, held, device = k.shape, self.seen, self.length, k.device
        first = self._first or [0] * B
        totals = [seen - start + count for start, count in zip(first, lengths, strict=True)]
        end = max(totals)
        self._check_room(seen, end - seen, end)
        keys, values = self._after_past(k, v, held)
        counts = torch.tensor(lengths, device=device)[:, None]
        counted = torch.arange(T, device=device) < counts  # [B, T]
        past = torch.arange(seen - held, seen, device=device) >= torch.tensor(first, device=device)[:, None]
        real = torch.cat((past, counted), 1)
        kept = min(end, self.max_length) if self.ring and self.max_length else end
        column = (torch.arange(kept, device=device) + (held - kept) + counts).clamp(min=0)[:, None, :, None]
        k, v = (x.gather(2, column.expand(-1, x.shape[1], -1, x.shape[3])) for x in (keys, values))
        if joins:
            self._k, self._v = k, v
        else:
            if self.max_length is None:
                self._k = self._v = None  # a new block: maps keep the old one
            if self._k is None:
                self._grow(k, v, end)
            self._put(end - kept, k, v)
        starts = [end - total for total in totals]
        self._set_seen(end)
        self._set_first(starts if any(starts) else None)
        return keys, values, BoundMask(keys=real, queries=counted)

    def _after_past(self, k: Tensor, v: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the last columns that are kept, at most so many, followed by new ones."""
        if self._k is None or self._v is None or not min(self.length, most):
            return k, v
        past = (self._in_order(block, most) for block in (self._k, self._v))
        keys, values = (torch.cat((*old, new), 2) for old, new in zip(past, (k, v), strict=True))
        return keys, values

    def _in_order(self, block: Tensor, most: int) -> list[Tensor]:
        """The last columns of a block, at most so many, oldest first: a view, or two of a ring gone round."""
        seen, count = self.seen, min(self.length, most)
        if not self.ring or self.max_length is None or seen <= self.max_length:
            return [block[:, :, seen - count : seen]]
        begin, stop = (seen - count) % self.max_length, seen % self.max_length
        if begin < stop:
            return [block[:, :, begin:stop]]
        return [block[:, :, begin:], block[:, :, :stop]]

    def _put(self, begin: int, k: Tensor, v: Tensor) -> None:
        """Write columns from this one on; counted as a change where somebody may hold a view of them."""
        assert self._k is not None and self._v is not None
        room, count = self._k.shape[2], k.shape[2]
        slot = begin % room if self.ring else begin
        whole = min(count, room - slot)
        spans = [(slot, 0, whole)] if whole == count else [(slot, 0, whole), (0, whole, count)]
        secret = spans[-1][0] >= self._shown  # nobody has seen these columns
        for block, new in ((self._k, k), (self._v, v)):
            target = block.data if secret else block
            for at, start, stop in spans:
                target[:, :, at : at + stop - start] = new if stop - start == count else new[:, :, start:stop]
        if not secret:
            self._shown = 0  # whatever looked at these blocks refuses from now on

    def _grow(self, k: Tensor, v: Tensor, end: int) -> None:
        """Blocks with room for so many columns, and what is there copied into them."""
        room = max(LEAST, end + end // 2) if self.max_length is None else self.max_length
        old, seen = (self._k, self._v), self.seen
        self._k = _room((*k.shape[:2], room, k.shape[3]), k.dtype, k.device)
        self._v = _room((*v.shape[:2], room, v.shape[3]), v.dtype, v.device)
        self._shown = 0
        if seen and old[0] is not None and old[1] is not None:
            self._k.data[:, :, :seen] = old[0][:, :, :seen].detach()
            self._v.data[:, :, :seen] = old[1][:, :, :seen].detach()

    def _set_seen(self, seen: int) -> None:
        """Note how many tokens came."""
        self._seen = seen
        if self._at is not None:
            self._at.fill_(seen)

    def _set_first(self, first: list[int] | None) -> None:
        """Note the first column of each sequence; None: all begin at the first."""
        self._first = first
        device = None if self._k is None else self._k.device
        self._first_there = None if first is None else torch.tensor(first, device=device)

    def _padding(self, end: int, count: int) -> Mask | None:
        """What is padding among the last so many columns of those that came; None: nothing is."""
        if self._first is None or self._first_there is None or end - count >= max(self._first):
            return None
        columns = torch.arange(end - count, end, device=self._first_there.device)
        return BoundMask(keys=columns >= self._first_there[:, None])

    # Refusals

    def check(self, k: Tensor, v: Tensor, module: nn.Module | None = None) -> bool:
        """Return True if gradients flow to what is kept: then tensors are joined, not written into.

        Raises:
            ShapeError, ArgumentError: keys and values that cannot stand beside what is there; gradients in a
                cache of fixed size; another module's.
        """
        self._check_fit(k, v)
        if module is not None:
            self.belong_to(module)
        if not torch.is_grad_enabled():
            return False
        if not any(x is not None and x.requires_grad for x in (k, v, self._k, self._v)):
            return False
        if self.max_length is not None:
            raise ArgumentError(
                f"cache must not be of fixed size where gradients flow: max_length={self.max_length}, and "
                "keys require a gradient; run under torch.no_grad(), or leave max_length out"
            )
        return True

    def _check_room(self, seen: int, more: int, end: int) -> None:
        if self.max_length is not None and end > self.max_length and not self.ring:
            raise ShapeError(
                f"max_length must hold all tokens: {seen} + {more} > {self.max_length}; make the cache "
                "larger or crop it"
            )

    def _check_fit(self, k: Tensor, v: Tensor) -> None:
        """Raise unless these can stand beside what is there."""
        held = self._k
        if held is None or self._v is None:
            return
        a, b = held.shape, k.shape
        if a[0] == b[0] and a[1] == b[1] and a[3] == b[3] and self._v.shape[3] == v.shape[3]:
            if held.dtype is k.dtype and self._v.dtype is v.dtype and held.device == k.device:
                return
            raise ArgumentError(
                f"cache must hold the dtype and device of the keys: {held.dtype} on {held.device} for "
                f"{k.dtype} on {k.device}; make one with mha.cache() where the model is"
            )
        if not self.seen and self._at is None:
            self._k = self._v = None  # emptied, and nothing was promised
            return
        if a[0] != b[0]:
            raise ShapeError(
                f"cache must hold as many sequences as come in: {a[0]} for {b[0]}; reorder(index) repeats or "
                "drops some, or make a new one"
            )
        raise ShapeError(
            f"cache must hold the module's heads: {a[1]} of {a[3]} and {self._v.shape[3]} channels for "
            f"{b[1]} of {b[3]} and {v.shape[3]}; each layer has a cache of its own"
        )

    # Changing it

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Sequence i becomes what sequence index[i] was; as many as are named, as beams need it.

        Raises:
            ArgumentError: not whole numbers [B'], or a sequence that is not there.
        """
        if self._k is None or self._v is None:
            return
        chosen, B = order_of(index, self._k), self._k.shape[0]
        if self._first is not None:
            self._set_first([self._first[i] for i in chosen.tolist()])
        if self._at is not None and len(chosen) == B:  # where compiled steps look for it
            for block in (self._k, self._v):
                block.copy_(block.index_select(0, chosen))
            return
        joins = torch.is_grad_enabled()
        with torch.inference_mode(False):  # which lets gradients in again
            self._k, self._v = (
                x.index_select(0, chosen) if joins else x.detach().index_select(0, chosen)
                for x in (self._k, self._v)
            )
        self._shown = 0

    def crop(self, length: int) -> None:
        """Forget all columns from this one on: the last `cache.length - length` tokens of each sequence.

        Raises:
            ShapeError: more than there are, or below 0; a ring that has forgotten what came before them.
        """
        length, now = whole_number(length, "length"), self.length
        if not 0 <= length <= now:
            raise ShapeError(f"length must be between 0 and what is there: got {length} of {now}; crop less")
        if length == now:
            return
        if self.seen > now:
            raise ShapeError(
                f"length must be {now} in a ring that has gone round: got {length}, and what stood before is "
                "forgotten; use a cache without ring=True"
            )
        assert self._k is not None and self._v is not None
        if self._k.requires_grad or self._v.requires_grad:
            self._k, self._v = self._k[:, :, :length], self._v[:, :, :length]
        elif self._at is not None:  # compiled steps look at all columns: nothing odd may be left there
            self._k[:, :, length:].zero_()
            self._v[:, :, length:].zero_()
        self._set_seen(length)
        self._set_first(self._first and [min(start, length) for start in self._first])

    def reset(self) -> None:
        """Forget everything; the room stays."""
        if self._k is not None and self._v is not None:
            if self._k.requires_grad or self._v.requires_grad:
                self._k = self._v = None
            elif self._at is not None:
                self._k.zero_()
                self._v.zero_()
        self._set_seen(0)
        self._set_first(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        new = KVCache.__new__(KVCache)
        memo[id(self)] = new
        with torch.inference_mode(False):  # else it could be written to in inference mode alone
            for name, value in self.__dict__.items():
                new.__dict__[name] = value.clone() if isinstance(value, Tensor) else value
        new._owner = self._owner_of_copy(memo)
        new._first = None if self._first is None else list(self._first)
        new._shown = 0  # its blocks are its own
        return new


def _room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """A block of zeros: what is hidden is multiplied by 0, which nothing that happens to lie there may be."""
    with torch.inference_mode(False):  # else it could be written to in inference mode alone
        return torch.zeros(shape, dtype=dtype, device=device)


def order_of(index: Tensor | Sequence[int], held: Tensor) -> Tensor:
    """Which sequences, int64 [B'], where they are needed.

    Raises:
        ArgumentError: not whole numbers [B'], or a sequence that is not there.
    """
    chosen = torch.as_tensor(index, device=held.device)
    if chosen.ndim != 1 or chosen.dtype == torch.bool or chosen.is_floating_point() or not len(chosen):
        raise ArgumentError(
            f"index must be whole numbers [B']: got {chosen.dtype} {list(chosen.shape)}; name a sequence for "
            "each new one"
        )
    if can_read(chosen):
        low, high = int(chosen.min()), int(chosen.max())
        if low < 0 or high >= held.shape[0]:
            raise ArgumentError(
                f"index must name sequences that are there: got {low if low < 0 else high} of "
                f"{held.shape[0]}; use 0 to {held.shape[0] - 1}"
            )
    return chosen.long()
