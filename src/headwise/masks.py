"""`Mask`: who may attend to whom, kept as rules, never as a T x S matrix unless someone gave one.

Letters: B batch, T query_len, S key_len, H num_heads. True = may attend, everywhere.

Query i stands at position p_i = i + S - T: the last query is aligned with the last key. Hence with T = 2
queries over S = 5 keys, causal means

            keys      0 1 2 3 4                       window=2
            query 0   x x x x .       query 0   . . x x .
            query 1   x x x x x       query 1   . . . x x
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .errors import MaskError

__all__ = ["Mask", "as_mask", "can_read"]


def can_read(tensor: Tensor) -> bool:
    """Whether looking at this tensor's values is free: in CPU memory, and real."""
    return (
        tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not isinstance(tensor, FakeTensor)
        and not torch._C._are_functorch_transforms_active()
    )


@dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """A set of rules about which query may attend to which key; join them with `&`.

        Mask.causal()                      keys up to the query's own position
        Mask.window(256)                   the query itself and the 255 keys before it
        Mask.window(left_right=(3, 3))     keys at most 3 away on either side
        Mask.padding(lengths)              only the first lengths[b] keys of sequence b are real
        Mask.documents(ids)                only keys of the query's own document
        Mask.dense(allowed)                a bool tensor broadcastable to [B, H, T, S]

    A mask holds a few numbers and small tensors; `full` makes the [T, S] matrix and `tile` any piece of it.

    Example:
        >>> m = Mask.causal() & Mask.window(2)
        >>> m
        Mask(left=1, right=0)
        >>> m.full(3, 4).int()
        tensor([[[[1, 1, 0, 0],
                  [0, 1, 1, 0],
                  [0, 0, 1, 1]]]], dtype=torch.int32)
    """

    left: int | None = None  # keys before p_i - left are hidden
    right: int | None = None  # keys after p_i + right are hidden
    keys: Tensor | None = None  # int [B] lengths, or bool [B, S]: which keys are real
    queries: Tensor | None = None  # int [B] lengths, or bool [B, T]: which queries count in means
    key_ids: Tensor | None = None  # int [B or 1, S, N]: N labels a key, all of which must match
    query_ids: Tensor | None = None  # int [B or 1, T, N]; None: the last T of key_ids
    allowed: Tensor | None = None  # bool, 4-D, broadcastable to [B, H, T, S]

    @classmethod
    def causal(cls) -> Mask:
        """Keys up to the query's own position; with T != S the last query sees the last key."""
        return cls(right=0)

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
            left, right = (_whole(reach, "left_right") for reach in left_right)
            if left < 0 or right < 0:
                raise MaskError(f"left_right must not be negative: got {left_right}; use (0, 0) or more")
            return cls(left=left, right=right)
        size = _whole(size, "window")
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
            lengths: int [B], the first lengths[b] keys are real; or bool [B, S], True = real.
            query_lengths: which queries are real, in either form. This hides nothing: padded queries keep
                their weights, but means, `received` and pooled pictures leave them out.

        Raises:
            MaskError: not 1-D integers or 2-D bool; a negative length.
        """
        return cls(
            keys=_as_padding(lengths, "lengths"),
            queries=None if query_lengths is None else _as_padding(query_lengths, "query_lengths"),
        )

    @classmethod
    def documents(cls, ids: Tensor | Sequence[int], query_ids: Tensor | Sequence[int] | None = None) -> Mask:
        """Several documents packed in one sequence: a query sees keys that carry its own document's id.

        Args:
            ids: int [S] or [B, S].
            query_ids: int [T] or [B, T]; by default the last T of `ids`.

        Raises:
            MaskError: ids that are not whole numbers, or not 1-D or 2-D.
        """
        return cls(
            key_ids=_as_ids(ids, "ids"),
            query_ids=None if query_ids is None else _as_ids(query_ids, "query_ids"),
        )

    @classmethod
    def dense(cls, allowed: Tensor) -> Mask:
        """Any mask at all, as a tensor broadcastable to [B, H, T, S]: bool, or numbers 0 and 1.

        Raises:
            MaskError: values other than 0 and 1, or a float mask of zeros alone (both only where reading
                values is free: eager mode, CPU); more than four dimensions.
        """
        return cls(allowed=_as_allowed(allowed))

    def __and__(self, other: object) -> Mask:
        """Both rules at once.

        Raises:
            MaskError: rules of one kind whose sizes differ; query_ids in one of two document masks only.
        """
        if not isinstance(other, Mask):
            return NotImplemented
        key_ids, query_ids = _join_ids(self, other)
        return Mask(
            left=_smaller(self.left, other.left),
            right=_smaller(self.right, other.right),
            keys=_join_padding(self.keys, other.keys, "lengths"),
            queries=_join_padding(self.queries, other.queries, "query_lengths"),
            key_ids=key_ids,
            query_ids=query_ids,
            allowed=_join_allowed(self.allowed, other.allowed),
        )

    def __repr__(self) -> str:
        parts = []
        for name, value in self._items():
            shown = f"{_kind(value)}{list(value.shape)}" if isinstance(value, Tensor) else value
            parts.append(f"{name}={shown}")
        return f"Mask({', '.join(parts)})"

    def __reduce__(self) -> tuple[type[Mask], tuple[Any, ...]]:
        return Mask, tuple(getattr(self, f.name) for f in fields(self))

    def _items(self) -> list[tuple[str, Any]]:
        pairs = ((f.name, getattr(self, f.name)) for f in fields(self))
        return [(name, value) for name, value in pairs if value is not None]

    @property
    def is_positional(self) -> bool:
        """Only positions decide: no tensor in it."""
        return self.keys is None and self.queries is None and self.key_ids is None and self.allowed is None

    @property
    def hides_nothing(self) -> bool:
        """Every query may attend to every key."""
        return (
            self.left is None
            and self.right is None
            and self.keys is None
            and self.key_ids is None
            and self.allowed is None
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors in it by name."""
        return {name: value for name, value in self._items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Mask:
        """The same rules, with their tensors on another device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in self.tensors.items()}
        return replace(self, **moved) if moved else self

    def select(self, batch: Any, heads: Any, queries: Any) -> Mask:
        """A bound mask's rules for some sequences, heads and queries; each index a slice or an index tensor.

        The rules about positions (`left`, `right`) stay: the caller keeps the queries' positions.
        """
        changed: dict[str, Any] = {}
        for name in ("keys", "queries"):
            value = getattr(self, name)
            if value is not None:
                value = value[batch]
                if name == "queries" and value.ndim == 2:
                    value = value[:, queries]
                changed[name] = value
        for name in ("key_ids", "query_ids"):
            value = getattr(self, name)
            if value is not None:
                value = value if value.shape[0] == 1 else value[batch]
                changed[name] = value[:, queries] if name == "query_ids" else value
        if self.allowed is not None:
            changed["allowed"] = take(self.allowed, (batch, heads, queries, None))
        return replace(self, **changed) if changed else self

    def bind(self, batch: int, num_heads: int, query_len: int, key_len: int) -> Mask:
        """The same rules, checked against [B, H, T, S], with all that is kept per query spelled out.

        Raises:
            MaskError: a rule whose sizes do not fit.
        """
        if self.is_positional:
            return self
        self._check(batch, num_heads, query_len, key_len)
        spelled: dict[str, Any] = {}
        if self.key_ids is not None and self.query_ids is None:
            spelled["query_ids"] = self.key_ids[:, key_len - query_len :]
        if self.queries is not None and self.queries.ndim == 1:
            spelled["queries"] = self.counted(query_len)
        return replace(self, **spelled) if spelled else self

    def _check(self, batch: int, num_heads: int, query_len: int, key_len: int) -> None:
        for value, length, name in (
            (self.keys, key_len, "lengths"),
            (self.queries, query_len, "query_lengths"),
        ):
            if value is not None:
                _check_padding(value, batch, length, name)
        for value, length, name in (
            (self.key_ids, key_len, "ids"),
            (self.query_ids, query_len, "query_ids"),
        ):
            if value is not None and (value.shape[0] not in (1, batch) or value.shape[1] != length):
                raise MaskError(
                    f"document {name} must cover the sequence: {list(value.shape[:2])} for batch {batch}, "
                    f"length {length}; give one id a position"
                )
        if self.key_ids is not None and self.query_ids is None and query_len > key_len:
            raise MaskError(
                f"document query_ids must be given when there are more queries than keys: {query_len} > "
                f"{key_len}; pass Mask.documents(ids, query_ids)"
            )
        if self.allowed is not None:
            full = (batch, num_heads, query_len, key_len)
            if any(have not in (1, want) for have, want in zip(self.allowed.shape, full, strict=True)):
                raise MaskError(
                    f"mask must broadcast to [B, H, T, S] = {list(full)}: got {list(self.allowed.shape)}; "
                    "a [B, S] padding mask goes in as Mask.padding(mask) or mask[:, None, None, :]"
                )

    def tile(self, at: Tensor, rows: Any, columns: Any, key_len: int) -> Tensor | None:
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
        if self.left is not None or self.right is not None:
            offset = spots - at[:, None]  # [t, s]: how far ahead of the query the key is
            if self.right is not None:
                seen = offset <= self.right
            if self.left is not None:
                seen = _both(seen, offset >= -self.left)
        if self.keys is not None:
            real = self.keys[:, columns] if self.keys.ndim == 2 else spots < self.keys[:, None]
            seen = _both(seen, real[:, None, None, :])  # [B, 1, 1, s]
        if self.key_ids is not None:
            assert self.query_ids is not None, "bind the mask first"
            same = self.query_ids[:, rows, None] == self.key_ids[:, None, columns]  # [B|1, t, s, N]
            seen = _both(seen, same.all(-1)[:, None])
        if self.allowed is not None:
            seen = _both(seen, take(self.allowed, (None, None, rows, columns)))
        return seen

    def span(self, first_at: int, last_at: int, rows: Any, key_len: int) -> tuple[int, int]:
        """Keys outside [start, stop) are hidden from all these queries: the part worth computing.

        Args:
            first_at, last_at: the smallest and largest position among the queries.
            rows: which queries they are.
        """
        start, stop = 0, key_len
        if self.left is not None:
            start = max(start, first_at - self.left)
        if self.right is not None:
            stop = min(stop, last_at + self.right + 1)
        for any_seen in self._columns_seen(rows):  # bool [S]
            found = any_seen[max(0, start) : max(0, stop)].nonzero()
            if not len(found):
                return 0, 0
            start, stop = start + int(found[0]), start + int(found[-1]) + 1
        return (start, stop) if start < stop else (0, 0)

    def _columns_seen(self, rows: Any) -> Iterable[Tensor]:
        """For each rule kept in tensors that can be read for free: the keys some of these queries see."""
        if self.keys is not None and can_read(self.keys):
            longest = self.keys
            if longest.ndim == 1:
                longest = torch.arange(int(longest.max())) < longest[:, None]
            yield longest.any(0)
        if self.key_ids is not None and can_read(self.key_ids):
            assert self.query_ids is not None, "bind the mask first"
            wanted = torch.unique(self.query_ids[:, rows, 0])
            yield torch.isin(self.key_ids[..., 0], wanted).any(0)
        if self.allowed is not None and self.allowed.shape[-1] > 1 and can_read(self.allowed):
            yield take(self.allowed, (None, None, rows, None)).any(-2).flatten(0, -2).any(0)

    def sees_any(self, at: Tensor, start: int, stop: int) -> Tensor:
        """Which queries at these positions see a key in [start, stop), as far as positions and padding say.

        bool [B or 1, t]; documents and dense masks are not asked.
        """
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


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """A mask argument as a `Mask`: None hides nothing, a tensor is `Mask.dense`."""
    if mask is None:
        return Mask()
    return mask if isinstance(mask, Mask) else Mask.dense(mask)


def take(tensor: Tensor, index: tuple[Any, ...], ones_stay: bool = True) -> Tensor:
    """Index dimensions one by one, each by a slice (a view), an index tensor, or None (left alone).

    With `ones_stay`, a dimension of size 1 broadcasts and is left alone, too.
    """
    for dim, chosen in enumerate(index):
        if chosen is None or (ones_stay and tensor.shape[dim] == 1):
            continue
        if isinstance(chosen, slice):
            tensor = tensor[(slice(None),) * dim + (chosen,)]
        else:
            tensor = tensor.index_select(dim, chosen.to(tensor.device))
    return tensor


def positions_of(index: Any, length: int, device: torch.device) -> Tensor:
    """The positions an index picks out of `length`, as int [n]."""
    if isinstance(index, slice):
        return torch.arange(*index.indices(length), device=device)
    spots: Tensor = index.to(device)
    return spots


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _smaller(a: int | None, b: int | None) -> int | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_integer(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _whole(number: Any, name: str) -> int:
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise MaskError(f"{name} must be a whole number: got {number!r}; count keys, e.g. 256")
    return operator.index(number)


def _as_padding(value: Tensor | Sequence[int], name: str) -> Tensor:
    lengths = torch.as_tensor(value)
    if lengths.dtype == torch.bool and lengths.ndim == 2:
        return lengths
    if not (_is_integer(lengths) and lengths.ndim == 1):
        raise MaskError(
            f"{name} must be integers [B] or bool [B, length]: got {_kind(lengths)}{list(lengths.shape)}; "
            "a 0/1 mask becomes bool with mask.bool()"
        )
    if can_read(lengths) and lengths.numel() and int(lengths.min()) < 0:
        raise MaskError(f"{name} must not be negative: got {int(lengths.min())}; use 0 for no tokens")
    return lengths


def _check_padding(value: Tensor, batch: int, length: int, name: str) -> None:
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


def _as_ids(value: Tensor | Sequence[int], name: str) -> Tensor:
    ids = torch.as_tensor(value)
    if not _is_integer(ids) or ids.ndim not in (1, 2):
        raise MaskError(
            f"document {name} must be integers [S] or [B, S]: got {_kind(ids)}{list(ids.shape)}; "
            "number the documents 0, 1, 2, ..."
        )
    return (ids if ids.ndim == 2 else ids[None])[..., None]  # [B or 1, S, 1]


def _as_allowed(value: Tensor) -> Tensor:
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


def _join_padding(a: Tensor | None, b: Tensor | None, name: str) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    shared = min(a.ndim, b.ndim)
    if a.shape[:shared] != b.shape[:shared]:
        raise _cannot_join(name, a.shape, b.shape)
    if a.ndim == b.ndim:
        return torch.minimum(a, b) if a.ndim == 1 else a & b
    lengths, real = (a, b) if a.ndim == 1 else (b, a)
    return real & (torch.arange(real.shape[-1], device=real.device) < lengths[:, None])


def _join_allowed(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is not None and b is not None:
        pairs = zip(a.shape, b.shape, strict=True)
        if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
            raise _cannot_join("dense masks", a.shape, b.shape)
    return _both(a, b)


def _join_ids(a: Mask, b: Mask) -> tuple[Tensor | None, Tensor | None]:
    if a.key_ids is None or b.key_ids is None:
        one = b if a.key_ids is None else a
        return one.key_ids, one.query_ids
    if (a.query_ids is None) != (b.query_ids is None):
        raise MaskError(
            "document masks joined with & must both have query_ids or neither: got one; "
            "give query_ids to both"
        )
    key_ids = _stack(a.key_ids, b.key_ids, "document ids")
    if a.query_ids is None or b.query_ids is None:
        return key_ids, None
    return key_ids, _stack(a.query_ids, b.query_ids, "document query_ids")


def _stack(a: Tensor, b: Tensor, name: str) -> Tensor:
    batch = max(a.shape[0], b.shape[0])
    if a.shape[1] != b.shape[1] or {a.shape[0], b.shape[0]} - {1, batch}:
        raise _cannot_join(name, a.shape[:2], b.shape[:2])
    return torch.cat([ids.expand(batch, -1, -1) for ids in (a, b)], dim=-1)


def _cannot_join(name: str, a: torch.Size, b: torch.Size) -> MaskError:
    return MaskError(
        f"{name} joined with & must agree in size: {list(a)} and {list(b)}; make both for the same sequences"
    )
