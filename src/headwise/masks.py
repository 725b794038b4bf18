"""`Mask`: who may attend to whom, kept as rules, never as a T x S matrix unless someone gave one.

Letters: B batch, T query_len, S key_len, H num_heads. True = may attend, everywhere.

Query i stands at position p_i = i + S - T: the last query is aligned with the last key. Hence with T = 2
queries over S = 5 keys, causal means

            keys      0 1 2 3 4                       window=2
            query 0   x x x x .       query 0   . . x x .
            query 1   x x x x x       query 1   . . . x x

The rules are entries: a class each (`Rule` says what it answers), its fields in `Mask`, its place in
`Mask.RULES`; those of padding and documents are in sequence_rules.py. The kernels on a GPU have a field and a
line for it in engines/gpu/tile.py, the truth a line in reference.py (CONTRIBUTING.md, "A rule of the mask").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from .errors import MaskError
from .indexing import Index, fits, take, within
from .mask_meaning import as_allowed, check_meaning, instead, whole_number
from .mask_rules import (
    AnyRule,
    Changes,
    Fields,
    Known,
    Rule,
    RuleSet,
    Shape,
    Span,
    Value,
    can_read,
    cannot_join,
    smaller,
)
from .sequence_rules import Counted, Documents, Padding, as_ids, as_padding, document_ends, real_keys

__all__ = ["CAUSAL", "NOTHING_HIDDEN", "BoundMask", "Mask", "as_mask", "mask_of_call"]


class Band(Rule["Mask"]):
    """Keys at most so many places before and after the query."""

    fields: ClassVar[Fields] = {"left": "", "right": ""}
    is_band = is_countable = True

    def join(self, a: Mask, b: Mask) -> Changes:
        return {"left": smaller(a.left, b.left), "right": smaller(a.right, b.right)}

    def negated(self, mask: Mask) -> Changes | None:
        left, right = mask.left, mask.right
        if right is None:
            return None if left is None else {"left": None, "right": -left - 1}
        return {"left": -right - 1, "right": None} if left is None else None

    def tile(self, mask: Mask, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        offset = spots - at[:, None]  # [t, s]: how far ahead of the query the key is
        if mask.right is None:
            assert mask.left is not None
            return offset >= -mask.left
        seen = offset <= mask.right
        return seen if mask.left is None else seen & (offset >= -mask.left)

    def span(self, mask: Mask, ends: Span, rows: Index, keys: Span) -> Span:
        start, stop = keys
        if mask.left is not None:
            start = max(start, ends[0] - mask.left)
        if mask.right is not None:
            stop = min(stop, ends[1] + mask.right + 1)
        return start, stop

    def for_kernels(self, mask: Mask) -> dict[str, Value | None]:
        return {}  # they have both bounds among their numbers

    def is_listed(self, mask: Mask) -> bool:
        return False


class Dense(Rule["Mask"]):
    """Whatever mask there is, as someone gave it."""

    fields: ClassVar[Fields] = {"allowed": "bhts"}
    is_copied = is_made = False  # as large as the weights

    def join(self, a: Mask, b: Mask) -> Changes:
        mine, theirs = a.allowed, b.allowed
        if mine is None or theirs is None:
            return {"allowed": theirs if mine is None else mine}
        pairs = zip(mine.shape, theirs.shape, strict=True)
        if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
            raise cannot_join("dense masks", mine.shape, theirs.shape)
        return {"allowed": mine & theirs}

    def negated(self, mask: Mask) -> Changes | None:
        assert mask.allowed is not None
        return {"allowed": ~mask.allowed}

    def check(self, mask: Mask, shape: Shape) -> None:
        assert mask.allowed is not None
        if not all(map(fits, mask.allowed.shape, shape)):
            raise MaskError(
                f"mask must broadcast to [B, H, T, S] = {list(shape)}: got {list(mask.allowed.shape)}; "
                f"{instead(mask.allowed.shape, shape)}"
            )

    def tile(self, mask: Mask, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        assert mask.allowed is not None
        return take(mask.allowed, (None, None, rows, columns))

    def span(self, mask: Mask, ends: Span, rows: Index, keys: Span) -> Span:
        assert mask.allowed is not None
        if mask.allowed.shape[-1] == 1 or not can_read(mask.allowed):
            return keys
        seen = take(mask.allowed, (None, None, rows, None)).any(-2).flatten(0, -2).any(0)  # [S]
        return within(seen.nonzero().squeeze(-1), *keys)

    def added_shape(self, mask: Mask, shape: Shape) -> tuple[int, ...]:
        assert mask.allowed is not None
        return tuple(mask.allowed.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Mask(RuleSet):
    """A set of rules about which query may attend to which key; join them with `&`, also with a tensor.

        Mask.causal()                      keys up to the query's own position
        Mask.window(256)                   the query itself and the 255 keys before it
        Mask.window(left_right=(3, 3))     keys at most 3 away on either side
        Mask.padding(lengths)              only the first lengths[b] keys of sequence b are real
        Mask.documents(ids)                only keys of the query's own document
        Mask.dense(allowed)                a bool tensor broadcastable to [B, H, T, S]

    A mask holds a few numbers and small tensors; `full` makes the [T, S] matrix and `tile` any piece of it.
    `~` and `|` give a mask where the answer is one rule again (causal, dense, bool padding), and say what to
    write where it is not. `==` compares rules: the same numbers, tensors of the same values.

    A tensor is read as [T, S] where it has two dimensions, True or 1 = may attend, joined to a mask as in
    `mask=`. Where its values say that something else was meant, that raises `MaskError`: a causal mask the
    other way round, as torch has it (of two queries or more); rows that read as the padding of sequences, not
    as causal or banded, where there may be as many sequences as queries. `Mask.dense(tensor)` is taken as it
    is. Values are looked at in eager mode on a CPU alone: a GPU would have to finish first what it was given.

    Example:
        >>> m = Mask.causal() & Mask.window(2)
        >>> m
        Mask(left=1, right=0)
        >>> m.full(3, 4).int()
        tensor([[[[1, 1, 0, 0],
                  [0, 1, 1, 0],
                  [0, 0, 1, 1]]]], dtype=torch.int32)
    """

    RULES: ClassVar[tuple[AnyRule, ...]] = (
        Band(),
        Padding(),
        Counted(),
        Documents(),
        Dense(),
    )

    left: int | None = None  # keys before p_i - left are hidden
    right: int | None = None  # keys after p_i + right are hidden
    keys: Tensor | None = None  # int [B] lengths, or bool [B, S]: which keys are real
    queries: Tensor | None = None  # int [B] lengths, or bool [B, T]: which queries count in means
    key_ids: Tensor | None = None  # int [B or 1, S, N]: N labels per key, all of which must match
    query_ids: Tensor | None = None  # int [B or 1, T, N]; None: the last T of key_ids
    allowed: Tensor | None = None  # bool, 4-D, broadcastable to [B, H, T, S]

    @classmethod
    def causal(cls) -> Mask:
        """Keys up to the query's own position; with T != S the last query sees the last key."""
        return CAUSAL if cls is Mask else cls(right=0)

    @classmethod
    def window(cls, size: int | None = None, *, left_right: tuple[int, int] | None = None) -> Mask:
        """The `size` most recent keys, the query's own among them; or a band (left, right) around it.

        Args:
            size: number of keys seen, counting the query itself: 1 sees itself alone. Keys after the query
                are not among them, so `window(W)` needs no `causal()` beside it.
            left_right: instead of size, how many keys may be seen before and after the query.

        Raises:
            MaskError: size < 1; a negative reach; not whole numbers, not a pair; both or neither given.
        """
        if (size is None) == (left_right is None):
            raise MaskError(
                f"window takes one of size and left_right: got size={size}, left_right={left_right}; "
                "give a number of keys or a pair"
            )
        if left_right is not None:
            if not (isinstance(left_right, Sequence) and len(left_right) == 2):
                raise MaskError(
                    f"left_right must be a pair: got {left_right!r}; "
                    "give how many keys before and after the query"
                )
            left, right = (whole_number(reach, "left_right") for reach in left_right)
            if left < 0 or right < 0:
                raise MaskError(f"left_right must not be negative: got {left_right}; use (0, 0) or more")
            return cls(left=left, right=right)
        size = whole_number(size, "window")
        if size < 1:
            raise MaskError(f"window must be at least 1: got {size}; 1 sees the query's own position alone")
        return cls(left=size - 1, right=0)

    @classmethod
    def padding(
        cls,
        lengths: Tensor | Sequence[int],
        query_lengths: Tensor | Sequence[int] | None = None,
    ) -> Mask:
        """Hides the keys that are only padding.

        Args:
            lengths: int [B], the first lengths[b] keys are real; or bool [B, S], True = real. A list, or a
                tensor in CPU memory, goes to the device of q by itself.
            query_lengths: which queries are real, in either form. This hides nothing: padded queries keep
                their weights, but means, `received` and pooled pictures leave them out.

        Raises:
            MaskError: not 1-D integers or 2-D bool; a negative length.
        """
        return cls(
            keys=as_padding(lengths, "lengths"),
            queries=None if query_lengths is None else as_padding(query_lengths, "query_lengths"),
        )

    @classmethod
    def documents(cls, ids: Tensor | Sequence[int], query_ids: Tensor | Sequence[int] | None = None) -> Mask:
        """Several documents packed in one sequence: a query sees keys that carry its own document's id.

        Args:
            ids: int [S] or [B, S]. A list, or a tensor in CPU memory, goes to the device of q by itself.
            query_ids: int [T] or [B, T]; by default the last T of `ids`.

        Raises:
            MaskError: ids that are not whole numbers, or not 1-D or 2-D.
        """
        return cls(
            key_ids=as_ids(ids, "ids"),
            query_ids=None if query_ids is None else as_ids(query_ids, "query_ids"),
        )

    @classmethod
    def dense(cls, allowed: Tensor) -> Mask:
        """Whatever mask there is, as a tensor broadcastable to [B, H, T, S]: bool, or numbers 0 and 1.

        Raises:
            MaskError: values other than 0 and 1, or a float mask of zeros alone (both only where reading
                values is free: eager mode, CPU); more than four dimensions.
        """
        return cls(allowed=as_allowed(allowed))

    __array_ufunc__: ClassVar[None] = None  # numpy must not join a mask to each bool of an array

    def __and__(self, other: object) -> Mask:
        """Both rules at once; a tensor is read as `mask=` reads it.

        Raises:
            MaskError: rules of one kind whose sizes differ; query_ids in one of two document masks only; a
                tensor that seems to be meant otherwise.
        """
        if not isinstance(other, Mask):
            other = _from_tensor(other)
            if other is None:
                return NotImplemented
        mine, theirs = _on_one_device(self, other)
        joined: Changes = {}
        for rule in self.RULES:
            joined |= rule.join(mine, theirs)
        bound = isinstance(self, BoundMask) and isinstance(other, BoundMask)
        return (BoundMask if bound else Mask)(**joined)

    __rand__ = __and__

    def __or__(self, other: object) -> Mask:
        """What either shows; queries count that count in both. A tensor is read as `mask=` reads it.

        Raises:
            MaskError: that is not one rule, and the message says what to write; or as with `&`.
        """
        if not isinstance(other, Mask):
            other = _from_tensor(other)
            if other is None:
                return NotImplemented
        return self._either(other)

    __ror__ = __or__

    def bind(self, batch: int, num_heads: int, query_len: int, key_len: int) -> Mask:
        """The same rules, checked against [B, H, T, S], with all that is kept per query spelled out.

        Lengths, padding and labels are copied: the rules of a call stay what they were in it, whatever is
        written to the tensors they came from. A dense mask, as large as the weights, is not.

        Raises:
            MaskError: a rule whose sizes do not fit.
        """
        if self.is_positional:
            return self
        for rule in self.rules:
            rule.check(self, (batch, num_heads, query_len, key_len))
        if isinstance(self, BoundMask):
            return self
        held = self.copies()
        for rule in self.rules:
            rule.spell_out(held, query_len, key_len)
        return BoundMask(**held)

    def numbers_alone(self) -> Changes:
        """All that is known of it but its tensors, which are None; for `bound_alike`."""
        known: Changes = dict.fromkeys(self.FIELDS)
        known |= {name: value for name, value in self.held.items() if name not in self.tensor_fields}
        return known | {name: getattr(self, name) for name in Known.__annotations__}

    def bound_alike(self, numbers: Changes, query_len: int, key_len: int) -> Mask:
        """`bind` of a mask that is in every size like one that was bound before, whose numbers are given.

        Nothing is checked: it is for tensors that no check would read.
        """
        mine: Changes = self.__dict__
        held: Changes = {}
        for name in self.tensor_fields:
            value = mine[name]
            if value is not None:
                held[name] = value.clone() if name in self.copied_fields else value
        for rule in self.spelled_out:
            rule.spell_out(held, query_len, key_len)
        bound = BoundMask.__new__(BoundMask)  # without the way of a frozen class, an attribute at a time
        bound.__dict__.update(numbers)
        bound.__dict__.update(held)
        return bound

    def unbound(self) -> Mask:
        """The same rules with small tensors of their own, to do with as one likes."""
        return Mask(**self.copies())

    @property
    def num_labels(self) -> int:
        """Document labels of each key, all of which must match; 0 without documents."""
        return 0 if self.key_ids is None else self.key_ids.shape[-1]

    @property
    def _real_keys(self) -> Tensor:
        return real_keys(self)

    @property
    def _document_ends(self) -> tuple[Tensor, Tensor]:
        return document_ends(self)

    def sees_any(self, at: Tensor, start: int, stop: int) -> Tensor:
        """Which queries at these positions see a key in [start, stop), as far as positions and padding say.

        bool [B or 1, t or 1]; documents and dense masks are not asked.
        """
        if self.left is None and self.right is None and self.keys is not None:
            real = self.keys > start if self.keys.ndim == 1 else self.keys[:, start:stop].any(-1)
            return real[:, None]
        first = at - self.left if self.left is not None else torch.full_like(at, start)
        last = at + self.right if self.right is not None else torch.full_like(at, stop - 1)
        first, beyond = first.clamp(start, stop), (last + 1).clamp(start, stop)  # [t]
        if self.keys is None:
            return (first < beyond)[None]
        if self.keys.ndim == 1:
            return first < torch.minimum(beyond, self.keys[:, None])
        upto = torch.nn.functional.pad(self.keys.cumsum(-1), (1, 0))  # real keys before each position
        return upto[:, beyond] > upto[:, torch.minimum(first, beyond)]

    def counted(self, query_len: int) -> Tensor | None:
        """Which queries count in means, bool [B, T]; None: all of them."""
        if self.queries is None or self.queries.ndim == 2:
            return self.queries
        return torch.arange(query_len, device=self.queries.device) < self.queries[:, None]

    def is_padding_at(self, at: Tensor) -> Tensor:
        """Whether the keys at these positions are padding, bool [B, t]; positions outside are not checked."""
        assert self.keys is not None
        if self.keys.ndim == 1:
            return at >= self.keys[:, None]
        return ~self.keys[:, at.clamp(0, self.keys.shape[1] - 1)]


class BoundMask(Mask):
    """The rules of one call. Its small tensors are its own, so what was found out about them stays true."""

    @cached_property
    def _real_keys(self) -> Tensor:
        return real_keys(self)

    @cached_property
    def _document_ends(self) -> tuple[Tensor, Tensor]:
        return document_ends(self)


assert [*Mask.FIELDS] == [f.name for f in fields(Mask) if f.init], "fields are those of RULES, in that order"
NOTHING_HIDDEN, CAUSAL = Mask(), Mask(right=0)  # the two that nearly every call has, made once


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """Some pairs of query and key as a `Mask`: None is all of them, a tensor `Mask.dense`, as it is."""
    if mask is None:
        return NOTHING_HIDDEN
    return mask if isinstance(mask, Mask) else Mask.dense(mask)


def mask_of_call(mask: Mask | Tensor | None, batch: int | None = None, query_len: int | None = None) -> Mask:
    """The mask of a call, from its argument: as `as_mask`, but a tensor must mean what it seems to mean.

    Args:
        batch, query_len: of the call; without them, any [T, S] might be padding [B, S].

    Raises:
        MaskError: a tensor that is no mask, or reads as if it were meant otherwise; see `check_meaning`.
    """
    if mask is None:
        return NOTHING_HIDDEN
    if isinstance(mask, Mask):
        return mask
    rules = Mask.dense(mask)
    assert rules.allowed is not None
    if can_read(mask):
        may_be_padding = mask.ndim == 2 and batch == query_len and (batch is None or mask.shape[0] == batch)
        check_meaning(mask, rules.allowed, may_be_padding)
    return rules


def _on_one_device(a: Mask, b: Mask) -> tuple[Mask, Mask]:
    """Both masks, with what was given as lists where the other's tensors are."""
    if a.is_positional or b.is_positional:
        return a, b
    for x in (*a.tensors.values(), *b.tensors.values()):
        if not x.is_cpu:
            return a.beside(x.device), b.beside(x.device)
    return a, b


def _from_tensor(other: object) -> Mask | None:
    """What is joined to a mask, read as `mask=` reads it; None: nothing like a tensor."""
    return mask_of_call(other) if isinstance(other, Tensor) or hasattr(other, "__array__") else None  # type: ignore[arg-type]


torch.serialization.add_safe_globals([Mask, BoundMask])
