"""What a rule of a `Mask` is, and what is done with any set of them; reading rules from what users give.

The rules themselves are entries in masks.py. Whatever is asked of any rule is asked through what is here, so
that nobody need know of a new one; bands, padding and documents are also asked for by name, where that pays.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, SupportsIndex, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .errors import MaskError
from .indexing import Index, positions_of

__all__ = [
    "AnyRule",
    "Changes",
    "Fields",
    "Rule",
    "RuleSet",
    "Shape",
    "Span",
    "Value",
    "as_allowed",
    "as_ids",
    "as_padding",
    "can_read",
    "check_meaning",
    "check_padding",
    "join_allowed",
    "join_ids",
    "join_padding",
    "smaller",
    "whole_number",
]

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch knows them, but finds no smallest among them


def can_read(tensor: Tensor) -> bool:
    """Whether looking at this tensor's values is free: in CPU memory, and real."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(tensor, FakeTensor)
        and not torch._C._are_functorch_transforms_active()
    )


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Two bool tensors joined; None hides nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def smaller(a: int | None, b: int | None) -> int | None:
    """The tighter of two bounds; None is no bound."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def kind(tensor: Tensor) -> str:
    """A tensor's dtype in one word."""
    return str(tensor.dtype).removeprefix("torch.")


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def whole_number(number: object, name: str) -> int:
    """A count of keys, or `MaskError`."""
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        raise MaskError(f"{name} must be a whole number: got {number!r}; count keys, e.g. 256")
    return operator.index(number)


# Reading what users give


def as_padding(value: Tensor | Sequence[int], name: str) -> Tensor:
    """Lengths int [B], or real positions bool [B, length]."""
    lengths = torch.as_tensor(value)
    if lengths.dtype == torch.bool and lengths.ndim == 2:
        return lengths
    if lengths.dtype in UNSIGNED:
        lengths = lengths.long()
    if not (_is_integer(lengths) and lengths.ndim == 1):
        raise MaskError(
            f"{name} must be integers [B] or bool [B, length]: got {kind(lengths)}{list(lengths.shape)}; "
            "a 0/1 mask becomes bool with mask.bool()"
        )
    if can_read(lengths) and lengths.numel() and int(lengths.min()) < 0:
        raise MaskError(f"{name} must not be negative: got {int(lengths.min())}; use 0 for no tokens")
    return lengths


def check_padding(value: Tensor, batch: int, length: int, name: str) -> None:
    """Raise `MaskError` where padding does not fit batch and length."""
    want = [batch] if value.ndim == 1 else [batch, length]
    if list(value.shape) != want:
        raise MaskError(
            f"{name} must fit batch and length: {list(value.shape)} for {want}; "
            "give one length a sequence, or one bool a position"
        )
    if value.ndim == 1 and can_read(value) and value.numel() and int(value.max()) > length:
        raise MaskError(
            f"{name} must not go beyond the sequence: {int(value.max())} > {length}; cut or pad the input"
        )


def as_ids(value: Tensor | Sequence[int], name: str) -> Tensor:
    """Document ids as labels, int [B or 1, length, 1]."""
    ids = torch.as_tensor(value)
    if not _is_integer(ids) or ids.ndim not in (1, 2):
        raise MaskError(
            f"document {name} must be integers [S] or [B, S]: got {kind(ids)}{list(ids.shape)}; "
            "number the documents 0, 1, 2, ..."
        )
    return (ids if ids.ndim == 2 else ids[None])[..., None]  # [B or 1, S, 1]


def as_allowed(value: Tensor) -> Tensor:
    """A dense mask as bool, 4-D."""
    if not isinstance(value, Tensor):
        raise MaskError(
            f"mask must be a Mask or a tensor: got {type(value).__name__}; use torch.as_tensor(mask)"
        )
    if value.ndim > 4:
        raise MaskError(
            f"mask must broadcast to [B, H, T, S]: got {value.ndim} dimensions {list(value.shape)}; "
            "use at most four"
        )
    if value.dtype != torch.bool:
        if can_read(value) and value.numel():
            _check_zero_one(value)
        value = value != 0
    return value[(None,) * (4 - value.ndim)]


def _check_zero_one(value: Tensor) -> None:
    strange = value[(value != 0) & (value != 1)]
    if strange.numel():
        raise MaskError(
            f"mask must hold 0 and 1 only: found {strange[0].item():g}; True or 1 = may attend, and numbers "
            "to be added to the scores go in bias="
        )
    if value.is_floating_point() and not value.any():
        raise MaskError(
            f"mask must not be all zeros as float: {list(value.shape)}; read as 0/1 it would hide every key, "
            "and an additive mask that hides nothing is mask=None (use a bool mask to hide everything)"
        )


# A tensor that may have been meant otherwise


def check_meaning(mask: Tensor, allowed: Tensor, may_be_padding: bool) -> None:
    """Raise `MaskError` where a tensor someone gave as a mask reads as if True were hidden, or as padding.

    To be asked only where looking at values is free. What may well be meant is let through, and what is not
    has a spelling that nobody asks about: `Mask.dense(mask)`.

    Args:
        mask: as it was given; `allowed` is the same as `as_allowed` reads it.
        may_be_padding: whether its rows might be sequences as well as queries.
    """
    _, _, T, S = shape = allowed.shape
    if 0 in shape:
        return
    # Nearly every mask is another by its first bool, which is one operation away, not four as [0, 0, 0, 0].
    # Of one query, the opposite hides all, as a mask may.
    opposite = 1 < T <= S and not allowed.as_strided((), ()) and _is_opposite_of_causal(allowed)
    lengths = _lengths_in_rows(allowed[0, 0]) if may_be_padding and not opposite else None
    if not opposite and lengths is None:
        return
    given = f"{kind(mask)}{list(mask.shape)}"
    real, turned = ("mask", "~mask") if mask.dtype == torch.bool else ("mask.bool()", "~mask.bool()")
    if lengths is None:
        raise MaskError(
            f"mask must be True where a query may attend: got {given}, a causal mask the other way round, as "
            f"torch has it, True = hidden; pass {turned}, or Mask.causal() and no matrix, or Mask.dense(mask)"
            " if queries shall see only what comes after them"
        )
    some = ", ".join(map(str, lengths[:4])) + (", .." if len(lengths) > 4 else "")
    raise MaskError(
        f"mask must be [T, S] where it has two dimensions: got {given}, whose rows read as padding of "
        f"sequences ({some} keys), not as queries; pass Mask.padding({real}) for a row per sequence "
        f"({turned} if its True = padding), or Mask.dense(mask) for a row per query"
    )


def _is_opposite_of_causal(allowed: Tensor) -> bool:
    """Whether a dense mask is `~causal`, or that with padding shown beside it in some sequences."""
    beside = allowed[:, :, -1:]  # all that the last query sees: in torch's masks, padding
    padded = beside.any(-1)
    if padded.all() or (allowed.shape[1] > 1 and padded.any()):
        return False
    T, S = allowed.shape[2:]
    future = torch.ones(T, S, dtype=torch.bool, device=allowed.device).triu(S - T + 1)
    return torch.equal(allowed, future | beside)


def _lengths_in_rows(rows: Tensor) -> list[int] | None:
    """How many keys each row shows, where rows [T, S] read as padding and not as queries; else None.

    They do where all begin at the first key and do not grow, or all end at the last and do not shrink: those
    that only move on are causal masks, prefixes, blocks and bands. Rows that show nothing are not asked, and
    rows that are all alike mean the same either way.
    """
    counts, S = rows.sum(-1, keepdim=True), rows.shape[1]
    lengths: list[int] = counts.flatten().tolist()
    seen = [length for length in lengths if length]
    spots = torch.arange(S, device=rows.device)
    if seen != sorted(seen) and torch.equal(rows, spots < counts):
        return lengths
    if seen != sorted(seen, reverse=True) and torch.equal(rows, spots >= S - counts):
        return lengths
    return None


# Two masks as one


def join_padding(a: Tensor | None, b: Tensor | None, name: str) -> Tensor | None:
    """What is real under both."""
    if a is None or b is None:
        return b if a is None else a
    shared = min(a.ndim, b.ndim)
    if a.shape[:shared] != b.shape[:shared]:
        raise _cannot_join(name, a.shape, b.shape)
    if a.ndim == b.ndim:
        return torch.minimum(a, b) if a.ndim == 1 else a & b
    lengths, real = (a, b) if a.ndim == 1 else (b, a)
    return real & (torch.arange(real.shape[-1], device=real.device) < lengths[:, None])


def join_allowed(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """What both dense masks allow."""
    if a is not None and b is not None:
        pairs = zip(a.shape, b.shape, strict=True)
        if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
            raise _cannot_join("dense masks", a.shape, b.shape)
    return both(a, b)


Labels = tuple[Tensor | None, Tensor | None]  # of keys, of queries


def join_ids(a: Labels, b: Labels) -> Labels:
    """Labels that all must match, side by side."""
    (a_keys, a_queries), (b_keys, b_queries) = a, b
    if a_keys is None or b_keys is None:
        return b if a_keys is None else a
    if (a_queries is None) != (b_queries is None):
        raise MaskError(
            "document masks joined with & must both have query_ids or neither: got one; "
            "give query_ids to both"
        )
    keys = _stack(a_keys, b_keys, "document ids")
    if a_queries is None or b_queries is None:
        return keys, None
    return keys, _stack(a_queries, b_queries, "document query_ids")


def _stack(a: Tensor, b: Tensor, name: str) -> Tensor:
    batch = max(a.shape[0], b.shape[0])
    if a.shape[1] != b.shape[1] or {a.shape[0], b.shape[0]} - {1, batch}:
        raise _cannot_join(name, a.shape[:2], b.shape[:2])
    return torch.cat([ids.expand(batch, -1, -1) for ids in (a, b)], dim=-1)


def _cannot_join(name: str, a: torch.Size, b: torch.Size) -> MaskError:
    return MaskError(
        f"{name} joined with & must agree in size: {list(a)} and {list(b)}; make both for the same sequences"
    )


# Rules, and any set of them


Fields = Mapping[str, str]  # names, and the dimensions of each
Value = Tensor | int  # what a field of a mask holds, where it holds anything
Changes = dict[str, Any]  # fields and what they shall hold, as a constructor takes them
Shape = tuple[int, int, int, int]  # [B, H, T, S]
Span = tuple[int, int]  # first and last position; or [start, stop)
Some = TypeVar("Some", bound="RuleSet")


class Rule(Generic[Some]):
    """One rule about who may attend to whom: what differs from rule to rule, and no more.

    A rule says what it holds (`fields`), how two of its kind are joined, and what a tile of it looks like.
    All else has an answer that is right for any rule; an entry that knows better says so.
    """

    # Its fields of the mask and the dimensions of each: b, h, t, s; a small letter may be one for all, a
    # capital never is. Without dimensions it is a number.
    fields: ClassVar[Fields]
    hides: ClassVar[bool] = True  # False: it only tells which queries count in means
    is_copied: ClassVar[bool] = True  # its tensors are small: those of a call are the call's own
    is_band: ClassVar[bool] = False  # a band around the query, which kernels draw by themselves
    is_padding: ClassVar[bool] = False  # `Mask.sees_any` knows it, as it knows bands
    is_countable: ClassVar[bool] = False  # `engines.mass.visible` counts its keys without looking at each
    is_narrow: ClassVar[bool] = False  # a block of queries sees few keys: worth going by blocks
    is_made: ClassVar[bool] = True  # a tile of it is made anew, one bool a query and key

    def join(self, a: Some, b: Some) -> Changes:
        """Its fields, where both hold."""
        raise NotImplementedError

    def negated(self, mask: Some) -> Changes | None:
        """Its fields where it shows what it hid and hides what it showed; None: no rule does that."""
        return None

    def tile(self, mask: Some, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        """What it allows, bool broadcastable to [B, H, t, s]; spots: the keys; see `RuleSet.tile`."""
        raise NotImplementedError

    def check(self, mask: Some, shape: Shape) -> None:
        """Raise `MaskError` where it does not fit [B, H, T, S]."""

    def spell_out(self, held: Changes, query_len: int, key_len: int) -> None:
        """Put what a call leaves to be understood among the fields that are held."""

    def placed(self, mask: Some, at: Tensor) -> Changes:
        """What changes for chosen queries that stand at these positions."""
        return {}

    def span(self, mask: Some, ends: Span, rows: Index, keys: Span) -> Span:
        """What is left of the keys [start, stop) for queries whose first and last position are `ends`."""
        return keys

    def added_shape(self, mask: Some, shape: Shape) -> tuple[int, ...]:
        """The shape it has as a tensor that is added to the scores, [B or 1, H or 1, T or 1, S or 1]."""
        return 1, 1, *shape[2:]

    def for_kernels(self, mask: Some) -> dict[str, Value | None]:
        """What the kernels on a GPU take of it, by the names of `engines.gpu.tile.Rules`."""
        return {name: getattr(mask, name) for name in self.fields}

    def is_listed(self, mask: Some) -> bool:
        """Whether those kernels ask it in every tile, from a list of tiles that show anything."""
        return True


AnyRule = Rule[Any]
# The answers of a set of rules that depend on nothing but which rules are there.
Facts = dict[str, object]


def facts_of(rules: Sequence[AnyRule]) -> tuple[Facts, ...]:
    """The facts of every set of these rules; the i-th rule is bit i of the number of a set."""
    facts = []
    for bits in range(1 << len(rules)):
        there = tuple(rule for i, rule in enumerate(rules) if bits >> i & 1)
        hiding = tuple(rule for rule in there if rule.hides)
        told: dict[str, object] = {"rules": there, "hiding": hiding, "hides_nothing": not hiding}
        told["is_positional"] = all(rule.is_band for rule in there)
        told["is_band"] = all(rule.is_band for rule in hiding)
        told["is_padded_band"] = all(rule.is_band or rule.is_padding for rule in hiding)
        told["is_countable"] = all(rule.is_countable for rule in hiding)
        told["is_narrow"] = any(rule.is_narrow for rule in hiding)
        told["is_made"] = any(rule.is_made for rule in hiding)
        facts.append(told)
    return tuple(facts)


class Known:
    """What is found out of its rules when a mask is made, for it is asked in every call."""

    rules: tuple[AnyRule, ...]  # that are there
    hiding: tuple[AnyRule, ...]  # of those, the ones that hide keys
    hides_nothing: bool  # every query may attend to every key
    is_positional: bool  # no more than a band: no tensor in it
    is_band: bool  # a band at most hides keys: kernels need no tensor for it
    is_padded_band: bool  # a band and padding at most
    is_countable: bool  # the keys a query sees are counted without looking at each
    is_narrow: bool  # a block of queries sees few of the keys
    is_made: bool  # a tile of it is made anew, one bool a query and key


@dataclass(frozen=True, eq=False, repr=False)
class RuleSet(Known):
    """What is done with the rules of a mask, whichever they are. A subclass names them, and their fields."""

    RULES: ClassVar[tuple[AnyRule, ...]] = ()
    FIELDS: ClassVar[Fields] = {}  # of all rules, in order, and their dimensions: the one list
    FACTS: ClassVar[tuple[Facts, ...]]  # of every set of rules, by its number
    BITS: ClassVar[tuple[tuple[str, int], ...]]  # fields, each with the bit of its rule

    def __init_subclass__(cls) -> None:
        cls.FIELDS = {name: dims for rule in cls.RULES for name, dims in rule.fields.items()}
        cls.FACTS = facts_of(cls.RULES)
        cls.BITS = tuple((name, 1 << i) for i, rule in enumerate(cls.RULES) for name in rule.fields)

    def __post_init__(self) -> None:
        there = 0
        for name, bit in self.BITS:
            if getattr(self, name) is not None:
                there |= bit
        if torch.compiler.is_compiling():  # which knows the slow way alone
            for name, value in self.FACTS[there].items():
                object.__setattr__(self, name, value)
        else:
            self.__dict__.update(self.FACTS[there])

    def __repr__(self) -> str:
        parts = []
        for name, value in self.held.items():
            shown = f"{kind(value)}{list(value.shape)}" if isinstance(value, Tensor) else value
            parts.append(f"{name}={shown}")
        return f"Mask({', '.join(parts)})"

    def __reduce__(self) -> tuple[type[Self], tuple[Value | None, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.FIELDS])

    @property
    def held(self) -> dict[str, Value]:
        """The fields that are there, by name."""
        held = {}
        for rule in self.rules:
            for name in rule.fields:
                value = getattr(self, name)
                if value is not None:
                    held[name] = value
        return held

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in it by name."""
        tensors = {}
        for rule in self.rules:
            for name in rule.fields:
                value = getattr(self, name)
                if isinstance(value, Tensor):
                    tensors[name] = value
        return tensors

    def copies(self) -> Changes:
        """The fields that are there; small tensors copied."""
        fields: Changes = {}
        for rule in self.rules:
            for name in rule.fields:
                value = getattr(self, name)
                if value is not None:
                    fields[name] = value.clone() if rule.is_copied and isinstance(value, Tensor) else value
        return fields

    def to(self, device: torch.device | str) -> Self:
        """The same rules, with their tensors on another device."""
        moved: Changes = {name: value.to(device) for name, value in self.tensors.items()}
        return replace(self, **moved) if moved else self

    def select(self, batch: Index, heads: Index, queries: Index) -> Self:
        """A bound mask's rules for some sequences, heads and queries; each index a slice or an index tensor.

        The rules about positions (`left`, `right`) stay: the caller keeps the queries' positions.
        """
        changed: Changes = {}
        for name, value in self.tensors.items():
            for dim, (letter, size) in enumerate(zip(self.FIELDS[name], value.shape, strict=False)):
                if letter in "sS" or (size == 1 and letter in "bht"):
                    continue  # all keys stay; and what is one for all
                chosen = batch if letter in "bB" else heads if letter in "hH" else queries
                if isinstance(chosen, slice):
                    value = value[(slice(None),) * dim + (chosen,)]
                else:
                    value = value.index_select(dim, chosen.to(value.device))
            changed[name] = value
        return replace(self, **changed) if changed else self

    def placed(self, at: Tensor) -> Self:
        """The same rules for chosen queries, which stand at these positions.

        Raises:
            MaskError: a rule that says nothing of one of them.
        """
        changed: Changes = {}
        for rule in self.rules:
            changed |= rule.placed(self, at)
        return replace(self, **changed) if changed else self

    def tile(self, at: Tensor, rows: Index, columns: Index, key_len: int) -> Tensor | None:
        """One piece of a bound mask: bool, broadcastable to [B, H, t, s]; None where nothing is hidden.

        Args:
            at: int [t], the positions p_i of these queries.
            rows: which queries they are (slice or index tensor), for rules kept per query.
            columns: which keys (slice or index tensor).
            key_len: S.
        """
        if self.hides_nothing:
            return None
        seen: Tensor | None = None
        spots = positions_of(columns, key_len, at.device)  # [s]
        for rule in self.hiding:
            allowed = rule.tile(self, at, rows, columns, spots)
            seen = allowed if seen is None else seen & allowed
        return seen

    def span(self, first_at: int, last_at: int, rows: Index, key_len: int) -> tuple[int, int]:
        """Keys outside [start, stop) are hidden from all these queries: the part worth computing.

        Args:
            first_at, last_at: the smallest and largest position among the queries.
            rows: which queries they are.
        """
        keys = (0, key_len)
        for rule in self.hiding:
            keys = rule.span(self, (first_at, last_at), rows, keys)
        return keys if keys[0] < keys[1] else (0, 0)

    def added_shapes(self, shape: Shape) -> list[tuple[int, ...]]:
        """The shapes of what must be added to the scores where kernels draw no more than a band."""
        return [rule.added_shape(self, shape) for rule in self.hiding if not rule.is_band]

    def differs(self, letter: str) -> bool:
        """Whether what it hides differs between sequences ("b") or heads ("h")."""
        for rule in self.hiding:
            for name, dims in rule.fields.items():
                value, dim = getattr(self, name), dims.lower().find(letter)
                if dim >= 0 and value is not None and value.shape[dim] > 1:
                    return True
        return False

    def for_kernels(self) -> dict[str, Value | None]:
        """What the kernels on a GPU take of it, by the names of `engines.gpu.tile.Rules`."""
        taken: dict[str, Value | None] = {}
        for rule in self.hiding:
            taken |= rule.for_kernels(self)
        return taken

    @property
    def is_listed(self) -> bool:
        """Whether those kernels walk a list of tiles: some rule is no matter of positions and lengths."""
        return any(rule.is_listed(self) for rule in self.hiding)
