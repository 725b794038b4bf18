"""`Mask`: who may attend to whom, stored as rules, not as a T x S matrix unless the user passes one.

Letters: B batch, T query_len, S key_len, H num_heads. True = may attend, everywhere.

Query i stands at position p_i = i + S - T: the last query is aligned with the last key. Hence with T = 2
queries over S = 5 keys, causal means

            keys      0 1 2 3 4                       window=2
            query 0   x x x x .       query 0   . . x x .
            query 1   x x x x x       query 1   . . . x x

Each rule is a class (ours are in mask_rules.py), an entry of `Mask.RULES` and a field or two of `Mask`. The
kernels on a GPU have a field and a condition for it in engines/gpu/tile.py, the reference a line in
reference.py (CONTRIBUTING.md, "A rule of the mask").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from .errors import MaskError
from .indexing import Index, positions_of, take
from .mask_meaning import as_allowed, as_ids, as_padding, check_meaning, whole_number
from .mask_rules import (
    Band,
    Changes,
    Counted,
    Dense,
    Documents,
    Fields,
    Padding,
    Rule,
    Shape,
    Value,
    can_read,
    document_ends,
    dtype_name,
    real_keys,
    real_positions,
)


class RuleFacts:
    """Facts that follow from a mask's rules, set when it is created, since every call reads them."""

    rules: tuple[Rule, ...]  # rules that are set
    hiding: tuple[Rule, ...]  # those of them that hide keys
    hides_nothing: bool  # every query may attend to every key
    is_positional: bool  # at most a band: no tensor in it
    is_band: bool  # only a band hides keys: kernels need no tensor for it
    is_padded_band: bool  # only a band and padding hide keys
    is_countable: bool  # the keys a query sees are counted without reading each
    is_narrow: bool  # a block of queries sees few of the keys
    allocates_tile: bool  # computing a tile allocates a bool tensor [t, s]
    tensor_fields: tuple[str, ...]  # fields that may hold a tensor, in order
    copied_fields: tuple[str, ...]  # those of them whose tensors each call copies
    spelled_out: tuple[Rule, ...]  # rules with fields that a call may leave out


def facts_of(rules: tuple[Rule, ...]) -> dict[str, object]:
    """Return the `RuleFacts` of a mask with these rules."""
    hiding = tuple(rule for rule in rules if rule.hides)
    is_copied = {name: rule.is_copied for rule in rules for name, dims in rule.fields.items() if dims}
    return {
        "rules": rules,
        "hiding": hiding,
        "hides_nothing": not hiding,
        "is_positional": all(rule.is_band for rule in rules),
        "is_band": all(rule.is_band for rule in hiding),
        "is_padded_band": all(rule.is_band or rule.is_padding for rule in hiding),
        "is_countable": all(rule.is_countable for rule in hiding),
        "is_narrow": any(rule.is_narrow for rule in hiding),
        "allocates_tile": any(rule.allocates_tile for rule in hiding),
        "tensor_fields": tuple(is_copied),
        "copied_fields": tuple(name for name in is_copied if is_copied[name]),
        "spelled_out": tuple(rule for rule in rules if type(rule).spell_out is not Rule.spell_out),
    }


def facts_of_sets(rules: tuple[Rule, ...]) -> tuple[dict[str, object], ...]:
    """Return the facts of every set of these rules; the i-th rule is bit i of the number of a set."""
    sets = range(1 << len(rules))
    return tuple(facts_of(tuple(rule for i, rule in enumerate(rules) if bits >> i & 1)) for bits in sets)


@dataclass(frozen=True, eq=False, repr=False)
class Mask(RuleFacts):
    """A set of rules about which query may attend to which key; `&` combines it with rules or a tensor.

        Mask.causal()                      keys up to the query's own position
        Mask.window(256)                   the query itself and the 255 keys before it
        Mask.window(left_right=(3, 3))     keys at most 3 away on either side
        Mask.padding(lengths)              only the first lengths[b] keys of sequence b are real
        Mask.documents(ids)                only keys of the query's own document
        Mask.dense(allowed)                a bool tensor broadcastable to [B, H, T, S]

    A mask holds a few numbers and small tensors; `full` returns the [T, S] matrix and `tile` any part of it.
    `~` and `|` return a mask if a single rule can express the result (causal, dense, bool padding). Otherwise
    they raise, and the message says what to write instead. Two masks are equal
    (`==`) if their rules have equal numbers and tensors of equal values.

    In `mask & tensor`, as in `mask=`, True or 1 means may attend, and a tensor with two dimensions is read as
    [T, S]. A tensor whose values suggest another meaning raises `MaskError`: a causal mask with True =
    hidden, as torch writes it (for two queries or more); or a [T, S] tensor that could be a padding mask
    [B, S], if the batch may have as many sequences as there are queries. `Mask.dense(tensor)` accepts any
    values. Values are checked only in eager mode on a CPU, since reading them from a GPU would force a
    synchronization.

    Example:
        >>> m = Mask.causal() & Mask.window(2)
        >>> m
        Mask(left=1, right=0)
        >>> m.full(3, 4).int()
        tensor([[[[1, 1, 0, 0],
                  [0, 1, 1, 0],
                  [0, 0, 1, 1]]]], dtype=torch.int32)
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
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

    FIELDS: ClassVar[Fields] = {name: dims for rule in RULES for name, dims in rule.fields.items()}
    BITS: ClassVar = tuple((name, 1 << i) for i, rule in enumerate(RULES) for name in rule.fields)
    FACTS: ClassVar = facts_of_sets(RULES)

    @classmethod
    def causal(cls) -> Mask:
        """Return a mask of keys up to the query's position; with T != S the last query sees the last key."""
        return CAUSAL if cls is Mask else cls(right=0)

    @classmethod
    def window(cls, size: int | None = None, *, left_right: tuple[int, int] | None = None) -> Mask:
        """Return a mask of the `size` most recent keys, the query's own included; or of a band (left, right).

        Args:
            size: the number of keys a query may attend to, its own included: with 1, only its own key. Keys
                after the query are hidden, so `window(W)` needs no `causal()`.
            left_right: instead of size, how many keys may be seen before and after the query.

        Raises:
            MaskError: size < 1; a negative distance; not whole numbers; not a pair; both or neither of size
                and left_right.
        """
        if (size is None) == (left_right is None):
            raise MaskError(
                f"window must get either size or left_right: got size={size}, left_right={left_right}; "
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
            raise MaskError(f"window must be at least 1: got {size}; 1 is the query's own position only")
        return cls(left=size - 1, right=0)

    @classmethod
    def padding(
        cls,
        lengths: Tensor | Sequence[int],
        query_lengths: Tensor | Sequence[int] | None = None,
    ) -> Mask:
        """Return a mask that hides the keys that are padding.

        Args:
            lengths: int [B], the first lengths[b] keys are real; or bool [B, S], True = real. A list, or a
                tensor in CPU memory, is moved to the device of q.
            query_lengths: which queries are real, in either form. This hides nothing: padded queries keep
                their weights, but means, `received` and pooled maps leave them out.

        Raises:
            MaskError: not 1-D integers or 2-D bool; a negative length.
        """
        return cls(
            keys=as_padding(lengths, "lengths"),
            queries=None if query_lengths is None else as_padding(query_lengths, "query_lengths"),
        )

    @classmethod
    def documents(cls, ids: Tensor | Sequence[int], query_ids: Tensor | Sequence[int] | None = None) -> Mask:
        """Return a mask of packed documents: a query may attend to the keys with its own document's id.

        Args:
            ids: int [S] or [B, S]. A list, or a tensor in CPU memory, is moved to the device of q.
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
        """Return any mask from a tensor broadcastable to [B, H, T, S]: bool, or numbers 0 and 1.

        Raises:
            MaskError: values other than 0 and 1, or a float mask of zeros only (both are checked only in
                eager mode on a CPU); more than four dimensions.
        """
        return cls(allowed=as_allowed(allowed))

    def __post_init__(self) -> None:
        bits = 0
        for name, bit in self.BITS:
            if getattr(self, name) is not None:
                bits |= bit
        if torch.compiler.is_compiling():  # compilers need setattr
            for name, value in self.FACTS[bits].items():
                object.__setattr__(self, name, value)
        else:
            self.__dict__.update(self.FACTS[bits])

    def __repr__(self) -> str:
        parts = []
        for name, value in self.held.items():
            shown = f"{dtype_name(value)}{list(value.shape)}" if isinstance(value, Tensor) else value
            parts.append(f"{name}={shown}")
        return f"Mask({', '.join(parts)})"

    def __reduce__(self) -> tuple[type[Mask], tuple[Value | None, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.FIELDS])

    def __eq__(self, other: object) -> bool:
        """Return True for the same rules: equal numbers, and equal tensors on the same device."""
        if not isinstance(other, Mask):
            return NotImplemented
        mine, theirs = self.held, other.held
        return mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)

    def __hash__(self) -> int:
        return hash(tuple((n, v.shape if isinstance(v, Tensor) else v) for n, v in self.held.items()))

    def __bool__(self) -> bool:
        raise MaskError(
            f"a mask must not be used as a bool: got {self!r}; join masks with & instead of `and`, and test "
            "`mask is None` or mask.hides_nothing"
        )

    __array_ufunc__: ClassVar[None] = None  # numpy must not join a mask to each bool of an array

    def __and__(self, other: object) -> Mask:
        """Return both rules joined; a tensor is read as `mask=` reads it.

        Raises:
            MaskError: rules of one kind whose sizes differ; query_ids in one of two document masks only; a
                tensor whose values suggest another meaning.
        """
        if not isinstance(other, Mask):
            other = _from_tensor(other)
            if other is None:
                return NotImplemented
        mine, theirs = _on_same_device(self, other)
        joined: Changes = {}
        for rule in self.RULES:
            joined |= rule.join(mine, theirs)
        bound = isinstance(self, BoundMask) and isinstance(other, BoundMask)
        return (BoundMask if bound else Mask)(**joined)

    __rand__ = __and__

    def __or__(self, other: object) -> Mask:
        """Return a mask of the keys that either mask allows; a tensor is read as `mask=` reads it.

        Queries that count in both masks count in means.

        Raises:
            MaskError: the result is not a single rule (the message says what to write); or as with `&`.
        """
        if not isinstance(other, Mask):
            other = _from_tensor(other)
            if other is None:
                return NotImplemented
        try:
            if self.hides_nothing or other.hides_nothing:
                return self._shown & other._shown
            mine, theirs = self._negated, other._negated
            either = None if mine is None or theirs is None else (mine & theirs)._negated
        except MaskError as error:  # the rules' errors name the operator &
            raise MaskError(str(error).replace("joined with &", "joined with |")) from None
        if either is None:
            raise MaskError(
                f"mask | other must be a single rule: {self!r} | {other!r} is not; write "
                f"Mask.dense(mask.{self._full} | other.{other._full})"
            )
        return either

    __ror__ = __or__

    def __invert__(self) -> Mask:
        """Return a mask with shown and hidden keys exchanged; the same queries count in means.

        Raises:
            MaskError: the result is not a single rule; the message says what to write.
        """
        negated = self._negated
        if negated is None:
            raise MaskError(
                f"~mask must be a single rule: ~{self!r} is not; write Mask.dense(~mask.{self._full})"
            )
        return negated

    @property
    def _negated(self) -> Mask | None:
        """Return the mask with shown and hidden keys exchanged; None if that is not one rule."""
        changes = self.hiding[0].negated(self) if len(self.hiding) == 1 else None
        return None if changes is None else replace(self, **changes)

    @property
    def _shown(self) -> Mask:
        """Return the mask with no key hidden; the same queries count in means."""
        return replace(self, **{name: None for rule in self.hiding for name in rule.fields})

    @property
    def _full(self) -> str:
        """Return the code that computes the matrix."""
        return "full(T, S, B, H)" if self.tensors else "full(T, S)"

    @property
    def held(self) -> dict[str, Value]:
        """The fields that are set, by name."""
        values = {}
        for rule in self.rules:
            for name in rule.fields:
                value = getattr(self, name)
                if value is not None:
                    values[name] = value
        return values

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in it by name."""
        tensors = {}
        for name in self.tensor_fields:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                tensors[name] = value
        return tensors

    def bind(self, batch: int, num_heads: int, query_len: int, key_len: int) -> Mask:
        """Return the same rules, checked against [B, H, T, S], with their per-query parts complete.

        Lengths, padding and labels are copied, so the rules of a call do not change if the user's tensors are
        written to later. A dense mask, which is as large as the weights, is not copied.

        Raises:
            MaskError: a rule whose sizes do not fit.
        """
        if self.is_positional:
            return self
        for rule in self.rules:
            rule.check(self, (batch, num_heads, query_len, key_len))
        if isinstance(self, BoundMask):
            return self
        values = self.copies()
        for rule in self.rules:
            rule.spell_out(values, query_len, key_len)
        return BoundMask(**values)

    def numbers_alone(self) -> Changes:
        """Return all fields and facts except tensors, which are None; for `bound_alike`."""
        numbers: Changes = dict.fromkeys(self.FIELDS)
        numbers |= {name: value for name, value in self.held.items() if name not in self.tensor_fields}
        return numbers | {name: getattr(self, name) for name in RuleFacts.__annotations__}

    def bound_alike(self, numbers: Changes, query_len: int, key_len: int) -> Mask:
        """Return what `bind` would return, from the numbers of an earlier bound mask with the same sizes.

        Nothing is checked. Use it only if `bind` would not read the values of the tensors.
        """
        mine: Changes = self.__dict__
        values: Changes = {}
        for name in self.tensor_fields:
            value = mine[name]
            if value is not None:
                values[name] = value.clone() if name in self.copied_fields else value
        for rule in self.spelled_out:
            rule.spell_out(values, query_len, key_len)
        bound = BoundMask.__new__(BoundMask)  # a frozen class's constructor is slow
        bound.__dict__.update(numbers)
        bound.__dict__.update(values)
        return bound

    def unbound(self) -> Mask:
        """Return the same rules with small tensors copied, so that the caller may write to them."""
        return Mask(**self.copies())

    def copies(self) -> Changes:
        """Return the fields that are set, with small tensors copied."""
        fields: Changes = {}
        for rule in self.rules:
            for name in rule.fields:
                value = getattr(self, name)
                if value is not None:
                    fields[name] = value.clone() if rule.is_copied and isinstance(value, Tensor) else value
        return fields

    def to(self, device: torch.device | str) -> Mask:
        """Return the same rules, with their tensors on another device."""
        moved: Changes = {name: value.to(device) for name, value in self.tensors.items()}
        return replace(self, **moved) if moved else self

    def beside(self, device: torch.device) -> Mask:
        """Return the same rules, with lengths and labels taken from CPU memory to another device.

        Lengths and labels are small and are copied in every call anyway; lists become tensors in CPU memory.
        A dense mask, which is as large as the weights, stays on its device.
        """
        moved: Changes = {}
        for name, value in self.tensors.items():
            if value.is_cpu and value.device != device and name in self.copied_fields:
                moved[name] = value.to(device)
        return replace(self, **moved) if moved else self

    def select(self, batch: Index, heads: Index, queries: Index) -> Mask:
        """Return a bound mask's rules for some sequences, heads and queries, by slices or index tensors.

        The rules about positions (`left`, `right`) stay: the caller keeps the queries' positions.
        """
        changed: Changes = {}
        chosen = {"b": batch, "h": heads, "t": queries, "s": None}  # all keys stay
        for name, value in self.tensors.items():
            index = [
                None if size == 1 and letter.islower() else chosen[letter.lower()]
                for letter, size in zip(self.FIELDS[name], value.shape, strict=False)
            ]
            changed[name] = take(value, tuple(index), ones_stay=False)
        return replace(self, **changed) if changed else self

    def rectangle(self, queries: slice, keys: slice) -> Mask:
        """Return a bound mask's rules for a run of queries and of keys; the first of these becomes key 0.

        Rules about positions do not change: the caller gives positions of queries relative to these keys.
        """
        everything = slice(None)
        mine = self.select(everything, everything, queries)
        changed: Changes = {}
        for rule in mine.rules:
            changed |= rule.cut(mine, keys)
        return replace(mine, **changed) if changed else mine

    def placed(self, at: Tensor) -> Mask:
        """Return the same rules for chosen queries at these positions.

        Raises:
            MaskError: a rule that does not cover one of these positions.
        """
        changed: Changes = {}
        for rule in self.rules:
            changed |= rule.placed(self, at)
        return replace(self, **changed) if changed else self

    def tile(self, at: Tensor, rows: Index, columns: Index, key_len: int) -> Tensor | None:
        """Return a tile of a bound mask: bool, broadcastable to [B, H, t, s]; None where nothing is hidden.

        Args:
            at: int [t], the positions p_i of these queries.
            rows: which queries they are (slice or index tensor), for rules kept per query.
            columns: which keys (slice or index tensor).
            key_len: S.
        """
        if self.hides_nothing:
            return None
        allowed_pairs: Tensor | None = None
        spots = positions_of(columns, key_len, at.device)  # [s]
        for rule in self.hiding:
            allowed = rule.tile(self, at, rows, columns, spots)
            allowed_pairs = allowed if allowed_pairs is None else allowed_pairs & allowed
        return allowed_pairs

    def full(self, query_len: int, key_len: int, batch: int = 1, num_heads: int = 1) -> Tensor:
        """Return the whole matrix, bool, broadcastable to [B, H, T, S]: quadratic in memory.

        `batch` and `num_heads` are needed only if the mask holds tensors with these dimensions.
        """
        bound = self.bind(batch, num_heads, query_len, key_len)
        device = next((value.device for value in self.tensors.values()), None)
        at = torch.arange(key_len - query_len, key_len, device=device)
        visible = bound.tile(at, slice(0, query_len), slice(0, key_len), key_len)
        if visible is None:
            visible = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
        return visible[(None,) * (4 - visible.ndim)]

    def span(self, first_at: int, last_at: int, rows: Index, key_len: int) -> tuple[int, int]:
        """Return [start, stop): keys outside are hidden from all these queries and need not be computed.

        Args:
            first_at, last_at: the smallest and largest position among the queries.
            rows: which queries they are.
        """
        keys = (0, key_len)
        for rule in self.hiding:
            keys = rule.span(self, (first_at, last_at), rows, keys)
        return keys if keys[0] < keys[1] else (0, 0)

    def added_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """Return shapes of what is added to the scores for a kernel whose own mask is a band or none."""
        return [rule.added_shape(self, shape) for rule in self.hiding if not rule.is_band]

    def differs(self, letter: str) -> bool:
        """Return True if the mask differs between sequences ("b") or heads ("h")."""
        for rule in self.hiding:
            for name, dims in rule.fields.items():
                value, dim = getattr(self, name), dims.lower().find(letter)
                if dim >= 0 and value is not None and value.shape[dim] > 1:
                    return True
        return False

    def for_kernels(self) -> dict[str, Value | None]:
        """Return the arguments of the GPU kernels, by the names of `engines.gpu.tile.Rules`."""
        arguments: dict[str, Value | None] = {}
        for rule in self.hiding:
            arguments |= rule.for_kernels(self)
        return arguments

    @property
    def is_listed(self) -> bool:
        """True if the kernels need a list of tiles: a rule depends on more than positions and lengths."""
        return any(rule.is_listed(self) for rule in self.hiding)

    @property
    def num_labels(self) -> int:
        """The number of document labels per key, all of which must match; 0 without documents."""
        return 0 if self.key_ids is None else self.key_ids.shape[-1]

    @property
    def _real_keys(self) -> Tensor:
        return real_keys(self)

    @property
    def _document_ends(self) -> tuple[Tensor, Tensor]:
        return document_ends(self)

    def sees_any(self, at: Tensor, start: int, stop: int) -> Tensor:
        """Return which queries at these positions see a key in [start, stop) by positions and padding.

        bool [B or 1, t or 1]; documents and dense masks are ignored.
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
        """Return which queries count in means, bool [B, T]; None: all of them."""
        return None if self.queries is None else real_positions(self.queries, query_len)

    def is_padding_at(self, at: Tensor) -> Tensor:
        """Return which keys at these positions are padding, bool [B, t]; the range is not checked."""
        assert self.keys is not None
        if self.keys.ndim == 1:
            return at >= self.keys[:, None]
        return ~self.keys[:, at.clamp(0, self.keys.shape[1] - 1)]


class BoundMask(Mask):
    """The rules of one call. It has copies of small tensors, so that cached facts about them stay true."""

    @cached_property
    def _real_keys(self) -> Tensor:
        return real_keys(self)

    @cached_property
    def _document_ends(self) -> tuple[Tensor, Tensor]:
        return document_ends(self)


assert [*Mask.FIELDS] == [f.name for f in fields(Mask) if f.init], "fields are those of RULES, in that order"
NOTHING_HIDDEN, CAUSAL = Mask(), Mask(right=0)  # the two most frequent masks, created once


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """Return pairs of query and key as a `Mask`: None is all of them, a tensor becomes `Mask.dense`."""
    if mask is None:
        return NOTHING_HIDDEN
    return mask if isinstance(mask, Mask) else Mask.dense(mask)


def mask_of_call(mask: Mask | Tensor | None, batch: int | None = None, query_len: int | None = None) -> Mask:
    """Return the mask of a call from its argument: as `as_mask`, but a tensor is checked for its meaning.

    Args:
        batch, query_len: of the call; without them, any [T, S] might be padding [B, S].

    Raises:
        MaskError: a tensor that is not a mask, or whose values suggest another meaning; see `check_meaning`.
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


def _on_same_device(a: Mask, b: Mask) -> tuple[Mask, Mask]:
    """Return both masks, with lists moved to the device of the other mask's tensors."""
    if a.is_positional or b.is_positional:
        return a, b
    for x in (*a.tensors.values(), *b.tensors.values()):
        if not x.is_cpu:
            return a.beside(x.device), b.beside(x.device)
    return a, b


def _from_tensor(other: object) -> Mask | None:
    """Return an operand of a mask's operator as a mask; None if it is not a tensor or an array."""
    return mask_of_call(other) if isinstance(other, Tensor) or hasattr(other, "__array__") else None  # type: ignore[arg-type]


torch.serialization.add_safe_globals([Mask, BoundMask])


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.device == b.device and bool((a == b).all())
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
