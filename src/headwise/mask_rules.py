"""What a rule of a `Mask` is, and what is done with a set of them: `~`, `|`, `==`, tiles, the whole matrix.

The rules themselves are entries in masks.py and sequence_rules.py. Engines in plain torch ask any rule by
what is here, and need no change for a new one; the kernels on a GPU need two lines (CONTRIBUTING.md, "A rule
of the mask"). Bands, padding and documents are also asked for by name where that is faster; code that does so
takes the general way for a rule that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .errors import MaskError
from .indexing import Index, positions_of

__all__ = [
    "TRACED",
    "AnyRule",
    "Changes",
    "Fields",
    "Known",
    "Rule",
    "RuleSet",
    "Shape",
    "Span",
    "Value",
    "can_read",
    "cannot_join",
    "is_traced",
    "kind",
    "size_of",
    "smaller",
]

MODES = torch._C._TorchDispatchModeKey
TRACED = "a tracer (torch.jit.trace, make_fx) records this call, which only plain operations pass"


def can_read(tensor: Tensor) -> bool:
    """Whether looking at this tensor's values is free: in CPU memory, and real."""
    return (
        tensor.is_cpu  # a fifth of the time of asking its device for a type
        and not torch.compiler.is_compiling()
        and not isinstance(tensor, FakeTensor)
        and not torch._C._are_functorch_transforms_active()
        and not is_traced()
    )


def is_traced() -> bool:
    """Return True while `torch.jit.trace` or `make_fx` records this call, or what is built on `make_fx`.

    A recording holds operations alone. What Python decides from values, and what an autograd function of our
    own computes, would be kept as it was for the example. `torch.compile` and `torch.export` are asked for by
    `torch.compiler.is_compiling`.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._get_tracing_state() is not None:
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = (MODES.PROXY, MODES.FUNCTIONAL)  # AOTAutograd looks at a function by the second before it records
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in modes)


def smaller(a: int | None, b: int | None) -> int | None:
    """The tighter of two bounds; None is no bound."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def size_of(run: slice) -> int:
    """How many places a run of them has."""
    size: int = run.stop - run.start
    return size


def kind(tensor: Tensor) -> str:
    """A tensor's dtype in one word."""
    return str(tensor.dtype).removeprefix("torch.")


def cannot_join(name: str, a: torch.Size, b: torch.Size) -> MaskError:
    """The error about two of a kind whose sizes differ."""
    return MaskError(
        f"{name} joined with & must agree in size: {list(a)} and {list(b)}; make both for the same sequences"
    )


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
    is_countable: ClassVar[bool] = False  # `second_pass.visible` counts its keys without looking at each
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

    def cut(self, mask: Some, keys: slice) -> Changes:
        """What changes where only a run of keys is left, the first of which is key 0 then."""
        run: Changes = {}
        for name, dims in self.fields.items():
            value = getattr(mask, name)
            if isinstance(value, Tensor) and "s" in dims.lower():
                dim = dims.lower().index("s")
                run[name] = value if value.shape[dim] == 1 else value.narrow(dim, keys.start, size_of(keys))
        return run

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
        own = {name: rule.is_copied for rule in there for name, dims in rule.fields.items() if dims}
        told["tensor_fields"] = tuple(own)
        told["copied_fields"] = tuple(name for name, is_copied in own.items() if is_copied)
        told["spelled_out"] = tuple(rule for rule in there if type(rule).spell_out is not Rule.spell_out)
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
    tensor_fields: tuple[str, ...]  # that may hold a tensor, in order
    copied_fields: tuple[str, ...]  # of those, the ones whose tensors are a call's own
    spelled_out: tuple[AnyRule, ...]  # rules with something that a call leaves to be understood


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

    def __eq__(self, other: object) -> bool:
        """The same rules: equal numbers, and tensors of one shape and device with equal values."""
        if not isinstance(other, RuleSet):
            return NotImplemented
        mine, theirs = self.held, other.held
        return mine.keys() == theirs.keys() and all(_same(mine[name], theirs[name]) for name in mine)

    def __hash__(self) -> int:
        return hash(tuple((n, v.shape if isinstance(v, Tensor) else v) for n, v in self.held.items()))

    def __bool__(self) -> bool:
        raise MaskError(
            f"a mask must not stand for true or false: got {self!r}; join masks with & and not with and, ask "
            "`mask is None`, or mask.hides_nothing"
        )

    def __and__(self, other: object) -> Self:
        """Both at once."""
        raise NotImplementedError

    def bind(self, batch: int, num_heads: int, query_len: int, key_len: int) -> Self:
        """The rules of one call."""
        raise NotImplementedError

    def __invert__(self) -> Self:
        """What was hidden is shown, and what was shown hidden; queries count as they did.

        Raises:
            MaskError: that is not one rule; the message says what to write.
        """
        negated = self._negated
        if negated is None:
            raise MaskError(
                f"~mask must be one rule again: {self!r} is none the other way round; write "
                f"Mask.dense(~mask.{self._full})"
            )
        return negated

    def _either(self, other: Self) -> Self:
        """What either shows: `|`, of two masks.

        Raises:
            MaskError: rules of one kind whose sizes differ; that is not one rule.
        """
        try:
            if self.hides_nothing or other.hides_nothing:
                return self._shown & other._shown
            mine, theirs = self._negated, other._negated
            either = None if mine is None or theirs is None else (mine & theirs)._negated
        except MaskError as error:  # of rules, which know no other sign
            raise MaskError(str(error).replace("joined with &", "joined with |")) from None
        if either is None:
            raise MaskError(
                f"mask | other must be one rule again: {self!r} or {other!r} is not known as one; write "
                f"Mask.dense(mask.{self._full} | other.{other._full})"
            )
        return either

    @property
    def _negated(self) -> Self | None:
        """All of it the other way round; None: that is not one rule."""
        changes = self.hiding[0].negated(self) if len(self.hiding) == 1 else None
        return None if changes is None else replace(self, **changes)

    @property
    def _shown(self) -> Self:
        """Nothing of it hidden; queries count as they did."""
        return replace(self, **{name: None for rule in self.hiding for name in rule.fields})

    @property
    def _full(self) -> str:
        """How to ask for the matrix, as one writes it."""
        return "full(T, S, B, H)" if self.tensors else "full(T, S)"

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
        for name in self.tensor_fields:
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

    def beside(self, device: torch.device) -> Self:
        """The same rules, with lengths and labels taken from CPU memory to another device.

        They are small and copied in every call anyway; lists become tensors in CPU memory. A dense mask, as
        large as the weights, stays where it is.
        """
        moved: Changes = {}
        for name, value in self.tensors.items():
            if value.is_cpu and value.device != device and name in self.copied_fields:
                moved[name] = value.to(device)
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

    def rectangle(self, queries: slice, keys: slice) -> Self:
        """A bound mask's rules for a run of queries and a run of keys, whose first is key 0 then.

        The rules about positions stay: the caller says where the queries stand among these keys.
        """
        everything = slice(None)
        mine = self.select(everything, everything, queries)
        changed: Changes = {}
        for rule in mine.rules:
            changed |= rule.cut(mine, keys)
        return replace(mine, **changed) if changed else mine

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

    def full(self, query_len: int, key_len: int, batch: int = 1, num_heads: int = 1) -> Tensor:
        """The whole matrix, bool, broadcastable to [B, H, T, S]: quadratic, for those who need it.

        `batch` and `num_heads` are only needed where the mask holds tensors with those sizes.
        """
        bound = self.bind(batch, num_heads, query_len, key_len)
        device = next((value.device for value in self.tensors.values()), None)
        at = torch.arange(key_len - query_len, key_len, device=device)
        seen = bound.tile(at, slice(0, query_len), slice(0, key_len), key_len)
        if seen is None:
            seen = torch.ones(query_len, key_len, dtype=torch.bool, device=device)
        return seen[(None,) * (4 - seen.ndim)]

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


def _same(a: Value, b: Value) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.device == b.device and bool((a == b).all())
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b
