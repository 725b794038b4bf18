"""The rules of a `Mask`: a band around the query, padding, documents, a dense mask.

Each rule is a class, and an entry of `Mask.RULES`: it defines its fields, how two of its kind are joined, and
which keys of a tile it allows. Engines in plain torch use all rules in the same way, and need no change for a
new one; the kernels on a GPU need a field and a condition (CONTRIBUTING.md, "A rule of the mask").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .errors import MaskError
from .indexing import Index, fits, take, within

if TYPE_CHECKING:
    from .masks import Mask

MODES = torch._C._TorchDispatchModeKey
TRACED = "a tracer (torch.jit.trace, make_fx) records this call, and it records only plain operations"


def can_read(tensor: Tensor) -> bool:
    """Return True if reading this tensor's values is free: it is in CPU memory, and real."""
    return (
        tensor.is_cpu  # five times as fast as tensor.device.type
        and not torch.compiler.is_compiling()
        and not isinstance(tensor, FakeTensor)
        and not torch._C._are_functorch_transforms_active()
        and not is_traced()
    )


def is_traced() -> bool:
    """Return True while `torch.jit.trace` or `make_fx` records this call, or what is built on `make_fx`.

    A recording holds only operations. Decisions that Python makes from values, and results of our own
    autograd functions, would stay as they were for the example. For `torch.compile` and `torch.export` use
    `torch.compiler.is_compiling`.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._get_tracing_state() is not None:
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = (MODES.PROXY, MODES.FUNCTIONAL)  # AOTAutograd first runs a function in the second, then records
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in modes)


def smaller(a: int | None, b: int | None) -> int | None:
    """Return the tighter of two bounds; None is no bound."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def size_of(run: slice) -> int:
    """Return the number of positions in a slice."""
    size: int = run.stop - run.start
    return size


def dtype_name(tensor: Tensor) -> str:
    """Return a tensor's dtype without the leading `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def cannot_join(name: str, a: torch.Size, b: torch.Size) -> MaskError:
    """Return the error about two rules of a kind whose sizes differ."""
    return MaskError(
        f"{name} joined with & must agree in size: {list(a)} and {list(b)}; make both for the same sequences"
    )


Fields = Mapping[str, str]  # names, and the dimensions of each
Value = Tensor | int  # the value of a field of a mask, if it is set
Changes = dict[str, Any]  # fields and their new values, as a constructor takes them
Shape = tuple[int, int, int, int]  # [B, H, T, S]
Span = tuple[int, int]  # positions: first and last; of keys (`Rule.span`): [start, stop)


class Rule:
    """One kind of rule about who may attend to whom.

    A rule defines its fields, how two of its kind are joined, and what a tile of it looks like. All other
    methods have a default that is right for any rule; subclasses override them where they can do better.
    """

    # The fields of `Mask` that belong to this rule, and the dimensions of each, such as "bhts". A dimension
    # in lower case may have size 1 for all, one in upper case has its full size. "": the field is an int.
    fields: ClassVar[Fields]
    hides: ClassVar[bool] = True  # False: it only defines which queries count in means
    is_copied: ClassVar[bool] = True  # its tensors are small: each call has copies of its own
    is_band: ClassVar[bool] = False  # a band around the query, which kernels compute by themselves
    is_padding: ClassVar[bool] = False  # `Mask.sees_any` handles it, as it handles bands
    is_countable: ClassVar[bool] = False  # `second_pass.visible` counts its keys without reading each
    is_narrow: ClassVar[bool] = False  # a block of queries sees few keys, so that working by blocks pays off
    allocates_tile: ClassVar[bool] = True  # computing a tile allocates a bool tensor [t, s]

    def join(self, a: Mask, b: Mask) -> Changes:
        """Return this rule's fields in `a & b`. It is called for every rule, even if neither mask has it."""
        raise NotImplementedError

    def negated(self, mask: Mask) -> Changes | None:
        """Return its fields with shown and hidden keys exchanged; None if no rule does that."""
        return None

    def tile(self, mask: Mask, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        """Return which keys of a tile may be attended to: bool, broadcastable to [B, H, t, s].

        Args:
            at: int [t], positions of the queries.
            rows: the queries as an index along T.
            columns: the keys as an index along S.
            spots: int [s], positions of the keys.
        """
        raise NotImplementedError

    def check(self, mask: Mask, shape: Shape) -> None:
        """Raise `MaskError` where it does not fit [B, H, T, S]."""

    def spell_out(self, values: Changes, query_len: int, key_len: int) -> None:
        """Add the fields that a call leaves out and that follow from its sizes."""

    def placed(self, mask: Mask, at: Tensor) -> Changes:
        """Return the changed fields for chosen queries at these positions."""
        return {}

    def cut(self, mask: Mask, keys: slice) -> Changes:
        """Return the fields for a run of the keys, counted from 0 again.

        Tensors are cut along S, numbers stay as they are: a rule whose number counts keys from the first one
        must override this.
        """
        run: Changes = {}
        for name, dims in self.fields.items():
            value = getattr(mask, name)
            if isinstance(value, Tensor) and "s" in dims.lower():
                dim = dims.lower().index("s")
                run[name] = value if value.shape[dim] == 1 else value.narrow(dim, keys.start, size_of(keys))
        return run

    def span(self, mask: Mask, ends: Span, rows: Index, keys: Span) -> Span:
        """Return the part of keys [start, stop) that queries at positions `ends[0]` to `ends[1]` see."""
        return keys

    def added_shape(self, mask: Mask, shape: Shape) -> tuple[int, ...]:
        """Return its shape as a tensor that is added to the scores, [B or 1, H or 1, T or 1, S or 1]."""
        return 1, 1, *shape[2:]

    def for_kernels(self, mask: Mask) -> dict[str, Value | None]:
        """Return the arguments of the GPU kernels, by the names of `engines.gpu.tile.Rules`."""
        return {name: getattr(mask, name) for name in self.fields}

    def is_listed(self, mask: Mask) -> bool:
        """Return True if those kernels read it from a list of tiles that show any key."""
        return True


class Band(Rule):
    """Keys at most a number of positions before and after the query."""

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
        offset = spots - at[:, None]  # [t, s]: the position of the key minus that of the query
        if mask.right is None:
            assert mask.left is not None
            return offset >= -mask.left
        allowed = offset <= mask.right
        return allowed if mask.left is None else allowed & (offset >= -mask.left)

    def span(self, mask: Mask, ends: Span, rows: Index, keys: Span) -> Span:
        start, stop = keys
        if mask.left is not None:
            start = max(start, ends[0] - mask.left)
        if mask.right is not None:
            stop = min(stop, ends[1] + mask.right + 1)
        return start, stop

    def for_kernels(self, mask: Mask) -> dict[str, Value | None]:
        return {}  # both bounds are among the kernels' numbers

    def is_listed(self, mask: Mask) -> bool:
        return False


class Padding(Rule):
    """Only real keys."""

    fields: ClassVar[Fields] = {"keys": "BS"}
    is_padding = is_countable = True
    allocates_tile = False

    def join(self, a: Mask, b: Mask) -> Changes:
        return {"keys": join_padding(a.keys, b.keys, "lengths")}

    def negated(self, mask: Mask) -> Changes | None:
        assert mask.keys is not None
        return {"keys": ~mask.keys} if mask.keys.ndim == 2 else None  # the sequence length is not known yet

    def check(self, mask: Mask, shape: Shape) -> None:
        assert mask.keys is not None
        check_padding(mask.keys, shape[0], shape[3], "lengths")

    def tile(self, mask: Mask, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        keys = mask.keys
        assert keys is not None
        real = keys[:, columns] if keys.ndim == 2 else spots < keys[:, None]
        return real[:, None, None, :]  # [B, 1, 1, s]

    def cut(self, mask: Mask, keys: slice) -> Changes:
        assert mask.keys is not None
        if mask.keys.ndim == 2:
            return super().cut(mask, keys)
        return {"keys": (mask.keys - keys.start).clamp(0, size_of(keys))}

    def span(self, mask: Mask, ends: Span, rows: Index, keys: Span) -> Span:
        assert mask.keys is not None
        return within(mask._real_keys, *keys) if can_read(mask.keys) else keys

    def added_shape(self, mask: Mask, shape: Shape) -> tuple[int, ...]:
        return shape[0], 1, 1, shape[3]

    def for_kernels(self, mask: Mask) -> dict[str, Value | None]:
        keys = mask.keys
        assert keys is not None
        if keys.ndim == 2:
            return {"keys": keys.contiguous()}
        is_integer = keys.dtype in (torch.int64, torch.int32)
        return {"lengths": keys.contiguous() if is_integer else keys.to(torch.int32)}

    def is_listed(self, mask: Mask) -> bool:
        return mask.keys is not None and mask.keys.ndim == 2  # lengths only end a walk


class Counted(Rule):
    """The queries that count in means; it hides nothing."""

    fields: ClassVar[Fields] = {"queries": "BT"}
    hides = False

    def join(self, a: Mask, b: Mask) -> Changes:
        return {"queries": join_padding(a.queries, b.queries, "query_lengths")}

    def check(self, mask: Mask, shape: Shape) -> None:
        assert mask.queries is not None
        check_padding(mask.queries, shape[0], shape[2], "query_lengths")

    def spell_out(self, values: Changes, query_len: int, key_len: int) -> None:
        values["queries"] = real_positions(values["queries"], query_len)


def check_padding(value: Tensor, batch: int, length: int, name: str) -> None:
    """Raise `MaskError` where padding does not fit batch and length."""
    want = [batch] if value.ndim == 1 else [batch, length]
    if list(value.shape) != want:
        raise MaskError(
            f"{name} must fit batch and length: {list(value.shape)} for {want}; "
            "give one length per sequence, or one bool per position"
        )
    if value.ndim == 1 and can_read(value) and value.numel() and int(value.max()) > length:
        raise MaskError(
            f"{name} must be at most the sequence length: {int(value.max())} > {length}; cut or pad the input"
        )


def join_padding(a: Tensor | None, b: Tensor | None, name: str) -> Tensor | None:
    """Return the positions that are real under both."""
    if a is None or b is None:
        return b if a is None else a
    shared = min(a.ndim, b.ndim)
    if a.shape[:shared] != b.shape[:shared]:
        raise cannot_join(name, a.shape, b.shape)
    if a.ndim == b.ndim:
        return torch.minimum(a, b) if a.ndim == 1 else a & b
    length = a.shape[-1] if a.ndim == 2 else b.shape[-1]
    return real_positions(a, length) & real_positions(b, length)


def real_positions(padding: Tensor, length: int) -> Tensor:
    """Return which positions are real, bool [B, length], from that itself or from lengths [B]."""
    if padding.ndim == 2:
        return padding
    return torch.arange(length, device=padding.device) < padding[:, None]


def real_keys(mask: Mask) -> Tensor:
    """Return the keys that are real in some sequence, in order."""
    assert mask.keys is not None
    if mask.keys.ndim == 1:
        return torch.arange(int(mask.keys.max()), device="cpu")
    return mask.keys.any(0).nonzero().squeeze(-1)


class Documents(Rule):
    """Only keys with the same labels as the query."""

    fields: ClassVar[Fields] = {"key_ids": "bS", "query_ids": "bT"}
    is_countable = is_narrow = True

    def join(self, a: Mask, b: Mask) -> Changes:
        keys, queries = join_ids((a.key_ids, a.query_ids), (b.key_ids, b.query_ids))
        return {"key_ids": keys, "query_ids": queries}

    def check(self, mask: Mask, shape: Shape) -> None:
        batch, _, query_len, key_len = shape
        for value, length, name in ((mask.key_ids, key_len, "ids"), (mask.query_ids, query_len, "query_ids")):
            if value is not None and (not fits(value.shape[0], batch) or value.shape[1] != length):
                raise MaskError(
                    f"document {name} must cover the sequence: {list(value.shape[:2])} for batch {batch}, "
                    f"length {length}; give one id per position"
                )
        if mask.query_ids is None and query_len > key_len:
            raise MaskError(
                f"document query_ids must be given when there are more queries than keys: {query_len} > "
                f"{key_len}; pass Mask.documents(ids, query_ids)"
            )

    def spell_out(self, values: Changes, query_len: int, key_len: int) -> None:
        if "query_ids" in values:
            return
        keys = values["key_ids"]
        compared = not (torch.compiler.is_compiling() or is_traced())  # a graph may be for other lengths
        values["query_ids"] = keys if compared and query_len == key_len else keys[:, key_len - query_len :]

    def placed(self, mask: Mask, at: Tensor) -> Changes:
        assert mask.key_ids is not None
        if mask.query_ids is not None:
            return {}
        first, last, S = int(at.min()), int(at.max()), mask.key_ids.shape[1]
        if first < 0 or last >= S:
            raise MaskError(
                f"document query_ids must be given for queries outside the keys: positions {first} to {last} "
                f"of {S} keys; pass Mask.documents(ids, query_ids)"
            )
        return {"query_ids": mask.key_ids[:, at.to(mask.key_ids.device)]}

    def tile(self, mask: Mask, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        assert mask.key_ids is not None and mask.query_ids is not None, "bind the mask first"
        same = mask.query_ids[:, rows, None] == mask.key_ids[:, None, columns]  # [B|1, t, s, N]
        return same.all(-1)[:, None]

    def span(self, mask: Mask, ends: Span, rows: Index, keys: Span) -> Span:
        assert mask.key_ids is not None
        if not can_read(mask.key_ids):
            return keys
        first, beyond = mask._document_ends
        return max(keys[0], int(first[rows].min())), min(keys[1], int(beyond[rows].max()))

    def added_shape(self, mask: Mask, shape: Shape) -> tuple[int, ...]:
        assert mask.key_ids is not None and mask.query_ids is not None, "bind the mask first"
        return max(mask.key_ids.shape[0], mask.query_ids.shape[0]), 1, *shape[2:]

    def for_kernels(self, mask: Mask) -> dict[str, Value | None]:
        assert mask.key_ids is not None and mask.query_ids is not None, "bind the mask first"
        batch = max(mask.key_ids.shape[0], mask.query_ids.shape[0])  # either may be shared by all sequences
        keys, queries = (
            ids.to(torch.int64).transpose(1, 2).expand(batch, -1, -1).contiguous()
            for ids in (mask.key_ids, mask.query_ids)
        )
        return {"key_ids": keys, "query_ids": queries, "ids_batch": int(batch > 1)}


Labels = tuple[Tensor | None, Tensor | None]  # of keys, of queries


def join_ids(a: Labels, b: Labels) -> Labels:
    """Return labels that all must match, side by side."""
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
        raise cannot_join(name, a.shape[:2], b.shape[:2])
    return torch.cat([ids.expand(batch, -1, -1) for ids in (a, b)], dim=-1)


def document_ends(mask: Mask) -> tuple[Tensor, Tensor]:
    """Return, for each query, the first key of its document and the one after the last, in any sequence: [T].

    It uses the first label alone, so the range may be too large, never too small.
    """
    assert mask.key_ids is not None and mask.query_ids is not None, "bind the mask first"
    labels, S = mask.key_ids[..., 0], mask.key_ids.shape[1]
    names, place = torch.unique(labels, return_inverse=True)
    spots = torch.arange(S, device="cpu").expand_as(place).flatten()
    first = torch.full((len(names) + 1,), S, device="cpu")  # the last entry: no such document
    beyond = torch.zeros(len(names) + 1, dtype=torch.int64, device="cpu")
    first.scatter_reduce_(0, place.flatten(), spots, "amin")
    beyond.scatter_reduce_(0, place.flatten(), spots + 1, "amax")
    mine = mask.query_ids[..., 0].contiguous()  # [B or 1, T]
    document = torch.searchsorted(names, mine).clamp(max=len(names) - 1)
    document = torch.where(names[document] == mine, document, len(names))
    return first[document].amin(0), beyond[document].amax(0)


class Dense(Rule):
    """Any mask, as a tensor of the user."""

    fields: ClassVar[Fields] = {"allowed": "bhts"}
    is_copied = allocates_tile = False  # as large as the weights

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
                f"{_how_to_fit(mask.allowed.shape, shape)}"
            )

    def tile(self, mask: Mask, at: Tensor, rows: Index, columns: Index, spots: Tensor) -> Tensor:
        assert mask.allowed is not None
        return take(mask.allowed, (None, None, rows, columns))

    def span(self, mask: Mask, ends: Span, rows: Index, keys: Span) -> Span:
        assert mask.allowed is not None
        if mask.allowed.shape[-1] == 1 or not can_read(mask.allowed):
            return keys
        columns = take(mask.allowed, (None, None, rows, None)).any(-2).flatten(0, -2).any(0)  # [S]
        return within(columns.nonzero().squeeze(-1), *keys)

    def added_shape(self, mask: Mask, shape: Shape) -> tuple[int, ...]:
        assert mask.allowed is not None
        return tuple(mask.allowed.shape)


def _how_to_fit(size: torch.Size, shape: Shape) -> str:
    """Return advice for a dense mask that does not fit, by its shape."""
    batch, heads, query_len, key_len = shape
    *_, some, rows, columns = size
    if some == batch * heads and (rows, columns) == (query_len, key_len):
        return f"pass torch's [B * H, T, S] mask as mask.unflatten(0, ({batch}, {heads}))"
    if some == batch and (rows, columns) == (query_len, key_len):
        return "pass a [B, T, S] mask as mask[:, None]"
    if (rows, columns) == (key_len, query_len) and query_len != key_len:
        return "its queries and keys are swapped, use mask.mT"
    if rows == columns == key_len and query_len < key_len:
        return f"for the last queries of a square mask use mask[..., -{query_len}:, :]"
    return "pass a [B, S] padding mask as Mask.padding(mask.bool()), a [B, T, S] mask as mask[:, None]"
