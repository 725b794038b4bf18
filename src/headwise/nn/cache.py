"""Keys and values stored from one call to the next, so that each token is projected once.

    columns      0 1 2 3 4 5 6                 two sequences of different lengths
    in use       k k k k k . .                 . . k k k . .    aligned at their end
                 k k k k k . .                 k k k k k . .

Columns are in the order of the tokens, and new ones come after the last. T queries over S columns stand
beside the last T, as everywhere in headwise, so masks and biases by distance need no change.

Maps of earlier steps hold views of the same memory. New columns are written without counting a version
(`_write`), since no map holds them yet; columns that a map may hold are written with it, and then the map
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

    _owner: weakref.ref[nn.Module] | None = None  # None: the next module that uses it becomes the owner

    @property
    def _is_empty(self) -> bool:
        return False

    def is_of(self, module: nn.Module) -> bool:
        """Return True if the module is known to be the owner."""
        return self._owner is not None and self._owner() is module

    def belong_to(self, module: nn.Module) -> None:
        """Make the module the owner.

        Raises:
            ArgumentError: another module owns it and it is not empty.
        """
        if self.is_of(module):
            return
        if self._owner is not None and not self._is_empty:  # checked last: graphs must not depend on it
            owner = self._owner()
            filled_by = "a deleted module" if owner is None else f"another {type(owner).__name__}"
            raise ArgumentError(
                f"cache must be used by the module that filled it: got {type(module).__name__} and a cache "
                f"of {filled_by}; make one per layer with mha.cache(), or one per model with model.cache()"
            )
        self._owner = weakref.ref(module)

    def _owner_of_copy(self, memo: dict[int, Any]) -> weakref.ref[nn.Module] | None:
        owner = None if self._owner is None else self._owner()
        return self._owner if owner is None else weakref.ref(memo.get(id(owner), owner))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_owner"}


class KVCache(Owned):
    """The keys and values of the tokens so far, for `mha(x, cache=cache)`; made by `mha.cache()`.

    It belongs to the module that filled it: a call of any other module raises until the cache is empty
        (`reset`).

    Args:
        max_length: the largest number of columns, allocated at once. Default: the cache grows.
        ring: whether only the last max_length tokens are kept, for modules with a window.

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
                raise ShapeError(f"max_length must be at least 1: got {max_length}; None is no limit")
        elif ring:
            raise ArgumentError("ring must have a max_length: got None; use the module's window or more")
        self.max_length, self.ring = max_length, ring
        self._k: Tensor | None = None  # [B, Hk, columns, D]
        self._v: Tensor | None = None  # [B, Hk, columns, Dv]
        self._count: int | None = 0  # tokens so far, of the longest sequence; None: only the device knows
        self._at: Tensor | None = None  # the same on the device, int64 []; of a cache that is reserved
        self._first: list[int] | None = None  # of each sequence, its first column among those that came
        self._device_starts: Tensor | None = None  # the same on the device, int64 [B]
        self._shown = 0  # number of columns that a caller may hold a view of

    # Contents

    @property
    def _is_empty(self) -> bool:
        return self._count == 0

    @property
    def seen(self) -> int:
        """The number of tokens added to the longest sequence, including those that a ring dropped."""
        if self._count is None:
            assert self._at is not None
            self._count = int(self._at)
        return self._count

    @property
    def length(self) -> int:
        """The number of columns in use."""
        return min(self.seen, self.max_length) if self.ring and self.max_length else self.seen

    @property
    def batch(self) -> int | None:
        """The batch size; None until the first tokens are added."""
        return None if self._k is None else self._k.shape[0]

    @property
    def starts(self) -> Tensor | None:
        """The first real column of each sequence, int [B]; None if all begin at column 0."""
        if self._device_starts is None:
            return None
        return (self._device_starts - (self.seen - self.length)).clamp(min=0)

    @property
    def is_ragged(self) -> bool:
        """True if sequences are of different lengths."""
        return self._first is not None

    @property
    def nbytes(self) -> int:
        """The number of allocated bytes, including those for later tokens."""
        return sum(x.numel() * x.element_size() for x in (self._k, self._v) if x is not None)

    def positions(self, count: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of the next `count` tokens: int [T], or [B, T] for different lengths."""
        if self._k is not None:
            device = self._k.device
        if torch.compiler.is_compiling() and self._at is not None:
            next_ones = self._at + torch.arange(count, device=device)
        else:
            next_ones = torch.arange(self.seen, self.seen + count, device=device)
        return next_ones if self._device_starts is None else next_ones - self._device_starts[:, None]

    def columns(self, count: int) -> int:
        """Return S, the number of columns that a call with this number of tokens attends to."""
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

    # Adding tokens

    def reserve(
        self,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """Allocate max_length columns now, for compiled steps, and return the cache itself."""
        assert self.max_length is not None
        shape = (batch, num_kv_heads, self.max_length)
        self._k = _zeros((*shape, head_dim), dtype or torch.get_default_dtype(), device)
        self._v = _zeros((*shape, value_dim), dtype or torch.get_default_dtype(), device)
        with torch.inference_mode(False):
            self._at = torch.zeros((), dtype=torch.int64, device=device)
        return self

    def extend(
        self, k: Tensor, v: Tensor, lengths: Sequence[int] | None = None, module: nn.Module | None = None
    ) -> tuple[Tensor, Tensor, Mask | None]:
        """Add the keys and values of new tokens.

        Args:
            k: [B, Hk, T, D], already rotated if positions are rotary.
            v: [B, Hk, T, Dv]
            lengths: the first lengths[b] of the T tokens of sequence b are real.
            module: the module that computed the keys and values.

        Returns:
            All keys [B, Hk, S, D] and values [B, Hk, S, Dv] that the T new tokens attend to, in order, and
            which of them are padding.

        Raises:
            ShapeError: sizes that do not fit those in the cache; more than max_length columns.
            ArgumentError: another dtype or device; gradients in a cache of fixed size; a cache that another
                module filled.
        """
        joins = self.check(k, v, module)
        T, count = k.shape[2], self.seen
        if lengths is not None:
            return self._extend_ragged(k, v, lengths, joins)
        end = count + T
        if self.ring and self.max_length is not None and end > self.max_length:
            return self._extend_ring(k, v, end)
        self._check_room(count, T, end)
        if joins:
            self._k = k if not count or self._k is None else torch.cat((self._k[:, :, :count], k), 2)
            self._v = v if not count or self._v is None else torch.cat((self._v[:, :, :count], v), 2)
        else:
            if self._k is None or end > self._k.shape[2] or self._k.requires_grad:
                self._grow(k, v, end)
            self._write(count, k, v)
        self._set_count(end)
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
        """Return the next token's column if it can be written in place (no view shows it), or None."""
        count, k, v = self._count, self._k, self._v
        if k is None or v is None or count is None or self.ring or self._first is not None:
            return None
        if count < self._shown or count >= k.shape[2] or k.requires_grad or v.requires_grad:
            return None
        a, b = k.shape, v.shape
        if a[0] != batch or a[1] != num_kv_heads or a[3] != head_dim or b[3] != value_dim:
            return None
        plain = k.dtype is x.dtype and v.dtype is x.dtype and k.device == x.device
        return count if plain else None

    def add_column(self, at: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add one token, [B, Hk, 1, D] and [B, Hk, 1, Dv], at column `at`; return all keys and values."""
        assert self._k is not None and self._v is not None
        self._k.data.narrow(2, at, 1).copy_(k)
        self._v.data.narrow(2, at, 1).copy_(v)
        self._count = self._shown = end = at + 1
        if self._at is not None:
            self._at.fill_(end)
        return self._k.narrow(2, 0, end), self._v.narrow(2, 0, end)

    def _extend_ring(self, k: Tensor, v: Tensor, end: int) -> tuple[Tensor, Tensor, Mask | None]:
        """Add tokens to a full ring; the keys and values returned are a copy, in order."""
        assert self.max_length is not None
        T, stored = k.shape[2], min(k.shape[2], self.max_length)
        keys, values = self._after_past(k, v, self.max_length - 1)
        if self._k is None:
            self._grow(k, v, end)
        self._write(end - stored, k[:, :, T - stored :], v[:, :, T - stored :])
        self._set_count(end)
        return keys, values, self._padding(end, keys.shape[2])

    def _extend_ragged(
        self, k: Tensor, v: Tensor, lengths: Sequence[int], joins: bool
    ) -> tuple[Tensor, Tensor, Mask | None]:
        """Add a chunk padded on its right; it is attended to as it is, and stored aligned at its end."""
        (B, _, T, _), tokens, length, device = k.shape, self.seen, self.length, k.device
        first = self._first or [0] * B
        totals = [tokens - start + count for start, count in zip(first, lengths, strict=True)]
        end = max(totals)
        self._check_room(tokens, end - tokens, end)
        keys, values = self._after_past(k, v, length)
        counts = torch.tensor(lengths, device=device)[:, None]
        counted = torch.arange(T, device=device) < counts  # [B, T]
        past = (
            torch.arange(tokens - length, tokens, device=device)
            >= torch.tensor(first, device=device)[:, None]
        )
        real = torch.cat((past, counted), 1)
        stored = min(end, self.max_length) if self.ring and self.max_length else end
        column = (torch.arange(stored, device=device) + (length - stored) + counts).clamp(min=0)[
            :, None, :, None
        ]
        k, v = (x.gather(2, column.expand(-1, x.shape[1], -1, x.shape[3])) for x in (keys, values))
        if joins:
            self._k, self._v = k, v
        else:
            if self.max_length is None:
                self._k = self._v = None  # a new block: maps still use the old one
            if self._k is None:
                self._grow(k, v, end)
            self._write(end - stored, k, v)
        starts = [end - total for total in totals]
        self._set_count(end)
        self._set_first(starts if any(starts) else None)
        return keys, values, BoundMask(keys=real, queries=counted)

    def _after_past(self, k: Tensor, v: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Return the last columns that are stored, at most `most`, followed by the new ones."""
        if self._k is None or self._v is None or not min(self.length, most):
            return k, v
        past = (self._in_order(block, most) for block in (self._k, self._v))
        keys, values = (torch.cat((*old, new), 2) for old, new in zip(past, (k, v), strict=True))
        return keys, values

    def _in_order(self, block: Tensor, most: int) -> list[Tensor]:
        """Return the last columns of a block, at most `most`, in order: a view, or two of a wrapped ring."""
        tokens, count = self.seen, min(self.length, most)
        if not self.ring or self.max_length is None or tokens <= self.max_length:
            return [block[:, :, tokens - count : tokens]]
        begin, stop = (tokens - count) % self.max_length, tokens % self.max_length
        if begin < stop:
            return [block[:, :, begin:stop]]
        return [block[:, :, begin:], block[:, :, :stop]]

    def _write(self, begin: int, k: Tensor, v: Tensor) -> None:
        """Write columns from `begin` on; torch counts it as a change if a caller may hold a view of them."""
        assert self._k is not None and self._v is not None
        room, count = self._k.shape[2], k.shape[2]
        slot = begin % room if self.ring else begin
        fitting = min(count, room - slot)
        spans = [(slot, 0, fitting)] if fitting == count else [(slot, 0, fitting), (0, fitting, count)]
        unshown = spans[-1][0] >= self._shown  # no view shows these columns
        for block, new in ((self._k, k), (self._v, v)):
            target = block.data if unshown else block
            for at, start, stop in spans:
                target[:, :, at : at + stop - start] = new if stop - start == count else new[:, :, start:stop]
        if not unshown:
            self._shown = 0  # maps that use these blocks raise from now on

    def _grow(self, k: Tensor, v: Tensor, end: int) -> None:
        """Allocate blocks for at least `end` columns, and copy the stored columns into them."""
        room = max(LEAST, end + end // 2) if self.max_length is None else self.max_length
        old, count = (self._k, self._v), self.seen
        self._k = _zeros((*k.shape[:2], room, k.shape[3]), k.dtype, k.device)
        self._v = _zeros((*v.shape[:2], room, v.shape[3]), v.dtype, v.device)
        self._shown = 0
        if count and old[0] is not None and old[1] is not None:
            self._k.data[:, :, :count] = old[0][:, :, :count].detach()
            self._v.data[:, :, :count] = old[1][:, :, :count].detach()

    def _set_count(self, count: int) -> None:
        """Store the number of tokens so far."""
        self._count = count
        if self._at is not None:
            self._at.fill_(count)

    def _set_first(self, first: list[int] | None) -> None:
        """Store the first column of each sequence; None: all begin at column 0."""
        self._first = first
        device = None if self._k is None else self._k.device
        self._device_starts = None if first is None else torch.tensor(first, device=device)

    def _padding(self, end: int, count: int) -> Mask | None:
        """Return the mask of padding among the last `count` columns; None if there is no padding."""
        if self._first is None or self._device_starts is None or end - count >= max(self._first):
            return None
        columns = torch.arange(end - count, end, device=self._device_starts.device)
        return BoundMask(keys=columns >= self._device_starts[:, None])

    # Checks

    def check(self, k: Tensor, v: Tensor, module: nn.Module | None = None) -> bool:
        """Return True if gradients flow to the stored tensors, which are then concatenated, not written into.

        Raises:
            ShapeError, ArgumentError: keys and values that do not fit those in the cache; gradients in a
                cache of fixed size; a cache that another module filled.
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
                f"max_length must be None for keys that require gradients: got {self.max_length}; run under "
                "torch.no_grad(), or leave max_length out"
            )
        return True

    def _check_room(self, count: int, more: int, end: int) -> None:
        if self.max_length is not None and end > self.max_length and not self.ring:
            raise ShapeError(
                f"max_length must be at least the number of tokens: {count} + {more} > {self.max_length}; "
                "make the cache larger or crop it"
            )

    def _check_fit(self, k: Tensor, v: Tensor) -> None:
        """Raise unless these keys and values fit the stored ones."""
        keys = self._k
        if keys is None or self._v is None:
            return
        a, b = keys.shape, k.shape
        if a[0] == b[0] and a[1] == b[1] and a[3] == b[3] and self._v.shape[3] == v.shape[3]:
            if keys.dtype is k.dtype and self._v.dtype is v.dtype and keys.device == k.device:
                return
            raise ArgumentError(
                f"cache must have the dtype and device of the new keys: {keys.dtype} on {keys.device}, not "
                f"{k.dtype} on {k.device}; make a new cache with mha.cache() after moving the model"
            )
        if not self.seen and self._at is None:
            self._k = self._v = None  # an empty cache without reserved memory
            return
        if a[0] != b[0]:
            raise ShapeError(
                f"cache must have the batch size of the input: {a[0]}, not {b[0]}; repeat or drop sequences "
                "with cache.reorder(index), or make a new cache"
            )
        raise ShapeError(
            f"cache must have the module's heads: {a[1]} of {a[3]} and {self._v.shape[3]} channels, not "
            f"{b[1]} of {b[3]} and {v.shape[3]}; make one cache per layer"
        )

    # Changing tokens

    def reorder(self, index: Tensor | Sequence[int]) -> None:
        """Replace sequence i by sequence index[i], for beam search; the new batch size is len(index).

        Raises:
            ArgumentError: not a 1-D tensor of whole numbers; a sequence that does not exist.
        """
        if self._k is None or self._v is None:
            return
        chosen, B = order_of(index, self._k), self._k.shape[0]
        if self._first is not None:
            self._set_first([self._first[i] for i in chosen.tolist()])
        if self._at is not None and len(chosen) == B:  # compiled steps read these blocks
            for block in (self._k, self._v):
                block.copy_(block.index_select(0, chosen))
            return
        joins = torch.is_grad_enabled()
        with torch.inference_mode(False):  # outside inference mode, so that gradients are possible again
            self._k, self._v = (
                x.index_select(0, chosen) if joins else x.detach().index_select(0, chosen)
                for x in (self._k, self._v)
            )
        self._shown = 0

    def crop(self, length: int) -> None:
        """Remove all columns from `length` on: the last `cache.length - length` tokens of each sequence.

        Raises:
            ShapeError: a length above the current one or below 0; a ring that has dropped tokens before this
                length.
        """
        length, now = whole_number(length, "length"), self.length
        if not 0 <= length <= now:
            raise ShapeError(f"length must be between 0 and {now}: got {length}; use at most cache.length")
        if length == now:
            return
        if self.seen > now:
            raise ShapeError(
                f"length must be {now} for a ring that has dropped tokens: got {length}; use a cache without "
                "ring=True"
            )
        assert self._k is not None and self._v is not None
        if self._k.requires_grad or self._v.requires_grad:
            self._k, self._v = self._k[:, :, :length], self._v[:, :, :length]
        elif self._at is not None:  # compiled steps read all columns, so the rest must be zeros
            self._k[:, :, length:].zero_()
            self._v[:, :, length:].zero_()
        self._set_count(length)
        self._set_first(self._first and [min(start, length) for start in self._first])

    def reset(self) -> None:
        """Remove all tokens; the memory stays allocated."""
        if self._k is not None and self._v is not None:
            if self._k.requires_grad or self._v.requires_grad:
                self._k = self._v = None
            elif self._at is not None:
                self._k.zero_()
                self._v.zero_()
        self._set_count(0)
        self._set_first(None)

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        new = KVCache.__new__(KVCache)
        memo[id(self)] = new
        with torch.inference_mode(False):  # otherwise it could be written to in inference mode alone
            for name, value in self.__dict__.items():
                new.__dict__[name] = value.clone() if isinstance(value, Tensor) else value
        new._owner = self._owner_of_copy(memo)
        new._first = None if self._first is None else list(self._first)
        new._shown = 0  # no caller has a view of the copied blocks
        return new


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return a block of zeros: hidden values are multiplied by 0, so they must be finite."""
    with torch.inference_mode(False):  # otherwise it could be written to in inference mode alone
        return torch.zeros(shape, dtype=dtype, device=device)


def order_of(index: Tensor | Sequence[int], like: Tensor) -> Tensor:
    """Return the indices of sequences, int64 [B'], on the device of `like`.

    Raises:
        ArgumentError: not a 1-D tensor of whole numbers; a sequence that does not exist.
    """
    chosen = torch.as_tensor(index, device=like.device)
    if chosen.ndim != 1 or chosen.dtype == torch.bool or chosen.is_floating_point() or not len(chosen):
        raise ArgumentError(
            f"index must be whole numbers [B']: got {chosen.dtype} {list(chosen.shape)}; give the "
            "number of an old sequence for each new one"
        )
    if can_read(chosen):
        low, high = int(chosen.min()), int(chosen.max())
        if low < 0 or high >= like.shape[0]:
            raise ArgumentError(
                f"index must contain numbers of sequences: got {low if low < 0 else high} of "
                f"{like.shape[0]}; use 0 to {like.shape[0] - 1}"
            )
    return chosen.long()
